"""Receive the gradients and the loss of a `train_step` that knows nothing of accumulation.

While a step is recorded, three things of the model answer differently. An attribute that holds an
optimizer, or a list or dict of them, answers with a stand-in: it passes on everything but three
calls. `scale_loss` folds the microbatch's weight into the loss; `apply` and `apply_gradients` hand
the gradients to the recording instead of updating. The compiled loss answers with a copy that notes
what each loss averages over. And the losses that layers add are noted where they are summed up. So
Keras's own `train_step` runs as it is, in every release, and so does a user's own, with several
optimizers too.

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
import tensorflow as tf

from ga_model import _strategy, _validate, _weights
from ga_model._window import Contribution, Target, Window

_local = threading.local()
_MISSING = object()


class Recording:
    """The gradients that one `train_step` applies, by optimizer.

    Args:
        model: the model that is recorded.
        window: its open window.
        data: the microbatch, as `train_step` gets it.
        is_first: bool scalar tensor, whether the microbatch opens the window.

    Attributes:
        targets, contributions: an entry per optimizer, in the order in which they were applied.
    """

    def __init__(self, model: Any, window: Window, data: Any, is_first: Any) -> None:
        self.model = model
        self.targets: list[Target] = []
        self.contributions: list[Contribution] = []
        self._window = window
        self._data = data
        self._is_first = is_first
        self._terms: list[_weights.Term] = []
        self._observed_loss: Any = None
        self._additional: list[tuple[Any, bool]] = []
        self._graph = None if tf.executing_eagerly() else tf.compat.v1.get_default_graph()
        self._folded: dict[int, tuple[_weights.LossTerms, Any]] = {}
        self._unseen = [(o, o.built) for o in _optimizers_of_layers(model)]

    def stand_in(self, value: Any) -> Any:
        """Return what stands in for an attribute's value: optimizers, also in lists and dicts."""
        if isinstance(value, keras.optimizers.Optimizer):
            return _StandIn(value, self)
        if isinstance(value, dict):
            return {key: self.stand_in(part) for key, part in value.items()}
        if isinstance(value, (list, tuple)):
            return [self.stand_in(part) for part in value]
        return value

    def observed_loss(self, compiled: Any) -> Any:
        """Return a copy of the compiled loss that notes its terms here, always the same one."""
        if self._observed_loss is None:
            self._observed_loss = _weights.observed(compiled, self._terms.append)
        return self._observed_loss

    def note_additional(self, value: Any, is_sum: bool) -> None:
        """Note a loss that a layer or a regularizer added to the total."""
        self._additional.append((value, is_sum))

    def scale_loss(self, optimizer: Any, loss: Any) -> Any:
        """Fold the microbatch's weight into the loss, then scale it as the optimizer does."""
        terms = self._loss_terms()
        relative_weight = None
        if terms.weight is not None:
            accumulator = self._window.accumulator(optimizer)
            relative_weight = accumulator.relative_weight(terms.weight) * self._window.headroom()
        self._folded[id(optimizer)] = (terms, relative_weight)
        loss = terms.fold(loss, relative_weight, self._window.steps, self._is_first)
        return optimizer.scale_loss(loss)

    def apply(self, optimizer: Any, gradients: Sequence[Any], variables: Sequence[Any]) -> None:
        """Keep the gradients of an `optimizer.apply`."""
        if self._graph not in (None, tf.compat.v1.get_default_graph()):
            raise RuntimeError(_validate.inner_graph_message(self.model.name))
        if any(target.optimizer is optimizer for target in self.targets):
            raise RuntimeError(_validate.applied_twice_message(self.model.name, optimizer.name))
        _validate.check_single_accumulation([optimizer], self.model.accumulation_steps)
        _strategy.build_optimizer(optimizer, variables)
        if id(optimizer) in self._folded:
            terms, relative_weight = self._folded[id(optimizer)]
        else:
            terms, relative_weight = self._loss_terms(), None
            if not terms.is_plain:
                self.model._warn_once(_validate.not_scaled_message(self.model.name))
        self.targets.append(Target(optimizer, list(variables)))
        self.contributions.append(Contribution(list(gradients), terms.weight, relative_weight))

    def check_complete(self) -> None:
        """Raise RuntimeError if the step applied an optimizer past the recording, or none."""
        passed_by = [o for o, was_built in self._unseen if o.built and not was_built]
        if passed_by or (not self.targets and self.model.trainable_weights):
            names = [o.name for o in passed_by]
            raise RuntimeError(_validate.not_recorded_message(self.model.name, names))

    def _loss_terms(self) -> _weights.LossTerms:
        data = self._data
        if not isinstance(data, tuple) or len(data) > 3:
            data = (data,)
        x, y, sample_weight = keras.utils.unpack_x_y_sample_weight(data)
        # Keras adds the losses of layers first, and those of weight regularizers after them.
        regularizers = [v for v in self.model.trainable_weights if getattr(v, "regularizer", None)]
        first = max(0, len(self._additional) - len(regularizers))
        regularization = [value for value, _ in self._additional[first:]]
        weight = self.model.microbatch_weight(x, y, sample_weight)
        if weight is not None:
            return _weights.rule(weight, regularization)
        rows = _weights.num_rows(x)
        terms = _weights.combine(self._terms, self._additional[:first], regularization, rows)
        if terms.mismatch:
            self.model._warn_once(_validate.one_weight_message(terms.exact, terms.mismatch))
        return terms


class _StandIn:
    """Stands in for one optimizer during one recorded step."""

    def __init__(self, optimizer: Any, recording: Recording) -> None:
        object.__setattr__(self, "_optimizer", optimizer)
        object.__setattr__(self, "_recording", recording)

    @property  # type: ignore[misc]
    def __class__(self) -> Any:  # isinstance(self.optimizer, keras.optimizers.Adam) holds
        return type(self._optimizer)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._optimizer, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._optimizer, name, value)

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


def current_recording(model: Any) -> Recording | None:
    """Return the recording of `model` that is running in this thread, if one is."""
    recording = getattr(_local, "recording", None)
    return recording if recording is not None and recording.model is model else None


@contextlib.contextmanager
def record(model: Any, window: Window, data: Any, is_first: Any) -> Iterator[Recording]:
    """Record the step of `model` that runs in this thread."""
    outer = getattr(_local, "recording", None)
    _local.recording = recording = Recording(model, window, data, is_first)
    try:
        yield recording
        recording.check_complete()
    finally:
        _local.recording = outer


class RecordedAttribute:
    """Data descriptor of a model's attribute that answers with a stand-in while it is recorded.

    The value stays under the attribute's name in the instance's `__dict__`, where Keras's saving
    finds it.

    Args:
        name: the attribute's name.
        default: what the class has under that name, if anything.
    """

    def __init__(self, name: str, default: Any = _MISSING) -> None:
        self._name = name
        self._default = default

    def __get__(self, model: Any, owner: type | None = None) -> Any:
        if model is None:
            return self
        value = model.__dict__.get(self._name, self._default)
        if value is _MISSING:
            raise AttributeError(f"{type(model).__name__!r} object has no attribute {self._name!r}")
        recording = current_recording(model)
        return value if recording is None else self._stand_in(recording, value)

    def _stand_in(self, recording: Recording, value: Any) -> Any:
        return recording.stand_in(value)

    def __set__(self, model: Any, value: Any) -> None:
        model.__dict__[self._name] = value

    def __delete__(self, model: Any) -> None:
        del model.__dict__[self._name]


class CompiledLossAttribute(RecordedAttribute):
    """The attribute where Keras keeps the compiled loss."""

    def _stand_in(self, recording: Recording, value: Any) -> Any:
        return value if value is None else recording.observed_loss(value)


def optimizers_in(value: Any) -> list[Any]:
    """Return the optimizers that a value is, or that a list or dict in it holds."""
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, (list, tuple)):
        return [optimizer for part in value for optimizer in optimizers_in(part)]
    return [value] if isinstance(value, keras.optimizers.Optimizer) else []


def watch_attribute(owner: type, name: str) -> None:
    """Make the attribute `name` of `owner`'s instances a `RecordedAttribute`, if it is plain."""
    present = inspect.getattr_static(owner, name, _MISSING)
    if not hasattr(present, "__get__"):
        setattr(owner, name, RecordedAttribute(name, present))


def _optimizers_of_layers(model: Any) -> list[Any]:
    """Return the optimizers of models inside of `model`, which no attribute of `model` shows."""
    return [
        optimizer
        for layer in model._flatten_layers(include_self=False)
        if isinstance(layer, keras.Model)
        for optimizer in optimizers_in(layer.__dict__.get("optimizer"))
    ]
