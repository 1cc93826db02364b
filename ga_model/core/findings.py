"""Verdicts on the step of a model, which is tried again after news: what no trial has shown."""

from __future__ import annotations

import dataclasses
from typing import Any

import keras
from keras import ops

from ga_model.base._types import Nest
from ga_model.core import messages
from ga_model.core.backend import Backend
from ga_model.core.batch import samples_between, shapes_in
from ga_model.core.proof import trial
from ga_model.core.proof.runner import Step
from ga_model.core.proof.verdict import Verdict
from ga_model.core.proof.weighing import Weighing
from ga_model.core.window import Window, is_list, values_of

_MOST_FRUITLESS = 4  # trials that confirm no news, before watching ends


class FoundOtherwiseError(Exception):
    """Raised when a batch contradicts the weights found for its microbatches."""


@dataclasses.dataclass
class Known:
    """What is known of a step on batches of one structure.

    Attributes:
        step: the step.
        verdict: the verdict on it.
        warning: text of the warning if it is not exact.
        is_unseen: whether the verdict is assumed, because no sample had a gradient so far.
        unseen: the first of these samples.
        num_batches: batches of this structure so far.
        next_trial: number of the batch that triggers the next trial.
        num_fruitless: trials after news that confirmed none.
    """

    step: Step
    verdict: Verdict
    warning: str = ""
    is_unseen: bool = False
    unseen: Nest = None
    num_batches: int = 1
    next_trial: int = 4
    num_fruitless: int = 0


class Findings:
    """Tries the step of a model once per structure of data, and again if training has news."""

    def __init__(self, model: keras.Model, backend: Backend) -> None:
        self._model = model
        self._backend = backend
        self._known: dict[tuple[bool, bool, str], Known] = {}  # by structure and kind of window

    def of(self, step: Step, data: Nest, rows: int, window: Window | None) -> Known:
        """Return what is known of a step, after a trial if one is due.

        Args:
            data, rows: a batch, and its samples per microbatch.
            window: the open window, or None.
        """
        structure = keras.tree.map_structure(_rank_and_dtype, self._backend.per_replica(data)[0])
        key = step.is_split, step.is_single_microbatch, repr(structure)
        known = self._known.get(key)
        if known is None or known.is_unseen:
            data = self._backend.samples_of(data, of_all=True)
            known = self._known[key] = self._try_first(step, data, rows, known, window)
        elif self._is_due(known, window):
            data = self._backend.samples_of(data, of_all=True)
            with self._backend.on_one_replica():
                if trial.still_holds(step, data, known.verdict):
                    return known
                verdict, error = trial.of_step(step, data, rows)
            # If a watched scalar is the news, earlier batches had none.
            is_scalar = error is None and verdict.varies_more(known.verdict)
            if self._revise(known, data, verdict, error):
                self._warn_of_later(known, concerns_updates=not is_scalar)
        return known

    def _try_first(
        self, step: Step, data: Nest, rows: int, assumed: Known | None, window: Window | None
    ) -> Known:
        """Try a step whose samples have shown no gradient so far, and return the result."""
        model = self._model
        weight = self._backend.microbatch_weight(data)
        if weight is not None:
            weighing = Weighing("sum" if isinstance(weight, str) else "loss")
            return Known(step, Verdict(weighing, default_weighing=weighing))
        if not model.verify:
            verdict = trial.assumed_of(step.is_own)
            return Known(step, verdict, messages.unverified_message(model.name))
        with self._backend.on_one_replica():
            verdict, error = trial.of_step(step, data, rows, assumed and assumed.unseen)
        if error is None and not verdict.is_tried:  # try the next batch, too
            return Known(step, verdict, is_unseen=True, unseen=samples_between(data, 0, rows))
        if assumed is not None and window is not None and not window.is_all_unseen():
            before, now = ((v.weighing, v.kinds, v.is_folded) for v in (assumed.verdict, verdict))
            if before != now:
                model._warn_once(messages.late_message(model.name))
        return Known(step, verdict, self._warning_of(step, data, verdict, error))

    @property
    def has_warned(self) -> bool:
        """Whether a warning about a step that is not exact was given."""
        return not all(known.verdict.is_exact for known in self._known.values())

    def examine(self, known: Known, data: Nest, window: Window, written: set[str]) -> None:
        """Try samples of a window, full or partial, in which training showed news.

        Args:
            known, data: what is known of the step that trained it, and its last microbatch.
            written: paths of the variables that the step has written to so far.

        Raises:
            FoundOtherwiseError: if the verdict changed and the window is one batch, to repeat.
        """
        step, backend, old_verdict = known.step, self._backend, known.verdict
        if known.is_unseen and not step.is_single_microbatch:
            self._look_at_unseen(window)
        if known.is_unseen or len(window.trial_samples) < 2:
            return
        if not (samples := window.samples_with_news()):
            return
        with backend.on_one_replica():
            verdict, error = trial.of_microbatches(step, samples)
        if error is None and not verdict.is_tried:  # no sample has a gradient
            return
        has_changed = self._revise(known, data, verdict, error)
        if written_in_training := sorted(written.difference(verdict.written)):  # not in a trial
            self._model._warn_once(messages.written_message(self._model.name, written_in_training))
        if not has_changed:
            if known.verdict.has_same_watch(old_verdict):
                known.num_fruitless += 1
                if known.num_fruitless == _MOST_FRUITLESS:
                    known.verdict = known.verdict.unwatched(written)
            return
        if step.is_split and backend.trains_alone and (backend.traces or not step.is_own):
            window.discard()
            raise FoundOtherwiseError
        self._warn_of_later(known)

    def _is_due(self, known: Known, window: Window | None) -> bool:
        """Return whether to try a step again, because code that runs eagerly may change.

        Trials are due in batches 4, 16, 64 and so on, but never in the first window.
        """
        known.num_batches += 1
        is_early = known.num_batches < known.next_trial or window is None or not window.was_full
        if self._backend.traces or is_early:
            return False
        known.next_trial *= 4
        return known.verdict.is_watched

    def _warning_of(self, step: Step, data: Nest, verdict: Verdict, error: Exception | None) -> str:
        """Return the warning about a step that is not exact or could not be tried, if any."""
        shapes = [] if step.is_own else shapes_in(data)  # a custom step may split any data
        if not verdict.is_exact and len({rows for rows, *_ in shapes}) > 1:
            return messages.unlike_rows_message(self._model.name, shapes)
        if error is not None:
            return messages.untried_message(self._model.name, error)
        return "" if verdict.is_exact else messages.unlike_message(self._model.name, verdict)

    def _revise(self, known: Known, data: Nest, verdict: Verdict, error: Exception | None) -> bool:
        """Store the result of a later trial, and return whether it differs from the verdict.

        Processes that train together keep their first verdict.
        """
        old_verdict, verdict = known.verdict, known.verdict.combined_with(verdict)
        known.verdict, known.warning = verdict, self._warning_of(known.step, data, verdict, error)
        has_changed = not verdict.is_exact or verdict.weighing != old_verdict.weighing
        if has_changed and not self._backend.trains_alone:
            known.verdict = old_verdict
        return has_changed

    def _warn_of_later(self, known: Known, concerns_updates: bool = True) -> None:
        """Warn that the verdict on a step changed, perhaps after updates that it concerns."""
        model, verdict = self._model, known.verdict
        is_auto = model.loss_over == "auto" and self._backend.trains_alone
        if verdict.differences and known.step.is_split and is_auto:
            if concerns_updates:
                model._warn_once(messages.whole_from_now_message(model.name, verdict))
        else:
            model._warn_once(known.warning or messages.late_message(model.name))

    def _look_at_unseen(self, window: Window) -> None:
        """Warn if training has gradients where the samples of trials had none."""
        gradients = [g for sums in self._backend.per_replica(window.sums) for g in sums.gradients]
        parts = [part for g in gradients for part in (g if is_list(g) else [g])]
        known = [values_of(part) for part in parts if part is not None]
        is_finite = all(bool(ops.all(ops.isfinite(g))) for g in known)  # otherwise no update
        if is_finite and any(bool(ops.any(g != 0)) for g in known):
            self._model._warn_once(messages.unseen_message(self._model.name))


def _rank_and_dtype(leaf: Any) -> tuple[int, str]:
    dtype = str(getattr(leaf, "dtype", type(leaf)))
    return len(getattr(leaf, "shape", ())), dtype.removeprefix("torch.")  # as of arrays
