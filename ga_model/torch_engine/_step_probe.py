"""Find out by trying what a step of the user's own averages over, where nothing tells.

The step runs on a microbatch and on its halves, and makes no update. Of a mean over samples the
gradients of the halves add up, weighted by samples, to that of the whole; of a sum they add up as
they are. Meanwhile layers that drop values or add noise pass on what they get, and
BatchNormalization layers normalize by their running averages.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras

from ga_model.base._context import ThreadValue
from ga_model.base._in_front import InFront
from ga_model.base._internals import layers_in
from ga_model.hearing._models import unpack
from ga_model.torch_engine import _refusals
from ga_model.torch_engine._probes import is_to_try, joined
from ga_model.torch_engine._split import num_rows, part_of
from ga_model.torch_engine._state import Before

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


class UnknownLossError(Exception):
    """Nothing tells what the loss of a step averages over."""


class StepProbe:
    """What was found out of the step of one compiled model.

    Args:
        model: the `AccumulatingModel`.

    Attributes:
        kind: "mean" or "sum", or None as long as nobody asked.
        is_first: whether no microbatch has trained the model so far.
    """

    def __init__(self, model: Any) -> None:
        self._model = model
        self.kind: str | None = None
        self.is_first = True
        self._times = 0
        self._waiting: Any = None  # a sample that came alone

    def is_due(self) -> bool:
        """Return whether what was found out is to be tried again, with the next microbatch."""
        if self.kind is None:
            return False
        self._times += 1
        return is_to_try(self._times)

    def look(self, gradients_of: Callable[[Any], dict[Any, Any]], data: Any) -> None:
        """Compare the gradients of a microbatch with those of its halves.

        Args:
            gradients_of: runs the step without an update, and returns its gradients.
            data: the microbatch, as `train_step` gets it.

        Raises:
            RuntimeError: they are those of neither a mean nor a sum, or do not tell.
        """
        if num_rows(unpack(data)[0]) == 1:
            # Two alike tell a mean from a sum, and two that differ whether samples are compared.
            before, self._waiting = self._waiting or data, data
            data = joined(before, data)
        found = self._kind_of(gradients_of, data) or self.kind or "other"
        if found == "other" or self.kind not in (None, found):
            raise RuntimeError(_refusals.unknown_loss_message(self._model.name))
        self.kind = found

    def _kind_of(self, gradients_of: Callable[[Any], Any], data: Any) -> str | None:
        """Return "mean", "sum" or "other", or None where gradients are zero or not finite."""
        rows = num_rows(unpack(data)[0])
        half = rows // 2
        layers = layers_in(self._model)
        quiet = [layer for layer in layers if isinstance(layer, (*_NOISE, _NORMALIZATION))]
        found, before = [], Before(self._model)
        for begin, end in ((0, rows), (0, half), (half, rows)):
            try:
                with _in_front.of(quiet), _is_quiet.set(True):
                    found.append(gradients_of(part_of(data, begin, end)))
            finally:
                before.put_back()
        whole, first, second = found
        if not 0.0 < _square_of(whole) < float("inf"):
            return None
        share = half / rows
        dtypes = {layer.compute_dtype for layer in layers}
        tolerance = _OF_HALVES if dtypes & {"float16", "bfloat16"} else _TOLERANCE
        if _is_sum_of(whole, [(first, share), (second, 1.0 - share)], tolerance):
            return "mean"
        return "sum" if _is_sum_of(whole, [(first, 1.0), (second, 1.0)], tolerance) else "other"


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
