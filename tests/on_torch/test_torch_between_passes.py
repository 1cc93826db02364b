"""On PyTorch, what changes between a call and its gradient, and between calls of one batch."""

import dataclasses
import functools

import keras
import pytest
from helpers import (
    LIMIT,
    relative_difference,
)
from keras import layers
from torch_step import Step, torch
from training import difference_and_said, train_and_hear

from ga_model.base._call_again import PythonState

UNLIKE = "A window of microbatches does not train as the full batch"


class WritesToInputs(Step):
    def forward_loss(self, x, y):
        x = x.clone()
        loss = super().forward_loss(x, y)
        x.mul_(2.0)
        return loss


class Scaled(layers.Dense):
    """Has a variable that the step sets."""

    def build(self, shape):
        super().build(shape)
        self.scale = self.add_weight(shape=(), initializer="ones", trainable=False, name="scale")

    def call(self, x):
        return super().call(x * self.scale)


class Assigns(Step):
    def forward_loss(self, x, y):
        loss = super().forward_loss(x, y)
        self.layers[0].scale.assign(3.0)
        return loss


class UnderAutocast(Step):
    def forward_loss(self, x, y):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            outputs = self(x, training=True)
        return torch.square(outputs.float() - y).mean()


class AllUnderAutocast(Step):
    def train_step(self, data):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return super().train_step(data)


@dataclasses.dataclass
class Outputs:
    values: object


class GivesObjects(layers.Dense):
    def call(self, x):
        return Outputs(super().call(x))


class OfObjects(Step):
    def forward_loss(self, x, y):
        return torch.square(self.layers[1](self.layers[0](x).values) - y).mean()

    def call(self, x, training=None):
        return self.layers[1](self.layers[0](x).values)


class Fades(layers.Dense):
    """Counts its calls in Python, and gives less with each."""

    calls = 0

    def call(self, x):
        self.calls += 1
        return super().call(x) / (1.0 + 0.2 * self.calls)


def make_of(base, first):
    return lambda: base([keras.Input((4,)), first(5, activation="tanh"), layers.Dense(2)])


def compare(base, first, settings, rows=12):
    return difference_and_said(make_of(base, first), settings, rows)


@pytest.mark.parametrize(
    ("base", "first", "name"),
    [(Assigns, Scaled, "scale"), (WritesToInputs, layers.Dense, "input")],
)
def test_what_is_changed_before_the_gradient_is_refused_by_name(base, first, name):
    with pytest.raises(RuntimeError, match=f"(?s)Received.*{name}.*was modified in between"):
        train_and_hear(make_of(base, first), {"microbatch_size": 5})


NOTED = set()


class Notes(layers.Dense):
    def call(self, x):
        if x.device.type != "meta":  # to be built
            NOTED.add((torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu")))
        return super().call(x)


@pytest.mark.parametrize("base", [UnderAutocast, AllUnderAutocast])
def test_autocast_is_that_of_the_call(base):
    NOTED.clear()
    start, weights, said = train_and_hear(make_of(base, Notes), {"microbatch_size": 5})
    _, expected, _ = train_and_hear(make_of(base, layers.Dense), {})
    # Gradients of microbatches are rounded to bfloat16, each of them.
    assert relative_difference(weights, expected, start) <= 2**-8
    assert (said, NOTED) == ([], {(True, torch.bfloat16)})


@pytest.mark.every_case
@pytest.mark.parametrize("base", [UnderAutocast, AllUnderAutocast])
def test_what_autocast_rounds_in_a_window_is_not_told(base):
    difference, said = compare(base, layers.Dense, {"accumulation_steps": 3}, rows=4)
    assert difference <= 2e-2  # what bfloat16 rounds
    assert said == []


class Checkpointed(Step):
    """Computes the activations again when it takes the gradient."""

    is_reentrant = False

    def forward_loss(self, x, y):
        outputs = torch.utils.checkpoint.checkpoint(
            functools.partial(self, training=True),
            x.clone().requires_grad_(),
            use_reentrant=self.is_reentrant,
        )
        return torch.square(outputs - y).mean()


class Reentrant(Checkpointed):
    is_reentrant = True


@pytest.mark.every_case
@pytest.mark.parametrize("settings", [{"microbatch_size": 5}, {"accumulation_steps": 3}], ids=str)
@pytest.mark.parametrize("base", [Checkpointed, Reentrant])
def test_a_checkpoint_of_the_step_is_exact(base, settings):
    rows = 12 // settings.get("accumulation_steps", 1)
    difference, said = compare(base, layers.Dense, settings, rows)
    assert (difference <= LIMIT, said) == (True, [])


def test_outputs_in_objects_run_whole_exactly_and_are_told():
    difference, said = compare(OfObjects, GivesObjects, {"microbatch_size": 5})
    assert difference <= LIMIT
    assert ["returns tensors in an object that cannot" in text for text in said] == [True]


def test_what_calls_count_in_python_is_counted_once_per_batch():
    difference, said = compare(keras.Sequential, Fades, {"microbatch_size": 5})
    assert (said, difference <= LIMIT) == ([], True)


def test_what_calls_count_in_a_window_is_told():
    difference, said = compare(keras.Sequential, Fades, {"accumulation_steps": 3}, rows=4)
    assert difference > 1e-3
    assert [UNLIKE in text for text in said] == [True]


def normalized(units, **arguments):
    return layers.SpectralNormalization(layers.Dense(units, **arguments))


@pytest.mark.every_case
@pytest.mark.parametrize("base", [keras.Sequential, Step])
def test_a_layer_that_writes_to_its_weights_is_exact_where_a_batch_is_split(base):
    difference, said = compare(base, normalized, {"microbatch_size": 5})
    assert difference <= LIMIT
    assert ["it writes to ['" in text for text in said] == [True]


@pytest.mark.every_case
@pytest.mark.parametrize("base", [keras.Sequential, Step])
def test_a_layer_that_writes_to_its_weights_is_told_of_in_windows(base):
    class WithLoss(base):
        def forward_loss(self, x, y):
            return self.compute_loss(x, y, self(x, training=True))

    difference, said = compare(WithLoss, normalized, {"accumulation_steps": 3}, rows=4)
    assert difference > 1e-4
    assert [UNLIKE in text for text in said] == [True]


class Codes(layers.Dense):
    """Keeps an average, as codes of a VQ-VAE."""

    def build(self, shape):
        super().build(shape)
        self.average = self.add_weight(shape=(4,), trainable=False, initializer="ones")

    def call(self, x):
        outputs = super().call(x * self.average)
        self.average.assign(0.5 * self.average + 0.5 * keras.ops.mean(x, axis=0))
        return outputs


class CountsAndCodes(Codes, Fades):
    """Is found after its first microbatch not to go by microbatches, and counts all the same."""


def test_what_was_counted_in_vain_is_not_counted():
    difference, _ = compare(keras.Sequential, CountsAndCodes, {"microbatch_size": 5})
    assert difference <= LIMIT


def test_a_state_that_a_layer_keeps_is_exact_where_a_batch_is_split():
    difference, said = compare(keras.Sequential, Codes, {"microbatch_size": 5})
    assert difference <= LIMIT
    assert ["it writes to ['" in text for text in said] == [True]


def test_a_state_that_a_layer_keeps_is_told_of_with_both_settings():
    settings = {"accumulation_steps": 3, "microbatch_size": 3}
    difference, said = compare(keras.Sequential, Codes, settings, rows=4)
    assert difference > 1e-4
    assert sum(UNLIKE in text for text in said) == 1


def test_what_is_put_back_costs_little_where_keras_keeps_nothing():
    """A layer of Keras has more than 20 lists and dicts, most of which are empty."""
    model = keras.Sequential([keras.Input((4,)), *[layers.Dense(4) for _ in range(9)]])
    model.seen, model.by_name = [], {"all": [1]}
    state = PythonState(model)
    assert len(state._contents) < 12 * len(model.layers)
    assert not list(state.changed())
    model.seen.append(1)
    model.by_name["all"].append(2)
    model.layers[0]._losses.append(3)
    assert [name for _, name, _ in state.changed()] == ["seen", "_losses"]
    model.by_name["other"] = []
    model.last = 4
    assert [name for _, name, _ in state.changed()] == ["seen", "by_name", "last", "_losses"]
    state.put_back()
    assert (model.seen, model.by_name, hasattr(model, "last")) == ([], {"all": [1]}, False)
    assert model.layers[0]._losses == []
    model.by_name = {}
    assert [name for _, name, _ in state.changed()] == ["by_name"]
