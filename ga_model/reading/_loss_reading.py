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

from ga_model.base._internals import is_along_samples, layers_in
from ga_model.reading._dependence import dependence_of
from ga_model.reading._operations import BY_SAMPLE, MEAN, MIXED, PARTS, SHARED, SUM, names
from ga_model.reading._place import place_of
from ga_model.reading._reading import Reading

# Of Keras's own losses, those that compare samples or divide over all of them.
_NOT_BY_SAMPLE = names("Circle Dice Tversky circle dice tversky ")


_OTHER_SAMPLES = (
    "as far as its graph tells, its outputs for a sample depend on other samples, or follow from "
    "Python code (`tf.numpy_function`, `tf.py_function`) that may use them"
)


class DoesNotAddUpError(Exception):
    """A loss is not known to add up over microbatches."""


def check_adds_up(loss: Any, y_true: Any, y_pred: Any) -> None:
    """Raise DoesNotAddUpError if a compiled loss is not known to add up over microbatches.

    Args:
        loss: a `keras.losses.Loss`, or what Keras takes for one.
        y_true, y_pred: what it is called with.
    """
    is_of_keras = looks_at_samples_alone(loss, y_true, y_pred)
    if not (is_of_keras or adds_up(_values_of(loss), y_true, y_pred)):
        raise DoesNotAddUpError


def looks_at_samples_alone(loss: Any, y_true: Any, y_pred: Any) -> bool:
    """Return whether a loss is one of Keras's own that looks at these samples one by one."""
    return is_known(loss) and _fit(loss, y_true, y_pred)


def is_known(loss: Any) -> bool:
    """Return whether a loss is one of Keras's own that looks at samples one by one.

    Args:
        loss: what `compile` takes for a loss, or what Keras makes of it.
    """
    loss = keras.losses.get(loss)
    if is_along_samples(loss):
        return False
    kinds = [loss if inspect.isfunction(loss) else type(loss), getattr(loss, "fn", None)]
    return all(
        _module_of(kind).startswith("keras.") and kind.__name__ not in _NOT_BY_SAMPLE
        for kind in kinds
        if kind is not None
    )


def _module_of(kind: Any) -> str:
    """Return the module of a class or function, though `functools.wraps` gave it another's."""
    return str(getattr(kind, "__globals__", {}).get("__name__", kind.__module__))


def _fit(loss: Any, y_true: Any, y_pred: Any) -> bool:
    """Return whether targets do not broadcast against outputs along the samples."""
    shapes = [getattr(tensor, "shape", None) for tensor in (y_true, y_pred)]  # of NumPy perhaps
    ranks = [tf.TensorShape(shape).rank for shape in shapes]
    name = str(getattr(loss, "name", "") or getattr(loss, "__name__", loss))
    if None in ranks or any(kind in name.lower() for kind in ("sparse", "ctc")):
        return True
    if "generalized" in name.lower():  # it takes labels of any rank for those of one
        return bool(ranks[0] == 1)
    higher = y_true if ranks[0] > ranks[1] else y_pred
    is_column = abs(ranks[0] - ranks[1]) == 1 and higher.shape[-1] == 1  # which Keras removes
    return bool(ranks[0] == ranks[1] or is_column or 0 in ranks)


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
    try:
        if not dependence_of(tensor).on_values:
            return "mean"
        kind = Reading(tensor.graph, trusts_layers=True).kind_of(tensor)
    except Exception:  # of a graph that is not what it is taken for
        return None
    return {MEAN: "mean", SUM: "sum"}.get(kind or "")


def kind_of_function(function: Callable[[Any], Any], values: Any) -> str | None:
    """Return what `kind_of_scalar` does of what a function gives for values.

    Args:
        function: takes a tensor with an entry of axis 0 for each sample, and returns a scalar.
        values: such a tensor.
    """
    spec = tf.TensorSpec([None, *values.shape[1:]], values.dtype)
    try:
        with keras.StatelessScope():
            graph = tf.function(function, autograph=False).get_concrete_function(spec).graph
        return kind_of_scalar(graph.outputs[0])
    except Exception:  # of the user's code, called in a way that it may not know
        return None


def why_mixed(tensors: list[Any], layer: Any) -> str | None:
    """Return why tensors may have entries that follow from several samples, or None.

    Such as those of a layer that subtracts the mean of the batch, compares samples, or uses an
    operation that is not known. What BatchNormalization does is ignored: it has its own warning.
    Eagerly, nothing is known.

    Args:
        tensors: outputs of a layer.
        layer: the layer.
    """
    tensors = [tensor for tensor in tensors if tf.is_symbolic_tensor(tensor)]
    if not tensors:
        return None
    graph = tensors[0].graph
    padded = [op for op in graph.get_operations() if op.type == "RaggedTensorToTensor"]
    if any(op.outputs[0].shape[1:2] == [None] for op in padded):
        return _OTHER_SAMPLES  # to the longest of the samples
    reading = Reading(
        graph, True, normalizing=normalizing_names(layer), arguments=_kinds_of_arguments(graph)
    )
    if not any(reading.kind_of(tensor) in (MIXED, MEAN, SUM) for tensor in tensors):
        return None
    if not reading.unknown:
        return _OTHER_SAMPLES
    return f"it uses an operation that may mix samples: {place_of(reading.unknown[0])}"


def normalizing_names(layer: Any) -> list[str]:
    """Return the names under which BatchNormalization layers in a layer compute.

    In a graph, what `TimeDistributed` calls has the name of the wrapper.
    """
    found = []
    for part in layers_in(layer):
        is_wrapper = isinstance(part, keras.layers.TimeDistributed)
        if isinstance(part.layer if is_wrapper else part, keras.layers.BatchNormalization):
            found.append(part.name)
    return found


def _kinds_of_arguments(graph: Any) -> list[str] | None:
    """Return what the inputs of a graph are, or None where none is ragged or sparse.

    The values of a ragged tensor are read as if each were a sample: what puts several together has
    to tell by the other parts which are of one sample.
    """
    specs = tf.nest.flatten(getattr(graph, "structured_input_signature", None))
    if not any(isinstance(s, (tf.RaggedTensorSpec, tf.SparseTensorSpec)) for s in specs):
        return None
    kinds: list[str] = []
    for spec in (s for s in specs if isinstance(s, tf.TypeSpec)):
        count = len(tf.nest.flatten(spec, expand_composites=True))
        is_ragged = isinstance(spec, tf.RaggedTensorSpec)
        is_first_of_rows = is_ragged or (isinstance(spec, tf.TensorSpec) and spec.shape.rank != 0)
        first = BY_SAMPLE if is_first_of_rows else PARTS if count > 1 else SHARED
        kinds += [first, *[PARTS] * (count - 1)]
    return kinds
