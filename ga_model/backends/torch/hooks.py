"""Attributes that a model offers Keras and PyTorch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from ga_model.backends.torch import refusals
from ga_model.hearing._models import current_recording

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

    def _aggregate_additional_loss(self, loss: Any) -> Any:
        total = super()._aggregate_additional_loss(loss)
        if (recording := current_recording(self)) is not None:
            recording.losses.note_additional(loss, total)
        return total

    def _check_compile_arguments(self, arguments: Mapping[str, Any]) -> None:
        """Raise ValueError if the model cannot be compiled with keyword arguments."""
        if arguments.get("jit_compile") is True:
            raise ValueError(refusals.compiled_message(self.name))

    def make_train_function(self, force: bool = False) -> Any:
        """Make the function that `fit` calls with each batch."""
        if self.train_function is None or force:
            if self.jit_compile:
                raise ValueError(refusals.compiled_message(self.name))
            super().make_train_function(force=True)
            self.train_function = _checking(self, self.train_function)
        return self.train_function


def _checking(model: Any, train_function: Callable[[Any], Any]) -> Callable[[Any], Any]:
    def run(data: Any) -> Any:
        model._accumulation.check_step()
        return train_function(data)

    return run
