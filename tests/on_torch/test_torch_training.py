"""On PyTorch, all that is around an update is that of plain Keras on the full batch."""

import gc
import itertools
import weakref

import keras
import numpy as np
from helpers import (
    LIMIT,
    dense_data,
    dense_model,
    relative_difference,
    seeded,
)
from keras import layers, ops
from torch_step import torch
from training import train

from ga_model import AccumulatingModel, accumulate
from ga_model.core import recorder


def arguments(**kwargs):
    defaults = {"optimizer": keras.optimizers.SGD(0.1), "loss": "mse", "metrics": ["mae"]}
    return {**defaults, **kwargs}


def plain(data, rows=12, make=dense_model, compile_args=arguments, **kwargs):
    return train(make, compile_args, data, rows=rows, **kwargs)


def test_user_code_between_batches_does_not_touch_the_window():
    """`.grad` is the user's between batches: cleared, filled, and read."""

    class Meddling(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            assert all(v.value.grad is None for v in self.model.trainable_weights)
            ops.sum(self.model(dense_data(3)[0])).backward()
            if batch % 2:
                self.model.zero_grad()

    data = dense_data(31)
    reference, start = plain(data)
    fit_args = {"callbacks": [Meddling()]}
    model, _ = plain(data, rows=4, accumulation_steps=3, fit_args=fit_args)
    difference = relative_difference(model.get_weights(), reference.get_weights(), start)
    assert difference <= LIMIT


def test_nothing_of_a_step_is_kept(monkeypatch):
    """No recording and no output outlives its microbatch, to wait for the garbage collector."""
    kept = []

    class Noting(layers.Layer):
        def call(self, inputs):
            result = inputs * 1.0
            if torch.is_grad_enabled() and result.requires_grad:
                kept.append(weakref.ref(result))
            return result

    class Noted(recorder.Recording):
        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)
            kept.append(weakref.ref(self))

    monkeypatch.setattr(recorder, "Recording", Noted)
    model = accumulate(seeded(lambda: keras.Sequential([dense_model(), Noting()])))
    model.compile(**arguments(), accumulation_steps=2, microbatch_size=3)
    x, y = dense_data(12)
    model.train_on_batch(x, y)
    gc.collect()
    gc.disable()
    try:
        kept.clear()
        model.train_on_batch(x, y)
        model.train_on_batch(x, y)
        assert len(kept) == 16
        assert not [thing() for thing in kept if thing() is not None]
    finally:
        gc.enable()


def test_gradients_are_the_sum_and_cost_no_buffer():
    class Noting(AccumulatingModel, keras.Sequential):
        def zero_grad(self, set_to_none=True):
            super().zero_grad(set_to_none)
            sums.append([v.value.grad for v in self.trainable_weights])

    sums = []
    model = seeded(lambda: Noting([keras.Input((4,)), *dense_model().layers]))
    model.compile(**arguments(), microbatch_size=3)
    model.train_on_batch(*dense_data(12))  # the first one is tried before
    sums.clear()
    model.train_on_batch(*dense_data(12))
    assert len(sums) == 4
    assert all(gradient is None for gradient in sums[0])
    for ones, others in itertools.pairwise(sums[1:]):
        assert all(a is b for a, b in zip(ones, others))


def test_random_layers_draw_for_each_microbatch():
    drawn = []

    class Noting(layers.Layer):
        def call(self, inputs):
            drawn.append(ops.convert_to_numpy(ops.cast(inputs == 0, "int32")))
            return inputs

    def make():
        return keras.Sequential(
            [keras.Input((40,)), layers.Dropout(0.5), Noting(), layers.Dense(2)]
        )

    model = accumulate(seeded(make), microbatch_size=4)
    model.compile("sgd", "mse")
    x, y = np.ones((12, 40), "float32"), dense_data(12)[1]
    model.train_on_batch(x, y)
    drawn.clear()
    model.train_on_batch(x, y)
    assert len(drawn) == 3
    assert np.any(drawn[0] != drawn[1])
    assert np.any(drawn[1] != drawn[2])
