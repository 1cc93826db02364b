"""Functions of the core as `tf.function`s: their traces, arguments, and variables for sums."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import numpy as np
import optree
import tensorflow as tf

from ga_model.base import _numbers
from ga_model.base._context import ThreadValue
from ga_model.base._internals_tf import (
    are_eager_or_none,
    call_flat,
    shape_and_dtype,
    value_of,
)
from ga_model.base._types import Gradient, Logs, Nest, Tensor

if TYPE_CHECKING:
    from ga_model.backends.tensorflow.adapter import TensorFlowBackend
    from ga_model.backends.tensorflow.replicas import Replicas
    from ga_model.core.window import Sums


class Compiled:
    """A function of the core as a `tf.function`.

    With `holds`, its first argument is a list of sums of gradients, and it returns `Sums` and logs.
    Variables hold these sums, and each is written as soon as its gradient is computed: as arguments
    and results they would be in memory twice, beside all gradients of the microbatch. Such a
    function is not called on replicas or by other functions.
    """

    def __init__(
        self,
        backend: TensorFlowBackend,
        function: Callable[..., Nest],
        jit_compile: bool = False,
        holds: bool = False,
    ) -> None:
        self._backend, self._function = backend, function
        self._holds = holds
        self._skips_by_one = not jit_compile and backend.is_on_cpu
        run: Callable[..., Nest] = self._call
        if backend.replicas is not None:
            run = self._call_on_replicas
        elif self._holds:
            run = self._call_on_held
        self._run = tf.function(
            run,
            autograph=False,
            reduce_retracing=not backend.needs_number,  # it generalizes shapes that differ
            jit_compile=jit_compile,
        )
        # By the shapes of arguments.
        self._traced: dict[Hashable, tf.types.experimental.ConcreteFunction] = {}

    def __call__(self, *arguments: Nest) -> Nest:
        if self._holds:
            return self._run_on_held(*arguments)
        shared = self._backend.replicas
        if not tf.executing_eagerly():
            return (self._run if shared is None else self._call)(*tensors_in(arguments))
        if shared is None:
            return self._run_on(arguments)
        each = shared.per_replica(tensors_in(arguments))
        plain = [tuple(map(_plain, arguments)) for arguments in each]
        return shared.together(self._traced_for(each)(*plain))

    def _run_on_held(self, sums: list[Gradient], *others: Nest) -> tuple[Sums, Logs]:
        held = self._backend.held.hold(sums)
        unheld = [None if isinstance(value, tf.Variable) else value for value in held]
        with self._backend.held.present.set(held):
            after, logs = self._run_on((unheld, *others))
        pairs = zip(held, after.gradients)
        return after._replace(gradients=[v if g is None else g for v, g in pairs]), logs

    def _run_on(self, arguments: tuple[Nest, ...]) -> Nest:
        leaves = tf.nest.flatten(arguments)
        if not are_eager_or_none(leaves):
            arguments = tensors_in(arguments)
            leaves = tf.nest.flatten(arguments)
        traced = self._traced_for([arguments])
        if are_eager_or_none(leaves):
            return call_flat(traced, [leaf for leaf in leaves if leaf is not None])
        return traced(*map(_plain, arguments))

    def shapes(self, arguments: tuple[Nest, ...]) -> Nest:
        """Return the shapes of the function's results on one replica, without running it."""
        outputs = self._traced_for(
            self._backend.per_replica(tensors_in(arguments))
        ).structured_outputs
        return outputs if self._backend.replicas is None else outputs[0]

    def _call(self, *arguments: Nest) -> Nest:
        shapes = [leaf.shape for leaf in tf.nest.flatten(arguments) if tf.is_tensor(leaf)]
        is_any = any(shape.rank and shape[0] is None for shape in shapes)
        with self._backend.is_for_any_samples.set(is_any):
            return self._function(*arguments)

    def _call_on_held(self, unheld: list[Gradient], *others: Nest) -> tuple[Sums, Logs]:
        """Call the function on the sums that variables hold, and write the new sums to them."""
        held = self._backend.held.present.get()
        sums = [v.read_value() if isinstance(v, tf.Variable) else u for v, u in zip(held, unheld)]
        with _numbers.skips_by_one.set(self._skips_by_one):
            after, logs = self._call(sums, *others)
        gradients = list(after.gradients)
        for place, (value, gradient) in enumerate(zip(held, gradients)):
            if isinstance(value, tf.Variable) and isinstance(gradient, tf.Tensor):
                value.assign(gradient)
                gradients[place] = None
        return after._replace(gradients=gradients), logs

    def _call_on_replicas(self, *each: tuple[Nest, ...]) -> list[Nest]:
        return cast("Replicas", self._backend.replicas).run(self._call, each)

    def _traced_for(self, each: list[tuple[Nest, ...]]) -> tf.types.experimental.ConcreteFunction:
        """Return the trace for the arguments of each replica, or of the only one."""
        key = tuple(key_of(arguments) for arguments in each)
        if key not in self._traced:
            of_each = [tuple(map(_specs_of, arguments)) for arguments in each]
            specs = of_each[0] if self._backend.replicas is None else of_each
            self._traced[key] = self._run.get_concrete_function(*specs)
            self._backend.note_variables(self._traced[key].graph)
        return self._traced[key]


class HeldSums:
    """Variables that hold sums of gradients.

    Attributes:
        present: sums of the running function, with variables for dense ones.
    """

    def __init__(self) -> None:
        self._variables: dict[Hashable, tf.Variable] = {}
        self.present = ThreadValue(())

    def hold(self, sums: Iterable[Gradient]) -> list[Nest]:
        """Return sums of gradients, with variables for the dense ones."""
        held = list(sums)
        for place, value in enumerate(held):
            if isinstance(value, tf.Tensor):
                held[place] = self._variable(place, value)
                held[place].assign(value)
        return held

    def _variable(self, place: int, spec: tf.Tensor | tf.TensorSpec) -> tf.Variable:
        """Return the variable for the sum at an index, of the spec's shape and dtype."""
        key = place, tuple(spec.shape), spec.dtype
        if key not in self._variables:
            self._variables[key] = tf.Variable(nothing(spec), trainable=False)
        return self._variables[key]

    def variables_of(self, specs: Iterable[Nest]) -> list[Nest]:
        """Return variables for the dense sums among specs, and initial values of the others."""
        return [
            self._variable(place, spec)
            if isinstance(spec, (tf.Tensor, tf.TensorSpec))
            else tf.nest.map_structure(nothing, spec)
            for place, spec in enumerate(specs)
        ]

    def fill(self, sums: Iterable[Nest], zero: tf.Tensor) -> None:
        """Fill the variables among sums with a scalar, one by one to save memory."""
        before: list[tf.Variable] = []
        for variable in sums:
            if isinstance(variable, tf.Variable):
                with tf.control_dependencies(before):
                    # A constant would be kept in memory by the function.
                    filled = tf.fill(variable.shape, tf.cast(zero, variable.dtype))
                    before = [variable.assign(filled)]


def nothing(spec: tf.Tensor | tf.TensorSpec | None) -> tf.Tensor | None:
    """Return the initial sum, -0.0: adding a zero to it keeps the sign of that zero."""
    if spec is None:
        return None
    if spec.dtype.is_floating:
        return tf.fill(spec.shape, tf.constant(-0.0, spec.dtype))
    return tf.zeros(spec.shape, spec.dtype)


class AnySamples(NamedTuple):
    """A microbatch to trace for any number of samples."""

    data: Nest


def _plain(argument: Nest) -> Nest:
    """Return an argument in the structure in which other functions pass it on."""
    return argument.data if isinstance(argument, AnySamples) else argument


def _specs_of(argument: Nest) -> Nest:
    """Return type specs for the tensors of an argument."""
    is_any = isinstance(argument, AnySamples)
    return tf.nest.map_structure(lambda leaf: _spec(leaf, is_any), _plain(argument))


def _spec(leaf: Tensor | None, is_any: bool) -> tf.TypeSpec | None:
    if leaf is None:
        return None
    spec = tf.type_spec_from_value(leaf)
    if not (is_any and leaf.shape.rank):
        return spec
    shape = tf.TensorShape([None, *leaf.shape[1:]])
    if isinstance(leaf, tf.RaggedTensor):
        return tf.RaggedTensorSpec(shape, leaf.dtype, leaf.ragged_rank, leaf.row_splits.dtype)
    return type(spec)(shape, leaf.dtype)


def key_of(arguments: tuple[Nest, ...]) -> Hashable:
    """Return a key for the structure, shapes and dtypes of arguments: nests of tensors and None.

    That of `AnySamples` is the same for any number of samples.
    """
    keys = []
    for argument in arguments:
        leaves, structure = optree.tree_flatten(argument, none_is_leaf=True)
        is_any = isinstance(argument, AnySamples)
        keys.append((structure, *[_key_of_leaf(leaf, is_any) for leaf in leaves]))
    return tuple(keys)


def _key_of_leaf(leaf: Tensor | None, is_any: bool) -> Hashable:
    if not isinstance(leaf, tf.Tensor):
        return _spec(leaf, is_any)
    shape, dtype = shape_and_dtype(leaf)
    return shape[1:] if is_any and shape else shape, dtype


def tensors_in(nest: Nest) -> Nest:
    """Return a nest with numbers as tensors, as each new number would need its own trace."""
    if are_eager_or_none(tf.nest.flatten(nest)):
        return nest
    if type(nest) in (tuple, list):  # `map_structure` is slow
        return type(nest)(map(tensors_in, nest))
    return tf.nest.map_structure(_tensor, nest)


def _tensor(leaf: Any) -> Any:
    if isinstance(leaf, tf.Variable):
        return value_of(leaf) if tf.executing_eagerly() else leaf.read_value()
    if isinstance(leaf, float):
        return tf.constant(leaf, tf.float64)
    return tf.constant(leaf) if isinstance(leaf, (int, np.generic, np.ndarray)) else leaf
