"""Record the gradients and the loss of an unchanged `train_step`.

As on TensorFlow (`recording/_recorder.py`): attributes of the model answer with stand-ins while a
step is recorded. Beside that, gradients are heard where PyTorch takes them, in steps of the user's
own: the weight is folded into the loss there if it was not before, and what the step then applies
has to be what PyTorch gave.

Where Keras's own step runs, the window's sum is in `.grad` itself, and costs no buffer: PyTorch
adds to it, and `zero_grad` does nothing.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import keras
import torch

from ga_model.base import _validate
from ga_model.base._identity import is_in
from ga_model.base._internals import raw
from ga_model.core import messages
from ga_model.hearing import _messages
from ga_model.hearing._compiled_copy import copy_with
from ga_model.hearing._metric_calls import MetricCalls, waiting
from ga_model.hearing._models import recording_of_thread
from ga_model.hearing._stand_ins import stand_in
from ga_model.torch_engine import _refusals
from ga_model.torch_engine._autograd import heard, unheard
from ga_model.torch_engine._divisors import divisors_of
from ga_model.torch_engine._gradient_hooks import not_linear_hook, noting_hooks
from ga_model.torch_engine._late_values import exchange
from ga_model.torch_engine._left_gradients import LeftGradients
from ga_model.torch_engine._observer import observer_of
from ga_model.torch_engine._optimizer_writes import OptimizerWrites, refusing_others, variables_of
from ga_model.torch_engine._own_gradients import not_linear
from ga_model.torch_engine._part import Part
from ga_model.torch_engine._state import clear_gradients
from ga_model.torch_engine._step_probe import UnknownLossError
from ga_model.torch_engine._tensors import WrittenSince
from ga_model.torch_engine._terms import Position, StepLosses


class Recording:
    """What one `train_step` applies and logs.

    Args:
        model: the model that is recorded.
        data: the microbatch, as `train_step` gets it.
        position: where it stands in its window.
        keeps_gradients: whether the window's sums are in `.grad`, where the microbatch adds to
            them.

    Attributes:
        parts: gradients, for each optimizer in the order in which they were applied.
        relative_weight: what the microbatch counts, in the window's unit, or None: it is a sum. 0.0
            if it is left out: its gradients may be NaN, and are multiplied with nothing.
        metrics: what metrics got that waits for the full batch.
        losses: what is known of the step's losses.
        registered_hooks: pairs of a tensor that the step has computed, and a hook on its gradient.
        divisors: of each loss that the step takes the gradient of, where it is tried.
        is_worked_over: whether other gradients are applied than PyTorch gave, where it is tried.
        writes: what is told of updates, or None.
        left: what is told of gradients that are added to others, or None.
        exchanged: what is exchanged for something else where it is to be updated, or None.
        is_late: whether the step takes a gradient after it has applied an optimizer.
        applies_at_once: whether optimizers are applied where the step does so. A step of the user's
            own may go on with what it has updated.
        before: of what it has updated so, and is not the model's, pairs of variable and value
            before.
        is_finite: whether it was with finite gradients.
    """

    def __init__(self, model: Any, data: Any, position: Position, keeps_gradients: bool) -> None:
        self.model = model
        self.keeps_gradients = keeps_gradients
        self.parts: list[Part] = []
        self.relative_weight: float | None = None
        self.metrics = MetricCalls()
        self._position = position
        self.losses = StepLosses(model, data, position)
        self.registered_hooks: list[tuple[Any, Any]] = []
        self.divisors: list[list[float]] = []
        self.is_worked_over = False
        self.writes: OptimizerWrites | None = None
        self.left: LeftGradients | None = None
        self.exchanged: str | None = None
        self.is_late = False
        self.applies_at_once = False
        self.before: list[tuple[Any, Any]] = []
        self.is_finite = True
        self._folded: list[Any] = []  # losses as they enter the sum
        self._taken: list[Any] = []  # losses as the step has them
        self._given: dict[Any, _Gradient] = {}  # as PyTorch gave them, by their place
        self._unfolded: Any = None  # a loss, until its gradient is there
        self._folded_late: dict[int, list[Any]] = {}  # when that was applied, by the loss's id

    def stand_in(self, value: Any) -> Any:
        """Return what stands in for an attribute's value: optimizers, also in lists and dicts.

        Where logs wait for all microbatches, metrics have a stand-in too.
        """
        return stand_in(value, self, self.metrics if self._position.defers_logs else None)

    def observed_loss(self, compiled: Any) -> Any:
        """Return a copy of the compiled loss that notes its terms."""
        copies = self.model._accumulation.compiled_copies
        key = (id(compiled), self._position.defers_logs)
        if key not in copies:
            copies[key] = _CompiledCopy(self.model, compiled, self._position.defers_logs)
        return copies[key].of(self)

    def mean_of(
        self, value: Any, metric: Any = None, term: Any = None, key: Any = None
    ) -> tuple[Any, float]:
        """Return what a scalar counts in the mean over the microbatches of a window.

        Args:
            value: scalar, of this microbatch.
            metric: what it is for, if it is a metric's.
            term: the loss term that it is the value of, or None.
            key: by which it is known what it is over samples.
        """
        is_loss = term is None and self.is_loss(value, metric, key)
        kind = None if is_loss or term else self.model._accumulation.numbers.kind_of_sum(key)
        return self.losses.mean_of(value, metric, term, is_loss, kind)

    def is_loss(self, value: Any, metric: Any = None, key: Any = None) -> bool:
        """Return whether a number is a loss of the step, or what Keras tracks of it.

        Args:
            value: the number.
            metric: what it is for, if it is a metric's.
            key: by which it is known what it is over samples.
        """
        losses = [*self.losses.totals, *self._taken]
        if self.losses.is_total(metric) or any(_is_loss(value, loss) for loss in losses):
            return True
        is_equal = any(_is_value_of(value, loss) for loss in losses)
        is_zero = is_equal and not bool(value)
        return bool(self.model._accumulation.numbers.is_loss(key, is_equal, is_zero))

    def scale_loss(self, optimizer: Any, loss: Any) -> Any:
        """Fold the microbatch's weight into the loss, then scale it as the optimizer does."""
        folded = self._fold(loss)
        if folded is not loss:
            # Its gradient is that of the folded loss, and its value, which may be logged, not.
            folded = folded + (loss - folded).detach()
        result = optimizer.scale_loss(folded)
        self._folded.append(result)
        self._taken.append(result)
        return result

    def _fold(self, loss: Any) -> Any:
        """Return a loss as it enters the window's sum."""
        probe = self.model._accumulation.step_probe
        if self._position.is_window:  # of which nothing is divided
            if probe.is_trying or self.model._accumulation.numbers.is_trying:
                self.divisors.append(divisors_of(loss))
            return loss
        self._taken.append(loss)
        self._look_at_gradients(loss)
        if not (self._position.window.is_trial or self.losses.is_known(loss)):
            raise UnknownLossError
        if probe.kind is not None:
            loss = self.losses.note_tried(loss)
        terms, window = self.losses.terms(), self._position.window
        if terms.regularization and window.processes is not None:
            raise ValueError(messages.sum_with_regularizers_message(self.model.name))
        if terms.weight is None and self.model._accumulation.measured_noise is not None:
            raise ValueError(_messages.noise_of_sum_message(self.model.name))
        relative = window.relative_weight(terms.weight, self._position.parts)
        self.relative_weight = None if terms.weight is None else relative
        if self.relative_weight == 0.0:
            if self.keeps_gradients:
                clear_gradients(self.model)  # the window has the sums, which nothing is added to
            return loss
        return terms.fold(loss, relative, self.losses.is_first_of_window)

    def _look_at_gradients(self, loss: Any) -> None:
        """Find out once whether all gradients are linear, and tell if they are not."""
        accumulation = self.model._accumulation
        if not accumulation.has_looked_at_gradients:
            rows = self.losses.num_rows()
            rule = not_linear_hook(self.model, self.registered_hooks, rows)
            if (name := not_linear([loss], rows)) is not None:
                rule = f"the `torch.autograd.Function` {name!r}"
            if rule is not None:
                self.losses.tell(_messages.own_gradient_message(self.model.name, rule))
            accumulation.has_looked_at_gradients = True  # else it is done on the full batch

    def take_gradient(self, losses: Any, may_go_on: bool = False) -> Any:
        """Return the losses that a step takes gradients of, as they enter the window's sum.

        Args:
            losses: a tensor, or several.
            may_go_on: whether the gradients may be differentiated, and not applied. Then losses
                enter the sum where they are.
        """
        if self.parts and not self._position.is_window:  # computed with what is updated later now
            self.is_late = True
            if not self._position.defers_logs:  # else it is found out if the order matters
                self.model._warn_once(_refusals.several_optimizers_message(self.model.name))
        if is_in(losses, self._folded):
            return losses
        if may_go_on:
            self._unfolded = losses
            return losses
        if isinstance(losses, (list, tuple)):
            return [self.take_gradient(loss) for loss in losses]
        self._folded.append(self._fold(losses))
        return self._folded[-1]

    def note_backward(self) -> None:
        """Note that the step takes gradients that are added to those that there are."""
        if self.left is not None:
            self.left.note_backward()

    def note_gradients(self, gradients: Any) -> None:
        """Note the gradients that PyTorch gave."""
        is_free = self._is_free()
        if is_free and self._unfolded is None:
            return
        if gradients is None:
            gradients = [raw(v).grad for v in self.model.trainable_variables]
        found = [gradient for gradient in gradients if gradient is not None]
        is_watched = self._position.is_window or self.model._accumulation.is_to_compare()
        has_norms = is_watched and not is_free
        written = WrittenSince(((_place_of(g), g) for g in found), has_norms)
        loss, self._unfolded = self._unfolded, None
        self._given.update((_place_of(g), _Gradient(g, written, loss)) for g in found)

    def apply(
        self,
        optimizer: Any,
        gradients: Sequence[Any],
        variables: Sequence[Any],
        in_pairs: bool = False,
    ) -> None:
        """Keep the gradients of an `optimizer.apply`, or `apply_gradients` if they are in pairs."""
        name = self.model.name
        is_again = any(part.optimizer is optimizer for part in self.parts)
        if is_again and not (self.applies_at_once or self._keeps_nothing()):
            raise RuntimeError(_messages.applied_twice_message(name, optimizer.name))
        _validate.check_single_accumulation([optimizer], self.model.accumulation_steps)
        gradients, variables = list(gradients), list(variables)
        if self.writes is not None:
            self.writes.note_update(optimizer)
        if not (self._is_free() or self._are_as_given(gradients)):
            if not self._is_trying():
                raise RuntimeError(_refusals.worked_over_message(name))
            self.is_worked_over = True
        if self._given and not self.keeps_gradients:
            gradients = [self._as_folded(g, v) for g, v in zip(gradients, variables)]
        if not optimizer.built:
            with keras.name_scope(optimizer.name):
                optimizer.build(variables)
        if self.applies_at_once:
            self._update(Part(optimizer, variables, gradients, in_pairs))
            return
        for variable in variables:  # the gradients are the window's now, the step has copies
            left = None if self.keeps_gradients else raw(variable).grad
            raw(variable).grad = None if left is None else left.detach().clone()
        if self.exchanged is not None:
            exchange(self.exchanged, optimizer, variables)
        if self._keeps_nothing():
            variables, gradients = [], []
        self.parts.append(Part(optimizer, variables, gradients, in_pairs))

    def _update(self, part: Part) -> None:
        """Update at once, and keep the values of before."""
        if self.model.skip_nonfinite:
            self.is_finite = self.is_finite and part.is_finite()
            known = {id(v) for v in (*self.model.variables, *(v for v, _ in self.before))}
            updated = (*part.variables, *variables_of(part.optimizer))
            new = [v for v in updated if id(v) not in known]
            self.before += [(v, raw(v).detach().clone()) for v in new]
        part.update(1.0)
        self.parts.append(part)

    def check_updates(self) -> None:
        """Raise RuntimeError if there are weights to train, and no optimizer is applied to any."""
        if self.model.trainable_weights and not (self.parts or self._keeps_nothing()):
            raise RuntimeError(_refusals.no_update_message(self.model.name))

    def refuse(self, optimizer: Any) -> None:
        """Raise RuntimeError as an optimizer is applied that is no attribute of the model."""
        position = self._position
        if position.num_microbatches > 1 and not position.window.is_trial:
            text = _messages.not_recorded_message(self.model.name, [optimizer.name])
            raise RuntimeError(text)

    def _keeps_nothing(self) -> bool:
        """Return whether a window is only tried: nothing is kept of its updates."""
        return self._position.is_window and self._position.window.is_trial

    def _is_trying(self) -> bool:
        return bool(self.model._accumulation.step_probe.is_trying)

    def _is_free(self) -> bool:
        """Return whether the step may do with gradients what it likes."""
        return self.keeps_gradients or (self._position.is_window and not self._is_trying())

    def _are_as_given(self, gradients: list[Any]) -> bool:
        """Return whether gradients are those that PyTorch gave, as it gave them."""
        found = [self._given_as(gradient) for gradient in gradients if gradient is not None]
        written = {id(g.written): g.written for g in found if g is not None}
        changed = {place for each in written.values() for place in each.names()}
        return not any(g is None or _place_of(g.tensor) in changed for g in found)

    def _given_as(self, gradient: Any) -> _Gradient | None:
        """Return the gradient that one is, or has the values of, as PyTorch gave it."""
        found = self._given.get(_place_of(gradient))
        if found is not None:
            return found
        same = (g for g in self._given.values() if g.tensor.shape == gradient.shape)
        return next((g for g in same if torch.equal(g.tensor, gradient)), None)

    def _as_folded(self, gradient: Any, variable: Any) -> Any:
        """Return a gradient as it enters the window's sum, where its loss did not before."""
        given = None if gradient is None else self._given_as(gradient)
        if given is None or given.loss is None:
            return gradient
        if id(given.loss) not in self._folded_late:
            losses = given.loss if isinstance(given.loss, (list, tuple)) else [given.loss]
            with torch.enable_grad():
                self._folded_late[id(given.loss)] = [self._fold(loss) for loss in losses]
        if self._position.is_window:
            return gradient.detach()
        relative = self.relative_weight
        if self.losses.terms().is_plain or relative == 0.0:
            return gradient.detach() * (1.0 if relative is None else relative)
        folded = self._folded_late[id(given.loss)]
        with unheard(), torch.enable_grad():
            (found,) = torch.autograd.grad(sum(folded), raw(variable), retain_graph=True)
        return found


class _Gradient(NamedTuple):
    """A gradient that PyTorch gave.

    Attributes:
        tensor: the gradient.
        written: tells if it was written to since.
        loss: that it is of, if that is still to be folded, or None.
    """

    tensor: Any
    written: WrittenSince
    loss: Any


def _place_of(tensor: Any) -> str:
    """Return what tells the memory of a tensor from that of others, as `detach` leaves it."""
    memory = tensor.data_ptr() if tensor.layout == torch.strided else id(tensor)
    return f"{memory} {tuple(tensor.shape)} {tensor.layout}"


def _is_loss(value: Any, loss: Any) -> bool:
    """Return whether a number is a loss, or shares its memory, as `loss.detach()` does."""
    return torch.is_tensor(value) and (value is loss or value.data_ptr() == loss.data_ptr())


def _is_value_of(value: Any, loss: Any) -> bool:
    """Return whether a scalar has the value of a loss, as `loss.item()` does."""
    if torch.is_tensor(value) and (value.ndim or value.requires_grad or loss.ndim):
        return False
    return not getattr(value, "shape", ()) and bool(value == float(loss.detach()))


class _CompiledCopy:
    """A copy of a compiled loss that tells the recording that runs.

    It is made once: classes that are made refer to themselves, and all that they have seen would
    be there until the garbage collector comes.
    """

    def __init__(self, model: Any, compiled: Any, defers_logs: bool) -> None:
        self._compiled = compiled  # whose id is not given to another while this is here
        self._recording: Any = None
        calls = _Calls(self) if defers_logs else None
        self._copy = copy_with(
            compiled,
            lambda entry, copy: observer_of(entry, copy, lambda: self._recording.losses),
            lambda term: self._recording.losses.note_term(term),
            calls,
        )

    def of(self, recording: Recording) -> Any:
        self._recording = recording
        return self._copy

    def metrics(self) -> Any:
        return self._recording.metrics

    def release(self) -> None:
        """Let go of the recording, and of the terms."""
        self._recording = None
        vars(self._copy)["_terms"] = []


class _Calls:
    """The `MetricCalls` of the recording that runs."""

    def __init__(self, copy: _CompiledCopy) -> None:
        self._copy = copy

    @property
    def watched(self) -> Any:
        return self._copy.metrics().watched

    def update(self, *args: Any) -> None:
        self._copy.metrics().update(*args)

    def result(self, metric: Any) -> Any:
        return self._copy.metrics().result(metric)


@contextlib.contextmanager
def _noting_hooks(recording: Recording) -> Iterator[None]:
    if recording.model._accumulation.has_looked_at_gradients:
        yield
        return
    with noting_hooks() as recording.registered_hooks:
        yield
    recording.registered_hooks = []


@contextlib.contextmanager
def record(model: Any, data: Any, position: Position, keeps_gradients: bool) -> Iterator[Recording]:
    """Record the step of `model` that runs in this thread.

    Args:
        model, data, position, keeps_gradients: as `Recording` takes them.
    """
    recording = Recording(model, data, position, keeps_gradients)
    is_own = not keeps_gradients
    listening = heard(recording) if is_own else contextlib.nullcontext()
    refusing = refusing_others(recording) if is_own else contextlib.nullcontext()
    metrics = waiting(recording.metrics if position.defers_logs else None)
    hooks = _noting_hooks(recording)
    with recording_of_thread.set(recording), listening, refusing, hooks, metrics:
        yield recording
    if is_own:
        clear_gradients(model)
