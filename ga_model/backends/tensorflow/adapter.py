"""TensorFlow: a function of the core is a `tf.function`, on variables as they are."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import keras
import numpy as np
import tensorflow as tf

from ga_model.backends.tensorflow import layer_calls
from ga_model.backends.tensorflow.noting import Noting
from ga_model.backends.tensorflow.state import State
from ga_model.base import _numbers
from ga_model.base._call_again import PythonState
from ga_model.base._context import graph_being_made
from ga_model.base._internals import (
    build,
    compiled_loss,
    is_built,
    num_updates,
    raw,
)
from ga_model.base._internals_tf import noting_writes
from ga_model.core.backend import GROUPS, Backend, Group, States
from ga_model.core.layer_calls import Split, Traced, splitting_calls
from ga_model.core.proof.draws import Draws
from ga_model.core.recorder import Applied
from ga_model.core.window import Positions, Rows, shrinkage
from ga_model.hearing._models import optimizers_in, unrecorded
from ga_model.hearing._stand_ins import OptimizerStandIn


class StandIn(OptimizerStandIn):
    """Stands in for an optimizer while a step is recorded."""

    def _take(self, gradients: list[Any], variables: list[Any], in_pairs: bool = False) -> None:
        optimizer, recording = self._original, self._listener
        if not optimizer.built:
            with tf.init_scope(), keras.name_scope(optimizer.name):
                optimizer.build(variables)
        is_dense = recording.rate is not None
        gradients = [
            None if g is None else recording.backend.given(g, v, is_dense)
            for g, v in zip(gradients, variables)
        ]
        recording.apply(optimizer, gradients, variables, in_pairs=in_pairs)
        if recording.rate is not None:
            _move(optimizer, gradients, variables, recording.rate)


def _move(optimizer: Any, gradients: list[Any], variables: list[Any], rate: Any) -> None:
    """Make the surrogate update of a trial."""
    for variable, gradient in zip(variables, gradients):
        if gradient is not None:
            step = tf.math.multiply_no_nan(gradient, tf.cast(rate, gradient.dtype))
            raw(variable).assign_sub(tf.cast(step, raw(variable).dtype))
    counter = raw(num_updates(optimizer))
    counter.assign_add(tf.cast(rate != 0, counter.dtype))


def _applied(gradient: Any, variable: Any) -> Any:
    """Return the gradient of a variable as optimizers take it."""
    if not isinstance(gradient, (Rows, Positions)):
        return gradient
    shape = tf.constant(list(variable.shape), tf.int64)
    return tf.IndexedSlices(gradient.values, gradient.indices, shape)


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
        self.knows_samples = True
        self.is_for_any_samples = False
        self._by_position: set[int] = set()  # variables
        self._is_to_find_positions = self._has_found_positions = False
        self._known_calls: dict[Any, Any] = {}  # what was found of calls of layers
        self._graph_of_step: Any = None

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
        if not self.traces:
            return lambda *arguments: function(*map(_tensors, arguments))
        if name not in self._made:
            jit_compile = bool(self._model.jit_compile) and not _is_made_of_parts(name)
            self._made[name] = Compiled(self, function, jit_compile, consumes)
        return self._made[name]  # type: ignore[no-any-return]

    def forget(self, kind: str) -> None:
        self._made = {n: m for n, m in self._made.items() if not _is_of_kind(n, kind)}

    def shapes(self, function: Any, arguments: tuple[Any, ...]) -> Any:
        return function.shapes(arguments)

    def key_of(self, arguments: tuple[Any, ...]) -> Any:
        return _key_of(_tensors(arguments)), len(self._model.trainable_variables)

    def as_traced(self, data: Any) -> Any:
        return data if self.knows_samples or not self.traces else AnySamples(data)

    def copied(self, nest: Any) -> Any:
        return keras.tree.map_structure(_copied, nest)

    def structure_of(self, data: Any) -> Any:
        return repr(keras.tree.map_structure(_kind_of, data))

    def zeros(self, name: Any, shapes: Any) -> Any:
        def zeros() -> Any:
            return tf.nest.map_structure(_nothing, shapes)

        return self.compiled(name, zeros, [])()

    # What is run.

    def run_step(self, data: Any) -> tuple[Any, list[Any]]:
        others = {id(raw(v)): v for v in self._model.non_trainable_variables}
        with self._running_step(), noting_writes(list(map(raw, others.values()))) as written:
            logs = self._model.train_step(data)
        return logs, [others[id(variable)] for variable in written]

    def noting(
        self, function: Callable[..., Any], arguments: tuple[Any, ...], draws: Draws | None = None
    ) -> tuple[Any, dict[str, Any]]:
        noted = Noting(draws)
        return noted.run(function, arguments), noted.scalars

    def run_plain(
        self, train_step: Callable[..., Any], after_update: Callable[[], None], *arguments: Any
    ) -> Any:
        logs = train_step(*arguments)
        after_update()
        return logs

    def given(self, gradient: Any, variable: Any, is_dense: bool) -> Any:
        """Return the gradient of a variable as the core takes it, dense or as it is."""
        if is_dense or not isinstance(gradient, tf.IndexedSlices):
            gradient = tf.convert_to_tensor(gradient)
            gradient.set_shape(variable.shape)
            return gradient
        is_fixed, name = gradient.indices.shape[0] is not None, id(variable)
        if is_fixed and self.is_for_any_samples:  # so they are not looked up by samples
            self._by_position.add(name)
        if name in self._by_position:
            return Positions(gradient.values, gradient.indices)
        self._is_to_find_positions |= is_fixed and self.traces
        return Rows(gradient.values, gradient.indices, tf.zeros((), tf.float64))

    def is_to_find_positions(self) -> bool:
        """Return whether it is not known of a sparse gradient if indices are of samples, once."""
        is_unknown = self._is_to_find_positions and not self._has_found_positions
        self._has_found_positions = self._has_found_positions or is_unknown
        return is_unknown

    def apply(self, applied: Applied, gradients: list[Any]) -> None:
        pairs = zip(gradients, applied.variables)
        super().apply(applied, [_applied(gradient, variable) for gradient, variable in pairs])

    def joined(self, rows: Sequence[Rows], unit: Any) -> Rows:
        values = [
            part.values * _numbers.like(part.values, shrinkage(part.unit, unit)) for part in rows
        ]
        return Rows(tf.concat(values, 0), tf.concat([part.indices for part in rows], 0), unit)

    @contextlib.contextmanager
    def keeping_state(self) -> Iterator[None]:
        state = State(self._model)
        try:
            yield
        except BaseException:
            state.put_back()
            raise

    def state(self) -> States:
        return States(State(self._model, with_weights=True), super().state())

    def build(self, data: Any) -> None:
        model = self._model
        parts = [*model.metrics, *optimizers_in(vars(model)), compiled_loss(model)]
        if is_built(model, [part for part in parts if part is not None]):
            return
        if not self.traces:
            with contextlib.suppress(Exception):  # it may have no `call`
                build(model, data)
            return

        def step(data: Any) -> None:
            with unrecorded():
                self.run_step(data.data if isinstance(data, AnySamples) else data)

        step_of_keras = tf.function(step, autograph=False)
        step_of_keras.get_concrete_function(_specs(self.as_traced(_tensors(data))))

    # What is refused, or found out.

    def check(self) -> None:
        """Do nothing: there is one replica."""

    @contextlib.contextmanager
    def splitting_calls(self, size: int, most: int | None = None) -> Iterator[None]:
        outer, self._graph_of_step = self._graph_of_step, graph_being_made()
        try:
            with splitting_calls(self._model, self, size, self._known_calls, most):
                yield
        finally:
            self._graph_of_step = outer

    def is_in_step(self) -> bool:
        return graph_being_made() is self._graph_of_step

    def run_apart(self, function: Callable[..., Any]) -> Callable[..., Any]:
        return layer_calls.run_apart(function)

    def by_microbatches(self, split: Split) -> tuple[list[Any], Traced]:
        return layer_calls.Microbatches(split, bool(self._model.jit_compile)).run()

    def attached_to(self, output: Any) -> dict[str, Any]:
        return layer_calls.attached_to(output)

    def with_attached(self, output: Any, name: str, tensor: Any) -> Any:
        return layer_calls.with_attached(output, name, tensor)

    # Memory.

    @property
    def is_on_cpu(self) -> bool:
        return all("CPU" in raw(v).device for v in self._model.variables)

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
        state, python = State(self._model, with_weights=is_own), PythonState(self._model)
        try:
            yield
        finally:
            state.put_back()
            python.put_back()


class Compiled:
    """A function of the core as a `tf.function`.

    Args:
        backend: what makes it.
        function: the function.
        jit_compile: whether XLA compiles it.
        consumes: whether the shapes of its first argument are always the same.
    """

    def __init__(
        self,
        backend: TensorFlowBackend,
        function: Callable[..., Any],
        jit_compile: bool,
        consumes: bool,
    ) -> None:
        self._backend, self._function, self._jit_compile = backend, function, jit_compile
        self._run = self._made()
        self._num_fixed = int(consumes)
        self._traced: dict[Any, Any] = {}  # by the shapes of arguments

    def __call__(self, *arguments: Any) -> Any:
        tensors = _tensors(arguments)
        if not tf.executing_eagerly():
            return self._run(*tensors)
        return self._traced_for(tensors)(*tensors)

    def shapes(self, arguments: tuple[Any, ...]) -> Any:
        """Return the shapes of what the function returns, and run nothing."""
        tensors = _tensors(arguments)
        found = self._traced_for(tensors)
        if self._backend.is_to_find_positions():
            any_samples = [
                AnySamples(a) if isinstance(a, (tuple, tf.Tensor)) else a for a in tensors
            ]
            with contextlib.suppress(Exception):  # a step may need to know the number
                self._made().get_concrete_function(*map(_specs, any_samples))
            self._run, self._traced = self._made(), {}
            found = self._traced_for(tensors)
        return found.structured_outputs

    def _made(self) -> Any:
        return tf.function(
            self._call, autograph=False, reduce_retracing=True, jit_compile=self._jit_compile
        )

    def _call(self, *arguments: Any) -> Any:
        backend, outer = self._backend, self._backend.is_for_any_samples
        backend.is_for_any_samples = any(isinstance(a, AnySamples) for a in arguments)
        try:
            return self._function(*(a.data if isinstance(a, AnySamples) else a for a in arguments))
        finally:
            backend.is_for_any_samples = outer

    def _traced_for(self, arguments: tuple[Any, ...]) -> Any:
        key = _key_of(arguments[self._num_fixed :])
        if key not in self._traced:
            specs = tuple(map(_specs, arguments))
            self._traced[key] = self._run.get_concrete_function(*specs)
        return self._traced[key]


class AnySamples(NamedTuple):
    """A microbatch of a source of data that does not tell how many samples a batch has.

    Plain Keras draws one graph for any number of them.
    """

    data: Any


def _specs(argument: Any) -> Any:
    """Return type specs for the tensors of an argument."""
    is_any = isinstance(argument, AnySamples)
    return tf.nest.map_structure(lambda leaf: _spec(leaf, is_any), argument)


def _spec(leaf: Any, is_any: bool = False) -> Any:
    if leaf is None:
        return None
    spec = tf.type_spec_from_value(leaf)
    if not (is_any and leaf.shape.rank):
        return spec
    shape = tf.TensorShape([None, *leaf.shape[1:]])
    if isinstance(leaf, tf.RaggedTensor):
        return tf.RaggedTensorSpec(shape, leaf.dtype, leaf.ragged_rank, leaf.row_splits.dtype)
    return type(spec)(shape, leaf.dtype)


def _key_of(arguments: Sequence[Any]) -> Any:
    """Return a key for the shapes and dtypes of arguments."""
    found: list[Any] = []
    for argument in arguments:
        is_any = isinstance(argument, AnySamples)
        for leaf in tf.nest.flatten(argument):
            if isinstance(leaf, tf.Tensor):
                shape = tuple(leaf.shape)
                found.append((shape[1:] if is_any else shape, leaf.dtype))
            else:
                found.append(_spec(leaf, is_any))
    return tuple(found)


def _is_made_of_parts(name: Any) -> bool:
    """Return whether XLA is to compile parts of a function at most: it runs a few times, or would
    share what microbatches of a call compute again."""
    if not isinstance(name, tuple):
        return False
    return name[0] in ("trial", "whole") or getattr(name[-1], "size", None) is not None


def _is_of_kind(name: Any, kind: str) -> bool:
    return isinstance(name, tuple) and name[0] == kind


def _tensors(nest: Any) -> Any:
    """Return a nest with tensors for numbers, of which each other one would be another trace."""
    return tf.nest.map_structure(_tensor, nest)


def _tensor(leaf: Any) -> Any:
    if isinstance(leaf, (bool, np.bool_)):
        return tf.constant(leaf)
    if isinstance(leaf, float):
        return tf.constant(leaf, tf.float64)
    return tf.constant(leaf) if isinstance(leaf, (int, np.generic, np.ndarray)) else leaf


def _nothing(spec: Any) -> Any:
    if spec is None:
        return None
    if spec.dtype.is_floating:
        return tf.fill(spec.shape, tf.constant(-0.0, spec.dtype))
    return tf.zeros(spec.shape, spec.dtype)


def _copied(value: Any) -> Any:
    if isinstance(value, (tf.RaggedTensor, tf.SparseTensor)):
        return value
    return tf.identity(value) if tf.is_tensor(value) else value


def _kind_of(leaf: Any) -> Any:
    return len(getattr(leaf, "shape", ())), str(getattr(leaf, "dtype", type(leaf)))
