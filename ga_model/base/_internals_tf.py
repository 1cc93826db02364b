"""Private names of TensorFlow, and of Keras on TensorFlow: see `_internals`."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterator, Sequence
from types import NoneType
from typing import Any, NoReturn, TypeAlias
from weakref import WeakKeyDictionary

import keras
import tensorflow as tf
from keras.src.backend.tensorflow.trainer import reduce_per_replica
from tensorflow.python import pywrap_tfe
from tensorflow.python.data.ops.iterator_ops import OwnedIterator
from tensorflow.python.data.util import nest
from tensorflow.python.eager import core, execute, forwardprop_util, record
from tensorflow.python.framework import op_callbacks, ops
from tensorflow.python.framework.auto_control_deps_utils import (
    RESOURCE_READ_OPS,
    get_read_write_resource_inputs,
)
from tensorflow.python.ops import gen_dataset_ops, gradients_util

from ga_model.base._types import Gradient, Nest

# Takes the type of an operation and the lists of its input and output tensors. Returns tensors to
# replace the outputs, or None.
See: TypeAlias = Callable[
    [str, Sequence[tf.Tensor], Sequence[tf.Tensor]], Sequence[tf.Tensor] | None
]

# The `experimental_attributes` of a `tf.function` that is not inlined.
NOT_INLINED = {"_noinline": True}

# Tapes and graphs.


def graph_being_made() -> tf.Graph | None:
    """Return the graph that this thread adds operations to, or None in eager mode."""
    return None if tf.executing_eagerly() else ops.get_default_graph()


def call_flat(function: tf.types.experimental.ConcreteFunction, tensors: list[tf.Tensor]) -> Nest:
    """Call a concrete function with its arguments' tensors, flattened as by `tf.nest.flatten`."""
    # A normal call flattens the arguments itself, which takes as long as a small step.
    return function._call_flat(tensors, function.captured_inputs)


def value_of(variable: tf.Variable) -> tf.Tensor:
    """Return the value of a local variable, in a fifth of the time of `read_value`."""
    return tf.raw_ops.ReadVariableOp(resource=variable.handle, dtype=variable.dtype)


def are_eager_or_none(values: Sequence[Any]) -> bool:
    """Return whether all values are eager tensors or None. `isinstance` takes ten times as long."""
    return {*map(type, values)} <= {ops.EagerTensor, NoneType}


def shape_and_dtype(tensor: tf.Tensor) -> tuple[tuple[int | None, ...] | None, int]:
    """Return a tensor's shape, None if the rank is unknown, and the number of its dtype.

    This takes a fifth of the time of `shape` and `dtype`.
    """
    return tensor._shape_tuple(), tensor._datatype_enum()


def are_watched_by_tape(tensors: Sequence[tf.Tensor]) -> bool:
    """Return whether a tape watches one of the tensors."""
    return bool(record.should_record_backprop(tensors))


def has_forward_derivatives(tensors: Sequence[tf.Tensor]) -> bool:
    """Return whether a `tf.autodiff.ForwardAccumulator` watches one of the tensors."""
    return bool(forwardprop_util.pack_tangents(tensors).tangents)


def has_second_derivatives(tensors: Sequence[tf.Tensor]) -> bool:
    """Return whether several tapes, or a persistent one, watch the tensors."""
    kind = gradients_util.PossibleTapeGradientTypes(tensors)
    return bool(kind == gradients_util.POSSIBLE_GRADIENT_TYPES_HIGHER_ORDER)


# Return a context in which this thread's tapes record nothing.
pause_tapes: Callable[[], contextlib.AbstractContextManager[None]] = record.stop_recording

# Record a function on tapes: its name, outputs and sources, and the function that maps gradients of
# the outputs to those of the sources.
record_on_tapes: Callable[
    [str, list[tf.Tensor], list[tf.Tensor], Callable[..., list[Gradient]]], None
] = record.record_operation


@contextlib.contextmanager
def resume_tapes() -> Iterator[None]:
    """Let tapes record in a block, also inside a `tf.init_scope`, which stops them."""
    is_stopped = pywrap_tfe.TFE_Py_TapeSetIsStopped()
    if is_stopped:
        pywrap_tfe.TFE_Py_TapeSetRestartOnThread()
    try:
        yield
    finally:
        if is_stopped:
            pywrap_tfe.TFE_Py_TapeSetStopOnThread()


# Types of operations that draw different numbers each time they run.
_DRAWS = re.compile(
    "Random(?!.*Dataset)|Stateful(Uniform|Standard|Truncated|Random)|TruncatedNormal|Multinomial"
    "|ParameterizedTruncatedNormal|RngReadAndSkip|SampleDistorted"
)


def stateful_draws(graph: tf.Graph) -> list[str]:
    """Return the types of the stateful random operations in a graph and its functions."""
    nodes = [op.node_def for op in graph.get_operations()]
    nodes += [node for f in graph.as_graph_def().library.function for node in f.node_def]
    return sorted({node.op for node in nodes if _DRAWS.match(node.op)})


def is_branch(graph: tf.Graph) -> bool:
    """Return whether a graph is a branch, a loop's condition or its body, and not a function."""
    names = {part.__name__ for part in type(graph).__mro__}
    return bool(names & {"CondBranchFuncGraph", "WhileCondFuncGraph", "WhileBodyFuncGraph"})


# Operations, observed while they run or are added to a graph.


@contextlib.contextmanager
def observing_operations(see: See) -> Iterator[None]:
    """Call `see` with each operation that a block adds to the current graph, or runs eagerly.

    Operations inside branches, loops and functions of the graph are not passed.
    """
    observed = graph_being_made()

    def in_graph(
        name: str,
        inputs: Sequence[tf.Tensor],
        attributes: Any,
        outputs: Sequence[tf.Tensor],
        op_name: str | None = None,
        graph: tf.Graph | None = None,
    ) -> Sequence[tf.Tensor]:
        if graph is None or graph is not observed:
            return outputs
        replaced = see(name, inputs, outputs)
        return outputs if replaced is None else replaced

    slow_path, fast_path = execute.execute, pywrap_tfe.TFE_Py_FastPathExecute
    op_callbacks.add_op_callback(in_graph)
    if observed is None:
        execute.execute = _seen_by(see)
        pywrap_tfe.TFE_Py_FastPathExecute = _no_fast_path  # falls back to `execute.execute`
    try:
        yield
    finally:
        op_callbacks.remove_op_callback(in_graph)
        execute.execute, pywrap_tfe.TFE_Py_FastPathExecute = slow_path, fast_path


def _no_fast_path(*_: Any, **__: Any) -> NoReturn:
    raise core._FallbackException("The operation is to be seen.")


def _seen_by(see: See) -> Callable[..., Nest]:
    is_observing = False

    def run(
        op_name: str | bytes,
        num_outputs: int,
        inputs: Sequence[tf.Tensor],
        attrs: Any,
        ctx: Any,
        name: str | None = None,
    ) -> Nest:  # TensorFlow passes some of these by name
        nonlocal is_observing
        outputs = execute.quick_execute(op_name, num_outputs, inputs, attrs, ctx, name)
        if is_observing:
            return outputs
        is_observing = True
        try:
            name = op_name.decode() if isinstance(op_name, bytes) else op_name
            replaced = see(name, inputs, outputs)
        finally:
            is_observing = False
        return outputs if replaced is None else replaced

    return run


@contextlib.contextmanager
def recording_writes(variables: Sequence[tf.Variable]) -> Iterator[list[tf.Variable]]:
    """Yield a list that contains, after the block, the variables that the block wrote to."""
    by_handle = {id(variable.handle): variable for variable in variables}
    touched: list[int] = []  # ids of the inputs, such as handles, of operations that do not read

    def see(name: str, inputs: Sequence[tf.Tensor], outputs: Sequence[tf.Tensor]) -> None:
        if name not in RESOURCE_READ_OPS:
            touched.extend(map(id, inputs))

    written: list[tf.Variable] = []
    if tf.executing_eagerly():
        with observing_operations(see):
            yield written
    else:
        graph = ops.get_default_graph()
        number = len(graph.get_operations())
        yield written
        outer = {id(inner): id(outer) for outer, inner in graph.captures}
        for op in graph.get_operations()[number:]:
            inner = map(id, get_read_write_resource_inputs(op)[1])
            touched += [outer.get(handle, handle) for handle in inner]
    written += [by_handle[h] for h in dict.fromkeys(touched) if h in by_handle]


# Data.


class DenseElements:
    """The elements of a dataset's iterator of dense tensors, in a third of the time of `next`."""

    def __init__(self, iterator: OwnedIterator, specs: list[tf.TensorSpec]) -> None:
        self._spec = iterator.element_spec
        # Of some dictionaries, Keras has another order.
        has_same_order = [*map(id, keras.tree.flatten(self._spec))] == [*map(id, specs)]
        self._pack = (keras.tree if has_same_order else nest).pack_sequence_as
        self._arguments = (
            iterator._iterator_resource,
            iterator._flat_output_types,
            iterator._flat_output_shapes,
        )

    def __iter__(self) -> Iterator[Nest]:
        return self

    def __next__(self) -> Nest:
        try:
            tensors = gen_dataset_ops.iterator_get_next(*self._arguments)
        except tf.errors.OutOfRangeError:
            raise StopIteration from None
        return self._pack(self._spec, tensors)


_elements: WeakKeyDictionary[Iterator[Nest], DenseElements] = WeakKeyDictionary()


def elements_of(iterator: Iterator[Nest]) -> Iterator[Nest]:
    """Return an iterator of what is left of an iterator, which is faster if it can be."""
    if iterator in _elements:
        return _elements[iterator]
    specs = nest.flatten(getattr(iterator, "element_spec", None))
    is_dense = all(isinstance(leaf, tf.TensorSpec) for leaf in specs)
    if not (is_dense and isinstance(iterator, OwnedIterator)):
        return iterator
    _elements[iterator] = DenseElements(iterator, specs)
    return _elements[iterator]


# Replicas.


def logs_over_replicas(logs: Nest, strategy: tf.distribute.Strategy) -> Nest:
    """Merge the logs of all replicas as Keras does."""
    return reduce_per_replica(logs, strategy, "auto")
