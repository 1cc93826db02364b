"""The accumulation state of one compiled model, on any backend."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Iterator
from typing import Any

import keras

from ga_model._settings import Settings, passed
from ga_model.base import _validate
from ga_model.core import messages
from ga_model.core.automatic import FoundSize
from ga_model.core.backend import Backend
from ga_model.core.models import is_of_keras, optimizers_in
from ga_model.core.noise import GradientNoise
from ga_model.core.updates import Counters


class ModelState:
    """The state that the package keeps for a model. `compile` creates a new one.

    It is the package's only attribute of the model. Keras and its backend do not look for layers
    and variables in it, and no file stores it.

    Args:
        model: the `AccumulatingModel`.
        settings: its settings.
        backend: the backend of the model.

    Attributes:
        settings: the requested settings. See `size` for the effective microbatch size.
        automatic_size: the size found by `microbatch_size="auto"`.
        noise: the estimates of `GradientNoiseScale`.
        window: the open or next window, or None before the first batch.
        counters: counters since `compile`, or None before the first update.
        is_scheduled: whether a callback of the current `fit` sets `accumulation_steps`.
        is_verbose: whether the current `fit` shows its progress.
        warnings: texts of warnings given so far.
        held_back: warnings collected by `holding_back`, or None.
    """

    def __init__(self, model: keras.Model, settings: Settings, backend: Backend) -> None:
        self._model, self.backend = model, backend
        self.settings = settings
        self.automatic_size, self.noise = FoundSize(), GradientNoise()
        self.window: Any = None
        self.counters: Counters | None = None
        self.is_scheduled = self.is_verbose = False
        self._has_ended_epoch = False
        self._most_rows = 0  # of the largest batch so far that may be split
        self.warnings: set[str] = set()
        self.held_back: list[str] | None = None

    # Settings.

    def change(self, **settings: Any) -> None:
        """Change settings, after validating them. None switches a setting off."""
        settings = passed(settings)
        Settings(**settings).check_with(optimizers_in(vars(self._model)))
        self.settings = dataclasses.replace(self.settings, **settings)
        if "accumulation_steps" in settings and self.window is not None:
            self.window.set_steps(self.settings.accumulation_steps)
        if "microbatch_size" in settings:
            self.automatic_size.restart()

    @property
    def is_automatic(self) -> bool:
        """Whether `microbatch_size` is "auto"."""
        return bool(self.settings.microbatch_size == "auto")

    @property
    def size(self) -> Any:
        """Samples per microbatch; None for the full batch, and before "auto" has found a size."""
        return self.automatic_size.size if self.is_automatic else self.settings.microbatch_size

    # How the next batch is trained.

    @property
    def measured_noise(self) -> GradientNoise | None:
        """The gradient noise if a callback of the current `fit` measures it, or None."""
        return None if self.noise.asked_by is None else self.noise

    def accumulates(self) -> bool:
        """Return whether the next batch may share its window with others."""
        if self.backend.num_processes > 1:
            return True
        return self.settings.accumulation_steps > 1 or self.has_open_window()

    def is_plain(self) -> bool:
        """Return whether the next batch trains as in plain Keras."""
        is_whole = self.settings.microbatch_size is None
        return is_whole and not self.accumulates() and not self.settings.skip_nonfinite

    def check_step(self) -> None:
        """Raise TypeError if training would leave out code of the user's.

        That is a `train_step` assigned to the instance, or a `make_train_function` of its class.
        """
        model = self._model
        if self.is_plain():
            return
        if "train_step" in vars(model):
            raise TypeError(_instance_step_message(model.name))
        if self._drops_train_function:
            raise TypeError(_own_train_function_message(model.name))

    @functools.cached_property
    def _drops_train_function(self) -> bool:
        """Whether the class overrides `make_train_function`, whose result would not be called."""
        name = "make_train_function"
        return name not in vars(self._model) and not is_of_keras(self._model, name)

    # The window.

    def has_open_window(self) -> bool:
        """Return whether batches wait for an update."""
        return self.window is not None and self.window.is_open()

    def discard_window(self) -> None:
        """Discard a partial window."""
        if self.window is not None:
            self.window.discard()

    # Warnings.

    @contextlib.contextmanager
    def holding_back(self) -> Iterator[list[str]]:
        """Delay warnings: collect them in the yielded list instead of giving them."""
        before, self.held_back = self.held_back, []
        try:
            yield self.held_back
        finally:
            self.held_back = before

    def warn_once(self, message: str) -> None:
        """Warn, unless the same warning was given since `compile`."""
        if self.held_back is not None:
            self.held_back.append(message)
        elif message not in self.warnings:
            self.warnings.add(message)
            _validate.warn(message)

    def warn_of_no_effect(self) -> None:
        """Warn about settings without effect, at the end of the first epoch."""
        has_ended, self._has_ended_epoch = self._has_ended_epoch, True
        if has_ended or self.is_scheduled:
            return
        model, size, steps = self._model, self.size, self.settings.accumulation_steps
        is_only_setting = size is not None and not self.is_automatic and steps == 1
        if is_only_setting and self._most_rows <= size:
            model._warn_once(_nothing_split_message(model.name, size))
        number = 0 if self.window is None else self.window.num_batches
        if number and not self.window.was_full:
            model._warn_once(_one_update_message(model.name, steps, number))

    def warn_of_accumulating_optimizers(self) -> None:
        """Warn about optimizers that accumulate gradients themselves, if batches are split."""
        if self.settings.microbatch_size is not None:
            for name, steps in _validate.accumulating_optimizers(optimizers_in(vars(self._model))):
                self._model._warn_once(_accumulates_itself_message(name, steps))

    def warn_of_saving(self) -> None:
        """Warn if a file is written while a window is open."""
        if self.has_open_window():
            self._model._warn_once(_saved_in_window_message(self._model.name))

    def warn_after_training(self) -> None:
        """Warn about past batches by their counters, because code in a graph cannot warn."""
        model = self._model
        if model.num_skipped_microbatches:
            is_regularized = any(getattr(w, "regularizer", None) for w in model.trainable_weights)
            has_shares = self.backend.num_replicas > 1 and is_regularized
            model._warn_once(_skipped_message(model.name, has_shares))
        counters = self.counters
        if counters is not None and int(counters.zero_division):
            model._warn_once(messages.zero_division_message(model.name))
        if counters is not None and int(counters.uneven):
            model._warn_once(messages.unlike_entries_message(model.name))

    def end_fit(self) -> None:
        """Reset the state of the current `fit`."""
        self.is_scheduled = self.is_verbose = False
        self.noise.stop()
        self.backend.end_fit()


def _accumulates_itself_message(optimizer: str, steps: int) -> str:
    return (
        f"The optimizer {optimizer!r} has `gradient_accumulation_steps={steps}`: it accumulates "
        f"gradients itself, over {steps} batches, in Keras's own way. That is not the full-batch "
        "update if batches differ in size or masks; `microbatch_size` only splits each batch. "
        f"Remove `gradient_accumulation_steps` and pass `accumulation_steps={steps}` instead."
    )


def _nothing_split_message(model: str, size: int) -> str:
    return (
        f"`microbatch_size={size}` has no effect on {model!r}: no batch of the first epoch has "
        "more samples. Pass the number of samples per update (the effective batch size) to `fit` "
        "as `batch_size`, or set a smaller `microbatch_size`."
    )


def _one_update_message(model: str, steps: int, number: int) -> str:
    return (
        f"`accumulation_steps={steps}` is more than the batches of an epoch: the first epoch of "
        f"{model!r} has {number}, which make 1 update. Windows end with the epoch. "
        "For more updates per epoch, set a smaller `accumulation_steps`."
    )


def _skipped_message(model: str, has_shares: bool) -> str:
    message = (
        f"Microbatches of {model!r} with NaN or Inf in their gradients were skipped "
        "(`skip_nonfinite=True`). `model.num_skipped_microbatches` counts them."
    )
    if not has_shares:
        return message
    return (
        f"{message} If the loss is a sum, a replica that skipped all of its microbatches had no "
        "share in the weight regularizers, so they were weaker in that update: use a mean."
    )


def _saved_in_window_message(model: str) -> str:
    return (
        f"{model!r} was saved while a window is open: the file has the weights of the last update, "
        "but not the gradients of the batches since then. Save at the end of an epoch, where no "
        "window is open, or after every multiple of `accumulation_steps` batches, or call "
        "`close_window()` before."
    )


def _instance_step_message(model: str) -> str:
    return (
        f"`train_step` must be a method of the model's class. Received: {model!r} with "
        "`train_step` assigned to the instance, which is not accumulated. Define it in a subclass, "
        f"or {messages.WITHOUT}."
    )


def _own_train_function_message(model: str) -> str:
    return (
        "`fit` accumulates in a train function of its own. "
        f"Received: {model!r}, whose class overrides `make_train_function`, which would not be "
        "called. Move what it does to `train_step`, to `on_update` (once per update) or to a "
        f"callback, or {messages.WITHOUT}."
    )
