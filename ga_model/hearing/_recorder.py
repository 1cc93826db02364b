"""Receive the gradients and the loss of a `train_step` that knows nothing of accumulation.

While a step is recorded, some things of the model answer differently. An attribute that holds an
optimizer, or a list or dict of them, answers with a stand-in: it passes on everything but three
calls. `scale_loss` folds the microbatch's weight into the loss; `apply` and `apply_gradients` hand
the gradients to the recording instead of updating. The compiled loss answers with a copy that notes
what each loss averages over. And the losses that layers add are noted where they are summed up. So
Keras's own `train_step` runs as it is, in every release, and so does a user's own, with several
optimizers too. Where logs wait for the whole batch, metrics in attributes have stand-ins as well:
see `_logs`.

The recording is kept per thread: replicas of a strategy are traced in threads of their own, and a
callback's thread that reads `model.optimizer` meanwhile gets the optimizer itself.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import keras
import tensorflow as tf

from ga_model.base import _validate
from ga_model.base._context import ThreadValue, graph_being_made
from ga_model.base._internals import loss_tracker, takes_training, variables_to_train
from ga_model.base._messages import batch_normalization_message
from ga_model.hearing import _logs, _messages, _weights
from ga_model.hearing._observed_loss import observed
from ga_model.hearing._stand_in import StandIn
from ga_model.reading._heard_gradients import HeardGradients, place_of
from ga_model.reading._loss_reading import (
    DoesNotAddUpError,
    check_adds_up,
    kind_of_scalar,
    mixes_samples,
)
from ga_model.reading._operations import has_fixed_seed
from ga_model.reading._step_loss import (
    OF_WEIGHTS,
    Denominator,
    StepLoss,
    by_kind,
)
from ga_model.reading._tapes import heard
from ga_model.reading._writes import NOTHING, Writes, left_out, used_since
from ga_model.replicas import _optimizers, _strategy
from ga_model.sums import _sums
from ga_model.sums._sums import GradientSum

_recording = ThreadValue()  # that runs in this thread


class Target(NamedTuple):
    """One optimizer that a step applied, and the variables it was to update.

    Attributes:
        optimizer: the optimizer.
        variables: the variables.
        is_sum: whether the loss is a sum, so that its gradients are not divided.
    """

    optimizer: Any
    variables: list[Any]
    is_sum: bool


class Position(NamedTuple):
    """Where in its window a microbatch stands.

    Attributes:
        units: the unit of each optimizer's sum so far, as pairs of optimizer and float64 scalar.
        steps: int64 scalar tensor, `accumulation_steps` of the window.
        num_microbatches: float64 scalar tensor, those that fill the window.
        parts: float64 scalar tensor, a power of two near that.
        is_first_of_batch: bool scalar tensor, whether no microbatch of the batch has counted yet.
        whole: the batch, if it is split.
        is_window: whether the microbatch is all of its window.
        is_update: whether the step runs once per update, whatever replicas there are.
        defers_logs: whether metrics and logs wait for the whole batch.
        can_be_whole: whether the step may run on the whole batch instead.
        must_add_up: whether the loss has to be known to add up over microbatches.
    """

    units: list[tuple[Any, Any]]
    steps: Any
    num_microbatches: Any
    parts: Any
    is_first_of_batch: Any
    whole: _weights.Whole | None
    is_window: bool
    is_update: bool
    defers_logs: bool
    can_be_whole: bool = False
    must_add_up: bool = False


class Recording:
    """The gradients that one `train_step` applies, by optimizer.

    Args:
        model: the model that is recorded.
        data: the microbatch, as `train_step` gets it.
        position: where it stands in its window.
        is_trial: whether the step may do what cannot be accumulated, as no update follows.

    Attributes:
        targets, sums: an entry per optimizer, in the order in which they were applied.
        metrics: what metrics got that waits for the whole batch.
        reads_step: whether it is read what the losses of the step itself are divided by.
        heard: what is known of the step's losses, and the gradients of its tapes if it is read.
        row_counts: numbers of samples that are to keep their ratio from microbatch to microbatch,
            int64 vectors: of the parts of a batch that losses of one optimizer average over.
    """

    def __init__(self, model: Any, data: Any, position: Position, is_trial: bool = False) -> None:
        self.model = model
        self._is_trial = is_trial
        self.targets: list[Target] = []
        self.sums: list[GradientSum] = []
        self._applied_at: list[int] = []  # of each target, the number of operations before
        self.metrics = _logs.MetricCalls(loss_tracker(model))
        self._data = data
        self._position = position
        self._terms: list[_weights.Term] = []
        self._observed_loss: Any = None
        self._compares_samples: bool | None = None
        self._additional: list[tuple[Any, bool]] = []
        self._known_terms: tuple[tuple[int, int], _weights.LossTerms] | None = None
        self._losses: list[Any] = []
        self._graph = graph_being_made()
        self._folded: dict[int, tuple[_weights.LossTerms, _sums.Weight]] = {}
        self.row_counts: list[Any] = []
        # Whether this may be one of several microbatches, and it is not proved that they add up.
        self._is_part = not (is_trial or position.is_update or position.must_add_up)
        self._reads_losses = self._is_part and not model._has_rule()
        self.reads_step = self._is_part and not computes_loss_as_keras(model)
        self.heard = HeardGradients(self._graph, data, model)
        is_to_read = not is_trial and model._accumulation.is_to_read_writes()
        self._writes = Writes(model) if is_to_read else None

    def stand_in(self, value: Any) -> Any:
        """Return what stands in for an attribute's value: optimizers, also in lists and dicts.

        Where logs wait for the whole batch, metrics have a stand-in too.
        """
        if isinstance(value, keras.optimizers.Optimizer):
            return _OptimizerStandIn(value, self)
        if isinstance(value, keras.metrics.Metric):
            defers_logs = self._position.defers_logs
            return _logs.MetricStandIn(value, self.metrics) if defers_logs else value
        if not is_recorded(value):
            return value
        if isinstance(value, dict):
            return {key: self.stand_in(part) for key, part in value.items()}
        parts = [self.stand_in(part) for part in value]
        return type(value)(*parts) if hasattr(value, "_fields") else parts

    def observed_loss(self, compiled: Any) -> Any:
        """Return a copy of the compiled loss that notes its terms here, always the same one."""
        if self._observed_loss is None:
            calls = self.metrics if self._position.defers_logs else None
            check = self._check_adds_up if self._position.must_add_up else None
            read = self._read_values if self._reads_losses and self._graph is not None else None
            self._observed_loss = observed(compiled, self.note_term, calls, check, read)
        return self._observed_loss

    def _check_adds_up(self, loss: Any, y_true: Any, y_pred: Any) -> None:
        """Raise DoesNotAddUpError if a compiled loss is not known to add up."""
        check_adds_up(loss, y_true, y_pred)
        if mixes_samples(tf.nest.flatten(y_pred), self.model):
            raise DoesNotAddUpError
        shapes = [leaf.shape for leaf in tf.nest.flatten(y_pred)]
        if self._compares_samples is None and any(None in shape[1:] for shape in shapes):
            self._compares_samples = _has_axis_of_samples(self.model, self._data)
        if self._compares_samples:
            raise DoesNotAddUpError

    def _tell(self, message: str) -> None:
        """Warn of what is exact on the full batch only, or let the step run there.

        Raises:
            DoesNotAddUpError: the step can run on the full batch.
        """
        if self._position.can_be_whole and self._graph is not None:
            raise DoesNotAddUpError
        self.model._warn_once(message)

    def _read_values(self, name: str, values: Any) -> Denominator | None:
        """Return what a compiled loss that gives one number is divided by, if it is not the rows.

        Args:
            name: of the loss.
            values: what it gave, one number or one for each sample.

        Warns:
            UserWarning: it computes with several samples.
        """
        loss = self.heard.read(values)
        denominators = loss.denominators
        if denominators is None and loss.mixing is not None:
            self._warn_of_mixing(f"the loss {name!r} of {self.model.name!r}", loss.mixing)
        is_one = values.shape.rank == 0 and denominators is not None and len(denominators) == 1
        if not is_one or _strategy.num_replicas() > 1:
            return None
        found = (denominators or [])[0]
        return None if found.kind == "rows" or found.divisor is not None else found

    def note_term(self, term: _weights.Term) -> None:
        """Note a term of the compiled loss.

        Raises:
            DoesNotAddUpError: it is a product, and has to add up.

        Warns:
            UserWarning: it is a product, and cannot be put together from microbatches.
        """
        if term.is_product and self._position.must_add_up:
            raise DoesNotAddUpError
        if term.is_product and self._reads_losses:
            self.model._warn_once(_messages.product_message(term.name, self.model.name))
        self._terms.append(term)
        if self.reads_step:
            self.heard.note(term.raw, Denominator(term.kind, term.weight))

    def note_additional(self, value: Any, is_sum: bool) -> None:
        """Note a loss that a layer or a regularizer added to the total."""
        self._additional.append((value, is_sum))
        if self.reads_step:
            self.heard.note(value, self._added_denominator(is_sum))

    def note_call(self, tensors: Any, losses: Sequence[Any], is_sum: Sequence[bool]) -> None:
        """Note what a call that went by microbatches gave: as `note_call` of the module."""
        if self._is_part:
            self.heard.note_samples(tensors)
            for loss, is_sum_ in zip(losses, is_sum):
                self.heard.note(loss, self._added_denominator(is_sum_))

    def _added_denominator(self, is_sum: bool) -> Denominator:
        """Return what a loss that a layer added is divided by."""
        return Denominator("sum") if is_sum else Denominator("rows", self._num_rows())

    def _warn_of_mixing(self, subject: str, op: Any) -> None:
        """Warn that a loss computes with several samples, by the operation `op`."""
        is_drawn = has_fixed_seed(op)
        message = _messages.fixed_seed_message if is_drawn else _messages.mixing_loss_message
        self.model._warn_once(message(subject, place_of(op)))

    def scale_loss(self, optimizer: Any, loss: Any) -> Any:
        """Fold the microbatch's weight into the loss, then scale it as the optimizer does."""
        self._losses.append(loss)
        losses = [self.heard.read(loss)] if self.reads_step else None
        is_first = tf.equal(self.unit(optimizer), 0.0)
        terms, factor = self._terms_of_step(losses, is_first)
        weight = self._in_unit(optimizer, terms.weight)
        self._folded[id(optimizer)] = (terms, weight)
        loss = terms.fold(loss, weight.relative, is_first)
        return optimizer.scale_loss(loss if factor is None else _sums.scaled(loss, factor))

    def unit(self, optimizer: Any) -> Any:
        """Return the unit of the optimizer's sum so far, zero before its first microbatch."""
        units = [unit for other, unit in self._position.units if other is optimizer]
        return units[0] if units else tf.zeros((), tf.float64)  # of one that the step itself made

    def _in_unit(self, optimizer: Any, weight: Any) -> _sums.Weight:
        if weight is None:
            return _sums.Weight(tf.ones((), tf.float64), tf.ones((), tf.float64))
        number = self._position.parts
        if any(map(_sums.overwrites, self.model.variables)):
            number = self._position.num_microbatches
            if (whole := self._position.whole) is not None:
                # A replica may be left without rows.
                parts = tf.math.divide_no_nan(whole.rows(), tf.cast(self._num_rows(), tf.float64))
                number = tf.cast(self._position.steps, tf.float64) * parts
        return _sums.in_unit(weight, self.unit(optimizer), number)

    def apply(self, optimizer: Any, gradients: Sequence[Any], variables: Sequence[Any]) -> None:
        """Keep the gradients of an `optimizer.apply`."""
        if self._graph not in (None, graph_being_made()):
            raise RuntimeError(_messages.inner_graph_message(self.model.name))
        if not self._is_trial and any(t.optimizer is optimizer for t in self.targets):
            raise RuntimeError(_messages.applied_twice_message(self.model.name, optimizer.name))
        _validate.check_single_accumulation([optimizer], self.model.accumulation_steps)
        _validate.check_single_finite_check([optimizer], self.model.skip_nonfinite)
        _optimizers.build(optimizer, variables)
        is_folded, factor, given = id(optimizer) in self._folded, None, gradients
        if is_folded:
            terms, weight = self._folded[id(optimizer)]
        else:
            losses = self.heard.losses_of(gradients) if self.reads_step else None
            is_first = tf.equal(self.unit(optimizer), 0.0)
            terms, factor = self._terms_of_step(losses, is_first)
            if not terms.is_plain:
                self.model._warn_once(_messages.not_scaled_message(self.model.name))
            weight = self._in_unit(optimizer, terms.weight)
            if factor is not None:
                gradients = [_sums.scaled(gradient, factor) for gradient in gradients]
        is_sum = terms.weight is None
        if self.reads_step:
            is_weighted_here = not is_folded and not is_sum and factor is None
            self._warn_of_work_on(given, is_weighted_here)
            self._warn_of_order(optimizer, given)
        noise_of = None if self.model._accumulation.measured_noise is None else optimizer
        if noise_of is not None and is_sum:
            raise ValueError(_messages.noise_of_sum_message(self.model.name))
        self.targets.append(Target(optimizer, list(variables), is_sum))
        self._applied_at.append(0 if self._graph is None else len(self._graph.get_operations()))
        scale = not (is_folded or is_sum)
        self.sums.append(GradientSum.of(list(gradients), variables, weight, scale, noise_of))

    def _warn_of_order(self, optimizer: Any, gradients: Sequence[Any]) -> None:
        """Warn if gradients follow from what another optimizer was to update before."""
        if self._graph is None:
            return
        for target, first in zip(self.targets, self._applied_at):
            names = used_since(self._graph, first, target.variables, gradients)
            if names:
                message = _messages.order_message(
                    self.model.name, target.optimizer.name, optimizer.name, names
                )
                self._tell(message)

    def _warn_of_work_on(self, gradients: Sequence[Any], may_shift: bool) -> None:
        """Warn if the step has made something of gradients that a sum of them does not give.

        Args:
            gradients: as the step applies them.
            may_shift: whether something may be added to them, because their weights come after it.
        """
        work = self.heard.work_on(gradients)
        if work.breaks is not None:
            self._tell(_messages.worked_over_message(self.model.name, place_of(work.breaks)))
        elif work.shifts is not None and not may_shift:
            self._tell(_messages.shifted_message(self.model.name, place_of(work.shifts)))

    def mean_of(self, value: Any, metric: Any = None, term: Any = None) -> _logs.Mean:
        """Return what a scalar counts in the mean over the microbatches of a batch.

        Args:
            value: scalar tensor, of this microbatch.
            metric: what it is for, if it is a metric's.
            term: the loss term that it is the value of, or None. A value that went into an
                optimizer's `scale_loss` or the model's own `loss` is the total loss.
        """
        is_first = self._position.is_first_of_batch
        is_total = metric is not None and metric is loss_tracker(self.model)
        terms = self.loss_terms()
        if term is not None:
            terms = _weights.of_weight(term.weight)
        elif not is_total and not any(value is loss for loss in self._losses):
            terms = _weights.of_weight(self._num_rows() if terms.weight is None else terms.weight)
        # Keras tracks the total as it is on one replica, before it is divided by their number.
        replicas = float(_strategy.num_replicas()) if is_total else 1.0
        value = tf.cast(value, tf.float64) / replicas
        if terms.weight is None:
            folded = terms.fold(value, None, is_first) * replicas
            return _logs.Mean(folded, tf.cast(is_first, tf.float64))
        weight = tf.cast(terms.weight, tf.float64)
        folded = terms.fold(value, weight, is_first) * replicas
        return _logs.Mean(tf.where(tf.equal(weight, 0.0), tf.zeros_like(folded), folded), weight)

    def check_complete(self) -> None:
        """Check that the step did nothing that is done once per update, but to its optimizers.

        Raises:
            RuntimeError: it applied an optimizer past the recording, or none.
            DoesNotAddUpError: it wrote to variables, and can run on the full batch.

        Warns:
            UserWarning: it wrote to variables, or BatchNormalization layers did.
        """
        if self._is_trial:
            return
        known = [*(t.optimizer for t in self.targets), *optimizers_in(vars(self.model))]
        written = NOTHING if self._writes is None else self._writes.read(known)
        names = [optimizer.name for optimizer in written.optimizers]
        if names or (not self.targets and self.model.trainable_weights):
            if self._writes is not None:
                self._writes.undo()
            raise RuntimeError(_messages.not_recorded_message(self.model.name, names))
        if self._position.is_update:
            return
        if written.others and self._position.must_add_up:
            raise DoesNotAddUpError
        if written.normalization:
            layers = [layer.name for layer in written.normalization]
            self.model._warn_once(batch_normalization_message(layers))
        if written.others:
            self._tell(_messages.written_message(self.model.name, written.others))

    def loss_terms(self) -> _weights.LossTerms:
        """Return what the terms of the loss so far ask for."""
        so_far = (len(self._terms), len(self._additional))
        if self._known_terms is None or self._known_terms[0] != so_far:
            self._known_terms = (so_far, self._combine())
        return self._known_terms[1]

    def _terms_of_step(
        self, losses: list[StepLoss] | None, is_first: Any
    ) -> tuple[_weights.LossTerms, Any]:
        """Return what the losses that an optimizer's gradients are of ask for.

        Args:
            losses: what they were read to be, or None where nothing is read.
            is_first: bool scalar tensor, whether the window has no microbatch yet.

        Returns:
            That, and the factor of the gradients that is left, or None.

        Warns:
            UserWarning: they are no means or sums over samples, or not of one kind.
        """
        is_told = self.model._has_rule() or (self._graph is None and self._terms)
        if losses is None or is_told:
            return self.loss_terms(), None
        name = self.model.name
        mixing = [loss for loss in losses if loss.denominators is None]
        if mixing or not losses:
            if mixing and mixing[0].mixing is not None:
                self._warn_of_mixing(f"`train_step` of {name!r}", mixing[0].mixing)
            else:
                self.model._warn_once(_messages.unread_loss_message(name))
            return self.loss_terms(), None
        found = by_kind(d for loss in losses for d in loss.denominators or ())
        known = {term.kind for term in self._terms}
        known |= {"sum" if is_sum else "rows" for _, is_sum in self._additional}
        has_regularizers = found.pop(OF_WEIGHTS.kind, None) is not None
        if (rows := found.get("rows")) is not None and rows.others:
            counts = [tf.cast(count, tf.int64) for count in (rows.count, *rows.others)]
            self.row_counts.append(tf.stack(counts))
        if rows is not None and len(found) == 1 and not known:
            return _weights.of_weight(tf.cast(rows.count, tf.float64)), None
        if set(found) <= known:
            return self.loss_terms(), None
        means = [d for d in found.values() if d.count is not None]
        if not means:
            if has_regularizers:
                self.model._warn_once(_messages.not_scaled_message(name))
            return _weights.of_weight(None), None
        if len(found) > 1:
            kinds = [d.words() for d in found.values()]
            self.model._warn_once(_messages.unlike_terms_message(name, kinds))
        first = means[0]
        count = tf.cast(first.count, tf.float64)
        if first.divisor is None:
            return _weights.of_weight(count), None
        divisor = tf.cast(first.divisor, tf.float64)
        if first.once is not None:
            if has_regularizers:  # which the rest of the divisor would scale, too
                kinds = [first.words(), "nothing, as they are those of weights"]
                self.model._warn_once(_messages.unlike_terms_message(name, kinds))
            once = tf.cast(first.once, tf.float64)
            count += tf.where(is_first, once, tf.zeros_like(once))
        return _weights.of_weight(count), tf.math.divide_no_nan(divisor, count)

    def _combine(self) -> _weights.LossTerms:
        x, y, sample_weight = unpack(self._data)
        # Keras adds the losses of layers first, and those of weight regularizers after them.
        regularizers = [v for v in self.model.trainable_weights if getattr(v, "regularizer", None)]
        first = max(0, len(self._additional) - len(regularizers))
        regularization = [value for value, _ in self._additional[first:]]
        additional = [self._read(*part) for part in self._additional[:first]]
        weight = self.model.microbatch_weight(x, y, sample_weight)
        if weight is not None:
            return _weights.rule(weight, regularization)
        # What the terms weigh in the whole batch is of no use where a part of it may be left out.
        whole = None if self.model.skip_nonfinite else self._position.whole
        terms = _weights.combine(
            self._terms,
            additional,
            regularization,
            self._num_rows(),
            self._position.num_microbatches if whole is None else self._position.steps,
            whole,
        )
        if terms.mismatch and not self._position.is_window:
            self.model._warn_once(_messages.one_weight_message(terms.exact, terms.mismatch))
        return terms

    def _read(self, value: Any, is_sum: bool) -> tuple[Any, bool]:
        """Return a loss that a layer added, and whether it is a sum over samples."""
        if is_sum or not tf.is_symbolic_tensor(value):
            return value, is_sum
        if self._position.must_add_up:
            kind = kind_of_scalar(value)
            if kind is None or (kind == "sum" and self.model.run_eagerly):  # which reads it once
                raise DoesNotAddUpError
            return value, kind == "sum"
        if not self._reads_losses or self.reads_step:
            return value, False
        loss = self.heard.read(value)
        if loss.mixing is not None:
            self._warn_of_mixing(f"a layer of {self.model.name!r}", loss.mixing)
        return value, [d.kind for d in loss.denominators or ()] == ["sum"]

    def _num_rows(self) -> Any:
        return _weights.num_rows(unpack(self._data)[0])


def unpack(data: Any) -> Any:
    """Return x, y and sample weight of a batch. x is all of it where it is no tuple of up to 3."""
    if not isinstance(data, tuple) or len(data) > 3:
        data = (data,)
    return keras.utils.unpack_x_y_sample_weight(data)


class _OptimizerStandIn(StandIn):
    """Stands in for one optimizer during one recorded step. It tells the `Recording`."""

    def scale_loss(self, loss: Any) -> Any:
        return self._listener.scale_loss(self._original, loss)

    def apply(self, grads: Sequence[Any], trainable_variables: Sequence[Any] | None = None) -> None:
        if trainable_variables is None:
            trainable_variables = variables_to_train(self._original)
        self._listener.apply(self._original, grads, trainable_variables)

    def apply_gradients(self, grads_and_vars: Any) -> Any:
        gradients, variables = zip(*grads_and_vars)
        self.apply(gradients, variables)
        return self._original.iterations


def current_recording(model: Any) -> Recording | None:
    """Return the recording of `model` that is running in this thread, if one is."""
    recording = _recording.get()
    return recording if recording is not None and recording.model is model else None


def note_call(tensors: Any, losses: Sequence[Any] = (), is_sum: Sequence[bool] = ()) -> None:
    """Note what a call that went by microbatches gave, if the step is read.

    Args:
        tensors: tensors that have an entry of axis 0 for each sample.
        losses: what layers added.
        is_sum: whether each of them is a sum over samples, and no mean.
    """
    if (recording := _recording.get()) is not None:
        recording.note_call(tensors, losses, is_sum)


@contextlib.contextmanager
def record(
    model: Any, data: Any, position: Position, is_trial: bool = False
) -> Iterator[Recording]:
    """Record the step of `model` that runs in this thread.

    Args:
        model, data, position, is_trial: as `Recording` takes them.
    """
    recording = Recording(model, data, position, is_trial)
    with _recording.set(recording), left_out.set([]):
        with heard(recording.heard.listen) if recording.reads_step else contextlib.nullcontext():
            yield recording
        recording.check_complete()


def unrecorded() -> contextlib.AbstractContextManager[None]:
    """Let everything of a model answer as it does while no step of it is recorded."""
    return _recording.set(None)


def optimizers_in(value: Any) -> list[Any]:
    """Return the optimizers that a value is, or that a list or dict in it holds."""
    return instances_in(value, keras.optimizers.Optimizer)


def is_recorded(value: Any) -> bool:
    """Return whether an attribute with this value has a stand-in while a step is recorded."""
    return bool(instances_in(value, (keras.optimizers.Optimizer, keras.metrics.Metric)))


def instances_in(value: Any, classes: Any) -> list[Any]:
    """Return the instances of `classes` that a value is, or that a list or dict in it holds."""
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, (list, tuple)):
        return [instance for part in value for instance in instances_in(part, classes)]
    return [value] if isinstance(value, classes) else []


def is_of_keras(model: Any, name: str) -> bool:
    """Return whether a method of the model is Keras's own, below this package's."""
    for owner in type(model).__mro__:
        module = getattr(vars(owner).get(name), "__module__", "ga_model")
        if not module.startswith("ga_model"):
            return module.startswith("keras.")
    return False


def computes_loss_as_keras(model: Any) -> bool:
    """Return whether a model has Keras's own `train_step` and `compute_loss`."""
    return all(is_of_keras(model, name) for name in ("train_step", "compute_loss"))


def _has_axis_of_samples(model: Any, data: Any) -> bool:
    """Return whether an output has an axis beside the first whose length is the number of samples.

    Of axes whose length is not known, those of 3 samples are known then.
    """
    rows = 3

    def spec(leaf: Any) -> Any:
        if not isinstance(leaf, tf.Tensor) or not leaf.shape.rank:
            return leaf
        return tf.TensorSpec([rows, *leaf.shape[1:]], leaf.dtype)

    def call(x: Any) -> list[Any]:
        with keras.StatelessScope(), unrecorded():
            outputs = model(x, training=True) if takes_training(model) else model(x)
        return [leaf for leaf in tf.nest.flatten(outputs) if leaf is not None]

    specs = tf.nest.map_structure(spec, unpack(data)[0])
    outputs = tf.function(call, autograph=False).get_concrete_function(specs).structured_outputs
    return any(output.shape.rank and rows in output.shape[1:] for output in outputs)
