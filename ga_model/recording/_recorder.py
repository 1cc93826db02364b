"""Record the gradients and the loss of an unchanged `train_step`.

While a step is recorded, some things of the model answer differently. An attribute that holds an
optimizer, or a list or dict of them, answers with a stand-in: it passes on everything but three
calls. `scale_loss` folds the microbatch's weight into the loss; `apply` and `apply_gradients` hand
the gradients to the recording instead of updating. The compiled loss answers with a copy that notes
what each loss averages over. And the losses that layers add are noted where they are summed up. So
Keras's own `train_step` runs as it is, in every release, and so does a user's own, with several
optimizers too. Where logs wait for the full batch, metrics in attributes have stand-ins as well:
see `_logs`.

The recording is kept per thread: replicas of a strategy are traced in threads of their own, and a
callback's thread that reads `model.optimizer` meanwhile gets the optimizer itself.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import tensorflow as tf

from ga_model.base import _validate
from ga_model.base._context import graph_being_made
from ga_model.base._identity import is_in
from ga_model.base._internals import raw
from ga_model.base._internals_tf import OF_TRACKING
from ga_model.base._messages import batch_normalization_messages
from ga_model.hearing import _messages, _weights
from ga_model.hearing._metric_calls import waiting
from ga_model.hearing._models import is_of_keras, optimizers_in, recording_of_thread
from ga_model.hearing._position import Position
from ga_model.hearing._stand_ins import stand_in
from ga_model.reading._loss_reading import DoesNotAddUpError
from ga_model.reading._place import place_of
from ga_model.reading._tapes import heard
from ga_model.reading._writes import NOTHING, Writes, left_out, used_in
from ga_model.recording import _logs
from ga_model.recording._custom_gradients import messages_of_custom_gradients
from ga_model.recording._logged_numbers import LoggedNumbers, Mean
from ga_model.recording._losses import StepLosses
from ga_model.recording._metric_values import tell_of_numbers
from ga_model.recording._normalization import names_by_fate
from ga_model.recording._updates import Updates
from ga_model.replicas import _optimizers
from ga_model.sums import _sums
from ga_model.sums._one_gradient import scaled
from ga_model.sums._sums import GradientSum


class Target(NamedTuple):
    """One optimizer that a step applied, and the variables it was to update.

    Attributes:
        optimizer: the optimizer.
        variables: the variables.
        least: what the sum of weights counts as at least, or None where the loss is a sum, so that
            its gradients are not divided.
        in_pairs: whether the step called `apply_gradients`, which the optimizer may override.
    """

    optimizer: Any
    variables: list[Any]
    least: float | None
    in_pairs: bool = False


class Recording:
    """The gradients that one `train_step` applies, by optimizer.

    Args:
        model: the model that is recorded.
        data: the microbatch, as `train_step` gets it.
        position: where it stands in its window.
        is_trial: whether the step may do what cannot be accumulated, as no update follows.

    Attributes:
        targets, sums: an entry per optimizer, in the order in which they were applied.
        given: of each of them, the gradients that it was given.
        metrics: what metrics got that waits for the full batch.
        losses: what is known of the step's losses.
        numbers: what is known of the numbers that it logs.
        updates: when the step has applied optimizers.
        applies_at_once: whether optimizers are applied where the step does so. A step of the user's
            own may go on with what it has updated.
        updated, before: variables that it updated so, and are not the model's; and if that may be
            undone their values before.
        logs: what the step has returned.
    """

    def __init__(self, model: Any, data: Any, position: Position, is_trial: bool = False) -> None:
        self.model = model
        self._is_trial = is_trial
        self.targets: list[Target] = []
        self.sums: list[GradientSum] = []
        self.given: list[list[Any]] = []
        self.metrics = _logs.MetricCalls()
        self._position = position
        self.losses = StepLosses(model, data, position, is_trial)
        self.numbers = LoggedNumbers(model, self.losses, position.is_first)
        self._graph = self.losses.graph
        self.updates = Updates(model.name, self._graph)
        self.applies_at_once = position.is_update and not is_of_keras(model, "train_step")
        self.updated: list[Any] = []
        self.before: list[Any] = []
        self._passed_on: list[Any] = []  # losses, to optimizers
        self._folded: dict[int, tuple[_weights.LossTerms, _sums.Weight]] = {}
        self._scaled: list[tuple[Any, Any, Any]] = []  # by optimizers: losses, and what they gave
        self.logs: Any = None
        is_to_read = not is_trial and model._accumulation.is_to_read_writes()
        self._writes = Writes(model) if is_to_read else None

    def stand_in(self, value: Any) -> Any:
        """Return what stands in for an attribute's value: optimizers, also in lists and dicts.

        Where logs wait for the full batch, metrics have a stand-in too.
        """
        return stand_in(value, self, self.metrics if self._position.defers_logs else None)

    def is_split(self) -> bool:
        """Return whether the step runs on one of several microbatches of a batch."""
        return self._position.whole is not None

    def observed_loss(self, compiled: Any) -> Any:
        """Return a copy of the compiled loss that notes its terms, always the same one."""
        return self.losses.observed(compiled, self.metrics)

    def mean_of(self, value: Any, metric: Any = None, term: Any = None) -> Mean:
        """Return what a scalar counts in the mean over the microbatches of a window.

        Args:
            value: scalar tensor, of this microbatch.
            metric: what it is for, if it is a metric's.
            term: the loss term that it is the value of, or None.
        """
        is_loss = any(value is loss for loss in self._passed_on)
        return self.numbers.mean_of(value, metric, term, is_loss)

    def scale_loss(self, optimizer: Any, loss: Any) -> Any:
        """Fold the microbatch's weight into the loss, then scale it as the optimizer does."""
        self._passed_on.append(loss)
        losses = [self.losses.heard.read(loss)] if self.losses.reads_step else None
        is_first = tf.equal(self.unit(optimizer), 0.0)
        terms, factor = self.losses.terms_of(losses, is_first)
        weight = self._in_unit(optimizer, terms.weight)
        self._folded[id(optimizer)] = (terms, weight)
        folded = terms.fold(loss, weight.relative, is_first)
        folded = folded if factor is None else scaled(folded, factor)
        # The gradient is that of the folded loss, and the value, which may be logged, the loss's.
        passed_on = tf.stop_gradient(loss - folded) + folded
        result = optimizer.scale_loss(passed_on)
        if self.losses.reads_step:
            self.losses.heard.note_same(result, loss)
        self._passed_on.append(result)
        self._scaled.append((optimizer, loss, result))
        return result

    def is_folded(self, optimizer: Any) -> bool:
        """Return whether a loss was passed through `scale_loss` of an optimizer."""
        return id(optimizer) in self._folded

    def before_scaling(self, optimizer: Any, result: Any) -> Any:
        """Return the one loss of which an optimizer's `scale_loss` gave `result`, or None."""
        found = [entry for entry in self._scaled if entry[0] is optimizer]
        return found[0][1] if len(found) == 1 and found[0][2] is result else None

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
                parts = tf.math.divide_no_nan(
                    whole.rows(), tf.cast(self.losses.num_rows(), tf.float64)
                )
                number = tf.cast(self._position.steps, tf.float64) * parts
        return _sums.in_unit(weight, self.unit(optimizer), number)

    def apply(
        self,
        optimizer: Any,
        gradients: Sequence[Any],
        variables: Sequence[Any],
        in_pairs: bool = False,
    ) -> None:
        """Keep the gradients of an `optimizer.apply`, or `apply_gradients` if they are in pairs."""
        if self._graph not in (None, graph_being_made()):
            raise RuntimeError(_messages.inner_graph_message(self.model.name))
        is_again = any(t.optimizer is optimizer for t in self.targets)
        if is_again and not (self._is_trial or self.applies_at_once):
            raise RuntimeError(_messages.applied_twice_message(self.model.name, optimizer.name))
        _validate.check_single_accumulation([optimizer], self.model.accumulation_steps)
        _validate.check_single_finite_check([optimizer], self.model.skip_nonfinite)
        with tf.init_scope() if self._position.is_trial else contextlib.nullcontext():
            _optimizers.build(optimizer, variables)
        is_folded, factor, given = id(optimizer) in self._folded, None, gradients
        if is_folded:
            terms, weight = self._folded[id(optimizer)]
        else:
            losses = self.losses.heard.losses_of(gradients) if self.losses.reads_step else None
            is_first = tf.equal(self.unit(optimizer), 0.0)
            terms, factor = self.losses.terms_of(losses, is_first)
            if not terms.is_plain:
                self.losses.tell(_messages.not_scaled_message(self.model.name))
            weight = self._in_unit(optimizer, terms.weight)
            if factor is not None:
                gradients = [scaled(gradient, factor) for gradient in gradients]
        is_sum = terms.weight is None
        if self.losses.reads_step:
            is_weighted_here = not is_folded and not is_sum and factor is None
            with self.losses.reading():
                self._warn_of_work_on(given, is_weighted_here)
                for message in self.updates.messages_of_gradients(optimizer, given):
                    self.losses.tell(message)
        noise_of = None if self.model._accumulation.measured_noise is None else optimizer
        if noise_of is not None and is_sum:
            raise ValueError(_messages.noise_of_sum_message(self.model.name))
        least = None if is_sum else terms.least
        self.targets.append(Target(optimizer, list(variables), least, in_pairs))
        self.given.append(list(given))
        self.updates.add(optimizer, list(variables))
        if self.applies_at_once:
            self._update(optimizer, given, variables, in_pairs)
        scale = not (is_folded or is_sum)
        self.sums.append(GradientSum.of(list(gradients), variables, weight, scale, noise_of))

    def _update(self, optimizer: Any, gradients: Any, variables: Any, in_pairs: bool) -> None:
        """Update at once, and keep the values of before."""
        if self.model.skip_nonfinite:
            known = {id(variable) for variable in (*self.model.variables, *self.updated)}
            new = [v for v in (*variables, *optimizer.variables) if id(v) not in known]
            self.updated += new
            self.before += [tf.identity(variable) for variable in map(raw, new)]
        _optimizers.apply(optimizer, list(gradients), list(variables), in_pairs)

    def _warn_of_work_on(self, gradients: Sequence[Any], may_shift: bool) -> None:
        """Warn if the step has made something of gradients that a sum of them does not give.

        Args:
            gradients: as the step applies them.
            may_shift: whether something may be added to them, because their weights come after it.
        """
        work = self.losses.heard.work_on(gradients)
        if work.breaks is not None:
            self.losses.tell(_messages.worked_over_message(self.model.name, place_of(work.breaks)))
        elif work.shifts is not None and not may_shift:
            self.losses.tell(_messages.shifted_message(self.model.name, place_of(work.shifts)))

    def check_complete(self) -> None:
        """Check that the step did nothing that is done once per update, but to its optimizers.

        Raises:
            RuntimeError: it applied an optimizer past the recording, or none.
            DoesNotAddUpError: it can run on the full batch, and does what is exact only there.

        Warns:
            UserWarning: it wrote to variables, or BatchNormalization layers did; or a layer has a
                gradient of its own that is not linear; or gradients follow from metrics.
        """
        if self._is_trial:
            return
        attributes = {
            name: optimizers
            for name, value in vars(self.model).items()
            if not name.startswith(OF_TRACKING) and (optimizers := optimizers_in(value))
        }
        known = [t.optimizer for t in self.targets]
        known += [optimizer for optimizers in attributes.values() for optimizer in optimizers]
        waiting = [v for update in self.metrics.updates for v in update.metric.variables]
        applied_at = self.updates.by_optimizer()
        may_apply = self._position.is_update  # the step then runs once per update
        written = NOTHING
        if self._writes is not None:
            with self.losses.reading():
                written = self._writes.read(known, applied_at, waiting, may_apply)
        names = [optimizer.name for optimizer in written.optimizers]
        if names or (not self.targets and self.model.trainable_weights):
            if self._writes is not None:
                self._writes.undo()
            at = [
                n for n, has in attributes.items() if any(is_in(o, has) for o in written.optimizers)
            ]
            raise RuntimeError(_messages.not_recorded_message(self.model.name, names, at))
        if self._position.is_update:
            return
        if self.losses.heard.has_failed:
            self.losses.tell(_messages.unread_loss_message(self.model.name))
        if self._graph is not None:
            with self.losses.reading():
                for message in messages_of_custom_gradients(self._graph, self.model.name):
                    self.losses.tell(message)
        if written.others and self._position.must_add_up:
            raise DoesNotAddUpError
        for message in batch_normalization_messages(*names_by_fate(written.normalization)):
            self.model._warn_once(message)
        if written.others:
            self.losses.tell(_messages.written_message(self.model.name, written.others))
        if self._graph is not None:
            with self.losses.reading():
                self._warn_of_values(written.metrics)

    def _warn_of_values(self, written: list[Any]) -> None:
        """Warn of what metrics and logs get, and give.

        Args:
            written: variables of metrics that were written to.
        """
        self._warn_of_metrics(written)
        if self._writes is not None:
            tell_of_numbers(self, self._writes.values_for)
        of_metrics = [] if self._writes is None else self._writes.values_for(written)
        waiting = [update.value for update in self.metrics.updates]
        for message in self.updates.messages_of_values([of_metrics, waiting, self.logs]):
            self.model._warn_once(message)

    def _warn_of_metrics(self, variables: list[Any]) -> None:
        """Warn if gradients follow from metrics, of which these variables were written to."""
        used = used_in(self._graph, variables, self.given)
        if used:
            self.losses.tell(_messages.metrics_used_message(self.model.name, sorted(set(used))))


def note_call(tensors: Any, losses: Sequence[Any] = (), is_sum: Sequence[bool] = ()) -> None:
    """Note what a call that went by microbatches gave, if the step is read.

    Args:
        tensors: tensors that have an entry of axis 0 for each sample.
        losses: what layers added.
        is_sum: whether each of them is a sum over samples, and no mean.
    """
    if (recording := recording_of_thread.get()) is not None:
        recording.losses.note_call(tensors, losses, is_sum)


@contextlib.contextmanager
def record(
    model: Any, data: Any, position: Position, is_trial: bool = False
) -> Iterator[Recording]:
    """Record the step of `model` that runs in this thread.

    Args:
        model, data, position, is_trial: as `Recording` takes them.
    """
    recording = Recording(model, data, position, is_trial)
    calls = recording.metrics if position.defers_logs else None
    with recording_of_thread.set(recording), left_out.set([]), waiting(calls):
        with (
            recording.losses.listening(),
            heard(recording.losses.heard)
            if recording.losses.reads_step
            else contextlib.nullcontext(),
        ):
            yield recording
        recording.check_complete()
