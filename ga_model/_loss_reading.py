"""Read from the graph of a loss whether its values add up over samples.

A loss of a batch can be put together from those of its microbatches if each of its values follows
from one sample, or if it is the mean of such values. That is proved here, operation by operation,
from the targets and outputs to the values. What is not known to treat samples one by one proves
nothing; such a loss may add up all the same, and is then computed over the full batch, which is
exact in any case.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

from ga_model._dependence import dependence_of

# What a tensor is to the samples of a batch.
_SHARED = "the same for all samples"
_BY_SAMPLE = "an entry of axis 0 for each sample, which follows from that sample"
_MEAN = "a mean over samples"
_SUM = "a sum over samples"
_MIXED = "something that follows from several samples"
_INSIDE = "an entry for each sample on another axis than the first"
_SHAPE = "the shape of a tensor with samples"
_COUNT = "the number of samples"
_PLACES = "the places that samples have in their batch"


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


_ELEMENTWISE = _names(
    "Abs Acos Acosh Add AddN AddV2 Asin Asinh Atan Atan2 Atanh BesselI0e BesselI1e BiasAdd Cast "
    "Ceil CheckNumerics ClipByValue Cos Cosh Digamma Div DivNoNan Elu EnsureShape Equal Erf Erfc "
    "Exp Expm1 Floor FloorDiv FloorMod Greater GreaterEqual Identity IsFinite IsInf IsNan "
    "LeakyRelu Less LessEqual Lgamma Log Log1p LogicalAnd LogicalNot LogicalOr Maximum Minimum "
    "Mul MulNoNan Neg NotEqual OnesLike Pow PreventGradient RealDiv Reciprocal Relu Relu6 Rint "
    "Round Rsqrt Select SelectV2 Selu Sigmoid Sign Sin Sinh Snapshot Softplus Softsign Sqrt "
    "Square SquaredDifference StopGradient Sub Tan Tanh TruncateDiv Xdivy Xlog1py Xlogy ZerosLike "
)
_ALONG_LAST_AXIS = _names("Softmax LogSoftmax TopKV2 ")
_REDUCTIONS = _names("All Any ArgMax ArgMin Max Mean Min Prod Sum ")
_OF_IMAGES = _names(
    "AvgPool Conv2D DepthwiseConv2dNative MaxPool ResizeBilinear ResizeNearestNeighbor "
)
_OF_LABELS = _names("SoftmaxCrossEntropyWithLogits SparseSoftmaxCrossEntropyWithLogits ")
_LINEAR = _names("Add AddN AddV2 Cast DivNoNan Identity Mul Neg RealDiv Snapshot Sub ")

# Of Keras's own losses, those that compare samples or divide over all of them.
_NOT_BY_SAMPLE = _names("Circle Dice Tversky circle dice tversky ")


class DoesNotAddUpError(Exception):
    """A loss is not known to add up over microbatches."""


def check_adds_up(loss: Any, y_true: Any, y_pred: Any) -> None:
    """Raise DoesNotAddUpError if a compiled loss is not known to add up over microbatches.

    Args:
        loss: a `keras.losses.Loss`, or what Keras takes for one.
        y_true, y_pred: what it is called with.
    """
    if not (is_known(loss) or adds_up(_values_of(loss), y_true, y_pred)):
        raise DoesNotAddUpError


def is_known(loss: Any) -> bool:
    """Return whether a loss is one of Keras's own that looks at samples one by one.

    Args:
        loss: what `compile` takes for a loss, or what Keras makes of it.
    """
    loss = keras.losses.get(loss)
    kinds = [loss if inspect.isfunction(loss) else type(loss), getattr(loss, "fn", None)]
    return all(
        (kind.__module__ or "").startswith("keras.") and kind.__name__ not in _NOT_BY_SAMPLE
        for kind in kinds
        if kind is not None
    )


def _values_of(loss: Any) -> Callable[..., Any] | None:
    """Return the function that gives a loss's values before they are reduced."""
    if not isinstance(loss, keras.losses.Loss):
        return loss if callable(loss) else None
    return loss.call if type(loss).__call__ is keras.losses.Loss.__call__ else None


def adds_up(function: Callable[..., Any] | None, y_true: Any, y_pred: Any) -> bool:
    """Return whether the values of a function are known to follow from one sample each.

    Also where it returns the mean of such values as one number.

    Args:
        function: takes y_true and y_pred, and returns a tensor.
        y_true, y_pred: nests of tensors, of which the number of samples does not matter.
    """
    if function is None:
        return False

    def spec(tensor: Any) -> Any:
        return tf.TensorSpec([None, *tensor.shape[1:]], tensor.dtype)

    try:
        specs = tf.nest.map_structure(spec, (y_true, y_pred))
        with keras.StatelessScope():
            graph = tf.function(function, autograph=False).get_concrete_function(*specs).graph
        return len(graph.outputs) == 1 and _Reading(graph).proves(graph.outputs[0])
    except Exception:  # of the user's code, called in a way that it may not know
        return False


def kind_of_scalar(tensor: Any) -> str | None:
    """Return whether a scalar that a layer adds to the loss is a "mean" or a "sum" over samples.

    Or None if that is not known, as in eager mode. What does not follow from samples at all, such
    as the norm of a weight, is a mean over them. What layers compute of samples is taken to have
    an entry of axis 0 for each of them.
    """
    if not tf.is_symbolic_tensor(tensor):
        return None
    if not dependence_of(tensor).on_values:
        return "mean"
    kind = _Reading(tensor.graph, trusts_layers=True).kind_of(tensor)
    return {_MEAN: "mean", _SUM: "sum"}.get(kind or "")


def mixes_samples(tensors: list[Any]) -> bool:
    """Return whether one of the tensors is known to have entries that follow from several samples.

    Such as those of a layer that subtracts the mean of the batch, or compares samples. Eagerly,
    nothing is known.
    """
    tensors = [tensor for tensor in tensors if tf.is_symbolic_tensor(tensor)]
    if not tensors or _has_composites(tensors[0].graph):
        return False
    reading = _Reading(tensors[0].graph, trusts_layers=True)
    return any(reading.kind_of(tensor) in (_MIXED, _MEAN, _SUM) for tensor in tensors)


def normalizes_batches(layer: Any) -> bool:
    """Return whether a layer has BatchNormalization that trains, which sees microbatches."""
    batch_normalization = keras.layers.BatchNormalization
    layers = layer._flatten_layers()
    return any(isinstance(part, batch_normalization) and part.trainable for part in layers)


def _has_composites(graph: Any) -> bool:
    """Return whether a function takes ragged or sparse tensors, whose parts have no samples."""
    arguments = tf.nest.flatten(getattr(graph, "structured_input_signature", None))
    return any(isinstance(a, (tf.RaggedTensorSpec, tf.SparseTensorSpec)) for a in arguments)


class _Reading:
    """What the tensors of a graph are to samples.

    Args:
        graph: of a function whose arguments are tensors with samples.
        trusts_layers: whether what is not known keeps samples apart, as layers do.
    """

    def __init__(self, graph: Any, trusts_layers: bool = False) -> None:
        self._trusts_layers = trusts_layers
        captured = [(outer, inner) for outer, inner in graph.captures]
        self._known = {
            id(inner): _SHARED
            for outer, inner in captured
            if outer.dtype == tf.resource or not tf.is_symbolic_tensor(outer)
        }
        inner = [inner for _, inner in captured]
        arguments = [t for t in graph.inputs if not any(t is other for other in inner)]
        self._known.update((id(tensor), _BY_SAMPLE) for tensor in arguments if tensor.shape.rank)
        for op in graph.get_operations():  # each behind those that it depends on
            self._read(op)

    def proves(self, tensor: Any) -> bool:
        """Return whether a tensor has a value for each sample, or is a mean of such values."""
        return self.kind_of(tensor) == (_BY_SAMPLE if tensor.shape.rank else _MEAN)

    def kind_of(self, tensor: Any) -> str | None:
        """Return what a tensor is to samples, or None if it is not known."""
        return self._known.get(id(tensor))

    def _read(self, op: Any) -> None:
        kinds = [self._known.get(id(tensor)) for tensor in op.inputs]
        if op.type == "Placeholder":
            return
        is_readable = not {None, _INSIDE, _MIXED, _PLACES} & set(kinds)
        kind = self._kind(op, kinds) if is_readable else None
        for output in op.outputs:
            trusted = self._trusted(op, kinds, output) if self._trusts_layers else None
            if found := kind or trusted:
                self._known[id(output)] = found

    def _kind(self, op: Any, kinds: list[Any]) -> str | None:
        """Return what the outputs of an operation are, or None if it is not known."""
        if all(kind == _SHARED for kind in kinds):
            is_random = "Random" in op.type or (op.op_def is not None and op.op_def.is_stateful)
            return _SHARED if not is_random or op.type == "ReadVariableOp" else None
        if op.type == "Shape" and kinds[0] == _BY_SAMPLE:
            return _SHAPE
        if _SHAPE in kinds or _COUNT in kinds:
            return self._kind_of_shape(op, kinds)
        if _MEAN in kinds or _SUM in kinds:
            return self._kind_of_mean(op, kinds)
        if self._keeps_samples(op, kinds):
            return _BY_SAMPLE
        is_over_samples = op.type in _REDUCTIONS and 0 in (_axes(op) or ())
        return {"Mean": _MEAN, "Sum": _SUM}.get(op.type) if is_over_samples else None

    def _trusted(self, op: Any, kinds: list[Any], output: Any) -> str | None:
        """Return what an output most probably is, of an operation that is not known."""
        if op.type in ("Shape", "ShapeN", "Size", "Rank") or not kinds:
            return None
        if op.type == "Range" and _COUNT in kinds:
            return _PLACES
        if kinds[0] == _PLACES and op.type in ("Cast", "ExpandDims", "Reshape", "StridedSlice"):
            return _PLACES
        if {_MIXED, _MEAN, _SUM} & set(kinds) or _compares(op, kinds):
            return _MIXED
        rank, is_known = output.shape.rank, {_BY_SAMPLE, _INSIDE} & set(kinds)
        if not rank:
            return _MIXED if is_known and op.type in _REDUCTIONS else None
        if op.type == "Transpose" and is_known:
            stays = _static(op, 1)[:1] == [0]
            return _INSIDE if stays == (kinds[0] == _INSIDE) else _BY_SAMPLE
        if _INSIDE in kinds and op.type in _ELEMENTWISE:
            return _INSIDE
        is_random = _SHAPE in kinds and "Random" in op.type
        if output.shape[0] is None and (is_known or is_random):
            return _BY_SAMPLE
        return _INSIDE if is_known else None

    def _kind_of_shape(self, op: Any, kinds: list[Any]) -> str | None:
        if op.type in ("Identity", "Cast"):
            return str(kinds[0])
        if op.type in ("RealDiv", "DivNoNan") and kinds == [_SUM, _COUNT]:
            return _MEAN
        if op.type == "StridedSlice" and kinds[0] == _SHAPE:
            begin, end = (tf.get_static_value(op.inputs[i]) for i in (1, 2))
            if begin is None or end is None or begin[0] < 0:
                return None
            if begin[0] > 0:
                return _SHARED
            return _COUNT if op.get_attr("shrink_axis_mask") == 1 else None
        if op.type in ("Pack", "ConcatV2") and kinds[0] == _COUNT:
            return _SHAPE if set(kinds[1:]) <= {_SHARED} else None
        if op.type in ("Reshape", "BroadcastTo") and kinds == [_BY_SAMPLE, _SHAPE]:
            return _BY_SAMPLE  # which has the samples in front, as it had
        if op.type == "Fill" and kinds == [_SHAPE, _SHARED]:
            return _BY_SAMPLE
        return None

    def _kind_of_mean(self, op: Any, kinds: list[Any]) -> str | None:
        kind = _MEAN if _MEAN in kinds else _SUM
        if op.type in _REDUCTIONS:  # over other axes
            return kind if op.type in ("Mean", "Sum") and kinds[0] == kind else None
        if op.type not in _LINEAR or not set(kinds) <= {kind, _SHARED}:
            return None
        if op.type == "Mul":
            return kind if kinds.count(kind) == 1 else None
        if op.type in ("RealDiv", "DivNoNan"):
            return kind if kinds[1] == _SHARED else None
        # A constant beside a sum counts once.
        return kind if kind == _MEAN or _SHARED not in kinds else None

    def _keeps_samples(self, op: Any, kinds: list[Any]) -> bool:
        """Return whether an operation treats samples one by one, and leaves them on axis 0."""
        ranks = [tensor.shape.rank for tensor in op.inputs]
        if None in ranks or any(tensor.shape.rank is None for tensor in op.outputs):
            return False
        of_samples = [rank for rank, kind in zip(ranks, kinds) if kind == _BY_SAMPLE]
        shared = [t for t, kind in zip(op.inputs, kinds) if kind == _SHARED]
        rank, is_first = of_samples[0], kinds[0] == _BY_SAMPLE
        if op.type in _ELEMENTWISE:
            fit = [
                t.shape.rank < rank or (t.shape.rank == rank and t.shape[0] == 1) for t in shared
            ]
            return bool(set(of_samples) == {rank} and all(fit))
        if op.type in _ALONG_LAST_AXIS:
            return bool(is_first and rank > 1)
        if op.type in _OF_LABELS:
            return set(kinds) == {_BY_SAMPLE} and ranks[0] == 2
        if op.type in _OF_IMAGES:
            return is_first and kinds.count(_BY_SAMPLE) == 1
        if op.type in _REDUCTIONS or op.type in ("ExpandDims", "Cumsum"):
            axes = _axes(op)
            return is_first and axes is not None and 0 not in axes
        reads = _READS.get(op.type)
        return reads is not None and bool(reads(op, kinds, ranks))


def _compares(op: Any, kinds: list[Any]) -> bool:
    """Return whether an operation computes with several samples, of those that do in layers."""
    shape, is_by_sample = op.inputs[0].shape, kinds[0] == _BY_SAMPLE
    has_samples_last = kinds[0] == _INSIDE and shape.rank == 2
    if op.type in _REDUCTIONS:
        axes = _axes(op) or ()
        return (is_by_sample and 0 in axes) or (has_samples_last and 1 in axes)
    if op.type in _ALONG_LAST_AXIS:
        return bool(has_samples_last)
    if {_COUNT, _PLACES} & set(kinds) and op.type in _ELEMENTWISE:
        return _BY_SAMPLE in kinds
    if is_by_sample and op.type in ("StridedSlice", "Unpack"):
        return not _READS[op.type](op, kinds, [shape.rank])
    if is_by_sample and op.type in ("Cumsum", "ReverseV2"):
        return 0 in (_axes(op) or ())
    if is_by_sample and op.type == "Roll":
        return bool(0 in _static(op, 2))
    if is_by_sample and op.type == "ConcatV2":
        return _axis_of(op, len(kinds) - 1, shape.rank) == 0
    if is_by_sample and op.type == "GatherV2":
        is_along_samples = _static(op, 2)[:1] == [0] and op.get_attr("batch_dims") == 0
        return bool(is_along_samples)
    of_samples = [kind in (_BY_SAMPLE, _INSIDE) for kind in kinds]
    if op.type == "MatMul":
        return all(of_samples) or (kinds[0] == _BY_SAMPLE and op.get_attr("transpose_a"))
    if op.type == "Einsum" and kinds == [_BY_SAMPLE, _BY_SAMPLE]:
        left, _, right = op.get_attr("equation").decode().partition(",")
        return bool(left[0] != right[0])  # the first axes of both are samples
    return False


def _axes(op: Any) -> list[int] | None:
    """Return the axes that the second input of an operation names, counted from the front."""
    value = tf.get_static_value(op.inputs[1])
    if value is None:
        return None
    rank = op.inputs[0].shape.rank + (op.type == "ExpandDims")
    axes = value.reshape(-1).tolist()
    return [axis + rank if axis < 0 else axis for axis in axes]


def _static(op: Any, number: int) -> Any:
    """Return the value of an input as a flat list, or an empty one if it is not known."""
    value = tf.get_static_value(op.inputs[number])
    return [] if value is None else value.reshape(-1).tolist()


def _axis_of(op: Any, number: int, rank: int) -> int:
    """Return the axis that an input names, counted from the front, or 0 if it is not known."""
    axis = (_static(op, number) or [0])[0]
    return int(axis + rank if axis < 0 else axis)


def _matrix_product(op: Any, kinds: list[Any], ranks: list[int]) -> bool:
    if kinds == [_BY_SAMPLE, _BY_SAMPLE]:
        return bool(op.type != "MatMul" and ranks[0] == ranks[1] > 2)
    if kinds != [_BY_SAMPLE, _SHARED]:
        return False
    if ranks[0] > 2:
        return ranks[1] == 2
    return not op.get_attr("transpose_a" if op.type == "MatMul" else "adj_x")


def _strided_slice(op: Any, kinds: list[Any], ranks: list[int]) -> bool:
    if kinds[0] != _BY_SAMPLE:
        return False
    if op.get_attr("new_axis_mask") & 1 or op.get_attr("shrink_axis_mask") & 1:
        return False
    if op.get_attr("ellipsis_mask") & 1:
        added = bin(op.get_attr("new_axis_mask")).count("1")
        return bool(len(_static(op, 1)) - 1 - added < ranks[0])
    is_all = op.get_attr("begin_mask") & 1 and op.get_attr("end_mask") & 1
    return bool(is_all and (_static(op, 3) or [0])[0] == 1)


def _gather(op: Any, kinds: list[Any], ranks: list[int]) -> bool:
    axis, batch_dims = _axis_of(op, 2, ranks[0]), op.get_attr("batch_dims")
    if kinds[:2] == [_BY_SAMPLE, _BY_SAMPLE]:
        return bool(batch_dims > 0)
    if kinds[0] == _SHARED:
        return bool(axis == 0 and batch_dims == 0)
    return bool(axis > 0 and batch_dims == 0)


def _reshape(op: Any, kinds: list[Any], ranks: list[int]) -> bool:
    """A shape [-1, ...] leaves samples alone if a sample keeps its number of entries."""
    shape, before = _static(op, 1), op.inputs[0].shape[1:]
    if kinds[0] != _BY_SAMPLE or not shape or shape[0] != -1 or not before.is_fully_defined():
        return False
    return int(tf.TensorShape(shape[1:]).num_elements() or 1) == int(before.num_elements() or 1)


def _concatenation(op: Any, kinds: list[Any], ranks: list[int]) -> bool:
    return set(kinds[:-1]) == {_BY_SAMPLE} and _axis_of(op, len(kinds) - 1, ranks[0]) > 0


def _stack(op: Any, kinds: list[Any], ranks: list[int]) -> bool:
    axis = op.get_attr("axis")
    return set(kinds) == {_BY_SAMPLE} and axis not in (0, -ranks[0] - 1)


def _unstack(op: Any, kinds: list[Any], ranks: list[int]) -> bool:
    return op.get_attr("axis") not in (0, -ranks[0])


_READS: dict[str, Callable[[Any, list[Any], list[int]], bool]] = {
    "BatchMatMulV2": _matrix_product,
    "ConcatV2": _concatenation,
    "GatherV2": _gather,
    "MatMul": _matrix_product,
    "OneHot": lambda op, kinds, ranks: kinds[0] == _BY_SAMPLE and op.get_attr("axis") != 0,
    "Pack": _stack,
    "Pad": lambda op, kinds, ranks: _static(op, 1)[:2] == [0, 0],
    "PadV2": lambda op, kinds, ranks: _static(op, 1)[:2] == [0, 0],
    "Reshape": _reshape,
    "Split": lambda op, kinds, ranks: _axis_of(op, 0, ranks[1]) > 0,
    "SplitV": lambda op, kinds, ranks: _axis_of(op, 2, ranks[0]) > 0,
    "Squeeze": lambda op, kinds, ranks: _squeezed(op, ranks[0]),
    "StridedSlice": _strided_slice,
    "Tile": lambda op, kinds, ranks: _static(op, 1)[:1] == [1],
    "Transpose": lambda op, kinds, ranks: _static(op, 1)[:1] == [0],
    "Unpack": _unstack,
}


def _squeezed(op: Any, rank: int) -> bool:
    axes = [axis % rank for axis in op.get_attr("squeeze_dims")]
    return bool(axes) and 0 not in axes
