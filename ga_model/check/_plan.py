"""Validate the arguments of `check_equivalence`, and plan its trainings."""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import keras

from ga_model._engine import Backend
from ga_model._settings import Settings
from ga_model._wrap import check_model
from ga_model.base import _validate
from ga_model.base._internals import compiled_loss
from ga_model.base._types import Nest
from ga_model.core.batch import samples_between, shapes_in
from ga_model.core.models import optimizers_in


class Plan(NamedTuple):
    """The samples and settings of a training with accumulation."""

    data: tuple[Nest, Nest, Nest]  # x, y and sample weights
    rows: int  # number of samples
    batch_size: int  # samples per batch of `fit` with accumulation
    settings: Settings  # of the training with accumulation

    @property
    def updates(self) -> int:
        """Number of windows that the samples make."""
        return -(-self.rows // self.window_rows)

    @property
    def window_rows(self) -> int:
        return self.batch_size * self.settings.accumulation_steps

    @property
    def microbatch_rows(self) -> int:
        return min(self.batch_size, self.settings.microbatch_size or self.batch_size)


def make_plan(
    model: keras.Model,
    data: tuple[Nest, Nest, Nest],
    batch_size: int,
    updates: int,
    **settings: Any,
) -> Plan:
    """Validate the arguments of `check_equivalence`, and take the samples that it needs.

    Settings default to those of the model.
    """
    check_model(model, "check_equivalence")
    if not model.compiled:
        raise RuntimeError(
            "`check_equivalence` needs a compiled model. "
            f"Received: {model.name!r}, which is not compiled. "
            "Call `model.compile()` with an optimizer and a loss first."
        )
    backend = Backend(model)
    if not backend.trains_alone or backend.num_devices > 1:
        raise NotImplementedError(
            "`check_equivalence` compares with plain Keras on one device. "
            f"Received: {model.name!r}, created under a strategy with several replicas, or with a "
            "`process_group`. Create it without either for the check: several devices make the "
            "same updates as one."
        )
    batch_size = _validate.check_integer("batch_size", batch_size)
    updates = _validate.check_integer("updates", updates)
    used = dataclasses.replace(Settings.of(model), **settings)
    used.check_with(optimizers_in(vars(model)))
    if used.microbatch_size == "auto":
        raise ValueError(
            "`check_equivalence` needs a fixed number of samples per microbatch. "
            f'Received: {model.name!r} with microbatch_size="auto", before a size was found. '
            "Pass `microbatch_size` as a number."
        )
    rows = _rows_of(data)
    if data[1] is None and compiled_loss(model) is not None:
        raise ValueError(
            "The compiled loss needs targets. "
            f"Received: y=None for {model.name!r}. Pass x and y; a script returns (model, x, y)."
        )
    steps, size = used.accumulation_steps, used.microbatch_size
    plan = Plan(data, min(rows, batch_size * steps * updates), batch_size, used)
    if min(plan.rows, plan.window_rows) <= plan.microbatch_rows:
        raise ValueError(
            "A window must have at least two microbatches; otherwise there is nothing to compare. "
            f"Received: {rows} samples, batch_size={batch_size}, "
            f"accumulation_steps={steps}, microbatch_size={size}. "
            "Pass accumulation_steps > 1, a smaller microbatch_size, or more samples."
        )
    return plan._replace(data=samples_between(data, 0, plan.rows))


def _rows_of(data: tuple[Nest, Nest, Nest]) -> int:
    """Return the number of samples, or raise if it is unknown, or arrays differ in it."""
    shapes = shapes_in(data)
    if not shapes or len(shapes) < sum(leaf is not None for leaf in keras.tree.flatten(data)):
        types = [type(part).__name__ for part in data]
        raise TypeError(
            "`check_equivalence` takes arrays, tensors, or nested structures of them, with samples "
            f"on axis 0. Received: x, y, sample_weight of types {', '.join(types)}. From a "
            "dataset, take some samples first: `x, y = next(iter(dataset.unbatch().batch(256)))`."
        )
    if len({shape[0] for shape in shapes}) > 1:
        raise ValueError(
            "x, y and sample_weight must have the same number of samples. "
            f"Received: shapes {shapes}. Pass the same number of each."
        )
    return shapes[0][0]
