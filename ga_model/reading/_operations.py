"""What the operations of TensorFlow do with samples."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf

# What a tensor is to the samples of a batch.
SHARED = "the same for all samples"
BY_SAMPLE = "an entry of axis 0 for each sample, which follows from that sample"
MEAN = "a mean over samples"
SUM = "a sum over samples"
MIXED = "something that follows from several samples"
INSIDE = "an entry for each sample on another axis than the first"
SHAPE = "the shape of a tensor with samples"
COUNT = "the number of samples"
NUMBER = "another number that follows from the number of samples"
PLACES = "the places that samples have in their batch, or what follows from these"
PARTS = "parts of a ragged or sparse tensor that tell where its samples are"
ONE = "one sample, in a loop over all"
LIST = "a list with an entry for each sample"


def names(text: str) -> frozenset[str]:
    return frozenset(text.split())


ELEMENTWISE = names(
    "Abs Acos Acosh Add AddN AddV2 Asin Asinh Atan Atan2 Atanh BesselI0e BesselI1e BiasAdd Cast "
    "Ceil CheckNumerics ClipByValue Cos Cosh Digamma Div DivNoNan Elu EnsureShape Equal Erf Erfc "
    "Exp Expm1 Floor FloorDiv FloorMod Greater GreaterEqual Identity IsFinite IsInf IsNan "
    "LeakyRelu Less LessEqual Lgamma Log Log1p LogicalAnd LogicalNot LogicalOr Maximum Minimum "
    "Mul MulNoNan Neg NotEqual OnesLike Pow PreventGradient RealDiv Reciprocal Relu Relu6 Rint "
    "Round Rsqrt Select SelectV2 Selu Sigmoid Sign Sin Sinh Snapshot Softplus Softsign Sqrt "
    "Square SquaredDifference StopGradient Sub Tan Tanh TruncateDiv Xdivy Xlog1py Xlogy ZerosLike "
)
# These keep all entries of a tensor.
STRUCTURAL = names(
    "BroadcastTo CheckNumerics ConcatV2 EnsureShape ExpandDims Identity IdentityN Pack "
    "PreventGradient Reshape Snapshot Squeeze StopGradient StridedSlice Tile Unpack"
)
ALONG_LAST_AXIS = names("Softmax LogSoftmax TopKV2 ")
REDUCTIONS = names("All Any ArgMax ArgMin EuclideanNorm Max Mean Min Prod Sum ")
# These run Python, which may do anything with samples.
OPAQUE = names("EagerPyFunc PyFunc PyFuncStateless")
# These put several entries of axis 0 together.
MIXING = OPAQUE | names(
    "Bincount DenseBincount GatherNd HistogramFixedWidth ScatterNd SegmentMax SegmentMean "
    "SegmentMin SegmentProd SegmentSum SparseSegmentMean SparseSegmentSum TensorScatterAdd "
    "TensorScatterMax TensorScatterMin TensorScatterSub TensorScatterUpdate Unique UniqueV2 "
    "UnsortedSegmentMax UnsortedSegmentMin UnsortedSegmentProd UnsortedSegmentSum "
)
OF_IMAGES = names(
    "AvgPool Conv2D DepthwiseConv2dNative MaxPool ResizeBilinear ResizeNearestNeighbor "
)
# These compute with the last two axes.
OF_MATRICES = names(
    "Cholesky Eig Lu LogMatrixDeterminant MatrixDeterminant MatrixExponential MatrixInverse "
    "MatrixLogarithm MatrixSolve MatrixSolveLs MatrixSquareRoot MatrixTriangularSolve Qr "
    "SelfAdjointEigV2 Svd "
)
OF_LABELS = names("SoftmaxCrossEntropyWithLogits SparseSoftmaxCrossEntropyWithLogits ")
DIVISIONS = names("Div DivNoNan RealDiv")
PRODUCTS = names("BatchMatMulV2 BatchMatMulV3 Einsum MatMul Mul")
# These move, repeat, negate or add up the entries of one tensor.
MOVES = STRUCTURAL | names(
    "Cast Cumsum GatherV2 Mean Neg Pad ReverseV2 Roll Slice Split SplitV Sum Transpose"
)
LINEAR = names("Add AddN AddV2 Cast DivNoNan Identity Mul Neg RealDiv Snapshot Sub ")


def makes_key(op: Any) -> bool:
    """Return whether an operation makes the key of a seed, whose length is not that of samples."""
    return bool(op.type.startswith("StatelessRandomGet"))


def has_fixed_seed(op: Any) -> bool:
    """Return whether an operation draws the same numbers for any samples, by their places."""
    is_control_flow = op.type in ("StatelessCase", "StatelessIf", "StatelessWhile")
    if not op.type.startswith("Stateless") or is_control_flow or makes_key(op):
        return False
    seed = op.inputs[1]
    if makes_key(seed.op):
        seed = seed.op.inputs[0]
    return value_of(seed) is not None


def letters_of(op: Any) -> tuple[list[str] | None, str]:
    """Return the letters of the inputs and of the output of an einsum without ellipsis."""
    inputs, _, output = op.get_attr("equation").decode().partition("->")
    return (None, "") if "." in inputs else (inputs.split(","), output)


def compares(op: Any, kinds: list[Any]) -> bool:
    """Return whether an operation computes with several samples, of those that do in layers."""
    shape, is_by_sample = op.inputs[0].shape, kinds[0] == BY_SAMPLE
    if op.type in MIXING:
        return bool({BY_SAMPLE, INSIDE} & set(kinds))
    if op.type.startswith("FusedBatchNorm"):
        return bool(is_by_sample and op.get_attr("is_training"))
    if op.type.startswith("MatrixDiag"):
        return bool(is_by_sample and shape.rank == 1)  # each sample gets its own column
    if op.type == "Split":
        return kinds[1] == BY_SAMPLE and axis_of(op, 0, op.inputs[1].shape.rank) == 0
    if op.type == "SplitV":
        return bool(is_by_sample and axis_of(op, 2, shape.rank) == 0)
    if op.type in ALONG_LAST_AXIS and is_by_sample and shape.rank == 1:
        return True
    if op.type == "Reshape" and is_by_sample and op.outputs[0].shape.rank:
        # With a length of axis 0 that is known, it is that of something else.
        return bool(shape[0] is None and op.outputs[0].shape[0] is not None)
    has_samples_last = kinds[0] == INSIDE and shape.rank == 2
    if op.type in REDUCTIONS:
        axes = axes_of(op) or ()
        return (is_by_sample and 0 in axes) or (has_samples_last and 1 in axes)
    if op.type in ALONG_LAST_AXIS and has_samples_last:
        return True
    if {COUNT, NUMBER, PLACES} & set(kinds) and op.type in ELEMENTWISE:
        return BY_SAMPLE in kinds
    if is_by_sample and op.type in ("MirrorPad", "Pad", "PadV2"):
        return values_of(op, 1)[:2] not in ([], [0, 0])
    if is_by_sample and op.type in ("Slice", "StridedSlice", "Unpack"):
        return not KEEPS[op.type](op, kinds, [shape.rank])
    if is_by_sample and op.type in ("Cumsum", "Cumprod", "CumulativeLogsumexp", "ReverseV2"):
        return 0 in (axes_of(op) or ())
    if is_by_sample and op.type == "Roll":
        return bool(0 in values_of(op, 2))
    if is_by_sample and op.type == "ConcatV2":
        return axis_of(op, len(kinds) - 1, shape.rank) == 0
    if is_by_sample and op.type == "GatherV2":
        is_along_samples = values_of(op, 2)[:1] == [0] and op.get_attr("batch_dims") == 0
        return bool(is_along_samples)
    ranks = {t.shape.rank for t, kind in zip(op.inputs, kinds) if kind == BY_SAMPLE}
    if op.type in ELEMENTWISE and len(ranks) > 1:
        return True  # the samples of one lie along another axis of the other
    of_samples = [kind in (BY_SAMPLE, INSIDE) for kind in kinds]
    if op.type == "MatMul":
        sums_samples = kinds[0] == BY_SAMPLE and op.get_attr("transpose_a")
        sums_samples |= kinds[1] == BY_SAMPLE and not op.get_attr("transpose_b")
        return all(of_samples) or bool(sums_samples)
    if op.type == "ReverseSequence" and is_by_sample:
        return bool(op.get_attr("seq_dim") == 0)
    return False


def axes_of(op: Any) -> list[int] | None:
    """Return the axes that the second input of an operation names, counted from the front."""
    value, rank = tf.get_static_value(op.inputs[1]), op.inputs[0].shape.rank
    if value is None or rank is None:
        return None
    rank += op.type == "ExpandDims"
    axes = value.reshape(-1).tolist()
    return [axis + rank if axis < 0 else axis for axis in axes]


def values_of(op: Any, number: int) -> Any:
    """Return the value of an input as a flat list, or an empty one if it is not known."""
    value = value_of(op.inputs[number])
    return [] if value is None else np.reshape(value, -1).tolist()


_MOST_TENSORS = 200  # that are looked at for the value of one
_FUNCTIONS: dict[str, Callable[..., Any]] = {
    "AddV2": np.add,
    "Cast": lambda value: value,
    "ConcatV2": lambda *values: np.concatenate(values[:-1]),
    "FloorMod": np.mod,
    "Mul": np.multiply,
    "Pack": lambda *values: np.stack(values),
    "Prod": lambda value, _: np.prod(value),
    "Range": np.arange,
    "Sub": np.subtract,
}


def value_of(tensor: Any) -> Any:
    """Return the value of a tensor that follows from constants and ranks, or None."""
    return _value(tensor, {})


def _value(tensor: Any, known: dict[int, Any]) -> Any:
    """Return what `value_of` does, and keep it: a tensor may be reached in very many ways."""
    if id(tensor) not in known:
        known[id(tensor)] = value = tf.get_static_value(tensor)
        if value is None:
            known[id(tensor)] = _computed(tensor.op, known)
    return known[id(tensor)]


def _computed(op: Any, known: dict[int, Any]) -> Any:
    if op.type == "Rank":
        return op.inputs[0].shape.rank
    is_known = op.type in _FUNCTIONS or op.type == "StridedSlice"
    if not is_known or len(known) > _MOST_TENSORS:
        return None
    values = []
    for given in op.inputs:
        if (value := _value(given, known)) is None:
            return None
        values.append(value)
    if op.type != "StridedSlice":
        return _FUNCTIONS[op.type](*values)
    if np.ndim(values[0]) != 1 or op.get_attr("begin_mask"):
        return None
    first, last, stride = (int(value[0]) for value in values[1:])
    is_one = op.get_attr("shrink_axis_mask")
    return values[0][first] if is_one else values[0][first:last:stride]


def number_of(tensor: Any) -> float | None:
    """Return the value of a tensor as one number, or None if it is not known or no number."""
    value = value_of(tensor)
    is_number = value is not None and np.size(value) == 1
    return float(np.reshape(value, ())) if is_number else None


def axis_of(op: Any, number: int, rank: int) -> int:
    """Return the axis that an input names, counted from the front, or 0 if it is not known."""
    axis = (values_of(op, number) or [0])[0]
    return int(axis + rank if axis < 0 else axis)


def _matrix_product(op: Any, kinds: list[Any], ranks: list[int]) -> bool:
    if kinds == [BY_SAMPLE, BY_SAMPLE]:
        return bool(op.type != "MatMul" and ranks[0] == ranks[1] > 2)
    if kinds != [BY_SAMPLE, SHARED]:
        return False
    if ranks[0] > 2:
        return ranks[1] == 2
    if ranks[1] > 2:
        return False
    return not op.get_attr("transpose_a" if op.type == "MatMul" else "adj_x")


def _strided_slice(op: Any, kinds: list[Any], ranks: list[int]) -> bool:
    if kinds[0] != BY_SAMPLE:
        return False
    if op.get_attr("new_axis_mask") & 1 or op.get_attr("shrink_axis_mask") & 1:
        return False
    if op.get_attr("ellipsis_mask") & 1:
        added = bin(op.get_attr("new_axis_mask")).count("1")
        return bool(len(values_of(op, 1)) - 1 - added < ranks[0])
    is_all = op.get_attr("begin_mask") & 1 and op.get_attr("end_mask") & 1
    return bool(is_all and (values_of(op, 3) or [0])[0] == 1)


def _gather(op: Any, kinds: list[Any], ranks: list[int]) -> bool:
    axis, batch_dims = axis_of(op, 2, ranks[0]), op.get_attr("batch_dims")
    if kinds[:2] == [BY_SAMPLE, BY_SAMPLE]:
        return bool(batch_dims > 0)
    if kinds[0] == SHARED:
        return bool(axis == 0 and batch_dims == 0)
    return bool(axis > 0 and batch_dims == 0)


def _reshape(op: Any, kinds: list[Any], ranks: list[int]) -> bool:
    """A shape [-1, ...] leaves samples alone if a sample keeps its number of entries."""
    shape, before = values_of(op, 1), op.inputs[0].shape[1:]
    if kinds[0] != BY_SAMPLE or not shape or shape[0] != -1 or not before.is_fully_defined():
        return False
    return int(tf.TensorShape(shape[1:]).num_elements() or 1) == int(before.num_elements() or 1)


def _concatenation(op: Any, kinds: list[Any], ranks: list[int]) -> bool:
    return set(kinds[:-1]) == {BY_SAMPLE} and axis_of(op, len(kinds) - 1, ranks[0]) > 0


def _stack(op: Any, kinds: list[Any], ranks: list[int]) -> bool:
    axis = op.get_attr("axis")
    return set(kinds) == {BY_SAMPLE} and axis not in (0, -ranks[0] - 1)


def _unstack(op: Any, kinds: list[Any], ranks: list[int]) -> bool:
    return op.get_attr("axis") not in (0, -ranks[0])


def _slice(op: Any, kinds: list[Any], ranks: list[int]) -> bool:
    is_all = values_of(op, 2)[:1] == [-1] or kinds[2] == SHAPE
    return bool(values_of(op, 1)[:1] == [0] and is_all)


KEEPS: dict[str, Callable[[Any, list[Any], list[int]], bool]] = {
    "BatchMatMulV2": _matrix_product,
    "ConcatV2": _concatenation,
    "GatherV2": _gather,
    "MatMul": _matrix_product,
    "OneHot": lambda op, kinds, ranks: kinds[0] == BY_SAMPLE and op.get_attr("axis") != 0,
    "Pack": _stack,
    "Pad": lambda op, kinds, ranks: values_of(op, 1)[:2] == [0, 0],
    "PadV2": lambda op, kinds, ranks: values_of(op, 1)[:2] == [0, 0],
    "Reshape": _reshape,
    "Slice": _slice,
    "Split": lambda op, kinds, ranks: axis_of(op, 0, ranks[1]) > 0,
    "SplitV": lambda op, kinds, ranks: axis_of(op, 2, ranks[0]) > 0,
    "Squeeze": lambda op, kinds, ranks: _squeezed(op, ranks[0]),
    "StridedSlice": _strided_slice,
    "Tile": lambda op, kinds, ranks: values_of(op, 1)[:1] == [1],
    "Transpose": lambda op, kinds, ranks: values_of(op, 1)[:1] == [0],
    "Unpack": _unstack,
}


def _squeezed(op: Any, rank: int) -> bool:
    axes = [axis % rank for axis in op.get_attr("squeeze_dims")]
    return bool(axes) and 0 not in axes
