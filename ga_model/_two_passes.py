"""A batch's outputs, and gradients through them, with the activations of one microbatch.

A loss that compares rows needs the outputs of the whole batch at once, but its gradient does not
need the whole batch's activations at once. With outputs y_i = f(x_i, w) of microbatches i and a
loss L(y_1, y_2, ...) of all of them,

    dL/dw = sum_i (dy_i/dw)^T dL/dy_i

So the batch goes forward twice. The first pass keeps the outputs and no activations. The loss and
its gradient with respect to the outputs are then those of the whole batch, computed by Keras's own
`train_step`, to which the outputs are what the model's call returned. The second pass takes one
microbatch after the other, with a tape, and seeds the tape with the microbatch's rows of that
gradient. (Gao et al., "Scaling Deep Contrastive Learning Batch Size under Memory Limited Setup",
https://arxiv.org/abs/2101.06983.)

Both passes have to compute the same outputs. The first one changes whatever a layer changes when it
is called (the seeds of dropout, running statistics), microbatch by microbatch; what it found is
kept for the second one, which changes nothing. Losses that layers add are outputs, too: the mean
over microbatches of a scalar, by their rows, and the sum of anything else (see `_weights`). And so
is what Keras's losses find at an output: its mask, and the logits of a softmax or a sigmoid.
"""

from __future__ import annotations

import re
from typing import Any, NamedTuple

import keras
import tensorflow as tf

from ga_model import _lists, _sums, _validate
from ga_model._loop import loop
from ga_model._microbatch import Batch
from ga_model._recorder import unrecorded
from ga_model._sums import GradientSum
from ga_model._weights import num_rows

# Operations that draw other numbers every time that they run.
_UNSEEDED = re.compile(
    "Random(?!.*Dataset)|Stateful(Uniform|Standard|Truncated|Random)|TruncatedNormal|Multinomial"
    "|ParameterizedTruncatedNormal|RngReadAndSkip|SampleDistorted"
)


# Keras's losses take the input of these operations, if an output is one's result.
_ACTIVATIONS = {"Softmax": tf.nn.softmax, "Sigmoid": tf.sigmoid}


class _Changes(keras.StatelessScope):
    """A scope that keeps what a call changes from its variables, and knows which these are."""

    def __init__(self) -> None:
        super().__init__(collect_losses=True)
        self.variables: list[Any] = []

    def add_update(self, update: Any) -> None:
        if not any(update[0] is variable for variable in self.variables):
            self.variables.append(update[0])
        super().add_update(update)


class _Part(NamedTuple):
    """What the first pass gave for one microbatch, or for several: then in lists (`_lists`).

    Attributes:
        outputs: tensors of shape (rows, ...), the model's outputs and what is attached to them.
        found: the value that each changed variable had before.
        losses: what layers added, as scalars that are summed over microbatches.
    """

    outputs: list[Any]
    found: list[Any]
    losses: list[Any]


class TwoPasses:
    """The call of a model on a batch that is split.

    Args:
        model: the model, which has the settings.
        x: the inputs: a nest of tensors of shape (rows, ...).
        size: rows per microbatch.
    """

    def __init__(self, model: Any, x: Any, size: Any) -> None:
        self._model = model
        self._batch = Batch(x, size)
        self._structure: Any = None  # of the outputs
        self._attached: list[tuple[int, str]] = []  # the number of an output, what is attached
        self._is_sum: list[bool] = []  # of the losses that layers added
        self._changed: list[Any] = []  # variables

    def first(self) -> None:
        """Run the first pass. It is to be out of sight of the tape that takes gradients."""
        batch = self._batch
        _build(self._model, batch)
        function = self._in_graph(self._first, [batch.signature_of_any_rows])

        def part_of(index: Any) -> _Part:
            leaves = batch.microbatch(index)
            part: _Part = function(leaves)
            with tf.control_dependencies(self._checks(part.outputs, leaves)):
                return part._replace(outputs=[tf.identity(tensor) for tensor in part.outputs])

        part = part_of(tf.zeros((), tf.int64))
        tensors = part.outputs
        lists = [_lists.empty(t.dtype, [None, *t.shape[1:]]) for t in tensors]
        lists += [_lists.empty(v.dtype, v.shape) for v in part.found]

        def with_lists(lists: list[Any], part: _Part) -> list[Any]:
            pairs = zip(lists, [*part.outputs, *part.found])
            return [_lists.pushed(pieces, tensor) for pieces, tensor in pairs]

        def add(index: Any, so_far: Any) -> Any:
            lists, losses = so_far
            part = part_of(index)
            return with_lists(lists, part), [a + b for a, b in zip(losses, part.losses)]

        so_far = (with_lists(lists, part), part.losses)
        lists, self._losses = loop(add, so_far, batch.num_microbatches)
        self._outputs = [
            _lists.concatenated(pieces, tensor.dtype, tensor.shape[1:])
            for pieces, tensor in zip(lists, tensors)
        ]
        self._found = lists[len(tensors) :]

    def outputs(self) -> Any:
        """Return what the model's call gives for the whole batch. A tape sees where it is from.

        Losses that layers added are then among those of the model.
        """
        trained = self._model.trainable_variables
        tensors = [*self._outputs, *self._losses]
        is_float = [tensor.dtype.is_floating for tensor in tensors]
        floats = [tensor for tensor, flag in zip(tensors, is_float) if flag]

        @tf.custom_gradient  # type: ignore[untyped-decorator]
        def of_weights(*values: Any) -> Any:
            def gradients(*upstream: Any) -> Any:
                return [*self._second_pass(upstream), *[None for _ in floats]]

            return [tf.identity(value) for value in values[len(trained) :]], gradients

        with_gradient = iter(of_weights(*[tf.convert_to_tensor(v.value) for v in trained], *floats))
        tensors = [next(with_gradient) if flag else t for t, flag in zip(tensors, is_float)]
        tensors, losses = tensors[: len(self._outputs)], tensors[len(self._outputs) :]
        count = len(tensors) - len(self._attached)
        outputs = tensors[:count]
        for (number, name), tensor in zip(self._attached, tensors[count:]):
            if name in _ACTIVATIONS:
                outputs[number] = _ACTIVATIONS[name](tensor)
            else:
                setattr(outputs[number], name, tensor)
        losses = [v[tf.newaxis] if is_sum else v for v, is_sum in zip(losses, self._is_sum)]
        keras.layers.Layer.add_loss(self._model, losses)  # a Functional model's own refuses
        return tf.nest.pack_sequence_as(self._structure, outputs)

    def _first(self, leaves: list[Any]) -> _Part:
        """Call the model on one microbatch, and note what it changes."""
        with _Changes() as scope:
            outputs = _called(self._model, self._batch.pack(leaves))
        _check_call(self._model.name, tf.nest.flatten(outputs), scope.variables)
        attached = _attached(outputs)
        self._structure, self._changed = outputs, scope.variables
        self._attached = [(number, name) for number, name, _ in attached]
        self._is_sum = [loss.shape.rank != 0 for loss in scope.losses]
        found = [tf.identity(variable.value) for variable in scope.variables]
        for variable in scope.variables:
            variable.assign(scope.get_current_value(variable))
        tensors = [*tf.nest.flatten(outputs), *[tensor for _, _, tensor in attached]]
        return _Part(tensors, found, self._shares(scope.losses, leaves))

    def _second(self, leaves: list[Any], found: list[Any]) -> GradientSum:
        """Return the gradients of one microbatch.

        Args:
            leaves: of inputs and, as far as they are floats, gradients with respect to outputs;
                then those with respect to losses, scalars.
            found: the values of the variables that the first pass changed.
        """
        variables = self._model.trainable_variables
        inputs = len(self._batch.leaves)
        with tf.GradientTape() as tape:
            with keras.StatelessScope(list(zip(self._changed, found)), True) as scope:
                outputs = _called(self._model, self._batch.pack(leaves[:inputs]))
            tensors = [*tf.nest.flatten(outputs), *[tensor for _, _, tensor in _attached(outputs)]]
            tensors += self._shares(scope.losses, leaves)
            targets = [tensor for tensor in tensors if tensor.dtype.is_floating]
        gradients = tape.gradient(targets, variables, output_gradients=leaves[inputs:])
        one = tf.ones((), tf.float64)
        return GradientSum.of(gradients, variables, _sums.Weight(one, one), scale=False)

    def _second_pass(self, upstream: Any) -> list[Any]:
        """Return the gradients of the weights, from those of the outputs and losses."""
        variables = self._model.trainable_variables
        batch = Batch([self._batch.leaves, list(upstream)], self._batch.size)
        found = [tf.TensorSpec(v.shape, v.dtype) for v in self._changed]
        function = self._in_graph(self._second, [batch.signature_of_any_rows, found])

        def gradients(index: Any) -> GradientSum:
            found = [
                _lists.item(values, index, tf.as_dtype(variable.dtype), variable.shape)
                for values, variable in zip(self._found, self._changed)
            ]
            return function(batch.microbatch(index), found)  # type: ignore[no-any-return]

        first = gradients(tf.zeros((), tf.int64)).begin(variables)
        total = loop(
            lambda index, so_far: so_far.plus(gradients(index), variables),
            first,
            batch.num_microbatches,
        )
        return total._with_slices(variables).mean(variables, is_sum=True)  # type: ignore[no-any-return]

    def _shares(self, losses: list[Any], leaves: list[Any]) -> list[Any]:
        """Return the losses that layers added for a microbatch as they enter the batch's."""
        rows = num_rows(self._batch.pack(leaves[: len(self._batch.leaves)]))
        share = tf.cast(rows, tf.float64) / tf.cast(self._batch.rows, tf.float64)
        return [
            tf.reduce_sum(loss) if is_sum else loss * tf.cast(share, loss.dtype)
            for loss, is_sum in zip(losses, self._is_sum)
        ]

    def _checks(self, outputs: list[Any], leaves: list[Any]) -> list[Any]:
        """Return assertions that the outputs of a microbatch are those of its rows."""
        x = self._batch.pack(leaves)
        rows, all_rows = num_rows(x), self._batch.rows
        is_static = all(leaf.shape[1:].is_fully_defined() for leaf in tf.nest.flatten(leaves))
        name = self._model.name
        checks = []
        for tensor in outputs:
            shape = tf.shape(tensor, out_type=tf.int64)
            message = _validate.outputs_message(name, tensor.shape)
            checks.append(tf.debugging.assert_equal(shape[0], rows, message))
            for axis, size in enumerate(tensor.shape[1:], start=1):
                if size is None and is_static:  # then it follows from the number of rows
                    is_whole = tf.equal(rows, all_rows)
                    is_other = tf.logical_or(is_whole, tf.not_equal(shape[axis], rows))
                    checks.append(tf.debugging.Assert(is_other, [message]))
        return [check for check in checks if check is not None]

    def _in_graph(self, function: Any, signature: list[Any]) -> Any:
        """Return a function of a microbatch that is traced once where a graph is made."""
        if tf.executing_eagerly():
            return function
        return tf.function(
            function,
            input_signature=signature,
            autograph=False,
            jit_compile=self._model.jit_compile or None,
            # Inlined, it would be there twice, with the memory of both.
            experimental_attributes={"_noinline": True},
        )


def _called(model: Any, x: Any) -> Any:
    """Return what the model gives in training."""
    with unrecorded():
        return model(x, training=True) if model._call_has_training_arg else model(x)


def _attached(outputs: Any) -> list[tuple[int, str, Any]]:
    """Return what Keras's losses find at the outputs: number of the output, name, tensor.

    The name is that of an attribute, or of an operation.
    """
    found = []
    for number, output in enumerate(tf.nest.flatten(outputs)):
        logits = getattr(output, "_keras_logits", None)
        if logits is None and tf.is_symbolic_tensor(output) and output.op.type in _ACTIVATIONS:
            found.append((number, output.op.type, output.op.inputs[0]))
        attributes = {"_keras_logits": logits, "_keras_mask": getattr(output, "_keras_mask", None)}
        found += [(number, name, t) for name, t in attributes.items() if t is not None]
    return found


def _build(model: Any, batch: Batch) -> None:
    """Create the variables of layers, which can not be created in a `StatelessScope`."""
    if all(getattr(layer, "built", True) for layer in model._flatten_layers()):
        return
    leaves = batch.microbatch(tf.zeros((), tf.int64))
    trace = tf.function(lambda leaves: _called(model, batch.pack(leaves)), autograph=False)
    trace.get_concrete_function(leaves)


def _check_call(model: str, outputs: list[Any], changed: list[Any]) -> None:
    """Check that a model can be called twice on each microbatch, and its outputs put together.

    Raises:
        ValueError: an output has no rows; the call overwrites trained weights, or draws random
            numbers that the second pass can not draw again.
    """
    for output in outputs:
        if not isinstance(output, tf.Tensor) or output.shape.rank == 0:
            raise ValueError(_validate.outputs_message(model, getattr(output, "shape", None)))
    overwritten = [variable.path for variable in changed if variable.trainable]
    if overwritten:
        raise ValueError(_validate.overwritten_message(model, overwritten))
    if not tf.executing_eagerly():
        graph = tf.compat.v1.get_default_graph()
        nodes = [op.node_def for op in graph.get_operations()]
        nodes += [n for f in graph.as_graph_def().library.function for n in f.node_def]
        unseeded = sorted({node.op for node in nodes if _UNSEEDED.match(node.op)})
        if unseeded:
            raise ValueError(_validate.unseeded_message(model, unseeded))
