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

Both passes have to compute the same outputs. The first one changes what layers change when they
are called (the seeds of dropout, running statistics), microbatch by microbatch, and notes what it
found. The second one begins each microbatch with that, and what else the model has that is not
trained is as it was between the passes, whatever the loss and the metrics have changed since. In
the end everything is what the first pass and they have left.

Losses that layers add are outputs, too: the mean over microbatches of a scalar, by their rows, and
the sum of anything else (see `_weights`). And so is what Keras's losses find at an output: its
mask, and the logits of a softmax or a sigmoid.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any, NamedTuple

import keras
import tensorflow as tf

from ga_model import _lists, _messages, _strategy, _sums
from ga_model._loop import loop
from ga_model._microbatch import Batch, rows_of
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


class _Noted(keras.StatelessScope):
    """A scope that keeps nothing from being written, and notes what was there before.

    Args:
        values: pairs of a variable and the value that is read from it.
        noted: variables that are noted in any case. Functions that were traced before do not tell
            what they write to.

    Attributes:
        found: pairs of a variable and the value that it had before it was written to.
    """

    def __init__(self, values: Iterable[tuple[Any, Any]] = (), noted: Iterable[Any] = ()) -> None:
        super().__init__(list(values), collect_losses=True)
        self.found: list[tuple[Any, Any]] = [(v, tf.identity(v._value)) for v in noted]
        self._graph = None if tf.executing_eagerly() else tf.compat.v1.get_default_graph()

    def add_update(self, update: tuple[Any, Any]) -> None:
        variable, value = update
        if not any(variable is other for other, _ in self.found):
            # In the graph of the call, also where a loop or a branch in it writes.
            with tf.init_scope() if self._graph is None else self._graph.as_default():
                self.found.append((variable, tf.identity(variable._value)))
        variable._direct_assign(value)


class _Part(NamedTuple):
    """What the first pass gave for one microbatch, or for several: then in lists (`_lists`).

    Attributes:
        outputs: tensors of shape (rows, ...), the model's outputs and what is attached to them.
        found: the values that the variables had which the call has changed.
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
        self._changed: list[Any] = []  # variables that a call writes to
        self._is_used: list[bool] = []  # which outputs and losses have a gradient

    def first(self) -> None:
        """Run the first pass. It is to be out of sight of the tape that takes gradients.

        Raises:
            ValueError: an output has no rows, or its other axes depend on their number; or the call
                draws random numbers that the second pass can not draw again.
        """
        batch = self._batch
        _build(self._model, batch)
        function = self._in_graph(self._first, [batch.signature_of(None)])

        def part_of(index: Any, shapes: list[Any] | None) -> _Part:
            leaves = batch.microbatch(index)
            part: _Part = function(leaves)
            with tf.control_dependencies(self._checks(part.outputs, leaves, shapes)):
                return part._replace(outputs=[tf.identity(tensor) for tensor in part.outputs])

        part = part_of(tf.zeros((), tf.int64), None)
        self._check_axes(part.outputs)
        tensors = part.outputs
        shapes = [tf.shape(tensor)[1:] for tensor in tensors]
        lists = [_lists.empty(t.dtype, [None, *t.shape[1:]]) for t in tensors]
        lists += [_lists.empty(v.dtype, v.shape) for v in part.found]

        def with_lists(lists: list[Any], part: _Part) -> list[Any]:
            pairs = zip(lists, [*part.outputs, *part.found])
            return [_lists.pushed(pieces, tensor) for pieces, tensor in pairs]

        def add(index: Any, so_far: Any) -> Any:
            lists, losses = so_far
            part = part_of(index, shapes)
            return with_lists(lists, part), [a + b for a, b in zip(losses, part.losses)]

        so_far = (with_lists(lists, part), part.losses)
        lists, self._losses = loop(add, so_far, batch.num_microbatches)
        self._outputs = [
            _lists.concatenated(pieces, tensor.dtype, tensor.shape[1:])
            for pieces, tensor in zip(lists, tensors)
        ]
        self._found = lists[len(tensors) :]
        others = self._model.non_trainable_variables
        others = [v for v in others if not any(v is changed for changed in self._changed)]
        self._kept = [(variable, tf.identity(variable.value)) for variable in others]

    def outputs(self) -> Any:
        """Return what the model's call gives for the whole batch. A tape sees where it is from.

        Losses that layers added are then among those of the model.
        """
        trained = self._model.trainable_variables
        tensors = [*self._outputs, *self._losses]
        numbers = [i for i, tensor in enumerate(tensors) if _is_differentiable(tensor)]
        self._is_used = [False for _ in numbers]

        @tf.custom_gradient  # type: ignore[untyped-decorator]
        def of_weights(*values: Any) -> Any:
            def gradients(*upstream: Any) -> Any:
                return [*self._second_pass(upstream), *[None for _ in numbers]]

            return [tf.identity(value) for value in values[len(trained) :]], gradients

        def noted(place: int, tensor: Any) -> Any:
            """Return the tensor, and note if it gets a gradient. A tape gives zeros for none."""

            @tf.custom_gradient  # type: ignore[untyped-decorator]
            def same(value: Any) -> Any:
                def gradient(upstream: Any) -> Any:
                    self._is_used[place] = True
                    return upstream

                return tf.identity(value), gradient

            return same(tensor)

        values = [tf.convert_to_tensor(v.value) for v in trained]
        results = of_weights(*values, *[tensors[i] for i in numbers])
        for place, (i, tensor) in enumerate(zip(numbers, results)):
            tensors[i] = noted(place, tensor)
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
        remaining = iter(outputs)
        return tf.nest.map_structure(
            lambda leaf: None if leaf is None else next(remaining), self._structure
        )

    def _first(self, leaves: list[Any]) -> _Part:
        """Call the model on one microbatch, and note what it changes."""
        with _Noted(noted=_state_of(self._model)) as scope:
            outputs = called(self._model, self._batch.pack(leaves))
        tensors = _leaves(outputs)
        _check_call(self._model.name, tensors)
        attached = _attached(tensors)
        self._structure = outputs
        self._attached = [(number, name) for number, name, _ in attached]
        self._is_sum = [loss.shape.rank != 0 for loss in scope.losses]
        self._changed = [variable for variable, _ in scope.found]
        tensors += [tensor for _, _, tensor in attached]
        found = [value for _, value in scope.found]
        return _Part(tensors, found, self._shares(scope.losses, leaves))

    def _second(self, leaves: list[Any], found: list[Any]) -> GradientSum:
        """Return the gradients of one microbatch.

        Args:
            leaves: of inputs and, as far as they are used, gradients with respect to outputs; then
                those with respect to losses, scalars.
            found: the values of the variables that the first pass changed.
        """
        variables = self._model.trainable_variables
        inputs = len(self._batch.leaves)
        for variable, value in zip(self._changed, found):
            variable.assign(value)
        with tf.GradientTape() as tape:
            with _Noted(self._kept) as scope:
                outputs = called(self._model, self._batch.pack(leaves[:inputs]))
            tensors = _leaves(outputs)
            tensors += [tensor for _, _, tensor in _attached(tensors)]
            tensors += self._shares(scope.losses, leaves)
            tensors = [tensor for tensor in tensors if _is_differentiable(tensor)]
            targets = [tensor for tensor, is_used in zip(tensors, self._is_used) if is_used]
        gradients = tape.gradient(targets, variables, output_gradients=leaves[inputs:])
        one = tf.ones((), tf.float64)
        return GradientSum.of(gradients, variables, _sums.Weight(one, one), scale=False)

    def _second_pass(self, upstream: Any) -> list[Any]:
        """Return the gradients of the weights, from those of the outputs and losses."""
        variables = self._model.trainable_variables
        upstream = [gradient for gradient, is_used in zip(upstream, self._is_used) if is_used]
        batch = Batch([self._batch.leaves, upstream], self._batch.size)
        found = [tf.TensorSpec(v.shape, v.value.dtype) for v in self._changed]
        function = self._in_graph(self._second, [batch.signature_of(None), found])
        left = [tf.identity(variable.value) for variable in self._changed]

        def gradients(index: Any) -> GradientSum:
            found = [
                _lists.item(values, index, variable.value.dtype, variable.shape)
                for values, variable in zip(self._found, self._changed)
            ]
            return function(batch.microbatch(index), found)  # type: ignore[no-any-return]

        first = gradients(tf.zeros((), tf.int64)).begin(variables)
        total = loop(
            lambda index, so_far: so_far.plus(gradients(index), variables),
            first,
            batch.num_microbatches,
        )
        for variable, value in zip(self._changed, left):
            variable.assign(value)
        return total.with_slices(variables).mean(variables, is_sum=True)  # type: ignore[no-any-return]

    def _shares(self, losses: list[Any], leaves: list[Any]) -> list[Any]:
        """Return the losses that layers added for a microbatch as they enter the batch's."""
        rows = num_rows(self._batch.pack(leaves[: len(self._batch.leaves)]))
        share = tf.cast(rows, tf.float64) / tf.cast(self._batch.rows, tf.float64)
        return [
            tf.reduce_sum(loss) if is_sum else loss * tf.cast(share, loss.dtype)
            for loss, is_sum in zip(losses, self._is_sum)
        ]

    def _checks(self, outputs: list[Any], leaves: list[Any], shapes: list[Any] | None) -> list[Any]:
        """Return assertions that the outputs of a microbatch can be put together with the others'.

        Args:
            outputs: of the microbatch.
            leaves: its inputs.
            shapes: of a row of each output of the first microbatch, or None if it is that one.
        """
        rows, name = num_rows(self._batch.pack(leaves)), self._model.name
        checks = []
        for number, tensor in enumerate(outputs):
            message = _messages.outputs_message(name, tensor.shape)
            checks.append(tf.debugging.assert_equal(rows_of(tensor), rows, message))
            if shapes is not None and not tensor.shape[1:].is_fully_defined():
                message = _messages.other_shape_message(name, tensor.shape)
                shape = tf.shape(tensor)[1:]
                checks.append(tf.debugging.assert_equal(shape, shapes[number], message))
        return [check for check in checks if check is not None]

    def _check_axes(self, outputs: list[Any]) -> None:
        """Raise ValueError if outputs are not by rows, as far as graphs for 3 and 5 rows tell.

        Outputs of shape (rows, rows) would be put together to (rows of the batch, rows of a
        microbatch), and what has the same rows for every batch would be repeated.
        """
        model = self._model
        if tf.executing_eagerly():
            if model._has_checked_outputs:
                return
        elif all(t.shape[1:].is_fully_defined() and t.shape[0] is None for t in outputs):
            return
        shapes = []
        for rows in (3, 5):
            trace = tf.function(self._call, autograph=False)
            concrete = trace.get_concrete_function(self._batch.signature_of(rows))
            shapes.append([tensor.shape for tensor in concrete.structured_outputs])
        for few, many in zip(*shapes):
            has_rows = few[0] in (3, None) and many[0] in (5, None)
            others = zip(few[1:], many[1:])
            if not has_rows or any(a != b and None not in (a, b) for a, b in others):
                raise ValueError(_messages.outputs_message(model.name, few))
        model._has_checked_outputs = True

    def _call(self, leaves: list[Any]) -> list[Any]:
        """Return the outputs of a microbatch in a graph that is only drawn."""
        with _Noted():  # which keeps the losses that layers add
            return _leaves(called(self._model, self._batch.pack(leaves)))

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


def called(model: Any, x: Any) -> Any:
    """Return what the model gives in training."""
    with unrecorded():
        return model(x, training=True) if model._call_has_training_arg else model(x)


def _state_of(model: Any) -> list[Any]:
    """Return what a call of the model may change: seeds, statistics, counters, metrics.

    Not among them are frozen weights, which may be large; nor with several replicas what these
    would have to exchange.
    """
    layers = model._flatten_layers()
    variables = [variable for layer in layers for variable in layer._non_trainable_variables]
    variables += [generator.state for layer in layers for generator in layer._seed_generators]
    variables += model.metrics_variables
    if _strategy.num_replicas() > 1:
        variables = [v for v in variables if v.aggregation in (None, "none")]
    return list({id(variable): variable for variable in variables}.values())


def _leaves(outputs: Any) -> list[Any]:
    return [leaf for leaf in tf.nest.flatten(outputs) if leaf is not None]


def _is_differentiable(tensor: Any) -> bool:
    return bool(tensor.dtype.is_floating or tensor.dtype.is_complex)


def _attached(outputs: list[Any]) -> list[tuple[int, str, Any]]:
    """Return what Keras's losses find at the outputs: number of the output, name, tensor.

    The name is that of an attribute, or of an operation.
    """
    found = []
    for number, output in enumerate(outputs):
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
    trace = tf.function(lambda leaves: _leaves(called(model, batch.pack(leaves))), autograph=False)
    trace.get_concrete_function(batch.signature_of(None))


def _check_call(model: str, outputs: list[Any]) -> None:
    """Check that a model can be called twice on each microbatch, and its outputs put together.

    Raises:
        ValueError: an output has no rows, or the call draws random numbers that the second pass can
            not draw again.
    """
    for output in outputs:
        if not isinstance(output, tf.Tensor) or output.shape.rank == 0:
            raise ValueError(_messages.outputs_message(model, getattr(output, "shape", None)))
    if not tf.executing_eagerly():
        graph = tf.compat.v1.get_default_graph()
        nodes = [op.node_def for op in graph.get_operations()]
        nodes += [n for f in graph.as_graph_def().library.function for n in f.node_def]
        unseeded = sorted({node.op for node in nodes if _UNSEEDED.match(node.op)})
        if unseeded:
            raise ValueError(_messages.unseeded_message(model, unseeded))
