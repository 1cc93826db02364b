"""TensorFlow: functions of the core are `tf.function`s that read and write variables directly."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from typing import cast

import keras
import numpy as np
import tensorflow as tf

from ga_model.backends.tensorflow import layer_calls, optimizers, replicas, sparse, workers
from ga_model.backends.tensorflow.compiled import (
    AnySamples,
    Compiled,
    HeldSums,
    key_of,
    nothing,
    tensors_in,
)
from ga_model.backends.tensorflow.noting import Noting
from ga_model.backends.tensorflow.replicas import Replicas, SharedBatch
from ga_model.backends.tensorflow.sparse import Tables
from ga_model.backends.tensorflow.state import State, Variables
from ga_model.base import _numbers
from ga_model.base._context import ThreadValue
from ga_model.base._internals import (
    build,
    compiled_loss,
    is_built,
    iterations_variable,
    raw,
    strategy_of_model,
)
from ga_model.base._internals_tf import graph_being_made, is_branch, recording_writes
from ga_model.base._method_patch import MethodPatch
from ga_model.base._types import Gradient, Logs, Nest, Scalar
from ga_model.core.backend import Backend
from ga_model.core.backend_types import Applied, Function, Name, States
from ga_model.core.batch import Batch
from ga_model.core.call_types import Split, Traced
from ga_model.core.messages import inner_graph_message
from ga_model.core.models import is_of_keras, optimizers_in, unrecorded
from ga_model.core.recorder import CannotAccumulateError, Recording
from ga_model.core.snapshots import state_variables
from ga_model.core.user_code import python_state_of
from ga_model.core.window import Amount, Largest, Rows, Sums, with_values


def _move(applied: Applied, gradients: list[Gradient], rate: tf.Tensor) -> None:
    """Make the surrogate update of a trial."""
    for variable, gradient in zip(applied.variables, gradients):
        if gradient is not None:
            step = tf.math.multiply_no_nan(gradient, tf.cast(rate, gradient.dtype))
            raw(variable).assign_sub(tf.cast(step, raw(variable).dtype))
    counter = raw(iterations_variable(applied.optimizer))
    counter.assign_add(tf.cast(rate != 0, counter.dtype))


class TensorFlowBackend(Backend):
    """Runs functions of the core in graphs, or eagerly if the model does.

    Attributes:
        held: variables that hold the sums of an open window.
        tables: record of the tables that are looked up by position.
        element_specs: type specs of the tensors of a batch, if the dataset has them.
        needs_number: whether steps are traced for one number of samples, and not for any.
        is_for_any_samples: whether the present trace is for any number of samples.
    """

    noted_class = Noting

    def __init__(self, model: keras.Model) -> None:
        super().__init__(model)
        self.held, self.tables = HeldSums(), Tables()
        self.is_for_any_samples = ThreadValue(False)
        self.element_specs: Sequence[tf.TypeSpec] = ()
        self.needs_number = False
        strategy = strategy_of_model(model)
        self._replicas = None if strategy is None else Replicas(strategy)
        self._is_on_one = self._has_updated = False
        self._others: Variables | None = None  # variables outside the model that a trial uses
        # Variables that steps write to, a cache until a trace.
        self._kept: list[keras.Variable] | None = None

    @property
    def nests(self) -> bool:  # type: ignore[override]
        return self.replicas is None

    @property
    def num_replicas(self) -> int:  # type: ignore[override]
        return 1 if self.replicas is None else self.replicas.number

    @property
    def replicas(self) -> Replicas | None:
        """The replicas that functions run on now, or None without a strategy."""
        return None if self._is_on_one else self._replicas

    @contextlib.contextmanager
    def on_one_replica(self) -> Iterator[None]:
        outer, self._is_on_one = self._is_on_one, True
        try:
            yield
        finally:
            self._is_on_one, self._others = outer, None

    def samples_of(self, data: Nest, of_all: bool = False) -> Nest:
        return data if self.replicas is None else self.replicas.samples_of(data, of_all)

    @property
    def traces(self) -> bool:  # type: ignore[override]
        return not self._model.run_eagerly

    # Compiled functions.

    def _compiled(self, name: Name, function: Function) -> Callable[..., Nest]:
        if not self.traces:
            run: Callable[..., Nest] = functools.partial(self._run_eagerly, function.run)
        else:
            jit_compile = bool(self._model.jit_compile) and not _is_made_of_parts(name)
            jit_compile = jit_compile and self._replicas is None  # replicas exchange inside
            run = Compiled(self, function.run, jit_compile, function.consumes)
        return functools.partial(self._update, run) if function.updates else run

    def _update(self, run: Callable[..., Nest], *arguments: Nest) -> Nest:
        """Run a function that may already have updated weights when it fails."""
        self._has_updated = True
        return run(*arguments)

    def has_updated(self) -> bool:
        return self._has_updated

    def _run_eagerly(self, function: Callable[..., Nest], *arguments: Nest) -> Nest:
        tensors, shared = tensors_in(arguments), self.replicas
        if shared is None or shared.is_inside():
            return function(*tensors)
        return shared.together(shared.run(function, shared.per_replica(tensors)))

    @staticmethod
    @functools.lru_cache(64)  # all batches use the same few numbers
    def number(value: float) -> tf.Tensor:
        return tf.constant(value, tf.float64)

    def key_of(self, arguments: tuple[Nest, ...]) -> Hashable:
        keys = tuple(map(key_of, self.per_replica(tensors_in(arguments))))
        return keys, len(self._model.trainable_variables)

    def per_replica(self, nest: Nest) -> list[Nest]:
        return [nest] if self.replicas is None else self.replicas.per_replica(nest)

    def batch(self, data: Nest, size: int | None) -> Batch:
        if self.replicas is None:
            return Batch(data, size)
        return SharedBatch(self.replicas, tensors_in(data), size)

    def as_traced(self, data: Nest) -> Nest:
        return AnySamples(data) if self.traces and not self.needs_number else data

    def retraces_after(self, error: Exception) -> bool | None:
        if not self.traces or isinstance(error, (tf.errors.OpError, MemoryError)):
            return None
        self.needs_number = not self.needs_number  # and back if that raises an error, too
        self._made = {}  # drops the other kind of traces
        return self.needs_number

    def copied(self, nest: Nest) -> Nest:
        # Tensors never change, but sums may be variables.
        return tf.nest.map_structure(
            lambda leaf: leaf.read_value() if isinstance(leaf, tf.Variable) else leaf, nest
        )

    def assign(self, values: Iterable[tuple[keras.Variable, np.ndarray]]) -> None:
        for variable, value in values:
            for copy in replicas.copies(variable):
                copy.assign(value)

    def zeros(self, name: Name, shapes: Sums) -> Sums:
        if self.replicas is not None:
            zeros = self.compiled(name, lambda: tf.nest.map_structure(nothing, shapes), [])
            return cast(Sums, zeros())
        others, gradients = shapes._replace(gradients=[]), self.held.variables_of(shapes.gradients)

        def begin(zero: tf.Tensor) -> Sums:
            self.held.fill(gradients, zero)
            return cast(Sums, tf.nest.map_structure(nothing, others))

        made: Sums = self.compiled(name, begin, [])(-0.0)
        return made._replace(gradients=gradients)

    # Steps.

    def run_step(self, data: Nest) -> tuple[Logs, list[keras.Variable]]:
        others = {id(raw(v)): v for v in self._model.non_trainable_variables}
        noting = recording_writes(list(map(raw, others.values())))
        with self.running_step(), noting as written:
            logs = self._model.train_step(data)
        return logs, [others[id(variable)] for variable in written]

    def logs_of(self, logs: Logs) -> Logs:
        """Return the means of the logs of all replicas, as Keras does."""
        return logs if self._replicas is None else self._replicas.mean(logs)

    def exchange_sums(
        self, applied: Sequence[Applied], sums: Sums | None, is_measured: bool, is_end: bool
    ) -> tuple[Sums | None, bool]:
        if sums is None or self.replicas is None or self.replicas.number == 1:
            return sums, is_end
        numbers = sums._replace(gradients=[], amounts=[])
        exchange = self.compiled("exchange", self.replicas.exchange_sums, [])
        summed: Sums = exchange(numbers)
        return summed._replace(gradients=sums.gradients, amounts=sums.amounts), is_end

    def amounts_over_replicas(self, amounts: list[Amount]) -> list[Amount]:
        shared = self.replicas
        return amounts if shared is None or shared.number == 1 else shared.amounts(amounts)

    def gradients_over_replicas(
        self, gradients: list[Gradient], total: Scalar
    ) -> tuple[list[Gradient], Scalar]:
        if self.num_replicas == 1:
            return gradients, total
        context = tf.distribute.get_replica_context()

        def of_all(gradient: Gradient) -> Gradient:
            if gradient is None or isinstance(gradient, Largest):
                return gradient
            # Totals differ by replica. Arguments are not on its device; computed tensors are.
            mean = with_values(gradient, lambda v: v / _numbers.like(v, total))
            if not isinstance(mean, Rows):
                return context.all_reduce("SUM", mean)
            parts = mean.values, tf.identity(mean.indices)
            values, ids = (context.all_gather(part, axis=0) for part in parts)
            return Rows(values, ids, mean.unit)

        return list(map(of_all, gradients)), 1.0

    def once(self, function: Callable[[], None]) -> None:
        if self._replicas is None:
            function()
        else:
            self._replicas.once(function)

    is_driven_by_python = staticmethod(tf.executing_eagerly)

    def record_gradients(
        self, recording: Recording, applied: Applied, gradients: list[Gradient]
    ) -> None:
        optimizer, variables, _ = applied
        if is_branch(graph_being_made()):
            raise CannotAccumulateError(inner_graph_message(recording.model.name))
        if not optimizer.built:
            optimizers.build_outside(optimizer, optimizer.build, variables, is_seen=True)
        is_dense = recording.moves_by is not None
        gradients = [
            None if g is None else self._given(g, v, is_dense) for g, v in zip(gradients, variables)
        ]
        recording.apply(applied, gradients)
        if recording.is_moving:
            rate = recording.rate_of(gradients, variables)
            with self.unnoted():
                _move(applied, gradients, rate)

    def _given(
        self, gradient: tf.Tensor | tf.IndexedSlices, variable: keras.Variable, is_dense: bool
    ) -> tf.Tensor | Rows:
        """Return a gradient in the core's form: dense, or `Rows` if it is sparse."""
        if is_dense or not isinstance(gradient, tf.IndexedSlices):
            gradient = tf.convert_to_tensor(gradient)
            gradient.set_shape(variable.shape)
            return gradient
        is_any = self.is_for_any_samples.get()
        return self.tables.rows_of(gradient, id(variable), self.traces, is_any)

    apply = staticmethod(optimizers.apply)

    def joined(self, rows: Sequence[Rows], unit: Scalar, total: Scalar | None = None) -> Rows:
        if (shared := self.replicas) is None or shared.is_inside():
            return sparse.joined(rows, unit, total)
        each = shared.per_replica((rows, unit, total))
        return cast(Rows, shared.on_devices(lambda arguments: sparse.joined(*arguments), each))

    @contextlib.contextmanager
    def keeping_state(self) -> Iterator[None]:
        if self._kept is None or not self.traces:
            is_own = not is_of_keras(self._model, "train_step")  # others write to these in updates
            self._kept = state_variables(self._model, self.optimizers() if is_own else ())
        state, self._has_updated = State(self._model, self._kept), False
        try:
            yield
        except BaseException:
            state.restore()
            raise

    def state(self) -> States:
        self._others = Variables()
        return States(self._all_kept(True), self._others, super().state())

    def _all_kept(self, with_weights: bool) -> State:
        variables = state_variables(self._model, self.optimizers(), with_weights)
        return State(self._model, variables)

    def note_variables(self, graph: tf.Graph) -> None:
        """Record the variables of a new trace, before its first run."""
        self._kept = None  # the trace may have created variables
        if self._others is not None:
            self._others.note(graph.variables)

    def build(self, data: Nest) -> None:
        model = self._model
        parts = [*model.metrics, *optimizers_in(vars(model)), compiled_loss(model)]
        if is_built(model, [part for part in parts if part is not None]):
            return
        if not self.traces:
            with contextlib.suppress(Exception):  # it may have no `call`
                build(model, data)
            return

        left = [part for part in optimizers_in(vars(model)) if not part.built]

        def step(data: Nest) -> None:
            unseen = tf.variable_creator_scope(optimizers.create_unseen)
            with unrecorded(), _built_outside.of(left), unseen:
                self.run_step(data)

        # Layers show the shapes.
        knows_number = self.replicas is None and _know_number(self.element_specs)
        Compiled(self, step).shapes((data if knows_number else AnySamples(data),))

    def begin_epoch(self, epoch: int, is_first: bool) -> None:
        if is_first:
            workers.check_same_epoch(self._model.distribute_strategy, epoch)

    def explain(self, error: BaseException) -> None:
        workers.explain(error, self._model.distribute_strategy)

    # Checks, and calls of layers.

    def check(self) -> None:
        replicas.check(self._model, self._model._accumulation.settings.microbatch_size)

    def is_available(self, tensor: tf.Tensor) -> bool:
        return not tf.is_symbolic_tensor(tensor) or tensor.graph is graph_being_made()

    current_graph = staticmethod(graph_being_made)
    run_isolated = staticmethod(layer_calls.run_isolated)

    def by_microbatches(self, split: Split) -> tuple[list[tf.Tensor], Traced]:
        return layer_calls.Microbatches(split, bool(self._model.jit_compile)).run()

    attached_to = staticmethod(layer_calls.attached_to)
    with_attached = staticmethod(layer_calls.with_attached)

    # Memory.

    @property
    def is_on_cpu(self) -> bool:
        every = [copy for v in self._model.variables for copy in replicas.copies(v)]
        return all("CPU" in copy.device for copy in every)

    def out_of_memory(self, error: Exception) -> Exception | None:
        is_exhausted = isinstance(error, (tf.errors.ResourceExhaustedError, MemoryError))
        # The status of oneDNN for a failed allocation.
        is_exhausted |= isinstance(error, tf.errors.AbortedError) and "Status: 1," in str(error)
        return error.with_traceback(None) if is_exhausted else None

    @contextlib.contextmanager
    def restoring(self, is_own: bool) -> Iterator[None]:
        state = States(self._all_kept(is_own), python_state_of(self._model))
        try:
            yield
        finally:
            state.restore()


_built_outside = MethodPatch(
    "build", lambda optimizer, build: functools.partial(optimizers.build_outside, optimizer, build)
)


def _know_number(specs: Sequence[tf.TypeSpec]) -> bool:
    """Return whether the specs of a dataset have the number of samples of a batch."""
    shapes = [getattr(spec, "shape", None) for spec in specs]
    known = [shape for shape in shapes if shape is not None]
    return all(shape.rank is not None and None not in shape[:1] for shape in known)


def _is_made_of_parts(name: Name) -> bool:
    """Return whether XLA must not compile the function as a whole: it runs a few times only, or
    recomputes microbatches of layer calls, which XLA would share with the first pass."""
    if not isinstance(name, tuple):
        return False
    return name[0] in ("trial", "whole") or getattr(name[-1], "size", None) is not None
