"""Cases about losses: reductions, masks, weights, logs, and losses of the user's own."""

import functools
import itertools

import keras
import numpy as np
import reductions
import zoo
from case import TRIED, Case, FallsShort, Warns, sgd
from helpers import dense_data, dense_model
from keras import layers, ops

FULL = 24  # of ragged batches, Keras on TensorFlow does not know the samples, and counts one each

MODELS = {
    "masked": (reductions.masked_sequence_model, zoo.masked_data),
    "unmasked": (reductions.sequence_model, zoo.masked_data),
}


def weighted(make_data, kind):
    return lambda rows: (*make_data(rows), *reductions.sample_weights(kind, rows))


CASES = {
    f"{reduction}, {name}, weights: {kind}": Case(
        make,
        weighted(data, kind),
        reductions.compile_with(reduction),
        # Keras's own step on PyTorch takes no weights of samples for sequences.
        backends=("tensorflow", "jax")
        if kind in ("rows", "zeros")
        else ("tensorflow", "torch", "jax"),
    )
    for (name, (make, data)), reduction, kind in itertools.product(
        MODELS.items(), reductions.DIFFERENT_REDUCTIONS, ("none", "rows", "positions", "zeros")
    )
}
CASES |= {
    f"{reduction}, weights of samples": Case(
        dense_model,
        lambda rows: (*dense_data(rows), np.linspace(0.1, 3.0, rows)),
        reductions.compile_with(reduction),
    )
    for reduction in reductions.DIFFERENT_REDUCTIONS
}
CASES["no reduction"] = Case(
    dense_model,
    dense_data,
    sgd((lambda: keras.losses.MeanSquaredError("none"),), 0.005),
    backends=("tensorflow",),  # others take gradients of scalars only
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
    x, y = dense_data(rows)
    weights = np.random.default_rng(0).uniform(0.5, 2.0, rows)
    for begin in range(4, rows, 12):
        weights[begin : begin + 4] = 0.0
    return x, y, weights


def masked_window(rows):
    """The second window has no valid position: its gradient is that of regularizers."""
    x, y = zoo.masked_data(rows)
    x[12:24] = 0.0
    return x, y


def decaying():
    rate = keras.optimizers.schedules.ExponentialDecay(0.1, 2, 0.5)
    return {"optimizer": keras.optimizers.AdamW(rate, weight_decay=0.1), "loss": "mse"}


for reduction in reductions.REDUCTIONS:
    loss = functools.partial(keras.losses.SparseCategoricalCrossentropy, True, reduction=reduction)
    CASES[f"class weights, {reduction}"] = Case(
        functools.partial(dense_model, outputs=3),
        classes,
        sgd((loss,), 0.02),
        {"class_weight": {0: 0.2, 1: 1.0, 2: 4.0}},
    )

CASES |= {
    "ignored class": Case(
        reductions.sequence_model,
        ignoring,
        sgd((lambda: keras.losses.SparseCategoricalCrossentropy(True, ignore_class=-1),)),
    ),
    "a microbatch without weight": Case(
        dense_model,
        without_weight,
        reductions.compile_with("mean_with_sample_weight"),
    ),
    "a window without weight": Case(
        functools.partial(zoo.masked_recurrent, kernel_regularizer="l2"), masked_window, decaying
    ),
}


# Several outputs, with denominators of their own.


def terms(make, compile_args, data):
    """Return a case whose terms weigh differently, which is exact within a batch."""
    return Case(
        make,
        data,
        compile_args,
        expects={"across": Warns("The terms of|average over different things|add_loss")},
    )


CASES |= {name: terms(*parts) for name, parts in reductions.UNLIKE.items()}

CASES |= {
    "two reductions that agree": Case(
        zoo.two_outputs,
        zoo.two_outputs_data,
        sgd(
            (lambda: [keras.losses.MeanSquaredError(), keras.losses.MeanAbsoluteError("mean")],),
            loss_weights=[0.3, 2.0],
        ),
    ),
    "a second loss on one output": Case(
        dense_model,
        dense_data,
        sgd((lambda: [keras.losses.MeanSquaredError(), keras.losses.MeanAbsoluteError("sum")],)),
    ),
}


# Regularizers.


def regularized_sequences():
    l2 = keras.regularizers.L2(0.1)
    recurrent = layers.SimpleRNN(4, return_sequences=True, kernel_regularizer=l2)
    head = layers.Dense(2, kernel_regularizer=l2, bias_regularizer=l2)
    return keras.Sequential([keras.Input((5, 3)), layers.Masking(), recurrent, head])


CASES |= {
    f"regularizers, {reduction}": Case(
        regularized_sequences, zoo.masked_data, reductions.compile_with(reduction)
    )
    for reduction in reductions.REDUCTIONS
}


# Losses of the user's own.


def per_sample(y_true, y_pred):
    return ops.mean(ops.square(y_true - y_pred), axis=-1)


def mean(y_true, y_pred):
    return ops.mean(ops.square(y_true - y_pred))


def by_four(y_true, y_pred):
    """A loss that knows the size of a batch."""
    return ops.mean(ops.square(ops.reshape(y_true, (4, -1)) - ops.reshape(y_pred, (4, -1))), -1)


def total(y_true, y_pred):
    return ops.sum(ops.square(y_true - y_pred))


def two_means(y_true, y_pred):
    return ops.mean(ops.abs(y_true - y_pred)) + 0.5 * ops.mean(ops.square(y_true - y_pred))


def by_output(y_true, y_pred):
    return ops.mean(ops.square(y_true - y_pred), axis=0)


def by_entry(y_true, y_pred):
    return ops.square(ops.reshape(y_true, (-1,)) - ops.reshape(y_pred, (-1,)))


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


def shifted(y_true, y_pred):
    return contrastive(y_true, y_pred + 0.3) + mean(y_true, y_pred)


def zero_at_first():
    head = layers.Dense(2, kernel_initializer="zeros")
    return keras.Sequential([keras.Input((4,)), layers.Dense(5), head])


def comparing_later(y_true, y_pred):
    """Compares samples where a target is negative."""
    values = per_sample(y_true, y_pred)
    return values + ops.cast(ops.any(y_true < 0), values.dtype) * ops.mean(values)


def alike_at_first(y_true, y_pred):
    """Divides by a number that is that of the samples at first, in a way of its own."""
    total, count = masked(y_true + 0.8, y_pred + 0.8)
    return total * ops.reciprocal(count)


def positive_at_first(rows):
    x, y = positive(rows)
    y[26::2] *= -1
    return x, y


def root(y_true, y_pred):
    return ops.sqrt(mean(y_true, y_pred))


@functools.wraps(keras.losses.mean_squared_error)
def wrapped(y_true, y_pred):
    return contrastive(y_true, y_pred)


def mixture(y_true, y_pred, axis=0):
    """The likelihood of classes, of which some are ignored, under a mixture of two."""
    parts = [ops.log_softmax(part) for part in ops.split(y_pred, 2, axis=-1)]
    likelihood = ops.logsumexp(ops.stack(parts, axis=axis), axis=axis) - np.log(2.0)
    classes = ops.cast(ops.reshape(y_true, (-1, 1)), "int32")
    valid = ops.cast(classes[:, 0] >= 0, y_pred.dtype)
    values = ops.take_along_axis(likelihood, ops.maximum(classes, 0), axis=-1)[:, 0]
    return -ops.sum(values * valid) / ops.sum(valid)


def some_classes(rows):
    y = np.random.default_rng(0).integers(0, 3, rows)
    return dense_data(rows)[0], np.where(np.arange(rows) % 5 < 2, -1, y)


class SumOfMeans(keras.losses.Loss):
    """A mean over samples, of which Keras takes the sum."""

    def __init__(self):
        super().__init__(reduction="sum")

    def call(self, y_true, y_pred):
        return mean(y_true, y_pred)


class Calls(keras.losses.MeanSquaredError):
    """Has a `__call__` of its own: a function of Keras's, and of what it is given."""

    def __init__(self, function, **kwargs):
        super().__init__(**kwargs)
        self.function = function

    def __call__(self, y_true, y_pred, sample_weight=None):
        return self.function(super().__call__, y_true, y_pred, sample_weight)


def weighs_by_itself(of_keras, y, z, weights):
    """With another reduction than it says."""
    weights = ops.square(y[:, 0])
    return ops.sum(weights * per_sample(y, z)) / ops.sum(weights)


def weighs_by_the_largest(of_keras, y, z, weights):
    """Gives sample weights that follow from several samples."""
    weights = ops.abs(y[:, 0])
    return of_keras(y, z, ops.cast(weights / ops.max(weights), z.dtype))


def nothing(y_true, y_pred):
    """Leaves all to the regularizers, as Python's number."""
    return 0.0


def positive(rows):
    x, y = dense_data(rows)
    return x, np.abs(y)


def with_weights(rows):
    weights = np.random.default_rng(0).uniform(0.1, 3.0, rows)
    return *dense_data(rows), weights.astype(keras.config.floatx())


# Masks that leave out nothing at first, and counts that are zero at first.


def full_at_first(rows):
    """Only behind two windows are samples masked, and a microbatch wholly is."""
    x, y = dense_data(rows)
    y[:24, 0] = np.abs(y[:24, 0])
    y[24:, 0] = [*-np.abs(y[24:28, 0]), *(1, -1, 1, 1, -1, 1, 1, 1)][: rows - 24]
    return x, y


def empty_at_first(rows, number):
    """The first samples count for nothing."""
    x, y = dense_data(rows)
    return x, np.where(np.arange(rows)[:, None] < number, -1, 1) * (np.abs(y) + 0.1)


def counted(y_true, y_pred):
    return ops.relu(y_true) * ops.square(y_true - y_pred)


def total_of_counted(y_true, y_pred):
    return 0.1 * ops.sum(counted(y_true, y_pred))


def mean_of_counted(y_true, y_pred):
    return ops.mean(counted(y_true, y_pred))


def own(loss, learning_rate=0.05, data=dense_data, make=dense_model, **kwargs):
    return Case(make, data, sgd(loss, learning_rate), **kwargs)


def calls(function, *args, **kwargs):
    return own((functools.partial(Calls, function),), *args, **kwargs)


EMPTY = {"batches of one": FallsShort("silent", "NaN: a batch that is ignored is 0 / 0 by itself")}


UNSEEN = dict.fromkeys(
    ("windows", "both"),
    FallsShort("silent", "the first log is of a mean: a microbatch showed nothing of a sum"),
)


COMPARES = (
    "add up to the full-batch gradient only if the loss is a (mean or a )?sum over samples|" + TRIED
)


def compares(loss, **kwargs):
    """Return a case of a loss that compares samples, which is exact within a batch."""
    return own(loss, data=positive, expects={"across": Warns(COMPARES)}, **kwargs)


CASES |= {
    "own loss: per sample": own(per_sample),
    "own loss: mean": own(mean),
    "own loss: sum": own(total, 0.005),
    "own loss: two means": own(two_means),
    "own loss: a number per output": own(by_output),
    "own loss: a number per entry": own(by_entry, 0.01),
    "own loss: masked mean with epsilon": own(masked_mean(lambda count: count + 0.5), 0.02),
    "own loss: masked mean of one at least": own(masked_mean(at_least(1.0)), 0.02),
    "own loss: of batches of four": own(by_four, samples=24, settings=("windows",)),
    "own loss: a sum of means": own((SumOfMeans,)),
    **{
        f"own loss: passes on to Keras, {reduction}": Case(
            zoo.masked_recurrent,
            weighted(zoo.masked_data, "positions"),
            sgd(
                (functools.partial(Calls, lambda k, *given: 3 * k(*given), reduction=reduction),),
                0.0003 if reduction == "sum" else 0.01,
            ),
        )
        for reduction in reductions.DIFFERENT_REDUCTIONS
    },
    "own loss: weighs by itself": calls(weighs_by_itself),
    "own loss: adds up by itself": calls(lambda k, y, z, w: total(y, z), 0.005),
    "own loss: of predictions that are alike at first": own(
        shifted, make=zero_at_first, settings=("split", "recomputed")
    ),
    **{
        f"asked to add up: {loss.__name__}": own(
            loss,
            0.005 if loss is total else 0.05,
            settings=("added up",),
            expects={} if loss in (mean, total) else {"within": Warns(COMPARES)},
        )
        for loss in (mean, total, contrastive)
    },
    **{
        f"own loss: a mixture on axis {axis}": own(
            functools.partial(mixture, axis=axis),
            make=functools.partial(dense_model, outputs=6),
            data=some_classes,
            falls_short=EMPTY,
        )
        for axis in (0, 1)
    },
    "own loss: a root of Keras's number": calls(
        lambda k, *given: ops.sqrt(k(*given)), expects={"across": Warns(COMPARES)}
    ),
    "own loss: a sum beside Keras's number": calls(
        lambda k, y, z, w: k(y, z, w) + 0.01 * ops.sum(ops.square(z)),
        expects={"across": Warns(COMPARES)},
    ),
    "own loss: weighs by the largest": calls(
        weighs_by_the_largest, expects={"across": Warns(COMPARES)}
    ),
    "own loss: nothing": own(nothing, make=zoo.regularized, backends=("tensorflow", "jax")),
    "own loss: reads sample weights": calls(
        lambda k, y, z, w: ops.sum(per_sample(y, z) * w) / ops.sum(w), data=with_weights
    ),
    **{
        f"own loss: masked later, at least {least}": own(
            masked_mean(at_least(least), 0.0), data=full_at_first
        )
        for least in (1e-6, 1.0)
    },
    **{
        f"own loss: {loss.__name__}, {number} empty": own(
            loss,
            data=functools.partial(empty_at_first, number=number),
            falls_short=UNSEEN if (loss, number) == (total_of_counted, 4) else {},
        )
        for loss in (total_of_counted, mean_of_counted)
        for number in (4, 14)
    },
    "own loss: contrastive": compares(contrastive),
    "own loss: root": compares(root),
    "own loss: wrapped": compares(wrapped),
    **{
        f"own loss: {loss.__name__}": own(
            loss,
            data=positive_at_first,
            settings=("split", "recomputed"),
        )
        for loss in (comparing_later, alike_at_first)
    },
    "dice": compares("dice"),
    "cosine over samples": compares((lambda: keras.losses.CosineSimilarity(axis=0),)),
    "hinge": own("hinge", data=lambda rows: (dense_data(rows)[0], np.sign(dense_data(rows)[1]))),
}


def computing(function, weight_of=None):
    """Return a class of models whose `compute_loss` is a function of Keras's, targets and outputs.

    Args:
        weight_of: what the weight of a microbatch is, by its targets, where it has a rule.
    """

    class OwnLoss(keras.Sequential):
        def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
            return function(functools.partial(super().compute_loss, x, y, y_pred), y, y_pred)

    if weight_of is not None:
        OwnLoss.microbatch_weight = lambda self, x, y=None, sample_weight=None: weight_of(y)
    return OwnLoss


def mean_of_some(of_keras, y, z):
    """A mean over the samples that its targets mark; only it knows."""
    above, count = masked(y, z, 0.0)
    return above / count


def number_of_positive(y):
    return ops.sum(ops.cast(y[:, 0] > 0, "float32"))


def compares_predictions(of_keras, y, z):
    return mean(y, z) + 0.01 * ops.max(ops.sum(ops.square(z[:, None] - z[None]), axis=-1))


def weighs_by_target(of_keras, y, z):
    """Makes sample weights of its own and leaves the rest to Keras."""
    return of_keras(ops.cast(ops.not_equal(y[..., :1], 0.0), z.dtype))


class OwnMetrics(keras.Sequential):
    def compute_metrics(self, x, y, y_pred, sample_weight=None):
        return {**super().compute_metrics(x, y, y_pred, sample_weight), "most": ops.max(y_pred)}


def with_a_compute_loss_of_the_instance():
    model = dense_model()

    def compute_loss(x=None, y=None, y_pred=None, sample_weight=None, training=True):
        return total(y, y_pred)

    model.compute_loss = compute_loss
    return model


def of_class(base, *more):
    return lambda: base([keras.Input((4,)), *dense_model().layers, *more])


def some_positive(rows):
    """The samples of the second microbatch of 4 are not marked."""
    x, y = dense_data(rows)
    y[4::12] = y[5::12] = y[6::12] = y[7::12] = -1.0
    return x, y


def some_zeros(rows):
    x, y = zoo.masked_data(rows)
    y[np.arange(5) >= (1 + np.arange(rows) % 5)[:, None]] = 0.0
    return x, y


CASES |= {
    "own compute_loss: with a rule": Case(
        of_class(computing(mean_of_some, number_of_positive)),
        some_positive,
        sgd(None, 0.02),
    ),
    "own compute_loss: a sum by rule": Case(
        lambda: computing(lambda of_keras, y, z: of_keras() + total(y, z), lambda y: "sum")(
            [keras.Input((4,)), layers.Dense(2, kernel_regularizer="l2")]
        ),
        dense_data,
        sgd(None, 0.001),
    ),
    "own compute_loss: sample weights of its own": Case(
        lambda: computing(weighs_by_target)(reductions.sequence_model().layers),
        some_zeros,
        reductions.compile_with("mean_with_sample_weight"),
    ),
    "own compute_loss: compares samples": Case(
        of_class(computing(compares_predictions)),
        dense_data,
        sgd(None, 0.02, metrics=["mae"]),
        settings=("split", "recomputed", "microbatches of one"),
    ),
    "own compute_metrics": Case(
        of_class(OwnMetrics),
        dense_data,
        sgd("mse", metrics=["mae"]),
        samples=FULL,
        settings=("recomputed",),
    ),
    "own compute_loss: a sum": Case(
        of_class(computing(lambda of_keras, y, z: 0.1 * total(y, z))), dense_data, sgd(None, 0.02)
    ),
    "own compute_loss: of the instance": Case(
        with_a_compute_loss_of_the_instance, dense_data, sgd(None, 0.005)
    ),
    "own compute_loss: mean of some": Case(
        of_class(computing(mean_of_some)), dense_data, sgd(None, 0.02)
    ),
}


# Logs: metrics of masks, weights and several outputs.

CASES |= {
    "logs: metrics of two outputs": Case(
        zoo.two_outputs,
        zoo.two_outputs_data,
        sgd("mse", metrics=[["mae", "mse"], ["mae"]]),
        samples=FULL,
    ),
    "logs: weighted metrics of a mask": Case(
        zoo.masked_recurrent,
        weighted(zoo.masked_data, "positions"),
        sgd(
            (lambda: keras.losses.MeanSquaredError("sum"),), 0.0001, weighted_metrics=["mse", "mae"]
        ),
    ),
    "logs: accuracy and area": Case(
        lambda: keras.Sequential([keras.Input((4,)), layers.Dense(1, activation="sigmoid")]),
        lambda rows: (dense_data(rows)[0], (dense_data(rows)[1][:, :1] > 0).astype("float32")),
        sgd("binary_crossentropy", metrics=["accuracy", "auc"]),
    ),
    "logs: validation": Case(
        dense_model,
        dense_data,
        sgd(metrics=["mae"]),
        {"validation_data": dense_data(8, seed=9)},
    ),
}
