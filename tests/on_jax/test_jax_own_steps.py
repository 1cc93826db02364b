"""A `train_step` as the guides for JAX have it, in windows: it is exact, or told of."""

import jax
import keras
import numpy as np
import pytest
from helpers import LIMIT
from keras import layers, ops
from training import difference_and_said

TOLD = "does not train as the full batch"


class Guide(keras.Model):
    """The step of the guides, with metrics of its own that are updated without state."""

    def __init__(self):
        super().__init__()
        self.hidden = layers.Dense(6, activation="tanh")
        self.last = layers.Dense(2)
        self.of_loss = keras.metrics.Mean(name="of_loss")
        self.of_samples = keras.metrics.MeanAbsoluteError(name="of_samples")
        self.average = self.add_weight(shape=(2,), trainable=False, name="average")
        self(np.zeros((1, 4)))

    @property
    def metrics(self):
        return [self.of_loss, self.of_samples]

    def call(self, x, training=False):
        return self.last(self.hidden(x))

    def outputs(self, trainable, others, x):
        return self.stateless_call(trainable, others, x, training=True)[0]

    def loss_of(self, trainable, others, x, y):
        y_pred = self.outputs(trainable, others, x)
        return ops.mean(ops.square(y_pred - y)), (y_pred, others)

    def gradients_of(self, trainable, others, x, y):
        return jax.value_and_grad(self.loss_of, has_aux=True)(trainable, others, x, y)

    def train_step(self, state, data):
        trainable, others, optimizer, metrics = state
        (loss, (y_pred, others)), gradients = self.gradients_of(trainable, others, *data)
        trainable, optimizer = self.optimizer.stateless_apply(optimizer, gradients, trainable)
        of_loss = self.of_loss.stateless_update_state(metrics[:2], loss)
        of_samples = self.of_samples.stateless_update_state(metrics[2:], data[1], y_pred)
        logs = {
            "of_loss": self.of_loss.stateless_result(of_loss),
            "of_samples": self.of_samples.stateless_result(of_samples),
        }
        return logs, (trainable, self.after(others, trainable), optimizer, of_loss + of_samples)

    def after(self, others, trainable):
        """Return the values of other variables after the update."""
        return others


class PenalizesGradients(Guide):
    def loss_of(self, trainable, others, x, y):
        gradients = jax.grad(lambda x: ops.sum(self.outputs(trainable, others, x)))(x)
        loss, found = super().loss_of(trainable, others, x, y)
        return loss + 0.1 * ops.mean(ops.sum(ops.square(gradients), axis=-1)), found


class DividesByPositives(Guide):
    """As detectors do, which have at least one."""

    def loss_of(self, trainable, others, x, y):
        y_pred, mask = self.outputs(trainable, others, x), ops.cast(y > 0.7, "float32")
        total = ops.sum(mask * ops.square(y_pred - y))
        return total / ops.maximum(ops.sum(mask), 1.0), (y_pred, others)


class DividesOneTermByPositives(DividesByPositives):
    def loss_of(self, trainable, others, x, y):
        loss, (y_pred, others) = super().loss_of(trainable, others, x, y)
        return loss + 0.1 * ops.mean(ops.abs(y_pred)), (y_pred, others)


class Mixes(Guide):
    """Mixup with the batch the other way round."""

    def gradients_of(self, trainable, others, x, y):
        x, y = (0.7 * part + 0.3 * ops.flip(part, 0) for part in (x, y))
        return super().gradients_of(trainable, others, x, y)


class TakesANorm(Guide):
    def loss_of(self, trainable, others, x, y):
        y_pred = self.outputs(trainable, others, x)
        return ops.sqrt(ops.sum(ops.square(y_pred - y))), (y_pred, others)


class IsAwareOfSharpness(Guide):
    def gradients_of(self, trainable, others, x, y):
        _, gradients = super().gradients_of(trainable, others, x, y)
        norm = ops.sqrt(sum(ops.sum(ops.square(g)) for g in gradients))
        moved = [v + 0.05 * g / norm for v, g in zip(trainable, gradients)]
        return super().gradients_of(moved, others, x, y)


class Averages(Guide):
    """Keeps an average of a weight, in each step."""

    def after(self, others, trainable):
        place = [v is self.average for v in self.non_trainable_variables].index(True)
        return [0.9 * v + 0.1 * trainable[-1] if i == place else v for i, v in enumerate(others)]


class ByLayers(Guide):
    """Takes the mean of features over the batch."""

    def call(self, x, training=False):
        hidden = self.hidden(x)
        return self.last(hidden - ops.mean(hidden, axis=0))


@pytest.mark.every_case
@pytest.mark.parametrize(
    ("base", "told"),
    [
        (Guide, None),
        (PenalizesGradients, None),
        (DividesByPositives, None),
        (DividesOneTermByPositives, "gradient"),
        (Mixes, "gradient"),
        (TakesANorm, "gradient"),
        (IsAwareOfSharpness, "gradient"),
        (Averages, "average differs by"),
        (ByLayers, "gradient"),
    ],
)
def test_a_step_in_windows_is_exact_or_told_of(base, told):
    difference, said = difference_and_said(base, {"accumulation_steps": 3}, rows=4)
    if told is None:
        assert (difference <= LIMIT, said) == (True, [])
    else:
        assert difference > LIMIT or told.startswith("average")
        (text,) = said
        assert TOLD in text
        assert told in text
        assert (" more things do, however" in text) == (told == "gradient")
