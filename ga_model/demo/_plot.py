"""The demonstration's figure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ga_model.demo._report import Result

# Blue, orange and green of Okabe and Ito's palette, told apart by colour-blind readers too.
_COLORS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7")


def draw(results: Sequence[Result]) -> Any:
    """Return a figure of the losses and, where it is known, the memory of all runs.

    Args:
        results: the runs, the reference first.

    Returns:
        A `matplotlib.figure.Figure` that belongs to no window.
    """
    from matplotlib.figure import Figure

    has_memory = all(r.training_memory is not None for r in results)
    figure = Figure(figsize=(11 if has_memory else 6, 4), layout="constrained")
    axes = figure.subplots(1, 2 if has_memory else 1, squeeze=False)[0]
    _draw_losses(axes[0], results)
    if has_memory:
        _draw_memory(axes[1], results)
    return figure


def _draw_losses(axes: Any, results: Sequence[Result]) -> None:
    for i, result in enumerate(results):
        loss = result.history["loss"]
        # The reference is a broad line, so that a run with the same losses shows on top of it.
        axes.plot(
            range(1, len(loss) + 1),
            loss,
            label=f"{result.run.name} ({result.updates:,} updates)",
            color=_COLORS[i % len(_COLORS)],
            linewidth=2 if i else 7,
            alpha=1 if i else 0.5,
            marker="o",
            markersize=4 if i else 9,
            linestyle="--" if i else "-",
        )
    axes.set(title="Training loss", xlabel="epoch", ylabel="mean over the epoch")
    axes.set_ylim(bottom=0)
    axes.xaxis.get_major_locator().set_params(integer=True)
    axes.legend()


def _draw_memory(axes: Any, results: Sequence[Result]) -> None:
    names = [r.run.name for r in results]
    base = [(r.base_memory or 0) / 1e6 for r in results]
    training = [(r.training_memory or 0) / 1e6 for r in results]
    colors = [_COLORS[i % len(_COLORS)] for i in range(len(results))]
    axes.barh(names, base, color="lightgray", height=0.6)
    bars = axes.barh(names, training, left=base, color=colors, height=0.6)
    axes.bar_label(bars, fmt="+%.0f MB", padding=4)
    axes.set(title="Peak memory of the process", xlabel="MB (gray: before training)")
    axes.set_xlim(right=1.3 * max(b + t for b, t in zip(base, training)))  # room for the labels
    axes.invert_yaxis()
