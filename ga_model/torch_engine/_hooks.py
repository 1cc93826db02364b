"""Attributes that a model offers Keras and PyTorch."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from ga_model.hearing._models import current_recording
from ga_model.torch_engine import _refusals

if TYPE_CHECKING:  # what `super()` finds
    from keras import Model as _Base
else:
    _Base = object


class Hooks(_Base):
    """What a model answers that Keras asks it on PyTorch."""

    train_function: Any
    jit_compile: Any
    name: str
    _accumulation: Any

    @property
    def process_group(self) -> Any:
        """The processes that train the model together, a `torch.distributed.ProcessGroup`, or None.

        None by default: each process trains alone. With `torch.distributed.group.WORLD` all do it
        together: each calls `fit` on its share of the data, and a window is the batches of all
        processes. Set it before `fit`, in all processes. No file has it.

        Raises:
            TypeError: it is set to something else.
            ValueError: the process is not in the group.
        """
        return self._accumulation.process_group

    @process_group.setter
    def process_group(self, value: Any) -> None:
        self._accumulation.set_process_group(value)

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        owner = next((c for c in cls.__mro__ if "compute_loss" in vars(c)), None)
        if owner is not None:
            cls.compute_loss = _noted(vars(owner)["compute_loss"])

    def _aggregate_additional_loss(self, loss: Any) -> Any:
        total = super()._aggregate_additional_loss(loss)
        if (recording := current_recording(self)) is not None:
            recording.losses.note_additional(loss, total)
        return total

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear gradients as `torch.nn.Module.zero_grad` does.

        But where a window's sum is in them: Keras's own `train_step` then adds to it.
        """
        recording = current_recording(self)
        if recording is None:
            self._accumulation.left_gradients.forget()
        if recording is None or not recording.keeps_gradients:
            super().zero_grad(set_to_none)

    def _check_compile_arguments(self, arguments: Mapping[str, Any]) -> None:
        """Raise ValueError if the model cannot be compiled with keyword arguments."""
        if arguments.get("jit_compile") is True:
            raise ValueError(_refusals.compiled_message(self.name))

    def make_train_function(self, force: bool = False) -> Any:
        """Make the function that `fit` calls with each batch."""
        if self.train_function is None or force:
            if self.jit_compile:
                raise ValueError(_refusals.compiled_message(self.name))
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
