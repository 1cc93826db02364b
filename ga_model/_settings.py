"""The settings of a model: their defaults and valid values."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable
from typing import Any

from ga_model.base import _validate


class _Unchanged:
    """The default of arguments for which None has a meaning."""

    def __repr__(self) -> str:
        return "unchanged"


UNCHANGED: Any = _Unchanged()


@dataclasses.dataclass(frozen=True)
class Settings:
    """How a model accumulates gradients. See `AccumulatingModel` for what each setting does.

    Attributes:
        accumulation_steps: batches per window, an integer >= 1.
        microbatch_size: samples per microbatch, an integer >= 1; None for the full batch; or
        "auto".
        skip_nonfinite: whether microbatches with NaN or Inf in a gradient are skipped.
        loss_over: "auto", "microbatch" or "batch".
        verify: whether code of the user's own is tried both ways before it trains.

    Raises:
        TypeError, ValueError: a value is invalid.
    """

    accumulation_steps: int = 1
    microbatch_size: Any = None
    skip_nonfinite: bool = False
    loss_over: str = "auto"
    verify: bool = True

    def __post_init__(self) -> None:
        for name, check in _CHECKS.items():
            object.__setattr__(self, name, check(getattr(self, name)))

    @classmethod
    def of(cls, model: Any) -> Settings:
        """Return the current settings of a model. A plain model has the defaults."""
        return cls(**{name: getattr(model, name) for name in NAMES if hasattr(model, name)})

    def check_with(self, optimizers: Iterable[Any], adds_scaling: bool = False) -> None:
        """Raise ValueError if they cannot be used with the optimizers.

        Args:
            optimizers: the optimizers.
            adds_scaling: whether Keras will wrap the optimizer in a LossScaleOptimizer.
        """
        optimizers = list(optimizers)
        _validate.check_single_accumulation(optimizers, self.accumulation_steps)
        _validate.check_single_finite_check(optimizers, self.skip_nonfinite, adds_scaling)

    def describe(self, batch_size: int | None = None) -> str:
        """Describe in one line what they do to batches of this size, or of any size."""
        steps = self.accumulation_steps
        samples = "each batch"
        if batch_size is not None:
            samples = f"{batch_size} sample{'' if batch_size == 1 else 's'} per batch"
        updates = "1 update per batch"
        if steps > 1:
            effective = f" ({steps * batch_size} samples)" if batch_size else ""
            updates = f"1 update per {steps} batches{effective}"
        skips = "; microbatches with NaN or Inf are skipped" if self.skip_nonfinite else ""
        return f"{samples}{self._describe_split(batch_size)}; {updates}{skips}"

    def _describe_split(self, batch_size: int | None) -> str:
        size = self.microbatch_size
        if size == "auto":
            return ", in the largest microbatches that fit in memory"
        if size is None or (batch_size is not None and batch_size <= size):
            return ", not split"
        if batch_size is None:
            return f" in microbatches of {size}"
        ragged = "up to " if batch_size % size else ""
        return f" in {-(-batch_size // size)} microbatches of {ragged}{size}"

    def config(self) -> dict[str, Any]:
        """Return what is saved in a file."""
        return dataclasses.asdict(self)


_CHECKS: dict[str, Callable[[Any], Any]] = {
    "accumulation_steps": lambda value: _validate.check_integer(
        "accumulation_steps", value, "Pass 1 to train without accumulation."
    ),
    "microbatch_size": _validate.check_microbatch_size,
    "skip_nonfinite": lambda value: _validate.check_bool(
        "skip_nonfinite",
        value,
        "Pass True to skip microbatches with NaN or Inf in their gradients.",
    ),
    "loss_over": lambda value: _validate.check_choice(
        "loss_over", value, ["auto", "microbatch", "batch"]
    ),
    "verify": lambda value: _validate.check_bool("verify", value),
}
_DEFAULTS = dataclasses.asdict(Settings())
NAMES = tuple(_DEFAULTS)


def passed(**arguments: Any) -> dict[str, Any]:
    """Return the settings among the arguments of a function.

    `UNCHANGED` ones are omitted; None stands for the default.
    """
    given = {name: value for name, value in arguments.items() if value is not UNCHANGED}
    return {name: _DEFAULTS[name] if value is None else value for name, value in given.items()}
