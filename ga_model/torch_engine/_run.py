"""One batch: its microbatches forward and backward, their sum, the update if the window is full."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from typing import Any

import keras

from ga_model.base._messages import batch_normalization_messages
from ga_model.base._numbers import power_of_two
from ga_model.core import messages
from ga_model.hearing import _messages, _weights
from ga_model.hearing._models import computes_loss_as_keras, is_of_keras, unpack
from ga_model.hearing._moments_heard import is_known, telling
from ga_model.hearing._split import Batch
from ga_model.torch_engine import _refusals
from ga_model.torch_engine._batch_logs import BatchLogs
from ga_model.torch_engine._logged_values import LoggedValues
from ga_model.torch_engine._not_known import is_to_raise
from ga_model.torch_engine._optimizer_writes import OptimizerWrites
from ga_model.torch_engine._probes import DoesNotAddUpError
from ga_model.torch_engine._state import (
    Before,
    Counters,
    LaterWrites,
    Snapshot,
    Writes,
    clear_gradients,
    written_weights,
)
from ga_model.torch_engine._step_probe import Trial, UnknownLossError
from ga_model.torch_engine._tensors import WrittenSince
from ga_model.torch_engine._terms import Position
from ga_model.torch_engine._torch_calls import split_calls
from ga_model.torch_engine._torch_recorder import Recording, record
from ga_model.torch_engine._torch_statistics import listening
from ga_model.torch_engine._torch_window import Window
from ga_model.torch_engine._weights_ahead import weights_ahead


def run(
    model: Any,
    train_step: Callable[[Any], Any],
    data: Any,
    window: Window | None,
    size: int | None,
    is_whole: bool = False,
    most: int | None = None,
) -> Any:
    """Run a model's own `train_step` on a batch, and make the update if it is due.

    Args:
        model: an `AccumulatingModel`.
        train_step: takes the data of a microbatch and returns logs.
        data: the batch, as Keras passes it.
        window: the window that the batch is a part of, or None where it makes an update by itself.
        size: rows per microbatch, or None.
        is_whole: whether the step sees all of the batch, and its calls of layers go by microbatches
            of so many rows.
        most: microbatches that are run of each of these calls, or None for all.

    Returns:
        The logs of the batch.

    Raises:
        DoesNotAddUpError: as `_Run.logs`.
    """
    batch = Batch(data, size)
    model._accumulation.note_rows(batch.rows)
    window = window or Window(model, 1)
    calls: Any = contextlib.nullcontext()
    if is_whole:
        calls, batch = split_calls(model, batch.rows, size, most), Batch(data, None)
    try:
        with calls, telling(model._batch_normalization_layers()):
            return _Run(model, train_step, batch, window).logs()
    except BaseException:  # KeyboardInterrupt, too
        window.discard()
        clear_gradients(model)
        raise


class _Run:
    """The microbatches of one batch.

    Args:
        model, train_step: as `run` takes them.
        batch: the batch.
        window: the window that it goes into.
    """

    def __init__(
        self, model: Any, train_step: Callable[[Any], Any], batch: Batch, window: Window
    ) -> None:
        self._model = model
        self._accumulation = model._accumulation
        self._train_step = train_step
        self._batch = batch
        self._window = window
        self._num_processes = 1 if window.processes is None else window.processes.size
        is_alone = self._num_processes == 1
        self._is_window = window.steps == 1 and not batch.is_split and is_alone
        self._skips = model.skip_nonfinite
        self._num_counted = 0
        self._whole: _weights.Whole | None = None
        if batch.is_split and is_alone:  # what terms weigh in the others' batches is not known
            weights = functools.cache(functools.partial(weights_ahead, model, batch))
            self._whole = _weights.Whole(lambda: float(batch.rows), window.steps == 1, weights)

    def logs(self) -> Any:
        """Run them, and return the logs of the batch."""
        model, batch = self._model, self._batch
        defers_logs = batch.is_split or self._window.steps > 1 or self._skips
        batch_logs = BatchLogs(model) if defers_logs else None
        keeps_gradients = self._keeps_gradients()
        self._accumulation.left_gradients.begin_batch()
        is_partial = self._window.is_trial and not batch.is_split  # some outputs are any numbers
        if not (self._is_window or is_partial):
            self._look_at_model()
        counters = Counters(model) if batch.is_split and model.built else None
        for index in range(batch.num_microbatches):
            if index and counters is not None:
                counters.put_back()  # of what a batch changes once
            result = self._microbatch(index, batch_logs, keeps_gradients)
        if self._window.is_trial:
            return result
        if self._skips:
            self._accumulation.count_skipped(batch.num_microbatches - self._num_counted)
        if batch_logs is not None:
            batch_logs.add_to(self._window.logs)
        self._window.end_batch()
        self._accumulation.left_gradients.end_batch()
        return result if batch_logs is None else batch_logs.finish()

    def _keeps_gradients(self) -> bool:
        """Return whether the window's sums may be in `.grad`.

        Keras's own step takes gradients of one loss, and does nothing to them. In half precision
        they would be summed in it. Whether microbatches are left out, and what they tell of the
        noise, takes each one's own.
        """
        model = self._model
        dtypes = {keras.backend.standardize_dtype(v.dtype) for v in model.trainable_weights}
        is_half = bool(dtypes & {"float16", "bfloat16"})
        is_separate = is_half or self._skips or self._accumulation.measured_noise is not None
        return is_of_keras(model, "train_step") and not is_separate

    def _look_at_model(self) -> None:
        """Find out once what a model is over samples, and tell what differs from a full batch."""
        model, accumulation = self._model, self._accumulation
        layers = model._batch_normalization_layers()
        pooled = [layer.name for layer in layers if is_known(layer)]
        others = [layer.name for layer in layers if not is_known(layer)]
        for message in batch_normalization_messages(pooled, others):
            model._warn_once(message)
            if self._num_processes > 1:
                model._warn_once(messages.own_averages_message(layers))
        if model._has_rule():
            return
        try:
            numbers, batch = range(self._batch.num_microbatches), self._batch
            accumulation.probes.call(unpack(batch.two_or_more(i))[0] for i in numbers)
        except Exception as error:
            if is_of_keras(model, "train_step"):  # else it may call the model in another way
                if is_to_raise(error):
                    raise
                accumulation.probes.mixes_samples = True  # for all that is known
        if accumulation.probes.mixes_samples:
            message = _refusals.mixing_message(model.name)
            if self._must_add_up():
                raise DoesNotAddUpError(message)
            model._warn_once(message)

    def _must_add_up(self) -> bool:
        return self._batch.is_split and self._accumulation.must_add_up()

    def _microbatch(self, index: int, logs: BatchLogs | None, keeps_gradients: bool) -> Any:
        """Run the model's step on one microbatch, and return what it logs."""
        model, probe = self._model, self._accumulation.step_probe
        guesses = self._window.guesses
        if self._is_window or self._window.is_trial or computes_loss_as_keras(model):
            return self._recorded(index, logs, keeps_gradients)
        if probe.is_due():
            probe.look(self._gradients_of, self._batch.two_or_more(index), guesses)
        before = Before(model) if probe.is_first else None
        probe.is_first = False
        try:
            result = self._recorded(index, logs, keeps_gradients)
            if probe.has_changed():  # before there is an update
                data = self._batch.two_or_more(index)
                probe.look(self._gradients_of, data, guesses, is_after=True)
            return result
        except UnknownLossError:
            if before is None:  # another loss than that of the first microbatch
                raise RuntimeError(_refusals.unknown_loss_message(model.name)) from None
            before.put_back()
        probe.look(self._gradients_of, self._batch.two_or_more(index), guesses)
        return self._recorded(index, logs, keeps_gradients)

    def _tried(
        self, data: Any, defers_logs: bool, exchanged: str | None = None
    ) -> tuple[Recording, Any]:
        """Run the step on some samples without an update, and return what it gives and logs."""
        # As of a window that is this one microbatch: nothing is folded, and nothing refused.
        position = self._position(defers_logs)._replace(
            window=Window(self._model, 1), is_first=True, is_window=True
        )
        clear_gradients(self._model)
        weights = written_weights(self._model, has_norms=exchanged is None)
        with record(self._model, data, position, False) as recording:
            recording.exchanged = exchanged
            logs = self._train_step(data)
        if exchanged is None:
            self._check_updates(weights, recording)
        self._accumulation.release()
        return recording, logs

    def _numbers_of(self, data: Any, exchanged: str | None = None) -> tuple[Recording, Any]:
        """Do so to find out what numbers are."""
        return self._tried(data, True, exchanged)

    def _gradients_of(self, data: Any) -> Trial:
        """Return the gradients that the step gives for some samples."""
        recording, _ = self._tried(data, False)
        gradients = {
            (number, id(v)): gradient
            for number, part in enumerate(recording.parts)
            for v in part.variables
            if (gradient := part.gradient(v)) is not None
        }
        return Trial(gradients, recording.divisors, recording.is_worked_over)

    def _position(self, defers_logs: bool) -> Position:
        """Return where the next microbatch stands."""
        window, batch = self._window, self._batch
        return Position(
            window,
            window.steps,
            window.steps * batch.num_microbatches * self._num_processes,
            power_of_two(window.steps) * power_of_two(batch.num_microbatches),
            not window.has_counted,
            self._whole,
            self._is_window,
            defers_logs,
            self._must_add_up(),
        )

    def _recorded(self, index: int, logs: BatchLogs | None, keeps_gradients: bool) -> Any:
        """Run the model's step on one microbatch, add what it gave, and return what it logs."""
        model, window, data = self._model, self._window, self._batch.microbatch(index)
        position = self._position(logs is not None)
        is_own = not is_of_keras(model, "train_step")
        applies_at_once = self._is_window and is_own and not window.is_trial
        snapshot = Snapshot(model, of_trained=applies_at_once) if self._skips else None
        writes, later = None, None if self._is_window else self._accumulation.later_writes
        if later is not None:
            later.begin()
        elif not self._is_window:
            writes = Writes(model)
        of_optimizers = self._watch_optimizers(index)
        # Those that are written to through `.data` were the first time after the last update.
        is_first = index == 0 and not window.is_open() and of_optimizers is not None
        weights = None if self._is_free() else written_weights(model, has_norms=is_first)
        if keeps_gradients:
            clear_gradients(model)  # of what the user has left there
            window.put_back()
        hearing: Any = contextlib.nullcontext() if self._is_window else listening()
        with record(model, data, position, keeps_gradients) as recording, hearing as hears:
            recording.writes = of_optimizers
            recording.applies_at_once = applies_at_once
            self._watch_gradients(recording)
            result = self._train_step(data)
            self._tell_of_left(recording, index)
        self._check_updates(weights, recording)
        if writes is not None:
            self._tell_of(writes, recording)
        elif later is not None and (names := later.names(is_alone=window.steps == 1)):
            model._warn_once(_messages.written_message(model.name, names))
        if of_optimizers is not None and (names := of_optimizers.names()):
            model._warn_once(_messages.written_message(model.name, names))
        if not keeps_gradients:
            for part in recording.parts:
                part.widen()
        parts_are_finite = (part.is_finite() for part in recording.parts)
        is_left_out = self._skips and not (recording.is_finite and all(parts_are_finite))
        if not (has_weight := recording.relative_weight != 0.0):
            for part in recording.parts:
                part.leave_out()
        if not is_left_out:
            if self._accumulation.measured_noise is not None:
                for part in recording.parts:
                    part.measure(recording.relative_weight or 0.0)
            parts = [] if recording.applies_at_once else recording.parts
            window.add(parts, recording.relative_weight, keeps_gradients and has_weight)
            window.has_lost |= recording.losses.is_lost and not self._is_window
            window.statistics.add([] if hears is None else hears.heard)
            self._num_counted += 1
        if logs is not None:
            if not (self._is_window or window.is_trial):
                data = self._batch.two_or_more(index)
                values = LoggedValues(recording, result, self._numbers_of, data)
                values.look(logs, self._batch.is_split, self._must_add_up())
            logs.add(recording, result, not is_left_out)
        if is_left_out and snapshot is not None:
            snapshot.restore()
            for variable, value in recording.before:
                variable.assign(value)
        self._accumulation.release()
        return result

    def _is_free(self) -> bool:
        """Return whether a step may write to weights: it is the update, or tries one."""
        return self._is_window or self._window.is_trial

    def _check_updates(self, weights: WrittenSince | None, recording: Recording) -> None:
        """Raise RuntimeError if a step writes to weights by itself, or applies no optimizer."""
        if weights is not None and (names := weights.names()):
            names = _refusals.first_of(names)
            raise RuntimeError(_refusals.weights_written_message(self._model.name, names))
        recording.check_updates()

    def _watch_optimizers(self, index: int) -> OptimizerWrites | None:
        """Return what hears of what a step of the user's own writes to its optimizers."""
        window = self._window
        if self._is_free() or is_of_keras(self._model, "train_step"):
            return None
        is_first = index == 0 and not window.is_open()
        return OptimizerWrites(self._model, window.written, is_first)

    def _watch_gradients(self, recording: Recording) -> None:
        """Let it be heard whether a step of the user's own adds gradients to earlier ones."""
        left = self._accumulation.left_gradients
        if not (recording.keeps_gradients or self._window.is_trial or left.is_known):
            recording.left = left
            left.begin_step()

    def _tell_of_left(self, recording: Recording, index: int) -> None:
        """Tell of a step that does."""
        if recording.left is not None:
            window, is_last = self._window, index + 1 == self._batch.num_microbatches
            is_update = is_last and window.num_batches() + 1 >= window.steps
            updated = [v for part in recording.parts for v in part.variables]
            if recording.left.end_step(updated, is_update):
                self._model._warn_once(_refusals.left_gradients_message(self._model.name))

    def _tell_of(self, writes: Writes, recording: Recording) -> None:
        """Tell of what a step writes to.

        Raises:
            DoesNotAddUpError: as `logs`.
        """
        if names := writes.others(is_alone=self._window.steps == 1):
            recording.losses.tell(_messages.written_message(self._model.name, names))
        later = self._accumulation.later_writes = LaterWrites(self._model)
        later.told.update(names)
