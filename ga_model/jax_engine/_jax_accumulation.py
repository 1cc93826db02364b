"""The state of one compiled model on JAX, and how its next batch is trained."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import keras

from ga_model._kept import Kept
from ga_model._settings import Settings
from ga_model.automatic._search import FoundSize
from ga_model.base._internals import OF_STEP_ON_JAX, jax_state_of, leave_values
from ga_model.base._numbers import power_of_two
from ga_model.hearing._models import is_of_keras, recording_of_thread
from ga_model.hearing._split import Batch
from ga_model.jax_engine import _jax_refusals
from ga_model.jax_engine._jax_noise import Estimate
from ga_model.jax_engine._jax_terms import DoesNotAddUpError
from ga_model.jax_engine._jax_window import Window
from ga_model.jax_engine._programs import (
    Counters,
    Mode,
    NeedsTotalsError,
    Programs,
    State,
    Structure,
)
from ga_model.sums._noise import GradientNoise


class Accumulation(Kept):
    """All that is kept for a model where Keras runs on JAX.

    Args:
        model, settings: as `Kept` takes them.

    Attributes:
        programs: that train the model.
        known_calls: what was read of calls of layers, as `_jax_calls` does.
    """

    window: Window | None

    def __init__(self, model: Any, settings: Settings) -> None:
        super().__init__(model, settings)
        self.automatic_size = FoundSize()
        self.noise = GradientNoise(Estimate)
        self.programs = Programs(model)
        self.known_calls: dict[Any, Any] = {}
        self._structure: Structure | None = None
        self._skips = False
        self._is_tracing = self._is_checked = False
        self._adds_up = True  # as far as is known
        self._most_rows = 0

    # What a step is.

    @functools.cached_property
    def has_own_step(self) -> bool:
        """Return whether a step, or what it logs, is the user's own."""
        return not all(
            is_of_keras(self._model, name) for name in OF_STEP_ON_JAX if hasattr(keras.Model, name)
        )

    def takes_full_batch(self) -> bool:
        """Return whether the step of a batch that is split is to see all of it."""
        if self.settings.loss_over != "auto":
            return self.settings.loss_over == "batch"
        model = self._model
        if self.has_own_step:
            return True
        if model._has_rule():
            return False
        return not (self._adds_up and is_of_keras(model, "compute_loss"))

    def must_add_up(self, batch: Batch) -> bool:
        """Return whether what does not add up is not to run by microbatches of a batch."""
        return batch.is_split and self.settings.loss_over == "auto" and not self._model._has_rule()

    # Steps.

    @contextlib.contextmanager
    def tracing(self) -> Iterator[None]:
        """Let `train_step` run as it is in a block."""
        before, self._is_tracing = self._is_tracing, True
        try:
            yield
        finally:
            self._is_tracing = before

    def run_step(self, train_step: Callable[..., Any], state: Any, data: Any) -> Any:
        """Run `train_step` where Keras or a program of this package calls it.

        Raises:
            RuntimeError: code of the user's does, and it is to accumulate.
        """
        if self._is_tracing or recording_of_thread.get() is not None:
            return train_step(state, data)
        if not self.is_plain():
            raise RuntimeError(_jax_refusals.own_loop_message(self._model.name))
        logs, after = train_step(state, data)
        return logs, tuple(self.programs.after_update(State(*map(list, after))))

    def train(self, state: Any, data: Any) -> tuple[Any, tuple[Any, ...]]:
        """Train a batch by microbatches, and update if it fills its window.

        Args:
            state: values of variables, as Keras passes them to `train_step`.
            data: the batch.

        Returns:
            The logs, and the values of variables after it.
        """
        model = self._model
        try:
            if not self._is_checked or self.is_automatic:
                _jax_refusals.check(model)
                self.warn_of_accumulating_optimizers()
                self._is_checked = True
            return self._train(State(*map(list, state)), data)
        except BaseException:  # KeyboardInterrupt, too
            self.discard_window()
            leave_values(model, state)  # which Keras would lose, if it is the first step of `fit`
            raise

    def _train(self, state: State, data: Any) -> tuple[Any, tuple[Any, ...]]:
        model, size = self._model, self.size
        batch = Batch(data, size)
        self._most_rows = max(self._most_rows, batch.rows)
        is_whole = batch.is_split and self.takes_full_batch()
        is_alone = not (self.accumulates() or self.settings.skip_nonfinite)
        if is_alone and (is_whole or not batch.is_split):
            logs, state = self.programs.whole(size, state, data)
            return logs, tuple(state)
        if self.has_own_step:
            raise RuntimeError(_jax_refusals.own_step_message(model.name))
        if not is_of_keras(model, "compute_loss") and (is_whole or not model._has_rule()):
            raise RuntimeError(_jax_refusals.own_loss_message(model.name))
        if is_whole:
            batch = Batch(data, None)
        try:
            return self._by_microbatches(state, batch, is_whole)
        except DoesNotAddUpError:
            self._adds_up = False
            return self._train(state, data)

    def _by_microbatches(
        self, state: State, batch: Batch, is_whole: bool
    ) -> tuple[Any, tuple[Any, ...]]:
        steps = self.settings.accumulation_steps
        window = self.window = self.window or Window(steps)
        self._skips = self._model.skip_nonfinite
        mode = Mode(
            batch.is_split,
            window.steps == 1,
            self.size if is_whole else None,
            self._skips,
            self.must_add_up(batch),
            self.measured_noise is not None,
        )
        numbers = {
            "steps": float(window.steps),
            "num_microbatches": float(window.steps * batch.num_microbatches),
            "parts": power_of_two(window.steps) * power_of_two(batch.num_microbatches),
            "rows": float(batch.rows),
        }
        programs = self.programs
        is_to_weigh = batch.is_split and programs.needs_totals
        totals = programs.totals(batch, state) if is_to_weigh else None
        try:
            structure, last = programs.prepare(mode, batch, state, numbers, totals)
        except NeedsTotalsError:
            programs.needs_totals = True
            return self._by_microbatches(state, batch, is_whole)
        sums = window.sums or programs.begin(mode)
        before = sums.amounts
        for index in range(batch.num_microbatches):
            data = batch.microbatch(index)
            state, sums = programs.microbatch(mode, sums, state, data, numbers, totals)
            is_last = index + 1 == batch.num_microbatches
            self._look_at_entries(window, last if is_last else structure)
        logs, metrics = programs.report(structure, state.metrics, before, sums.amounts)
        state = state._replace(metrics=metrics)
        window.sums, self._structure = sums, structure
        if window.end_batch():
            state = self._update(state)
        return logs, tuple(state)

    def _look_at_entries(self, window: Window, structure: Structure) -> None:
        """Warn of terms whose shares of the loss values differ between microbatches."""
        before, window.entries = window.entries, structure.entries
        if before is None or len(before) < 2 or len(structure.entries) != len(before):
            return
        ratios = {a / b for a, b in zip(before, structure.entries)}
        if len(ratios) > 1:
            self._model._warn_once(_jax_refusals.unlike_entries_message(self._model.name))

    def _update(self, state: State) -> State:
        """Make the update of the window, full or not, and begin the next one."""
        window, structure = self.window, self._structure
        assert window is not None
        assert window.sums is not None
        assert structure is not None
        sums = window.sums
        window.discard()
        if self.measured_noise is not None and sums.squares is not None:
            estimate = self.measured_noise.of(self._model.optimizer)
            self.programs.measure(estimate, state.optimizer, sums)
        sums = sums._replace(squares=None)
        counters = Counters(self.num_skipped or 0, self.num_lost or 0)
        update = self.programs.update(structure, self._skips, state, sums, counters)
        state, (self.num_skipped, self.num_lost) = update
        return state

    def close_window(self) -> None:
        """Make the update of a partial window, and warn of what was done so far."""
        if self.window is not None and self.window.sums is not None:
            model = self._model
            with jax_state_of(model) as (before, put):
                put(self._update(State(*before)))
        self.warn_of_what_was_done()

    def _most_samples(self) -> int:
        return self._most_rows
