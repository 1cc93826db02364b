"""Find by trial what the numbers of metrics and logs are over samples.

Metrics of the user's own are updated with a microbatch, and with its halves one after the other:
where their variables are the same then, they count samples. A number that they give to a
`keras.metrics.Mean`, that the step gives to one or logs, is a mean over samples, a sum, or divided
as the loss is or by a number that can be read (`_divisors`), if those of the halves come to that of
the whole. What fits is tried again with the first microbatches, and then ever more rarely.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable, Iterable, Iterator
from typing import Any, NamedTuple

import keras
import torch

from ga_model.base._identity import is_in
from ga_model.base._internals import compiled_loss, layers_in, loss_tracker
from ga_model.hearing._metrics_of_user import counts_samples, parts_of
from ga_model.hearing._models import unpack
from ga_model.hearing._split import num_rows
from ga_model.torch_engine._batch_logs import values_of
from ga_model.torch_engine._divisors import Divided, is_to_try
from ga_model.torch_engine._metric_trials import Arguments, noting, outcome
from ga_model.torch_engine._not_known import is_to_raise, otherwise
from ga_model.torch_engine._numbers import Number, Shares
from ga_model.torch_engine._probes import joined
from ga_model.torch_engine._step_probe import results_of_again, results_of_halves

_TOLERANCE, _OF_HALVES = 1e-4, 2e-2  # of numbers that round otherwise for other samples


class OfBatches(NamedTuple):
    """A number that is no mean or sum over samples.

    Attributes:
        key: that tells it from others.
        what: it is, in words.
        is_of_samples: whether it is a metric's that gets samples, and not a number.
        place: what it is made by, in words.
    """

    key: Hashable
    what: str
    is_of_samples: bool
    place: str = "what is neither a mean nor a sum over the samples of a microbatch"


class _Trial(NamedTuple):
    """What a step gave that ran without an update.

    Attributes:
        numbers: that go to metrics or to logs.
        calls: of metrics, the first one of each.
        weight: of the loss, None where it is a sum.
    """

    numbers: dict[Hashable, Any]
    calls: dict[int, Arguments]
    weight: float | None


class NumbersProbe:
    """What was found out of the numbers of one compiled model.

    Args:
        model: the `AccumulatingModel`.

    Attributes:
        is_trying: whether the step runs to find out.
        told: keys of numbers that were told of.
    """

    def __init__(self, model: Any) -> None:
        self._model = model
        self.is_trying = False
        self._numbers: dict[Hashable, Number] = {}
        self.told: set[Hashable] = set()
        self._times = 0
        self._waiting: Any = None  # a sample that came alone

    def kind_of(self, key: Hashable) -> Any:
        """Return what a number is, as `Number.kind` has it."""
        return self._numbers[key].kind if key in self._numbers else None

    def kind_of_sum(self, key: Hashable) -> Any:
        """Return what it is put together as, as `Number.kind_of_sum` has it."""
        return self._numbers[key].kind_of_sum if key in self._numbers else None

    def is_loss(self, key: Hashable, is_equal: bool, is_zero: bool) -> bool:
        """Return whether a number is the value of a loss, as `Number.is_loss` does."""
        return self._numbers.setdefault(key, Number()).is_loss(is_equal, is_zero)

    @otherwise(True)
    def is_due(self, values: dict[Hashable, Any], is_first: bool) -> bool:
        """Return whether to try, with a microbatch that has these numbers, by their keys.

        Args:
            values: the numbers.
            is_first: whether the microbatch is the first one of its window.
        """
        self._times += 1
        known = self._numbers
        others = [known[k].is_to_try(v, is_first) for k, v in values.items() if k in known]
        return any(others) or is_to_try(self._times)

    def look(
        self, names: dict[tuple[Any, ...], str], run: Callable[[Any], Any], data: Any
    ) -> list[OfBatches]:
        """Find out what the numbers of a step are, and return those that do not add up.

        Args:
            names: what numbers are called whose kind is asked for, by their keys.
            run: runs the step without an update, and returns its recording and what it logs.
            data: the microbatch, as `train_step` gets it.
        """
        given = {key[0] for key in names}
        metrics = [metric for metric in self._metrics(given) if id(metric) not in self.told]
        names = {key: name for key, name in names.items() if not self.told & {key, key[0]}}
        if not (metrics or names):
            return []
        if num_rows(unpack(data)[0]) == 1:
            before, self._waiting = self._waiting, data
            if before is None:
                return []
            data = joined(before, data)

        def tried(data: Any) -> _Trial:
            with noting(metrics) as calls:
                recording, logs = run(data)
            first = {key: found[0] for key, found in calls.items()}
            return _Trial(values_of(recording, logs), first, self._weight_of(recording))

        self.is_trying = True
        try:
            results = results_of_halves(self._model, tried, data)
            trials = [next(results)]
            of_samples = [id(metric) for metric in metrics]
            others = {key: name for key, name in names.items() if key[0] not in of_samples}
            if others or any(call.num_rows() < 2 for call in trials[0].calls.values()):
                trials += results
            found = [OfBatches(key, name, True) for key, name in self._of_samples(metrics, trials)]
            if others:
                rows = num_rows(unpack(data)[0])
                shares = self._shares(rows, [trial.weight for trial in trials])
                again = functools.cache(lambda: results_of_again(self._model, tried, data))
                for key in self._of_step(others, trials, shares, again):
                    found.append(OfBatches(key, others[key], False))
        except Exception as error:  # of a step that takes no half of a microbatch, say
            if is_to_raise(error):
                raise
            place = f"what cannot be tried on half of a microbatch ({type(error).__name__})"
            names |= {(id(metric),): f"the metric {metric.name!r}" for metric in metrics}
            found = [OfBatches(key, name, False, place) for key, name in names.items()]
        finally:
            self.is_trying = False
        return found

    def _of_samples(self, metrics: list[Any], trials: list[_Trial]) -> Iterator[tuple[int, str]]:
        """Yield the keys and names of metrics that do not add up."""
        for metric in metrics:
            calls = [trial.calls.get(id(metric)) for trial in trials]
            if None not in calls and not self._adds_up(metric, calls):
                yield id(metric), f"the metric {metric.name!r}"

    def _of_step(
        self,
        names: Iterable[Any],
        trials: list[_Trial],
        shares: Shares,
        again: Callable[[], _Trial],
    ) -> Iterator[Any]:
        """Yield the keys of numbers that are no means or sums."""
        for key in names:
            found = [trial.numbers.get(key) for trial in trials]
            number = self._numbers.setdefault(key, Number())
            if any(value is None for value in found) or number.note(found, shares):
                continue
            if _is_same(found[0], again().numbers.get(key)):
                yield key
            else:
                number.kinds = None
                number.note(found, shares, is_random=True)

    def _metrics(self, given: set[Any]) -> list[Any]:
        """Return the metrics that may compute with several samples.

        Args:
            given: ids of those that were given a number: some functions of Keras return one, too.
        """

        def counts(metric: Any) -> bool:
            is_function = isinstance(metric, keras.metrics.MeanMetricWrapper)
            return counts_samples(metric) and not (is_function and id(metric) in given)

        of_losses = getattr(compiled_loss(self._model), "metrics", ())
        others = [loss_tracker(self._model), *of_losses]
        return [
            metric
            for whole in self._model.metrics
            for metric in parts_of(whole)
            if not (is_in(metric, others) or counts(metric))
        ]

    def _weight_of(self, recording: Any) -> float | None:
        """Return what a microbatch weighs whose step was tried, None for a sum."""
        kind = self._model._accumulation.step_probe.kind
        if isinstance(kind, Divided) and recording.divisors:
            return kind.weight(recording.divisors[0])
        weight = recording.losses.terms().weight
        return None if weight is None else float(weight)

    def _shares(self, rows: int, weights: list[float | None]) -> Shares:
        dtypes = {layer.compute_dtype for layer in layers_in(self._model)}
        tolerance = _OF_HALVES if dtypes & {"float16", "bfloat16"} else _TOLERANCE
        return Shares(rows, rows // 2, weights, tolerance)

    def _adds_up(self, metric: Any, calls: list[Any]) -> bool:
        """Return whether a metric that gets samples is the same if it gets them in two parts."""
        whole, *halves = calls
        rows = whole.num_rows()
        if rows > 1:
            halves = whole.halves()
        first, second, both = (outcome(metric, part) for part in ([halves[0]], [halves[1]], halves))
        found = outcome(metric, [whole])
        shares = self._shares(rows, [None, None, None])
        adds_up = found.is_as(both)
        for number, values in enumerate(zip(found.values, first.values, second.values)):
            adds_up &= self._numbers.setdefault((id(metric), number), Number()).note(values, shares)
        return adds_up or not found.is_as(outcome(metric, [whole]))  # random


def _is_same(one: Any, other: Any) -> bool:
    """Return whether a number is the same but for rounding."""
    first, second = (torch.as_tensor(value).detach().double() for value in (one, other))
    error, size = float((first - second).abs().max()), float(first.abs().max())
    return error <= _TOLERANCE * size
