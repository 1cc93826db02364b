"""What came out of trainings: how far from each other, whether that is equal, as a table."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from ga_model.demo._options import TOLERANCE
from ga_model.tools._table import aligned, megabytes


@dataclass(frozen=True)
class Run:
    """One of the trainings.

    Attributes:
        name: how it is called in the report.
        batch_size: rows per batch of `fit`.
        accumulate: keyword arguments of `ga_model.accumulate`. Empty for plain Keras.
        is_control: whether it must differ from the reference, where others must equal it.
    """

    name: str
    batch_size: int
    accumulate: dict[str, Any] = field(default_factory=dict)
    is_control: bool = False


@dataclass(frozen=True)
class Result:
    """What came out of a run.

    Attributes:
        run: the run.
        start, weights: the model's weights before and after, in the model's order.
        updates: updates that the optimizer made.
        history: Keras's logs, a list with a value per epoch under each name.
        seconds: time in `fit`, with the tracing of its functions.
        base_memory, peak_memory: peak of the process before and after `fit`, in bytes, or None
            where the platform does not tell.
    """

    run: Run
    start: list[Any]
    weights: list[Any]
    updates: int
    history: dict[str, list[float]]
    seconds: float
    base_memory: int | None
    peak_memory: int | None

    @property
    def training_memory(self) -> int | None:
        """What `fit` added to the peak, in bytes."""
        if self.peak_memory is None or self.base_memory is None:
            return None
        return self.peak_memory - self.base_memory


class Difference(NamedTuple):
    """How far weights are from the reference's.

    Attributes:
        relative: ||w - w_reference|| / ||w_reference - w_start||, the largest over all variables.
        absolute: the largest |w - w_reference| over all entries.
    """

    relative: float
    absolute: float


class Verdict(NamedTuple):
    """Whether every run but the controls made the reference's updates, and a sentence about it."""

    is_reproduced: bool
    text: str


def difference(result: Result, reference: Result) -> Difference:
    """Return the difference of two runs that started from the same weights. NaN stays NaN."""
    relative, absolute = [], []
    for w, w_reference, w_start in zip(result.weights, reference.weights, reference.start):
        error = float(np.linalg.norm(w - w_reference))
        change = float(np.linalg.norm(w_reference - w_start))
        relative.append(error / change if change else (math.inf if error else 0.0))
        absolute.append(float(np.max(np.abs(w - w_reference))))
    return Difference(float(np.max(relative)), float(np.max(absolute)))


def judge(results: Sequence[Result], dtype: str) -> Verdict:
    """Compare all results with the first.

    Args:
        results: the reference, then the others.
        dtype: what was computed in, a key of `TOLERANCE`.
    """
    reference, *others = results
    if not all(np.isfinite(w).all() for w in reference.weights):
        return Verdict(
            False,
            f"No verdict: the weights of the {reference.run.name} are not finite. "
            "Pass a smaller --learning-rate.",
        )
    tolerance = TOLERANCE[dtype]
    relative = [difference(r, reference).relative for r in others]
    is_equal = [value <= tolerance for value in relative]  # NaN is not
    listed = ", ".join(f"{v:.1e} for {r.run.name!r}" for v, r in zip(relative, others))
    finding = (
        f"the relative difference from the {reference.run.name} is {listed}; "
        f"up to {tolerance:.0e} counts as equal in {dtype}."
    )
    if not all(equal for equal, r in zip(is_equal, others) if not r.run.is_control):
        hint = " Rounding alone may have done it: --dtype float64 tells."
        return Verdict(False, f"Not reproduced: {finding}" + (hint if dtype == "float32" else ""))
    if any(equal for equal, r in zip(is_equal, others) if r.run.is_control):
        return Verdict(
            False,
            f"No verdict: {finding} These settings cannot tell the runs apart. "
            "Pass more --epochs or a larger --learning-rate.",
        )
    return Verdict(True, f"Reproduced: {finding}")


def announcement(run: Run, number: int, count: int) -> str:
    """Return the headline of one run."""
    settings = "".join(f", {name}={value}" for name, value in run.accumulate.items())
    return f"[{number}/{count}] {run.name}: batches of {run.batch_size}{settings}"


_HEADERS = (
    ("", "run"),
    ("", "batch"),
    ("", "updates"),
    ("validation", "accuracy"),
    ("relative", "difference"),
    ("absolute", "difference"),
    ("peak", "memory"),
    ("training", "memory"),
    ("", "time"),
)

_NOTES = """\
Differences are from the weights of the {reference}: relative is ||w - w_ref|| / ||w_ref - w_start||
of the variable where that is largest, absolute is the largest |w - w_ref|.
Peak memory is that of the run's process, training memory the part of it that `fit` added.
Time is that of `fit`, with the tracing of its functions."""


def table(results: Sequence[Result]) -> str:
    """Return a line per run, the reference first, and what the columns mean."""
    reference = results[0]
    rows = [[line[i] for line in _HEADERS] for i in range(2)]
    for result in results:
        distance = difference(result, reference)
        rows.append(
            [
                result.run.name,
                f"{result.run.batch_size:,}",
                f"{result.updates:,}",
                f"{result.history['val_accuracy'][-1]:.1%}",
                "-" if result is reference else f"{distance.relative:.1e}",
                "-" if result is reference else f"{distance.absolute:.1e}",
                megabytes(result.peak_memory),
                megabytes(result.training_memory),
                f"{result.seconds:.1f} s",
            ]
        )
    return f"{aligned(rows)}\n\n{_NOTES.format(reference=reference.run.name)}"
