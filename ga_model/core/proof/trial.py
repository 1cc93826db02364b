"""Try a step: does training it by microbatches equal training on the full batch?"""

from __future__ import annotations

import contextlib
import itertools
import warnings
from collections.abc import Callable, Iterator, Sequence

import numpy as np

from ga_model.base._internals import forgetting_losses
from ga_model.base._types import Nest
from ga_model.core.backend_types import States
from ga_model.core.batch import num_rows
from ga_model.core.losses import Kinds
from ga_model.core.proof.judge import Judge
from ga_model.core.proof.runner import Step, StepRunner
from ga_model.core.proof.samples import joined, samples_for_trial, shapes_of
from ga_model.core.proof.verdict import Difference, Verdict
from ga_model.core.proof.weighing import Weighing
from ga_model.core.proof.windows import LARGE, Cuts, Window, num_values, windows
from ga_model.core.recorder import CannotAccumulateError
from ga_model.core.snapshots import OtherVariables


def _cuts(step: Step, rows: int) -> Cuts:
    """Return the ways to cut windows of half a microbatch, at least seven samples.

    Of large models, each sample takes long, so there are seven. Where functions are traced, parts
    are equal, as each number of samples needs its own program.
    """
    is_large = num_values(step.model.variables) > LARGE
    size = 1 if is_large else max((rows + 5) // 14, 1)
    if step.backend.traces:
        return ((size,) * 7,)
    return (4 * size, 3 * size), (6, 1), (3, 4), (1, 6)


def of_step(
    step: Step, data: Nest, rows: int, unseen: Nest = None
) -> tuple[Verdict, Exception | None]:
    """Try the step of a model on samples of a batch, and restore the model.

    A trial that fails is repeated with other traces and numbers of samples, as the step may need
    multiples of some number, or memory.

    Args:
        data: a batch of one replica.
        rows: number of samples of a microbatch.
        unseen: samples of an earlier batch, which had no gradient, or None.

    Returns:
        The verdict, and the error if the step cannot be tried. If no sample has a gradient, there
        is no error, and the verdict is an assumed one, which is not tried.
    """
    backend = step.backend

    def attempt(cuts: Cuts) -> tuple[Verdict, Exception | None]:
        cuts = tuple((sum(sizes),) for sizes in cuts) if step.is_single_microbatch else cuts
        try:
            choices = list(samples_for_trial(data, sum(cuts[0]), unseen))
        except Exception as failure:  # too few samples, or arrays of different numbers of samples
            return assumed_of(step.is_own), failure
        for samples in choices:
            verdict, error = _of_samples(step, samples, cuts)
            if verdict.is_tried:
                break
        return verdict, error

    verdict, error = attempt(cuts := _cuts(step, min(rows, int(num_rows(data)))))
    if error is None:
        return verdict, None
    retraces = backend.retraces_after(error)
    if retraces:
        result, next_error = attempt(cuts)
        if next_error is None:
            return result, None
    if retraces is not None:
        backend.retraces_after(error)  # switches back
    fallbacks: list[Cuts] = [((n, 2 * n), (2 * n, n)) for n in range(2, rows + 1) if rows % n == 0]
    if backend.out_of_memory(error) is not None:
        fallbacks = [((1, 1, 1),)]
    for cuts in fallbacks:
        result, _ = attempt(cuts)
        if result.is_tried:
            return result, None
    return verdict, error


def still_holds(step: Step, data: Nest, known: Verdict) -> bool:
    """Try one window of a step again, and return whether an earlier verdict still holds."""
    cuts: Cuts = ((7,),) if step.is_single_microbatch else ((4, 3),)
    with _trying(step) as restore:
        try:
            *_, samples = samples_for_trial(data, sum(cuts[0]))
            runner = StepRunner(step, samples, not step.is_own, known.kinds, restore)
            with forgetting_losses(step.model):
                judge = Judge(runner, list(itertools.islice(windows(runner, cuts), 1)))
            is_known = not judge.is_moved or judge.agrees(known)
        except Exception:  # it cannot be tried on this number of samples, so nothing is new
            return True
        return is_known and runner.written <= set(known.written)


def of_microbatches(step: Step, held: Sequence[Nest]) -> tuple[Verdict, Exception | None]:
    """Try a step on samples of several microbatches, the first of which showed something new.

    Args:
        held: the first samples of each microbatch. Other structures than the first are left out.
    """
    held = [samples for samples in held if shapes_of(samples) == shapes_of(held[0])]
    num_first, num_rest = num_rows(held[0]), sum(map(num_rows, held[1:]))
    data = joined(held[0], *held)  # twice, as several may have news
    cuts: Cuts = ((num_first, num_first, num_rest),) if num_rest else ((num_first, num_first),)
    if num_rest > 1:
        cuts = (num_first, num_first, num_rest - 1, 1), (num_first, num_first, *[1] * num_rest)
    return _of_samples(step, data, cuts)


@contextlib.contextmanager
def _trying(step: Step) -> Iterator[Callable[[], None]]:
    """Try a step in a block, and restore the model at its end.

    Yields a function that restores the Python state (everything that is not in a variable).
    """
    others = OtherVariables(step.model, step.backend)
    state = States(step.backend.state(), others)
    with others.recording(), warnings.catch_warnings(), np.errstate(all="ignore"):
        warnings.simplefilter("ignore")
        try:
            yield state.restore
        finally:
            state.restore()
            step.backend.forget("trial")


def _of_samples(step: Step, samples: Nest, cuts: Cuts) -> tuple[Verdict, Exception | None]:
    """Try the step of a model on these samples."""
    kinds, is_folded = Kinds(), not step.is_own
    with _trying(step) as restore:
        try:
            while True:
                runner = StepRunner(step, samples, is_folded, kinds, restore)
                with forgetting_losses(step.model):
                    remaining = windows(runner, cuts)
                    first = list(itertools.islice(remaining, 2))
                    judge, retry = _compared(runner, first, kinds)
                    if retry is None and (others := list(remaining)):
                        judge, retry = _compared(runner, first + others, kinds)
                    if retry is None and not judge.is_moved:
                        return assumed_of(step.is_own, kinds)._replace(differences=()), None
                    if retry is None:
                        verdict = judge.verdict._replace(kinds=kinds)
                        break
                kinds, is_folded = retry
                step.backend.forget("trial")
        except CannotAccumulateError:
            raise
        except Exception as error:  # user code may raise anything on other samples
            return assumed_of(step.is_own, kinds), error
    if runner.has_warning and not step.is_split:
        verdict = verdict._replace(weighing=Weighing("loss"), differences=(), is_folded=True)
    return verdict, None


def _compared(
    runner: StepRunner, tried: list[Window], kinds: Kinds
) -> tuple[Judge, tuple[Kinds, bool] | None]:
    """Compare windows, and find out whether the step must be tried in another way.

    Returns:
        The comparison. Then None, or reductions and whether to fold weights into the loss, for
        another trial, because training will differ from this one in these.
    """
    judge = Judge(runner, tried)
    if not runner.is_folded or not judge.is_moved:
        return judge, None
    if (found := judge.kinds()).has_sum and not kinds.has_sum:
        return judge, (found, True)  # found from the values, so right whatever was assumed
    if judge.verdict.is_folded or not judge.verdict.is_exact:
        return judge, None
    if not runner.is_plain:
        return judge, (kinds, False)
    runner.is_folded = False
    return Judge(runner, tried), None


def assumed_of(is_own: bool, kinds: Kinds | None = None) -> Verdict:
    """Return the verdict on a step that is not or cannot be tried."""
    differences = (Difference("everything", float("inf")),)
    weighing = Weighing("samples" if is_own else "loss")
    return Verdict(weighing, (), differences, is_folded=not is_own, kinds=kinds or Kinds())
