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
end all state is what the first pass and the step have left.

Losses that layers add are outputs, too: the mean over microbatches of a scalar, by their samples,
and the sum of anything else (see `_weights`). And so is what Keras finds at an output: its mask,
and the logits of a softmax or a sigmoid.
"""

from __future__ import annotations

import contextlib
import functools
import re
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import keras
import tensorflow as tf

from ga_model import _lists, _messages, _strategy, _sums
from ga_model._context import ThreadValue, graph_being_made
from ga_model._dependence import dependence_of
from ga_model._internals import (
    NOT_INLINED,
    assign,
    has_forward_derivatives,
    has_variables,
    is_followed,
    layers_in,
    logits_of,
    mask_of,
    own_state,
    raw,
    record_on_tapes,
    seeds,
    set_logits,
    set_mask,
    unseen_by_tapes,
)
from ga_model._loop import loop
from ga_model._loss_reading import kind_of_scalar, mixes_samples
from ga_model._microbatch import Batch, as_tensor, rows_of
from ga_model._python_state import PythonState
from ga_model._recorder import instances_in, note_call, unrecorded
from ga_model._sums import GradientSum
from ga_model._writes import unseen

# Operations that draw other numbers every time that they run.
_UNSEEDED = re.compile(
    "Random(?!.*Dataset)|Stateful(Uniform|Standard|Truncated|Random)|TruncatedNormal|Multinomial"
    "|ParameterizedTruncatedNormal|RngReadAndSkip|SampleDistorted"
)


# Keras's losses take the input of these operations, if an output is one's result.
_ACTIVATIONS = {"Softmax": tf.nn.softmax, "Sigmoid": tf.sigmoid}

# Of layers that ran eagerly, the kinds of calls that were checked.
_drawn_before: weakref.WeakKeyDictionary[Any, set[str]] = weakref.WeakKeyDictionary()

# Whether calls of layers are parts of one that is split already, and so are left as they are.
inside_of_call = ThreadValue(False)


class NotByRowsError(Exception):
    """A call can not be made on some samples at a time. The text says why."""


class _Noted(keras.StatelessScope):
    """A scope that keeps nothing from being written, and notes what was there before.

    Args:
        values: pairs of a variable and the value that is read from it.
        noted: variables that are noted in any case. Functions that were traced before do not tell
            what they write to.

    Attributes:
        found: pairs of a variable and the value that it had before it was written to.
        written: variables that were written to, as far as that shows.
    """

    def __init__(self, values: Iterable[tuple[Any, Any]] = (), noted: Iterable[Any] = ()) -> None:
        super().__init__(list(values), collect_losses=True)
        self.found = _read(noted)
        self.written: list[Any] = []
        self._graph = graph_being_made()

    def add_update(self, update: tuple[Any, Any]) -> None:
        variable, value = update
        self.written.append(variable)
        if not any(variable is other for other, _ in self.found):
            # In the graph of the call, also where a loop or a branch in it writes.
            with tf.init_scope() if self._graph is None else self._graph.as_default():
                self.found += _read([variable])
        if self.original_scope is not None:  # which keeps everything from being written
            super().add_update(update)
        else:
            assign(variable, value)


class Arguments:
    """The arguments of a call: tensors of samples, tensors that all samples share, and the rest.

    Args:
        args, kwargs: the arguments, nests of anything.
        batch_rows: samples of the step's batch: int64 scalar tensor.
        size: samples of it per microbatch.

    Attributes:
        batch: the tensors of samples, to be split.
        shared: the other tensors.

    Raises:
        NotByRowsError: there are no tensors of samples, or it is not known which they are.
    """

    def __init__(self, args: Any, kwargs: Any, batch_rows: Any, size: Any) -> None:
        self._nest = (args, kwargs)
        self._flat = tf.nest.flatten(self._nest)
        self._numbers = [i for i, leaf in enumerate(self._flat) if tf.is_tensor(leaf)]
        tensors = [as_tensor(self._flat[i]) for i in self._numbers]
        masks = [mask_of(tensor) for tensor in tensors]
        self._masked = [number for number, mask in enumerate(masks) if mask is not None]
        tensors += [mask for mask in masks if mask is not None]
        self._has_rows = _which_have_rows(tensors)
        rows = [tensor for tensor, has_rows in zip(tensors, self._has_rows) if has_rows]
        self.shared = [tensor for tensor, has_rows in zip(tensors, self._has_rows) if not has_rows]
        counts = tf.stack([rows_of(tensor) for tensor in rows])
        most = tf.reduce_max(counts)
        # Several samples of a call may come of one of the batch, as where two views are stacked.
        per_row = tf.maximum(batch_rows, 1)
        alike = tf.maximum((size * most + per_row - 1) // per_row, size)
        self.is_split = tf.reduce_all(tf.equal(counts, counts[0]))
        self.batch = Batch(rows, tf.where(self.is_split, alike, most), is_checked=False)

    @property
    def kind(self) -> str:
        """What tells this call from others of the same layer: all but the tensors' values."""
        flat = [(t.dtype, t.shape[1:]) if tf.is_tensor(t) else t for t in self._flat]
        return repr((flat, tf.nest.map_structure(lambda _: 0, self._nest)))

    def packed(self, rows: list[Any], shared: list[Any]) -> tuple[Any, Any]:
        """Return the arguments with these tensors of samples and shared ones."""
        of_rows, others = iter(rows), iter(shared)
        tensors = [next(of_rows if has_rows else others) for has_rows in self._has_rows]
        for number, mask in zip(self._masked, tensors[len(self._numbers) :]):
            tensors[number] = tf.identity(tensors[number])
            set_mask(tensors[number], mask)
        flat = list(self._flat)
        for i, tensor in zip(self._numbers, tensors):
            flat[i] = tensor
        return tf.nest.pack_sequence_as(self._nest, flat)  # type: ignore[no-any-return]


def _which_have_rows(tensors: list[Any]) -> list[bool]:
    """Return which tensors have a sample in each entry of axis 0.

    Anything that follows from the data does, and what is drawn at random. What follows from
    weights, constants and shapes may be a table that all samples share, or may not.
    """
    composites = [t for t in tensors if not isinstance(t, tf.Tensor)]
    if any(map(is_followed, tf.nest.flatten(composites, expand_composites=True))):
        raise NotByRowsError("a ragged or sparse input needs a gradient")
    lengths = [t.shape[0] if t.shape.rank else 1 for t in tensors]
    is_row = [length != 1 for length in lengths]
    if not tf.executing_eagerly():
        pairs = zip(tensors, is_row)
        flat = [tf.nest.flatten(t, expand_composites=True)[0] if yes else t for t, yes in pairs]
        follows = [yes and dependence_of(t).on_values for t, yes in zip(flat, is_row)]
        known = {length for length, yes in zip(lengths, follows) if yes}
        for i, length in enumerate(lengths):
            # A table has a length of its own, which is known.
            if is_row[i] and not follows[i]:
                if known and (length is None or length in known):
                    raise NotByRowsError("it is not clear which of its inputs have samples")
                is_row[i] = False
    lengths = [length for length, yes in zip(lengths, is_row) if yes]
    if not lengths:
        raise NotByRowsError("")
    if len(set(lengths)) > 1:
        raise NotByRowsError(f"its inputs have different numbers of samples {lengths}")
    return is_row


class _Part(NamedTuple):
    """What the first pass gave for one microbatch, or for several: then in lists (`_lists`).

    Attributes:
        outputs: tensors of shape (rows, ...), the call's outputs and what is attached to them.
        found: the values that the variables had which the call has changed.
        losses: what layers added, as scalars that are summed over microbatches.
    """

    outputs: list[Any]
    found: list[Any]
    losses: list[Any]


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
    """A call of a layer that goes by microbatches.

    Args:
        layer: the layer. It is called as it is, with microbatches of its arguments.
        call: the layer's own `call`.
        arguments: what it was called with.
        training: whether it is called in training, or None.
        jit_compile: whether XLA compiles the passes of a microbatch.
        turns: of all calls of the step.
        limit: how many microbatches really run, or None: outputs of the others are made up.

    Attributes:
        normalizing: names of BatchNormalization layers that have normalized microbatches, known
            when the outputs are.
    """

    def __init__(
        self,
        layer: Any,
        call: Callable[..., Any],
        arguments: Arguments,
        training: Any,
        jit_compile: bool,
        turns: Turns,
        limit: int | None = None,
    ) -> None:
        self.normalizing: list[str] = []
        self._layer = layer
        self._turns = turns
        self._call = call
        self._arguments = arguments
        self._batch = arguments.batch
        self._training = training
        self._jit_compile = jit_compile
        self._num_microbatches = self._batch.num_microbatches
        if limit is not None:
            self._num_microbatches = tf.minimum(self._num_microbatches, limit)
        self._is_limited = limit is not None
        self._is_eager = tf.executing_eagerly()
        self._structure: Any = None  # of the outputs
        self._attached: list[tuple[int, str]] = []  # the number of an output, what is attached
        self._is_sum: list[bool] = []  # of the losses that layers added
        self._had_axes: list[bool] = []  # of the same, whether they were no scalars
        self._changed: list[Any] = []  # variables that a call writes to
        self._is_used: list[bool] = []  # which outputs and losses have a gradient
        self._foreign: list[Any] = []  # variables that a call uses and that are not the layer's
        self._read_directly: list[Any] = []  # weights whose value no scope can hold

    def outputs(self) -> Any:
        """Make the call, and return what it gives. Tapes see where it is from.

        Losses that layers added are then among those of the layer.

        Raises:
            NotByRowsError: an output has no row for each sample, or its other axes depend on their
                number; or the call draws random numbers that a second pass can not draw again.
        """
        self._build()
        self._state = PythonState(self._layer)
        variables = _unique(self._layer.variables)
        # As they are: Keras would cast them to what the layer computes in.
        values = [tf.convert_to_tensor(raw(variable)) for variable in variables]
        inputs = [*self._batch.leaves, *self._arguments.shared]
        inputs = [t for t in inputs if isinstance(t, tf.Tensor) and _is_differentiable(t)]
        if has_forward_derivatives([*inputs, *values]):
            raise NotByRowsError("forward derivatives are taken of it")
        sources = [v for v, value in zip(variables, values) if is_followed(value)]
        values = [value for value in values if is_followed(value)]
        inputs = [tensor for tensor in inputs if is_followed(tensor)]
        results: list[Any] = []
        try:
            function = self._checked_first()
        except NotByRowsError:
            self._state.put_back()
            raise
        with unseen_by_tapes(), self._turns.turn(results), unseen():
            self._first_pass(function)
            results += self._outputs
            others = [*self._changed, *sources]
            self._kept = _read(v for v in variables if not _is_in(v, others))
        self._variables = sources
        self._followed = [t for t in self._arguments.shared if _is_in(t, inputs)]
        tensors = [*self._outputs, *self._losses]
        if inputs or values:
            tensors = self._with_gradient(tensors, inputs, values)
        return self._packed(tensors)

    def _packed(self, tensors: list[Any]) -> Any:
        """Return tensors as the call returns them, and add the losses to the layer."""
        tensors, losses = tensors[: len(self._outputs)], tensors[len(self._outputs) :]
        count = len(tensors) - len(self._attached)
        outputs = tensors[:count]
        for (number, name), tensor in zip(self._attached, tensors[count:]):
            if name in _ACTIVATIONS:
                outputs[number] = _ACTIVATIONS[name](tensor)
            elif name == "mask":
                set_mask(outputs[number], tensor)
            else:
                set_logits(outputs[number], tensor)
        losses = [v[tf.newaxis] if had else v for v, had in zip(losses, self._had_axes)]
        note_call([], losses, self._is_sum)
        if losses:
            keras.layers.Layer.add_loss(self._layer, losses)  # a Functional model's own refuses
        remaining = iter(outputs)
        return tf.nest.map_structure(
            lambda leaf: next(remaining) if tf.is_tensor(leaf) else leaf, self._structure
        )

    def _with_gradient(self, tensors: list[Any], inputs: list[Any], values: list[Any]) -> list[Any]:
        """Return the outputs and losses so that the second pass is their gradient.

        Args:
            tensors: outputs and losses.
            inputs: of the arguments, those that a tape follows.
            values: of the weights that a tape follows.
        """
        numbers = [i for i, tensor in enumerate(tensors) if _is_differentiable(tensor)]
        self._is_used = [False for _ in numbers]

        def gradients(*upstream: Any) -> Any:
            if "loop_body" in tf.get_current_name_scope().split("/"):
                raise NotImplementedError(_messages.jacobian_message(self._layer.name))
            results: list[Any] = []
            with self._turns.turn(results), self._state.kept(), unseen():
                found = self._second_pass(upstream, inputs, values)
                results += tf.nest.flatten(found, expand_composites=True)
            results[:] = [tensor for tensor in results if tensor is not None]
            return found

        def noting(place: int) -> Any:
            def gradient(upstream: Any) -> Any:
                self._is_used[place] = True
                return [upstream]

            return gradient

        results = _recorded([tensors[i] for i in numbers], [*inputs, *values], gradients)
        tensors = list(tensors)
        for place, (i, tensor) in enumerate(zip(numbers, results)):
            # It notes if it gets a gradient. A tape gives zeros for none.
            tensors[i] = _recorded([tensor], [tensor], noting(place))[0]
        return tensors

    # The first pass.

    def _first_pass(self, function: Any) -> None:
        batch = self._batch

        def part_of(index: Any, shapes: list[Any] | None) -> _Part:
            leaves = batch.microbatch(index)
            part: _Part = function(leaves)
            with tf.control_dependencies(self._checks(part.outputs, leaves, shapes)):
                return part._replace(outputs=[tf.identity(tensor) for tensor in part.outputs])

        part = part_of(tf.zeros((), tf.int64), None)
        tensors = part.outputs
        shapes = [tf.shape(tensor)[1:] for tensor in tensors]
        lists = [_lists.empty(t.dtype, [None, *t.shape[1:]]) for t in tensors]
        lists += [_lists.empty(v.dtype, v.shape) for v in part.found]

        def add(index: Any, so_far: Any) -> Any:
            lists, losses = so_far
            part = part_of(index, shapes)
            lists = _pushed(lists, [*part.outputs, *part.found])
            return lists, [a + b for a, b in zip(losses, part.losses)]

        so_far = (_pushed(lists, [*part.outputs, *part.found]), part.losses)
        lists, self._losses = loop(add, so_far, self._num_microbatches)
        self._outputs = self._joined(lists, tensors)
        self._found = lists[len(tensors) :]

    def _checked_first(self) -> Any:
        """Return `_first` as a function, if the call can be split. Nothing has run then.

        Raises:
            NotByRowsError: as `outputs`.
        """
        signature = [self._batch.signature_of(None)]
        function = self._in_graph(self._first, signature)
        try:
            if tf.executing_eagerly():
                kind = f"{self._arguments.kind} {self._training}"
                if kind not in _drawn_before.setdefault(self._layer, set()):
                    tf.function(self._first, autograph=False).get_concrete_function(*signature)
                    self._check_axes()
                    self._check_followed()
                    _drawn_before[self._layer].add(kind)
                return function
            concrete = function.get_concrete_function()
            self._check_captures(concrete.graph)
            self._foreign = self._foreign_in(concrete.graph)
            if self._foreign:  # which are noted, too
                function = self._in_graph(self._first, signature)
                concrete = function.get_concrete_function()
            shapes = [tensor.shape for tensor in concrete.structured_outputs.outputs]
            if any(shape[0] is not None or None in shape[1:] for shape in shapes):
                self._check_axes()
        except NotByRowsError:
            raise
        except Exception as error:  # which a call of all samples will raise again, or get by
            reason = f"with another number of samples it fails with a {type(error).__name__}"
            raise NotByRowsError(reason) from error
        return function

    def _build(self) -> None:
        """Create the variables of layers, which can not be created in a `StatelessScope`."""
        if is_built(self._layer):
            return

        def call(leaves: list[Any]) -> list[Any]:
            args, kwargs = self._arguments.packed(leaves, self._arguments.shared)
            with unrecorded(), inside_of_call.set(True):
                return _leaves(self._call(*args, **kwargs))

        trace = tf.function(call, autograph=False)
        trace.get_concrete_function(self._batch.signature_of(None))

    def _first(self, leaves: list[Any]) -> _Part:
        """Call the layer on one microbatch, and note what it changes."""
        with _Noted(noted=[*_state_of(self._layer), *self._foreign]) as scope:
            outputs = self._called(leaves)
        tensors = _leaves(outputs)
        _check_call(tensors, self._layer)
        self._check_state(scope)
        attached = _attached(tensors)
        self._structure = outputs
        self._attached = [(number, name) for number, name, _ in attached]
        losses = self._added(scope.losses, outputs)
        self._is_sum = [_is_sum(loss) for loss in losses]
        self._had_axes = [loss.shape.rank != 0 for loss in losses]
        if self._is_eager and self._is_sum != self._had_axes and not tf.executing_eagerly():
            raise NotByRowsError("it adds a loss that is a sum over samples")  # nothing tells later
        self._changed = [variable for variable, _ in scope.found]
        tensors += [tensor for _, _, tensor in attached]
        found = [value for _, value in scope.found]
        return _Part(tensors, found, self._shares(losses, leaves))

    def _check_captures(self, graph: Any) -> None:
        """Raise NotByRowsError if a call uses a tensor of the step that is none of its inputs."""
        own = [*self._arguments.shared, self._batch.rows]
        for tensor, _ in graph.captures:
            is_of_step = tf.is_symbolic_tensor(tensor) or is_followed(tensor)
            if tensor.dtype != tf.resource and is_of_step and not _is_in(tensor, own):
                raise NotByRowsError("it uses a tensor that is none of its inputs")

    def _check_state(self, scope: _Noted) -> None:
        """Raise NotByRowsError if a call leaves something that follows from all samples at once.

        A state that it writes to, but for seeds and the statistics of BatchNormalization, of which
        another warning tells; or a tensor in an attribute, which the step might read.
        """
        layers = layers_in(self._layer)
        batch_normalization = keras.layers.BatchNormalization
        normal = [part for part in layers if isinstance(part, batch_normalization)]
        statistics = [variable for part in normal for variable in part.variables]
        self.normalizing = [
            part.name for part in normal if any(_is_in(v, scope.written) for v in part.variables)
        ]
        others = [v for v in scope.written if not _is_in(v, statistics) and not _is_seed(v)]
        if others:
            names = sorted({variable.path for variable in others})
            raise NotByRowsError(f"it writes to {names}, once per call")
        graph = graph_being_made()
        for part in layers:
            if graph is None or type(part).__module__.startswith("keras."):
                continue
            for name, value in vars(part).items():
                left = instances_in(value, tf.Tensor)
                if any(tf.is_symbolic_tensor(tensor) and tensor.graph is graph for tensor in left):
                    raise NotByRowsError(f"it keeps a tensor in its attribute `{name}`")

    def _check_followed(self) -> None:
        """Do what `_check_captures` and `_foreign_in` do where there is no graph, by a call.

        A tape that follows what comes of inputs and weights that it does not follow has another
        reason to. The call changes nothing.
        """
        inputs = self._batch.microbatch(tf.zeros((), tf.int64))
        inputs = [tf.stop_gradient(t) if isinstance(t, tf.Tensor) else t for t in inputs]
        shared = [tf.stop_gradient(tensor) for tensor in self._arguments.shared]
        variables = _unique(self._layer.variables)
        values = [(variable, tf.stop_gradient(variable.value)) for variable in variables]
        before = _read(_state_of(self._layer))
        with tf.GradientTape() as tape, keras.StatelessScope(values):
            outputs = _leaves(self._called(inputs, shared))
        # Functions that were traced before know no scope: they write, and read weights directly.
        _write(before)
        known = any(_is_in(v, [raw(own) for own in variables]) for v in tape.watched_variables())
        if any(map(is_followed, outputs)) and not known:
            raise NotByRowsError("it uses a tensor or a variable that is no input or weight of it")

    def _foreign_in(self, graph: Any) -> list[Any]:
        """Return variables that a call uses, and that Keras does not know as the layer's.

        Raises:
            NotByRowsError: one of them can be trained.
        """
        state = [*self._layer.variables, *_state_of(self._layer)]
        own = [raw(variable) for variable in state]
        own += [copy for variable in own for copy in _strategy.copies(variable)]
        foreign = [v for v in graph.variables if not _is_in(v, own)]
        if any(variable.trainable for variable in foreign):
            names = sorted(variable.name for variable in foreign)
            raise NotByRowsError(f"it uses the variables {names}, which are no weights of its own")
        return foreign

    def _called(self, leaves: list[Any], shared: list[Any] | None = None) -> Any:
        """Return what the layer gives for a microbatch, and for other shared inputs if any."""
        inputs = leaves[: len(self._batch.leaves)]
        shared = self._arguments.shared if shared is None else shared
        args, kwargs = self._arguments.packed(inputs, shared)
        self._state.put_back()
        with unrecorded(), inside_of_call.set(True):
            # Keras's own, where `__call__` is the user's: that one runs once, around all samples.
            call = functools.partial(keras.layers.Layer.__call__, self._layer, *args, **kwargs)
            return _Context()(function=call, training=self._training)

    def _added(self, losses: list[Any], outputs: Any) -> list[Any]:
        """Return the losses but for what the layer adds of its outputs in `__call__`.

        That it does for all samples, when the call is through.
        """
        own = len(_leaves(outputs)) if self._layer.activity_regularizer is not None else 0
        return losses[: len(losses) - own]

    def _joined(self, lists: list[Any], tensors: list[Any]) -> list[Any]:
        """Return tensors of all samples, also where a few microbatches ran only.

        Args:
            lists: those of the microbatches, a list for each.
            tensors: those of the first microbatch.
        """
        joined = []
        for pieces, part in zip(lists, tensors):
            tensor = _lists.concatenated(pieces, part.dtype, part.shape[1:])
            if self._is_limited:
                missing = self._batch.rows - rows_of(tensor)
                shape = tf.concat([[missing], tf.shape(tensor, out_type=tf.int64)[1:]], 0)
                tensor = tf.concat([tensor, tf.zeros(shape, tensor.dtype)], 0)
            tensor.set_shape([self._batch.static_rows, *part.shape[1:]])
            joined.append(tensor)
        return joined

    # The second pass.

    def _second_pass(
        self, upstream: tuple[Any, ...], inputs: list[Any], values: list[Any]
    ) -> list[Any]:
        """Return the gradients of inputs and weights, from those of the outputs and losses."""
        is_used = self._is_used
        self._is_used = [False for _ in is_used]  # for the next tape
        upstream_used = [tf.convert_to_tensor(g) for g, yes in zip(upstream, is_used) if yes]
        batch = Batch([self._batch.leaves, upstream_used], self._batch.size, is_checked=False)
        rows = [t for t in self._batch.leaves if _is_in(t, inputs)]
        places = [i for i, t in enumerate(self._batch.leaves) if _is_in(t, rows)]
        shared = self._followed
        variables = self._variables

        def second(
            leaves: list[Any], found: list[Any], values: list[Any], shared: list[Any]
        ) -> Any:
            return self._second(leaves, found, values, shared, places, is_used)

        specs = [tf.TensorSpec(v.shape, raw(v).dtype) for v in self._changed]
        of_values = [tf.TensorSpec(v.shape, v.dtype) for v in values]
        of_shared = [tf.TensorSpec(t.shape, t.dtype) for t in shared]
        function = self._in_graph(second, [batch.signature_of(None), specs, of_values, of_shared])
        if not tf.executing_eagerly():
            function.get_concrete_function()
        held = [(v, value) for v, value in zip(variables, values) if _is_in(v, self._read_directly)]
        written = [*self._changed, *(v for v, _ in held if not _is_in(v, self._changed))]
        left = _read(written)
        _write(held)

        def gradients(index: Any) -> Any:
            found = [
                _lists.item(pieces, index, raw(variable).dtype, variable.shape)
                for pieces, variable in zip(self._found, self._changed)
            ]
            return function(batch.microbatch(index), found, values, shared)

        total, of_rows, of_shared = gradients(tf.zeros((), tf.int64))
        lists = _pushed([_lists.empty(t.dtype, [None, *t.shape[1:]]) for t in of_rows], of_rows)

        def add(index: Any, so_far: Any) -> Any:
            total, lists, sums = so_far
            part, of_rows, of_shared = gradients(index)
            sums = [a + b for a, b in zip(sums, of_shared)]
            return total.plus_alike(part, variables), _pushed(lists, of_rows), sums

        first = total.as_terms(variables), lists, of_shared
        total, lists, of_shared = loop(add, first, self._num_microbatches)
        _write(left)
        of_rows = self._joined(lists, of_rows)
        note_call(of_rows)
        in_order, others = iter(of_rows), iter(of_shared)
        of_inputs = [next(in_order if _is_in(t, rows) else others) for t in inputs]
        of_weights = total.with_slices(variables).mean(variables, is_sum=True)
        return [*of_inputs, *of_weights]

    def _second(
        self,
        leaves: list[Any],
        found: list[Any],
        values: list[Any],
        shared: list[Any],
        places: list[int],
        is_used: list[bool],
    ) -> tuple[GradientSum, list[Any], list[Any]]:
        """Return the gradients of one microbatch: of weights, its inputs, and shared inputs.

        Args:
            leaves: inputs and, as far as they are used, gradients with respect to outputs; then
                those with respect to losses, scalars.
            found: the values of the variables that the first pass changed.
            values: of the weights.
            shared: inputs that all samples share and that a tape follows.
            places: of the inputs with samples, those that a tape follows.
            is_used: which outputs and losses have a gradient.
        """
        count = len(self._batch.leaves)
        inputs = leaves[:count]
        _write(zip(self._changed, found))
        with tf.GradientTape(watch_accessed_variables=False) as tape:
            variables = [raw(variable) for variable in self._variables]
            tape.watch([values, [inputs[i] for i in places], shared, variables])
            with _Noted([*self._kept, *self._unchanged(values)]) as scope:
                outputs = self._called(inputs, self._with_shared(shared))
            tensors = _leaves(outputs)
            tensors += [tensor for _, _, tensor in _attached(tensors)]
            tensors += self._shares(self._added(scope.losses, outputs), leaves)
            tensors = [tensor for tensor in tensors if _is_differentiable(tensor)]
            targets = [tensor for tensor, yes in zip(tensors, is_used) if yes]
        of_rows = [inputs[i] for i in places]
        gradients = tape.gradient(
            targets,
            [values, of_rows, shared, variables],
            output_gradients=leaves[count:],
        )
        of_weights = [_either(*pair) for pair in zip(gradients[0], gradients[3])]
        # By functions that were traced before, and where the call itself writes to a weight.
        self._read_directly = [v for v, g in zip(self._variables, gradients[3]) if g is not None]
        one = tf.ones((), tf.float64)
        weight = _sums.Weight(one, one)
        dense = [
            [tf.zeros_like(t) if g is None else tf.convert_to_tensor(g) for g, t in zip(gs, ts)]
            for gs, ts in zip(gradients[1:3], [of_rows, shared])
        ]
        total = GradientSum.of(of_weights, self._variables, weight, scale=False)
        return total, dense[0], dense[1]

    # Both.

    def _with_shared(self, watched: list[Any]) -> list[Any]:
        """Return the shared inputs, with those that a tape follows in the place of their own."""
        followed, rest = self._followed, iter(watched)
        return [next(rest) if _is_in(t, followed) else t for t in self._arguments.shared]

    def _unchanged(self, values: list[Any]) -> list[tuple[Any, Any]]:
        """Return pairs of variable and value of the weights that the call does not write to."""
        pairs = zip(self._variables, values)
        return [(v, value) for v, value in pairs if not _is_in(v, self._changed)]

    def _shares(self, losses: list[Any], leaves: list[Any]) -> list[Any]:
        """Return the losses that layers added for a microbatch as they enter the batch's."""
        share = tf.cast(rows_of(leaves[0]), tf.float64) / tf.cast(self._batch.rows, tf.float64)
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
        rows, name = rows_of(leaves[0]), self._layer.name
        checks = []
        for number, tensor in enumerate(outputs):
            message = _messages.outputs_message(name, tensor.shape)
            is_by_rows = tf.equal(rows_of(tensor), rows) | ~self._arguments.is_split
            checks.append(tf.debugging.Assert(is_by_rows, [message]))
            if shapes is not None and not tensor.shape[1:].is_fully_defined():
                message = _messages.other_shape_message(name, tensor.shape)
                shape = tf.shape(tensor)[1:]
                checks.append(tf.debugging.assert_equal(shape, shapes[number], message))
        return [check for check in checks if check is not None]

    def _check_axes(self) -> None:
        """Raise NotByRowsError if outputs are not by rows, as far as graphs for 3 and 5 rows tell.

        Outputs of shape (rows, rows) would be put together to (rows of the batch, rows of a
        microbatch), and what has the same rows for every batch would be repeated.
        """
        shapes = []
        for rows in (3, 5):
            trace = tf.function(self._drawn, autograph=False)
            concrete = trace.get_concrete_function(self._batch.signature_of(rows))
            self._check_captures(concrete.graph)
            shapes.append([tensor.shape for tensor in concrete.structured_outputs])
        for few, many in zip(*shapes):
            has_rows = few[0] in (3, None) and many[0] in (5, None)
            others = zip(few[1:], many[1:])
            if not has_rows or any(a != b and None not in (a, b) for a, b in others):
                raise NotByRowsError(f"an output has the shape {few} for 3 samples")

    def _drawn(self, leaves: list[Any]) -> list[Any]:
        """Return the outputs of a microbatch in a graph that is only drawn."""
        with _Noted():  # which keeps the losses that layers add
            return _leaves(self._called(leaves))

    def _in_graph(self, function: Any, signature: list[Any]) -> Any:
        """Return a function of a microbatch that is traced once where a graph is made."""
        if tf.executing_eagerly():
            return function
        return tf.function(
            function,
            input_signature=signature,
            autograph=False,
            jit_compile=self._jit_compile or None,
            # Inlined, it would be there twice, with the memory of both.
            experimental_attributes=NOT_INLINED,
        )


class _Context(keras.layers.Layer):
    """Calls a function as if a layer had called it.

    Layers inside then know if they train, and keep the losses that a step may read from them.
    """

    def __init__(self) -> None:
        super().__init__(name="microbatch", dtype=keras.config.floatx())
        self.built = True

    def call(self, function: Any, training: Any = None) -> Any:
        return function()


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


def _pushed(lists: list[Any], tensors: list[Any]) -> list[Any]:
    """Return lists with one more tensor each."""
    return [_lists.pushed(pieces, tensor) for pieces, tensor in zip(lists, tensors)]


def _read(variables: Iterable[Any]) -> list[tuple[Any, Any]]:
    """Return pairs of variables and the values that they have, whatever a scope says."""
    return [(variable, tf.identity(raw(variable))) for variable in variables]


def _write(pairs: Iterable[tuple[Any, Any]]) -> None:
    """Write values to variables, whatever a scope says."""
    for variable, value in pairs:
        raw(variable).assign(value)


def _unique(variables: Iterable[Any]) -> list[Any]:
    return list({id(variable): variable for variable in variables}.values())


def _is_in(value: Any, others: Iterable[Any]) -> bool:
    return any(value is other for other in others)


def _is_sum(loss: Any) -> bool:
    """Return whether a loss that a layer added is summed over samples.

    Raises:
        NotByRowsError: nothing tells. Eagerly, a scalar is taken as a mean.
    """
    if loss.shape.rank != 0:
        return True
    kind = kind_of_scalar(loss) if tf.is_symbolic_tensor(loss) else "mean"
    if kind is None:
        raise NotByRowsError("it adds a loss that is neither a mean nor a sum over samples")
    return kind == "sum"


def _is_seed(variable: Any) -> bool:
    """Return whether a variable is the state of a `keras.random.SeedGenerator`, of any owner."""
    return str(variable.path).endswith("seed_generator_state")


def _either(a: Any, b: Any) -> Any:
    """Return the sum of two gradients that may be None."""
    if a is None or b is None:
        return b if a is None else a
    return tf.convert_to_tensor(a) + tf.convert_to_tensor(b)


def _state_of(layer: Any) -> list[Any]:
    """Return what a call of a layer may change: seeds, statistics, counters, metrics.

    Not among them are frozen weights, which may be large; nor with several replicas what these
    would have to exchange.
    """
    layers = layers_in(layer)
    variables = [variable for part in layers for variable in own_state(part)]
    variables += [seed for part in layers for seed in seeds(part)]
    variables += getattr(layer, "metrics_variables", [])
    if _strategy.num_replicas() > 1:
        variables = [v for v in variables if v.aggregation in (None, "none")]
    return _unique(variables)


def _leaves(outputs: Any) -> list[Any]:
    return [leaf for leaf in tf.nest.flatten(outputs) if tf.is_tensor(leaf)]


def _is_differentiable(tensor: Any) -> bool:
    return bool(tensor.dtype.is_floating or tensor.dtype.is_complex)


def _attached(outputs: list[Any]) -> list[tuple[int, str, Any]]:
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


def is_built(layer: Any, others: Iterable[Any] = ()) -> bool:
    """Return whether a layer, those in it, and others have their variables.

    Args:
        layer: the layer.
        others: metrics and optimizers.
    """
    return all(map(has_variables, [*layers_in(layer), *others]))


def _check_call(outputs: list[Any], layer: Any) -> None:
    """Check that a layer can be called twice on each microbatch, and its outputs put together.

    Args:
        outputs: what it gave.
        layer: the layer.

    Raises:
        NotByRowsError: an output has no rows, or follows from several; or the call draws random
            numbers that the second pass can not draw again.
    """
    for output in outputs:
        if not isinstance(output, tf.Tensor) or output.shape.rank == 0:
            raise NotByRowsError(f"an output has the shape {output.shape}")
    if mixes_samples(outputs, layer):
        raise NotByRowsError("its outputs for a sample depend on other samples")
    if (graph := graph_being_made()) is not None:
        nodes = [op.node_def for op in graph.get_operations()]
        nodes += [n for f in graph.as_graph_def().library.function for n in f.node_def]
        unseeded = sorted({node.op for node in nodes if _UNSEEDED.match(node.op)})
        if unseeded:
            raise NotByRowsError(f"it draws other numbers whenever it runs, by {unseeded}")
