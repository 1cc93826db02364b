"""What the losses of a recorded step average over, and the resulting weight of a microbatch."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

import keras
import torch

from ga_model.base._identity import is_in
from ga_model.base._internals import compiled_loss, losses_in, raw
from ga_model.base._internals_activities import is_sum_of_activities
from ga_model.hearing import _messages, _weights
from ga_model.hearing._losses_of_keras import is_by_sample
from ga_model.hearing._models import is_of_keras, unpack
from ga_model.hearing._split import num_rows
from ga_model.hearing._step_terms import StepTerms
from ga_model.torch_engine import _probes, _refusals
from ga_model.torch_engine._divisors import Divided, Watch, divisors_of, guess, is_to_try
from ga_model.torch_engine._numbers import divisors_of_number
from ga_model.torch_engine._own_calls import LossCall, OwnCall
from ga_model.torch_engine._probes import DoesNotAddUpError
from ga_model.torch_engine._zero_weights import exchanged, zero_weights


class Position(NamedTuple):
    """Where in its window a microbatch stands.

    Attributes:
        window: the window.
        steps: batches that fill it.
        num_microbatches: microbatches that do.
        parts: a power of two near that.
        is_first: whether no microbatch of the window has counted yet.
        whole: the batch, if it is split.
        is_window: whether the microbatch is all of its window.
        defers_logs: whether metrics and logs wait for all microbatches of the batch.
        must_add_up: whether what does not add up over microbatches is refused, and not told.
    """

    window: Any
    steps: int
    num_microbatches: int
    parts: float
    is_first: bool
    whole: _weights.Whole | None
    is_window: bool
    defers_logs: bool
    must_add_up: bool


class _Tried(NamedTuple):
    """What a microbatch weighs whose step was tried, None for a sum."""

    weight: float | None


class StepLosses(StepTerms):
    """The losses of one recorded step, as they become known while it runs.

    Args:
        model: the model that is recorded.
        data: the microbatch, as `train_step` gets it.
        position: where it stands in its window.

    Attributes:
        totals: what the model's `compute_loss` has returned.
        is_lost: whether a term was made zero because it was divided by zero, and had a gradient.
    """

    def __init__(self, model: Any, data: Any, position: Position) -> None:
        super().__init__(model, data, position)
        self.totals: list[Any] = []
        self.is_lost = False
        self._tried: _Tried | None = None

    @property
    def has_rule(self) -> bool:
        """Whether it is said, or was tried, what a microbatch counts."""
        kind = self._model._accumulation.step_probe.kind
        return kind is not None or bool(self._model._has_rule())

    @property
    def is_first_of_window(self) -> bool:
        return bool(self._position.is_first)

    def note_term(self, term: _weights.Term) -> None:
        """Note a term of the compiled loss."""
        if term.is_product and not self._position.is_window and not self.has_rule:
            self.tell(_messages.product_message(term.name, self._model.name))
        self._terms.append(term)
        self.is_lost |= any(term.lost)

    def note_total(self, loss: Any) -> None:
        """Note what the model's `compute_loss` has returned, as each class of the model does."""
        if not is_in(loss, self.totals):
            self.totals.append(loss)

    def note_additional(self, loss: Any, total: Any) -> None:
        """Note a loss that a layer or a regularizer added to the total.

        Args:
            loss: as it was added.
            total: the number that Keras made of it.
        """
        is_sum = True if loss.ndim > 0 or is_sum_of_activities(self._model, loss) else None
        self._additional.append((total, is_sum))

    def _is_sum_of_samples(self, index: int, value: Any, is_sum: Any) -> bool:
        """Return whether a loss that a layer added is a sum over samples, and no mean.

        Raises:
            DoesNotAddUpError: it is neither, or that is not known, and has to be one of them.

        Warns:
            UserWarning: it is neither, or that is not known.
        """
        if is_sum is not None:
            return bool(is_sum)
        if self._position.is_window or self.has_rule:
            return False
        probes: Probes = self._model._accumulation.probes
        kinds = probes.kinds_of_additional
        kind = kinds[index] if index < len(kinds) else "other"
        if kind is None and bool(torch.as_tensor(value).any()):
            kind = "other"  # it was zero in all trials, and is not now
        if kind == "other":
            self.tell(_refusals.unreadable_addition_message(self._model.name))
        return kind == "sum"

    def computes_itself(self, name: str, call: LossCall, value: Any, reduced: Any) -> bool:
        """Return whether a compiled loss has a `__call__` of its own, as `OwnCall.look` does."""
        if self._position.is_window or self.has_rule:
            return False
        return bool(self._model._accumulation.probes.computes_itself(name, call, value, reduced))

    def kind_of(self, name: str, call: LossCall) -> Any:
        """Return what a compiled loss is over samples, as `_probes.kind_of_loss` does, or None.

        Raises:
            DoesNotAddUpError: it does not add up, and has to.

        Warns:
            UserWarning: it does not add up.
        """
        if self._position.is_window or self.has_rule:
            return None
        probes: Probes = self._model._accumulation.probes
        kind = probes.kind_of(name, call, self._position.window.guesses)
        if kind == "other":
            subject = f"the loss {name!r} of {self._model.name!r}"
            self.tell(_refusals.not_additive_message(subject))
        return kind

    def tell(self, message: str) -> None:
        """Warn of what differs from the full batch, or refuse it where it has to be exact."""
        if self._position.must_add_up:
            raise DoesNotAddUpError(message)
        self._model._warn_once(message)

    def mean_of(
        self, value: Any, metric: Any, term: Any, is_loss: bool, kind: Any
    ) -> tuple[Any, float]:
        """Return what a scalar counts in the mean over the microbatches of a window.

        Args:
            value: scalar tensor, of this microbatch.
            metric: what it is for, if it is a metric's.
            term: the loss term that it is the value of, or None.
            is_loss: whether it is a loss that the step takes the gradient of.
            kind: what else it is over samples, as `Number.kind` has it.

        Returns:
            A numerator and a denominator. Both are summed over microbatches.
        """
        is_first = self.is_first_of_window
        terms = self._terms_of_kind(kind, value, metric)
        if terms is None or is_loss or term is not None:
            terms = self.terms_of_scalar(metric, term, is_loss)
        value = torch.as_tensor(value).detach()
        if value.device.type != "mps":  # which has no float64
            value = value.double()
        if terms.weight is None:
            return terms.fold(value, None, is_first), float(is_first)
        weight = float(terms.weight)
        return (terms.fold(value, weight, is_first) if weight else 0.0), weight

    def _terms_of_kind(self, kind: Any, value: Any, metric: Any) -> _weights.LossTerms | None:
        """Return what a number of some kind asks for, or None: what others do."""
        if kind == "sum":
            return _weights.of_weight(None)
        weight = kind.weight(divisors_of_number(value)) if isinstance(kind, Divided) else None
        is_of_function = isinstance(metric, keras.metrics.MeanMetricWrapper)
        if weight is None and (kind == "mean" or is_of_function):
            weight = float(self.num_rows())
        return None if weight is None else _weights.of_weight(weight)

    def _weight_of_rule(self) -> Any:
        weight = super()._weight_of_rule()
        if weight is None and self._tried is not None:
            return "sum" if self._tried.weight is None else self._tried.weight
        return weight if weight is None or isinstance(weight, str) else float(weight)

    def note_tried(self, loss: Any) -> Any:
        """Note a loss of which was tried what it averages over, and return it.

        One that is divided by zero is none: it is zero then, and no NaN.

        Raises:
            RuntimeError: it is not known what it is divided by.
        """
        probe = self._model._accumulation.step_probe
        if self._tried is not None and isinstance(probe.kind, Divided):  # another loss
            raise RuntimeError(_refusals.unknown_loss_message(self._model.name))
        self._tried = _Tried(probe.weight_of(loss, self.num_rows()))
        if self._tried.weight != 0.0:
            return loss
        weights = [raw(v) for v in self._model.trainable_weights]
        self.is_lost |= isinstance(probe.kind, Divided) and probe.kind.loses(loss, weights)
        return sum((weight * 0.0).sum() for weight in weights)

    def is_known(self, loss: Any) -> bool:
        """Return whether it is known what a loss that a step differentiates averages over."""
        is_only = len(self.totals) == 1 and loss is self.totals[0]
        return self.has_rule or (is_only and is_of_keras(self._model, "compute_loss"))

    def num_rows(self) -> int:
        return num_rows(unpack(self._data)[0])


class Probes:
    """What was found out by trying, for one compiled model.

    Args:
        model: the `AccumulatingModel`.

    Attributes:
        kinds_of_additional: of each loss of the model, as `ModelProbe` has it.
    """

    def __init__(self, model: Any) -> None:
        self._model = model
        self._num_called = 0
        self.mixes_samples = False
        self.kinds_of_additional: list[str | None] = []
        self._kinds: dict[str, Any] = {}
        self._own_calls: dict[str, OwnCall] = {}
        self._guesses: dict[str, Any] = {}
        self._watches: dict[str, Watch] = {}
        self._times: dict[str, int] = {}
        self._waiting: dict[str, tuple[Any, Any]] = {}  # samples that came one at a time

    def call(self, microbatches: Iterable[Any]) -> None:
        """Call the model on a microbatch and on its halves, until they tell.

        Args:
            microbatches: inputs. Those whose samples are alike tell nothing, and neither does a
                loss that is zero: others are waited for.
        """
        if not self._model.built:
            return
        for x in microbatches:
            if self._num_called and None not in self.kinds_of_additional:
                return
            if num_rows(x) > 1 and not _probes.are_alike(_probes.apart(x)):
                self._num_called += 1
                takes_gradients = is_to_try(self._num_called)
                self._note(_probes.ModelProbe(self._model, x, takes_gradients))
                zeros = zero_weights(self._model.trainable_weights)
                if zeros and self._num_called == 1:
                    with exchanged(zeros):
                        self._note(_probes.ModelProbe(self._model, x, takes_gradients))

    def _note(self, probe: _probes.ModelProbe) -> None:
        self.mixes_samples |= probe.mixes_samples
        self.kinds_of_additional = _probes.filled_in(self.kinds_of_additional, probe.kinds)

    def computes_itself(self, name: str, call: LossCall, value: Any, reduced: Any) -> bool:
        """Return whether a loss has a `__call__` of its own, as `OwnCall.look` does."""
        return self._own_calls.setdefault(name, OwnCall()).look(call, value, reduced)

    def is_known_to_compute_itself(self, name: str, *args: Any) -> bool:
        """Return what was found of that so far."""
        return name in self._own_calls and self._own_calls[name].computes_itself

    def kind_of(self, name: str, call: LossCall, guesses: dict[str, Any]) -> Any:
        """Return what a loss is over samples, or None where it is Keras's own and so known.

        It may divide by something that is alike in the halves of one microbatch by chance, so it is
        computed on halves more often.

        Args:
            name: of the loss.
            call: its call.
            guesses: what losses were taken for so far in the window, by their name.
        """
        loss, values, y_pred = call.loss, call.values, call.y_pred
        if values is None or not isinstance(loss, keras.losses.Loss) or is_by_sample(loss):
            return None
        if call.computes_itself and (call.has_mask() or self._own_calls[name].is_late):
            return "other"  # what its mask does is not tried
        y_true = call.targets()
        times = self._times[name] = self._times.get(name, 0) + 1
        known, rows = self._kinds.get(name), num_rows(y_pred)
        watch = self._watches.setdefault(name, Watch(prefers_divisors=False))
        watch.takes_divisors = self._model._accumulation.processes() is None
        divisors = divisors_of(values, keras.tree.flatten(y_pred))
        is_other = known is not None and watch.has_changed(divisors, rows)
        if known == "other" or not (known is None or is_other or is_to_try(times)):
            return known
        if rows == 1:
            # Two alike tell a mean from a sum, and two that differ whether samples are compared.
            before = self._waiting.pop(name, (y_true, y_pred))
            self._waiting[name] = _probes.detached(y_true), _probes.detached(y_pred)
            y_true, y_pred = (_probes.joined(*pair) for pair in zip(before, (y_true, y_pred)))
        dtype = None if call.computes_itself else loss.dtype
        found = _probes.kind_of_loss(call.compute(), dtype, y_true, y_pred, watch)
        if found is None and known is None and values.ndim == 0:
            self._guesses = guesses
            return guesses.setdefault(name, guess(divisors))
        if found is not None:
            known = guesses.pop(name, known)
            is_same = known in (None, found) or (isinstance(found, Divided) and self._is_alone())
            self._kinds[name] = found if is_same else "other"
        return self._kinds.get(name)

    def _is_alone(self) -> bool:
        """Return whether the model has one loss, which microbatches are weighted by."""
        return len(losses_in(compiled_loss(self._model))) == 1 and not self.kinds_of_additional

    def known_kind_of(self, name: str, *args: Any) -> Any:
        """Return what was found of a loss so far, or None."""
        return self._kinds.get(name, self._guesses.get(name))
