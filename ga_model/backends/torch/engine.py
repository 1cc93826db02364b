"""The engine for PyTorch: what the first level needs from a backend."""

from __future__ import annotations

from typing import Any

from ga_model._settings import Settings
from ga_model.backends.torch import refusals
from ga_model.backends.torch.adapter import TorchBackend
from ga_model.backends.torch.hooks import Hooks
from ga_model.core.driver import Driver
from ga_model.core.models import optimizers_in

__all__ = ["Accumulation", "Hooks", "check_same_epoch", "explain"]


class Accumulation(Driver):
    """All that is kept for a model where Keras runs on PyTorch.

    Args:
        model, settings: as `ModelState` takes them.
    """

    backend: TorchBackend

    def __init__(self, model: Any, settings: Settings) -> None:
        super().__init__(model, settings, TorchBackend(model))
        before = vars(model).get("_accumulation")  # `compile` leaves the group as it is
        self.backend.set_process_group(getattr(before, "process_group", None))

    @property
    def process_group(self) -> Any:
        """The processes that train the model together, as users set it, or None."""
        return self.backend.process_group

    def set_process_group(self, group: Any) -> None:
        """Train together with the processes of a group from the next window on, or alone."""
        refusals.check_group(group)
        self.backend.set_process_group(group)
        self.window = None

    def accumulates(self) -> bool:
        return super().accumulates() or self.backend.num_processes > 1

    def run_step(self, train_step: Any, *args: Any) -> Any:
        if self.backend.is_running_step() or self.is_plain():
            return super().run_step(train_step, *args)
        return self.train(iter(args), 1)

    def begin_epoch(self, epoch: int) -> None:
        if self.backend.processes is not None:
            self.backend.processes.begin_epoch(epoch, self._updated())

    def finish_fit(self) -> None:
        if self.backend.processes is not None:
            self.backend.processes.finish(self._updated())

    def end_fit(self) -> None:
        super().end_fit()
        if self.backend.processes is not None:
            self.backend.processes.end_fit()

    def _updated(self) -> list[Any]:
        """Return the variables that updates change."""
        optimizers = optimizers_in(vars(self._model))
        state = [v for optimizer in optimizers for v in optimizer.variables]
        return [*self._model.trainable_variables, *state]


def check_same_epoch(model: Any, epoch: int) -> None:
    """Do nothing: there is one process."""


def explain(error: BaseException, model: Any) -> None:
    """Do nothing: there is one process."""
