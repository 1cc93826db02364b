"""Try whether a layer call is per sample: run it on all samples at once and in two parts."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import keras
import numpy as np
from keras import ops
from numpy.typing import ArrayLike

from ga_model.base._types import Nest, Tensor
from ga_model.core.proof.windows import norm_of, rounded

TOTAL = 5  # samples of a trial, in parts of three and two
KNOWN = 4 * TOTAL  # samples taken from a batch, for four trials
_PARTS = (0, 3), (3, TOTAL)
_PARTS_OF_GRADIENTS = (0, 2), (2, 4)  # of equal size, as a gradient program takes long to compile
_UNKNOWN = 8  # length of an axis of unknown length
HALF = {"float16": 1e-3, "bfloat16": 1e-2}  # relative tolerances in half precision
_OF_GRADIENTS = 1e-3, 0.05  # relative tolerances of gradients, in float32 and in half precision
_FOLDED = 4099  # most entries compared of an array or a row of it; a prime mixes all axes


class NotByRowsError(Exception):
    """A call cannot be split by samples. The message says why, for a warning."""


def agreed(trials: Sequence[Sequence[str | None]]) -> list[str | None]:
    """Return for each output the kind that all conclusive trials agree on, or None."""
    seen = [set(kinds) - {"alike"} for kinds in zip(*trials)]
    seen = [kinds if kinds == {"zero"} else kinds - {"zero"} for kinds in seen]
    return [kinds.pop() if len(kinds) == 1 else None for kinds in seen]


def kinds_of(
    run: Callable[[int, int], Sequence[np.ndarray]],
    tolerance: float = 0.0,
    parts: Sequence[tuple[int, int]] = _PARTS,
) -> list[str | None]:
    """Return how each output of a function depends on the samples.

    Args:
        run: the function, of the begin and end of a range of samples. Returns arrays.
        tolerance: relative; a lower precision of an output raises it.
        parts: begin and end of each part of the samples, in order.

    Returns:
        For each output "rows" if axis 0 has one entry per sample, which depends on that sample
        only; "alike" if these entries are equal, too; "mean" or "sum" if it is that over samples;
        "zero" if it is zero, which shows nothing; or None.
    """
    tolerances, runs = list[float](), []
    sizes = [end - begin for begin, end in parts]
    for begin, end in ((0, sum(sizes)), *parts):
        outputs = run(begin, end)
        tolerances = tolerances or [max(tolerance, HALF.get(str(o.dtype), 1e-4)) for o in outputs]
        runs.append(list(map(_folded, outputs)))
        del outputs  # frees memory for the next ones
    return [_kind(arrays, sizes, limit) for limit, arrays in zip(tolerances, zip(*runs))]


_SCALES = (1.0, 0.1, 3.0)  # of samples: a saturated function hides that it combines samples


def kinds_of_call(
    run: Callable[[list[np.ndarray], list[np.ndarray], int, int], Sequence[np.ndarray]],
    gradients: Callable[[list[np.ndarray], list[np.ndarray], int, int], Sequence[np.ndarray]]
    | None,
    fixed: Sequence[Tensor],
    samples: Sequence[Tensor],
    known: Sequence[np.ndarray | None],
    is_trained: Sequence[bool],
    is_half: bool = False,
) -> tuple[list[str | None], bool]:
    """Return how outputs of a call depend on the samples, by several trials.

    Args:
        run: the call, of values for `fixed`, of all samples of a trial, and of the begin and end of
            the range to run. Returns arrays.
        gradients: the same for gradients by samples and `fixed`, or None if they are Keras's own.
        fixed: tensors without samples. Only their shapes and dtypes matter.
        samples: tensors with samples on axis 0, likewise.
        known: for each of `samples`, an array of `KNOWN` samples from training, or None.
        is_trained: for each of `fixed`, whether it is trained. Other vectors may be variances.
        is_half: whether anything is computed in half precision.

    Returns:
        The kind of each output, as in `kinds_of`; and whether gradients of samples are per sample,
        and those of `fixed` add up.

    Raises:
        Exception: whatever the call raises for another number of samples.
    """
    trials, adds_up, generator = [], True, np.random.default_rng(0)
    scales = [_scale_of(t, is_weight) for t, is_weight in zip(fixed, is_trained)]
    values = [_drawn_like(t, t.shape, generator, scale) for t, scale in zip(fixed, scales)]
    shapes = [(TOTAL, *t.shape[1:]) for t in samples]
    for number, scale in enumerate(_SCALES):
        arrays = [_drawn_like(t, shape, generator, scale) for t, shape in zip(samples, shapes)]
        trials.append(kinds_of(functools.partial(run, values, arrays)))
        if gradients is not None and not number:
            derived = functools.partial(gradients, values, arrays)
            try:
                kinds = kinds_of(derived, _OF_GRADIENTS[is_half], _PARTS_OF_GRADIENTS)
            except NotByRowsError:
                raise
            except Exception:  # there are none, or they take too much memory
                continue
            adds_up = None not in kinds and "mean" not in kinds
    for begin in range(0, KNOWN if any(k is not None for k in known) else 0, TOTAL):
        if any(None in kinds for kinds in trials):
            break  # the call will not be split, so further trials are useless
        chosen = [None if k is None else k[begin : begin + TOTAL] for k in known]
        pairs = zip(chosen, arrays)
        arrays = [a if k is None else k.astype(a.dtype, copy=False) for k, a in pairs]
        try:
            trials.append(_kinds_of_known(run, values, arrays, generator))
        except NotByRowsError:
            raise
        except Exception:  # known arrays may not fit the random ones
            break
    return agreed(trials), adds_up


def _kinds_of_known(
    run: Callable[..., Sequence[np.ndarray]],
    values: list[np.ndarray],
    arrays: list[np.ndarray],
    generator: np.random.Generator,
) -> list[str | None]:
    """Return kinds of outputs for samples of a batch, whose large values may amplify rounding."""
    if None not in (kinds := kinds_of(functools.partial(run, values, arrays))):
        return kinds
    # Perturb the weights, as some values of the samples may mark missing ones.
    moved = [
        rounded(v, np.finfo(v.dtype).eps / 2, generator) if v.dtype.kind == "f" else v
        for v in values
    ]
    outputs, moved_outputs = (
        [np.nan_to_num(_folded(a), posinf=0, neginf=0) for a in run(weights, arrays, 0, TOTAL)]
        for weights in (values, moved)
    )
    roundings = [norm_of([a - b]) / (norm_of([a]) or 1) for a, b in zip(outputs, moved_outputs)]
    return kinds_of(functools.partial(run, values, arrays), 10 * max(roundings))


def _scale_of(tensor: Tensor, is_trained: bool) -> float | None:
    """Return a scale of random weights that saturates no activation, or None for variances."""
    if len(tensor.shape) > 1:
        return 1.0 / math.sqrt(math.prod(size or 1 for size in tensor.shape[:-1]))
    return 0.3 if is_trained else None


def _drawn_like(
    tensor: Tensor, shape: Sequence[int | None], generator: np.random.Generator, scale: float | None
) -> np.ndarray:
    sizes = tuple(_UNKNOWN if size is None else size for size in shape)
    array = drawn(tensor.dtype, sizes, generator, scale)
    return array.astype(keras.backend.standardize_dtype(tensor.dtype), copy=False)


def combines_samples(
    operation: Callable[..., Nest], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> bool:
    """Return whether an operation of a functional model combines samples, tried on random numbers.

    In `args` and `kwargs`, symbolic tensors stand for arrays.
    """
    generator, arrays = np.random.default_rng(0), dict[int, Any]()

    def part(leaf: Any, begin: int, end: int) -> Any:
        if not isinstance(leaf, keras.KerasTensor):
            return leaf
        has_samples = leaf.shape[:1] == (None,)
        if id(leaf) not in arrays:
            shape = [TOTAL if size is None else size for size in leaf.shape]
            arrays[id(leaf)] = drawn(leaf.dtype, tuple(shape), generator)
        array = arrays[id(leaf)]
        return ops.convert_to_tensor(array[begin:end] if has_samples else array, leaf.dtype)

    def run(begin: int, end: int) -> list[np.ndarray]:
        own, own_kwargs = keras.tree.map_structure(lambda x: part(x, begin, end), (args, kwargs))
        outputs = keras.tree.flatten(operation(*own, **own_kwargs))
        return [ops.convert_to_numpy(output) for output in outputs]

    try:
        return any(kind not in ("rows", "alike") for kind in kinds_of(run))
    except Exception:  # for example because a shape is unknown
        return True


def drawn(
    dtype: Any, shape: tuple[int, ...], generator: np.random.Generator, scale: float | None = 1.0
) -> np.ndarray:
    """Return random numbers of a dtype. Integers are 0 or 1, as they may be indices.

    Args:
        scale: standard deviation of floats, or None for positive ones near 1, such as variances.
    """
    name = keras.backend.standardize_dtype(dtype)
    if name == "uint32":  # seeds
        return np.zeros(shape, name)
    if name.startswith(("bool", "int", "uint")):
        return generator.integers(0, 2, shape).astype(name)
    if scale is None:
        return generator.uniform(0.5, 1.5, shape).astype("float32")
    numbers = np.asarray(generator.standard_normal(shape, "float32"))
    numbers *= scale
    return numbers


def _folded(array: np.ndarray) -> np.ndarray:
    """Return sums over groups of entries of a large array, or of each row if it has few.

    Summing is linear, so kinds stay the same, and no copy of all entries is kept.
    """
    has_rows = array.ndim > 0 and array.shape[0] <= TOTAL
    rows = array.reshape(array.shape[0] if has_rows else 1, -1) if array.size else array
    if array.dtype.kind != "f" or rows.shape[-1] <= _FOLDED:
        return array
    is_known = np.isfinite(rows)
    if not is_known.all():
        rows = np.where(is_known | ~is_known.any(1, keepdims=True), rows, 0)
    end = rows.shape[1] // _FOLDED * _FOLDED
    folded = rows[:, :end].reshape(len(rows), -1, _FOLDED).sum(1, "float64")
    folded[:, : rows.shape[1] - end] += rows[:, end:]
    of_first: np.ndarray = folded[0]
    return folded if has_rows else of_first


def _kind(runs: Sequence[np.ndarray], sizes: Sequence[int], tolerance: float) -> str | None:
    whole, *parts = runs
    rows = [(number, *whole.shape[1:]) for number in (sum(sizes), *sizes)]
    if whole.ndim and [array.shape for array in runs] == rows:
        joined = np.concatenate([np.asarray(part) for part in parts])
        if not _are_close(joined, whole, tolerance):
            return None
        is_number = whole.dtype != bool
        return "alike" if is_number and (whole == whole[:1]).all() else "rows"
    if any(part.shape != whole.shape for part in parts):
        return None
    numbers = [np.asarray(part, "float64") for part in parts]
    if not np.any(numbers) and not np.any(whole):
        return "zero"
    if _are_close(sum(numbers), whole, tolerance):
        return "sum"
    mean = sum(size / sum(sizes) * number for size, number in zip(sizes, numbers))
    return "mean" if _are_close(mean, whole, tolerance) else None


def _are_close(actual: ArrayLike, expected: np.ndarray, tolerance: float) -> bool:
    if expected.dtype.kind in "biu":
        return bool(np.array_equal(actual, expected))
    actual, expected = (np.asarray(a, "float64") for a in (actual, expected))
    is_known = np.isfinite(expected)
    if actual.shape != expected.shape or not np.array_equal(is_known, np.isfinite(actual)):
        return False
    if expected.size and not is_known.any():
        return False  # nothing can be compared
    difference = norm_of([actual[is_known] - expected[is_known]])
    return difference <= tolerance * norm_of([expected[is_known]]) + 1e-6
