"""A layer's call on one microbatch of its arguments, as in both passes of a split call."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

from ga_model.base._call_again import CallContext, PythonState, inside_of_call
from ga_model.base._internals import (
    forgetting_losses,
    is_built,
    keeping_call_context,
    layers_in,
    logits_of,
    mask_of,
    set_logits,
    set_mask,
)
from ga_model.base._internals_tf import NOT_INLINED
from ga_model.calls._call_arguments import Arguments
from ga_model.graphs import _lists
from ga_model.graphs._microbatch import rows_of
from ga_model.hearing._models import unrecorded
from ga_model.hearing._moments_heard import listener
from ga_model.hearing._python_state import is_of_library
from ga_model.recording._normalization import Listener

# Keras's losses take the input of these operations, if an output is one's result.
_ACTIVATIONS = {"Softmax": tf.nn.softmax, "Sigmoid": tf.sigmoid}


class MicrobatchCall:
    """Calls a layer on microbatches of its arguments, each time with the same state in Python.

    Args:
        layer: the layer. It is called as it is, with microbatches of its arguments.
        call: the layer's own `call`.
        arguments: what it was called with.
        training: whether it is called in training, or None.
        jit_compile: whether XLA compiles the passes of a microbatch.
        limit: how many microbatches really run, or None: outputs of the others are made up.

    Attributes:
        layer, arguments, training: as given.
        batch: the arguments with samples.
        num_microbatches: how many of them run: int64 scalar tensor.
        state: what each microbatch begins with in Python.
    """

    def __init__(
        self,
        layer: Any,
        call: Callable[..., Any],
        arguments: Arguments,
        training: Any,
        jit_compile: bool,
        limit: int | None,
    ) -> None:
        self.layer = layer
        self.arguments = arguments
        self.training = training
        self.batch = arguments.batch
        self.num_microbatches = self.batch.num_microbatches
        if limit is not None:
            self.num_microbatches = tf.minimum(self.num_microbatches, limit)
        self._is_limited = limit is not None
        self._jit_compile = jit_compile
        self._build(call)
        self.state = PythonState(layer)

    def _build(self, call: Callable[..., Any]) -> None:
        """Create the variables of layers, which cannot be created in a `StatelessScope`.

        A user's is drawn twice, to put back what a call changes in Python and keep what building
        makes.
        """
        if is_built(self.layer):
            return

        def built(leaves: list[Any]) -> list[Any]:
            args, kwargs = self.arguments.packed(leaves, self.arguments.shared)
            with unrecorded(), inside_of_call.set(True), listener.set(None):
                return leaves_of(call(*args, **kwargs))

        def draw() -> None:
            trace = tf.function(built, autograph=False)
            with forgetting_losses(self.layer):  # which are of that graph
                trace.get_concrete_function(self.batch.signature_of(None))

        before = PythonState(self.layer)
        draw()
        if not all(map(is_of_library, layers_in(self.layer))):
            built_state = PythonState(self.layer)
            draw()
            before.put_back_changed(built_state)

    def run(
        self, leaves: list[Any], shared: list[Any] | None = None, hears: Listener | None = None
    ) -> Any:
        """Return what the layer gives for a microbatch.

        Args:
            leaves: the arguments with samples.
            shared: the others, if they are not those of the call.
            hears: what listens to BatchNormalization layers, or None.
        """
        inputs = leaves[: len(self.batch.leaves)]
        shared = self.arguments.shared if shared is None else shared
        args, kwargs = self.arguments.packed(inputs, shared)
        self.state.put_back()
        with (
            unrecorded(),
            inside_of_call.set(True),
            listener.set(hears),
            keeping_call_context(),
        ):
            # Keras's own, where `__call__` is the user's: that one runs once, around all samples.
            call = functools.partial(keras.layers.Layer.__call__, self.layer, *args, **kwargs)
            return CallContext()(function=call, training=self.training)

    def added_losses(self, losses: list[Any], outputs: Any) -> list[Any]:
        """Return the losses but for what the layer adds of its outputs in `__call__`.

        That it does for all samples, when the call is through.
        """
        own = len(leaves_of(outputs)) if self.layer.activity_regularizer is not None else 0
        return losses[: len(losses) - own]

    def shares(self, losses: list[Any], is_sum: list[bool], leaves: list[Any]) -> list[Any]:
        """Return the losses that layers added for a microbatch as they enter the batch's."""
        share = tf.cast(rows_of(leaves[0]), tf.float64) / tf.cast(self.batch.rows, tf.float64)
        return [
            tf.reduce_sum(loss) if adds else loss * tf.cast(share, loss.dtype)
            for loss, adds in zip(losses, is_sum)
        ]

    def in_graph(self, function: Any, signature: list[Any], may_compile: bool = True) -> Any:
        """Return a function of a microbatch that is traced once where a graph is made.

        Args:
            function: the function.
            signature: of its arguments.
            may_compile: whether XLA compiles it if it compiles the step.
        """
        if tf.executing_eagerly():
            return function
        return tf.function(
            function,
            input_signature=signature,
            autograph=False,
            jit_compile=(self._jit_compile and may_compile) or None,
            # Inlined, it would be there twice, with the memory of both.
            experimental_attributes=NOT_INLINED,
        )

    def joined(self, lists: list[Any], tensors: list[Any]) -> list[Any]:
        """Return tensors of all samples, also where a few microbatches ran only.

        Args:
            lists: those of the microbatches, a list for each.
            tensors: those of the first microbatch.
        """
        joined = []
        for pieces, part in zip(lists, tensors):
            tensor = _lists.concatenated(pieces, part.dtype, part.shape[1:])
            if self._is_limited:
                missing = self.batch.rows - rows_of(tensor)
                shape = tf.concat([[missing], tf.shape(tensor, out_type=tf.int64)[1:]], 0)
                tensor = tf.concat([tensor, tf.zeros(shape, tensor.dtype)], 0)
            tensor.set_shape([self.batch.static_rows, *part.shape[1:]])
            joined.append(tensor)
        return joined


def leaves_of(outputs: Any) -> list[Any]:
    """Return the tensors in what a call gave."""
    return [leaf for leaf in tf.nest.flatten(outputs) if tf.is_tensor(leaf)]


def is_differentiable(tensor: Any) -> bool:
    """Return whether a tensor can have a gradient."""
    return bool(tensor.dtype.is_floating or tensor.dtype.is_complex)


def attached_to(outputs: list[Any]) -> list[tuple[int, str, Any]]:
    """Return what Keras's losses find at the outputs: number of the output, name, tensor.

    The name is "logits", "mask", or that of an operation.
    """
    found = []
    for number, output in enumerate(outputs):
        logits = logits_of(output)
        if logits is None and tf.is_symbolic_tensor(output) and output.op.type in _ACTIVATIONS:
            found.append((number, output.op.type, output.op.inputs[0]))
        of_output = {"logits": logits, "mask": mask_of(output)}
        found += [(number, name, t) for name, t in of_output.items() if t is not None]
    return found


def with_attached(output: Any, name: str, tensor: Any) -> Any:
    """Return an output with what `attached_to` has found at it."""
    if name in _ACTIVATIONS:
        return _ACTIVATIONS[name](tensor)
    if name == "mask":
        set_mask(output, tensor)
    else:
        set_logits(output, tensor)
    return output
