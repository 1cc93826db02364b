"""On PyTorch, microbatches without weight are left out, and one microbatch is its own mean."""

import keras
import numpy as np
import pytest
from ga_model.torch_engine._part import Part
from ga_model.torch_engine._torch_statistics import Moments
from keras import ops
from torch_step import torch

from ga_model import AccumulatingModel


class Masked(AccumulatingModel, keras.Model):
    """Its loss is NaN where nothing counts."""

    def __init__(self):
        super().__init__()
        self.dense = keras.layers.Dense(1)

    def call(self, x):
        return self.dense(x)

    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
        mask = ops.cast(y > 0, y_pred.dtype)
        return ops.sum(mask * ops.square(y - y_pred)) / ops.sum(mask)

    def microbatch_weight(self, x, y=None, sample_weight=None):
        return ops.sum(ops.cast(y > 0, "float32"))


def trained(make, counts, **settings):
    """Return weights and logs of a batch of 8 samples for each of `counts`: those with weight."""
    batches = np.random.default_rng(0).normal(size=(2, 8, 3)).astype("float32")
    x = np.concatenate([batches[0] if has_weight else batches[1] for has_weight in counts])
    y = np.repeat(np.where(counts, 1.5, -1.0), 8)[:, None]
    keras.utils.set_random_seed(0)
    model = make()
    model(x[:1])
    model.compile(keras.optimizers.Adam(0.1), jit_compile=False, **settings)
    history = model.fit(x, y, batch_size=8, shuffle=False, verbose=0).history
    return model.get_weights(), history["loss"]


def test_gradients_are_tested_for_nan_where_that_is_asked_for(monkeypatch):
    def is_finite(part):
        raise AssertionError

    monkeypatch.setattr(Part, "is_finite", is_finite)
    trained(Masked, [True, True], accumulation_steps=2)
    with pytest.raises(AssertionError):
        trained(Masked, [True, True], accumulation_steps=2, skip_nonfinite=True)


def test_statistics_of_no_values_are_left_out():
    some = Moments(torch.tensor(4.0).double(), torch.tensor([0.1, -3.0]), torch.tensor([0.3, 2.0]))
    nan = torch.full((2,), float("nan"))
    none = Moments(torch.tensor(0.0).double(), nan, nan)
    for both in (some.plus(none), none.plus(some)):
        assert all(map(torch.equal, both, some))
