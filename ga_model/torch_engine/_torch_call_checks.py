"""Test whether a call can be split into microbatches, by trying it on a few samples.

Nothing is written, and nothing is drawn at random, that would show.
"""

from __future__ import annotations

from typing import Any

import keras
import torch

from ga_model.backends.torch.random_numbers import random_kept
from ga_model.base._call_again import PythonState
from ga_model.base._internals import layers_in, own_state, seeds
from ga_model.hearing._splitting import NotByRowsError
from ga_model.torch_engine._gradient_hooks import noting_hooks
from ga_model.torch_engine._own_gradients import nodes_of, not_linear
from ga_model.torch_engine._probes import (
    apart,
    are_alike,
    filled_in,
    is_close,
    is_whole_of,
    kind_of_addition,
    rounding_in,
    told_by,
)
from ga_model.torch_engine._tensors import Tensors
from ga_model.torch_engine._torch_arguments import Arguments
from ga_model.torch_engine._torch_microbatch_call import run_on
from ga_model.torch_engine._zero_weights import exchanged, floats_in, zero_weights


def kinds_of_losses(layer: Any, arguments: Arguments, training: Any) -> list[str | None]:
    """Check that a layer treats samples one by one, and return what the losses are that it adds.

    Args:
        layer: the layer.
        arguments: of its call.
        training: whether it trains, or None.

    Returns:
        For each loss "mean" or "sum", or None where it is zero, which does not tell.

    Raises:
        NotByRowsError: outputs for a sample depend on others, or a loss is neither; the call uses
            something that is no argument or weight, or does not take fewer samples.
    """
    layers = layers_in(layer)
    if any(True for part in layers for _ in part.buffers()):
        raise NotByRowsError("it has PyTorch buffers, which a call may write to")
    # Of numbers that are drawn, and of normalization, halves have others.
    draws = any(seeds(part) for part in layers) or any(
        isinstance(part, keras.layers.BatchNormalization) for part in layers
    )
    state, samples = PythonState(layer), _samples_apart(arguments)
    tensors_before = Tensors(layer, [v for part in layers for v in own_state(part)])
    rows = next(len(t) for t, yes in zip(samples, arguments.has_rows) if yes)

    weights = [weight for weight in layer.parameters() if weight.requires_grad]

    def run(start: int, stop: int) -> Any:
        tensors = [
            part.detach().requires_grad_(t.requires_grad)
            for part, t in zip(arguments.part(samples, slice(start, stop)), arguments.tensors)
        ]
        state.put_back()
        tensors_before.put_back()
        with noting_hooks() as hooks:
            given = run_on(layer, arguments, tensors, False if draws else training, [])
        if hooks:
            raise NotByRowsError("its tensors have hooks, which would see each microbatch")
        own = {id(t) for t in (*tensors, *layer.parameters())}
        if any(id(leaf) not in own for leaf in _leaves_of([*given.tensors, *given.losses])):
            raise NotByRowsError(
                "it uses a tensor or variable that is neither its input nor its weight"
            )
        if (name := not_linear([*given.tensors, *given.losses], stop - start)) is not None:
            raise NotByRowsError(f"its custom gradient {name!r} may mix samples")
        return [t.detach() for t in given.tensors], [told_by(v, weights) for v in given.losses]

    half = rows // 2

    def kinds() -> list[str | None]:
        outputs, losses = run(0, rows)
        parts = [run(0, half), run(half, rows)]
        rounded = None
        if error := rounding_in(layers, outputs):
            with exchanged(floats_in(layer), error):
                rounded, _ = run(0, rows)
        if not is_whole_of(outputs, [tensors for tensors, _ in parts], rows, rounded):
            again, _ = run(0, rows)
            # Otherwise it draws numbers that nobody can tell of.
            if len(again) != len(outputs) or all(map(is_close, outputs, again)):
                raise NotByRowsError("its outputs for one sample depend on other samples")
        triples = zip(losses, parts[0][1], parts[1][1], strict=True)
        return [kind_of_addition(whole, a, b, half / rows) for whole, a, b in triples]

    try:
        with random_kept(), torch.enable_grad(), _saving_as_always():
            found = kinds()
            if zeros := zero_weights(layer.trainable_weights):
                with exchanged(zeros):
                    found = filled_in(found, kinds())
    except NotByRowsError:
        raise
    except Exception as error:  # which a call of all samples will raise again, or get by
        reason = f"it raises a {type(error).__name__} for a different number of samples"
        raise NotByRowsError(reason) from error
    finally:
        state.put_back()
        tensors_before.put_back()
    if "other" in found:
        raise NotByRowsError("it adds a loss that is neither a mean nor a sum over samples")
    return found


def _saving_as_always() -> Any:
    """Return a context in which no hook sees what is saved, as `torch.utils.checkpoint` counts."""
    return torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor, lambda tensor: tensor)


def _samples_apart(arguments: Arguments) -> list[Any]:
    """Return the tensors of a microbatch that has different samples.

    Raises:
        NotByRowsError: there is none. It has no text, as the next batch may have one.
    """
    for share in arguments.shares():
        start = min(share.start, arguments.rows - 2)
        share = slice(max(start, 0), max(share.stop, start + 2))
        samples: list[Any] = apart(arguments.part(arguments.tensors, share))
        with_rows = [t for t, has_rows in zip(samples, arguments.has_rows) if has_rows]
        if not are_alike(with_rows):
            return samples
    raise NotByRowsError("")


def _leaves_of(tensors: list[Any]) -> list[Any]:
    """Return the leaves that PyTorch would give gradients to."""
    leaves = [tensor for tensor in tensors if tensor.grad_fn is None and tensor.requires_grad]
    variables = (getattr(node, "variable", None) for node in nodes_of(tensors))
    return leaves + [variable for variable in variables if variable is not None]
