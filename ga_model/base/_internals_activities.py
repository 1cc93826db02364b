"""What activity regularizers add to a loss, which differs between releases of Keras."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import keras

from ga_model.base._identity import is_in
from ga_model.base._internals import RELEASE, layers_in

_SUMS_OF_ACTIVITIES = (keras.regularizers.L1, keras.regularizers.L2, keras.regularizers.L1L2)


def is_sum_of_activities(model: Any, loss: Any) -> bool:
    """Return whether a loss is what an activity regularizer of Keras added as a sum over samples.

    Up to Keras 3.13 they are sums, and since then means. Keras's own layers add no other losses,
    and of a layer of the user's own the regularizer's stands last.

    Args:
        model: the model.
        loss: one of its `losses`.
    """
    if RELEASE > (3, 13):
        return False
    for layer in layers_in(model):
        if adds_up_activities(layer.activity_regularizer):
            is_of_keras = type(layer).__module__.startswith("keras.")
            if is_in(loss, layer._losses if is_of_keras else layer._losses[-1:]):
                return True
    return False


def adds_up_activities(regularizer: Any) -> bool:
    """Return whether an activity regularizer is one of Keras's that are sums over samples."""
    return isinstance(regularizer, _SUMS_OF_ACTIVITIES)


@contextlib.contextmanager
def noting_activities(model: Any) -> Iterator[list[tuple[Any, Any, Any]]]:
    """Note in a block what activity regularizers give that Keras adds to the loss as it is.

    It does so up to Keras 3.13. Of a layer's losses, nothing else tells which are its regularizer's
    where there is no graph. The block must be the only one that notes.

    Yields:
        A list that gets each regularizer, what it was called with, and what it gave.
    """
    noted: list[tuple[Any, Any, Any]] = []

    def noting(regularizer: Callable[[Any], Any]) -> Callable[[Any], Any]:
        def regularize(output: Any) -> Any:
            noted.append((regularizer, output, regularizer(output)))
            return noted[-1][-1]

        return regularize

    layers = [] if RELEASE > (3, 13) else layers_in(model)
    before = [(layer, layer.activity_regularizer) for layer in layers]
    before = [(layer, regularizer) for layer, regularizer in before if regularizer is not None]
    for layer, regularizer in before:
        vars(layer)["activity_regularizer"] = noting(regularizer)
    try:
        yield noted
    finally:
        for layer, regularizer in before:
            vars(layer)["activity_regularizer"] = regularizer
