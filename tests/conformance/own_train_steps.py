"""Cases about a `train_step` of the user's own, as scripts of each backend and papers have them.

A step takes gradients by `gradients`, and applies them by `update`; what these do is what scripts
of each backend write. Random numbers are in the data, so that all trainings have the same.

No weight has a gradient that is zero in exact arithmetic, such as a bias in front of a mean that is
subtracted: Adam makes full steps of its rounding.
"""

import dataclasses
import functools

import keras
import losses
import models
import numpy as np
from case import BACKEND, BUT_LOGS, DIFFERS, LOGGED, TRIED, Case, FallsShort, Refused, Warns, sgd
from helpers import dense_data, dense_model
from keras import layers, ops

from ga_model import AccumulatingModel


def generated():
    return np.random.default_rng(3)


class RunsStep(keras.Model):
    """Runs `step` as its `train_step`.

    Scripts of each backend have by their own means what is below: `gradients` returns a loss, and
    its gradients with respect to variables, `update` applies them, by the model's own optimizer if
    none is given, and `slopes` returns the gradient of a function of each sample by its input.
    """

    def train_step(self, data):
        x, y, _ = keras.utils.unpack_x_y_sample_weight(data)
        return self.step(x, y)


if BACKEND == "tensorflow":
    import tensorflow as tf

    class Differentiates(RunsStep):
        def gradients(self, loss_of, variables):
            with tf.GradientTape() as tape:
                loss = loss_of()
                scaled = self.optimizer.scale_loss(loss)
            return loss, tape.gradient(scaled, variables)

        def update(self, gradients, variables, optimizer=None):
            (optimizer or self.optimizer).apply(gradients, variables)

        def slopes(self, function, x):
            with tf.GradientTape() as tape:
                tape.watch(x)
                value = function(x)
            return tape.gradient(value, x)

elif BACKEND == "torch":
    import torch

    class Differentiates(RunsStep):
        def gradients(self, loss_of, variables):
            self.zero_grad()
            loss = loss_of()
            self.optimizer.scale_loss(loss).backward()
            return loss.detach(), [v.value.grad for v in variables]

        def update(self, gradients, variables, optimizer=None):
            with torch.no_grad():
                (optimizer or self.optimizer).apply(gradients, variables)

        def slopes(self, function, x):
            x = x.detach().requires_grad_() if x.is_leaf else x
            return torch.autograd.grad(function(x).sum(), x, create_graph=True)[0]

else:
    import jax

    class Differentiates(RunsStep):
        def train_step(self, state, data):
            owners = self.trainable_variables, self.non_trainable_variables
            groups = [*owners, self.optimizer.variables, self.metrics_variables]
            mapping = [pair for group, values in zip(groups, state) for pair in zip(group, values)]
            with keras.StatelessScope(mapping, collect_losses=True) as scope:
                logs = super().train_step(data)
            return logs, tuple([scope.get_current_value(v) for v in group] for group in groups)

        def gradients(self, loss_of, variables):
            every = *self.variables, *self.optimizer.variables, *self.metrics_variables
            state = self.non_trainable_variables

            def run(values):
                mapping = [*((v, v.value) for v in every), *zip(variables, values)]
                with keras.StatelessScope(mapping, collect_losses=True) as scope:
                    loss = loss_of()
                    scaled = self.optimizer.scale_loss(loss)
                return scaled, (loss, [scope.get_current_value(v) for v in state])

            gradient = jax.value_and_grad(run, has_aux=True)
            (_, (loss, found)), gradients = gradient([v.value for v in variables])
            for variable, value in zip(state, found):
                variable.assign(value)
            return loss, gradients

        def update(self, gradients, variables, optimizer=None):
            of_optimizer = self.optimizer.variables
            values = [[v.value for v in group] for group in (of_optimizer, variables)]
            new, state = self.optimizer.stateless_apply(values[0], gradients, values[1])
            for variable, value in zip([*variables, *of_optimizer], [*new, *state]):
                variable.assign(value)

        def slopes(self, function, x):
            return jax.grad(lambda x: ops.sum(function(x)))(x)

    class AsInTheGuide(keras.Sequential):
        """Keeps no state but that in the arguments of functions, as the guide of JAX has it."""

        objective = staticmethod(losses.mean)

        def loss_of(self, trainable, non_trainable, x, y):
            z, non_trainable = self.stateless_call(trainable, non_trainable, x, training=True)
            return self.objective(y, z), non_trainable

        def train_step(self, state, data):
            trainable, non_trainable, optimizer, metrics = state
            gradient = jax.value_and_grad(self.loss_of, has_aux=True)
            (loss, non_trainable), gradients = gradient(trainable, non_trainable, *data[:2])
            trainable, optimizer = self.optimizer.stateless_apply(optimizer, gradients, trainable)
            return {"own": loss}, (trainable, non_trainable, optimizer, metrics)


def mlp(features, outputs, use_bias=True, **kwargs):
    parts = [layers.Dense(8, activation="tanh"), layers.Dense(outputs, use_bias=use_bias)]
    return keras.Sequential([keras.Input((features,)), *parts], **kwargs)


class OwnStep(Differentiates):
    """Trains its parts by `loss_of` (x, y), the mean of squares, with one update.

    It logs the loss as its own, as Keras takes a log of `loss` from its metric.
    """

    def __init__(self):
        super().__init__()
        self.make()
        self.built = True

    def make(self):
        self.net = mlp(4, 2)

    def call(self, x):
        return self.net(x)

    def loss_of(self, x, y):
        return ops.mean(ops.square(self.net(x) - y))

    def step(self, x, y):
        variables = self.trainable_variables
        loss, gradients = self.gradients(lambda: self.loss_of(x, y), variables)
        self.update(self.changed(gradients), variables)
        self.after_update(x, y)
        return {"own": loss}

    def changed(self, gradients):
        """Return the gradients that are applied."""
        return gradients

    def after_update(self, x, y):
        """Move what the update leaves."""


def normal(rows, *shape):
    return generated().normal(size=(rows, *shape)).astype(keras.config.floatx())


class OfObjective(OwnStep):
    """Trains layers by a function of targets and predictions."""

    def __init__(self, objective, parts):
        self.function, self.parts = objective, parts
        super().__init__()

    def make(self):
        self.net = keras.Sequential(self.parts)

    def loss_of(self, x, y):
        return self.function(y, self.net(x, training=True))


class Tracks(OfObjective):
    def make(self):
        super().make()
        self.loss_weight = keras.metrics.Mean(name="loss_weight")
        self.of_samples = keras.metrics.MeanAbsoluteError(name="of_samples")

    @property
    def metrics(self):
        return [self.loss_weight, self.of_samples]

    def step(self, x, y):
        self.of_samples.update_state(y, ops.stop_gradient(self.net(x)))
        self.loss_weight.update_state(super().step(x, y)["own"])
        return {metric.name: metric.result() for metric in self.metrics}


class AddsLosses(OfObjective):
    def loss_of(self, x, y):
        return super().loss_of(x, y) + sum(self.losses)


class RunsAnother:
    """Runs the step of the class behind it, with more logs."""

    def train_step(self, *args):
        found = super().train_step(*args)
        logs, *state = found if isinstance(found, tuple) else (found,)
        logs = {**logs, **self.more(logs, *args[-1])}
        return (logs, *state) if state else logs

    def more(self, logs, x, y):
        return {"largest": ops.mean(ops.max(x, axis=-1)), "rate": ops.convert_to_tensor(0.5)}


class LogsTwice(RunsAnother, keras.Sequential):
    """Computes with the result of a metric, which waits for the window."""

    def more(self, logs, x, y):
        return {"twice": 2 * logs["loss"]}


class LogsInDicts(keras.Sequential):
    """Logs the results of all metrics by their names, as Keras's guide has it."""

    def train_step(self, data):
        super().train_step(data)
        return {metric.name: metric.result() for metric in self.metrics}


class BringsAStep:
    train_step = Differentiates.train_step


class FewArguments(OfObjective):
    """Has methods that take less than Keras's do."""

    def compute_loss(self, y, y_pred):
        return self.function(y, y_pred)

    def loss_of(self, x, y):
        return self.compute_loss(y, self.net(x, training=True))

    def fit(self, x, y, **kwargs):
        return super().fit(x, y, **kwargs)


class WeighsSamples(keras.Sequential):
    divides_by = staticmethod(lambda weights: 1.0)

    def train_step(self, *args):
        x, y = args[-1]
        weights = ops.abs(y[:, 0])
        return super().train_step(*args[:-1], (x, y, weights / self.divides_by(weights)))


class AppliesAnInner(OfObjective):
    def make(self):
        super().make()
        self.inner = dense_model()
        self.inner.compile(keras.optimizers.SGD(0.01, momentum=0.9, name="inner"))

    def changed(self, gradients):
        self.inner.optimizer.apply(gradients, self.trainable_variables)
        return gradients


def derived(*bases, **methods):
    """Return a class with some methods of its own."""
    return type(bases[0].__name__, bases, methods)


# Objectives.


def masked_mean_in_float32(y, z):
    """Of float16 gradients those of few entries overflow where those of a full batch do not."""
    return losses.masked_mean(losses.at_least(1e-3))(y, ops.cast(z, "float32"))


def masked_by_predictions(y, z):
    """Of samples that are far off, of which there may be none."""
    errors = ops.square(z - y)
    mask = ops.cast(ops.stop_gradient(errors) > 0.3, errors.dtype)
    return ops.sum(mask * errors) / ops.maximum(ops.sum(mask), 1.0)


def some_positives(rows):
    """Of which some microbatches have no positive, and each batch has several."""
    x, y = dense_data(rows)
    return x, np.where(np.arange(rows)[:, None] // 4 % 3 == 1, 0.0, y).astype(y.dtype)


# Losses of several networks or views, which compare samples.


class BarlowTwins(OwnStep):
    """Both views in one call of twice the rows (2103.03230)."""

    def make(self):
        self.net = mlp(4, 5, use_bias=False)

    def loss_of(self, x, y):
        embeddings = ops.split(self.net(ops.concatenate([x, ops.flip(x, 1)])), 2)
        a, b = ((z - ops.mean(z, 0)) / (ops.std(z, 0) + 0.1) for z in embeddings)
        correlation = ops.matmul(ops.transpose(a), b) / ops.cast(ops.shape(a)[0], a.dtype)
        return ops.mean(ops.square(correlation - ops.eye(5, dtype=a.dtype)))


# Losses that add up.


class MaskedLanguageModel(OwnStep):
    """Of the hidden tokens alone, with output weights that are the embeddings."""

    @staticmethod
    def data(rows):
        generator = generated()
        tokens = generator.integers(1, 9, size=(rows, 6)).astype("int32")
        is_hidden = generator.uniform(size=(rows, 6)) < np.linspace(0.1, 0.6, rows)[:, None]
        return np.where(is_hidden, 0, tokens), tokens

    def make(self):
        self.embed, self.mix = layers.Embedding(9, 5), layers.Dense(5, activation="tanh")
        self.embed.build(), self.mix.build((None, 6, 5))

    def loss_of(self, x, y):
        hidden = self.embed(x)
        hidden = self.mix(hidden + ops.cumsum(hidden, 1))
        scores = ops.matmul(hidden, ops.transpose(ops.convert_to_tensor(self.embed.embeddings)))
        losses = ops.sparse_categorical_crossentropy(y, scores, from_logits=True)
        is_hidden = ops.cast(ops.equal(x, 0), losses.dtype)
        return ops.sum(is_hidden * losses) / ops.maximum(ops.sum(is_hidden), 1.0)


class Sequences(OwnStep):
    """Calls layers one by one: with a mask, and on positions that all samples share."""

    @staticmethod
    def data(rows):
        return generated().integers(0, 9, size=(rows, 5)).astype("int32"), normal(rows, 2)

    def make(self):
        self.embed, self.positions = layers.Embedding(9, 4, mask_zero=True), layers.Embedding(5, 4)
        self.recur, self.head = layers.LSTM(3), layers.Dense(2)
        self.embed.build(), self.positions.build()
        self.recur.build((None, 5, 4)), self.head.build((None, 3))

    def loss_of(self, x, y):
        embedded = self.embed(x) + self.positions(ops.arange(5))
        outputs = self.head(self.recur(embedded, mask=self.embed.compute_mask(x)))
        return ops.sqrt(ops.mean(ops.square(outputs - y)))


class CTC(OwnStep):
    """Aligns labels with longer outputs."""

    @staticmethod
    def data(rows):
        labels = generated().integers(1, 4, size=(rows, 2)).astype("int32")
        return normal(rows, 6, 4), labels

    def make(self):
        self.net = keras.Sequential([keras.Input((6, 4)), layers.Dense(4)])

    def loss_of(self, x, y):
        return ops.mean(keras.losses.CTC(reduction=None)(y, self.net(x)))


def distilled(model, x, y):
    """A student learns from a frozen teacher, at its own temperature in each batch."""
    expected = model.teacher(x)
    temperature, found = 2.0 * ops.std(expected), model.net(x)
    soft = ops.softmax(expected / temperature) * ops.log_softmax(found / temperature)
    return 0.3 * ops.mean(ops.square(found - y)) - ops.mean(ops.sum(soft, -1))


def with_a_teacher(model):
    model.net, model.teacher = mlp(4, 2), mlp(4, 2, trainable=False)


def with_a_spare_optimizer(model):
    model.net, model.spare = mlp(4, 2), keras.optimizers.Adam()


def mixed_up(model, x, y):
    """Of mixed samples of the batch (1710.09412)."""
    return OwnStep.loss_of(model, *(0.7 * part + 0.3 * ops.flip(part, 0) for part in (x, y)))


def adversarial(model, x, y):
    """Of inputs that are moved along a gradient first (1412.6572)."""
    slopes = model.slopes(lambda x: ops.sum(ops.square(model.net(x) - y), -1), x)
    return OwnStep.loss_of(model, ops.stop_gradient(x + 0.1 * ops.sign(slopes)), y)


def forward_mode(model, x, y):
    with tf.autodiff.ForwardAccumulator(x, tf.ones_like(x)) as forward:
        score = model.net(x)
    slope = forward.jvp(score)
    return ops.mean(ops.square(score)) + ops.mean(ops.square(slope - 1.0))


# What is done with gradients, with weights, and behind the update.


def clipped_by_norm(model, gradients):
    norm = ops.sqrt(sum(ops.sum(ops.square(gradient)) for gradient in gradients))
    return [gradient * ops.minimum(1.0, 0.05 / norm) for gradient in gradients]


def clips_weights(model, x, y):
    """As the first GANs with a Wasserstein distance do."""
    for variable in model.trainable_variables:
        variable.assign(ops.clip(variable, -0.3, 0.3))


def sets_rate(function):
    """Set the learning rate before the update, by a function of it and the number of updates."""

    def changed(model, gradients):
        rate = model.optimizer.learning_rate
        rate.assign(function(rate, ops.cast(model.optimizer.iterations, rate.dtype)))
        return gradients

    return changed


def recurrent(model):
    parts = layers.Reshape((2, 2)), layers.GRU(3), layers.Dense(1)
    model.net = keras.Sequential([keras.Input((4,)), *parts])


class Sharpness(OwnStep):
    """Takes its gradient where the loss is largest nearby, and goes back (2010.01412)."""

    def step(self, x, y):
        variables = self.trainable_variables
        gradients = functools.partial(self.gradients, lambda: self.loss_of(x, y), variables)
        loss, first = gradients()
        norm = ops.sqrt(sum(ops.sum(ops.square(gradient)) for gradient in first))
        shifts = [0.1 * gradient / norm for gradient in first]
        before = [ops.copy(variable) for variable in variables]
        for variable, shift in zip(variables, shifts):
            variable.assign_add(shift)
        _, second = gradients()
        for variable, value in zip(variables, before):
            variable.assign(value)
        self.update(second, variables)
        return {"own": loss}


class NormalizesTwice(OwnStep):
    """Calls its first layer on two things."""

    def make(self):
        self.normal, self.head = layers.BatchNormalization(momentum=0.8), layers.Dense(2)
        self.normal.build((None, 4)), self.head.build((None, 4))

    def call(self, x):
        return self.head(self.normal(x))

    def loss_of(self, x, y):
        first, second = (self.normal(x, training=True) for x in (x, 0.5 * x + 1))
        return ops.sqrt(ops.mean(ops.square(self.head(first + second) - y)))


class Multiplier(OwnStep):
    """Raises the price of a constraint by how far the batch is from it."""

    def make(self):
        super().make()
        self.price = self.add_weight(shape=(), initializer="ones", trainable=False, name="price")

    def loss_of(self, x, y):
        z = self.net(x)
        return ops.mean(ops.square(z - y)) + self.price * ops.mean(z)

    def after_update(self, x, y):
        self.price.assign_add(0.5 * ops.mean(self.net(x)))


class Critic(OwnStep):
    """Has a penalty on the norm of a gradient with respect to inputs (1704.00028)."""

    def loss_of(self, x, y):
        norm = ops.sqrt(ops.sum(ops.square(self.slopes(lambda x: self.net(x)[:, 0], x)), -1))
        return ops.mean(self.net(x)) + ops.mean(ops.square(norm - 1.0))


# What is set of the optimizer, and what is logged.


class LogsNumbers(OwnStep):
    """Logs a number of each kind beside its loss, and by a function of targets and outputs."""

    def __init__(self, more=lambda y, z: {}):
        super().__init__()
        self.more = more

    def step(self, x, y):
        logs = super().step(x, y)
        z = ops.stop_gradient(self.net(x))  # with the weights that the update made
        mask = ops.cast(y > 0, z.dtype)
        numbers = {"mean": ops.mean(ops.abs(y)), "count": ops.sum(mask)}
        numbers["masked"] = ops.sum(mask * y) / ops.sum(mask)
        rate = self.optimizer.learning_rate  # a variable, which JAX does not return
        numbers["rate"] = ops.convert_to_tensor(rate) if BACKEND == "jax" else rate
        return {**logs, **numbers, **self.more(y, z)}


class LogsNothing(OwnStep):
    def step(self, x, y):
        super().step(x, y)
        return {}


class WeighsByAMetric(OwnStep):
    """Divides its loss by the mean of those so far."""

    def make(self):
        super().make()
        self.tracker = keras.metrics.Mean(name="tracked")

    def loss_of(self, x, y):
        return super().loss_of(x, y) / (1.0 + self.tracker.result())

    def after_update(self, x, y):
        self.tracker.update_state(ops.mean(ops.square(self.net(x) - y)))


# What cannot be summed.


class AppliesTwice(OwnStep):
    def step(self, x, y):
        super().step(x, y)
        return super().step(x, y)


class AppliesNone(OwnStep):
    def update(self, gradients, variables):
        for variable, gradient in zip(variables, gradients):
            variable.assign(variable - 0.1 * gradient)


# Several networks against one another, each with an optimizer.


class GAN(OwnStep):
    """Updates its discriminator, then its generator, as Keras's guide does."""

    def make(self):
        self.generator, self.discriminator = mlp(4, 2), mlp(2, 1)

    def compile(self, optimizers, **kwargs):
        super().compile(**kwargs)
        self.d_optimizer, self.g_optimizer = optimizers

    def loss_of_discriminator(self, x, y):
        real, fake = self.discriminator(y), self.discriminator(self.generator(x))
        return ops.mean(ops.softplus(-real)) + ops.mean(ops.softplus(fake))

    def loss_of_generator(self, x, y):
        return ops.mean(ops.softplus(-self.discriminator(self.generator(x))))

    def step(self, x, y):
        logs = {}
        for name, part, optimizer in (
            ("discriminator", self.discriminator, self.d_optimizer),
            ("generator", self.generator, self.g_optimizer),
        ):
            loss_of = getattr(self, f"loss_of_{name}")
            variables = part.trainable_variables
            logs[name], gradients = self.gradients(functools.partial(loss_of, x, y), variables)
            self.update(gradients, variables, optimizer)
        return logs


class GANOfOneState(GAN):
    """Takes both gradients before the first update."""

    def step(self, x, y):
        d, g = self.discriminator.trainable_variables, self.generator.trainable_variables
        d_loss, of_d = self.gradients(lambda: self.loss_of_discriminator(x, y), d)
        of_d = [ops.copy(gradient) for gradient in of_d]
        g_loss, of_g = self.gradients(lambda: self.loss_of_generator(x, y), g)
        self.update(of_d, d, self.d_optimizer)
        self.update(of_g, g, self.g_optimizer)
        return {"discriminator": d_loss, "generator": g_loss}


class InAList(GANOfOneState):
    """Keeps its optimizers in a private list, which is filled when it has been set, and a dict."""

    def compile(self, optimizers):
        keras.Model.compile(self)
        self._both = []
        self._both += [optimizers[0], {"g": optimizers[1]}]

    d_optimizer = property(lambda self: self._both[0])
    g_optimizer = property(lambda self: self._both[1]["g"])


class WassersteinGAN(GAN):
    """Updates its critic three times, and its generator once."""

    def loss_of_discriminator(self, x, y):
        fake = ops.stop_gradient(self.generator(x))
        slopes = self.slopes(self.discriminator, 0.3 * fake + 0.7 * y)
        norm = ops.sqrt(ops.sum(ops.square(slopes), -1))
        scores = self.discriminator(fake), self.discriminator(y)
        return ops.mean(scores[0]) - ops.mean(scores[1]) + ops.mean(ops.square(norm - 1.0))

    def step(self, x, y):
        d = self.discriminator.trainable_variables
        for _ in range(2):
            _, gradients = self.gradients(lambda: self.loss_of_discriminator(x, y), d)
            self.update(gradients, d, self.d_optimizer)
        return super().step(x, y)


def of_two():
    return {"optimizers": [keras.optimizers.SGD(0.05), keras.optimizers.Adam(0.01)]}


def step(make, told=False, learning_rate=0.05, data=None, **kwargs):
    data = data or getattr(make, "data", dense_data)
    given = {"compile": sgd(None, learning_rate), "expects": DIFFERS if told else {}, **kwargs}
    return Case(make, data, **given)


def own(told=False, base=OwnStep, **methods):
    """Return a case of a step with some methods of its own."""
    return step(derived(base, **methods), told)


def of(objective, base=OfObjective, *hidden, **methods):
    """Return a function that makes a small network, with fresh layers of some kinds inside."""
    base = derived(base, **methods) if methods else base

    def make():
        parts = [layers.Dense(8, "tanh"), *(part() for part in hidden), layers.Dense(2)]
        return base(objective, [keras.Input((4,)), *parts])

    return make


def by(objective, *args, **kwargs):
    """Return a case of an objective of targets and predictions."""
    return step(of(objective), *args, **kwargs)


def of_mean(*bases, **kwargs):
    """Return a case of a class of steps that minimize a mean."""
    return step(of(losses.mean, bases[0] if len(bases) == 1 else derived(*bases)), **kwargs)


def of_keras(compile_args, *bases, expects=None, backends=Case.backends, **methods):
    """Return a case of classes that run Keras's own step."""
    base = derived(*bases, *([] if keras.Sequential in bases[0].__mro__ else [keras.Sequential]))
    make = losses.of_class(derived(base, **methods))
    return Case(make, compile=compile_args, expects=expects or {}, backends=backends)


def contrastive_split(**how):
    return by(losses.contrastive, compile=sgd(None, 0.05, **how), settings=("split",))


def adding(reduce):
    """Return a function that makes one with a layer that adds a loss to its sum."""
    hidden = functools.partial(models.Adds, lambda x: 0.1 * reduce(ops.square(x)))
    return of(losses.total, AddsLosses, hidden)


def logs(more, differ=False):
    expects = {"across": Warns(LOGGED, BUT_LOGS)} if differ else {}
    return step(lambda: LogsNumbers(more), expects=expects)


def of_networks(make, **kwargs):
    return step(make, compile=of_two, backends=("tensorflow", "torch"), **kwargs)


# The steps of which each backend is to be exact in both settings, and those that compare samples,
# which are exact within a batch.
CASES = {
    "mean": by(losses.mean),
    "sum": by(losses.total, learning_rate=0.005),
    "weighted by targets": by(losses.weighted_by_target),
    "masked mean": by(losses.masked_mean(losses.at_least(1e-3)), False, 0.02),
    "masked mean with epsilon": by(losses.masked_mean(lambda count: count + 1e-3), False, 0.02),
    "masked mean in float16": by(masked_mean_in_float32, False, 0.02, precision="mixed_float16"),
    "masked mean in bfloat16": by(masked_mean_in_float32, False, 0.02, precision="mixed_bfloat16"),
    "masked mean of predictions": by(masked_by_predictions),
    "a loss of Keras": by(lambda y, z: keras.losses.MeanSquaredError()(y, z)),
    "compute_loss": step(
        of(None, loss_of=lambda self, x, y: self.compute_loss(x, y, self.net(x, training=True))),
        compile=sgd("mse", 0.05),
    ),
    "a penalty on a weight": own(
        loss_of=lambda self, x, y: (
            OwnStep.loss_of(self, x, y) + 0.05 * ops.sum(ops.square(self.trainable_variables[0]))
        )
    ),
    "metrics of its own": of_mean(Tracks),
    "an optimizer that it does not use": own(make=with_a_spare_optimizer),
    "contrastive": by(losses.contrastive, True),
    "root": by(losses.root, True),
    "contrastive, eager": contrastive_split(run_eagerly=True),
    "contrastive, not compiled": contrastive_split(jit_compile=False),
    "of Keras": of_keras(losses.MAE, RunsAnother),
    "of Keras, by the mixin": of_keras(losses.MAE, RunsAnother, AccumulatingModel),
    "of the mixin": of_mean(AccumulatingModel, OfObjective),
    "of a class on the left": of_mean(BringsAStep, AccumulatingModel, OfObjective),
    "with methods of few arguments": of_mean(FewArguments),
    "weights of samples": of_keras(sgd("mse", 0.03), WeighsSamples),
    "weights of samples by the largest": of_keras(
        sgd("mse", 0.03), WeighsSamples, expects=DIFFERS, divides_by=staticmethod(ops.max)
    ),
    "of Keras, logs in dicts": of_keras(losses.MAE, LogsInDicts, backends=("tensorflow", "torch")),
    "of Keras, twice its loss": of_keras(
        sgd(),
        LogsTwice,
        expects={"across": Warns(f"(?s){LOGGED}.*the log 'twice' differs,", BUT_LOGS)},
    ),
    "samples combined behind a head of zeros": models.behind_zeros(
        functools.partial(OfObjective, losses.mean), sgd(None)
    ),
    "a loss of a layer, a sum later": dataclasses.replace(
        models.annealed(ops.sum, functools.partial(AddsLosses, losses.mean), settings=("split",)),
        compile=sgd(None),
    ),
    "Barlow twins": step(BarlowTwins, True),
    "distillation": own(True, make=with_a_teacher, loss_of=distilled),
    "mixup": own(True, loss_of=mixed_up),
    "detector": by(
        losses.focal,
        learning_rate=0.02,
        data=some_positives,
    ),
    "masked language model": step(MaskedLanguageModel),
    # TensorFlow computes it in float32.
    "CTC": step(CTC, learning_rate=0.003, precision="float32"),
    "sequences": step(Sequences, True),
    "a sum beside one that a layer adds": step(adding(ops.sum), learning_rate=0.005),
    "a sum beside a mean that a layer adds": step(adding(ops.mean), True, 0.005),
    "adversarial": own(loss_of=adversarial),
    "penalty on a gradient": step(Critic),
    "doubled gradients": step(
        of(masked_by_predictions, changed=lambda self, gradients: [2.0 * g for g in gradients])
    ),
    "gradients clipped by norm": step(of(masked_by_predictions, changed=clipped_by_norm), True),
    "sharpness": step(Sharpness, True),
    "normalizes twice": step(
        NormalizesTwice, expects={"within": models.AVERAGES}, settings=("split",)
    ),
    "multiplier": step(Multiplier, expects={"across": Warns(f"(?s){TRIED}.*price")}),
    "clipped weights": own(True, after_update=clips_weights),
    "GAN": of_networks(GAN, told=True),
    "GAN of one state": of_networks(GANOfOneState),
    "GAN of one state, optimizers in a list": of_networks(InAList),
    "Wasserstein GAN": of_networks(WassersteinGAN, expects={"across": Refused("optimizer twice")}),
    "a schedule of its own": own(changed=sets_rate(lambda rate, updates: 0.1 / (1.0 + updates))),
    "a rate that it lowers": own(True, changed=sets_rate(lambda rate, _: 0.9 * rate)),
    "a rate set behind the update": own(
        True, after_update=lambda self, x, y: self.optimizer.learning_rate.assign(0.01)
    ),
    "logs of numbers": step(LogsNumbers),
    # Keras's own `fit` fails on TensorFlow.
    "logs of nothing": step(LogsNothing, backends=("torch", "jax")),
    "logs of what compares samples": logs(lambda y, z: {"spread": ops.std(y)}, differ=True),
    "logs of updated weights": logs(lambda y, z: {"late": losses.mean(y, z)}, differ=True),
    "logs in dicts": logs(
        lambda y, z: {"y": {"mean": ops.mean(y), "of": {"mean": ops.mean(y**2)}}}
    ),
    "weighs by a metric": step(WeighsByAMetric, True),
    "applies twice": step(AppliesTwice, expects={"across": Refused("twice")}),
    "applies none": step(AppliesNone, expects={"across": Refused("applies none", is_late=True)}),
}

if BACKEND == "jax":
    CASES["as in the guide, mean"] = of_keras(sgd(None, 0.05), AsInTheGuide)
    CASES["as in the guide, root"] = of_keras(
        sgd(None, 0.05), AsInTheGuide, expects=DIFFERS, objective=staticmethod(losses.root)
    )
elif BACKEND == "tensorflow":

    class Compiled(OfObjective):
        train_step = tf.function(Differentiates.train_step)

    class CompiledOverTheMixin(AccumulatingModel, OfObjective):
        @tf.function
        def train_step(self, data):
            return super().train_step(data)

    class WritesToItsOptimizer(OfObjective):
        """And applies without naming the variables."""

        def step(self, x, y):
            loss, gradients = self.gradients(lambda: self.loss_of(x, y), self.trainable_variables)
            self.optimizer.learning_rate = 0.05
            inner = getattr(self.optimizer, "inner_optimizer", self.optimizer)
            assert isinstance(inner, keras.optimizers.SGD)
            self.optimizer.apply(gradients)
            return {"own": loss}

    CASES["apply, past apply_gradients of the optimizer"] = of_mean(
        OfObjective, compile=models.compiled_with(lambda: models.NormalizesInPairs(0.1))
    )
    CASES["of a compiled function"] = of_mean(Compiled)
    CASES["of a compiled function, by the mixin"] = of_mean(CompiledOverTheMixin)
    CASES["of a function compiled by XLA, by the mixin"] = of_mean(
        CompiledOverTheMixin, compile=sgd(None, 0.05, jit_compile=True)
    )
    CASES["an optimizer that it writes to"] = of_mean(WritesToItsOptimizer)
    scale = keras.optimizers.LossScaleOptimizer
    CASES["an optimizer that it writes to, which scales"] = of_mean(
        WritesToItsOptimizer,
        compile=lambda: {"optimizer": scale(keras.optimizers.SGD(0.1), initial_scale=8.0)},
    )
    CASES["an optimizer of a model inside"] = of_mean(
        AppliesAnInner,
        expects={"across": Refused(r"applies \['inner'\], reached by a global variable")},
        falls_short={"across": FallsShort("inexact", "it trains, and is told of as what differs")},
    )
    for name, make in {"dense": Critic, "recurrent": derived(Critic, make=recurrent)}.items():
        CASES[f"a penalty on a gradient, {name}, compiled by XLA"] = step(
            make, compile=sgd(None, jit_compile=True), settings=("split", "recomputed")
        )
    told = models.whole("its forward-mode derivatives are taken")
    for name, expects in {"eager": told, "compiled": {}}.items():
        CASES[f"a forward-mode derivative, {name}"] = step(
            derived(OwnStep, loss_of=forward_mode),
            compile=sgd(None, run_eagerly=name == "eager"),
            expects=expects,
            settings=("split", "recomputed"),
        )
if BACKEND == "torch":
    CASES["an optimizer of a model inside"] = of_mean(AppliesAnInner, expects=DIFFERS)

# Whether a batch is left out is known at its end, and so are all its updates made there.
LEFT_OUT = {
    "contrastive": {},
    "masked language model": {},
    "multiplier": {"within": Warns(TRIED)},
    "GAN": {"within": Warns(TRIED)},
    "Wasserstein GAN": {"within": Refused("applies the same optimizer twice")},
}
CASES |= {
    f"may be left out, {name}": dataclasses.replace(
        CASES[name], settings=("left out",), expects=expects
    )
    for name, expects in LEFT_OUT.items()
}
CASES = {f"own train_step: {name}": case for name, case in CASES.items()}
