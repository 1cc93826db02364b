"""PyTorch: functions of the core run eagerly, and read and write variables directly."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import keras
import numpy as np
import torch

from ga_model.backends.torch import call_hooks, isolated_calls, layer_calls, optimizers, refusals
from ga_model.backends.torch.gradient_sums import GradientSums
from ga_model.backends.torch.noting import Noting
from ga_model.backends.torch.optimizers import TorchOptimizer
from ga_model.backends.torch.process_group import Processes
from ga_model.backends.torch.state import LeftGradients, State, Versions
from ga_model.base._internals import raw, stateless_scope
from ga_model.base._internals_torch import times_written
from ga_model.base._python_state import Attributes
from ga_model.base._types import Logs, Nest
from ga_model.core.backend import Backend
from ga_model.core.backend_types import Applied, Function, Name, States
from ga_model.core.call_types import Split, Traced
from ga_model.core.models import instances_in, optimizers_in
from ga_model.core.snapshots import state_variables
from ga_model.core.user_code import python_state_of
from ga_model.core.window import Sums

# Texts of failed allocations whose errors have no class of their own.
_EXHAUSTED = ("can't allocate memory", "not enough memory", "out of memory")


class TorchBackend(Backend):
    """Runs functions of the core eagerly.

    Attributes:
        processes: the processes of the group, or this one alone.
    """

    noted_class = Noting
    traces = False

    def __init__(self, model: keras.Model) -> None:
        super().__init__(model)
        before = vars(model).get("_accumulation")  # `compile` keeps the group
        self.set_process_group(None if before is None else before.backend.processes.group)
        self._wrappers: dict[int, TorchOptimizer] = {}  # by id of the optimizer
        self._updated = Versions([])  # of weights and slots

    # Processes.

    def set_process_group(self, group: torch.distributed.ProcessGroup | None) -> None:
        """Train together with the processes of a group, or alone."""
        self.processes = Processes(group)
        self.num_processes = self.processes.size

    def exchange_sums(
        self, applied: Sequence[Applied], sums: Sums | None, is_measured: bool, is_end: bool
    ) -> tuple[Sums | None, bool]:
        return self.processes.sum(applied, sums, is_measured, is_end)

    def begin_epoch(self, epoch: int, is_first: bool) -> None:
        self.processes.begin_epoch(epoch, self._updated_variables())

    def finish_fit(self) -> None:
        self.processes.finish(self._updated_variables())

    def end_fit(self) -> None:
        self.processes.end_fit()

    def _updated_variables(self) -> list[keras.Variable]:
        """Return the variables that updates change."""
        optimizers = optimizers_in(vars(self._model))
        state = [v for optimizer in optimizers for v in optimizer.variables]
        return [*self._model.trainable_variables, *state]

    # Steps.

    def _compiled(self, name: Name, function: Function) -> Callable[..., Nest]:
        run: Callable[..., Nest] = torch.no_grad()(function.run)
        return run

    def copied(self, nest: Nest) -> Nest:
        return keras.tree.map_structure(_copied, nest)

    def read(self, variables: Iterable[keras.Variable]) -> Iterator[np.ndarray]:
        return map(np.array, super().read(variables))  # those of a CPU share memory

    def run_step(self, data: Nest) -> tuple[Logs, list[keras.Variable]]:
        others = self._model.non_trainable_variables
        versions = [times_written(raw(variable)) for variable in others]
        with self.running_step(), torch.enable_grad():
            logs = self._model.train_step(data)
        pairs = zip(others, versions)
        return logs, [v for v, version in pairs if times_written(raw(v)) != version]

    @contextlib.contextmanager
    def recording_optimizers(self) -> Iterator[None]:
        with super().recording_optimizers(), optimizers.STEP.of(self._optimizers_of_torch()):
            yield

    record_gradients = staticmethod(optimizers.record_gradients)

    def once(self, function: Callable[[], None]) -> None:
        with torch.no_grad():
            function()

    def is_driven_by_python(self) -> bool:
        return True

    def gradient_sums(self, totals: Sequence[torch.Tensor | None] | None) -> GradientSums:
        return GradientSums(totals, self._model.trainable_weights)

    @contextlib.contextmanager
    def keeping_state(self) -> Iterator[None]:
        state = self._kept()
        is_repeated = self._model._accumulation.is_automatic
        tensors = list(map(raw, self._updated_variables())) if is_repeated else []
        # Scalars of optimizers are left out: users may set them.
        weights_and_slots = [t for t in tensors if t.requires_grad or t.numel() > 1]
        self._updated = Versions(weights_and_slots)
        try:
            yield
        except BaseException:
            state.restore()
            raise

    def state(self) -> States:
        classes = torch.optim.Optimizer, torch.optim.lr_scheduler.LRScheduler
        others, left = instances_in(vars(self._model), classes), LeftGradients(self._model)
        weights = self._kept(with_weights=True)
        return States(weights, super().state(), Attributes(others), left, self._updated)

    def _kept(self, with_weights: bool = False) -> State:
        variables = state_variables(self._model, self.optimizers(), with_weights)
        return State(self._model, variables)

    def optimizers(self) -> list[keras.optimizers.Optimizer | TorchOptimizer]:
        return [*super().optimizers(), *map(self.wrapper_of, self._optimizers_of_torch())]

    def _optimizers_of_torch(self) -> list[torch.optim.Optimizer]:
        return instances_in(vars(self._model), torch.optim.Optimizer)

    def wrapper_of(self, optimizer: torch.optim.Optimizer) -> TorchOptimizer:
        """Return the `TorchOptimizer` of an optimizer, the same in each call."""
        if id(optimizer) not in self._wrappers:
            self._wrappers[id(optimizer)] = TorchOptimizer(optimizer)
        return self._wrappers[id(optimizer)]

    # Checks, and calls of layers.

    def check(self) -> None:
        refusals.check(self._model)

    reason_not_to_split = staticmethod(call_hooks.reason_not_to_split)

    def is_in_step(self) -> bool:
        return stateless_scope() is None  # inside a scope, the step sets values of weights

    run_isolated = staticmethod(isolated_calls.run_isolated)

    def by_microbatches(self, split: Split) -> tuple[list[torch.Tensor], Traced]:
        return layer_calls.Microbatches(split).run()

    def has_hooks(self) -> bool:
        return call_hooks.has_hooks(self._model)

    # Memory.

    @property
    def is_on_cpu(self) -> bool:
        return all(raw(v).device.type == "cpu" for v in self._model.variables)

    def out_of_memory(self, error: Exception) -> Exception | None:
        is_plain = type(error) is RuntimeError and any(text in str(error) for text in _EXHAUSTED)
        if not (is_plain or isinstance(error, (MemoryError, torch.cuda.OutOfMemoryError))):
            return None
        error.__context__ = error.__cause__ = None
        error = error.with_traceback(None)
        gc.collect()
        if torch.cuda.is_initialized():
            torch.cuda.empty_cache()
        return error

    @contextlib.contextmanager
    def restoring(self, is_own: bool) -> Iterator[None]:
        model = self._model
        state, python = self._kept(with_weights=is_own), python_state_of(model)
        try:
            yield
        finally:
            is_updated = is_own and state.differs_in(map(raw, model.trainable_variables))
            state.restore()
            python.restore()
        if is_updated:
            raise ValueError(refusals.unknown_update_message(model.name))

    def has_updated(self) -> bool:
        return self._updated.differ()


def _copied(value: Any) -> Any:
    """Return an array as a tensor, or a copy of a tensor: Keras losses write to sample weights."""
    if isinstance(value, np.ndarray):
        return keras.ops.convert_to_tensor(value.copy())
    if isinstance(value, np.generic):
        return value.item()
    return value.detach().clone() if torch.is_tensor(value) else value
