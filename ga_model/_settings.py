"""The settings of accumulation: their defaults and valid values, and how arguments set them."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from ga_model.base import _validate

if TYPE_CHECKING:
    import keras


class _Unchanged:
    """The type of `UNCHANGED`, the default of arguments for which None has a meaning."""

    def __repr__(self) -> str:
        return "unchanged"


UNCHANGED: Any = _Unchanged()


@dataclasses.dataclass(frozen=True)
class Settings:
    """How a model accumulates gradients. The properties of `ModelSettings` explain each setting.

    Raises:
        TypeError, ValueError: a value is invalid.
    """

    accumulation_steps: int = 1
    microbatch_size: Any = None  # an integer >= 1, None for the full batch, or "auto"
    skip_nonfinite: bool = False
    loss_over: str = "auto"  # "auto", "microbatch" or "batch"
    verify: bool = True

    def __post_init__(self) -> None:
        way_out = "Pass 1 to train without accumulation."
        steps = _validate.check_integer("accumulation_steps", self.accumulation_steps, way_out)
        size = self.microbatch_size
        if not (size is None or (isinstance(size, str) and size == "auto")):
            way_out = 'Pass None to keep batches whole, or "auto" to search for the largest size.'
            size = _validate.check_integer("microbatch_size", size, way_out)
        way_out = "Pass True to skip microbatches with NaN or Inf in their gradients."
        _validate.check_bool("skip_nonfinite", self.skip_nonfinite, way_out)
        choices = ["auto", "microbatch", "batch"]
        loss_over = _validate.check_choice("loss_over", self.loss_over, choices)
        _validate.check_bool("verify", self.verify)
        vars(self).update(accumulation_steps=steps, microbatch_size=size, loss_over=loss_over)

    @classmethod
    def of(cls, model: keras.Model) -> Settings:
        """Return the current settings of a model: the defaults if it is a plain Keras model."""
        return cls(**{name: getattr(model, name) for name in NAMES if hasattr(model, name)})

    def check_with(
        self, optimizers: Iterable[keras.optimizers.Optimizer], adds_scaling: bool = False
    ) -> None:
        """Raise ValueError if the settings cannot be used with the optimizers.

        With `adds_scaling`, Keras will wrap the optimizer in a LossScaleOptimizer, which lowers its
        scale when gradients overflow.
        """
        optimizers = list(optimizers)
        _validate.check_single_accumulation(optimizers, self.accumulation_steps)
        scales = adds_scaling or any(getattr(o, "inner_optimizer", None) for o in optimizers)
        if self.skip_nonfinite and scales:
            raise ValueError(
                "`skip_nonfinite` would hide overflows from a LossScaleOptimizer, which must see "
                "them to lower its scale and skips such windows itself. "
                "Received: skip_nonfinite=True with a LossScaleOptimizer "
                "(Keras also wraps the optimizer of a `mixed_float16` model in one). "
                "Set `skip_nonfinite=False`, or compile with `auto_scale_loss=False`."
            )

    def describe(self, batch_size: int | None) -> str:
        """Return one line on what the settings do to batches of this size (None: of any size)."""
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


_DEFAULTS = dataclasses.asdict(Settings())
NAMES = tuple(_DEFAULTS)


def passed(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings among arguments that were passed, with the default in place of None."""
    given = {name: arguments[name] for name in NAMES if name in arguments}
    return {n: _DEFAULTS[n] if v is None else v for n, v in given.items() if v is not UNCHANGED}
