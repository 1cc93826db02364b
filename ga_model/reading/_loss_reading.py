"""Read from the graph of a loss whether its values add up over samples.

A loss of a batch can be put together from those of its microbatches if each of its values follows
from one sample, or if it is the mean of such values. That is proved here, operation by operation,
from the targets and outputs to the values. What is not known to treat samples one by one proves
nothing; such a loss may add up all the same, and is then computed over the full batch, which is
exact in any case.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from ga_model.base._internals import arguments_of_loss, graph_of_function, layers_in
from ga_model.reading._dependence import dependence_of

# What a tensor is to the samples of a batch.
SHARED = "the same for all samples"
BY_SAMPLE = "an entry of axis 0 for each sample, which follows from that sample"
MEAN = "a mean over samples"
SUM = "a sum over samples"
MIXED = "something that follows from several samples"
INSIDE = "an entry for each sample on another axis than the first"
SHAPE = "the shape of a tensor with samples"
COUNT = "the number of samples"
PLACES = "the places that samples have in their batch"


def names(text: str) -> frozenset[str]:
    return frozenset(text.split())


_ELEMENTWISE = names(
    "Abs Acos Acosh Add AddN AddV2 Asin Asinh Atan Atan2 Atanh BesselI0e BesselI1e BiasAdd Cast "
    "Ceil CheckNumerics ClipByValue Cos Cosh Digamma Div DivNoNan Elu EnsureShape Equal Erf Erfc "
    "Exp Expm1 Floor FloorDiv FloorMod Greater GreaterEqual Identity IsFinite IsInf IsNan "
    "LeakyRelu Less LessEqual Lgamma Log Log1p LogicalAnd LogicalNot LogicalOr Maximum Minimum "
    "Mul MulNoNan Neg NotEqual OnesLike Pow PreventGradient RealDiv Reciprocal Relu Relu6 Rint "
    "Round Rsqrt Select SelectV2 Selu Sigmoid Sign Sin Sinh Snapshot Softplus Softsign Sqrt "
    "Square SquaredDifference StopGradient Sub Tan Tanh TruncateDiv Xdivy Xlog1py Xlogy ZerosLike "
)
_ALONG_LAST_AXIS = names("Softmax LogSoftmax TopKV2 ")
_REDUCTIONS = names("All Any ArgMax ArgMin EuclideanNorm Max Mean Min Prod Sum ")
# These put several entries of axis 0 together.
_MIXING = names(
    "Bincount DenseBincount GatherNd HistogramFixedWidth ScatterNd SegmentMax SegmentMean "
    "SegmentMin SegmentProd SegmentSum SparseSegmentMean SparseSegmentSum TensorScatterAdd "
    "TensorScatterMax TensorScatterMin TensorScatterSub TensorScatterUpdate Unique UniqueV2 "
    "UnsortedSegmentMax UnsortedSegmentMin UnsortedSegmentProd UnsortedSegmentSum "
)
_OF_IMAGES = names(
    "AvgPool Conv2D DepthwiseConv2dNative MaxPool ResizeBilinear ResizeNearestNeighbor "
)
_OF_LABELS = names("SoftmaxCrossEntropyWithLogits SparseSoftmaxCrossEntropyWithLogits ")
_LINEAR = names("Add AddN AddV2 Cast DivNoNan Identity Mul Neg RealDiv Snapshot Sub ")

# Of Keras's own losses, those that compare samples or divide over all of them.
_NOT_BY_SAMPLE = names("Circle Dice Tversky circle dice tversky ")


class DoesNotAddUpError(Exception):
    """A loss is not known to add up over microbatches."""


def check_adds_up(loss: Any, y_true: Any, y_pred: Any) -> None:
    """Raise DoesNotAddUpError if a compiled loss is not known to add up over microbatches.

    Args:
        loss: a `keras.losses.Loss`, or what Keras takes for one.
        y_true, y_pred: what it is called with.
    """
    if not (
        (is_known(loss) and _fit(loss, y_true, y_pred)) or adds_up(_values_of(loss), y_true, y_pred)
    ):
        raise DoesNotAddUpError


def is_known(loss: Any) -> bool:
    """Return whether a loss is one of Keras's own that looks at samples one by one.

    Args:
        loss: what `compile` takes for a loss, or what Keras makes of it.
    """
    loss = keras.losses.get(loss)
    if _has_axis_of_samples(loss):
        return False
    kinds = [loss if inspect.isfunction(loss) else type(loss), getattr(loss, "fn", None)]
    return all(
        (kind.__module__ or "").startswith("keras.") and kind.__name__ not in _NOT_BY_SAMPLE
        for kind in kinds
        if kind is not None
    )


def _fit(loss: Any, y_true: Any, y_pred: Any) -> bool:
    """Return whether targets do not broadcast against outputs along the samples."""
    ranks = [getattr(tensor, "shape", tf.TensorShape(None)).rank for tensor in (y_true, y_pred)]
    name = str(getattr(loss, "name", "") or getattr(loss, "__name__", loss))
    if None in ranks or any(kind in name.lower() for kind in ("sparse", "ctc")):
        return True
    higher = y_true if ranks[0] > ranks[1] else y_pred
    return bool(ranks[0] == ranks[1] or higher.shape[-1] == 1 or 0 in ranks)


def _has_axis_of_samples(loss: Any) -> bool:
    """Return whether one of Keras's losses is made to compute along axis 0."""
    arguments = arguments_of_loss(loss)
    axis = arguments.get("axis", getattr(loss, "axis", None))
    return 0 in (axis if isinstance(axis, (list, tuple)) else [axis])


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
        return len(graph.outputs) == 1 and Reading(graph).proves(graph.outputs[0])
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
    kind = Reading(tensor.graph, trusts_layers=True).kind_of(tensor)
    return {MEAN: "mean", SUM: "sum"}.get(kind or "")


def mixes_samples(tensors: list[Any], layer: Any) -> bool:
    """Return whether one of the tensors is known to have entries that follow from several samples.

    Such as those of a layer that subtracts the mean of the batch, or compares samples. What
    BatchNormalization does is none of it: another warning tells of that. Operations that are not
    known are taken to treat samples one by one. Eagerly, nothing is known.

    Args:
        tensors: outputs of a layer.
        layer: the layer.
    """
    tensors = [tensor for tensor in tensors if tf.is_symbolic_tensor(tensor)]
    if not tensors:
        return False
    graph = tensors[0].graph
    arguments = tf.nest.flatten(getattr(graph, "structured_input_signature", None))
    if any(isinstance(a, (tf.RaggedTensorSpec, tf.SparseTensorSpec)) for a in arguments):
        # Their parts have no samples. What is known to depend on the others is the padding.
        padded = [op for op in graph.get_operations() if op.type == "RaggedTensorToTensor"]
        return any(op.outputs[0].shape[1:2] == [None] for op in padded)
    parts = layers_in(layer)
    normal = [part for part in parts if isinstance(part, keras.layers.BatchNormalization)]
    reading = Reading(graph, trusts_layers=True, normalizing=[part.name for part in normal])
    return any(reading.kind_of(tensor) in (MIXED, MEAN, SUM) for tensor in tensors)


class Reading:
    """What the tensors of a graph are to samples.

    Args:
        graph: of a function whose arguments are tensors with samples.
        trusts_layers: whether what is not known keeps samples apart, as layers do.
        rows: the number of samples, if it is known while the graph is made.
        normalizing: names of layers whose means over samples are another matter.
        arguments: what the inputs of the graph are to samples, if it is one inside of another.
    """

    def __init__(
        self,
        graph: Any,
        trusts_layers: bool = False,
        rows: int | None = None,
        normalizing: Sequence[str] = (),
        arguments: Sequence[str | None] | None = None,
    ) -> None:
        self._graph = graph
        self._trusts_layers = trusts_layers
        self._rows = rows
        self._normalizing = normalizing
        self._axis: dict[int, int] = {}  # of the samples, where it is not the first and is known
        self._number = 0  # of operations that were read
        if arguments is not None:
            known = zip(graph.inputs, arguments)
            self._known = {id(tensor): kind for tensor, kind in known if kind is not None}
            self.update()
            return
        inner = {id(inner) for _, inner in graph.captures}
        own = [t for t in graph.inputs if id(t) not in inner]
        self._known = {id(t): BY_SAMPLE if t.shape.rank else SHARED for t in own}
        self.update()

    def update(self) -> None:
        """Read what has come to the graph."""
        for outer, inner in self._graph.captures:
            if outer.dtype == tf.resource or not tf.is_symbolic_tensor(outer):
                self._known.setdefault(id(inner), SHARED)
        operations = self._graph.get_operations()  # each behind those that it depends on
        for op in operations[self._number :]:
            self._read(op)
        self._number = len(operations)

    def proves(self, tensor: Any) -> bool:
        """Return whether a tensor has a value for each sample, or is a mean of such values."""
        return self.kind_of(tensor) == (BY_SAMPLE if tensor.shape.rank else MEAN)

    def kind_of(self, tensor: Any) -> str | None:
        """Return what a tensor is to samples, or None if it is not known."""
        return self._known.get(id(tensor))

    def of_output(self, number: int) -> list[str | None]:
        """Return what an output of the graph is, or nothing where it has fewer."""
        return [self.kind_of(tensor) for tensor in self._graph.outputs[number : number + 1]]

    def _read(self, op: Any) -> None:
        kinds = [self._known.get(id(tensor)) for tensor in op.inputs]
        if op.type == "Placeholder":
            return
        is_readable = not {None, INSIDE, MIXED, PLACES} & set(kinds)
        kind = self._kind(op, kinds) if is_readable else None
        if op.type in _REDUCTIONS and self._is_normalizing(op):
            kind = SHARED
        has_inner = self._trusts_layers and bool(kinds and op.outputs)
        inner = self._inner(op, kinds) if has_inner else []
        for output in op.outputs:
            trusted = self._trusted(op, kinds, output, inner) if self._trusts_layers else None
            if found := kind or trusted:
                self._known[id(output)] = found

    def _kind(self, op: Any, kinds: list[Any]) -> str | None:
        """Return what the outputs of an operation are, or None if it is not known."""
        if all(kind == SHARED for kind in kinds):
            is_random = "Random" in op.type or (op.op_def is not None and op.op_def.is_stateful)
            return SHARED if not is_random or op.type == "ReadVariableOp" else None
        if op.type == "Shape" and kinds[0] == BY_SAMPLE:
            return SHAPE
        if SHAPE in kinds or COUNT in kinds:
            return self._kind_of_shape(op, kinds)
        if MEAN in kinds or SUM in kinds:
            return self._kind_of_mean(op, kinds)
        if self._keeps_samples(op, kinds):
            return BY_SAMPLE
        is_over_samples = op.type in _REDUCTIONS and 0 in (axes_of(op) or ())
        return {"Mean": MEAN, "Sum": SUM}.get(op.type) if is_over_samples else None

    def _trusted(self, op: Any, kinds: list[Any], output: Any, inner: list[Reading]) -> str | None:
        """Return what an output most probably is, of an operation that is not known."""
        if op.type in ("Shape", "ShapeN", "Size", "Rank") or not kinds:
            return None
        if inner:
            return _of_function(inner, output.value_index)
        if op.type == "Range" and COUNT in kinds:
            return PLACES
        if kinds[0] == PLACES and op.type in ("Cast", "ExpandDims", "Reshape", "StridedSlice"):
            return PLACES
        if (
            {MIXED, MEAN, SUM} & set(kinds)
            or _compares(op, kinds)
            or self._compares_inside(op, kinds)
        ):
            return MIXED
        if op.type.startswith("TensorList") and op.type != "TensorListLength":
            return self._of_list(op, kinds, output)
        if (axis := self._axis_after(op, kinds)) is not None:
            if axis:
                self._axis[id(output)] = axis
            return INSIDE if axis else BY_SAMPLE
        rank, is_known = output.shape.rank, {BY_SAMPLE, INSIDE} & set(kinds)
        if not rank:
            return MIXED if is_known and op.type in _REDUCTIONS else None
        if op.type == "Transpose" and is_known:
            stays = _static(op, 1)[:1] == [0]
            return INSIDE if stays == (kinds[0] == INSIDE) else BY_SAMPLE
        if INSIDE in kinds and op.type in _ELEMENTWISE:
            return INSIDE
        is_random = "Random" in op.type and (SHAPE in kinds or self._rows is not None)
        lengths = [t.shape[0] for t, k in zip(op.inputs, kinds) if k == BY_SAMPLE]
        if is_random and self._are_rows(output.shape[0]):
            return MIXED if has_fixed_seed(op) else BY_SAMPLE
        if is_known and output.shape[0] in (self._rows, *lengths):  # of several views perhaps
            return BY_SAMPLE
        return INSIDE if is_known else None

    def _of_list(self, op: Any, kinds: list[Any], output: Any) -> str | None:
        """Return what a list of a loop is to samples, as each tensor in it, or such a tensor."""
        if op.type == "TensorListFromTensor":
            return {BY_SAMPLE: MIXED, INSIDE: BY_SAMPLE}.get(kinds[0])
        if op.type in ("TensorListSetItem", "TensorListPushBack"):
            return kinds[-1] if kinds[-1] == BY_SAMPLE else None
        if kinds[0] != BY_SAMPLE:
            return None
        if op.type in ("TensorListStack", "TensorListConcatV2"):
            self._axis[id(output)] = 1
            return INSIDE
        return BY_SAMPLE

    def _are_rows(self, length: int | None) -> bool:
        """Return whether a length of axis 0 may be that of samples, or of several for each."""
        if self._rows is None:
            return length is None
        return length is not None and length % self._rows == 0

    def _is_normalizing(self, op: Any) -> bool:
        parts = op.name.split("/")
        return any(
            part == n or part.startswith(f"{n}_") for part in parts for n in self._normalizing
        )

    def _inner(self, op: Any, kinds: list[Any]) -> list[Reading]:
        """Return readings of the function, the branches or the loop that an operation runs."""
        is_branch = op.type in ("If", "StatelessIf", "Case", "StatelessCase")
        arguments = kinds[int(is_branch) :]
        return [
            Reading(graph, True, self._rows, self._normalizing, arguments) for graph in _bodies(op)
        ]

    def _compares_inside(self, op: Any, kinds: list[Any]) -> bool:
        """Return whether an operation computes along an axis that is known to be the samples'."""
        axes = [self._axis_of_samples(t, kind) for t, kind in zip(op.inputs, kinds)]
        if all(axis is None for axis in axes):
            return False
        rank = op.inputs[0].shape.rank
        if op.type in (*_REDUCTIONS, "Cumsum", "Cumprod", "CumulativeLogsumexp", "ReverseV2"):
            return axes[0] is not None and axes[0] in (axes_of(op) or ())
        if op.type in _ALONG_LAST_AXIS:
            return bool(axes[0] == rank - 1)
        if op.type in _OF_IMAGES or op.type == "Conv3D":
            return bool(axes[0])
        if op.type in ("BatchMatMulV2", "BatchMatMulV3"):
            left = rank - (2 if op.get_attr("adj_x") else 1)
            right = op.inputs[1].shape.rank - (1 if op.get_attr("adj_y") else 2)
            if axes[0] == left or axes[1] == right:
                return True
            return None not in axes and axes[0] != axes[1]
        if op.type == "Einsum":
            letters, outputs = _einsum(op)
            if letters is None:
                return False
            of_samples = {part[axis] for part, axis in zip(letters, axes) if axis is not None}
            return len(of_samples) > 1 or not of_samples <= set(outputs)
        return False

    def _axis_of_samples(self, tensor: Any, kind: Any) -> int | None:
        return 0 if kind == BY_SAMPLE else self._axis.get(id(tensor))

    def _axis_after(self, op: Any, kinds: list[Any]) -> int | None:
        """Return the axis on which an operation leaves the samples, where that is known."""
        axes = [self._axis_of_samples(t, kind) for t, kind in zip(op.inputs, kinds)]
        known = [axis for axis in axes if axis is not None]
        if not known or not op.outputs or op.outputs[0].shape.rank is None:
            return None
        rank = op.inputs[0].shape.rank
        if op.type == "Transpose" and axes[0] is not None:
            order = _static(op, 1)
            return order.index(axes[0]) if order else None
        if op.type == "ExpandDims" and axes[0] is not None and (new := axes_of(op)):
            return axes[0] + (new[0] <= axes[0])
        if op.type == "Squeeze" and axes[0] is not None and rank is not None:
            gone = [axis % rank for axis in op.get_attr("squeeze_dims")]
            return axes[0] - sum(axis < axes[0] for axis in gone) if gone else None
        if op.type == "Einsum":
            letters, outputs = _einsum(op)
            if letters is None:
                return None
            of_samples = [part[axis] for part, axis in zip(letters, axes) if axis is not None]
            return outputs.find(of_samples[0])
        if op.type in _ALONG_LAST_AXIS and len(op.outputs) == 1:
            return axes[0]
        if op.type in ("BatchMatMulV2", "BatchMatMulV3") and axes[0] is not None:
            return axes[0]
        if op.type in _ELEMENTWISE and len(set(known)) == 1 and known[0]:
            ranks = {t.shape.rank for t, axis in zip(op.inputs, axes) if axis is not None}
            return known[0] if ranks == {op.outputs[0].shape.rank} else None
        is_alike = axes[0] and rank == op.outputs[0].shape.rank
        return axes[0] if is_alike and op.type != "Reshape" else None

    def _kind_of_shape(self, op: Any, kinds: list[Any]) -> str | None:
        if op.type in ("Identity", "Cast"):
            return str(kinds[0])
        if op.type in ("RealDiv", "DivNoNan") and kinds == [SUM, COUNT]:
            return MEAN
        if op.type == "StridedSlice" and kinds[0] == SHAPE:
            begin, end = (tf.get_static_value(op.inputs[i]) for i in (1, 2))
            stride = tf.get_static_value(op.inputs[3])
            if begin is None or end is None or stride is None or begin[0] < 0 or stride[0] != 1:
                return None
            if begin[0] > 0:
                return SHARED
            return COUNT if op.get_attr("shrink_axis_mask") == 1 else None
        if op.type in ("Pack", "ConcatV2") and kinds[0] == COUNT:
            return SHAPE if set(kinds[1:]) <= {SHARED} else None
        if op.type in ("Reshape", "BroadcastTo") and kinds == [BY_SAMPLE, SHAPE]:
            if op.type == "BroadcastTo" and op.inputs[0].shape.rank != op.outputs[0].shape.rank:
                return None
            return BY_SAMPLE  # which has the samples in front, as it had
        if op.type == "Fill" and kinds == [SHAPE, SHARED]:
            return BY_SAMPLE
        return None

    def _kind_of_mean(self, op: Any, kinds: list[Any]) -> str | None:
        kind = MEAN if MEAN in kinds else SUM
        if op.type in _REDUCTIONS:  # over other axes
            return kind if op.type in ("Mean", "Sum") and kinds[0] == kind else None
        if op.type not in _LINEAR or not set(kinds) <= {kind, SHARED}:
            return None
        if op.type == "Mul":
            return kind if kinds.count(kind) == 1 else None
        if op.type in ("RealDiv", "DivNoNan"):
            return kind if kinds[1] == SHARED else None
        # A constant beside a sum counts once.
        return kind if kind == MEAN or SHARED not in kinds else None

    def _keeps_samples(self, op: Any, kinds: list[Any]) -> bool:
        """Return whether an operation treats samples one by one, and leaves them on axis 0."""
        ranks = [tensor.shape.rank for tensor in op.inputs]
        if None in ranks or any(tensor.shape.rank is None for tensor in op.outputs):
            return False
        of_samples = [rank for rank, kind in zip(ranks, kinds) if kind == BY_SAMPLE]
        shared = [t for t, kind in zip(op.inputs, kinds) if kind == SHARED]
        if not of_samples:
            return False
        rank, is_first = of_samples[0], kinds[0] == BY_SAMPLE
        if op.type in _ELEMENTWISE:
            fit = [
                t.shape.rank < rank or (t.shape.rank == rank and t.shape[0] == 1) for t in shared
            ]
            return bool(set(of_samples) == {rank} and all(fit))
        if op.type in _ALONG_LAST_AXIS:
            return bool(is_first and rank > 1)
        if op.type in _OF_LABELS:
            return set(kinds) == {BY_SAMPLE} and ranks[0] == 2
        if op.type in _OF_IMAGES:
            return is_first and kinds.count(BY_SAMPLE) == 1
        if op.type in _REDUCTIONS or op.type in ("ExpandDims", "Cumsum"):
            axes = axes_of(op)
            return is_first and axes is not None and 0 not in axes
        reads = _READS.get(op.type)
        return reads is not None and bool(reads(op, kinds, ranks))


def _bodies(op: Any) -> list[Any]:
    """Return the graphs of the functions that an operation runs, but for conditions of loops."""
    if op.op_def is None:
        return []
    names_ = [a.name for a in op.op_def.attr if a.type == "func" and a.name != "cond"]
    graphs = [graph_of_function(op.graph, op.get_attr(name).name) for name in names_]
    return [graph for graph in graphs if graph is not None]


def _of_function(inner: list[Reading], number: int) -> str | None:
    """Return what an output is that a function, a branch or a loop has computed.

    Args:
        inner: readings of what may have computed it.
        number: of the output.
    """
    found = [kind for reading in inner for kind in reading.of_output(number)]
    if {MIXED, MEAN, SUM} & set(found):
        return MIXED
    if len(set(found)) == 1:
        return found[0]
    return BY_SAMPLE if BY_SAMPLE in found else None


def has_fixed_seed(op: Any) -> bool:
    """Return whether an operation draws the same numbers for any samples, by their places."""
    if not op.type.startswith("Stateless"):
        return False
    seed = op.inputs[1]
    if seed.op.type.startswith("StatelessRandomGetKeyCounter"):
        seed = seed.op.inputs[0]
    return value_of(seed) is not None


def _einsum(op: Any) -> tuple[list[str] | None, str]:
    """Return the letters of the inputs and of the output of an einsum without ellipsis."""
    inputs, _, output = op.get_attr("equation").decode().partition("->")
    return (None, "") if "." in inputs else (inputs.split(","), output)


def _compares(op: Any, kinds: list[Any]) -> bool:
    """Return whether an operation computes with several samples, of those that do in layers."""
    shape, is_by_sample = op.inputs[0].shape, kinds[0] == BY_SAMPLE
    if op.type in _MIXING:
        return bool({BY_SAMPLE, INSIDE} & set(kinds))
    if op.type.startswith("FusedBatchNorm"):
        return bool(is_by_sample and op.get_attr("is_training"))
    if op.type == "Split":
        return kinds[1] == BY_SAMPLE and axis_of(op, 0, op.inputs[1].shape.rank) == 0
    if op.type == "SplitV":
        return bool(is_by_sample and axis_of(op, 2, shape.rank) == 0)
    if op.type in _ALONG_LAST_AXIS and is_by_sample and shape.rank == 1:
        return True
    if op.type == "Reshape" and is_by_sample and op.outputs[0].shape.rank:
        # With a length of axis 0 that is known, it is that of something else.
        return bool(shape[0] is None and op.outputs[0].shape[0] is not None)
    has_samples_last = kinds[0] == INSIDE and shape.rank == 2
    if op.type in _REDUCTIONS:
        axes = axes_of(op) or ()
        return (is_by_sample and 0 in axes) or (has_samples_last and 1 in axes)
    if op.type in _ALONG_LAST_AXIS and has_samples_last:
        return True
    if {COUNT, PLACES} & set(kinds) and op.type in _ELEMENTWISE:
        return BY_SAMPLE in kinds
    if is_by_sample and op.type in ("StridedSlice", "Unpack"):
        return not _READS[op.type](op, kinds, [shape.rank])
    if is_by_sample and op.type in ("Cumsum", "Cumprod", "CumulativeLogsumexp", "ReverseV2"):
        return 0 in (axes_of(op) or ())
    if is_by_sample and op.type == "Roll":
        return bool(0 in _static(op, 2))
    if is_by_sample and op.type == "ConcatV2":
        return axis_of(op, len(kinds) - 1, shape.rank) == 0
    if is_by_sample and op.type == "GatherV2":
        is_along_samples = _static(op, 2)[:1] == [0] and op.get_attr("batch_dims") == 0
        return bool(is_along_samples)
    ranks = {t.shape.rank for t, kind in zip(op.inputs, kinds) if kind == BY_SAMPLE}
    if op.type in _ELEMENTWISE and len(ranks) > 1:
        return True  # the samples of one lie along another axis of the other
    of_samples = [kind in (BY_SAMPLE, INSIDE) for kind in kinds]
    if op.type == "MatMul":
        return all(of_samples) or (kinds[0] == BY_SAMPLE and op.get_attr("transpose_a"))
    return False


def axes_of(op: Any) -> list[int] | None:
    """Return the axes that the second input of an operation names, counted from the front."""
    value, rank = tf.get_static_value(op.inputs[1]), op.inputs[0].shape.rank
    if value is None or rank is None:
        return None
    rank += op.type == "ExpandDims"
    axes = value.reshape(-1).tolist()
    return [axis + rank if axis < 0 else axis for axis in axes]


def _static(op: Any, number: int) -> Any:
    """Return the value of an input as a flat list, or an empty one if it is not known."""
    value = value_of(op.inputs[number])
    return [] if value is None else np.reshape(value, -1).tolist()


def value_of(tensor: Any) -> Any:
    """Return the value of a tensor that follows from constants and ranks, or None."""
    value = tf.get_static_value(tensor)
    if value is not None:
        return value
    op = tensor.op
    if op.type == "Rank":
        return op.inputs[0].shape.rank
    values = [value_of(given) for given in op.inputs]
    if not values or any(given is None for given in values):
        return None
    if op.type == "StridedSlice" and np.ndim(values[0]) == 1 and not op.get_attr("begin_mask"):
        first, last, stride = (int(value[0]) for value in values[1:])
        is_one = op.get_attr("shrink_axis_mask")
        return values[0][first] if is_one else values[0][first:last:stride]
    if op.type == "Cast":
        return values[0]
    if op.type == "ConcatV2":
        return np.concatenate(values[:-1])
    if op.type == "Pack":
        return np.stack(values)
    if op.type == "Prod":
        return np.prod(values[0])
    functions: dict[str, Any] = {
        "FloorMod": np.mod,
        "Sub": np.subtract,
        "AddV2": np.add,
        "Mul": np.multiply,
        "Range": np.arange,
    }
    return functions[op.type](*values) if op.type in functions else None


def axis_of(op: Any, number: int, rank: int) -> int:
    """Return the axis that an input names, counted from the front, or 0 if it is not known."""
    axis = (_static(op, number) or [0])[0]
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
        return bool(len(_static(op, 1)) - 1 - added < ranks[0])
    is_all = op.get_attr("begin_mask") & 1 and op.get_attr("end_mask") & 1
    return bool(is_all and (_static(op, 3) or [0])[0] == 1)


def _gather(op: Any, kinds: list[Any], ranks: list[int]) -> bool:
    axis, batch_dims = axis_of(op, 2, ranks[0]), op.get_attr("batch_dims")
    if kinds[:2] == [BY_SAMPLE, BY_SAMPLE]:
        return bool(batch_dims > 0)
    if kinds[0] == SHARED:
        return bool(axis == 0 and batch_dims == 0)
    return bool(axis > 0 and batch_dims == 0)


def _reshape(op: Any, kinds: list[Any], ranks: list[int]) -> bool:
    """A shape [-1, ...] leaves samples alone if a sample keeps its number of entries."""
    shape, before = _static(op, 1), op.inputs[0].shape[1:]
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


_READS: dict[str, Callable[[Any, list[Any], list[int]], bool]] = {
    "BatchMatMulV2": _matrix_product,
    "ConcatV2": _concatenation,
    "GatherV2": _gather,
    "MatMul": _matrix_product,
    "OneHot": lambda op, kinds, ranks: kinds[0] == BY_SAMPLE and op.get_attr("axis") != 0,
    "Pack": _stack,
    "Pad": lambda op, kinds, ranks: _static(op, 1)[:2] == [0, 0],
    "PadV2": lambda op, kinds, ranks: _static(op, 1)[:2] == [0, 0],
    "Reshape": _reshape,
    "Split": lambda op, kinds, ranks: axis_of(op, 0, ranks[1]) > 0,
    "SplitV": lambda op, kinds, ranks: axis_of(op, 2, ranks[0]) > 0,
    "Squeeze": lambda op, kinds, ranks: _squeezed(op, ranks[0]),
    "StridedSlice": _strided_slice,
    "Tile": lambda op, kinds, ranks: _static(op, 1)[:1] == [1],
    "Transpose": lambda op, kinds, ranks: _static(op, 1)[:1] == [0],
    "Unpack": _unstack,
}


def _squeezed(op: Any, rank: int) -> bool:
    axes = [axis % rank for axis in op.get_attr("squeeze_dims")]
    return bool(axes) and 0 not in axes
