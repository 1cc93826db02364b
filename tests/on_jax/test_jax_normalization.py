"""On JAX, running averages of BatchNormalization are those of the full batch, too.

Where the inputs of a layer do not depend on what another one has normalized, they equal those of
plain Keras on the full batch.
"""

import keras
import pytest
from averages import difference
from helpers import LIMIT
from keras import layers, ops

pytestmark = pytest.mark.filterwarnings("ignore:BatchNormalization layers in training mode")


class Twice(keras.Sequential):
    """Calls its first layer on two things, in a step of its own."""

    def compute_loss_and_updates(
        self, trainable, non_trainable, metrics, x, y, sample_weight, training, optimizer_variables
    ):
        variables = [*self.trainable_variables, *self.non_trainable_variables]
        with keras.StatelessScope(list(zip(variables, [*trainable, *non_trainable]))) as scope:
            first, *others = self.layers
            outputs = first(x, training=True) + first(x * 0.5 + 1, training=True)
            for layer in others:
                outputs = layer(outputs)
            loss = ops.sqrt(ops.mean(ops.square(outputs - y)))
        after = [scope.get_current_value(v) for v in self.non_trainable_variables]
        return loss, (loss, outputs, after, metrics)


def twice():
    return Twice([keras.Input((4,)), layers.BatchNormalization(momentum=0.8), layers.Dense(2)])


def test_a_layer_that_a_step_calls_twice_moves_twice():
    assert difference(twice, "split") <= LIMIT


class MovesItself(layers.BatchNormalization):
    def call(self, inputs, training=None, mask=None):
        return super().call(inputs, training=training, mask=mask)


@pytest.mark.filterwarnings("ignore:A window of microbatches:UserWarning")
def test_a_layer_that_moves_itself_is_told_of_and_gets_the_full_batch_where_it_can():
    def own():
        return keras.Sequential([keras.Input((4,)), MovesItself(name="bn"), layers.Dense(2)])

    with pytest.warns(UserWarning, match="cannot be split into microbatches"):
        assert difference(own, "split") <= LIMIT
    with pytest.warns(UserWarning, match=r"\['bn'\].*once per microbatch"):
        assert difference(own, "windows") > 1e-2
