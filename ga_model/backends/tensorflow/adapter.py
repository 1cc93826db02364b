"""TensorFlow: a function of the core is a `tf.function`, on variables as they are."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, cast

import numpy as np
import tensorflow as tf

from ga_model.backends.tensorflow import layer_calls, optimizers, replicas
from ga_model.backends.tensorflow.compiled import (
    AnySamples,
    Compiled,
    each_tensors,
    key_of_nest,
    nothing,
    specs_of,
    tensors_in,
)
from ga_model.backends.tensorflow.noting import Noting
from ga_model.backends.tensorflow.replicas import OnReplicas, Replicas
from ga_model.backends.tensorflow.state import State, Variables, kept_variables
from ga_model.base import _numbers
from ga_model.base._call_again import PythonState
from ga_model.base._context import ThreadValue
from ga_model.base._internals import (
    build,
    compiled_loss,
    counter_of,
    is_built,
    raw,
    unscaled_for_replicas,
)
from ga_model.base._internals_tf import graph_being_made, is_branch, noting_writes
from ga_model.base._method_patch import MethodPatch
from ga_model.core.backend import GROUPS, Backend, Group
from ga_model.core.backend_types import States
from ga_model.core.batch import Batch
from ga_model.core.call_types import Apart, Split, Traced
from ga_model.core.messages import inner_graph_message
from ga_model.core.models import optimizers_in, unrecorded
from ga_model.core.proof.draws import Draws
from ga_model.core.recorder import Applied, CannotAccumulateError
from ga_model.core.splitting import splitting_calls
from ga_model.core.stand_ins import OptimizerStandIn
from ga_model.core.window import Amount, Largest, Positions, Rows, Sums, shrinkage, with_values


class StandIn(OptimizerStandIn):
    """Stands in for an optimizer while a step is recorded."""

    def _take(
        self, gradients: list[Any], variables: list[Any], via_apply_gradients: bool = False
    ) -> None:
        optimizer, recording = self._original, self._listener
        if is_branch(graph_being_made()):
            raise CannotAccumulateError(inner_graph_message(recording.model.name))
        if not optimizer.built:
            optimizers.build_outside(optimizer, optimizer.build, variables, is_seen=True)
        is_dense = recording.moves_by is not None
        gradients = [
            None if g is None else recording.backend.given(g, v, is_dense)
            for g, v in zip(gradients, variables)
        ]
        recording.apply(optimizer, gradients, variables, via_apply_gradients=via_apply_gradients)
        if recording.moves_by is not None:
            rate = recording.rate_of(gradients, variables)
            with recording.backend.unnoted():
                _move(optimizer, gradients, variables, rate)


def _move(optimizer: Any, gradients: list[Any], variables: list[Any], rate: Any) -> None:
    """Make the surrogate update of a trial."""
    for variable, gradient in zip(variables, gradients):
        if gradient is not None:
            step = tf.math.multiply_no_nan(gradient, tf.cast(rate, gradient.dtype))
            raw(variable).assign_sub(tf.cast(step, raw(variable).dtype))
    counter = raw(counter_of(optimizer))
    counter.assign_add(tf.cast(rate != 0, counter.dtype))


class TensorFlowBackend(Backend):
    """Runs functions of the core in graphs, or at once where the model runs eagerly.

    Args:
        model: the model.

    Attributes:
        knows_samples: whether the source of data tells how many samples each batch has.
        is_for_any_samples: whether a graph is being made for any number of samples.
    """

    optimizer_stand_in = StandIn
    of_step: tuple[Group, ...] = GROUPS

    def __init__(self, model: Any) -> None:
        super().__init__(model)
        self._made: dict[Any, Any] = {}
        self._sums: dict[Any, tf.Variable] = {}  # which hold those of an open window
        self.holding = ThreadValue(())  # the sums that a function runs on, with their variables
        self.knows_samples = True
        self.is_for_any_samples = False
        self._by_position: set[int] = set()  # variables
        self._has_indices: set[int] = set()  # those whose indices were looked at
        self._is_to_find_positions = self._has_found_positions = False
        self._known_calls: dict[Any, Any] = {}  # what was found of calls of layers
        self._graph_of_step = ThreadValue()
        self._replicas = replicas.of_model(model)
        self._is_on_one = self._has_updated = False
        self._others: Variables | None = None  # those that a trial reaches
        self._kept: list[Any] | None = None  # what a step writes to, until another is traced

    @property
    def nests(self) -> bool:  # type: ignore[override]
        return self.replicas is None

    @property
    def num_replicas(self) -> int:  # type: ignore[override]
        return 1 if self.replicas is None else self.replicas.number

    @property
    def replicas(self) -> Replicas | None:
        """The replicas that functions run on now, or None where there is no strategy."""
        return None if self._is_on_one else self._replicas

    @contextlib.contextmanager
    def on_one_replica(self) -> Iterator[None]:
        outer, self._is_on_one = self._is_on_one, True
        try:
            yield
        finally:
            self._is_on_one, self._others = outer, None

    def samples_of(self, data: Any, of_all: bool = False) -> Any:
        return data if self.replicas is None else self.replicas.samples_of(data, of_all)

    @property
    def traces(self) -> bool:  # type: ignore[override]
        return not self._model.run_eagerly

    # What is compiled.

    def compiled(
        self,
        name: Any,
        function: Callable[..., Any],
        reads: Iterable[Group],
        updates: Iterable[Group] = (),
        consumes: bool = False,
        discards: bool = False,
    ) -> Callable[..., Any]:
        if updates := tuple(updates):
            return functools.partial(self._update, self.compiled(name, function, reads))
        if not self.traces:
            return functools.partial(self._run_eagerly, function)
        if name not in self._made:
            jit_compile = bool(self._model.jit_compile) and not _is_made_of_parts(name)
            jit_compile = jit_compile and self._replicas is None  # which exchange
            self._made[name] = Compiled(self, function, jit_compile, consumes)
        return self._made[name]  # type: ignore[no-any-return]

    def _update(self, run: Callable[..., Any], *arguments: Any) -> Any:
        """Run a function that may have updated weights where it fails."""
        self._has_updated = True
        return run(*arguments)

    def has_updated(self) -> bool:
        return self._has_updated

    def _run_eagerly(self, function: Callable[..., Any], *arguments: Any) -> Any:
        tensors, shared = each_tensors(arguments), self.replicas
        if shared is None or shared.is_inside():
            return function(*tensors)
        return shared.together(shared.run(function, shared.each(tensors)))

    def forget(self, kind: str) -> None:
        self._made = {n: m for n, m in self._made.items() if not _is_of_kind(n, kind)}

    def shapes(self, function: Any, arguments: tuple[Any, ...]) -> Any:
        return function.shapes(arguments)

    def number(self, value: float) -> Any:
        return tf.constant(value, tf.float64)

    def key_of(self, arguments: tuple[Any, ...]) -> Any:
        keys = tuple(map(key_of_nest, self.each(each_tensors(arguments))))
        return keys, len(self._model.trainable_variables)

    def each(self, nest: Any) -> list[Any]:
        return [nest] if self.replicas is None else self.replicas.each(nest)

    def batch(self, data: Any, size: int | None) -> Batch:
        if self.replicas is None:
            return Batch(data, size)
        return self.replicas.batch(tensors_in(data), size)

    def as_traced(self, data: Any) -> Any:
        if not self.traces or (self.knows_samples and self.replicas is None):
            return data
        return AnySamples(data)

    def copied(self, nest: Any) -> Any:
        return tf.nest.map_structure(_copied, nest)

    def held(self, sums: Iterable[Any]) -> list[Any]:
        """Return sums of gradients, in variables that hold the dense ones."""
        found = []
        for place, value in enumerate(sums):
            if isinstance(value, tf.Tensor):
                variable = self._holder(place, value)
                variable.assign(value)
                value = variable
            found.append(value)
        return found

    def _holder(self, place: int, spec: Any) -> tf.Variable:
        """Return the variable that holds sums of a shape."""
        key = place, tuple(spec.shape), spec.dtype
        if key not in self._sums:
            self._sums[key] = tf.Variable(nothing(spec), trainable=False)
        return self._sums[key]

    def zeros(self, name: Any, shapes: Sums) -> Sums:
        if self.replicas is not None:
            zeros = self.compiled(name, lambda: tf.nest.map_structure(nothing, shapes), [])
            return cast(Sums, zeros())
        held = [
            self._holder(place, spec)
            if isinstance(spec, (tf.Tensor, tf.TensorSpec))
            else tf.nest.map_structure(nothing, spec)
            for place, spec in enumerate(shapes.gradients)
        ]

        def begin(zero: Any) -> Sums:
            before: list[Any] = []
            for variable in held:
                if isinstance(variable, tf.Variable):  # one after the other, to hold each once
                    with tf.control_dependencies(before):
                        # No constant, which the function would keep.
                        filled = tf.fill(variable.shape, tf.cast(zero, variable.dtype))
                        before = [variable.assign(filled)]
            others = shapes._replace(gradients=[])
            return cast(Sums, tf.nest.map_structure(nothing, others))

        made: Sums = self.compiled(name, begin, [])(-0.0)
        return made._replace(gradients=held)

    # What is run.

    def run_step(self, data: Any) -> tuple[Any, list[Any]]:
        others = {id(raw(v)): v for v in self._model.non_trainable_variables}
        with self._running_step(), noting_writes(list(map(raw, others.values()))) as written:
            logs = self._model.train_step(data)
        return logs, [others[id(variable)] for variable in written]

    def logs_of(self, logs: Any) -> Any:
        """Return one of the logs of all replicas: their means, as Keras has it."""
        return logs if self._replicas is None else self._replicas.mean(logs)

    def exchanged(
        self, applied: Sequence[Applied], sums: Sums | None, is_measured: bool, is_end: bool
    ) -> tuple[Sums | None, bool]:
        if sums is None or self.replicas is None or self.replicas.number == 1:
            return sums, is_end
        numbers = sums._replace(gradients=[], amounts=[])
        exchange = self.compiled("exchange", self.replicas.exchanged, [])
        found: Sums = exchange(numbers)
        return found._replace(gradients=sums.gradients, amounts=sums.amounts), is_end

    def amounts_of_all(self, amounts: list[Amount]) -> list[Amount]:
        shared = self.replicas
        return amounts if shared is None or shared.number == 1 else shared.amounts(amounts)

    def sum_of_all(self, gradients: list[Any], total: Any) -> tuple[list[Any], Any]:
        if self.num_replicas == 1:
            return gradients, total
        context = tf.distribute.get_replica_context()

        def of_all(gradient: Any) -> Any:
            if gradient is None or isinstance(gradient, Largest):
                return gradient
            # Totals of replicas differ. What is computed is on the replica, as arguments are not.
            mean = with_values(gradient, lambda v: v / _numbers.like(v, total))
            if not isinstance(mean, Rows):
                return context.all_reduce("SUM", mean)
            parts = mean.values, tf.identity(mean.indices)
            values, ids = (context.all_gather(part, axis=0) for part in parts)
            return Rows(values, ids, mean.unit)

        return list(map(of_all, gradients)), 1.0

    def once(self, function: Callable[[], Any]) -> None:
        if self._replicas is None:
            function()
        else:
            self._replicas.once(function)

    def unscaled(self, loss: Any) -> Any:
        return unscaled_for_replicas(loss)

    def noting(
        self, function: Callable[..., Any], arguments: tuple[Any, ...], draws: Draws | None = None
    ) -> tuple[Any, dict[str, Any]]:
        noted = Noting(draws)
        found = noted.run(function, arguments)
        self.noted_of_shapes |= noted.of_shapes
        return found, noted.scalars

    def run_plain(
        self, train_step: Callable[..., Any], after_update: Callable[[], None], *arguments: Any
    ) -> Any:
        logs = train_step(*arguments)
        self.once(after_update)
        return logs

    def given(self, gradient: Any, variable: Any, is_dense: bool) -> Any:
        """Return the gradient of a variable as the core takes it, dense or as it is."""
        if is_dense or not isinstance(gradient, tf.IndexedSlices):
            gradient = tf.convert_to_tensor(gradient)
            gradient.set_shape(variable.shape)
            return gradient
        is_fixed, name = gradient.indices.shape[0] is not None, id(variable)
        if not self.traces:
            self._look_at_indices(name, gradient.indices)
        elif is_fixed and self.is_for_any_samples:  # so they are not looked up by samples
            self._by_position.add(name)
        if name in self._by_position:
            return Positions(gradient.values, gradient.indices, tf.zeros((), tf.float64))
        self._is_to_find_positions |= is_fixed and self.traces
        return Rows(gradient.values, gradient.indices, tf.zeros((), tf.float64))

    def _look_at_indices(self, name: int, indices: Any) -> None:
        """Find out of a table of an eager model whether indices are those of positions: 0, 1, ...

        Whose first ones are others has none, as those of samples are.
        """
        if name in self._has_indices and name not in self._by_position:
            return
        self._has_indices.add(name)
        number = indices.shape[0]
        if number > 1 and bool(tf.reduce_all(indices == tf.range(number, dtype=indices.dtype))):
            self._by_position.add(name)
        else:
            self._by_position.discard(name)

    def is_to_find_positions(self) -> bool:
        """Return whether it is not known of a sparse gradient if indices are of samples, once."""
        is_unknown = self._is_to_find_positions and not self._has_found_positions
        self._has_found_positions = self._has_found_positions or is_unknown
        return is_unknown

    def apply(self, applied: Applied, gradients: list[Any]) -> None:
        variables = list(applied.variables)
        gradients = [self._applied(gradient, v) for gradient, v in zip(gradients, variables)]
        optimizers.apply(applied.optimizer, gradients, variables, applied.via_apply_gradients)

    def _applied(self, gradient: Any, variable: Any) -> Any:
        """Return the gradient of a variable as optimizers take it."""
        if isinstance(gradient, Largest):
            return replicas.largest(gradient.values)
        if not isinstance(gradient, (Rows, Positions)):
            return gradient
        shape = tf.constant(list(variable.shape), tf.int64)
        return tf.IndexedSlices(gradient.values, gradient.indices, shape)

    def in_place_of(self, sums: list[Any], means: list[Any]) -> list[Any]:
        for held, mean in zip(self.holding.get(), means):
            if isinstance(held, tf.Variable) and mean.dtype == held.dtype:
                held.assign(mean)
        return means

    def joined(self, rows: Sequence[Rows], unit: Any) -> Rows:
        if (shared := self.replicas) is None or shared.is_inside():
            return self._joined(rows, unit)
        joined: list[Rows] = []
        for place, (own, own_unit) in enumerate(shared.each((rows, unit))):
            with shared.on_device(place):
                joined.append(self._joined(own, own_unit))
        return shared.together(joined)  # type: ignore[no-any-return]

    def _joined(self, rows: Sequence[Rows], unit: Any) -> Rows:
        values = [
            part.values * _numbers.like(part.values, shrinkage(part.unit, unit)) for part in rows
        ]
        indices = [part.indices for part in rows]
        if all(isinstance(part, Positions) for part in rows):
            values, indices = _once(values, indices)
        return Rows(tf.concat(values, 0), tf.concat(indices, 0), unit)

    @contextlib.contextmanager
    def keeping_state(self) -> Iterator[None]:
        if self._kept is None or not self.traces:
            self._kept = kept_variables(self._model)
        state, self._has_updated = State(self._model, self._kept), False
        try:
            yield
        except BaseException:
            state.put_back()
            raise

    def state(self) -> States:
        self._others = Variables()
        state = State(self._model, kept_variables(self._model, True))
        return States(state, self._others, super().state())

    def note_variables(self, graph: Any) -> None:
        """Note the variables of what was traced and is about to run for the first time."""
        self._kept = None  # it may have made variables
        if self._others is not None:
            self._others.note(graph.variables)

    def build(self, data: Any) -> None:
        model = self._model
        parts = [*model.metrics, *optimizers_in(vars(model)), compiled_loss(model)]
        if is_built(model, [part for part in parts if part is not None]):
            return
        if not self.traces:
            with contextlib.suppress(Exception):  # it may have no `call`
                build(model, data)
            return

        left = [part for part in optimizers_in(vars(model)) if not part.built]

        def step(data: Any) -> None:
            with unrecorded(), _built_outside.of(left):
                self.run_step(data.data if isinstance(data, AnySamples) else data)

        data = self.as_traced(tensors_in(data))
        if self.replicas is None:
            step_of_keras = tf.function(step, autograph=False)
            step_of_keras.get_concrete_function(specs_of(data))
        else:
            Compiled(self, step, jit_compile=False, consumes=False).shapes((data,))

    # What is refused, or found out.

    def check(self) -> None:
        replicas.check(self._model, self._model._accumulation.settings.microbatch_size)

    @contextlib.contextmanager
    def splitting_calls(self, size: int, most: int | None = None) -> Iterator[None]:
        calls = splitting_calls(self._model, self, size, self._known_calls, most)
        with self._graph_of_step.set(graph_being_made()), calls:
            yield

    def is_at_hand(self, tensor: Any) -> bool:
        return not tf.is_symbolic_tensor(tensor) or tensor.graph is graph_being_made()

    def place(self) -> Any:
        return graph_being_made()

    def is_in_step(self) -> bool:
        return graph_being_made() is self._graph_of_step.get()

    def run_apart(self, call: Apart, derives: bool = False) -> Callable[..., Any]:
        return layer_calls.run_apart(call.function, derives)

    def by_microbatches(self, split: Split) -> tuple[list[Any], Traced]:
        return layer_calls.Microbatches(split, bool(self._model.jit_compile)).run()

    def attached_to(self, output: Any) -> dict[str, Any]:
        return layer_calls.attached_to(output)

    def with_attached(self, output: Any, name: str, tensor: Any) -> Any:
        return layer_calls.with_attached(output, name, tensor)

    # Memory.

    @property
    def is_on_cpu(self) -> bool:
        every = [copy for v in self._model.variables for copy in replicas.copies(v)]
        return all("CPU" in copy.device for copy in every)

    @property
    def num_bytes_of_weights(self) -> int:
        weights = map(raw, self._model.trainable_variables)
        return sum(int(np.prod(weight.shape)) * weight.dtype.size for weight in weights)

    def wait_for(self, nest: Any) -> None:
        """Do nothing: an allocation fails where a function is called."""

    def out_of_memory(self, error: Exception) -> Exception | None:
        is_exhausted = isinstance(error, (tf.errors.ResourceExhaustedError, MemoryError))
        return error.with_traceback(None) if is_exhausted else None

    @contextlib.contextmanager
    def trying(self, is_own: bool) -> Iterator[None]:
        state = State(self._model, kept_variables(self._model, is_own))
        python = PythonState(self._model)
        try:
            yield
        finally:
            state.put_back()
            python.put_back()


def _building_outside(optimizer: Any, build: Callable[..., Any]) -> Callable[..., Any]:
    return functools.partial(optimizers.build_outside, optimizer, build)


_built_outside = MethodPatch("build", _building_outside)


def _once(values: list[Any], indices: list[Any]) -> tuple[list[Any], list[Any]]:
    """Return rows by position with each position once: those of the longest microbatch.

    Where microbatches have other indices at a position, they do not follow from it, and stay.
    """
    place = max(range(len(indices)), key=lambda place: int(indices[place].shape[0]))
    longest, total = indices[place], values[place]
    for other, (part, rows) in enumerate(zip(indices, values)):
        number = int(part.shape[0])
        is_same = tf.cast(part, longest.dtype) == longest[:number]
        if not bool(tf.reduce_all(is_same)):
            return values, indices
        if other != place:
            rest = tf.zeros_like(total[number:])
            total = total + tf.concat([rows, rest], 0)
    return [total], [longest]


def _is_made_of_parts(name: Any) -> bool:
    """Return whether XLA is to compile parts of a function at most: it runs a few times, or would
    share what microbatches of a call compute again."""
    if not isinstance(name, tuple):
        return False
    return name[0] in ("trial", "whole") or getattr(name[-1], "size", None) is not None


def _is_of_kind(name: Any, kind: str) -> bool:
    return isinstance(name, tuple) and name[0] == kind


def _copied(value: Any) -> Any:
    if isinstance(value, OnReplicas):
        return OnReplicas([_copied(part) for part in value.values])
    if isinstance(value, (tf.RaggedTensor, tf.SparseTensor)):
        return value
    return tf.identity(value) if tf.is_tensor(value) else value
