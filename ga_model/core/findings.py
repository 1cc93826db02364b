"""Verdicts on the step of one model, and when it is tried again."""

from __future__ import annotations

from typing import Any

import keras
from keras import ops

from ga_model.core import messages
from ga_model.core.backend import Backend
from ga_model.core.batch import shapes_in, unpack
from ga_model.core.proof import trial
from ga_model.core.proof.runner import Step
from ga_model.core.proof.verdict import Verdict
from ga_model.core.proof.weighing import Weighing
from ga_model.core.window import Window, is_list, values_of

_MOST_FRUITLESS = 4  # trials


class FoundOtherwiseError(Exception):
    """A batch has shown that its microbatches weigh otherwise than was found before."""


class Findings:
    """Has the step of a model tried, once for each structure of data, and again if it has news."""

    def __init__(self, model: Any, backend: Backend) -> None:
        self._model = model
        self._backend = backend
        self._found: dict[Any, Verdict] = {}  # by structure, and whether windows are one batch
        self._warnings: dict[Verdict, str] = {}  # of those that are not exact
        self._unseen: dict[Any, Verdict] = {}  # of structures whose samples have shown nothing yet
        self._num_batches: dict[Any, int] = {}  # that were trained by what was found
        self._next_trials: dict[Any, int] = {}  # the numbers of batches
        self._num_fruitless: dict[Any, int] = {}  # trials because of news that showed none

    def of(
        self,
        data: Any,
        rows: int,
        is_own: bool,
        is_split: bool,
        window: Window | None,
        is_one: bool = False,
    ) -> Verdict:
        """Return the verdict on the step.

        Args:
            data: a batch.
            rows: samples of its microbatches.
            is_own, is_split, is_one: as `Step` has them.
            window: the open one, or None.
        """
        model, backend = self._model, self._backend
        step = Step(model, backend, is_own, is_split, is_one)
        kind = self._kind_of(data, is_split, is_one)
        if kind not in self._found:
            data = backend.samples_of(data, of_all=True)
            weight = model.microbatch_weight(*unpack(data))
            if weight is not None:
                weighing = Weighing("sum" if isinstance(weight, str) else "loss")
                self._found[kind] = Verdict(weighing, otherwise=weighing)
                return self._found[kind]
            if not model.verify:
                self._found[kind] = found = trial.assumed_of(is_own)
                self._warnings[found] = messages.unverified_message(model.name)
                return found
            assumed = self._unseen.pop(kind, None)
            before = None if assumed is None else assumed.weighing
            with backend.on_one_replica():
                found, error = trial.of_step(step, data, rows, before)
            if isinstance(error, trial.NothingSeenError):  # so the next batch is tried
                self._unseen[kind] = found._replace(differences=())
                return self._unseen[kind]
            self._note(kind, found, error, None if is_own else data)
            if assumed is not None:
                self._begin_again(assumed, found, window)
        elif self._is_due(kind, window):
            known = self._found[kind]
            data = backend.samples_of(data, of_all=True)
            with backend.on_one_replica():
                if trial.still_holds(step, data, known):
                    return known
                found, error = trial.of_step(step, data, rows)
            if self._note_later(kind, found, error, None if is_own else data):
                self._warn_of_later(kind)
        return self._found[kind]

    @property
    def is_told(self) -> bool:
        """Whether there is a warning of a step that is not exact."""
        return not all(verdict.is_exact for verdict in self._found.values())

    def is_unseen(self, verdict: Verdict) -> bool:
        """Return whether this is assumed of a step that has shown nothing yet."""
        return any(verdict is assumed for assumed in self._unseen.values())

    def message_of(self, verdict: Verdict) -> str:
        """Return the warning about what is not exact."""
        return self._warnings[verdict]

    def look_at(
        self,
        window: Window,
        data: Any,
        is_own: bool,
        is_split: bool,
        verdict: Verdict,
        written: set[str],
    ) -> None:
        """Try samples of a full window that shows what was not tried before, if it does.

        Args:
            data, is_own, is_split: of its last batch, as `of` takes them.
            verdict: what it was trained by.
            written: paths of the variables that the step has written to so far.

        Raises:
            FoundOtherwiseError: it is one batch, which can be trained again.
        """
        kind = self._kind_of(data, is_split)
        if self._unseen.get(kind) == verdict:
            self._look_at_unseen(window)
        if self._found.get(kind) != verdict or len(window.held) < 2:
            return
        if not (chosen := window.samples_with_news()):
            return
        model, backend = self._model, self._backend
        with backend.on_one_replica():
            found, error = trial.of_microbatches(Step(model, backend, is_own, is_split), chosen)
        if isinstance(error, trial.NothingSeenError):
            return
        is_other = self._note_later(kind, found, error, None if is_own else data)
        if once := sorted(written.difference(found.written)):  # and not while it was tried
            model._warn_once(messages.written_message(model.name, once))
        if not is_other:
            self._stop_watching(kind, verdict, written)
            return
        if is_split and backend.trains_alone and (backend.traces or not is_own):
            window.discard()
            raise FoundOtherwiseError
        self._warn_of_later(kind)

    def _kind_of(self, data: Any, is_split: bool, is_one: bool = False) -> Any:
        """Return a key for what is to be found out once: by the nest of a batch, too."""
        kinds = keras.tree.map_structure(_rank_and_dtype, self._backend.each(data)[0])
        return is_split, is_one, repr(kinds)

    def _is_due(self, kind: Any, window: Window | None) -> bool:
        """Return whether a step is to be tried again, as code that runs eagerly may change.

        It is with growing distance: in the batches 4, 16, 64 and so on, not in the first window.
        """
        number = self._num_batches[kind] = self._num_batches.get(kind, 1) + 1
        due = self._next_trials.setdefault(kind, 4)
        if self._backend.traces or number < due or window is None or not window.was_full:
            return False
        self._next_trials[kind] = 4 * due
        return self._found[kind].is_watched

    def _note(self, kind: Any, found: Verdict, error: Exception | None, data: Any) -> None:
        """Keep a verdict, and its warning if it is not exact.

        Args:
            data: a batch, or None: it may be split whatever it holds.
        """
        shapes = [] if data is None else shapes_in(data)
        if not found.is_exact and len({rows for rows, *_ in shapes}) > 1:
            self._warnings[found] = messages.unlike_rows_message(self._model.name, shapes)
        elif error is not None:
            self._warnings[found] = messages.untried_message(self._model.name, error)
        elif not found.is_exact:
            self._warnings[found] = messages.unlike_message(self._model.name, found)
        self._found[kind] = found

    def _note_later(self, kind: Any, found: Verdict, error: Exception | None, data: Any) -> bool:
        """Note what is found of a step that was found to be exact, and return whether it differs.

        Processes that train together keep to what they have found together.
        """
        known = self._found[kind]
        found = known.after_news(found)
        self._note(kind, found, error, data)
        is_other = not found.is_exact or found.weighing != known.weighing
        if is_other and not self._backend.trains_alone:
            self._warn_of_later(kind)
            self._found[kind] = known
        return is_other

    def _warn_of_later(self, kind: Any) -> None:
        """Warn of what was found of a step when it had trained already."""
        model, found = self._model, self._found[kind]
        is_split, *_ = kind
        is_whole = is_split and model.loss_over == "auto" and self._backend.trains_alone
        if found.differences and is_whole:
            model._warn_once(messages.whole_from_now_message(model.name, found))
        else:
            model._warn_once(self._warnings.get(found) or messages.late_message(model.name))

    def _stop_watching(self, kind: Any, before: Verdict, written: set[str]) -> None:
        """Watch nothing more where what is news to training has been none to several trials.

        Args:
            before: the verdict before the last one.
            written: paths of the variables that the step has written to.
        """
        if not self._found[kind].watches_as(before):
            return
        number = self._num_fruitless[kind] = self._num_fruitless.get(kind, 0) + 1
        if number == _MOST_FRUITLESS:
            self._found[kind] = self._found[kind].without_news(written)

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
