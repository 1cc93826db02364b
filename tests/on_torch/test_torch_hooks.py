"""On PyTorch, hooks on weights, layers and tensors, which see or change what goes through."""

import keras
import pytest
from helpers import LIMIT
from keras import layers
from torch_step import Step
from training import difference_and_said


class Hooked(layers.Dense):
    """Clips the gradient of what it gives."""

    def call(self, x):
        outputs = super().call(x)
        if outputs.requires_grad:
            outputs.register_hook(clip)
        return outputs


def clip(gradient):
    return gradient.clamp(-0.02, 0.01)


def halve(gradient):
    return gradient * 0.5


def halve_in_place(weight):
    weight.grad.mul_(0.5)


def on_weights(hook):
    return lambda model: model.layers[0].kernel.value.register_hook(hook)


def on_sums(model):
    model.layers[0].kernel.value.register_post_accumulate_grad_hook(halve_in_place)


def centered(layer, inputs, outputs):
    return outputs - 0.5 * outputs.mean(0)


def on_outputs(model):
    model.layers[0].register_forward_hook(centered)


def on_inputs(model):
    model.layers[1].register_forward_pre_hook(lambda layer, x: centered(layer, None, x[0]))


def on_gradients_of_inputs(model):
    model.layers[1].register_full_backward_hook(
        lambda layer, of_inputs, of_outputs: tuple(g.clamp(-0.02, 0.01) for g in of_inputs)
    )


def on_tensors(model):
    """Its layer has them."""


HOOKS = {
    "clip": on_weights(clip),
    "sums": on_sums,
    "linear": on_weights(halve),
    "outputs": on_outputs,
    "inputs": on_inputs,
    "gradients": on_gradients_of_inputs,
    "tensors": on_tensors,
}
RUNS_WHOLE = {
    "outputs": "it has forward hooks, which",
    "inputs": "it has forward hooks, which",
    "gradients": "it has backward hooks, which",
    "tensors": "its tensors have hooks, which",
}
every = pytest.mark.parametrize("kind", HOOKS)


def compare(kind, base, settings, rows=12):
    def make():
        first = Hooked if kind == "tensors" else layers.Dense
        return base([keras.Input((4,)), first(5, activation="tanh"), layers.Dense(2)])

    return difference_and_said(make, settings, rows, HOOKS[kind])


@pytest.mark.every_case
@every
@pytest.mark.parametrize("base", [Step, keras.Sequential])
def test_a_split_batch_is_exact(kind, base):
    difference, said = compare(kind, base, {"microbatch_size": 5})
    assert difference <= LIMIT
    # Their calls run as a whole, which costs memory.
    assert [RUNS_WHOLE[kind] in text for text in said] == [True] * (kind in RUNS_WHOLE)


@pytest.mark.every_case
@every
def test_what_differs_in_a_window_is_told_and_nothing_else(kind):
    difference, said = compare(kind, keras.Sequential, {"accumulation_steps": 3}, rows=4)
    if kind in ("sums", "linear"):
        assert (said, difference <= LIMIT) == ([], True)
    else:
        assert ["does not train as the full batch" in text for text in said] == [True]
        assert difference > 1e-3
