"""Compare the results of trainings: relative differences, a verdict, a table, a figure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from ga_model.demo._options import TOLERANCE
from ga_model.tools._difference import relative_differences
from ga_model.tools._table import megabytes, text_table

if TYPE_CHECKING:
    import matplotlib.figure


@dataclass(frozen=True)
class Run:
    """A training; `accumulate` has the arguments of `ga_model.accumulate`, none for plain Keras.

    A control must differ from the reference; all other runs must equal it.
    """

    name: str
    batch_size: int
    accumulate: dict[str, Any] = field(default_factory=dict)
    is_control: bool = False


@dataclass(frozen=True)
class Result:
    """The result of a run."""

    run: Run
    start: list[np.ndarray]  # the weights before training, in the model's order
    weights: list[np.ndarray]
    updates: int  # number of updates that the optimizer made
    history: dict[str, list[float]]  # Keras's logs, a value per epoch
    seconds: float  # in `fit`, including tracing
    base_memory: int  # peak of the process before `fit`, in bytes
    peak_memory: int  # peak of the process after `fit`, in bytes

    @property
    def training_memory(self) -> int:
        """The bytes that `fit` added to the peak."""
        return self.peak_memory - self.base_memory


def difference(result: Result, reference: Result) -> float:
    """Return ||w - w_reference|| / ||w_reference - w_start||, the largest over all variables.

    Both runs must have the same start weights. NaN stays NaN.
    """
    start = reference.start
    return float(np.max(relative_differences(result.weights, start, reference.weights, start)))


def judge(results: Sequence[Result], dtype: str) -> tuple[bool, str]:
    """Return whether the runs are as they must be (see `Run`), and a sentence that says so."""
    reference, *others = results
    if not all(np.isfinite(w).all() for w in reference.weights):
        return False, (
            f"No verdict: the weights of the {reference.run.name} are not finite. "
            "Pass a smaller --learning-rate."
        )
    tolerance = TOLERANCE[dtype]
    relative = [difference(r, reference) for r in others]
    is_equal = [value <= tolerance for value in relative]  # False for NaN
    names = [f"{r.run.name!r}{' (which must differ)' * r.run.is_control}" for r in others]
    listed = ", ".join(f"{v:.1e} for {name}" for v, name in zip(relative, names))
    finding = (
        f"the relative difference from the {reference.run.name} is {listed}; "
        f"up to {tolerance:.0e} counts as equal in {dtype}."
    )
    if not all(equal for equal, r in zip(is_equal, others) if not r.run.is_control):
        hint = " It may be rounding alone: --dtype float64 shows it." if dtype == "float32" else ""
        return False, f"Not reproduced: {finding}{hint}"
    if any(equal for equal, r in zip(is_equal, others) if r.run.is_control):
        return False, (
            f"No verdict: {finding} These settings cannot tell the runs apart. "
            "Pass more --epochs or a larger --learning-rate."
        )
    return True, f"Reproduced: {finding}"


_HEADER = (
    *("run", "batch", "updates", "validation\naccuracy", "relative\ndifference"),
    *("peak\nmemory", "training\nmemory", "time"),
)

_NOTES = """\
Relative difference: how far the weights are from those of the {reference} after training;
1 = as large as the whole change of the weights. It is ||w - w_ref|| / ||w_ref - w_start|| of the
variable where that is largest.
Peak memory is that of the run's process; training memory is what `fit` added to it.
Time is that of `fit`, with the tracing of its functions."""


def table(results: Sequence[Result]) -> str:
    """Return a table with a line per run, the reference first, followed by an explanation."""
    reference = results[0]
    rows = [
        [
            result.run.name,
            f"{result.run.batch_size:,}",
            f"{result.updates:,}",
            f"{result.history['val_accuracy'][-1]:.1%}",
            "-" if result is reference else f"{difference(result, reference):.1e}",
            megabytes(result.peak_memory),
            megabytes(result.training_memory),
            f"{result.seconds:.1f} s",
        ]
        for result in results
    ]
    return f"{text_table(_HEADER, rows)}\n\n{_NOTES.format(reference=reference.run.name)}"


# From the palette of Okabe and Ito, whose colors color-blind readers can tell apart.
_COLORS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7")


def draw(results: Sequence[Result]) -> matplotlib.figure.Figure:
    """Return a figure of the losses and the memory."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 4), layout="constrained")
    losses, memory = figure.subplots(1, 2)
    losses.set(title="Training loss", xlabel="epoch", ylabel="mean over the epoch")
    # The line of the reference is broad, so that it shows behind a run with the same losses.
    broad = {"linewidth": 7, "alpha": 0.5, "markersize": 9}
    for result, color in zip(results, _COLORS):
        loss = result.history["loss"]
        style = {"linestyle": "--", "markersize": 4} if result is not results[0] else broad
        label = f"{result.run.name} ({result.updates:,} updates)"
        epochs = range(1, len(loss) + 1)
        losses.plot(epochs, loss, label=label, color=color, marker="o", **style)
    losses.set_ylim(bottom=0)
    losses.xaxis.get_major_locator().set_params(integer=True)
    losses.legend()
    names = [r.run.name for r in results]
    base = [r.base_memory / 1e6 for r in results]
    training = [r.training_memory / 1e6 for r in results]
    memory.barh(names, base, color="lightgray", height=0.6)
    bars = memory.barh(names, training, left=base, color=_COLORS, height=0.6)
    memory.bar_label(bars, fmt="+%.0f MB", padding=4)
    memory.set(title="Peak memory of the process", xlabel="MB (gray: before training)")
    memory.margins(x=0.3)  # room for the labels
    memory.invert_yaxis()
    return figure
