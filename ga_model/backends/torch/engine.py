"""The engine for PyTorch: what the first level needs from a backend."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from ga_model._settings import Settings
from ga_model.backends.hooks import CoreHooks
from ga_model.backends.torch import refusals
from ga_model.backends.torch.adapter import TorchBackend
from ga_model.core.driver import Driver
from ga_model.core.models import optimizers_in


class Accumulation(Driver):
    """The driver on PyTorch."""

    backend_type = TorchBackend
    backend: TorchBackend

    def __init__(self, model: Any, settings: Settings) -> None:
        super().__init__(model, settings)
        before = vars(model).get("_accumulation")  # `compile` leaves the group as it is
        if before is not None:
            self.backend.set_process_group(before.backend.process_group)

    def set_process_group(self, group: Any) -> None:
        """Train together with the processes of a group from the next window on, or alone."""
        refusals.check_group(group)
        self.backend.set_process_group(group)
        self.window = None

    def accumulates(self) -> bool:
        return super().accumulates() or self.backend.num_processes > 1

    def begin_epoch(self, epoch: int, is_first: bool) -> None:
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


class Hooks(CoreHooks):
    """Methods of a model that Keras calls on PyTorch."""

    jit_compile: Any
    name: str

    @property
    def process_group(self) -> Any:
        """The processes that train the model together, a `torch.distributed.ProcessGroup`, or None.

        By default None: each process trains alone. With `torch.distributed.group.WORLD`, all train
        together: each calls `fit` on its share of the data, and a window has the batches of all
        processes. Set it before `fit`, in all processes. It is not saved in files.

        Raises:
            TypeError: it is set to something else.
            ValueError: the process is not in the group.
        """
        return self._accumulation.backend.process_group

    @process_group.setter
    def process_group(self, value: Any) -> None:
        self._accumulation.set_process_group(value)

    def _check_compile_arguments(self, arguments: Mapping[str, Any]) -> None:
        """Raise ValueError if the model cannot be compiled with keyword arguments."""
        if arguments.get("jit_compile") is True:
            raise ValueError(refusals.compiled_message(self.name))

    def make_train_function(self, force: bool = False) -> Any:
        """Return the function that `fit` calls with each batch."""
        if self.jit_compile and (self.train_function is None or force):
            raise ValueError(refusals.compiled_message(self.name))
        return super().make_train_function(force)

    def _switching(self, of_keras: Callable[..., Any]) -> Callable[..., Any]:
        def run(data: Any) -> Any:
            self._accumulation.check_step()
            return of_keras(data)  # which calls `train_step`

        return run
