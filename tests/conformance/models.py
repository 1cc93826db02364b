"""Cases about models, their data and its structure, optimizers and precision."""

import dataclasses
import functools
import itertools

import keras
import numpy as np
import zoo
from case import ALL, DIFFERS, MSE, TRIED, Case, Refused, Warns, sgd, whole
from helpers import Applies, averages_activities, dense_data, dense_model, sequential
from keras import layers, ops

CASES = {name: Case(*pair) for name, pair in zoo.ZOO.items()}


# Recurrent models, attention and other layers.


def stateful():
    cell = layers.SimpleRNN(4, stateful=True, return_sequences=True)
    inputs = keras.Input((5, 3), batch_size=12)
    return keras.Sequential([inputs, layers.Masking(), cell, layers.Dense(2)])


def language_model():
    """A causal one: tokens look at those before, and the padding is masked."""
    ids = keras.Input((6,), dtype="int32")
    x = layers.Embedding(9, 4, mask_zero=True)(ids)
    attention = layers.MultiHeadAttention(num_heads=2, key_dim=3, use_bias=False)
    x = layers.LayerNormalization()(x + attention(x, x, use_causal_mask=True))
    return keras.Model(ids, layers.Dense(9)(x))


def tokens(rows):
    """Microbatches of one or six tokens per sample."""
    drawn = np.random.default_rng(7).integers(1, 9, size=(rows, 7)).astype("int32")
    lengths = np.where(np.arange(rows) % 8 < 4, 1, 6)
    return np.where(np.arange(6) < lengths[:, None], drawn[:, :-1], 0), drawn[:, 1:]


def token_loss():
    return keras.losses.SparseCategoricalCrossentropy(from_logits=True)


# What is said of a layer that combines samples: nothing is inexact within a batch.
EITHER = Warns(f"{TRIED}|cannot be split into")
COMBINES = {**DIFFERS, "both": EITHER, **whole()}
CLIPS = {**COMBINES, **whole("custom gradient that combines samples")}
WRITES = {"across": EITHER, **whole(r"cannot be split into.*it writes to \[")}
AVERAGES = Warns("Their running averages are updated once per update", ("variables",))
MORE = ("windows", "recomputed", "batches of one", "microbatches of one")
MORE += ("recomputed windows", "left out")
IN_ONE_BATCH = {"settings": ("split", "recomputed"), "expects": whole()}


class Branches(layers.Layer):
    def build(self, shape):
        self.inner = layers.BatchNormalization()
        self.inner.build(shape)
        self.chosen = self.add_weight(shape=(), initializer="ones", trainable=False)

    def call(self, x, training=None):
        return ops.cond(self.chosen > 0, lambda: self.inner(x, training=training), lambda: x)


# Of what is normalized nothing depends on weights that are trained, so averages can be compared.


def normalized(**kwargs):
    """Normalizes its inputs, and what frozen layers make of them."""
    frozen = layers.Dense(3, activation="tanh", trainable=False)
    inputs = keras.Input((4,))
    parts = [inputs, layers.BatchNormalization(**kwargs)(inputs)]
    parts += [layers.BatchNormalization(momentum=0.7, **kwargs)(frozen(inputs))]
    return keras.Model(inputs, layers.Dense(2)(layers.Concatenate()(parts)))


def normalized_under_a_mask():
    normal = layers.BatchNormalization(momentum=0.8)
    pool = layers.GlobalAveragePooling1D()
    return sequential((5, 3), layers.Masking(), normal, pool, layers.Dense(2))


def normalized_images():
    inputs = keras.Input((6, 6, 2))
    parts = [layers.BatchNormalization(axis=a, momentum=0.8)(inputs) for a in (1, -1, 2)]
    return keras.Model(inputs, layers.Dense(2)(layers.Flatten()(layers.Concatenate()(parts))))


def masked_and_dense(rows):
    return zoo.masked_data(rows)[0], dense_data(rows)[1]


CASES |= {
    "stateful recurrent": Case(stateful, zoo.masked_data, samples=36, **IN_ONE_BATCH),
    "language model": Case(language_model, tokens, sgd((token_loss,))),
    "frozen batch normalization": Case(lambda: normalized(trainable=False)),
    "batch normalization in a branch": Case(
        lambda: sequential((4,), Branches(), layers.Dense(2)),
        expects={"recomputed": Warns("in a branch, a loop or a function", ALL)},
        backends=("tensorflow",),  # the others have Python's, or keep no state in one
        settings=("recomputed",),
    ),
    **{
        f"batch normalization{name}": Case(
            make,
            data,
            expects=dict.fromkeys(("within", "across"), AVERAGES),
            settings=("both", "split", *more),
        )
        for name, make, data, more in (
            ("", normalized, dense_data, MORE),
            (" under a mask", normalized_under_a_mask, masked_and_dense, ("recomputed",)),
            (" of images", normalized_images, zoo.convolution_data, ("recomputed",)),
        )
    },
}


class MovesItself(layers.BatchNormalization):
    """Has a call of its own, so that its averages are not pooled."""

    def call(self, inputs, training=None, mask=None):
        return super().call(inputs, training=training, mask=mask)


CASES["batch normalization that moves itself"] = Case(
    lambda: sequential((4,), MovesItself(name="bn"), layers.Dense(2)),
    expects={**whole(), "across": Warns(rf"{TRIED}|\['bn'\].*once per microbatch")},
    settings=("split", "windows"),
)


# Structures of data, in any order of keys.


def normalized_outputs():
    inputs = keras.Input((4,))
    hidden = layers.BatchNormalization(momentum=0.8)(inputs)
    return keras.Model(inputs, {name: layers.Dense(2, name=name)(hidden) for name in ("z", "a")})


def towers_data(rows):
    x, y = dense_data(rows, features=6, outputs=4)
    return {"right": x[:, :4], "left": x[:, 4:]}, {"z": y[:, :1], "a": y[:, 1:] + 5.0}


def towers():
    """Takes a dict and gives one, whose keys are not in alphabetical order."""
    inputs = {name: keras.Input((n,), name=name) for name, n in (("right", 4), ("left", 2))}
    hidden = {name: layers.Dense(4, "tanh")(part) for name, part in inputs.items()}
    outputs = {
        "z": layers.Dense(1, name="z")(hidden["right"] * hidden["left"]),
        "a": layers.Dense(3, name="a")(hidden["right"] - hidden["left"]),
    }
    return keras.Model(inputs, outputs)


def inputs_alone(rows):
    return dense_data(rows)[:1]


class Nested(keras.Model):
    """Takes a dict of a tuple and of an optional part."""

    def __init__(self):
        super().__init__()
        self.first, self.head = layers.Dense(4, "tanh"), layers.Dense(2)

    def call(self, inputs):
        one, other = inputs["y"]
        hidden = self.first(ops.concatenate([one, other["b"], other["a"]], axis=-1))
        return (self.head(hidden + inputs["x"]), [hidden])

    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
        found, (hidden,) = y_pred
        return ops.mean(ops.square(y - found)) + 0.1 * ops.mean(ops.square(hidden))


def nested_data(rows):
    x, y = dense_data(rows, features=10)
    parts = {"b": x[:, 2:3], "a": x[:, 3:6]}
    return {"y": (x[:, :2], parts), "x": x[:, 6:]}, y


class Ordered(layers.Layer):
    """Takes and gives dicts, of which it goes by the order, and one tensor twice."""

    def __init__(self):
        super().__init__()
        self.one, self.other = layers.Dense(4), layers.Dense(4)

    def build(self, _):
        self.one.build((None, 3))
        self.other.build((None, 1))

    def call(self, inputs):
        first, nothing, (second, _) = inputs.values()
        return {"z": self.one(first), "m": nothing, "again": (self.other(second),) * 2}


class CallsOrdered(keras.Model):
    def __init__(self):
        super().__init__()
        self.ordered, self.head = Ordered(), layers.Dense(2)

    def call(self, x):
        parts = {"b": x[:, :3], "m": None, "a": (x[:, 3:], x)}
        first, _, (second, same) = self.ordered(parts).values()
        return self.head(ops.tanh(first) * second + same)


def two_inputs():
    inputs = [keras.Input((2,)), keras.Input((2,))]
    return keras.Model(inputs, layers.Dense(2)(layers.Subtract()(inputs)))


def both(x, y):
    """Return a function from a number of samples to what others make of inputs and targets."""
    return lambda rows: tuple(part(values) for part, values in zip((x, y), dense_data(rows)))


def same(values):
    return values


def by_output(rows):
    return {"z": np.linspace(0.1, 3, rows), "a": np.linspace(2, 1, rows)}


OF_BOTH = {"z": "mse", "a": "mae"}
CASES |= {
    "an order of keys": Case(CallsOrdered),
    "dicts": Case(towers, towers_data, sgd(OF_BOTH, metrics={"a": ["mse"]})),
    "nested": Case(Nested, nested_data, sgd(None)),
    "a list with an output without a loss": Case(
        zoo.two_outputs, both(same, lambda y: [y, None]), sgd(["mse", None])
    ),
    "a list of inputs": Case(two_inputs, both(lambda x: np.split(x, 2, axis=1)[::-1], same)),
    "sample weights by output": Case(
        towers,
        lambda rows: (*towers_data(rows), by_output(rows)),
        sgd(OF_BOTH, loss_weights={"a": 0.3, "z": 2.0}),
    ),
    "normalized outputs of unlike weights": Case(
        normalized_outputs,
        lambda rows: (*both(same, lambda y: {"z": y, "a": y})(rows), by_output(rows)),
        sgd({name: keras.losses.MeanSquaredError("mean_with_sample_weight") for name in OF_BOTH}),
        expects={"within": Warns("BatchNormalization", compares=("variables",))},
        settings=("split",),
    ),
    "no targets": Case(
        lambda: keras.Sequential([dense_model(), Adds(mean_of_squares)]), inputs_alone, sgd(None)
    ),
    "a sample": Case(
        dense_model,
        samples=1,
        expects={
            "within": Warns("has no effect", ALL),
            "across": Warns("is more than the batches of an epoch", ALL),
        },
    ),
}


# Activity regularizers, which Keras averages over samples or sums up.


class RegularizedTwice(layers.Dense):
    """Has two outputs, and a regularizer of the user's own."""

    def __init__(self):
        def regularizer(x):
            return 0.1 * ops.sum(ops.power(x, 4))

        super().__init__(4, "tanh", activity_regularizer=regularizer)

    def call(self, x):
        return super().call(x), super().call(2.0 * x)

    def compute_output_shape(self, shape):
        return (super().compute_output_shape(shape),) * 2


def regularized_activities():
    l2 = keras.regularizers.L2(0.1)
    return keras.Sequential([layers.Dense(6, "tanh", activity_regularizer=l2), layers.Dense(2)])


def two_calls_with_two_outputs():
    inputs, layer = keras.Input((4,)), RegularizedTwice()
    return keras.Model(inputs, layers.Dense(2)(layer(layer(inputs)[1])[0]))


def of_activities(make, reduction):
    """In full windows of equal batches they are exact beside a loss of another kind."""
    is_alike = averages_activities() != (reduction == "sum")
    told = {"across": Warns("average over different things", ALL)}
    loss = functools.partial(keras.losses.MeanSquaredError, reduction)
    full = {"samples": 24, "settings": ("windows",)}
    return Case(make, compile=sgd((loss,), 0.01), expects={} if is_alike else told, **full)


CASES |= {
    "activities": of_activities(regularized_activities, "sum_over_batch_size"),
    "activities beside a sum": of_activities(regularized_activities, "sum"),
    "activities of two calls": of_activities(two_calls_with_two_outputs, "sum_over_batch_size"),
}


# Layers that add losses, or combine samples.


class Adds(layers.Layer):
    def __init__(self, *functions):
        super().__init__()
        self.functions = functions

    def call(self, x):
        for function in self.functions:
            self.add_loss(function(x))
        return x


def mean_of_squares(x):
    return 0.1 * ops.mean(ops.square(x))


def sum_of_squares(x):
    return 0.01 * ops.sum(ops.square(x))


def zero(x):
    """Has a gradient that is not zero."""
    return mean_of_squares(x) - ops.stop_gradient(mean_of_squares(x))


def of_each_sample(x):
    return 0.01 * ops.mean(ops.square(x), axis=-1)


class Stores(layers.Dense):
    """Keeps its output where a step may find it."""

    def call(self, x):
        self.kept = super().call(x)
        return self.kept


class AddsPenalty(layers.Dense):
    """A penalty on its own weights, as Bayesian layers add."""

    def call(self, x):
        squares = ops.square(self.kernel)
        self.add_loss(0.01 * ops.sum(squares - ops.log(1e-3 + squares)))
        return super().call(x)


class Centers(Applies):
    def __init__(self, factor=0.5):
        super().__init__(lambda x: x - factor * ops.mean(x, axis=0, keepdims=True))


def imputing(is_missing_in, code):
    """Return a case of means of the samples where numbers are missing, which have this code."""

    def imputed(x):
        is_missing = is_missing_in(x)
        number = ops.sum(ops.cast(ops.logical_not(is_missing), x.dtype), 0)
        means = ops.sum(ops.where(is_missing, 0.0, x), 0) / ops.maximum(number, 1.0)
        return ops.where(is_missing, means, x)

    def data(rows):
        x, y = dense_data(rows)
        is_known = np.random.default_rng(1).random(x.shape) < 0.7
        return np.where(is_known, x, code).astype(x.dtype), y

    return Case(lambda: sequential((4,), Applies(imputed), dense_model()), data, **IN_ONE_BATCH)


def with_gradient(rule):
    """Return an activation whose gradient is a function of that behind it, and of its values."""

    def activation(x):
        @ops.custom_gradient
        def same(x):
            def gradient(*given, upstream=None):
                return rule(given[0] if upstream is None else upstream, x)

            return x, gradient

        return same(ops.tanh(x))

    return activation


def clipped_by_norm(gradient, x):
    """Divide the gradients of samples by their norm."""
    return gradient / (1.0 + 9.0 * ops.sqrt(ops.sum(ops.square(gradient))))


# Of each alone.
OF_EACH = {
    "clamps": lambda g, x: ops.clip(g, -0.02, 0.01),
    "reverses": lambda g, x: -0.3 * g,
    "passes on some": lambda g, x: g * ops.cast(ops.abs(x) < 0.5, g.dtype),
}


def of_functions(*functions):
    """Return a function that makes a dense model with such activations behind."""
    return followed_by(*(lambda f=f: layers.Dense(3, activation=f) for f in functions))


class Looks(layers.Embedding):
    """Takes from vectors of ids a part of their mean over samples."""

    def call(self, ids):
        vectors = super().call(ids)
        return vectors - 0.5 * ops.mean(vectors, axis=0, keepdims=True)


def looking():
    ids = keras.Input((2,), dtype="int32")
    hidden = layers.Dense(3, activation="tanh")(layers.Flatten()(Looks(7, 3)(ids)))
    return keras.Model(ids, layers.Dense(2)(hidden))


def alike_at_first(rows):
    ids = np.random.default_rng(0).integers(0, 7, size=(rows, 2)).astype("int32")
    ids[:5] = ids[0]
    return ids, dense_data(rows)[1]


def behind_zeros(base=keras.Sequential, compile_args=MSE):
    """Return a case of what combines samples behind weights that are zero at first."""

    def make():
        hidden = [layers.Dense(5, activation="tanh"), Centers()]
        return base([keras.Input((4,)), *hidden, layers.Dense(2, kernel_initializer="zeros")])

    expects = {**COMBINES, **whole("cannot be split.*Training is exact")}
    return Case(make, compile=compile_args, expects=expects, settings=("windows", "split"))


class KeepsAverage(layers.Dense):
    """Keeps an average of its inputs, as codes of a VQ-VAE, by which it scales them."""

    def build(self, shape):
        super().build(shape)
        self.average = self.add_weight(shape=(4,), trainable=False, initializer="ones")

    def call(self, x):
        outputs = super().call(x * self.average)
        self.average.assign(0.5 * self.average + 0.5 * ops.mean(x, axis=0))
        return outputs


def with_an_operation():
    inputs = keras.Input((4,))
    hidden = layers.Dense(6, activation="tanh")(inputs)
    return keras.Model(inputs, layers.Dense(2)(hidden - ops.mean(hidden, axis=0)))


class Annealed(layers.Layer):
    """Adds a loss that has no weight in the first epoch, which `Anneals` raises."""

    def __init__(self, function):
        super().__init__(name="annealed")
        self.function = function

    def build(self, shape):
        self.factor = self.add_weight(shape=(), initializer="zeros", trainable=False)

    def call(self, x):
        self.add_loss(self.factor * self.function(ops.sum(ops.square(x))))
        return x


class Anneals(keras.callbacks.Callback):
    def on_epoch_begin(self, epoch, logs=None):
        model = getattr(self.model, "net", self.model)
        model.get_layer("annealed").factor.assign(0.02 * epoch)


def annealed(function, base=keras.Sequential, **kwargs):
    def make():
        hidden = [layers.Dense(6, activation="tanh"), Annealed(function), layers.Dense(2)]
        return base([keras.Input((4,)), *hidden])

    return Case(make, fit={"callbacks": [Anneals()], "epochs": 3}, **kwargs)


class Elsewhere(layers.Layer):
    """Writes to a variable that is no layer's; on JAX, plain Keras loses what it writes."""

    other = None

    def build(self, shape):
        type(self).other = keras.Variable(0.0)

    def call(self, x):
        type(self).other.assign(ops.mean(x))
        return x


class CountsInside(Centers):
    """Is not split, so calls in it are, of which one writes to a variable."""

    def __init__(self):
        super().__init__()
        self.counts = layers.SpectralNormalization(layers.Dense(4))

    def call(self, x):
        return super().call(self.counts(x, training=True))


class NamedDense(layers.Dense):
    def call(self, x):
        return super().call(x), "first"


class Named(keras.Model):
    """Compares samples, so calls in it are split, of which one gives what is no array."""

    def __init__(self):
        super().__init__()
        self.first, self.last = NamedDense(3), layers.Dense(2)

    def call(self, x):
        outputs, name = self.first(x)
        assert name == "first"
        return self.last(outputs - ops.mean(outputs, axis=0))


class Draws(layers.Layer):
    """Draws random numbers, which change nothing without a factor."""

    def __init__(self, factor=0.0):
        super().__init__()
        self.factor, self.seeds = factor, keras.random.SeedGenerator(3)

    def call(self, x):
        numbers = keras.random.normal(ops.shape(x), dtype=x.dtype, seed=self.seeds)
        return x + self.factor * numbers


def followed_by(*parts):
    """Return a function that makes a dense model with fresh layers of some classes behind."""
    return lambda: keras.Sequential([dense_model(), *(part() for part in parts), layers.Dense(2)])


def behind(*parts, **kwargs):
    return Case(followed_by(*parts), **kwargs)


def adding(*functions, **kwargs):
    return behind(lambda: Adds(*functions), **kwargs)


def before(first, **kwargs):
    return Case(lambda: sequential((4,), first(), layers.Dense(2)), **kwargs)


UNLIKE = {"across": Warns("The terms of this loss average over")}
CASES |= {
    "a layer that adds a mean": adding(mean_of_squares),
    "a layer that adds a sum": adding(
        sum_of_squares, compile=sgd((lambda: keras.losses.MeanSquaredError("sum"),), 0.005)
    ),
    "a layer that adds a mean and a sum": adding(
        lambda x: 0.2 * mean_of_squares(x), lambda x: 0.01 * ops.sum(ops.abs(x)), expects=UNLIKE
    ),
    "a layer that adds a zero with a gradient": adding(
        zero, expects={"recomputed": Warns("zero when it was tried", ALL)}
    ),
    "a layer that adds a value per sample": adding(of_each_sample, expects=UNLIKE),
    "a layer that adds a value per sample, in full windows": adding(
        of_each_sample,
        samples=24,
        settings=("windows",),
        expects={"windows": Warns("The terms of", ALL)},
    ),
    "a layer that adds all the loss per sample": adding(
        of_each_sample, compile=sgd(None), data=inputs_alone
    ),
    "a layer that adds a mean of each column": adding(
        lambda x: 0.1 * ops.mean(ops.square(x), axis=0), settings=("recomputed",)
    ),
    "a layer that takes from the sample before": behind(
        lambda: Applies(lambda x: ops.roll(x, 1)),
        settings=("windows", "batches of three"),
        expects=DIFFERS,
    ),
    "a layer that adds a penalty": behind(lambda: AddsPenalty(2, use_bias=False)),
    "a layer that adds a sum later": annealed(ops.sum, settings=("split",)),
    "a layer that adds a root later": annealed(
        ops.sqrt,
        expects={**COMBINES, **whole("neither a mean nor a sum over samples")},
        settings=("windows", "split"),
    ),
    "a layer that adds a root": adding(
        lambda x: ops.sqrt(ops.sum(ops.square(x))),
        expects={**COMBINES, **whole("neither a mean nor a sum")},
    ),
    "a layer that stores a tensor": behind(
        lambda: Stores(2, "tanh"),
        expects={"recomputed": Warns("stores a tensor in its attribute `kept`", ALL)},
    ),
    "a layer that combines samples": behind(Centers, expects=COMBINES),
    "a layer that clips gradients of samples together": behind(
        lambda: Applies(with_gradient(clipped_by_norm)), expects=CLIPS
    ),
    "an operation that combines samples": Case(with_an_operation, expects=COMBINES),
    "an activation that combines samples": Case(
        of_functions(lambda x: ops.tanh(x) - 0.5 * ops.mean(x, 0)), expects=COMBINES
    ),
    "an activation that clips gradients of samples together": Case(
        of_functions(with_gradient(clipped_by_norm)), expects=CLIPS
    ),
    **{
        f"a layer that {what} gradients": behind(
            functools.partial(Applies, with_gradient(rule)),
            expects=DIFFERS if what == "clamps" else {},
            settings=("windows", "split"),
        )
        for what, rule in OF_EACH.items()
    },
    "activations of the user's": Case(of_functions(lambda x: x * ops.tanh(x), ops.sin)),
    "a layer that combines samples, which are alike at first": Case(
        looking, alike_at_first, **IN_ONE_BATCH
    ),
    "a layer that combines samples behind a head of zeros": behind_zeros(),
    "a layer that combines samples where numbers are missing": imputing(ops.isnan, np.nan),
    "a layer that combines samples where there is a code": imputing(lambda x: x == -9.0, -9.0),
    "a layer that writes to its weights": before(
        lambda: layers.SpectralNormalization(layers.Dense(5, "tanh")), expects=WRITES
    ),
    "a layer that keeps an average": before(lambda: KeepsAverage(5, "tanh"), expects=WRITES),
    "a layer that writes elsewhere": behind(
        Elsewhere,
        expects={"recomputed": Warns("writes to a variable of another layer", ALL)},
        backends=("jax",),
        settings=("recomputed", "windows"),
    ),
    "a layer that combines samples, and one in it that writes": Case(
        lambda: sequential((4,), CountsInside(), dense_model()), **IN_ONE_BATCH
    ),
    "a layer of a model that combines samples, which gives a name": Case(Named, **IN_ONE_BATCH),
    "a layer that draws": behind(Draws, compares=tuple(name for name in ALL if name != "seeds")),
}


# What an optimizer does once per update.


SETTINGS_OF_SGD = {
    "moving average that overwrites": {"use_ema": True, "ema_overwrite_frequency": 2},
    "clipnorm": {"clipnorm": 0.1},
    "global_clipnorm": {"global_clipnorm": 0.1},
    "clipvalue": {"clipvalue": 0.05},
    "weight decay": {"weight_decay": 0.3},
    "loss scale factor": {"loss_scale_factor": 8.0},
}

OPTIMIZERS = {
    "sgd": lambda: keras.optimizers.SGD(0.1),
    "momentum": lambda: keras.optimizers.SGD(0.1, momentum=0.9, nesterov=True),
    "adam": lambda: keras.optimizers.Adam(0.01),
    "adamw": lambda: keras.optimizers.AdamW(0.01, weight_decay=0.1),
    "rmsprop": lambda: keras.optimizers.RMSprop(0.01),
    "lion": lambda: keras.optimizers.Lion(0.01),
    "moving average": lambda: keras.optimizers.Adam(0.01, use_ema=True, ema_momentum=0.8),
    "lamb": lambda: keras.optimizers.Lamb(0.01),
    "nadam": lambda: keras.optimizers.Nadam(0.01),
    "adamax": lambda: keras.optimizers.Adamax(0.01),
    "adagrad": lambda: keras.optimizers.Adagrad(0.1),
    "adadelta": lambda: keras.optimizers.Adadelta(1.0),
    "adafactor": lambda: keras.optimizers.Adafactor(0.05),
    "ftrl": lambda: keras.optimizers.Ftrl(0.1),
    "loss scale": lambda: keras.optimizers.LossScaleOptimizer(keras.optimizers.Adam(0.01)),
    "schedule": lambda: keras.optimizers.SGD(
        keras.optimizers.schedules.ExponentialDecay(0.2, decay_steps=2, decay_rate=0.5), 0.9
    ),
}
OPTIMIZERS |= {
    name: functools.partial(keras.optimizers.SGD, 0.1, **options)
    for name, options in SETTINGS_OF_SGD.items()
}

if hasattr(keras.optimizers, "Muon"):  # since Keras 3.10
    OPTIMIZERS["muon"] = lambda: keras.optimizers.Muon(0.01)

if hasattr(keras.optimizers, "ScheduleFreeAdamW"):  # since Keras 3.14
    OPTIMIZERS["schedule free"] = lambda: keras.optimizers.ScheduleFreeAdamW(0.01)

if hasattr(keras.optimizers, "MultiOptimizer"):  # since Keras 3.15

    def several():
        by_rank = keras.optimizers.Adam(0.01), keras.optimizers.SGD(0.1, momentum=0.9)
        return keras.optimizers.MultiOptimizer(lambda v: by_rank[len(v.shape) == 1])

    OPTIMIZERS["several"] = several


class Shrink(keras.constraints.Constraint):
    """Not idempotent: applied twice it shrinks twice."""

    def __call__(self, w):
        return 0.9 * w


def constrained():
    hidden = layers.Dense(6, "tanh", kernel_constraint=Shrink())
    return sequential((4,), hidden, layers.Dense(2, kernel_constraint=Shrink()))


def compiled_with(make):
    return lambda: {"optimizer": make(), "loss": "mse"}


def optimized(make, **kwargs):
    return Case(dense_model, compile=compiled_with(make), **kwargs)


CASES |= {n: optimized(make, settings=("both", "split")) for n, make in OPTIMIZERS.items()}
CASES["constraints"] = Case(constrained)
CASES["embedding with adam"] = Case(*zoo.ZOO["embedding"], compiled_with(OPTIMIZERS["adam"]))
# A window looks up 60 ids, of 7.
CASES["embedding of few ids"] = Case(functools.partial(zoo.embedding, 7), zoo.embedding_data)
CASES["embedding of few ids, compiled by XLA"] = dataclasses.replace(
    CASES["embedding of few ids"],
    compile=sgd(jit_compile=True),
    backends=("tensorflow",),
    settings=("windows",),
)


# Keras's step on TensorFlow calls `apply_gradients`, which may be the user's own.


class NormalizesInPairs(keras.optimizers.SGD):
    def apply_gradients(self, grads_and_vars):
        pairs = [(g / (1e-3 + ops.norm(ops.reshape(g, -1))), v) for g, v in grads_and_vars]
        return super().apply_gradients(pairs)


def patched():
    optimizer = keras.optimizers.SGD(0.1)
    original = optimizer.apply_gradients
    optimizer.apply_gradients = lambda pairs: original([(2.0 * g, v) for g, v in pairs])
    return optimizer


CASES |= {
    f"apply_gradients of {name}": optimized(
        make, backends=("tensorflow",), settings=("windows", "split")
    )
    for name, make in {"a class": lambda: NormalizesInPairs(0.1), "an instance": patched}.items()
}


# Variables that are trained otherwise, or not at all.


def of_low_rank(is_quantized):
    def make():
        model = dense_model()
        for layer in model.layers:
            if is_quantized:
                layer.quantize("int8")
        for layer in model.layers[: 1 if is_quantized else 2]:
            layer.enable_lora(2)
        return model

    adam = compiled_with(OPTIMIZERS["adam"])
    backends = "tensorflow", "torch"  # where it was tried
    return Case(make, compile=adam, precision="float32", settings=("both",), backends=backends)


def float8(**kwargs):
    """Scales of float8 layers are the largest values of a full batch."""
    return Case(zoo.float8, precision="float32", backends=("tensorflow",), **kwargs)


CASES |= {
    "low rank": of_low_rank(is_quantized=False),
    "low rank, int8": of_low_rank(is_quantized=True),
    **{
        f"float8, {name}": float8(
            compile=compiled_with(OPTIMIZERS[name]),
            samples=36,
            settings=("windows", "microbatches of one", "batches of three"),
        )
        for name in ("sgd", "adam")
    },
    "float8, without weight": float8(
        data=lambda rows: (*dense_data(rows), np.zeros(rows)),
        compile=sgd((lambda: keras.losses.MeanSquaredError("mean_with_sample_weight"),)),
        settings=("split",),
    ),
    "float8 in partial windows": float8(
        expects={"windows": Warns("Float8 layers record the size of gradients.*partial")},
        settings=("windows",),
    ),
}


# Precision, and ways to run.


def deep():
    """Rounds otherwise for other numbers of samples."""
    hidden = (layers.Dense(32, activation="relu") for _ in range(12))
    return sequential((4,), *hidden, layers.Dense(2))


HALF = {
    "dense": Case(dense_model),
    "recurrent": Case(*zoo.ZOO["masked_recurrent"]),
    "attention": Case(*zoo.ZOO["attention"]),
    "embedding": Case(*zoo.ZOO["embedding"]),
    "deep": Case(deep, settings=("split",), compares=("updates",)),
    # Its own call is not split, as samples are combined, so that calls inside of it are.
    "calls inside of a model": Case(
        lambda: sequential((4,), layers.Dense(6, "tanh"), Centers(0.3), layers.Dense(2)),
        settings=("split", "recomputed", "microbatches of one"),
        expects=whole(),
    ),
}


for policy, (name, case) in itertools.product(("mixed_float16", "mixed_bfloat16"), HALF.items()):
    CASES[f"{policy}: {name}"] = dataclasses.replace(case, precision=policy)


def light_at_first(rows):
    """The others are not to be in the unit of the first microbatch, in which they overflow."""
    return *dense_data(rows), np.where(np.arange(rows) % 12 < 4, 1 / 1024, 1.0)


def of_light_samples():
    loss_scale = {"initial_scale": 2.0**12, "dynamic_growth_steps": 1000}
    optimizer = keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.1), **loss_scale)
    return {
        "optimizer": optimizer,
        "loss": keras.losses.MeanSquaredError("mean_with_sample_weight"),
    }


CASES["mixed_float16: a light first microbatch"] = Case(
    dense_model, light_at_first, of_light_samples, precision="mixed_float16", settings=("windows",)
)


def large_targets(rows):
    """Gradients of full batches overflow: those of a microbatch only in the last window."""
    x, y = dense_data(rows)
    y = 20.0 * y + 20.0
    y[-1] = 3000.0
    return x, y


def of_large_targets():
    """Several updates are skipped."""
    loss_scale = {"initial_scale": 2.0**13, "dynamic_growth_steps": 2}
    optimizer = keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(1e-3), **loss_scale)
    return {"optimizer": optimizer, "loss": "mse"}


# Rounding cannot be measured by float32, which does not overflow, and is to be that of one number:
# without the settings in which microbatches of other sizes have other weights.
CASES["mixed_float16: scales that overflow"] = Case(
    dense_model,
    large_targets,
    of_large_targets,
    precision="mixed_float16",
    settings=("windows", "recomputed", "batches of one", "microbatches of one"),
)

# XLA has no float16 for it on CPUs.
CASES["mixed_float16: attention"] = dataclasses.replace(
    CASES["mixed_float16: attention"], backends=("tensorflow", "torch")
)


def run(how, **kwargs):
    return Case(dense_model, compile=sgd(metrics=["mae"], **how), **kwargs)


IN_GRAPHS = {"backends": ("tensorflow", "jax")}
CASES |= {
    "eager": run({"run_eagerly": True}),
    "compiled by XLA": run({"jit_compile": True}, expects={"torch": Refused("jit_compile=False")}),
    **{
        f"{number} steps per execution, compiled by XLA": run(
            {"steps_per_execution": number, "jit_compile": True},
            settings=("windows", "both"),
            **IN_GRAPHS,
        )
        for number in (2, 5)
    },
    "several steps per execution": run({"steps_per_execution": 3}, **IN_GRAPHS),
}
