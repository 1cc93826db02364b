"""On JAX, all that is around an update is that of plain Keras on the full batch."""

import keras
import numpy as np
import pytest
from helpers import dense_data, dense_model, seeded
from keras import layers, ops

from ga_model import AccumulatingModel, accumulate


def arguments(**kwargs):
    defaults = {"optimizer": keras.optimizers.SGD(0.1), "loss": "mse", "metrics": ["mae"]}
    return {**defaults, **kwargs}


def test_batches_of_a_window_log_what_it_has_so_far():
    """Where metrics are reset, a batch's log is the window's, with the batches before."""
    x, y = dense_data(12)
    model = accumulate(seeded(dense_model), accumulation_steps=3)
    model.compile(**arguments())
    expected = [model.evaluate(x[:stop], y[:stop], verbose=0) for stop in (4, 8, 12)]
    logs = []
    for i in (0, 4, 8):
        model.reset_metrics()  # up to Keras 3.14, `train_on_batch` does not
        logs.append(model.train_on_batch(x[i : i + 4], y[i : i + 4]))
    np.testing.assert_allclose([log[0] for log in logs], [e[0] for e in expected], rtol=1e-5)


def test_on_update_and_on_update_end_count_updates():
    class Net(AccumulatingModel, keras.Sequential):
        def build(self, shape=None):
            super().build(shape)
            self.updates = self.add_weight(shape=(), initializer="zeros", trainable=False)

        def on_update(self):
            self.updates.assign(self.updates + 1)

    numbers = []

    class Noting(keras.callbacks.Callback):
        def on_update_end(self, number, logs=None):
            numbers.append(number)

    model = seeded(lambda: Net([keras.Input((4,)), *dense_model().layers]))
    model.compile(**arguments(), accumulation_steps=3)
    x, y = dense_data(20)
    model.fit(x, y, batch_size=4, epochs=2, verbose=0, callbacks=[Noting()])
    assert float(model.updates) == 4
    assert numbers == [1, 2, 3, 4]


def test_half_precision_gradients_are_summed_in_float32():
    """In bfloat16 the sum would end at 512: what comes then is lost one by one."""
    keras.config.set_dtype_policy("bfloat16")
    kernel = layers.Dense(1, use_bias=False, kernel_initializer="zeros")
    model = accumulate(keras.Sequential([keras.Input((1,)), kernel]), microbatch_size=1)
    loss = keras.losses.MeanSquaredError(reduction="sum")
    model.compile(keras.optimizers.SGD(1 / 1024), loss)
    model.train_on_batch(np.ones((512, 1)), np.ones((512, 1)))
    assert float(model.get_weights()[0].squeeze()) == 1.0


@keras.saving.register_keras_serializable("tests")
class Net(AccumulatingModel, keras.Sequential):
    pass


class Weighed(AccumulatingModel, keras.Sequential):
    """Divides by what the targets' third column weighs, which may be nothing."""

    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
        weight = y[:, 2:]
        return ops.sum(weight * ops.square(y[:, :2] - y_pred)) / ops.sum(weight)

    def microbatch_weight(self, x, y=None, sample_weight=None):
        return ops.sum(y[:, 2])


class Keep(keras.optimizers.SGD):
    """Makes each variable its gradient."""

    def update_step(self, gradient, variable, learning_rate):
        self.assign(variable, gradient)


def weighed(rows, *, size, **settings):
    """Return what `Weighed` trained to, on batches of which the first and third weigh nothing."""
    x, y = dense_data(16)
    x[:, 1] = 0.0  # whose gradients are zeros, of either sign
    y = np.concatenate([y, np.repeat([0.0, 3.0, 0.0, 0.1], 4)[:, None]], axis=-1).astype("float32")
    model = seeded(lambda: Weighed([keras.Input((4,)), *dense_model().layers]))
    model.compile(Keep(1.0), **settings)
    history = model.fit(x[rows], y[rows], batch_size=size, shuffle=False, verbose=0).history
    return [w.tobytes() for w in model.get_weights()], history["loss"]


@pytest.mark.every_case
@pytest.mark.parametrize("run_eagerly", [False, True])
@pytest.mark.parametrize(
    "settings", [{"size": 4, "accumulation_steps": 3}, {"size": 12, "microbatch_size": 4}]
)
def test_a_microbatch_without_weight_is_left_out(settings, run_eagerly):
    """Its gradient, and what it logs, is NaN; the one that is left is itself to the bit."""
    expected, logged = weighed(slice(4, 8), size=4, run_eagerly=run_eagerly)
    found, loss = weighed(slice(0, 12), run_eagerly=run_eagerly, **settings)
    assert found == expected
    np.testing.assert_allclose(loss, logged, rtol=1e-6)
