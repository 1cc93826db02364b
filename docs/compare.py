"""Compare ways to accumulate with plain Keras on the full batch: `python docs/compare.py`.

Each case trains a small model in float64 for two epochs, on batches of 64 samples with plain Keras,
and on batches of 16 in each way. Printed is the relative difference of the weight change, the
largest over all weights: rounding is 1e-12 or less. `gradient-accumulator` is left out where it is
not installed.
"""

from __future__ import annotations

import functools
import importlib.util
import os
import warnings

os.environ.setdefault("KERAS_BACKEND", "tensorflow")
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import keras
import numpy as np
import tensorflow as tf

from ga_model import accumulate

STEPS, SMALL, FULL, EPOCHS = 4, 16, 64, 2


def dense(constraint=None):
    hidden = keras.layers.Dense(16, activation="tanh", kernel_constraint=constraint)
    return keras.Sequential([keras.Input((6,)), hidden, keras.layers.Dense(1)])


def masked():
    layers = keras.layers
    recurrent = layers.LSTM(8, return_sequences=True)
    return keras.Sequential([keras.Input((20, 3)), layers.Masking(), recurrent, layers.Dense(1)])


def embedding(vocabulary):
    layers = [keras.layers.Embedding(vocabulary, 8), keras.layers.Flatten(), keras.layers.Dense(1)]
    return keras.Sequential([keras.Input((6,), dtype="int32"), *layers])


def by_keras(make, optimizer, loss, x, y):
    return _by_fit(make(), optimizer(gradient_accumulation_steps=STEPS), loss, x, y, SMALL)


def by_ga_model(make, optimizer, loss, x, y):
    model = accumulate(make(), accumulation_steps=STEPS)
    return _by_fit(model, optimizer(), loss, x, y, SMALL)


def by_ga_model_split(make, optimizer, loss, x, y):
    return _by_fit(accumulate(make(), microbatch_size=SMALL), optimizer(), loss, x, y, FULL)


def by_gradient_accumulator(make, optimizer, loss, x, y):
    from gradient_accumulator import GradientAccumulateModel

    plain = make()
    model = GradientAccumulateModel(STEPS, inputs=plain.inputs, outputs=plain.outputs)
    return _by_fit(model, optimizer(), loss, x, y, SMALL)


def by_recipe(make, optimizer, loss, x, y):
    """The usual loop: add gradients / K, and update every K batches."""
    model, optimizer = make(), optimizer()
    weights = model.trainable_variables
    sums = [tf.Variable(tf.zeros_like(weight)) for weight in weights]

    @tf.function(reduce_retracing=True)
    def add(x, y):
        with tf.GradientTape() as tape:
            value = loss()(y, model(x, training=True)) / STEPS
        for total, gradient in zip(sums, tape.gradient(value, weights)):
            total.assign_add(tf.convert_to_tensor(gradient))

    for _ in range(EPOCHS):
        for step, start in enumerate(range(0, len(x), SMALL), start=1):
            add(tf.constant(x[start : start + SMALL]), tf.constant(y[start : start + SMALL]))
            if step % STEPS == 0:
                optimizer.apply(sums, weights)
                for total in sums:
                    total.assign(tf.zeros_like(total))
    optimizer.finalize_variable_values(weights)
    return model.get_weights()


def _by_fit(model, optimizer, loss, x, y, batch_size):
    model.compile(optimizer, loss())
    model.fit(x, y, batch_size=batch_size, epochs=EPOCHS, shuffle=False, verbose=0)
    return model.get_weights()


def cases():
    random = np.random.default_rng(0)
    x = random.normal(size=(256, 6))
    y = np.sin(x.sum(axis=1, keepdims=True))
    lengths = np.minimum(random.geometric(0.15, size=256), 20)
    sequences = random.normal(size=(256, 20, 3)) * (np.arange(20) < lengths[:, None])[..., None]
    targets = sequences.sum(axis=-1, keepdims=True)
    ids = random.integers(12, size=(256, 6)).astype("int32")
    mean = keras.losses.MeanSquaredError

    adam = functools.partial(keras.optimizers.Adam, 0.01)
    averaged = functools.partial(adam, use_ema=True, ema_momentum=0.9)
    decay = keras.optimizers.schedules.CosineDecay(0.01, 8)
    scheduled = functools.partial(keras.optimizers.Adam, decay)
    sgd = functools.partial(keras.optimizers.SGD, 0.0005)
    total = functools.partial(mean, reduction="sum")
    bounded = functools.partial(dense, keras.constraints.MaxNorm(0.3))
    return {
        "even windows": (dense, adam, mean, x, y),
        "partial window": (dense, adam, mean, x[:212], y[:212]),
        "masks": (masked, adam, mean, sequences, targets),
        "a loss that is a sum": (dense, sgd, total, x, y),
        "moving average (EMA)": (dense, averaged, mean, x, y),
        "learning-rate schedule": (dense, scheduled, mean, x, y),
        "constraint": (bounded, adam, mean, x, y),
        "Embedding, large table": (functools.partial(embedding, 1000), adam, mean, ids, y),
        "Embedding, small table": (functools.partial(embedding, 12), adam, mean, ids, y),
    }


WAYS = {
    "Keras's own": by_keras,
    "gradient-accumulator": by_gradient_accumulator,
    "GradientTape / K": by_recipe,
    "accumulation_steps": by_ga_model,
    "microbatch_size": by_ga_model_split,
}


def difference(case, way):
    """Return ||w - w_full|| / ||w_full - w_start||, the largest over weights, or what failed."""
    keras.utils.set_random_seed(0)
    make, optimizer, loss, x, y = case
    model = make()
    start = model.get_weights()
    full = _by_fit(model, optimizer(), loss, x, y, FULL)
    keras.utils.set_random_seed(0)
    try:
        weights = way(make, optimizer, loss, x, y)
    except Exception as error:
        return type(error).__name__
    triples = zip(weights, full, start, strict=True)
    return f"{max(np.linalg.norm(w - f) / np.linalg.norm(f - s) for w, f, s in triples):.0e}"


def main():
    warnings.simplefilter("ignore")
    keras.config.set_floatx("float64")
    keras.config.set_dtype_policy("float64")
    ways = dict(WAYS)
    if importlib.util.find_spec("gradient_accumulator") is None:
        del ways["gradient-accumulator"]
    print(f"| {'case':22} | " + " | ".join(f"{name:20}" for name in ways) + " |")
    print("|---" * (len(ways) + 1) + "|")
    for name, case in cases().items():
        found = [difference(case, way) for way in ways.values()]
        print(f"| {name:22} | " + " | ".join(f"{value:20}" for value in found) + " |")


if __name__ == "__main__":
    main()
