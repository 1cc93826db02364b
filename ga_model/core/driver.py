"""Train a compiled model batch by batch: microbatches, windows and updates."""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections.abc import Callable, Iterator
from typing import cast

import keras

from ga_model._settings import Settings
from ga_model.base import _numbers
from ga_model.base._types import Logs, Nest
from ga_model.core import messages
from ga_model.core.automatic import SizeTrials, partly_updated_message
from ga_model.core.backend import Backend
from ga_model.core.batch import Batch
from ga_model.core.findings import Findings, FoundOtherwiseError, Known
from ga_model.core.losses import NeedsTrialError
from ga_model.core.model_state import ModelState
from ga_model.core.models import is_of_keras, optimizers_in
from ga_model.core.modes import Mode, NeedsTotalsError, Numbers, Structure
from ga_model.core.proof.own_code import has_code_of_user
from ga_model.core.proof.runner import Step
from ga_model.core.proof.trial import assumed_of
from ga_model.core.snapshots import OtherVariables
from ga_model.core.steps import Steps
from ga_model.core.updates import Counters, Updates, count
from ga_model.core.user_code import has_loss_of_user, python_state_of
from ga_model.core.weights_watch import WeightsWatch
from ga_model.core.window import Sums, Window


class Driver(ModelState):
    """Trains a compiled model batch by batch, and keeps the state between batches.

    Args:
        model, settings, backend: see `ModelState`.

    Attributes:
        steps: compiled functions for microbatches.
        updates: compiled functions for logs and updates.
    """

    window: Window | None

    def __init__(self, model: keras.Model, settings: Settings, backend: Backend) -> None:
        super().__init__(model, settings, backend)
        self.updates = Updates(model, backend)
        self.steps = Steps(model, backend, self.updates.logs_of)
        self._structure: Structure | None = None
        self._is_checked = self._has_trained = False
        self._has_own_code: bool | None = None
        self._has_own_loss = False
        self._findings = Findings(model, backend)
        self._weights_watch = WeightsWatch(model, backend, self.steps.step)
        self._adds_up = True  # until a trial finds otherwise

    # Properties of the step.

    @functools.cached_property
    def has_own_step(self) -> bool:
        """Whether the user overrides the step, or a method that computes its logs."""
        # Some Keras releases lack some of these methods.
        names = (n for n in self.backend.methods_of_step if hasattr(keras.Model, n))
        return not all(is_of_keras(self._model, name) for name in names)

    def takes_full_batch(self) -> bool:
        """Return whether the step runs on the full batch, with its layer calls split."""
        if self.settings.loss_over != "auto":
            return self.settings.loss_over == "batch"
        model = self._model
        if self.has_own_step:
            return True
        return not (model._overrides_microbatch_weight() or self._adds_up)

    # Batches.

    def train(self, batches: Iterator[Nest], number: int) -> Logs:
        """Train up to `number` batches of an iterator, and return the last logs."""
        logs = self._train_next(next(batches))
        for data in itertools.islice(batches, number - 1):
            logs = self._train_next(data)
        return logs

    def _train_next(self, data: Nest) -> Logs:
        """Train a batch by microbatches, and update if it fills its window."""
        try:
            if not self._is_checked or self.is_automatic:
                self.settings.check_with(optimizers_in(vars(self._model)))
                self.backend.check()
                batch = self.backend.batch(data, self._even_size())
                if not self.takes_full_batch():
                    batch.check_rows()  # clearer than Keras's later error
                self.backend.build(data)
                self.warn_of_accumulating_optimizers()
                self._is_checked = True
            return self._train_automatic(data) if self.is_automatic else self._attempt(data)
        except BaseException:  # including KeyboardInterrupt
            self.discard_window()
            raise

    def _attempt(self, data: Nest, **options: bool) -> Logs:
        """Train a batch, retrying where the first attempt shows that it needs another treatment."""
        first_error: Exception | None = None
        while True:
            # Losses may write to their inputs, and a retry needs the original values.
            is_known = self._has_trained or self.backend.traces
            batch_data = data if is_known else self.backend.copied(data)
            try:
                self.backend.current_batch = batch_data
                with self.backend.keeping_state():
                    logs = self._train_batch(batch_data, **options)
                self._has_trained = True
                return logs
            except NeedsTrialError:
                self._has_own_loss = True
            except NeedsTotalsError:
                self.steps.needs_totals = True
            except FoundOtherwiseError:  # retry with the new verdict
                pass
            except Exception as error:
                retraces = self.backend.retraces_after(error)
                if retraces:
                    first_error, self._findings = error, Findings(self._model, self.backend)
                elif retraces is None or first_error is None:
                    raise
                else:  # the first attempt may have caused the second error
                    raise first_error from None
            finally:
                self.backend.current_batch = None

    def _train_automatic(self, data: Nest) -> Logs:
        """Train a batch in microbatches as large as memory allows."""
        model, found_size = self._model, self.automatic_size
        rows = self.backend.batch(data, None).rows
        if found_size.needs_search(rows):
            self._search(data, rows)
        while True:
            sums_before = None if self.window is None else self.backend.copied(self.window.sums)
            python = None if self.backend.traces else python_state_of(model)
            try:
                return self._attempt(data)
            except Exception as error:
                failure = self.backend.out_of_memory(error)
                if failure is None:
                    raise
            if python is not None:
                python.restore()
            if self.backend.has_updated():
                size = min(found_size.size, rows)
                found_size.fail(
                    failure, partly_updated_message(model.name, size, self.has_own_step)
                )
            if self.window is not None:
                self.window.sums = sums_before
            found_size.halve(model, rows, failure)

    def _search(self, data: Nest, rows: int) -> None:
        """Find the largest size up to `rows`, and restore everything else."""
        found_size, window = self.automatic_size, self.window
        if window is not None:  # trials reuse the memory of its sums
            window.sums = self.backend.copied(window.sums)

        def run(size: int) -> None:
            found_size.size, self.window = size, None
            others = OtherVariables(self._model, self.backend)
            with others.recording(), self.backend.restoring(self.has_own_step):
                takes_all = self.takes_full_batch()
                trial_data = (
                    data
                    if takes_all
                    else self.backend.batch(data, min(2 * size, rows)).microbatch(0)
                )
                self._attempt(trial_data, is_trial=True)

        found_size.size = None
        try:
            with self.holding_back() as messages:
                trials = SizeTrials(self.backend, self._model.trainable_variables, run)
                found_size.find(self._model, rows, trials)
        except BaseException:
            found_size.restart()
            raise
        finally:
            self.window = window
        if found_size.size < rows or self.accumulates():
            for message in messages:
                self.warn_once(message)

    def _train_batch(self, data: Nest, is_trial: bool = False) -> Logs:
        model, size = self._model, self._even_size()
        batch = self.backend.batch(data, size)
        self._most_rows = max(self._most_rows, batch.rows)
        sees_full_batch = batch.is_split and self.takes_full_batch()
        updates_alone = not (self.accumulates() or self.settings.skip_nonfinite)
        # Keras weights all replicas equally.
        is_plain = self.backend.num_replicas == 1 or (sees_full_batch and self.has_own_step)
        is_whole = updates_alone and (sees_full_batch or not batch.is_split) and is_plain
        if is_whole and not is_trial:
            return self.updates.whole(size or batch.rows, data)
        updates_alone = updates_alone and batch.is_split
        rows = size or batch.rows
        known = None
        if self._needs_trial():
            is_single_microbatch = not self.accumulates() and (
                sees_full_batch or not batch.is_split
            )
            step = Step(model, self.backend, self.has_own_step, updates_alone, is_single_microbatch)
            if sees_full_batch and is_trial:  # which shows only whether there is memory
                known = Known(step, assumed_of(step.is_own)._replace(differences=()))
            else:
                known = self._findings.of(step, data, rows, self.window)
            is_unseen = updates_alone and known.is_unseen and not is_trial
            if is_unseen and self.settings.loss_over == "auto" and self.backend.trains_alone:
                return self.updates.whole(rows, data)  # exact for any step
        if known is not None and not known.verdict.is_exact:
            if batch.is_split and not sees_full_batch and self.settings.loss_over == "auto":
                self._adds_up = False
                return self._train_batch(data, is_trial)
            model._warn_once(known.warning)
        if known is not None and not is_trial:
            self._hold_or_repeat(known, data)
        batch = self.backend.batch(data, None) if sees_full_batch else batch
        size = size if sees_full_batch else None
        # Warnings about a step that only trials record do not concern training.
        with self.holding_back() if is_whole else contextlib.nullcontext():
            return self._by_microbatches(batch, size, known, is_trial)

    def _hold_or_repeat(self, known: Known, data: Nest) -> None:
        """Hold a batch whose weights are assumed, or repeat those held, if they now are known."""
        window = self.window = self.window or Window(self.settings.accumulation_steps)
        if not window.is_all_unseen():
            return
        if known.is_unseen:
            if self.backend.num_replicas == 1 and not self.is_automatic and window.steps > 1:
                window.state = window.state or self.steps.state()
                window.unseen.append(data)
            return
        held, state, steps = window.unseen, window.state, window.steps
        if held:
            self.steps.restore(state)
            window.discard()
            window.steps = steps
            try:
                for batch in held:
                    self._train_batch(batch)
            except BaseException:  # for another attempt
                window.unseen, window.state, window.num_batches = held, state, len(held)
                raise

    def _needs_trial(self) -> bool:
        """Return whether only a trial can tell if the step adds up over microbatches."""
        if self.has_own_step:
            return True
        model = self._model
        if model._overrides_microbatch_weight():
            return False
        if self._has_own_code is None:
            is_own_loss = not is_of_keras(model, "compute_loss") or has_loss_of_user(model)
            self._has_own_code = is_own_loss or has_code_of_user(model, self.backend)
        return self._has_own_code or self._has_own_loss

    def _even_size(self) -> int | None:
        """Return a microbatch size divisible by the number of devices, at least one sample each."""
        devices = self.backend.num_devices
        return None if self.size is None else max(self.size // devices, 1) * devices

    def _by_microbatches(
        self, batch: Batch, size: int | None, known: Known | None, is_trial: bool
    ) -> Logs:
        """Train the microbatches of a batch, or the full batch with layer calls split by `size`.

        Args:
            known: the verdict on the step, or None if it needs no trial.
        """
        steps = self.steps
        window = self.window = self.window or Window(self.settings.accumulation_steps)
        mode = Mode(
            batch.is_split and self.backend.trains_alone,
            window.steps == 1,
            size,
            self._model.skip_nonfinite,
            self.measured_noise is not None,
            None if known is None else known.verdict,
            is_trial,
        )
        parts = _power_of_two(window.steps) * _power_of_two(batch.num_microbatches)
        if self.updates.overwrites or self.updates.scaled_optimizers:  # of the scale of a mean
            parts = float(window.steps * batch.num_microbatches)
        num_microbatches = window.steps * batch.num_microbatches * self.backend.num_processes
        values = window.steps, num_microbatches, parts, batch.rows
        totals = steps.totals(batch) if mode.is_split and steps.needs_totals else None
        numbers = Numbers._make([*(self.backend.number(float(v)) for v in values), totals])
        first_structure, last_structure = steps.prepare(mode, batch, numbers)
        if window.sums is None and not is_trial:
            self._weights_watch.begin(window)
        sums = window.sums or steps.begin()
        amounts_before = None if sums is None else sums.amounts
        sole_structure = None if batch.is_split or is_trial else first_structure
        for index in range(batch.num_microbatches):
            data = batch.microbatch(index)
            try:
                sums, logs = steps.microbatch(mode, sums, data, numbers, sole_structure)
            except Exception:  # perhaps because gradients have other shapes
                if window.applied is not None:
                    self._check_applied(steps.step.structure, window)
                raise
            is_last = index + 1 == batch.num_microbatches
            if mode.is_watched:
                window.keep_samples(self.backend.samples_of(data), sums.num_news)
            structure = (last_structure if is_last else first_structure) or steps.step.structure
            self._check_applied(structure, window)
        sums = cast(Sums, sums)  # a batch has at least one microbatch
        if is_trial or (self.is_automatic and self.backend.is_on_cpu):
            self.backend.wait_for(sums)  # a failed allocation is raised here at the latest
        if is_trial:
            return None
        if logs is None:
            logs = self.updates.report(structure, amounts_before, sums.amounts)
        window.sums, self._structure = sums, first_structure or structure
        window.known = None if known is None else (known, data)
        if window.end_batch():
            self._update(window)
        return logs

    def _check_applied(self, structure: Structure, window: Window) -> None:
        """Raise RuntimeError if microbatches of a window apply different optimizers."""
        if not window.applies(structure.applied):
            raise RuntimeError(messages.unlike_updates_message(self._model.name))

    def _update(self, window: Window, is_end: bool = False) -> bool:
        """Make the update of a window, full or partial, and begin the next one.

        Args:
            window: the window.
            is_end: whether this process has no batches left.

        Returns:
            Whether no process has batches left.
        """
        if window.known is not None:
            self._findings.examine(*window.known, window, self.steps.step.written)
        sums, structure, noise = window.sums, self._structure, self.measured_noise
        self._weights_watch.end(window, self._findings.has_warned)
        window.discard()
        applied = [] if structure is None else structure.applied
        sums, is_end = self.backend.exchange_sums(applied, sums, noise is not None, is_end)
        if sums is None or structure is None:
            return is_end
        sums = self.updates.bounded(structure, sums)
        if noise is not None and sums.squares:
            self.updates.measure(structure, noise, sums)
        self.updates.check_scale(structure, sums)
        counters = self.counters or Counters(*(_numbers.int32(0) for _ in Counters._fields))
        if self.settings.skip_nonfinite and not int(sums.num_counted):
            counters = count(sums, counters)
        else:
            counters = self.updates.update(structure, sums, counters)
        self.counters = counters
        return is_end

    def close_window(self) -> None:
        """Make the update of a partial window, and give the warnings that are due.

        A process without batches takes part in the updates of others until none has any left.
        """
        window = self.window or Window(self.settings.accumulation_steps)
        if window.sums is not None or self.backend.num_processes > 1:
            with self.backend.outside_of_training():
                while not self._update(window, is_end=True):
                    pass
        self.warn_after_training()

    # Direct calls of `train_step`.

    def run_step(self, train_step: Callable[..., Logs], *args: Nest) -> Logs:
        """Run a `train_step` that Keras, the core or user code calls.

        Raises:
            RuntimeError: if user code calls it where it cannot be accumulated.
        """
        if self.backend.is_running_step():
            return train_step(*args)
        if self.is_plain():
            with self.backend.running_step():
                return self.backend.run_plain(train_step, *args)
        if self.backend.is_driven_by_python():
            return self.train(iter(args), 1)
        raise RuntimeError(messages.own_loop_message(self._model.name))


def _power_of_two(number: int) -> float:
    """Return the smallest power of two >= `number`, which is >= 1."""
    return float(2 ** (number - 1).bit_length())
