"""The state of one compiled model on PyTorch, and how its next batch is trained."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ga_model._kept import Kept
from ga_model._settings import Settings
from ga_model.backends.torch import refusals
from ga_model.backends.torch.agreement import num_processes
from ga_model.hearing._attributes import watch_attributes
from ga_model.hearing._models import computes_loss_as_keras, optimizers_in
from ga_model.hearing._split import Batch, part_of
from ga_model.sums._noise import GradientNoise
from ga_model.torch_engine import _refusals, _run
from ga_model.torch_engine._gradient_hooks import has_hooks
from ga_model.torch_engine._left_gradients import LeftGradients
from ga_model.torch_engine._numbers_probe import NumbersProbe
from ga_model.torch_engine._probes import DoesNotAddUpError
from ga_model.torch_engine._process_group import Processes
from ga_model.torch_engine._state import LaterWrites, Snapshot, writes_weights
from ga_model.torch_engine._step_probe import StepProbe
from ga_model.torch_engine._terms import Probes
from ga_model.torch_engine._torch_auto import AutomaticSize
from ga_model.torch_engine._torch_calls import split_calls
from ga_model.torch_engine._torch_noise import Estimate
from ga_model.torch_engine._torch_window import Window, run_on_update


class Accumulation(Kept):
    """All that is kept for a model where Keras runs on PyTorch.

    Args:
        model, settings: as `Kept` takes them.

    Attributes:
        compiled_copies: copies of compiled losses that tell what they compute.
        probes: what was found out by trying of the model and its losses.
        step_probe: the same of its step.
        numbers: the same of the numbers that it gives to metrics and logs.
        has_run_by_microbatches: whether a batch has.
        later_writes: tells of what steps write to later, once it was found out what they do.
        has_looked_at_order: whether it was found out if a step logs what it computes with what it
            changes.
        num_late: microbatches whose step took a gradient after an update.
        has_told_of_late: whether such a gradient was told of.
        left_gradients: whether steps leave gradients to the next batch.
        has_looked_at_gradients: whether it was found out if gradients are linear.
        process_group: the processes that train the model together, as users set it, or None.
    """

    automatic_size: AutomaticSize
    window: Window | None

    def __init__(self, model: Any, settings: Settings) -> None:
        super().__init__(model, settings)
        self.automatic_size = AutomaticSize(model)
        self.noise = GradientNoise(Estimate)
        self.compiled_copies: dict[Any, Any] = {}
        self.forget_probes()
        self.later_writes: LaterWrites | None = None
        self._most_rows = 0
        self._num_compared = 0
        self._adds_up = True  # as far as is known
        self.has_run_by_microbatches = False
        before = vars(model).get("_accumulation")  # `compile` leaves the group as it is
        self.process_group = getattr(before, "process_group", None)
        self._processes: Processes | None = None
        self._has_batches: bool | None = None  # of an epoch of `fit` that is not closed

    def forget_probes(self) -> None:
        """Repeat what is found by trial."""
        self.probes, self.step_probe = Probes(self._model), StepProbe(self._model)
        self.numbers = NumbersProbe(self._model)
        self.has_looked_at_gradients = self.has_looked_at_order = False
        self.left_gradients = LeftGradients()
        self.num_late, self.has_told_of_late = 0, False

    def set_process_group(self, group: Any) -> None:
        """Train together with the processes of a group from the next window on, or alone."""
        refusals.check_group(group)
        self.process_group, self._processes, self.window = group, None, None

    def is_to_compare(self) -> bool:
        """Return whether values are compared to find what is written past PyTorch's count.

        That takes a pass over them, so it is done with the first 8 gradients, and each 16th.
        """
        self._num_compared += 1
        return self._num_compared <= 8 or self._num_compared % 16 == 0

    def processes(self) -> Processes | None:
        """Return the processes that train the model together, or None: it is this one alone."""
        group = self.process_group
        if self._processes is None and group is not None and num_processes(group) > 1:
            self._processes = Processes(group)
        return self._processes

    def is_plain(self) -> bool:
        """Return whether a batch is trained as plain Keras does, alone."""
        return super().is_plain() and self.processes() is None

    def must_add_up(self) -> bool:
        """Return whether what does not add up over microbatches is not to run by microbatches."""
        return self.settings.loss_over == "auto" and not self._model._has_rule()

    def takes_full_batch(self) -> bool:
        """Return whether the step of a batch that is split is to see all of it."""
        if self.settings.loss_over != "auto":
            return self.settings.loss_over == "batch"
        model = self._model
        if model._has_rule():
            return False
        adds_up = computes_loss_as_keras(model) and self._adds_up
        return not adds_up or has_hooks(model) or writes_weights(model)

    def run_step(self, train_step: Callable[[Any], Any], data: Any) -> Any:
        """Run `train_step` on the microbatches of a batch, and update if the window is full."""
        model = self._model
        if self.is_plain():
            logs = train_step(data)
            run_on_update(model)
            return logs
        watch_attributes(model)
        self.warn_of_accumulating_optimizers()
        train = self.automatic_size.run if self.is_automatic else self.train
        return train(train_step, data)

    def train(self, train_step: Callable[[Any], Any], data: Any) -> Any:
        """Do so with the present size."""
        model = self._model
        is_whole = self.size is not None and self.takes_full_batch()
        window, processes = None, self.processes()
        is_window = not self.accumulates() and processes is None
        if is_whole and is_window and not self.settings.skip_nonfinite:
            return self._run_unheard(train_step, data)
        refusals.check(model)
        if not is_window:
            steps = self.settings.accumulation_steps
            window = self.window = self.window or Window(model, steps, processes)
            self._has_batches = None if self._has_batches is None else True
        if is_whole or self.has_run_by_microbatches or self.size is None:
            return _run.run(model, train_step, data, window, self.size, is_whole)
        before = Snapshot(model, of_layers=True)
        try:
            logs = _run.run(model, train_step, data, window, self.size)
        except DoesNotAddUpError:
            before.restore()
            self._adds_up = False
            return self.train(train_step, data)
        self.has_run_by_microbatches = True
        return logs

    def try_size(self, train_step: Callable[[Any], Any], data: Any, size: int) -> None:
        """Run `train_step` on two microbatches of so many samples, and make no update."""
        model, processes = self._model, self.processes()
        is_whole = self.takes_full_batch()
        _refusals.check_trial(model)
        refusals.check(model)
        window = Window(model, self.settings.accumulation_steps, processes, is_trial=True)
        if is_whole:
            _run.run(model, train_step, data, window, size, is_whole, most=2)
            return
        try:
            _run.run(model, train_step, part_of(data, 0, 2 * size), window, size)
        except DoesNotAddUpError:
            self._adds_up = False
            self.try_size(train_step, data, size)

    def _run_unheard(self, train_step: Callable[[Any], Any], data: Any) -> Any:
        """Run a step on a full batch, whatever it does, with its calls of layers by microbatches.

        Its updates are its own, of any optimizer.
        """
        model, batch = self._model, Batch(data, self.size)
        refusals.check_variables(model)
        self.note_rows(batch.rows)
        with split_calls(model, batch.rows, self.size):
            logs = train_step(data)
        run_on_update(model)
        return logs

    def release(self) -> None:
        """Let go of what the microbatch that is through has computed."""
        for copy in self.compiled_copies.values():
            copy.release()

    def count_skipped(self, number: int) -> None:
        """Count microbatches that were left out."""
        self.num_skipped = (self.num_skipped or 0) + number

    def count_lost(self) -> None:
        """Count a window with weight of which a microbatch had a term that was made zero."""
        self.num_lost = (self.num_lost or 0) + 1

    def close_window(self) -> None:
        """Make the update of a partial window, and warn of what was done so far."""
        # Of several processes one may validate alone: each closes an epoch of `fit` once.
        if self.processes() is None or self._has_batches is not False:
            if self.window is None and self.processes() is not None:  # no batch so far
                self.window = Window(self._model, 1, self.processes())
            if self.window is not None:
                self.window.close()
                self.left_gradients.release()
            self._has_batches = None if self._has_batches is None else False
        self.warn_of_what_was_done()

    def begin_epoch(self, epoch: int) -> None:
        """Note that an epoch of `fit` begins, which several processes have to begin together."""
        self._has_batches = True
        if (processes := self.processes()) is not None:
            processes.begin_epoch(epoch, self._updated())

    def finish_fit(self) -> None:
        """Note that `fit` has trained its last epoch, which several processes have to agree on."""
        if (processes := self.processes()) is not None:
            processes.finish(self._updated())

    def end_fit(self) -> None:
        """Forget what is for the present `fit` only."""
        super().end_fit()
        self._has_batches = None

    def _updated(self) -> list[Any]:
        """Return the variables that updates change."""
        optimizers = optimizers_in(vars(self._model))
        state = [v for optimizer in optimizers for v in optimizer.variables]
        return [*self._model.trainable_variables, *state]

    def note_rows(self, rows: int) -> None:
        """Note the rows of a batch."""
        self._most_rows = max(self._most_rows, rows)

    def _most_samples(self) -> int:
        return self._most_rows
