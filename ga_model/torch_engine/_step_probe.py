"""Find by trial what a custom step averages over.

The step runs on a microbatch and on its halves, and makes no update. Of a mean over samples the
gradients of the halves add up, weighted by samples, to that of the whole; of a sum they add up as
they are; of a sum that is divided by another number, weighted by that. Meanwhile layers that drop
values or add noise pass on what they get, and BatchNormalization layers normalize by their running
averages, and `torch.autocast` casts nothing, so that nothing is rounded to half precision.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import keras
import torch

from ga_model.base._context import ThreadValue
from ga_model.base._in_front import InFront
from ga_model.base._internals import layers_in, seeds
from ga_model.base._internals_torch import disabled
from ga_model.hearing._models import unpack
from ga_model.hearing._split import num_rows, part_of
from ga_model.torch_engine import _refusals
from ga_model.torch_engine._divisors import (
    Divided,
    Tried,
    Watch,
    divisors_of,
    guess,
    is_to_try,
)
from ga_model.torch_engine._not_known import is_to_raise
from ga_model.torch_engine._probes import joined
from ga_model.torch_engine._state import Before
from ga_model.torch_engine._zero_weights import exchanged, zero_weights

# Of gradients, which round otherwise for other numbers of samples.
_TOLERANCE, _OF_HALVES = 1e-4, 2e-2
_NOISE = (
    keras.layers.AlphaDropout,
    keras.layers.Dropout,  # and those of whole channels
    keras.layers.GaussianDropout,
    keras.layers.GaussianNoise,
)
_NORMALIZATION = keras.layers.BatchNormalization

_is_quiet = ThreadValue(False)


class Trial(NamedTuple):
    """What a step gave that ran without an update.

    Attributes:
        gradients: by what tells them apart.
        divisors: of each loss that it took the gradient of.
        is_worked_over: whether it applies other gradients than PyTorch gave.
    """

    gradients: dict[Any, Any]
    divisors: list[list[float]]
    is_worked_over: bool


class UnknownLossError(Exception):
    """Nothing tells what the loss of a step averages over."""


class StepProbe:
    """What was found out of the step of one compiled model.

    Args:
        model: the `AccumulatingModel`.

    Attributes:
        kind: "mean", "sum" or `Divided`, or None as long as nobody asked.
        is_first: whether no microbatch has trained the model so far.
        is_trying: whether the step runs to find out.
    """

    def __init__(self, model: Any) -> None:
        self._model = model
        self.kind: Any = None
        self.is_first = True
        self.is_trying = False
        self._times = 0
        self._watch = Watch(prefers_divisors=True)
        self._has_changed = False
        self._guess: Any = "mean"
        self._is_guess = False  # as gradients were zero so far
        self._expected: Tried | None = None  # of the next microbatch
        self._waiting: Any = None  # a sample that came alone
        self._has_exchanged = False  # weights that are zero, in a trial

    def is_due(self) -> bool:
        """Return whether what was found out is to be tried again, with the next microbatch."""
        if self.kind is None:
            return False
        self._times += 1
        return self._is_guess or is_to_try(self._times)

    def has_changed(self) -> bool:
        """Return whether the last microbatch is to be tried, as its loss is divided otherwise."""
        return self._has_changed

    def weight_of(self, loss: Any, rows: int) -> float | None:
        """Return what a microbatch weighs that has this loss, or None for a sum."""
        divisors = divisors_of(loss)
        self._has_changed = self._watch.has_changed(divisors, rows)
        if not isinstance(self.kind, Divided):
            return None if self.kind == "sum" else float(rows)
        weight, expected = self.kind.weight(divisors), self._expected
        self._expected = None
        is_as_tried = True  # as far as layers have hidden nothing
        if expected is not None and expected.rows == rows:
            is_as_tried = self.kind.weight(expected.whole) == weight
        if weight is None or not is_as_tried:
            raise RuntimeError(_refusals.unknown_loss_message(self._model.name))
        return weight

    def look(
        self,
        gradients_of: Callable[[Any], Trial],
        data: Any,
        guesses: dict[str, Any],
        is_after: bool = False,
    ) -> None:
        """Compare the gradients of a microbatch with those of its halves.

        Args:
            gradients_of: runs the step without an update, and returns what it gave.
            data: the microbatch, as `train_step` gets it.
            guesses: what the step was taken for so far in the window, by the model's name.
            is_after: whether the step has run on it.

        Raises:
            RuntimeError: they are those of neither a mean nor a sum, or do not tell.
        """
        if num_rows(unpack(data)[0]) == 1:
            # Two alike tell a mean from a sum, and two that differ whether samples are compared.
            before, self._waiting = self._waiting or data, data
            data = joined(before, data)
        self.is_trying, self._has_changed = True, False
        self._watch.takes_divisors = self._model._accumulation.processes() is None
        try:
            found = self._kind_of(gradients_of, data)
            if not self._has_exchanged and self._is_hidden(gradients_of, data):
                found = "other"
            self._has_exchanged = True
        except Exception as error:  # of a step that takes no half of a microbatch, say
            if is_to_raise(error) or isinstance(error, RuntimeError):
                raise
            raise RuntimeError(_refusals.unknown_loss_message(self._model.name)) from error
        finally:
            self.is_trying = False
        name, known = self._model.name, self.kind
        if self._is_guess:
            known = guesses.get(name)
        if found is None:  # its gradients are zero
            found = guesses.setdefault(name, self._guess) if known is None else known
            self._is_guess |= known is None
        elif self._is_guess:
            self._is_guess = False
            guesses.pop(name, None)
        if found == "other" or known not in (None, found):
            raise RuntimeError(_refusals.unknown_loss_message(self._model.name))
        self.kind = found
        if is_after:
            self._expected = None

    def _kind_of(self, gradients_of: Callable[[Any], Trial], data: Any) -> Any:
        """Return a kind or "other", or None where gradients are zero or not finite.

        Raises:
            RuntimeError: the step applies other gradients than PyTorch gave, and it is "other".
        """
        rows = num_rows(unpack(data)[0])
        half = rows // 2
        found = list(results_of_halves(self._model, gradients_of, data))
        whole, *halves = found
        tried = _tried(whole, halves, rows)
        if not 0.0 < _square_of(whole.gradients) < float("inf"):
            self._guess = guess([d for trial in found for own in trial.divisors for d in own])
            if tried is not None and self._watch.takes_divisors:
                places = [Divided(place, tried.unit(place)) for place in tried.places()]
                self._guess = next(iter(places), self._guess)
            return self._watch.kind_without_gradient(tried)
        kind = self._watch.kind_of(self._fits(whole, halves), tried, rows, half)
        if kind == "other" and whole.is_worked_over:
            raise RuntimeError(_refusals.worked_over_message(self._model.name))
        self._expected = tried
        return kind

    def _is_hidden(self, gradients_of: Callable[[Any], Trial], data: Any) -> bool:
        """Return whether gradients are of no kind where weights that are zero are other numbers."""
        zeros = zero_weights(self._model.trainable_weights)
        if not zeros:
            return False
        with exchanged(zeros):
            whole, *halves = results_of_halves(self._model, gradients_of, data)
        if not 0.0 < _square_of(whole.gradients) < float("inf"):
            return False
        rows = num_rows(unpack(data)[0])
        watch = Watch(prefers_divisors=True, takes_divisors=self._watch.takes_divisors)
        fits = self._fits(whole, halves)
        return bool(watch.kind_of(fits, _tried(whole, halves, rows), rows, rows // 2) == "other")

    def _fits(self, whole: Trial, halves: list[Trial]) -> Callable[[list[float]], bool]:
        """Return what returns whether gradients of halves times some factors add up."""
        dtypes = {layer.compute_dtype for layer in layers_in(self._model)}
        tolerance = _OF_HALVES if dtypes & {"float16", "bfloat16"} else _TOLERANCE

        def fits(factors: list[float]) -> bool:
            # Of a half of which nothing counts, gradients may be NaN.
            parts = [(trial.gradients, f) for trial, f in zip(halves, factors) if f]
            return _is_sum_of(whole.gradients, parts, tolerance)

        return fits


def _tried(whole: Trial, halves: list[Trial], rows: int) -> Tried | None:
    """Return the divisors of a loss, or None where there are several losses."""
    if any(len(trial.divisors) != 1 for trial in (whole, *halves)):
        return None
    divisors, first, second = (trial.divisors[0] for trial in (whole, *halves))
    return Tried(divisors, first, second, rows)


def results_of_halves(model: Any, run: Callable[[Any], Any], data: Any) -> Iterator[Any]:
    """Yield what a step gives for a microbatch, and for its halves, and change nothing.

    Args:
        model: the model.
        run: runs the step without an update, and returns what it gave.
        data: the microbatch, as `train_step` gets it.
    """
    rows = num_rows(unpack(data)[0])
    half = rows // 2
    before = Before(model)
    for begin, end in ((0, rows), (0, half), (half, rows)):
        try:
            with _quiet(model):
                found = run(part_of(data, begin, end))
        finally:
            before.put_back()
        yield found


def results_of_again(model: Any, run: Callable[[Any], Any], data: Any) -> Any:
    """Return what a step gives for a microbatch with other random numbers, and change nothing."""
    before = Before(model)
    try:
        for variable in [state for layer in layers_in(model) for state in seeds(layer)]:
            variable.assign(variable.value + 1)
        torch.manual_seed(int(torch.randint(2**31, ())))
        with _quiet(model):
            return run(data)
    finally:
        before.put_back()


@contextlib.contextmanager
def _quiet(model: Any) -> Iterator[None]:
    """Let layers that draw or put samples together pass on what they get, in full precision."""
    layers = layers_in(model)
    quiet = [layer for layer in layers if isinstance(layer, (*_NOISE, _NORMALIZATION))]
    with _in_front.of(quiet), _in_front_of_autocast.of([torch.autocast]), _is_quiet.set(True):
        yield


def _casting_nothing(_: Any, enter: Callable[[Any], Any]) -> Callable[[Any], Any]:
    def entered(autocast: Any) -> Any:
        with disabled(autocast) if _is_quiet.get() else contextlib.nullcontext():
            return enter(autocast)

    return entered


_in_front_of_autocast = InFront("__enter__", _casting_nothing)


def _is_sum_of(
    whole: dict[Any, Any], parts: list[tuple[dict[Any, Any], float]], tolerance: float
) -> bool:
    """Return whether gradients are sums of others, each times a number."""
    if any(part.keys() != whole.keys() for part, _ in parts):
        return False
    differences = {
        key: gradient.double() - sum(part[key].double() * factor for part, factor in parts)
        for key, gradient in whole.items()
    }
    return _square_of(differences) <= tolerance**2 * _square_of(whole)


def _square_of(gradients: dict[Any, Any]) -> float:
    return sum(float(gradient.double().square().sum()) for gradient in gradients.values())


def _passing_on(layer: Any, call: Callable[..., Any]) -> Callable[..., Any]:
    def quiet_call(inputs: Any, *args: Any, **kwargs: Any) -> Any:
        if not _is_quiet.get():
            return call(inputs, *args, **kwargs)
        if isinstance(layer, _NORMALIZATION):
            return call(inputs, training=False, mask=kwargs.get("mask"))
        return inputs

    return quiet_call


_in_front = InFront("call", _passing_on)
