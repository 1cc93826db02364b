"""The engine for PyTorch: what the first level needs from a backend."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any

from ga_model.backends.hooks import CoreHooks
from ga_model.backends.torch import refusals
from ga_model.base._types import Logs, Nest

if TYPE_CHECKING:
    import torch


class Hooks(CoreHooks):
    """Methods of a model that Keras calls on PyTorch."""

    jit_compile: bool
    name: str

    @property
    def process_group(self) -> torch.distributed.ProcessGroup | None:
        """The processes that train the model together, a `torch.distributed.ProcessGroup`, or None.

        By default None: each process trains alone. With `torch.distributed.group.WORLD`, all train
        together: each calls `fit` on its share of the data, and a window has the batches of all
        processes. Set it before `fit`, in all processes. It is not saved in files.

        Raises:
            TypeError: it is set to something else.
            ValueError: the process is not in the group.
        """
        return self._accumulation.backend.processes.group

    @process_group.setter
    def process_group(self, value: Any) -> None:
        refusals.check_group(value)
        self._accumulation.backend.set_process_group(value)
        self._accumulation.window = None

    def _check_compile_arguments(self, arguments: Mapping[str, Any]) -> None:
        """Raise ValueError if the model cannot be compiled with keyword arguments."""
        if arguments.get("jit_compile") is True:
            raise ValueError(refusals.compiled_message(self.name))

    def make_train_function(self, force: bool = False) -> Callable[..., Logs]:
        """Return the function that `fit` calls with each batch."""
        if self.jit_compile and (self.train_function is None or force):
            raise ValueError(refusals.compiled_message(self.name))
        return super().make_train_function(force)

    def _train(self, data: Iterable[Nest]) -> Logs:
        return self._accumulation.train(iter(data), 1)
