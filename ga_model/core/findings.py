"""Verdicts on the step of one model, and when it is tried again."""

from __future__ import annotations

import dataclasses
from typing import Any

import keras
from keras import ops

from ga_model.core import messages
from ga_model.core.backend import Backend
from ga_model.core.batch import shapes_in
from ga_model.core.proof import trial
from ga_model.core.proof.runner import Step
from ga_model.core.proof.verdict import Verdict
from ga_model.core.proof.weighing import Weighing
from ga_model.core.window import Window, is_list, values_of

_MOST_FRUITLESS = 4  # trials


class FoundOtherwiseError(Exception):
    """A batch has shown that its microbatches weigh otherwise than was found before."""


@dataclasses.dataclass
class Known:
    """What is known of a step on batches of one structure.

    Attributes:
        step: the step.
        verdict: on it.
        warning: what is said of it if it is not exact.
        is_unseen: whether the verdict is assumed, as samples have shown nothing yet.
        num_batches: that came.
        next_trial: the number of the batch in which it is tried again.
        num_fruitless: trials because of news that showed none.
    """

    step: Step
    verdict: Verdict
    warning: str = ""
    is_unseen: bool = False
    num_batches: int = 1
    next_trial: int = 4
    num_fruitless: int = 0


class Findings:
    """Has the step of a model tried, once for each structure of data, and again if it has news."""

    def __init__(self, model: Any, backend: Backend) -> None:
        self._model = model
        self._backend = backend
        self._found: dict[Any, Known] = {}  # by structure, and the windows that it is tried for

    def of(self, step: Step, data: Any, rows: int, window: Window | None) -> Known:
        """Return what is known of a step.

        Args:
            data: a batch.
            rows: samples of its microbatches.
            window: the open one, or None.
        """
        structure = keras.tree.map_structure(_rank_and_dtype, self._backend.each(data)[0])
        kind = step.is_split, step.is_one, repr(structure)
        known = self._found.get(kind)
        if known is None or known.is_unseen:
            data = self._backend.samples_of(data, of_all=True)
            known = self._found[kind] = self._first(step, data, rows, known, window)
        elif self._is_due(known, window):
            data = self._backend.samples_of(data, of_all=True)
            with self._backend.on_one_replica():
                if trial.still_holds(step, data, known.verdict):
                    return known
                tried = trial.of_step(step, data, rows)
            if self._note_later(known, data, *tried):
                self._warn_of_later(known)
        return known

    def _first(
        self, step: Step, data: Any, rows: int, assumed: Known | None, window: Window | None
    ) -> Known:
        """Return what is found of a step of which samples have shown nothing so far."""
        model = self._model
        weight = self._backend.microbatch_weight(data)
        if weight is not None:
            weighing = Weighing("sum" if isinstance(weight, str) else "loss")
            return Known(step, Verdict(weighing, otherwise=weighing))
        if not model.verify:
            found = trial.assumed_of(step.is_own)
            return Known(step, found, messages.unverified_message(model.name))
        before = None if assumed is None else assumed.verdict.weighing
        with self._backend.on_one_replica():
            found, error = trial.of_step(step, data, rows, before)
        if isinstance(error, trial.NothingSeenError):  # so the next batch is tried
            return Known(step, found._replace(differences=()), is_unseen=True)
        if assumed is not None:
            self._begin_again(assumed.verdict, found, window)
        return Known(step, found, self._warning_of(step, data, found, error))

    @property
    def is_told(self) -> bool:
        """Whether there is a warning of a step that is not exact."""
        return not all(known.verdict.is_exact for known in self._found.values())

    def look_at(self, known: Known, window: Window, data: Any, written: set[str]) -> None:
        """Try samples of a full window that shows what was not tried before, if it does.

        Args:
            known: what it was trained by.
            data: its last batch.
            written: paths of the variables that the step has written to so far.

        Raises:
            FoundOtherwiseError: it is one batch, which can be trained again.
        """
        step, backend, before = known.step, self._backend, known.verdict
        if known.is_unseen and not step.is_one:
            self._look_at_unseen(window)
        if known.is_unseen or len(window.held) < 2:
            return
        if not (chosen := window.samples_with_news()):
            return
        with backend.on_one_replica():
            found, error = trial.of_microbatches(step, chosen)
        if isinstance(error, trial.NothingSeenError):
            return
        is_other = self._note_later(known, data, found, error)
        if once := sorted(written.difference(found.written)):  # and not while it was tried
            self._model._warn_once(messages.written_message(self._model.name, once))
        if not is_other:
            self._stop_watching(known, before, written)
            return
        if step.is_split and backend.trains_alone and (backend.traces or not step.is_own):
            window.discard()
            raise FoundOtherwiseError
        self._warn_of_later(known)

    def _is_due(self, known: Known, window: Window | None) -> bool:
        """Return whether a step is to be tried again, as code that runs eagerly may change.

        It is with growing distance: in the batches 4, 16, 64 and so on, not in the first window.
        """
        known.num_batches += 1
        is_early = known.num_batches < known.next_trial or window is None or not window.was_full
        if self._backend.traces or is_early:
            return False
        known.next_trial *= 4
        return known.verdict.is_watched

    def _warning_of(self, step: Step, data: Any, found: Verdict, error: Exception | None) -> str:
        """Return what is to be said of a step that is not exact, or could not be tried."""
        shapes = [] if step.is_own else shapes_in(data)  # which may be split whatever it holds
        if not found.is_exact and len({rows for rows, *_ in shapes}) > 1:
            return messages.unlike_rows_message(self._model.name, shapes)
        if error is not None:
            return messages.untried_message(self._model.name, error)
        return "" if found.is_exact else messages.unlike_message(self._model.name, found)

    def _note_later(self, known: Known, data: Any, found: Verdict, error: Exception | None) -> bool:
        """Note what is found of a step that was found to be exact, and return whether it differs.

        Processes that train together keep to what they have found together.
        """
        before, found = known.verdict, known.verdict.after_news(found)
        known.verdict, known.warning = found, self._warning_of(known.step, data, found, error)
        is_other = not found.is_exact or found.weighing != before.weighing
        if is_other and not self._backend.trains_alone:
            self._warn_of_later(known)
            known.verdict = before
        return is_other

    def _warn_of_later(self, known: Known) -> None:
        """Warn of what was found of a step when it had trained already."""
        model, found = self._model, known.verdict
        is_auto = model.loss_over == "auto" and self._backend.trains_alone
        if found.differences and known.step.is_split and is_auto:
            model._warn_once(messages.whole_from_now_message(model.name, found))
        else:
            model._warn_once(known.warning or messages.late_message(model.name))

    def _stop_watching(self, known: Known, before: Verdict, written: set[str]) -> None:
        """Watch nothing more where what is news to training has been none to several trials.

        Args:
            before: the verdict before the last one.
            written: paths of the variables that the step has written to.
        """
        if not known.verdict.watches_as(before):
            return
        known.num_fruitless += 1
        if known.num_fruitless == _MOST_FRUITLESS:
            known.verdict = known.verdict.without_news(written)

    def _begin_again(self, assumed: Verdict, found: Verdict, window: Window | None) -> None:
        """Forget microbatches without a gradient that weigh otherwise than was assumed."""
        before, now = ((v.weighing, v.kinds, v.is_folded) for v in (assumed, found))
        if before == now or window is None or window.sums is None:
            return
        window.sums = None
        if not (found.weighing.is_sum or found.kinds.has_sum):
            self._model._warn_once(messages.late_message(self._model.name))

    def _look_at_unseen(self, window: Window) -> None:
        """Warn of gradients where the samples that were tried have shown none."""
        assert window.sums is not None
        gradients = [g for sums in self._backend.each(window.sums) for g in sums.gradients]
        parts = [part for g in gradients for part in (g if is_list(g) else [g])]
        known = [values_of(part) for part in parts if part is not None]
        is_finite = all(bool(ops.all(ops.isfinite(g))) for g in known)  # else no update is made
        if is_finite and any(bool(ops.any(g != 0)) for g in known):
            self._model._warn_once(messages.unseen_message(self._model.name))


def _rank_and_dtype(leaf: Any) -> tuple[int, str]:
    dtype = str(getattr(leaf, "dtype", type(leaf)))
    return len(getattr(leaf, "shape", ())), dtype.removeprefix("torch.")  # of arrays, too
