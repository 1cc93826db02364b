"""Report the measurements of `_measure` as ratios in percent, in tables and a figure."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from ga_model.bench._cases import CASES
from ga_model.bench._measure import FULL, SMALL, WAYS, Result, Setup
from ga_model.tools._table import megabytes, text_table

if TYPE_CHECKING:
    import matplotlib.figure

_HEADER = (
    *("", "microbatches", "time against\nsmall batches", "time against\nfull batch"),
    *("first\ncall", "peak\nmemory", "memory against\nfull batch"),
)

_NOTES = f"""\
{SMALL}: plain Keras with batches of a microbatch's size, and an update after each.
{FULL}: plain Keras with the whole batch at once; accumulation makes the same updates.
Keras gradient_accumulation_steps: an optimizer with this argument.
loop by hand: a training loop that adds up gradients, for full windows of equal batches.
The others are this package's. loss_over="batch" is for losses that compare samples.
A custom loss (here the same, as a function) is tried in the first call.

Times are per sample: medians over the rounds, +- half of the distance between their quartiles.
A first call traces and compiles. Memory is what making the model and training two windows adds
to the peak of a process. What shows "-" was not measured: memory with fewer microbatches or a
second time with XLA, and what no time was left for (pass more --minutes)."""


class Ratio(NamedTuple):
    """A ratio of times: the median over rounds, and half the interquartile range."""

    median: float
    spread: float

    def __str__(self) -> str:
        return f"{self.median:.0%}" + (f" +-{self.spread:.0%}" if self.spread else "")


def time_ratio(results: Mapping[Setup, Result], setup: Setup, against: str = SMALL) -> Ratio | None:
    """Return the time per sample against `SMALL` or `FULL`, or None if no round has both."""
    number = 1 if against == SMALL else setup.microbatches
    reference = results.get(setup._replace(way=against, microbatches=number))
    if reference is None:  # with one microbatch, the full batch is `SMALL`
        return time_ratio(results, setup)
    times = zip(results[setup].seconds_per_sample, reference.seconds_per_sample)
    ratios = [seconds / of_reference for seconds, of_reference in times]
    if not ratios:
        return None
    low, median, high = np.quantile(ratios, [0.25, 0.5, 0.75])
    return Ratio(float(median), float(high - low) / 2)


def memory_ratio(results: Mapping[Setup, Result], setup: Setup) -> float | None:
    """Return the peak memory relative to the full batch, or None if it was not measured."""
    sizes = {s: result.bytes_of_peak_memory for s, result in results.items()}
    full_sizes = [size for s, size in sizes.items() if s[:3] == (*setup[:2], FULL) and size]
    size = sizes[setup]
    return size / full_sizes[0] if size is not None and full_sizes else None


def tables(results: Mapping[Setup, Result]) -> str:
    """Return a table for each model, with XLA and without, followed by explanations."""
    parts = []
    for (model, jit), group in itertools.groupby(results, lambda setup: setup[:2]):
        rows, rounds = [], 0
        for setup in group:
            result = results[setup]
            rounds = max(rounds, len(result.seconds_per_sample))
            size, first = result.bytes_of_peak_memory, result.seconds_of_first_call
            full = "" if setup.way == SMALL else _cell(time_ratio(results, setup, FULL))
            times = [_cell(time_ratio(results, setup)), full, _cell(first, "{:.1f} s")]
            memory = ["-" if size is None else megabytes(size)]
            memory += [_cell(memory_ratio(results, setup), "{:.0%}")]
            rows.append([setup.way, str(setup.microbatches), *times, *memory])
        title = f"{model}: microbatches of {CASES[model].rows} samples, XLA {_on(jit)}"
        parts.append(f"{title}, {rounds} rounds\n\n{text_table(_HEADER, rows)}")
    return "\n\n".join([*parts, _NOTES])


def _cell(value: object, form: str = "{}") -> str:
    return "-" if value is None else form.format(value)


def _on(jit_compile: bool) -> str:
    return "on" if jit_compile else "off"


def draw(results: Mapping[Setup, Result]) -> matplotlib.figure.Figure:
    """Return a figure with a column per model: times above, memory below.

    It shows the measurements with the most microbatches.
    """
    from matplotlib.figure import Figure

    models, jits, *_ = (list(dict.fromkeys(values)) for values in zip(*results))
    most = max(setup.microbatches for setup in results)
    figure = Figure((3 + 3 * len(models), 0.5 + 2.5 * (len(jits) + 1)), layout="constrained")
    figure.suptitle(f"{most} microbatches per update")
    axes = figure.subplots(len(jits) + 1, len(models), squeeze=False, sharey=True)
    for setup in results:
        column, row = models.index(setup.model), jits.index(setup.jit_compile)
        place, ratio = WAYS.index(setup.way), time_ratio(results, setup)
        if setup.microbatches == most and ratio is not None:
            widths = {"width": 100 * ratio.median, "xerr": 100 * ratio.spread}
            axes[row, column].barh(place, **widths, color="#0072B2")
        if (size := memory_ratio(results, setup)) is not None:
            axes[-1, column].barh(place, 100 * size, color="#0072B2")
        title = f"{setup.model}, XLA {_on(setup.jit_compile)}"
        axes[row, column].set(title=title, xlabel="time, in % of small batches")
        axes[-1, column].set(title=setup.model, xlabel="memory, in % of the full batch")
    axes[0, 0].set_yticks(range(len(WAYS)), WAYS)
    axes[0, 0].invert_yaxis()  # all axes share it
    return figure
