"""Cases about losses: reductions, masks, weights, logs, and losses of the user's own."""

import functools
import itertools

import keras
import numpy as np
import zoo
from case import BACKEND, DIFFERS, TRIED, USUAL, Case, FallsShort, Refused, Warns, sgd
from helpers import dense_data, dense_model, ruled, sequential
from keras import layers, ops

L2 = keras.regularizers.L2(0.1)
FULL = 24  # of ragged batches, Keras on TensorFlow does not know the samples, and counts one each


# Reductions, masks and weights.

REDUCTIONS = ["mean_with_sample_weight", "sum_over_batch_size", "mean", "sum"]

DIFFERENT_REDUCTIONS = [name for name in REDUCTIONS if name != "mean"]  # which is the second one


def sequence_model(*first):
    parts = *first, layers.Dense(4, activation="tanh"), layers.Dense(2)
    return sequential((5, 3), *parts)


def sample_weights(kind, rows):
    generator = np.random.default_rng(5)
    if kind == "none":
        return ()
    shape = {"rows": (rows, 1), "positions": (rows, 5), "zeros": (rows, 1)}[kind]
    weights = generator.uniform(0.1, 3.0, size=shape).astype(keras.config.floatx())
    if kind == "zeros":
        weights[: rows // 3] = 0.0  # a whole microbatch that counts nothing, and more
    return (weights,)


def squared(reduction):
    """Return a loss for `sgd`, which makes it when it is asked to."""
    return (lambda: keras.losses.MeanSquaredError(reduction),)


def compile_with(reduction, **kwargs):
    return sgd(squared(reduction), 0.001 if reduction == "sum" else 0.05, **kwargs)


MODELS = {
    "masked": (lambda: sequence_model(layers.Masking()), zoo.masked_data),
    "unmasked": (sequence_model, zoo.masked_data),
}


def weighted(make_data, kind):
    return lambda rows: (*make_data(rows), *sample_weights(kind, rows))


CASES = {
    f"{reduction}, {name}, weights: {kind}": Case(
        make,
        weighted(data, kind),
        compile_with(reduction),
        # Keras's own step on PyTorch takes no weights of samples for sequences.
        backends=("tensorflow", "jax") if kind in ("rows", "zeros") else Case.backends,
    )
    for (name, (make, data)), reduction, kind in itertools.product(
        MODELS.items(), DIFFERENT_REDUCTIONS, ("none", "rows", "positions", "zeros")
    )
}


def with_weights(rows):
    return *dense_data(rows), np.linspace(0.1, 3.0, rows).astype(keras.config.floatx())


CASES |= {
    f"{reduction}, weights of samples": Case(
        dense_model,
        with_weights,
        compile_with(reduction, weighted_metrics=["mae"]),
    )
    for reduction in DIFFERENT_REDUCTIONS
}
OF_SCALARS = {"backends": ("tensorflow",)}  # others take gradients of scalars only
CASES["no reduction"] = Case(dense_model, compile=sgd(squared("none"), 0.005), **OF_SCALARS)
CASES["no reduction beside another"] = Case(
    *zoo.ZOO["two_outputs"],
    sgd((lambda: [keras.losses.MeanSquaredError("none"), "mse"],)),
    expects={"across": Refused("Set its reduction to 'sum'")},
    settings=("windows",),
    **OF_SCALARS,
)


# Weights of classes, ignored classes, and microbatches that count nothing.


def classes(rows):
    return dense_data(rows)[0], (np.arange(rows) % 3).astype("int32")


def ignoring(rows):
    """Two microbatches and a sample are ignored, and most of the others' positions."""
    y = np.random.default_rng(6).integers(0, 2, size=(rows, 5)).astype("int32")
    y[:9] = -1
    y[12:, 2:] = -1
    return zoo.masked_data(rows)[0], y


def without_weight(rows):
    """The second of three microbatches of 4 has no weight."""
    x, y, weights = with_weights(rows)
    return x, y, np.where(np.arange(rows) % 12 // 4 == 1, 0.0, weights)


def masked_window(rows):
    """The second window has no valid position: its gradient is that of regularizers."""
    x, y = zoo.masked_data(rows)
    x[12:24] = 0.0
    return x, y


def decaying():
    rate = keras.optimizers.schedules.ExponentialDecay(0.1, 2, 0.5)
    return {"optimizer": keras.optimizers.AdamW(rate, weight_decay=0.1), "loss": "mse"}


for reduction in REDUCTIONS:
    loss = functools.partial(keras.losses.SparseCategoricalCrossentropy, True, reduction=reduction)
    CASES[f"class weights, {reduction}"] = Case(
        functools.partial(dense_model, outputs=3),
        classes,
        sgd((loss,), 0.02),
        {"class_weight": {0: 0.2, 1: 1.0, 2: 4.0}},
    )

CASES |= {
    "ignored class": Case(
        sequence_model,
        ignoring,
        sgd((lambda: keras.losses.SparseCategoricalCrossentropy(True, ignore_class=-1),)),
    ),
    "a microbatch without weight": Case(
        dense_model, without_weight, compile_with("mean_with_sample_weight")
    ),
    "a window without weight": Case(
        functools.partial(zoo.masked_recurrent, kernel_regularizer="l2"),
        masked_window,
        decaying,
        settings=(*USUAL, "left out"),
    ),
}


class CallsOnDemand(keras.Model):
    """Calls a layer where a sample asks for it: other microbatches have no gradient of it."""

    def __init__(self):
        super().__init__()
        self.of_all, self.of_some = layers.Dense(1), layers.Dense(1)

    def build(self, shape):
        self.of_all.build(shape), self.of_some.build(shape)

    def call(self, x):
        asks = ops.cast(x[:, :1] > 0, x.dtype)
        if bool(ops.any(asks)):
            return self.of_all(x) + asks * self.of_some(x)
        return self.of_all(x)


def heavier_later(rows):
    """The first samples of a window ask for the layer, and the others weigh more."""
    x, y = dense_data(rows)
    is_first = np.arange(rows) % 12 < 4
    x[:, 0] = np.where(is_first, 1.0, -1.0)
    return x, y, np.where(is_first, 0.5, 1.0).astype(x.dtype)


CASES |= {
    f"a layer on demand, {setting}": Case(
        CallsOnDemand,
        heavier_later,
        compile_with("mean_with_sample_weight", run_eagerly=True),
        backends=("tensorflow", "torch"),  # branches by values run eagerly
        settings=(setting,),
    )
    for setting in ("windows", "windows that may be left out")
}


# Several outputs, with denominators of their own.


def two_masked_outputs():
    """Each output has the mask of its own input."""
    a, b = keras.Input((5, 3)), keras.Input((5, 3))
    masking = layers.Masking()
    hidden = layers.Dense(4, activation="tanh")
    outputs = [layers.Dense(2, name=n)(hidden(masking(i))) for n, i in (("a", a), ("b", b))]
    return keras.Model([a, b], outputs)


def two_masked_data(rows):
    (a, y), (b, _) = zoo.masked_data(rows), zoo.masked_data(rows)
    return [a, b[::-1].copy()], [y, y[::-1].copy()]


def masked_with_activity_regularizer():
    hidden = layers.Dense(4, "tanh", activity_regularizer=keras.regularizers.L2(0.3))
    return sequential((5, 3), layers.Masking(), hidden, layers.Dense(2, kernel_regularizer=L2))


def two_sequences():
    inputs = keras.Input((5, 3))
    hidden = layers.Dense(4, activation="tanh")(inputs)
    return keras.Model(inputs, [layers.Dense(2, name=name)(hidden) for name in "ab"])


def mixed(*reductions):
    return sgd(
        (lambda: [keras.losses.MeanSquaredError(reduction) for reduction in reductions],),
        0.005,
        loss_weights=[0.7, 1.9],
    )


def weighted_data(rows, kinds):
    x, y = zoo.masked_data(rows)
    generator = np.random.default_rng(9)
    weights = [generator.uniform(0.1, 3.0, size=(rows, kind)) for kind in kinds]
    return x, [y, -y], weights


def nothing_in_the_first_part(rows):
    x, y, weights = weighted_data(rows, (1, 5))
    weights[0][np.arange(rows) % 12 < 5] = 0.0
    return x, y, weights


OF_WEIGHTS = mixed("mean_with_sample_weight", "mean_with_sample_weight")
UNLIKE = {
    "two masks": (two_masked_outputs, mixed("mean", "mean"), two_masked_data),
    "two masks, sum": (two_masked_outputs, mixed("mean", "sum"), two_masked_data),
    "mask and activity": (masked_with_activity_regularizer, compile_with("mean"), zoo.masked_data),
    "mean and sum": (two_sequences, mixed("mean", "sum"), lambda n: weighted_data(n, (1, 1))),
    "two sample weights": (two_sequences, OF_WEIGHTS, lambda n: weighted_data(n, (1, 5))),
    "a part that one leaves out": (two_sequences, OF_WEIGHTS, nothing_in_the_first_part),
}
TERMS = Warns("The terms of this loss average over")
CASES |= {
    name: Case(
        make,
        data,
        compile_args,
        expects=dict.fromkeys(("across", "left out"), TERMS),
        settings=(*USUAL, "left out"),
    )
    for name, (make, compile_args, data) in UNLIKE.items()
}


def squared_and_absolute(reduction):
    return (lambda: [keras.losses.MeanSquaredError(), keras.losses.MeanAbsoluteError(reduction)],)


CASES |= {
    "two reductions that agree": Case(
        *zoo.ZOO["two_outputs"],
        sgd(squared_and_absolute("mean"), loss_weights=[0.3, 2.0]),
    ),
    "a second loss on one output": Case(dense_model, compile=sgd(squared_and_absolute("sum"))),
}


# Regularizers.


CASES |= {
    f"regularizers, {name}": Case(
        functools.partial(zoo.masked_recurrent, kernel_regularizer=L2, bias_regularizer=L2),
        zoo.masked_data,
        compile_with(name),
    )
    for name in REDUCTIONS
}


# Losses of the user's own.


def positive_where(is_positive):
    """Return data whose targets are positive where a function of their places says so."""

    def data(rows):
        x, y = dense_data(rows)
        return x, np.where(is_positive(np.arange(rows))[:, None], np.abs(y), -np.abs(y))

    return data


def unmarked(first, last):
    """Return data of which so many of each 12 samples are not marked."""
    return positive_where(lambda places: (places % 12 < first) | (places % 12 >= last))


positive = positive_where(lambda places: places >= 0)
positive_at_first = positive_where(lambda places: (places < 26) | (places % 2 == 1))


def per_sample(y_true, y_pred):
    return ops.mean(ops.square(y_true - y_pred), axis=-1)


def mean(y_true, y_pred):
    return ops.mean(ops.square(y_true - y_pred))


def by_four(y_true, y_pred):
    """A loss that knows the size of a batch."""
    return per_sample(ops.reshape(y_true, (4, -1)), ops.reshape(y_pred, (4, -1)))


def total(y_true, y_pred):
    return ops.sum(ops.square(y_true - y_pred))


def masked(y_true, y_pred, least=0.8):
    mask = ops.cast(y_true[:, :1] > least, y_pred.dtype)
    return ops.sum(mask * ops.square(y_true - y_pred)), ops.sum(mask)


def masked_mean(of_count, least=0.8):
    """Return a loss over samples of large targets, divided by a function of their number."""

    def loss(y_true, y_pred):
        above, count = masked(y_true, y_pred, least)
        return above / of_count(count)

    return loss


def at_least(number):
    return lambda count: ops.maximum(count, number)


def contrastive(y_true, y_pred):
    similarities = ops.matmul(y_pred, ops.transpose(y_pred))
    return ops.mean(ops.logsumexp(similarities, axis=-1))


def comparing_later(y_true, y_pred):
    """Compares samples where a target is negative."""
    values = per_sample(y_true, y_pred)
    return values + ops.cast(ops.any(y_true < 0), values.dtype) * ops.mean(values)


def alike_at_first(y_true, y_pred):
    """Divides by a number that is that of the samples at first, in a way of its own."""
    total, count = masked(y_true + 0.8, y_pred + 0.8)
    return total * ops.reciprocal(count)


def root(y_true, y_pred):
    return ops.sqrt(mean(y_true, y_pred))


@functools.wraps(keras.losses.mean_squared_error)
def wrapped(y_true, y_pred):
    return contrastive(y_true, y_pred)


def mixture(y_true, y_pred):
    """The likelihood of classes, of which some are ignored, under a mixture of two."""
    parts = [ops.log_softmax(part) for part in ops.split(y_pred, 2, axis=-1)]
    likelihood = ops.logsumexp(ops.stack(parts), axis=0) - np.log(2.0)
    classes = ops.cast(ops.reshape(y_true, (-1, 1)), "int32")
    valid = ops.cast(classes[:, 0] >= 0, y_pred.dtype)
    values = ops.take_along_axis(likelihood, ops.maximum(classes, 0), axis=-1)[:, 0]
    return -ops.sum(values * valid) / ops.sum(valid)


def some_classes(rows):
    y = np.random.default_rng(0).integers(0, 3, rows)
    return dense_data(rows)[0], np.where(np.arange(rows) % 5 < 2, -1, y)


def balanced(y_true, y_pred):
    """Weighs each class by how rare it is in the batch. Of one class, that is the mean."""
    classes = ops.one_hot(ops.reshape(ops.cast(y_true, "int32"), (-1,)), 3, dtype=y_pred.dtype)
    numbers = ops.sum(classes * ops.sum(classes, axis=0), axis=-1)
    likelihoods = ops.sum(classes * ops.log_softmax(y_pred), axis=-1)
    return -ops.mean(likelihoods / numbers) * ops.cast(ops.shape(y_pred)[0], y_pred.dtype)


class SumOfMeans(keras.losses.Loss):
    """A mean over samples, of which Keras takes the sum."""

    def call(self, y_true, y_pred):
        return mean(y_true, y_pred)


class DividesByItsAverage(keras.losses.Loss):
    """Values, divided by a moving average of them that it keeps. On JAX that stays as it was."""

    def __init__(self):
        super().__init__()
        self.average = keras.Variable(1.0, trainable=False)

    def call(self, y_true, y_pred):
        values = per_sample(y_true, y_pred)
        latest = ops.cast(ops.mean(ops.stop_gradient(values)), self.average.dtype)
        self.average.assign(0.9 * self.average + 0.1 * latest)
        return values / ops.cast(self.average, values.dtype)


class Calls(keras.losses.MeanSquaredError):
    """Has a `__call__` of its own: a function of Keras's, and of what it is given."""

    def __init__(self, function, **kwargs):
        super().__init__(**kwargs)
        self.function = function

    def __call__(self, y_true, y_pred, sample_weight=None):
        return self.function(super().__call__, y_true, y_pred, sample_weight)


def weighted_by_target(y, z):
    weights = ops.square(y[:, 0])
    return ops.sum(weights * per_sample(y, z)) / ops.sum(weights)


def weighs_by_the_largest(of_keras, y, z, weights):
    """Gives sample weights that follow from several samples."""
    weights = ops.abs(y[:, 0])
    return of_keras(y, z, ops.cast(weights / ops.max(weights), z.dtype))


def with_weights_later(rows):
    x, y, weights = with_weights(rows)
    weights[:12] = 1.0
    return x, y, weights


# Counts that are zero at first, and masks of few samples.


def counted(y_true, y_pred):
    return ops.relu(y_true) * ops.square(y_true - y_pred)


def total_of_counted(y_true, y_pred):
    return 0.1 * ops.sum(counted(y_true, y_pred))


def mean_of_counted(y_true, y_pred):
    return ops.mean(counted(y_true, y_pred))


def few(rows, every):
    """Of the samples of a trial, one or none is in the mask, so that a sum fits, too."""
    x, _ = dense_data(rows)
    return x, (np.arange(rows)[:, None] % every == 3).astype(x.dtype)


def own(loss, learning_rate=0.05, data=dense_data, make=dense_model, **kwargs):
    return Case(make, data, sgd(loss, learning_rate), **kwargs)


def calls(function, *args, reduction="sum_over_batch_size", **kwargs):
    return own((lambda: Calls(function, reduction=reduction),), *args, **kwargs)


def starting_without_weight(rows):
    """The first samples have no weight, so that the first microbatches show no gradient."""
    x, y, weights = with_weights(rows)
    return x, y, np.where(np.arange(rows) < 5, 0.0, weights).astype(weights.dtype)


def compares(loss, **kwargs):
    """Return a case of a loss that compares samples, which is exact within a batch."""
    return own(loss, data=positive, expects=DIFFERS, **kwargs)


def with_rare_term(y, z):
    """Adds a mean over rare samples, which is zero in the first batches."""
    rare = ops.cast(y[:, 0] > 5, z.dtype)
    return mean(y, z) + ops.sum(rare * ops.square(z[:, 0])) / (ops.sum(rare) + 1e-6)


def rare_from(first):
    def data(rows):
        x, y = dense_data(rows)
        y[:, 0] = np.where((np.arange(rows) >= first) & (np.arange(rows) % 5 == 1), 6.0, y[:, 0])
        return x, y

    return data


CASES |= {
    "own loss: per sample": own(per_sample),
    **{
        f"own loss: a rare term, from sample {first}": own(
            with_rare_term,
            0.01,
            data=rare_from(first),
            samples=60,
            expects=DIFFERS,
            settings=("windows", "split", "both"),
        )
        for first in (14, 40)  # in the second window, and in the fourth
    },
    "own loss: mean": own(mean),
    "own loss: sum": own(total, 0.005),
    **{
        f"own loss: a number per output, of {outputs}": own(
            lambda y, z: ops.mean(ops.square(y - z), axis=0),
            data=functools.partial(dense_data, outputs=outputs),
            make=functools.partial(dense_model, outputs=outputs),
        )
        for outputs in (1, 2)
    },
    "own loss: a number per entry": own(lambda y, z: ops.reshape(ops.square(y - z), (-1,)), 0.01),
    "own loss: masked mean with epsilon": own(masked_mean(lambda count: count + 0.5), 0.02),
    "own loss: masked mean of one at least": own(masked_mean(at_least(1.0)), 0.02),
    "own loss: of batches of four": own(by_four, samples=24, settings=("windows",)),
    "own loss: a sum of means": own((lambda: SumOfMeans(reduction="sum"),)),
    "own loss: divides by its moving average": own(
        (DividesByItsAverage,), expects={} if BACKEND == "jax" else DIFFERS
    ),
    **{
        f"own loss: passes on to Keras, {reduction}": calls(
            lambda k, *given: 3 * k(*given),
            0.0003 if reduction == "sum" else 0.01,
            weighted(zoo.masked_data, "positions"),
            zoo.masked_recurrent,
            reduction=reduction,
        )
        for reduction in DIFFERENT_REDUCTIONS
    },
    "own loss: weighs by itself": calls(lambda k, y, z, w: weighted_by_target(y, z)),
    "own loss: adds up by itself": calls(lambda k, y, z, w: total(y, z), 0.005),
    "own loss: of predictions that are alike at first": own(
        lambda y, z: contrastive(y, z + 0.3) + mean(y, z),
        make=lambda: sequential((4,), layers.Dense(5), layers.Dense(2, kernel_initializer="zeros")),
        settings=("split", "recomputed"),
    ),
    **{
        f"asked to add up: {loss.__name__}": own(
            loss,
            0.005 if loss is total else 0.05,
            settings=("added up",),
            expects={} if loss in (mean, total) else {"within": Warns(TRIED)},
        )
        for loss in (mean, total, contrastive)
    },
    "own loss: a mixture": own(
        mixture,
        make=functools.partial(dense_model, outputs=6),
        data=some_classes,
    ),
    "own loss: of balanced classes": own(
        balanced,
        make=functools.partial(dense_model, outputs=3),
        data=classes,
        expects=DIFFERS,
    ),
    "own loss: a root of Keras's number": calls(
        lambda k, *given: ops.sqrt(k(*given)), expects=DIFFERS
    ),
    "own loss: a sum beside Keras's number": calls(
        lambda k, y, z, w: k(y, z, w) + 0.01 * ops.sum(ops.square(z)), expects=DIFFERS
    ),
    "own loss: weighs by the largest": calls(weighs_by_the_largest, expects=DIFFERS),
    # All is left to the regularizers, as Python's number.
    "own loss: nothing": own(
        lambda y, z: 0.0, make=zoo.regularized, backends=("tensorflow", "jax")
    ),
    "own loss: reads sample weights": calls(
        lambda k, y, z, w: ops.sum(per_sample(y, z) * w) / ops.sum(w), data=with_weights
    ),
    "own loss: reads sample weights, none at first": calls(
        lambda k, y, z, w: ops.sum(per_sample(y, z) * w) / (ops.sum(w) + 1e-7),
        data=starting_without_weight,
        precision="float32",  # in which 1e-7 for each microbatch is not seen
    ),
    "own loss: a number, weights are alike at first": own(
        mean,
        data=with_weights_later,
        expects={"across": Warns("must return one value per sample")},
    ),
    **{
        f"own loss: masked mean of one in {every}": own(
            masked_mean(lambda count: count + 1e-7, 0.5),
            data=functools.partial(few, every=every),
            make=functools.partial(dense_model, outputs=1),
            samples=96,
            precision="float32",  # in which 1e-7 for each microbatch is not seen
        )
        for every in (4, 11)
    },
    **{
        f"own loss: {loss.__name__}, {number} empty": own(
            loss,
            data=positive_where(lambda places, number=number: places >= number),
        )
        for loss in (total_of_counted, mean_of_counted)
        for number in (4, 14)
    },
    "own loss: contrastive": compares(contrastive),
    "own loss: root": compares(root),
    "own loss: wrapped": compares(wrapped),
    **{
        f"own loss: {loss.__name__}": own(
            loss, data=positive_at_first, settings=("split", "recomputed")
        )
        for loss in (comparing_later, alike_at_first)
    },
    "dice": compares("dice"),
    "cosine over samples": compares((lambda: keras.losses.CosineSimilarity(axis=0),)),
    "hinge": own("hinge", data=lambda rows: (dense_data(rows)[0], np.sign(dense_data(rows)[1]))),
}


MAE = sgd(metrics=["mae"])


def computing(function, weight_of=None):
    """Return a class whose `compute_loss` is a function of Keras's, targets and outputs."""

    class OwnLoss(keras.Sequential):
        def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
            return function(functools.partial(super().compute_loss, x, y, y_pred), y, y_pred)

    return OwnLoss if weight_of is None else ruled(OwnLoss, weight_of)


def mean_of_some(of_keras, y, z):
    """A mean over the samples that its targets mark; only it knows."""
    return masked_mean(lambda count: count, 0.0)(y, z)


def number_of_positive(model, x, y):
    return ops.sum(ops.cast(y[:, 0] > 0, "float32"))


def weighs_by_target(of_keras, y, z):
    """Makes sample weights of its own and leaves the rest to Keras."""
    return of_keras(ops.cast(ops.not_equal(y[..., :1], 0.0), z.dtype))


def mean_by_outputs(of_keras, y, z):
    weights = ops.stop_gradient(ops.abs(z))
    return ops.sum(weights * ops.square(y - z)) / ops.sum(weights)


class OwnMetrics(keras.Sequential):
    def compute_metrics(self, x, y, y_pred, sample_weight=None):
        return {**super().compute_metrics(x, y, y_pred, sample_weight), "most": ops.max(y_pred)}


def with_a_compute_loss_of_the_instance():
    model = dense_model()
    model.compute_loss = lambda x=None, y=None, y_pred=None, *args, **kwargs: total(y, y_pred)
    return model


def of_class(base):
    return lambda: base([keras.Input((4,)), *dense_model().layers])


def some_zeros(rows):
    x, y = zoo.masked_data(rows)
    y[np.arange(5) >= (1 + np.arange(rows) % 5)[:, None]] = 0.0
    return x, y


# It divides by zero where no target is positive, so that such a microbatch has gradients of NaN.
OF_POSITIVE = of_class(computing(mean_of_some, number_of_positive))


CASES |= {
    "own compute_loss: with a rule": Case(OF_POSITIVE, unmarked(3, 8), sgd(None, 0.02)),
    "own compute_loss: with a rule of outputs": Case(  # which is taken as a constant
        of_class(computing(mean_by_outputs, lambda model, x, y: ops.sum(ops.abs(model(x))))),
        compile=sgd(None, 0.02),
    ),
    "own compute_loss: a sum by rule": Case(
        lambda: computing(lambda of_keras, y, z: of_keras() + total(y, z), lambda *_: "sum")(
            [keras.Input((4,)), layers.Dense(2, kernel_regularizer="l2")]
        ),
        compile=sgd(None, 0.001),
    ),
    "own compute_loss: sample weights of its own": Case(
        lambda: computing(weighs_by_target)(sequence_model().layers),
        some_zeros,
        compile_with("mean_with_sample_weight"),
    ),
    "own compute_loss: compares samples": Case(
        of_class(computing(lambda of_keras, y, z: mean(y, z) + 0.01 * contrastive(y, z))),
        compile=sgd(None, 0.02, metrics=["mae"]),
        settings=("split", "recomputed", "microbatches of one"),
    ),
    "own compute_metrics": Case(
        of_class(OwnMetrics), compile=MAE, samples=FULL, settings=("recomputed",)
    ),
    "own compute_loss: a sum": Case(
        of_class(computing(lambda of_keras, y, z: 0.1 * total(y, z))), compile=sgd(None, 0.02)
    ),
    "own compute_loss: of the instance": Case(
        with_a_compute_loss_of_the_instance, compile=sgd(None, 0.005)
    ),
    "own compute_loss: mean of some": Case(
        of_class(computing(mean_of_some)), compile=sgd(None, 0.02)
    ),
}
CASES |= {
    f"microbatches of NaN: samples {first} to {last}": Case(
        OF_POSITIVE,
        unmarked(first, last),
        lambda: {"optimizer": keras.optimizers.Adam(0.01)},
        samples=FULL,
        settings=("windows", "added up"),
    )
    for first, last in ((0, 10), (0, 5), (4, 10), (4, 12))
}


# Losses that are zero where nothing counts, but not in the full batch: a later batch shows it.


def counts(y):
    return ops.cast(y[:, 0] > -0.3, "float32")


def number(y):
    return ops.sum(counts(y))


def over_number(y, value):
    return ops.divide_no_nan(value, number(y))


def of_all(y, z):
    return ops.sum(per_sample(y, z))


def of_all_over_some(y, z):
    return over_number(y, of_all(y, z))


def signed(y, z):
    """The first column weighs, by numbers of both signs where it is -0.3 or less."""
    weights = ops.where(y[:, 0] > -0.3, 1.0, y[:, 1])
    return ops.divide_no_nan(ops.sum(weights * per_sample(y, z)), ops.sum(weights))


LOST = {
    "each_of_all_over_some": lambda y, z: ops.sum(over_number(y, per_sample(y, z))),
    "of_all_over_some": of_all_over_some,
    "of_all_over_some_unsafe": lambda y, z: of_all(y, z) / number(y),
    "of_all_in_one_branch": lambda y, z: ops.where(
        number(y) > 0, of_all(y, z) / ops.maximum(number(y), 1e-9), 0.0
    ),
    "without_infinity": lambda y, z: ops.nan_to_num(of_all(y, z) / number(y), posinf=0.0),
    "signed": signed,
}


# And losses of which nothing is lost.


def of_some(y, z):
    return ops.sum(counts(y) * per_sample(y, z))


def of_some_over_some(y, z):
    return over_number(y, of_some(y, z))


KEPT = {
    "of_some_over_some": of_some_over_some,
    "each_over_some": lambda y, z: ops.sum(counts(y) * over_number(y, per_sample(y, z))),
    "bounded": lambda y, z: of_some(y, z) / ops.maximum(number(y), 1.0),
    # The bound is never reached in the trial.
    "at_least_two": lambda y, z: of_all(y, z) / ops.maximum(number(y), 2.0),
}


def some_empty_later(rows, begin=28, end=34):
    """Samples, of which some of a window do not count: in each setting, those of a microbatch.

    And weights of both signs come to zero there.
    """
    x, y = dense_data(rows)
    y[:, 0] = np.abs(y[:, 0])
    y[begin:end, 0] = -1.0
    y[begin:end, 1] = np.resize([1.0, 1.0, -2.0, 0.0, 3.0, -2.0], len(y[begin:end]))
    return x, y


def empty_later(loss, is_own=False, expects=None, **kwargs):
    make = of_class(computing(lambda of_keras, y, z: loss(y, z))) if is_own else dense_model
    given = {"data": some_empty_later, "samples": 48, "settings": ("split", "windows", "both")}
    given |= {"expects": expects or {}, "precision": "float32", **kwargs}
    return Case(make, compile=sgd(None if is_own else loss), **given)


CASES |= {
    f"empty later, {how}: {name}": empty_later(loss, is_own, DIFFERS if name in LOST else {})
    for name, loss in (LOST | KEPT).items()
    for how, is_own in {"compiled": False, "own": True}.items()
}


def large_at_the_end(rows):
    x, y = dense_data(rows)
    y[-2:, 0] = 3.0
    return x, y


CASES |= {
    "depends on the largest in the last window": own(
        lambda y, z: mean(y, z) / ops.maximum(ops.max(y), 2.0),
        data=large_at_the_end,
        samples=19,
        settings=("windows",),
        backends=("tensorflow", "jax"),  # others do not watch a loss that is a mean over samples
        expects=DIFFERS,
    ),
}


def beside_a_bound(y, z):
    """Divides by the number itself, but logs something that is divided by its bound."""
    return 0.0 * ops.maximum(number(y), 1.0) + of_some(y, z) / number(y)


NOT_KNOWN = FallsShort("false alarm", "with or without the bound, until a microbatch is empty")
CASES["empty later: beside a bound"] = empty_later(
    beside_a_bound,
    settings=("windows",),
    falls_short={"torch": NOT_KNOWN, "tensorflow": NOT_KNOWN},
)


def few_positives(rows):
    """Samples, of which one in eight counts: at most one of a microbatch, and of a trial."""
    x, y = dense_data(rows)
    y = 0.2 * y
    y[:, 0] = np.where(np.arange(rows) % 8 == 1, 1.0, -1.0)
    return x, y


CASES |= {
    "few positives: of_all_over_positives": empty_later(
        lambda y, z: 0.1 * of_all(y, z) / ops.maximum(number(y), 1.0), data=few_positives
    ),
    "few positives: bounded": empty_later(KEPT["bounded"], data=few_positives),
}


def focal(y, z):
    """A focal loss that is divided by the number of positives (1708.02002)."""
    label, probability = ops.cast(y > 0.7, z.dtype), ops.sigmoid(z)
    values = ops.square(label - probability) * (ops.softplus(z) - label * z)
    return ops.sum(values) / ops.maximum(ops.sum(label), 1.0)


def of_integers(y, z):
    """The number of positives is an integer, and the bound comes first."""
    return ops.sum(ops.square(z - y)) / ops.cast(
        ops.maximum(1, ops.sum(ops.where(y > 0.7, 1, 0))), z.dtype
    )


def of_two_numbers(y, z):
    """A classification and a localization, of which each has a number of its own."""
    is_near = ops.cast(y[:, 1:] > 0.3, z.dtype)
    errors = ops.sum(is_near * ops.square(z - y)) / ops.maximum(ops.sum(is_near), 1.0)
    return focal(y[:, :1], z[:, :1]) + errors


def without_positives(rows, place):
    """Samples, of which one microbatch of three has no positive, first, in the middle or last."""
    x, y = dense_data(rows)
    y = np.abs(y)
    return x, np.where(np.arange(rows)[:, None] // 4 % 3 == place, 0.1 * y, y + 0.2)


CASES |= {
    f"no positives {where}, {how}: {loss.__name__}": Case(
        of_class(computing(lambda of_keras, y, z, loss=loss: loss(y, z)))
        if how == "own"
        else dense_model,
        functools.partial(without_positives, place=place),
        sgd(None if how == "own" else loss, 0.02),
        expects=dict.fromkeys(("across", "added up"), Warns(TRIED)) if is_told else {},
        settings=("windows", "both", "added up", "windows that may be left out"),
    )
    for place, where in enumerate(("first", "in the middle", "last"))
    for how in ("compiled", "own")
    for loss, is_told in ((focal, False), (of_integers, False), (of_two_numbers, True))
}


def some_missing(rows):
    """Samples of two tasks, which have a target of one, of both or of none."""
    x, y = dense_data(rows)
    places = np.arange(rows)
    y[:, 0], y[:, 1] = np.where(places % 3, np.nan, y[:, 0]), np.where(places % 4, np.nan, y[:, 1])
    return x, y


def of_each_task(y, z):
    """The mean over tasks of means over the samples that have a target."""
    is_known = ops.logical_not(ops.isnan(y))
    squares = ops.where(is_known, ops.square(z - ops.where(is_known, y, 0.0)), 0.0)
    numbers = ops.sum(ops.cast(is_known, z.dtype), axis=0)
    return ops.mean(ops.sum(squares, axis=0) / ops.maximum(numbers, 1.0))


CASES["targets that are missing"] = empty_later(of_each_task, expects=DIFFERS, data=some_missing)
CASES |= {  # it makes an update with gradients of zero, as plain Keras does
    f"an empty window: {loss.__name__}": empty_later(
        loss,
        data=functools.partial(some_empty_later, begin=24, end=36),
        samples=36,
        settings=("windows",),
    )
    for loss in (of_all_over_some, of_some_over_some)
}


# Logs, after each update: metrics of masks, weights and several outputs.

OF_WINDOWS = ("windows", "both", "windows that may be left out")


CASES |= {
    "logs: metrics of two outputs": Case(
        *zoo.ZOO["two_outputs"], sgd(metrics=[["mae", "mse"], ["mae"]]), samples=FULL
    ),
    "logs: sums of two outputs": Case(
        *zoo.ZOO["two_outputs"], mixed("sum", "sum"), samples=FULL, settings=OF_WINDOWS
    ),
    "logs: a mask": Case(*zoo.ZOO["masked_recurrent"], MAE, settings=OF_WINDOWS),
    "logs: weighted metrics of a mask": Case(
        zoo.masked_recurrent,
        weighted(zoo.masked_data, "positions"),
        sgd(squared("sum"), 0.0001, weighted_metrics=["mse", "mae"]),
        settings=(*USUAL, "windows that may be left out"),
    ),
    "logs: accuracy and area": Case(
        lambda: keras.Sequential([keras.Input((4,)), layers.Dense(1, activation="sigmoid")]),
        lambda rows: (dense_data(rows)[0], (dense_data(rows)[1][:, :1] > 0).astype("float32")),
        sgd("binary_crossentropy", metrics=["accuracy", "auc"]),
    ),
    "logs: validation": Case(
        dense_model, compile=MAE, fit={"validation_data": dense_data(8, seed=9)}
    ),
}
