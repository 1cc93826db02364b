"""Let two trainings draw the same random numbers, however samples are split into microbatches."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import NamedTuple

import keras
import numpy as np
from keras import ops

from ga_model.base._internals import layers_in, takes_training
from ga_model.base._method_patch import MethodPatch, without_training
from ga_model.base._types import Tensor
from ga_model.core.models import instances_in

# Keras's attributes for the rate or width of noise. If all are zero, a layer draws nothing.
_RATES = ("rate", "stddev", "dropout", "recurrent_dropout")


class Randomness(NamedTuple):
    """The names of layers that draw random numbers in training, by how they were handled.

    Attributes:
        shared: dropout layers that dropped the same units for every sample.
        off: layers that ran in inference mode.
        left: layers, or the model, that drew random numbers as usual.
    """

    shared: list[str]
    off: list[str]
    left: list[str]


@contextlib.contextmanager
def shared_randomness(model: keras.Model) -> Iterator[Randomness]:
    """Make random layers of a model independent of how samples are split, if possible.

    The random numbers of a sample depend on its position in its batch, and a microbatch is another
    batch. So `Dropout` layers get one mask for all samples, the same in every batch. Keras's other
    layers with a `SeedGenerator` are called with `training=False`. The user's own layers are left
    as they are, because they may do more in training than draw numbers.
    """
    shared: list[keras.Layer] = []
    off: list[keras.Layer] = []
    left: list[keras.Layer] = []
    for layer in filter(_is_random, layers_in(model)):
        is_of_keras = type(layer).__module__.startswith("keras.") and takes_training(layer)
        (shared if _is_dropout(layer) else off if is_of_keras else left).append(layer)
    seeds = {id(layer): seed for seed, layer in enumerate(shared)}
    one_mask = MethodPatch("call", lambda layer, _: _with_one_mask(layer, seeds[id(layer)]))
    with one_mask.of(shared), without_training.of(off):
        yield Randomness(*([layer.name for layer in layers] for layers in (shared, off, left)))


def _is_random(layer: keras.Layer) -> bool:
    rates = [np.any(getattr(layer, name)) for name in _RATES if hasattr(layer, name)]
    draws = bool(instances_in(list(vars(layer).values()), keras.random.SeedGenerator))
    return draws and (not rates or any(rates))


def _is_dropout(layer: keras.Layer) -> bool:
    return type(layer).call is keras.layers.Dropout.call and "call" not in vars(layer)


def _with_one_mask(layer: keras.layers.Dropout, seed: int) -> Callable[..., Tensor]:
    def call(inputs: Tensor, training: bool = False) -> Tensor:
        if not training:
            return inputs
        shape = (1, *(layer.noise_shape or (None,) * len(inputs.shape))[1:])
        sizes = [1, *(a if b is None else b for a, b in zip(inputs.shape[1:], shape[1:]))]
        if None in sizes:
            return keras.random.dropout(inputs, layer.rate, noise_shape=shape, seed=seed)
        # By NumPy: XLA draws other numbers from the same seed, and split steps are partly compiled.
        is_kept = np.random.default_rng(seed).random(sizes) >= layer.rate
        return inputs * ops.cast(is_kept / max(1.0 - layer.rate, 1e-7), inputs.dtype)

    return call
