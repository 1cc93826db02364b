"""What the measurements of `_bench` say: ratios, tables, a figure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from ga_model.bench._bench import (
    FLOOR,
    HAND,
    KERAS,
    RECOMPUTING,
    REFERENCE,
    SIZE,
    STEPS,
    WAYS,
    WHOLE,
    Measured,
    Memory,
    Times,
)
from ga_model.tools._table import aligned, megabytes

_COLORS = {  # of Okabe and Ito's palette, told apart by colour-blind readers too
    FLOOR: "#999999",
    WHOLE: "#CC79A7",
    KERAS: "#E69F00",
    HAND: "#F0E442",
    STEPS: "#0072B2",
    SIZE: "#009E73",
    RECOMPUTING: "#D55E00",
}

_WIDTH = 0.8 / len(_COLORS)  # of a bar

_NOTES = """\
{floor}: forward and backward pass, without an optimizer.
{keras}: an optimizer with gradient_accumulation_steps.
{hand}: two train functions, one that adds up gradients in dense variables and one that updates with
their mean, for full windows of equal batches.
{steps}, {size}: this package.
{recomputing}: a microbatch_size with loss_over="batch", as steps and losses need that do not add up
over microbatches.
Times are ratios of time per sample: the median of the rounds, +- half of the distance between their
quartiles. Memory is what making the model and training two windows added to what a process held at
one time; in brackets, by how much that is more, in sizes of the trainable variables, and with a
microbatch_size of these and the batch. A first call traces and compiles."""


class Ratio(NamedTuple):
    """A ratio to plain Keras: the median over rounds, and half of the interquartile range."""

    median: float
    spread: float

    def __str__(self) -> str:
        return f"{self.median:.2f} +-{self.spread:.2f}"


def time_ratio(times: Times, way: str, num_microbatches: int) -> Ratio | None:
    """Return time per sample over that of plain Keras, or None where it was not measured."""
    key = (way, 1 if way == FLOOR else num_microbatches)
    if key not in times.seconds:
        return None
    ratios = np.array(times.seconds[key]) / np.array(times.seconds[REFERENCE, 1])
    low, median, high = np.quantile(ratios, [0.25, 0.5, 0.75])
    return Ratio(float(median), float(high - low) / 2)


def first_seconds(times: Times, way: str) -> float:
    """Return the seconds of a way's first call, of all its numbers that which took longest."""
    return max(seconds for key, seconds in times.first_seconds.items() if key[0] == way)


def memory_of(measured: Measured, case: str) -> dict[str, Memory]:
    """Return what each way of one case took."""
    return {memory.way: memory for memory in measured.memory if memory.case == case}


def tables(measured: Measured) -> str:
    """Return the ratios as text."""
    ways = [way for way in WAYS if way != REFERENCE]
    rows = [["model", "XLA", "microbatches", "rounds", *ways]]
    for times in measured.times:
        rounds = str(len(times.seconds[REFERENCE, 1]))
        for number in measured.num_microbatches:
            ratios = [time_ratio(times, way, number) for way in ways]
            cells = ["-" if ratio is None else str(ratio) for ratio in ratios]
            rows.append([times.case, _on(times.jit_compile), str(number), rounds, *cells])
    most = max(measured.num_microbatches)
    memory_rows = [["model", "XLA", "plain Keras", *ways[1:]]]
    for case in dict.fromkeys(times.case for times in measured.times):
        memory = memory_of(measured, case)
        cells = [_memory_cell(memory.get(way), memory[REFERENCE]) for way in ways[1:]]
        plain = memory[REFERENCE]
        memory_rows.append([case, _on(plain.jit_compile), megabytes(plain.size), *cells])
    first_ways = [KERAS, STEPS, SIZE, RECOMPUTING]
    first_rows = [["model", "XLA", "plain Keras", *first_ways]]
    for times in measured.times:
        first = {way: first_seconds(times, way) for way in (REFERENCE, *first_ways)}
        cells = [f"{first[way] / first[REFERENCE]:.2f}" for way in first_ways]
        seconds = f"{first[REFERENCE]:.1f} s"
        first_rows.append([times.case, _on(times.jit_compile), seconds, *cells])
    notes = _NOTES.format(
        floor=FLOOR, keras=KERAS, hand=HAND, steps=STEPS, size=SIZE, recomputing=RECOMPUTING
    )
    return "\n\n".join(
        [
            "Time per sample, over plain Keras with batches of a microbatch's size\n"
            + aligned(rows),
            f"Peak memory with {most} microbatches, over plain Keras\n{aligned(memory_rows)}",
            f"First call, over plain Keras\n{aligned(first_rows)}",
            notes,
        ]
    )


def _on(jit_compile: bool) -> str:
    return "on" if jit_compile else "off"


def _memory_cell(memory: Memory | None, reference: Memory) -> str:
    if memory is None or memory.size is None or not reference.size:
        return "-"
    unit = memory.trainable_size + (memory.batch_size if memory.way in (SIZE, RECOMPUTING) else 0)
    more = (memory.size - reference.size) / unit
    return f"{memory.size / reference.size:.2f} ({more:+.2f})"


def to_dict(measured: Measured) -> dict[str, Any]:
    """Return all measurements in plain values: seconds per sample in each round, and bytes."""
    times = [
        {
            "model": t.case,
            "jit_compile": t.jit_compile,
            "way": way,
            "microbatches": number,
            "seconds_per_row": seconds,
            "seconds_of_first_call": t.first_seconds[way, number],
            "ratio_median_and_spread": time_ratio(t, way, number),
        }
        for t in measured.times
        for (way, number), seconds in t.seconds.items()
    ]
    memory = [
        {
            "model": m.case,
            "jit_compile": m.jit_compile,
            "way": m.way,
            "microbatches": m.num_microbatches,
            "bytes": m.size,
            "bytes_of_trainable_variables": m.trainable_size,
            "bytes_of_batch": m.batch_size,
        }
        for m in measured.memory
    ]
    return {"times": times, "memory": memory}


def draw(measured: Measured) -> Any:
    """Return a `matplotlib.figure.Figure`: a column per model; times by XLA off and on, memory.

    Args:
        measured: the measurements.
    """
    from matplotlib.figure import Figure

    cases = list(dict.fromkeys(t.case for t in measured.times))
    jits = list(dict.fromkeys(t.jit_compile for t in measured.times))
    figure = Figure(figsize=(1.5 + 3.4 * len(cases), 0.8 + 2.6 * (len(jits) + 1)))
    figure.set_layout_engine("constrained")
    axes = figure.subplots(len(jits) + 1, len(cases), squeeze=False)
    for i, jit_compile in enumerate(jits):
        for axis, case in zip(axes[i], cases):
            (times,) = [t for t in measured.times if (t.case, t.jit_compile) == (case, jit_compile)]
            _draw_times(axis, times, measured.num_microbatches)
            axis.set_title(f"{case}, XLA {_on(jit_compile)}")
    for axis, case in zip(axes[-1], cases):
        _draw_memory(axis, memory_of(measured, case))
        axis.set_title(f"{case}, XLA {_on(measured.memory[0].jit_compile)}")
    for row in axes[:-1]:
        row[0].set_ylabel("time per sample,\nover plain Keras")
    axes[-1][0].set_ylabel("peak memory,\nover plain Keras")
    for axis in axes.flat:
        axis.set_xlabel("microbatches per window")
        axis.axhline(1, color="black", linewidth=0.8)
    handles, labels = axes[0][0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=len(labels))
    return figure


def _shift(i: int) -> float:
    """Return how far the bar of a way stands from the middle of all."""
    return (i - (len(_COLORS) - 1) / 2) * _WIDTH


def _draw_times(axis: Any, times: Times, num_microbatches: Sequence[int]) -> None:
    for i, (way, color) in enumerate(_COLORS.items()):
        ratios = [time_ratio(times, way, number) for number in num_microbatches]
        places = [j + _shift(i) for j, ratio in enumerate(ratios) if ratio]
        known = [ratio for ratio in ratios if ratio]
        axis.bar(
            places,
            [ratio.median for ratio in known],
            _WIDTH,
            yerr=[ratio.spread for ratio in known],
            color=color,
            label=way,
        )
    axis.set_xticks(range(len(num_microbatches)), [str(n) for n in num_microbatches])


def _draw_memory(axis: Any, memory: dict[str, Memory]) -> None:
    plain = memory[REFERENCE].size
    for i, (way, color) in enumerate(_COLORS.items()):
        size = memory[way].size if way in memory else None
        if size is not None and plain:
            axis.bar(_shift(i), size / plain, _WIDTH, color=color)
    axis.set_xticks([0], [str(memory[REFERENCE].num_microbatches)])
    axis.set_xlim(-1, 1)
