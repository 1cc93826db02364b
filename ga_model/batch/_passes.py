"""The forward and backward passes of one batch, and the sum of its microbatches.

The first microbatch runs before the loop over the others: what a first call creates (layers,
metrics, an optimizer's variables) cannot be created inside a loop, and the first sum tells what
the loop carries. All go through one `tf.function`, so the user's step is traced once.

Under XLA that function is compiled, and the loop is not: with it in the cluster, a batch takes many
times as long. A batch that is not split is added to its window in the function, where XLA makes one
pass over the buffers of it.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

from ga_model.base._internals import compiled_loss, is_built, stateless_scope
from ga_model.base._messages import late_gradient_message
from ga_model.base._numbers import power_of_two
from ga_model.batch import _messages
from ga_model.batch._look_ahead import look_ahead
from ga_model.batch._nonfinite import undone_if_left_out
from ga_model.batch._part import Part
from ga_model.batch._window import Window
from ga_model.calls._calls import split_calls
from ga_model.graphs._loop import loop
from ga_model.graphs._microbatch import Batch
from ga_model.hearing import _weights
from ga_model.hearing._models import (
    computes_loss_as_keras,
    is_of_keras,
    optimizers_in,
    unpack,
    unrecorded,
)
from ga_model.hearing._position import Position
from ga_model.hearing._python_state import python_state
from ga_model.reading._loss_reading import DoesNotAddUpError, is_known
from ga_model.reading._numbers_in_code import Numbers, unlike
from ga_model.reading._place import place_of
from ga_model.recording._code_of_user import has_code_of_user
from ga_model.recording._logs import BatchLogs
from ga_model.recording._normalization import Call, heard_layers, in_order, listening, pass_on
from ga_model.recording._recorder import Recording, Target, record
from ga_model.replicas import _optimizers, _strategy
from ga_model.sums._moments import Moments


def calls_by_microbatches(model: Any, batch: Batch, limit: int | None = None) -> Any:
    """Return the context in which calls of layers go by microbatches, if there may be several."""
    if not batch.is_long:
        return contextlib.nullcontext()
    return split_calls(model, batch.rows, batch.size, limit)


class Passes:
    """The forward and backward passes of one batch.

    Args:
        model, train_step, window: as `_step.run` takes them.
        batch: the batch.
        trial_of: None, or for a trial without an update, how many microbatches of a batch that is
            whole run.

    Attributes:
        targets: what the step applies, known when a microbatch was recorded.
        logs: how the logs of the batch are put together, if they wait; known then, too.
        statistics: calls of BatchNormalization layers, those of the parts' `moments`; also then.
        are_applied: whether the step has applied them itself; also then.
        updated: variables that it has updated so, those of the parts' `before`.
    """

    def __init__(
        self,
        model: Any,
        train_step: Callable[[Any], Any],
        batch: Batch,
        window: Window | None,
        trial_of: int | None = None,
    ) -> None:
        self.targets: list[Target] = []
        self._present: list[list[bool]] = []  # which gradients of the targets are not None
        self.logs: BatchLogs | None = None
        self.statistics: list[Call] = []
        self.are_applied = False
        self.updated: list[Any] = []
        self._model = model
        self._train_step = train_step
        self._batch = batch
        self._optimizers = optimizers_in(vars(model))
        self._units: list[Any] = [tf.zeros((), tf.float64) for _ in self._optimizers]
        self._steps: Any = tf.ones((), tf.int64)
        self._parts: Any = tf.ones((), tf.float64)
        has_others = _strategy.num_replicas() > 1
        # Replicas have to communicate alike, however many rows each has.
        self._is_part = batch.is_split or (has_others and model._accumulation.size is not None)
        self._is_window = window is None and not batch.is_split and not has_others
        self._splits_calls = batch.is_whole and batch.is_long
        self._trial_of = trial_of
        self._numbers: Numbers = {}  # in the user's code, of a step that is drawn once more
        self._is_drawn_again = False
        self._window: Any = window
        # With replicas, it would be a replica's function that writes a variable of all.
        self._adds_in_cluster = (
            window is not None
            and model.jit_compile
            and not (batch.is_split or has_others or tf.executing_eagerly())
            and not self._splits_calls
        )
        self._num_before: Any = tf.zeros((), tf.int64)
        if window is not None:
            self._num_before = window.logs.num_counted()
            self._steps, self._parts = window.steps.read_value(), window.parts.read_value()
            self._units = [window.unit(optimizer) for optimizer in self._optimizers]
        self._num_microbatches = tf.cast(self._steps * batch.num_microbatches, tf.float64)
        if batch.is_split:
            self._parts *= power_of_two(batch.num_microbatches)
        self._whole: _weights.Whole | None = None
        if self._is_part:
            self._whole = look_ahead(model, batch, window is None)

    def sum_over_microbatches(self) -> Part:
        """Return the sums of the batch."""
        batch, microbatch = self._batch, self._in_graph()
        if self._model.skip_nonfinite:
            microbatch = undone_if_left_out(
                self._model, microbatch, self._microbatch, lambda: self.updated
            )
        zero = tf.zeros((), tf.int64)
        self._build_if_needed()
        if tf.executing_eagerly() and batch.is_split and self._model._accumulation.must_add_up():
            self._read_loss()
        elif tf.executing_eagerly() and (batch.is_split or self._window is not None):
            self._read_step()
        part = microbatch(zero, self._units, batch.microbatch(zero))
        if not batch.is_split:
            return part  # type: ignore[no-any-return]
        begun = [s.begin(target.variables) for s, target in zip(part.sums, self.targets)]
        part = part._replace(sums=begun)

        def add(index: Any, part: Part) -> Part:
            units, leaves = self._units_of(part), batch.microbatch(index)
            return part.plus(microbatch(part.num_counted, units, leaves), self.targets)

        return loop(add, part, batch.num_microbatches)  # type: ignore[no-any-return]

    def _build_if_needed(self) -> None:
        """Create weights and metrics where something needs them before they are trained."""
        accumulation = self._model._accumulation
        if self._batch.is_split and accumulation.must_add_up() and not accumulation.is_proved:
            if not is_built(self._model, [*self._model.metrics, compiled_loss(self._model)]):
                is_eager = tf.executing_eagerly()  # what cannot be drawn is then not given up
                with contextlib.suppress(Exception) if is_eager else contextlib.nullcontext():
                    self._build()
        elif not is_built(self._model) and any(
            map(_optimizers.begins_with_values, self._optimizers)
        ):
            with contextlib.suppress(Exception):  # of a model that only its step knows how to call
                self._build()

    def _build(self) -> None:
        """Create weights and metrics: in a graph that is given up they would get no values."""

        def call(leaves: list[Any]) -> list[Any]:
            x, y, sample_weight = unpack(self._batch.pack(leaves))
            with unrecorded():
                outputs = self._model(x)
                if computes_loss_as_keras(self._model):
                    loss = compiled_loss(self._model)
                    if loss is not None:  # which tracks the losses of several outputs
                        loss(y, outputs, sample_weight)
                    self._model.compute_metrics(x, y, outputs, sample_weight)
            return [leaf for leaf in tf.nest.flatten(outputs) if tf.is_tensor(leaf)]

        draw, batch = tf.function(call, autograph=False), self._batch
        try:
            draw.get_concrete_function(batch.signature_of(None))
        except Exception:  # of code that computes with a number of samples
            if batch.static_rows is None:
                raise
            draw.get_concrete_function(batch.signature_of(batch.static_rows))

    def _draw_microbatch(self, rows: int | None = None) -> None:
        """Draw a microbatch of so many samples, or of any number, in a graph that does not run."""
        units = [tf.TensorSpec((), tf.float64)] * len(self._units)
        leaves = self._batch.signature_of(rows)
        draw = tf.function(self._microbatch, autograph=False)
        draw.get_concrete_function(tf.TensorSpec((), tf.int64), units, leaves)

    def _read_step(self) -> None:
        """Tell of what does not add up in an eager step, once what a first batch creates is there.

        That is custom gradients, losses and metrics.
        """
        model, accumulation = self._model, self._model._accumulation
        if accumulation.has_read_step:
            return
        if not (is_built(model, model.metrics) and all(o.built for o in self._optimizers)):
            return
        accumulation.has_read_step = True
        # A step of the user's own may keep more than what can be put back.
        if not (has_code_of_user(model) and is_of_keras(model, "train_step")):
            return
        state = python_state(model)
        try:
            self._draw_microbatch()
        except (DoesNotAddUpError, Warning):
            raise
        except Exception as error:  # of a step that runs eagerly only
            model._warn_once(_messages.unread_step_message(model.name, error))
        finally:
            self.targets = []
            state.put_back()

    def _read_loss(self) -> None:
        """Raise DoesNotAddUpError if the loss is not known to add up, before anything runs."""
        if self._model._accumulation.has_read_loss:
            return
        try:
            self._draw_microbatch()
        except DoesNotAddUpError:
            raise
        except Exception as error:  # of a step that runs eagerly only
            if not all(map(is_known, keras.tree.flatten(self._model.loss))):
                raise DoesNotAddUpError from error
        self.targets = []
        self._model._accumulation.has_read_loss = True

    def _tell_of_numbers(self, recording: Recording) -> None:
        """Warn of numbers in the user's code that follow from that of the samples, which is known.

        The step is drawn for three times as many, and what differs then is looked at once more for
        the same number of samples: it might differ each time.
        """
        self._numbers = recording.losses.numbers()
        rows = recording.losses.heard.known_rows()
        if self._is_drawn_again or rows is None or not self._numbers:
            return
        changed = list(unlike(self._numbers, self._numbers_for(3 * rows), 3))
        if changed:
            again = {id(number) for number in unlike(self._numbers, self._numbers_for(rows), 1)}
            for number in changed:
                if number.counts or id(number) not in again:
                    args = (number.value, place_of(number.op), rows)
                    recording.losses.tell_of_number(*args, number.counts)

    def _numbers_for(self, rows: int) -> Numbers:
        """Return the numbers in the code of a step for so many samples: its own, if it has none."""
        drawn, state = copy.copy(self), python_state(self._model)
        drawn.targets, drawn._is_drawn_again = [], True
        try:
            with self._model._accumulation.holding_back():
                drawn._draw_microbatch(rows)
        except Exception:  # of code that takes no other number of samples
            return self._numbers
        finally:
            state.put_back()
        return drawn._numbers

    def _in_graph(self) -> Any:
        """Return `_microbatch`, as a function that is traced once where a graph is made."""
        is_split, jit_compile = self._batch.is_split, self._model.jit_compile
        if tf.executing_eagerly() or not (is_split or jit_compile) or self._splits_calls:
            return self._microbatch  # of which the calls of layers are compiled
        function = self._added_microbatch if self._adds_in_cluster else self._microbatch
        unit = tf.TensorSpec((), tf.float64)
        signature = [tf.TensorSpec((), tf.int64), [unit] * len(self._units), self._batch.signature]
        return tf.function(
            function,
            input_signature=signature if is_split else None,
            autograph=False,
            jit_compile=jit_compile or None,
        )

    def add_to_window(self, part: Part) -> None:
        """Add the sums of the batch to the window, where that is not done yet."""
        add = self._window.add_rest if self._adds_in_cluster else self._window.add
        has_counted = tf.greater(part.num_counted, 0)
        for target, gradients in zip(self.targets, part.sums):
            add(target, gradients, has_counted)

    def make_buffers(self, part: Part) -> None:
        """Let the window have what `add_to_window` will add to."""
        for target, gradients in zip(self.targets, part.sums):
            self._window.make_buffers(target, gradients)

    def _added_microbatch(self, num_counted: Any, units: list[Any], leaves: list[Any]) -> Part:
        """Run a microbatch, and add it to the window but for what it then returns."""
        part = self._microbatch(num_counted, units, leaves)
        rest = [self._window.add_compiled(t, s) for t, s in zip(self.targets, part.sums)]
        return part._replace(sums=rest)

    def _microbatch(self, num_counted: Any, units: list[Any], leaves: list[Any]) -> Part:
        """Run the model's step on one microbatch, and return what it applies and logs.

        Args:
            num_counted: int64 scalar tensor, microbatches of the batch that have counted before.
            units: of each optimizer's sum so far.
            leaves: the data.
        """
        model = self._model
        position = Position(
            list(zip(self._optimizers, units)),
            self._steps,
            self._num_microbatches,
            self._parts,
            tf.equal(num_counted + self._num_before, 0),
            self._whole,
            self._is_window,
            is_update=self._window is None and not self._batch.is_split,
            defers_logs=self._window is not None or self._is_part or model.skip_nonfinite,
            can_be_whole=self._batch.is_split and model.loss_over == "auto",
            must_add_up=self._batch.is_split
            and model._accumulation.must_add_up()
            and not model._accumulation.is_proved,
        )
        data, calls = self._batch.pack(leaves), contextlib.nullcontext()
        if self._splits_calls:
            calls = calls_by_microbatches(model, self._batch, self._trial_of)
        is_trial = self._trial_of is not None
        # A batch that is an update by itself moves running averages as plain Keras does; a scope
        # that keeps variables from being written keeps these, too.
        is_heard = not position.is_update and stateless_scope() is None
        with heard_layers(model), listening(is_heard) as hears:
            with record(model, data, position, is_trial) as recording, calls:
                logs = recording.logs = self._run_step(data, position.must_add_up)
            found = ([], []) if hears is None else hears.heard()
        if not tf.executing_eagerly():
            with recording.losses.reading():
                self._tell_of_numbers(recording)
        moments = self._in_order(*found)
        self._note_targets(recording)
        part = Part(
            recording.sums,
            [],
            logs,
            tf.ones((), tf.int64),
            recording.losses.row_counts,
            recording.losses.lost,
            moments,
            recording.before,
        )
        self.updated, self.are_applied = recording.updated, recording.applies_at_once
        if position.defers_logs:
            self.logs = BatchLogs(recording, logs)
            part = part._replace(logged=self.logs.sums, last=self.logs.last)
        if model.skip_nonfinite:
            part = part.if_finite([recording.unit(target.optimizer) for target in self.targets])
        return part

    def _run_step(self, data: Any, must_add_up: bool) -> Any:
        """Run the model's step.

        Raises:
            DoesNotAddUpError: it fails, and may not on a full batch, whose samples are known.
        """
        try:
            return self._train_step(data)
        except Exception as error:
            is_known = self._batch.static_rows is not None
            if not (must_add_up and is_known) or self._model.run_eagerly:
                raise
            raise DoesNotAddUpError from error

    def move_statistics(self, part: Part) -> None:
        """Move the running averages of BatchNormalization by the statistics of the batch."""
        pass_on(self.statistics, part.moments)

    def _in_order(self, calls: list[Call], moments: list[Moments]) -> list[Moments]:
        """Return the moments of a microbatch, one for each of the `statistics`."""
        if not self.targets:  # of the first microbatch
            self.statistics = calls
        ordered = in_order(self.statistics, calls, moments)
        if ordered is None:
            raise RuntimeError(_messages.changing_calls_message(self._model.name))
        return ordered

    def _note_targets(self, recording: Recording) -> None:
        """Keep what a microbatch applies. In eager mode the next one might apply something else."""
        targets, sums = recording.targets, recording.sums
        present = [[value is not None for value in s.values()] for s in sums]
        if self.targets:
            if [id(t.optimizer) for t in targets] != [id(t.optimizer) for t in self.targets]:
                raise RuntimeError(_messages.changing_targets_message(self._model.name))
            late = [
                variable
                for target, *flags in zip(targets, self._present, present)
                for variable, before, now in zip(target.variables, *flags)
                if now and not before
            ]
            if late:
                raise RuntimeError(late_gradient_message(late))
        else:
            self._present = present
        self.targets = targets

    def _units_of(self, part: Part) -> list[Any]:
        known = {id(target.optimizer): s.unit for target, s in zip(self.targets, part.sums)}
        return [known.get(id(o), unit) for o, unit in zip(self._optimizers, self._units)]
