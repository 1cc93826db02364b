"""One call of a layer on many samples, with the activations of one microbatch.

With outputs y_i = f(x_i, w) of microbatches i, and whatever L(y_1, y_2, ...) a step makes of all of
them,

    dL/dw = sum_i (dy_i/dw)^T dL/dy_i        dL/dx_i = (dy_i/dx_i)^T dL/dy_i

So the samples go forward twice. The first pass keeps the outputs and no activations. The step goes
on with the outputs of all samples, and its gradient with respect to them comes back through a
custom gradient. The second pass takes one microbatch after the other, with a tape of its own, and
seeds it with the microbatch's part of that gradient. (Gao et al., "Scaling Deep Contrastive
Learning Batch Size under Memory Limited Setup", https://arxiv.org/abs/2101.06983.)

Both passes compute the same outputs. The first one changes what layers change when they are called
(the seeds of dropout, running statistics), microbatch by microbatch, and notes what it found. The
second one begins each microbatch with that. Everything else has the value that it had in the first
pass, whatever the step has assigned since: weights are arguments of the custom gradient. In the
end all state is what the first pass and the step have left (`_call_state`).

Losses that layers add are outputs, too: the mean over microbatches of a scalar, by their samples,
and the sum of anything else (see `_weights`). And so is what Keras finds at an output: its mask,
and the logits of a softmax or a sigmoid.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import keras
import tensorflow as tf

from ga_model.base._context import graph_being_made
from ga_model.base._identity import is_in, unique
from ga_model.base._internals import raw
from ga_model.base._internals_tf import (
    has_forward_derivatives,
    is_followed,
    record_on_tapes,
    unseen_by_tapes,
)
from ga_model.calls._call_state import read
from ga_model.calls._first_pass import FirstPass
from ga_model.calls._microbatch_call import MicrobatchCall, is_differentiable, with_attached
from ga_model.calls._second_pass import SecondPass
from ga_model.hearing._splitting import NotByRowsError
from ga_model.reading._writes import unseen
from ga_model.recording._recorder import note_call


class Turns:
    """Lets the passes of several calls run one after the other, with one microbatch at a time."""

    def __init__(self) -> None:
        self._last: list[Any] = []
        self._graph: Any = None

    @contextlib.contextmanager
    def turn(self, results: list[Any]) -> Iterator[None]:
        """Let what is made here begin when the turn before is through.

        Args:
            results: tensors of this turn, that are appended in it.
        """
        if (graph := graph_being_made()) is None:
            yield
            return
        with tf.control_dependencies(self._last if graph is self._graph else []):
            yield
        self._last, self._graph = results, graph


class SplitCall:
    """A call of a layer that goes by microbatches: its two passes, and what tapes see of them.

    Args:
        call: calls the layer on a microbatch.
        turns: of all calls of the step.

    Attributes:
        normalizing: as that of `FirstPass`, known when the outputs are.
    """

    def __init__(self, call: MicrobatchCall, turns: Turns) -> None:
        self.normalizing: tuple[list[str], list[str]] = ([], [])
        self._call = call
        self._turns = turns
        self._first = FirstPass(call)
        self._is_used: list[bool] = []  # which outputs and losses have a gradient

    def outputs(self) -> Any:
        """Make the call, and return what it gives. Tapes see where it is from.

        Losses that layers added are then among those of the layer.

        Raises:
            NotByRowsError: as `FirstPass.check`; or forward derivatives are taken of the call.
        """
        call, first = self._call, self._first
        variables = unique(call.layer.variables)
        # As they are: Keras would cast them to what the layer computes in.
        values = [tf.convert_to_tensor(raw(variable)) for variable in variables]
        inputs = [*call.batch.leaves, *call.arguments.shared]
        inputs = [t for t in inputs if isinstance(t, tf.Tensor) and is_differentiable(t)]
        if has_forward_derivatives([*inputs, *values]):
            raise NotByRowsError("its forward-mode derivatives are taken")
        sources = [v for v, value in zip(variables, values) if is_followed(value)]
        values = [value for value in values if is_followed(value)]
        inputs = [tensor for tensor in inputs if is_followed(tensor)]
        results: list[Any] = []
        try:
            first.check()
        except NotByRowsError:
            call.state.put_back()
            raise
        with unseen_by_tapes(), self._turns.turn(results), unseen():
            first.run()
            results += first.outputs
            others = [*first.form.changed, *sources]
            kept = read(v for v in variables if not is_in(v, others))
        self.normalizing = first.normalizing
        tensors = [*first.outputs, *first.losses]
        if inputs or values:
            second = SecondPass(call, first, inputs, sources, values, kept)
            tensors = self._with_gradient(tensors, [*inputs, *values], second)
        return self._packed(tensors)

    def _packed(self, tensors: list[Any]) -> Any:
        """Return tensors as the call returns them, and add the losses to the layer."""
        form, count = self._first.form, len(self._first.outputs)
        tensors, losses = tensors[:count], tensors[count:]
        count -= len(form.attached)
        outputs = tensors[:count]
        for (number, name), tensor in zip(form.attached, tensors[count:]):
            outputs[number] = with_attached(outputs[number], name, tensor)
        losses = [v[tf.newaxis] if had else v for v, had in zip(losses, form.had_axes)]
        note_call([], losses, form.is_sum)
        if losses:
            keras.layers.Layer.add_loss(self._call.layer, losses)  # a Functional's own refuses
        remaining = iter(outputs)
        return tf.nest.map_structure(
            lambda leaf: next(remaining) if tf.is_tensor(leaf) else leaf, form.outputs
        )

    def _with_gradient(
        self, tensors: list[Any], sources: list[Any], second: SecondPass
    ) -> list[Any]:
        """Return the outputs and losses so that the second pass is their gradient.

        Args:
            tensors: outputs and losses.
            sources: the inputs and the values of weights that a tape follows.
            second: the second pass.
        """
        numbers = [i for i, tensor in enumerate(tensors) if is_differentiable(tensor)]
        self._is_used = [False for _ in numbers]

        def gradients(*upstream: Any) -> Any:
            if "loop_body" in tf.get_current_name_scope().split("/"):
                raise NotImplementedError(_jacobian_message(self._call.layer.name))
            is_used, self._is_used = self._is_used, [False for _ in numbers]  # for the next tape
            results: list[Any] = []
            with self._turns.turn(results), self._call.state.kept(), unseen():
                found = second.gradients(upstream, is_used)
                results += tf.nest.flatten(found, expand_composites=True)
            results[:] = [tensor for tensor in results if tensor is not None]
            return found

        def noting(place: int) -> Any:
            def gradient(upstream: Any) -> Any:
                self._is_used[place] = True
                return [upstream]

            return gradient

        results = _recorded([tensors[i] for i in numbers], sources, gradients)
        tensors = list(tensors)
        for place, (i, tensor) in enumerate(zip(numbers, results)):
            # It notes if it gets a gradient. A tape gives zeros for none.
            tensors[i] = _recorded([tensor], [tensor], noting(place))[0]
        return tensors


def _recorded(tensors: list[Any], sources: list[Any], gradient: Callable[..., Any]) -> list[Any]:
    """Return tensors of which tapes take the gradient by a function.

    `tf.custom_gradient` would keep the function, and all that it knows, for ever.

    Args:
        tensors: the tensors.
        sources: what they come from, for the tapes.
        gradient: takes gradients with respect to the tensors, and returns those of the sources.
    """
    with unseen_by_tapes():
        outputs = [tf.identity(tensor) for tensor in tensors]
    record_on_tapes("SplitCall", outputs, sources, gradient)
    return outputs


def _jacobian_message(layer: str) -> str:
    return (
        "Jacobians of a call that is split into microbatches cannot be vectorized. "
        f"Received: the Jacobian of a call of {layer!r}. "
        "Pass `experimental_use_pfor=False` to `tape.jacobian` or `tape.batch_jacobian`, "
        "or set `microbatch_size=None`."
    )
