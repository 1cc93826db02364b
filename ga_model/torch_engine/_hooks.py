"""Attributes that a model offers Keras and PyTorch."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from ga_model.backends.torch import hooks
from ga_model.hearing._models import current_recording


class Hooks(hooks.Hooks):
    """What a model answers that Keras asks it where this engine runs."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        owner = next((c for c in cls.__mro__ if "compute_loss" in vars(c)), None)
        if owner is not None:
            cls.compute_loss = _noted(vars(owner)["compute_loss"])

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear gradients as `torch.nn.Module.zero_grad` does.

        But where a window's sum is in them: Keras's own `train_step` then adds to it.
        """
        recording = current_recording(self)
        if recording is None:
            self._accumulation.left_gradients.forget()
        if recording is None or not recording.keeps_gradients:
            super().zero_grad(set_to_none)

    def make_train_function(self, force: bool = False) -> Any:
        """Make the function that `fit` calls with each batch."""
        if self.train_function is None or force:
            super().make_train_function(force=True)
            self.train_function = _discarding(self, self.train_function)
        return self.train_function


def _noted(compute_loss: Callable[..., Any]) -> Callable[..., Any]:
    """Let a recording know what a model's `compute_loss` returns."""

    @functools.wraps(compute_loss)
    def noted(self: Any, *args: Any, **kwargs: Any) -> Any:
        loss = compute_loss(self, *args, **kwargs)
        if (recording := current_recording(self)) is not None:
            recording.losses.note_total(loss)
        return loss

    return noted


def _discarding(model: Any, train_function: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Return a train function that forgets the window of a batch that fails."""

    def run(data: Any) -> Any:
        model._accumulation.check_step()
        try:
            return train_function(data)
        except BaseException:  # KeyboardInterrupt, too
            model._accumulation.discard_window()
            raise

    return run
