"""The demonstration's figure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ga_model.demo._report import Result

# Blue, orange and green of Okabe and Ito's palette, told apart by colour-blind readers too.
_COLORS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7")


def draw(results: Sequence[Result]) -> Any:
    """Return a `matplotlib.figure.Figure` of the losses and, where it is known, the memory.

    Args:
        results: the runs, the reference first.
    """
    from matplotlib.figure import Figure

    has_memory = all(r.training_memory is not None for r in results)
    figure = Figure(figsize=(11 if has_memory else 6, 4), layout="constrained")
    axes = figure.subplots(1, 2 if has_memory else 1, squeeze=False)[0]
    axes[0].set(title="Training loss", xlabel="epoch", ylabel="mean over the epoch")
    # The reference is a broad line, so that a run with the same losses shows on top of it.
    broad = {"linewidth": 7, "alpha": 0.5, "markersize": 9}
    for result, color in zip(results, _COLORS):
        loss = result.history["loss"]
        style = {"linestyle": "--", "markersize": 4} if result is not results[0] else broad
        label = f"{result.run.name} ({result.updates:,} updates)"
        epochs = range(1, len(loss) + 1)
        axes[0].plot(epochs, loss, label=label, color=color, marker="o", **style)
    axes[0].set_ylim(bottom=0)
    axes[0].xaxis.get_major_locator().set_params(integer=True)
    axes[0].legend()
    if has_memory:
        names = [r.run.name for r in results]
        base, training = (
            [(getattr(r, name) or 0) / 1e6 for r in results]
            for name in ("base_memory", "training_memory")
        )
        axes[1].barh(names, base, color="lightgray", height=0.6)
        bars = axes[1].barh(names, training, left=base, color=_COLORS, height=0.6)
        axes[1].bar_label(bars, fmt="+%.0f MB", padding=4)
        axes[1].set(title="Peak memory of the process", xlabel="MB (gray: before training)")
        axes[1].margins(x=0.3)  # room for the labels
        axes[1].invert_yaxis()
    return figure
