"""A `train_step` of the user's own on TensorFlow: what is found in it, refused or not split."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from helpers import dense_data, dense_model
from losses import mean
from own_train_steps import OfObjective
from training import compiled

from ga_model import accumulate


class AppliesInABranch(OfObjective):
    def train_step(self, data):
        with tf.GradientTape() as tape:
            loss = self.loss_of(*data)
        variables = self.trainable_variables
        gradients = tape.gradient(loss, variables)

        def apply():
            self.optimizer.apply(gradients, variables)
            return 0

        tf.cond(tf.math.is_finite(loss), apply, lambda: 0)
        return {"own": loss}


def test_an_update_in_a_branch_of_the_steps_own_is_refused():
    model = compiled(lambda: AppliesInABranch(mean, [dense_model()]), accumulation_steps=3)
    with pytest.raises(RuntimeError, match=r"applies one inside `tf\.cond`"):
        model.fit(*dense_data(12), batch_size=4, verbose=0)


def test_a_fit_that_brings_its_callbacks_has_them_where_nothing_is_accumulated():
    class BringsItsCallbacks(keras.Sequential):
        def fit(self, *args, callbacks=None, **kwargs):
            self.brought = keras.callbacks.History()
            callbacks = [self.brought] if callbacks is None else callbacks
            return super().fit(*args, callbacks=callbacks, **kwargs)

    model = accumulate(BringsItsCallbacks(dense_model().layers))
    model.compile("sgd", "mse")
    model.fit(*dense_data(12), epochs=2, verbose=0)
    assert model.brought.epoch == [0, 1]


def test_a_model_without_trainable_weights_trains_as_plain_keras_does():
    model = accumulate(dense_model(), accumulation_steps=3)
    model.trainable = False
    model.compile("sgd", "mse")
    with pytest.warns(UserWarning, match="does not have any trainable weights"):
        model.fit(*dense_data(12), batch_size=4, verbose=0)


class Draws(keras.layers.Layer):
    """Sums ragged rows, and draws unseeded numbers for others."""

    def __init__(self):
        super().__init__()
        self.kernel = self.add_weight(shape=(4, 2))

    def call(self, x):
        if isinstance(x, tf.RaggedTensor):
            return tf.reduce_sum(x, 1) @ self.kernel
        return (x + tf.random.normal(tf.shape(x))) @ self.kernel


@pytest.mark.every_case
@pytest.mark.parametrize("is_ragged", [True, False])
def test_calls_that_cannot_be_split_run_whole_and_are_named(is_ragged):
    x, y = dense_data(12)
    if is_ragged:
        x = tf.RaggedTensor.from_row_lengths(np.repeat(x, 2, 0), [1, 3] * 6)
    data = tf.data.Dataset.from_tensor_slices((x, y)).batch(12)
    model = compiled(lambda: OfObjective(mean, [Draws()]), None, microbatch_size=4)
    reasons = "it draws unseeded random numbers, by", "it takes ragged or sparse tensors"
    with pytest.warns(UserWarning, match=reasons[is_ragged]):
        model.fit(data, shuffle=False, verbose=0)
