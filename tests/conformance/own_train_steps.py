"""Cases about a `train_step` of the user's own, written as the guides of each backend have it."""

import functools

import keras
import losses
from case import BACKEND, TRIED, Case, FallsShort, Warns, sgd
from helpers import dense_data, dense_model
from keras import ops

if BACKEND == "tensorflow":
    import tensorflow as tf

    class Step(keras.Sequential):
        def train_step(self, data):
            x, y = data
            with tf.GradientTape() as tape:
                y_pred = self(x, training=True)
                loss = self.objective(x, y, y_pred)
            gradients = tape.gradient(loss, self.trainable_variables)
            self.optimizer.apply(self.changed(gradients), self.trainable_variables)
            return self.logged(y, y_pred, loss)

elif BACKEND == "torch":
    import torch

    class Step(keras.Sequential):
        def train_step(self, data):
            x, y = data
            self.zero_grad()
            y_pred = self(x, training=True)
            loss = self.objective(x, y, y_pred)
            loss.backward()
            with torch.no_grad():
                gradients = [variable.value.grad for variable in self.trainable_variables]
                self.optimizer.apply(self.changed(gradients), self.trainable_variables)
            return self.logged(y, y_pred, loss.detach())

else:
    import jax

    class Step(keras.Sequential):
        def loss_of(self, trainable, non_trainable, x, y):
            mapping = list(zip(self.trainable_variables, trainable))
            y_pred, non_trainable = self.stateless_call(trainable, non_trainable, x, training=True)
            with keras.StatelessScope(mapping):
                return self.objective(x, y, y_pred), (y_pred, non_trainable)

        def train_step(self, state, data):
            trainable, non_trainable, optimizer, metrics = state
            gradient = jax.value_and_grad(self.loss_of, has_aux=True)
            (loss, found), gradients = gradient(trainable, non_trainable, *data)
            y_pred, non_trainable = found
            gradients = self.changed(gradients)
            trainable, optimizer = self.optimizer.stateless_apply(optimizer, gradients, trainable)
            with keras.StatelessScope(list(zip(self.metrics_variables, metrics))) as scope:
                logs = self.logged(data[1], y_pred, loss)
            metrics = [scope.get_current_value(variable) for variable in self.metrics_variables]
            return logs, (trainable, non_trainable, optimizer, metrics)


class OwnStep(Step):
    """Trains by an objective: a function from x, y and predictions to a loss."""

    def __init__(self, objective, parts):
        super().__init__(parts)
        self.function = objective

    def objective(self, x, y, y_pred):
        return self.function(y, y_pred)

    def changed(self, gradients):
        """Return the gradients that are applied."""
        return gradients

    def logged(self, y, y_pred, loss):
        """Return the logs."""
        return {"loss": loss}


class Tracks(OwnStep):
    """Has metrics of its own: of the loss, and of samples."""

    def __init__(self, *args):
        super().__init__(*args)
        self.of_loss = keras.metrics.Mean(name="of_loss")
        self.of_samples = keras.metrics.MeanAbsoluteError(name="of_samples")

    @property
    def metrics(self):
        return [self.of_loss, self.of_samples]

    def logged(self, y, y_pred, loss):
        self.of_loss.update_state(loss)
        self.of_samples.update_state(y, y_pred)
        return {metric.name: metric.result() for metric in self.metrics}


class Clips(OwnStep):
    def changed(self, gradients):
        return [ops.clip(gradient, -0.01, 0.01) for gradient in gradients]


class ByComputeLoss(OwnStep):
    def objective(self, x, y, y_pred):
        return self.compute_loss(x=x, y=y, y_pred=y_pred)


class Penalized(OwnStep):
    """Adds a penalty on a weight."""

    def objective(self, x, y, y_pred):
        kernel = self.trainable_variables[0]
        return self.function(y, y_pred) + 0.05 * ops.sum(ops.square(kernel))


# Objectives.


def weighted_by_target(y, y_pred):
    weights = ops.square(y[:, 0])
    return ops.sum(weights * losses.per_sample(y, y_pred)) / ops.sum(weights)


def masked_mean(y, y_pred, divisor=lambda count: count):
    """Of some microbatches the mask leaves nothing."""
    mask = ops.cast(y[:, :1] > 0.8, y_pred.dtype)
    return ops.sum(mask * ops.square(y - y_pred)) / divisor(ops.sum(mask))


def with_epsilon(count):
    return count + 1e-3


def at_least_epsilon(count):
    return ops.maximum(count, 1e-3)


def mean_of_all_but_some(y, y_pred):
    mask = ops.cast(y > -0.5, y_pred.dtype)
    return ops.sum(mask * ops.square(y - y_pred)) / ops.sum(mask)


def softest_of_two(y, y_pred):
    """`logsumexp` over a stack of two losses of each sample."""
    both = ops.stack([losses.per_sample(y, y_pred), ops.mean(ops.abs(y - y_pred), axis=-1)])
    return ops.mean(ops.logsumexp(both, axis=0))


def smoothed(y, y_pred):
    """Label smoothing: one term is divided by samples, one by samples times classes."""
    log_probabilities = ops.log_softmax(y_pred)
    samples = ops.cast(ops.shape(y)[0], y_pred.dtype)
    picked = ops.sum(ops.one_hot(ops.cast(y, "int32"), 3) * log_probabilities) / samples
    return -0.9 * picked - 0.1 * ops.sum(log_probabilities) / (3 * samples)


def cross_entropy(y, y_pred):
    return ops.mean(ops.sparse_categorical_crossentropy(y, y_pred, from_logits=True))


def by_a_loss_of_keras(y, y_pred):
    return keras.losses.MeanSquaredError()(y, y_pred)


def mean_of_means(y, y_pred):
    return ops.mean(ops.mean(ops.square(y - y_pred), axis=0))


def of_one_dimension(y, y_pred):
    return ops.sum(ops.abs(y - y_pred)) / ops.cast(ops.size(y), y_pred.dtype)


def step(objective, learning_rate=0.05, data=dense_data, outputs=2, base=OwnStep, **kwargs):
    def make():
        return base(objective, [keras.Input((4,)), *dense_model(outputs=outputs).layers])

    short = kwargs.pop("falls_short", {})
    compile_args = sgd(kwargs.pop("loss", None), learning_rate)
    return Case(make, data, compile_args, falls_short=short, **kwargs)


COMPARES = {
    "tensorflow: across": Warns(losses.COMPARES),
    "core: across": Warns(TRIED),
}

# The objectives of which each backend is to be exact in both settings, and those that compare
# samples, which are exact within a batch.
CASES = {
    "mean": step(losses.mean),
    "sum": step(losses.total, 0.005),
    "mean by values of samples": step(lambda y, p: ops.mean(losses.per_sample(y, p))),
    "mean of means": step(mean_of_means),
    "sum over a size": step(of_one_dimension),
    "two means": step(losses.two_means),
    "weighted by targets": step(weighted_by_target),
    "mean of some entries": step(mean_of_all_but_some),
    "masked mean": step(functools.partial(masked_mean, divisor=at_least_epsilon), 0.02),
    "masked mean with epsilon": step(functools.partial(masked_mean, divisor=with_epsilon), 0.02),
    "logsumexp of two losses": step(
        softest_of_two,
        falls_short={"tensorflow: across": FallsShort("false alarm", losses.STACKED.reason)},
    ),
    "label smoothing": step(
        smoothed,
        data=losses.classes,
        outputs=3,
        falls_short={
            "tensorflow: batches of one": FallsShort("false alarm", "a known size is computed with")
        },
    ),
    "cross entropy": step(cross_entropy, data=losses.classes, outputs=3),
    "a loss of Keras": step(by_a_loss_of_keras),
    "compute_loss": step(None, loss="mse", base=ByComputeLoss),
    "a penalty on a weight": step(losses.mean, base=Penalized),
    "metrics of its own": step(losses.mean, base=Tracks),
    "clipped gradients": step(
        losses.mean,
        base=Clips,
        expects={
            "tensorflow: across": Warns("Gradients must reach the optimizer unchanged"),
            "core: across": Warns(TRIED),
        },
    ),
    "contrastive": step(losses.contrastive, expects=COMPARES),
    "root": step(losses.root, expects=COMPARES),
}
CASES = {f"own train_step: {name}": case for name, case in CASES.items()}
