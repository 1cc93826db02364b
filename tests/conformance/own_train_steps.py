"""Cases about a `train_step` of the user's own, written as the guides of each backend have it."""

import dataclasses
import functools

import keras
import losses
import models
from case import ALL, BACKEND, TRIED, Case, FallsShort, Refused, Warns, sgd
from helpers import dense_data, dense_model
from keras import layers, ops

from ga_model import AccumulatingModel

if BACKEND == "tensorflow":
    import tensorflow as tf

    class Step(keras.Sequential):
        def train_step(self, data):
            x, y = data
            with tf.GradientTape() as tape:
                y_pred = self(x, training=True)
                loss = self.objective(x, y, y_pred)
                scaled = self.optimizer.scale_loss(loss)
            gradients = tape.gradient(scaled, self.trainable_variables)
            self.optimizer.apply(self.changed(gradients), self.trainable_variables)
            self.after_update()
            return self.logged(y, y_pred, loss)

    class OfScores(keras.Sequential):
        """Has a loss of its scores, and of their derivatives with respect to its input."""

        def train_step(self, data):
            x = tf.cast(data[0], self.compute_dtype)
            with tf.GradientTape() as tape:
                loss = self.loss_of(x)
            gradients = tape.gradient(loss, self.trainable_variables)
            self.optimizer.apply(gradients, self.trainable_variables)
            return {"own": loss}

    class Critic(OfScores):
        """Has a penalty on the gradient."""

        def loss_of(self, x):
            with tf.GradientTape() as inner:
                inner.watch(x)
                score = self(x, training=True)
            slope = tf.norm(inner.gradient(score, x), axis=1)
            return tf.reduce_mean(score) + tf.reduce_mean(tf.square(slope - 1.0))

    class ForwardMode(OfScores):
        """Takes the derivative along a direction."""

        def loss_of(self, x):
            with tf.autodiff.ForwardAccumulator(x, tf.ones_like(x)) as forward:
                score = self(x, training=True)
            slope = forward.jvp(score)
            return tf.reduce_mean(tf.square(score)) + tf.reduce_mean(tf.square(slope - 1.0))

elif BACKEND == "torch":
    import torch

    class Step(keras.Sequential):
        def train_step(self, data):
            x, y = data
            self.zero_grad()
            y_pred = self(x, training=True)
            loss = self.objective(x, y, y_pred)
            self.optimizer.scale_loss(loss).backward()
            with torch.no_grad():
                gradients = [variable.value.grad for variable in self.trainable_variables]
                self.optimizer.apply(self.changed(gradients), self.trainable_variables)
            self.after_update()
            return self.logged(y, y_pred, loss.detach())

else:
    import jax

    class Step(keras.Sequential):
        def loss_of(self, trainable, non_trainable, optimizer, x, y):
            mapping = list(zip(self.trainable_variables, trainable))
            mapping += zip(self.optimizer.variables, optimizer)  # which may scale the loss
            y_pred, non_trainable = self.stateless_call(trainable, non_trainable, x, training=True)
            with keras.StatelessScope(mapping):
                loss = self.objective(x, y, y_pred)
                return self.optimizer.scale_loss(loss), (loss, y_pred, non_trainable)

        def train_step(self, state, data):
            trainable, non_trainable, optimizer, metrics = state
            gradient = jax.value_and_grad(self.loss_of, has_aux=True)
            (_, found), gradients = gradient(trainable, non_trainable, optimizer, *data[:2])
            loss, y_pred, non_trainable = found
            gradients = self.changed(gradients)
            trainable, optimizer = self.optimizer.stateless_apply(optimizer, gradients, trainable)
            optimizer = self.after_update(optimizer)
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

    def after_update(self, values=None):
        """Change the optimizer, or on JAX its values, behind its update."""
        return values

    def logged(self, y, y_pred, loss):
        """Return the logs."""
        return {"own": loss}


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


class SetsRate(OwnStep):
    """Sets its learning rate behind the update: the next one has it."""

    def after_update(self, values=None):
        rate = self.optimizer.learning_rate
        if values is None:
            return rate.assign(0.01)
        pairs = zip(self.optimizer.variables, values)
        return [ops.full((), 0.01, value.dtype) if v is rate else value for v, value in pairs]


class ByComputeLoss(OwnStep):
    def objective(self, x, y, y_pred):
        return self.compute_loss(x=x, y=y, y_pred=y_pred)


class RunsAnother:
    """Runs the step of the class behind it, with more logs."""

    def train_step(self, *args):
        found = super().train_step(*args)
        logs, *state = found if isinstance(found, tuple) else (found,)
        logs = {**logs, **self.more(logs, *args[-1])}
        return (logs, *state) if state else logs

    def more(self, logs, x, y):
        return {"largest": ops.mean(ops.max(x, axis=-1)), "rate": ops.convert_to_tensor(0.5)}


class CallsKeras(RunsAnother, keras.Sequential):
    pass


class CallsTheMixin(RunsAnother, AccumulatingModel, keras.Sequential):
    pass


class LogsTwice(CallsKeras):
    """Computes with the result of a metric, which waits for the window."""

    def more(self, logs, x, y):
        return {"twice": 2 * logs["loss"]}


class OfMixin(AccumulatingModel, OwnStep):
    pass


class BringsAStep:
    train_step = Step.train_step


class OnTheLeft(BringsAStep, OfMixin):
    pass


class FewArguments(OwnStep):
    """Has methods that take less than Keras's do."""

    def compute_loss(self, y, y_pred):
        return self.function(y, y_pred)

    def objective(self, x, y, y_pred):
        return self.compute_loss(y, y_pred)

    def fit(self, x, y, **kwargs):
        return super().fit(x, y, **kwargs)


class WeighsSamples(keras.Sequential):
    """Computes sample weights in its step."""

    divides_by = staticmethod(lambda weights: 1.0)

    def train_step(self, *args):
        x, y = args[-1]
        weights = ops.abs(y[:, 0])
        return super().train_step(*args[:-1], (x, y, weights / self.divides_by(weights)))


class WeighsByTheLargest(WeighsSamples):
    divides_by = staticmethod(ops.max)


class AppliesAnInner(OwnStep):
    """Applies the optimizer of a model inside it, too."""

    def __init__(self, *args):
        super().__init__(*args)
        self.inner = dense_model()
        self.inner.compile(keras.optimizers.SGD(0.01, name="inner"))

    def changed(self, gradients):
        self.inner.optimizer.apply(gradients, self.trainable_variables)
        return gradients


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


def masked_mean_in_float32(y, y_pred):
    """Of float16 gradients those of few entries overflow where those of a full batch do not."""
    return masked_mean(y, ops.cast(y_pred, "float32"), at_least_epsilon)


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


class AddsLosses(OwnStep):
    """Adds what layers have added."""

    def objective(self, x, y, y_pred):
        return self.function(y, y_pred) + sum(self.losses)


COMPARES = {"across": Warns(TRIED)}
BUT_LOGS = tuple(name for name in ALL if name != "logs")

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
    "masked mean in float16": step(masked_mean_in_float32, 0.02, precision="mixed_float16"),
    "masked mean in bfloat16": step(masked_mean_in_float32, 0.02, precision="mixed_bfloat16"),
    "logsumexp of two losses": step(softest_of_two),
    "label smoothing": step(smoothed, data=losses.classes, outputs=3),
    "cross entropy": step(cross_entropy, data=losses.classes, outputs=3),
    "a loss of Keras": step(by_a_loss_of_keras),
    "compute_loss": step(None, loss="mse", base=ByComputeLoss),
    "a penalty on a weight": step(losses.mean, base=Penalized),
    "metrics of its own": step(losses.mean, base=Tracks),
    "clipped gradients": step(losses.mean, base=Clips, expects=COMPARES),
    "a rate set behind the update": step(losses.mean, base=SetsRate, expects=COMPARES),
    "contrastive": step(losses.contrastive, expects=COMPARES),
    "root": step(losses.root, expects=COMPARES),
    **{
        f"contrastive, {name}": dataclasses.replace(
            step(losses.contrastive), compile=sgd(None, 0.05, **how), settings=("split",)
        )
        for name, how in {
            "eager": {"run_eagerly": True},
            "not compiled": {"jit_compile": False},
        }.items()
    },
    "of Keras": Case(losses.of_class(CallsKeras), dense_data, sgd(metrics=["mae"])),
    "of Keras, by the mixin": Case(
        losses.of_class(CallsTheMixin), dense_data, sgd(metrics=["mae"])
    ),
    "of the mixin": step(losses.mean, base=OfMixin),
    "of a class on the left": step(losses.mean, base=OnTheLeft),
    "with methods of few arguments": step(losses.mean, base=FewArguments),
    "weights of samples": Case(losses.of_class(WeighsSamples), dense_data, sgd("mse", 0.03)),
    "weights of samples by the largest": Case(
        losses.of_class(WeighsByTheLargest), dense_data, sgd("mse", 0.03), expects=COMPARES
    ),
    "of Keras, twice its loss": Case(
        losses.of_class(LogsTwice),
        dense_data,
        expects={
            "across": Warns(
                "(?s)does not train as the full batch.*the log 'twice' differs,", BUT_LOGS
            )
        },
    ),
    **{
        f"samples combined behind {name} of zeros": Case(
            models.hidden(parts, functools.partial(OwnStep, losses.mean)),
            dense_data,
            sgd(None),
            expects={
                "across": Warns(TRIED),
                "within": Warns("cannot be split.*Training is exact", ALL),
            },
            settings=("windows", "split"),
        )
        for name, parts in models.HIDDEN.items()
    },
    "a loss of a layer, a sum later": dataclasses.replace(
        models.annealed(ops.sum, functools.partial(AddsLosses, losses.mean), settings=("split",)),
        compile=sgd(None),
    ),
}


if BACKEND == "tensorflow":

    class Compiled(OwnStep):
        train_step = tf.function(Step.train_step)

    class CompiledOverTheMixin(OfMixin):
        @tf.function
        def train_step(self, data):
            return super().train_step(data)

    class WritesToItsOptimizer(OwnStep):
        """And applies without naming the variables."""

        def train_step(self, data):
            with tf.GradientTape(persistent=True) as tape:
                loss = self.function(data[1], self(data[0], training=True))
                scaled = self.optimizer.scale_loss(loss)
            self.optimizer.learning_rate = 0.05
            inner = getattr(self.optimizer, "inner_optimizer", self.optimizer)
            assert isinstance(inner, keras.optimizers.SGD)
            self.optimizer.apply(tape.gradient(scaled, self.trainable_variables))
            return {"own": loss}


def of_scores(base, *parts):
    return lambda: base([keras.Input((4,)), *(part() for part in parts), layers.Dense(1)])


if BACKEND == "tensorflow":
    for name, (base, how) in {
        "of a compiled function": (Compiled, {}),
        "of a compiled function, by the mixin": (CompiledOverTheMixin, {}),
        "of a function compiled by XLA, by the mixin": (
            CompiledOverTheMixin,
            {"jit_compile": True},
        ),
        "an optimizer that it writes to": (WritesToItsOptimizer, {}),
    }.items():
        CASES[name] = dataclasses.replace(
            step(losses.mean, base=base), compile=sgd(None, 0.05, **how)
        )
    CASES["an optimizer that it writes to, which scales"] = dataclasses.replace(
        CASES["an optimizer that it writes to"],
        compile=lambda: {
            "optimizer": keras.optimizers.LossScaleOptimizer(
                keras.optimizers.SGD(0.1), initial_scale=8.0
            )
        },
    )
    CASES["an optimizer of a model inside"] = step(
        losses.mean,
        base=AppliesAnInner,
        expects={"across": Refused(r"applies \['inner'\], reached by a global variable")},
        falls_short={"across": FallsShort("inexact", "it trains, and is told of as what differs")},
    )
    DENSE = functools.partial(layers.Dense, 5, activation="tanh")
    RECURRENT = functools.partial(layers.Reshape, (2, 2)), functools.partial(layers.GRU, 3)
    for name, parts in {
        "dense": [DENSE],
        "recurrent": RECURRENT,
    }.items():
        CASES[f"a penalty on a gradient, {name}, compiled by XLA"] = Case(
            of_scores(Critic, *parts),
            dense_data,
            sgd(None, jit_compile=True),
            settings=("split", "recomputed"),
        )
    for run_eagerly in (False, True):
        expects = {"within": Warns("its forward-mode derivatives are taken", ALL)}
        CASES[f"a forward-mode derivative, {'eager' if run_eagerly else 'compiled'}"] = Case(
            of_scores(ForwardMode, DENSE),
            dense_data,
            sgd(None, run_eagerly=run_eagerly),
            expects=expects if run_eagerly else {},
            settings=("split", "recomputed"),
        )

CASES = {f"own train_step: {name}": case for name, case in CASES.items()}
