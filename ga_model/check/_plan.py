"""What `check_equivalence` trains, and how. All of its arguments are checked here."""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import keras

from ga_model._engine import Accumulation
from ga_model._settings import Settings
from ga_model._wrap import check_model
from ga_model.base import _validate
from ga_model.base._internals import compiled_loss
from ga_model.core.batch import part_of
from ga_model.core.models import optimizers_in


class Plan(NamedTuple):
    """What is trained, and how.

    Attributes:
        data: x, y and sample weight, the samples that are used.
        rows: their number.
        batch_size: samples per batch of `fit` with accumulation.
        settings: those of the training with accumulation.
    """

    data: tuple[Any, Any, Any]
    rows: int
    batch_size: int
    settings: Settings

    @property
    def updates(self) -> int:
        """Windows that the samples make."""
        return -(-self.rows // self.window_rows)

    @property
    def window_rows(self) -> int:
        return self.batch_size * self.settings.accumulation_steps

    @property
    def microbatch_rows(self) -> int:
        return min(self.batch_size, self.settings.microbatch_size or self.batch_size)


def make_plan(model: Any, data: Any, batch_size: Any, updates: Any, **settings: Any) -> Plan:
    """Check all arguments, and take the samples that are needed.

    Args:
        model, data, batch_size, updates: as `check_equivalence` takes them.
        **settings: those of the settings that are not to be the model's.
    """
    check_model(model, "check_equivalence")
    if not model.compiled:
        raise RuntimeError(_not_compiled_message(model.name))
    backend = Accumulation(model, Settings()).backend
    if not backend.trains_alone or backend.num_devices > 1:
        raise NotImplementedError(_one_device_message(model.name))
    batch_size = _validate.check_integer("batch_size", batch_size)
    updates = _validate.check_integer("updates", updates)
    used = dataclasses.replace(Settings.of(model), **settings)
    used.check_with(optimizers_in(vars(model)))
    if used.microbatch_size == "auto":
        raise ValueError(_unknown_size_message(model.name))
    rows = _validate.check_rows(data, keras.tree.flatten(data))
    if data[1] is None and compiled_loss(model) is not None:
        raise ValueError(_no_targets_message(model.name))
    steps, size = used.accumulation_steps, used.microbatch_size
    plan = Plan(data, min(rows, batch_size * steps * updates), batch_size, used)
    if min(plan.rows, plan.window_rows) <= plan.microbatch_rows:
        raise ValueError(_one_microbatch_message(rows, batch_size, steps, size))
    return plan._replace(data=part_of(data, 0, plan.rows))


def _not_compiled_message(model: str) -> str:
    return (
        "`check_equivalence` needs a compiled model. "
        f"Received: {model!r}, which is not compiled. "
        "Call `model.compile()` with an optimizer and a loss first."
    )


def _no_targets_message(model: str) -> str:
    return (
        "The compiled loss needs targets. "
        f"Received: y=None for {model!r}. Pass x and y; a script returns (model, x, y)."
    )


def _one_device_message(model: str) -> str:
    return (
        "`check_equivalence` compares with plain Keras on one device. "
        f"Received: {model!r}, created under a strategy with several replicas, or with a "
        "`process_group`. "
        "Create it without either for the check: several devices make the same updates as one."
    )


def _one_microbatch_message(
    rows: int, batch_size: int, accumulation_steps: int, microbatch_size: int | None
) -> str:
    return (
        "A window must have at least two microbatches; otherwise there is nothing to compare. "
        f"Received: {rows} samples, batch_size={batch_size}, "
        f"accumulation_steps={accumulation_steps}, microbatch_size={microbatch_size}. "
        "Pass accumulation_steps > 1, a smaller microbatch_size, or more samples."
    )


def _unknown_size_message(model: str) -> str:
    return (
        "`check_equivalence` needs a fixed number of samples per microbatch. "
        f'Received: {model!r} with microbatch_size="auto", before a size was found. '
        "Pass `microbatch_size` as a number."
    )
