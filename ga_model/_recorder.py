"""Receive the gradients of a `train_step` that knows nothing of accumulation.

While a step is recorded, an optimizer attribute of the model answers with a stand-in. It passes on
everything but three calls: `scale_loss` folds the microbatch's weight into the loss, `apply` and
`apply_gradients` hand the gradients to the recording instead of updating. So Keras's own
`train_step` runs as it is, in every release, and so does a user's own, with several optimizers too.

The recording is kept per thread: replicas of a strategy are traced in threads of their own, and a
callback's thread that reads `model.optimizer` meanwhile gets the optimizer itself.
"""

from __future__ import annotations

import contextlib
import inspect
import threading
from collections.abc import Iterator, Sequence
from typing import Any

import keras

from ga_model import _strategy, _validate
from ga_model._weights import LossTerms
from ga_model._window import Contribution, Target, Window


class Recording:
    """The gradients that one `train_step` applies, by optimizer.

    Args:
        model: the model whose optimizer attributes answer with stand-ins.
        window: the model's open window.
        data: the microbatch, as `train_step` gets it.
    """

    def __init__(self, model: Any, window: Window, data: Any) -> None:
        self.model = model
        self._window = window
        self._data = data
        self._terms: LossTerms | None = None
        self._relative_weights: dict[int, tuple[LossTerms, Any]] = {}
        self.targets: list[Target] = []
        self.contributions: list[Contribution] = []

    def note_loss(self, terms: LossTerms) -> None:
        """Take note of the loss that `compute_loss` is about to return."""
        self._terms = terms

    def scale_loss(self, optimizer: Any, loss: Any) -> Any:
        """Fold the microbatch's weight into the loss, then scale it as the optimizer does."""
        terms = self._current_terms()
        relative_weight = None
        if terms.weight is not None:
            unit_weight = self._window.accumulator(optimizer).relative_weight(terms.weight)
            relative_weight = unit_weight * self._window.headroom
        self._relative_weights[id(optimizer)] = (terms, relative_weight)
        loss = terms.fold(loss, relative_weight, self._window.steps, self._window.is_first)
        return optimizer.scale_loss(loss)

    def apply(self, optimizer: Any, gradients: Sequence[Any], variables: Sequence[Any]) -> None:
        """Keep the gradients of an `optimizer.apply`."""
        if any(target.optimizer is optimizer for target in self.targets):
            raise RuntimeError(_validate.applied_twice_message(self.model.name, optimizer.name))
        _validate.check_single_accumulation([optimizer], self.model.accumulation_steps)
        _strategy.build_optimizer(optimizer, variables)
        if id(optimizer) in self._relative_weights:
            terms, relative_weight = self._relative_weights[id(optimizer)]
        else:
            terms, relative_weight = self._current_terms(), None
            if not terms.is_plain:
                _validate.warn(_validate.not_scaled_message(self.model.name))
        self.targets.append(Target(optimizer, list(variables)))
        self.contributions.append(Contribution(list(gradients), terms.weight, relative_weight))

    def check_complete(self) -> None:
        """Raise RuntimeError if the step applied no optimizer though there are weights to train."""
        if not self.targets and self.model.trainable_weights:
            raise RuntimeError(_validate.applied_none_message(self.model.name))

    def _current_terms(self) -> LossTerms:
        if self._terms is None:  # the step does not call `compute_loss`
            data = self._data
            if not isinstance(data, tuple) or len(data) > 3:
                data = (data,)
            x, y, sample_weight = keras.utils.unpack_x_y_sample_weight(data)
            self._terms = self.model._loss_terms(x, y, None, sample_weight)
        return self._terms


class _StandIn:
    """Stands in for one optimizer during one recorded step."""

    def __init__(self, optimizer: Any, recording: Recording) -> None:
        self._optimizer = optimizer
        self._recording = recording

    @property  # type: ignore[misc]
    def __class__(self) -> Any:  # isinstance(self.optimizer, keras.optimizers.Adam) holds
        return type(self._optimizer)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._optimizer, name)

    def scale_loss(self, loss: Any) -> Any:
        return self._recording.scale_loss(self._optimizer, loss)

    def apply(self, grads: Sequence[Any], trainable_variables: Sequence[Any] | None = None) -> None:
        if trainable_variables is None:
            trainable_variables = self._optimizer._trainable_variables
        self._recording.apply(self._optimizer, grads, trainable_variables)

    def apply_gradients(self, grads_and_vars: Any) -> Any:
        gradients, variables = zip(*grads_and_vars)
        self.apply(gradients, variables)
        return self._optimizer.iterations


_local = threading.local()
_MISSING = object()


def current_recording(model: Any) -> Recording | None:
    """Return the recording of `model` that is running in this thread, if one is."""
    recording = getattr(_local, "recording", None)
    return recording if recording is not None and recording.model is model else None


@contextlib.contextmanager
def record(model: Any, window: Window, data: Any) -> Iterator[Recording]:
    """Record the optimizers' steps of `model` in this thread."""
    outer = getattr(_local, "recording", None)
    _local.recording = recording = Recording(model, window, data)
    try:
        yield recording
    finally:
        _local.recording = outer


class OptimizerAttribute:
    """Data descriptor of a model's attribute that holds an optimizer.

    The optimizer stays under the attribute's name in the instance's `__dict__`, where Keras's
    saving finds it. Only while the model is recorded does reading the attribute give a stand-in.
    """

    def __init__(self, name: str, default: Any = _MISSING) -> None:
        self._name = name
        self._default = default  # what the class had under the name, if anything

    def __get__(self, model: Any, owner: type | None = None) -> Any:
        if model is None:
            return self
        value = model.__dict__.get(self._name, self._default)
        if value is _MISSING:
            raise AttributeError(f"{type(model).__name__!r} object has no attribute {self._name!r}")
        recording = current_recording(model)
        if recording is not None and isinstance(value, keras.optimizers.Optimizer):
            return _StandIn(value, recording)
        return value

    def __set__(self, model: Any, value: Any) -> None:
        model.__dict__[self._name] = value

    def __delete__(self, model: Any) -> None:
        del model.__dict__[self._name]


def watch_attribute(owner: type, name: str) -> None:
    """Make the attribute `name` of `owner`'s instances an `OptimizerAttribute`, if it is plain."""
    present = inspect.getattr_static(owner, name, _MISSING)
    if not hasattr(present, "__get__"):
        setattr(owner, name, OptimizerAttribute(name, present))
