"""Cases about steps of the field: small models with a `train_step` that is the same everywhere.

A step takes gradients by `gradients`, and applies them by `update`; what these do is what scripts
of each backend write. Random numbers are in the data, so that all trainings have the same.

No weight has a gradient that is zero in exact arithmetic, such as a bias in front of a mean that is
subtracted: Adam makes full steps of its rounding.
"""

import dataclasses
import functools

import keras
import numpy as np
from case import ALL, BACKEND, TRIED, Case, Refused, Warns, sgd
from helpers import dense_data
from keras import layers, ops


class RunsStep(keras.Model):
    """Runs `step` as its `train_step`."""

    def train_step(self, data):
        x, y, _ = keras.utils.unpack_x_y_sample_weight(data)
        return self.step(x, y)


if BACKEND == "tensorflow":
    import tensorflow as tf

    class Differentiates(RunsStep):
        """What takes gradients and applies them, as scripts of the backend have it."""

        def gradients(self, loss_of, variables):
            """Return a loss, and its gradients with respect to variables."""
            with tf.GradientTape() as tape:
                loss = loss_of()
            return loss, tape.gradient(loss, variables)

        def update(self, gradients, variables, optimizer=None):
            """Apply gradients, by the model's own optimizer if none is given."""
            (optimizer or self.optimizer).apply(gradients, variables)

        def slopes(self, function, x):
            """Return the gradient of a function of each sample with respect to its input."""
            with tf.GradientTape() as tape:
                tape.watch(x)
                value = function(x)
            return tape.gradient(value, x)

elif BACKEND == "torch":
    import torch

    class Differentiates(RunsStep):
        """What takes gradients and applies them, as scripts of the backend have it."""

        def gradients(self, loss_of, variables):
            """Return a loss, and its gradients with respect to variables."""
            self.zero_grad()
            loss = loss_of()
            loss.backward()
            return loss.detach(), [v.value.grad for v in variables]

        def update(self, gradients, variables, optimizer=None):
            """Apply gradients, by the model's own optimizer if none is given."""
            with torch.no_grad():
                (optimizer or self.optimizer).apply(gradients, variables)

        def slopes(self, function, x):
            """Return the gradient of a function of each sample with respect to its input."""
            x = x.detach().requires_grad_() if x.is_leaf else x
            return torch.autograd.grad(function(x).sum(), x, create_graph=True)[0]

else:
    import jax

    class Differentiates(RunsStep):
        """What takes gradients and applies them, as scripts of the backend have it."""

        def train_step(self, state, data):
            owners = self.trainable_variables, self.non_trainable_variables
            groups = [*owners, self.optimizer.variables, self.metrics_variables]
            mapping = [pair for group, values in zip(groups, state) for pair in zip(group, values)]
            with keras.StatelessScope(mapping) as scope:
                logs = super().train_step(data)
            return logs, tuple([scope.get_current_value(v) for v in group] for group in groups)

        def gradients(self, loss_of, variables):
            """Return a loss, and its gradients with respect to variables."""
            every = [*self.trainable_variables, *self.non_trainable_variables]
            others = [v for v in every if not any(v is variable for variable in variables)]

            def run(values, other_values):
                mapping = [*zip(variables, values), *zip(others, other_values)]
                read = *self.optimizer.variables, *self.metrics_variables
                mapping += [(v, v.value) for v in read]
                with keras.StatelessScope(mapping) as scope:
                    loss = loss_of()
                return loss, [scope.get_current_value(v) for v in others]

            values = [[v.value for v in group] for group in (variables, others)]
            (loss, found), gradients = jax.value_and_grad(run, has_aux=True)(*values)
            for variable, value in zip(others, found):
                variable.assign(value)
            return loss, gradients

        def update(self, gradients, variables, optimizer=None):
            """Apply gradients, by the model's own optimizer."""
            of_optimizer = self.optimizer.variables
            values = [[v.value for v in group] for group in (of_optimizer, variables)]
            new, state = self.optimizer.stateless_apply(values[0], gradients, values[1])
            for variable, value in zip([*variables, *of_optimizer], [*new, *state]):
                variable.assign(value)

        def slopes(self, function, x):
            """Return the gradient of a function of each sample with respect to its input."""
            return jax.grad(lambda x: ops.sum(function(x)))(x)


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


def normal(rows, *shape, seed=3):
    generator = np.random.default_rng(seed)
    return generator.normal(size=(rows, *shape)).astype(keras.config.floatx())


def normalized(x, axis=-1):
    return x / ops.sqrt(ops.sum(ops.square(x), axis=axis, keepdims=True))


# Losses that compare samples.


def contrast(a, b, temperature=0.3):
    """Of all samples of the batch, each is to find the one in its own place."""
    scores = ops.matmul(normalized(a), ops.transpose(normalized(b))) / temperature
    return -ops.mean(ops.diagonal(ops.log_softmax(scores)))


class SimCLR(OwnStep):
    """Two views through an encoder and a head (2002.05709)."""

    def make(self):
        self.encoder, self.head = mlp(4, 5), mlp(5, 4)

    def loss_of(self, x, y):
        return contrast(*(self.head(self.encoder(view)) for view in (x, ops.flip(x, 1))))


class BarlowTwins(OwnStep):
    """Both views in one call of twice the rows (2103.03230)."""

    def make(self):
        self.net = mlp(4, 5, use_bias=False)

    def loss_of(self, x, y):
        embeddings = ops.split(self.net(ops.concatenate([x, ops.flip(x, 1)])), 2)
        a, b = ((z - ops.mean(z, 0)) / (ops.std(z, 0) + 0.1) for z in embeddings)
        correlation = ops.matmul(ops.transpose(a), b) / ops.cast(ops.shape(a)[0], a.dtype)
        return ops.mean(ops.square(correlation - ops.eye(5, dtype=a.dtype)))


class DualEncoder(OwnStep):
    """Two towers, called with a dict and with a list of tensors."""

    @staticmethod
    def data(rows):
        image = {"pixels": normal(rows, 4), "size": normal(rows, 2, seed=4)}
        return image, (normal(rows, 3, seed=5), normal(rows, 3, seed=6))

    def make(self):
        inputs = {name: keras.Input((n,), name=name) for name, n in (("pixels", 4), ("size", 2))}
        hidden = layers.Concatenate()([inputs["pixels"], inputs["size"]])
        self.image = keras.Model(inputs, mlp(6, 4)(hidden))
        inputs = [keras.Input((3,)), keras.Input((3,))]
        self.text = keras.Model(inputs, mlp(3, 4)(layers.Multiply()(inputs)))

    def loss_of(self, x, y):
        return contrast(self.image(x), self.text(list(y)))


class Distillation(OwnStep):
    """A student learns from a frozen teacher, at its own temperature in each batch."""

    def make(self):
        self.student, self.teacher = mlp(4, 2), mlp(4, 2, trainable=False)

    def loss_of(self, x, y):
        expected = self.teacher(x)
        temperature, found = 2.0 * ops.std(expected), self.student(x)
        soft = ops.softmax(expected / temperature) * ops.log_softmax(found / temperature)
        return 0.3 * ops.mean(ops.square(found - y)) - ops.mean(ops.sum(soft, -1))


class AdaptiveWeights(OwnStep):
    """Divides by the largest loss of the batch."""

    def loss_of(self, x, y):
        losses = ops.mean(ops.square(self.net(x) - y), -1)
        return ops.mean(losses**2) / ops.stop_gradient(ops.max(losses))


class Mixup(OwnStep):
    """Mixes the samples of its batch (1710.09412)."""

    def loss_of(self, x, y):
        x, y = (0.7 * part + 0.3 * ops.flip(part, 0) for part in (x, y))
        return ops.mean(ops.square(self.net(x) - y))


class HardestTriplet(OwnStep):
    """Of all pairs, those that are hardest for each sample (1703.07737)."""

    def loss_of(self, x, y):
        z, label = self.net(x), y[:, :1] > 0
        distances = ops.sum(ops.square(z[:, None] - z[None]), -1)
        is_same = ops.equal(label, ops.transpose(label))
        farthest = ops.max(ops.where(is_same, distances, 0.0), 1)
        nearest = ops.min(ops.where(is_same, 1e3, distances), 1)
        return ops.mean(ops.softplus(farthest - nearest))


class SupervisedContrast(OwnStep):
    """Samples of one class attract one another (2004.11362)."""

    def loss_of(self, x, y):
        z, label = normalized(self.net(x)), y[:, :1] > 0
        scores = ops.log_softmax(ops.matmul(z, ops.transpose(z)) / 0.5)
        is_same = ops.cast(ops.equal(label, ops.transpose(label)), z.dtype)
        return -ops.mean(ops.sum(is_same * scores, 1) / ops.sum(is_same, 1))


class PairwiseRanking(OwnStep):
    """Samples are to be in the order of their targets."""

    def loss_of(self, x, y):
        score = self.net(x)[:, :1]
        is_above = ops.cast(y[:, :1] > ops.transpose(y[:, :1]), score.dtype)
        return ops.sum(is_above * ops.softplus(ops.transpose(score) - score)) / ops.sum(is_above)


class Correlation(OwnStep):
    """Pearson's, as regressions are scored."""

    def make(self):
        self.net = mlp(4, 2, use_bias=False)

    def loss_of(self, x, y):
        a, b = (part - ops.mean(part, 0) for part in (self.net(x), y))
        a, b = normalized(a, 0), normalized(b, 0)
        return 1.0 - ops.mean(ops.sum(a * b, 0))


class MaximumMeanDiscrepancy(OwnStep):
    """Outputs are to be distributed as targets are."""

    def loss_of(self, x, y):
        def kernel(a, b):
            return ops.mean(ops.exp(-ops.sum(ops.square(a[:, None] - b[None]), -1)))

        z = self.net(x)
        return kernel(z, z) - 2.0 * kernel(z, y) + kernel(y, y)


# Losses that add up.


class MaskedMean(OwnStep):
    """Of samples that are far off, of which there may be none."""

    def loss_of(self, x, y):
        errors = ops.square(self.net(x) - y)
        mask = ops.cast(ops.stop_gradient(errors) > 0.3, errors.dtype)
        return ops.sum(mask * errors) / ops.maximum(ops.sum(mask), 1.0)


class Detector(OwnStep):
    """A focal loss that is divided by the number of positives (1708.02002)."""

    @staticmethod
    def data(rows):
        """Of which some microbatches have no positive, and each batch has several."""
        x, y = dense_data(rows)
        return x, np.where(np.arange(rows)[:, None] // 4 % 3 == 1, 0.0, y).astype(y.dtype)

    def loss_of(self, x, y):
        scores, label = self.net(x), ops.cast(y > 0.7, y.dtype)
        probability = ops.sigmoid(scores)
        off = ops.abs(label - probability)
        losses = ops.square(off) * (ops.softplus(scores) - label * scores)
        return ops.sum(losses) / ops.maximum(ops.sum(label), 1.0)


class DetectorOfTwoTerms(Detector):
    """Boxes are divided by the positives, and objectness by all anchors."""

    def loss_of(self, x, y):
        return super().loss_of(x, y) + 0.5 * ops.mean(ops.softplus(self.net(x)))


class MaskedLanguageModel(OwnStep):
    """Of the hidden tokens alone, with output weights that are the embeddings."""

    @staticmethod
    def data(rows):
        generator = np.random.default_rng(3)
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
        return np.random.default_rng(3).integers(0, 9, size=(rows, 5)).astype("int32"), normal(
            rows, 2
        )

    def make(self):
        self.embed, self.positions = layers.Embedding(9, 4, mask_zero=True), layers.Embedding(5, 4)
        self.recur, self.head = layers.LSTM(3), layers.Dense(2)
        for part, shape in (
            (self.embed, (None, 5)),
            (self.positions, (5,)),
            (self.recur, (None, 5, 4)),
            (self.head, (None, 3)),
        ):
            part.build(shape)

    def loss_of(self, x, y):
        embedded = self.embed(x) + self.positions(ops.arange(5))
        outputs = self.head(self.recur(embedded, mask=self.embed.compute_mask(x)))
        return ops.sqrt(ops.mean(ops.square(outputs - y)))


class CTC(OwnStep):
    """Aligns labels with longer outputs."""

    @staticmethod
    def data(rows):
        labels = np.random.default_rng(3).integers(1, 4, size=(rows, 2)).astype("int32")
        return normal(rows, 6, 4), labels

    def make(self):
        self.net = keras.Sequential([keras.Input((6, 4)), layers.Dense(4)])

    def loss_of(self, x, y):
        return ops.mean(keras.losses.CTC(reduction=None)(y, self.net(x)))


class RandomField(OwnStep):
    """A conditional random field: the partition function goes along the sequence."""

    @staticmethod
    def data(rows):
        labels = np.random.default_rng(3).integers(0, 3, size=(rows, 5)).astype("int32")
        return normal(rows, 5, 4), labels

    def make(self):
        self.net = keras.Sequential([keras.Input((5, 4)), layers.Dense(3)])
        self.moves = self.add_weight(shape=(3, 3), initializer="glorot_uniform", name="moves")

    def loss_of(self, x, y):
        scores, moves = self.net(x), ops.convert_to_tensor(self.moves)
        one_hot = ops.one_hot(y, 3, dtype=scores.dtype)
        path = ops.sum(scores * one_hot, (1, 2))
        path += ops.sum(ops.matmul(one_hot[:, :-1], moves) * one_hot[:, 1:], (1, 2))
        partition = scores[:, 0]
        for place in range(1, 5):
            by_move = partition[:, :, None] + moves[None] + scores[:, place][:, None]
            partition = ops.logsumexp(by_move, axis=1)
        return ops.mean(ops.logsumexp(partition, axis=1) - path)


class VAE(OwnStep):
    """Sums its error and its divergence over samples."""

    reduce = None

    @staticmethod
    def data(rows):
        return normal(rows, 4), normal(rows, 3, seed=4)

    def make(self):
        inputs = keras.Input((4,))
        hidden = layers.Dense(8, activation="tanh")(inputs)
        outputs = [layers.Dense(3)(hidden), layers.Dense(3)(hidden)]
        if self.reduce is not None:
            outputs = AddsDivergence(self.reduce)(outputs)
        self.encoder, self.decoder = keras.Model(inputs, outputs), mlp(3, 4)

    def added(self, mean, log_variance):
        return ops.sum(divergence(mean, log_variance))

    def loss_of(self, x, y):
        mean, log_variance = self.encoder(x)
        code = mean + ops.exp(0.5 * log_variance) * y
        return 0.1 * (ops.sum(ops.square(x - self.decoder(code))) + self.added(mean, log_variance))


def divergence(mean, log_variance):
    """Return the divergence of each sample from the standard normal distribution."""
    return -0.5 * ops.sum(1.0 + log_variance - ops.square(mean) - ops.exp(log_variance), -1)


class AddsDivergence(layers.Layer):
    def __init__(self, reduce):
        super().__init__()
        self.reduce = reduce

    def call(self, inputs):
        self.add_loss(0.1 * self.reduce(divergence(*inputs)))
        return inputs


class VAEThatAddsASum(VAE):
    reduce = staticmethod(ops.sum)

    def added(self, mean, log_variance):
        return sum(self.losses)


class VAEThatAddsAMean(VAEThatAddsASum):
    reduce = staticmethod(ops.mean)


class Annealed(OwnStep):
    """A term grows with the updates."""

    def loss_of(self, x, y):
        z = self.net(x)
        share = ops.minimum(ops.cast(self.optimizer.iterations, z.dtype) / 4.0, 1.0)
        return ops.mean(ops.square(z - y)) + share * ops.mean(ops.abs(z))


class LearnedUncertainty(OwnStep):
    """Weighs two terms by what it learns (1705.07115)."""

    def make(self):
        super().make()
        self.scales = self.add_weight(shape=(2,), initializer="zeros", name="scales")

    def loss_of(self, x, y):
        scales, z = ops.convert_to_tensor(self.scales), self.net(x)
        terms = ops.stack([ops.mean(ops.square(z - y)), ops.mean(ops.abs(z + y))])
        return ops.sum(ops.exp(-scales) * terms + scales)


class PhysicsInformed(OwnStep):
    """Solves an equation of derivatives with respect to inputs (1711.10561)."""

    def loss_of(self, x, y):
        residual = self.slopes(lambda x: self.net(x)[:, 0], x)[:, 0] - ops.sin(x[:, 1])
        return ops.mean(ops.square(residual)) + ops.mean(ops.square(self.net(y_as_x(y)) - y))


def y_as_x(y):
    return ops.concatenate([y, y], 1)


class Forces(OwnStep):
    """Predicts an energy, whose gradient is compared with targets too."""

    def loss_of(self, x, y):
        forces = self.slopes(lambda x: ops.sum(ops.square(self.net(x)), -1), x)
        return ops.mean(ops.square(forces - y_as_x(y)))


class Adversarial(OwnStep):
    """Moves its inputs along a gradient first (1412.6572)."""

    def loss_of(self, x, y):
        slopes = self.slopes(lambda x: ops.sum(ops.square(self.net(x) - y), -1), x)
        moved = ops.stop_gradient(x + 0.1 * ops.sign(slopes))
        return ops.mean(ops.square(self.net(moved) - y))


# What is done with gradients, with weights, and behind the update.


class Doubles(MaskedMean):
    def changed(self, gradients):
        return [2.0 * gradient for gradient in gradients]


class ClipsByNorm(MaskedMean):
    def changed(self, gradients):
        norm = ops.sqrt(sum(ops.sum(ops.square(gradient)) for gradient in gradients))
        return [gradient * ops.minimum(1.0, 0.05 / norm) for gradient in gradients]


class Sharpness(OwnStep):
    """Takes its gradient where the loss is largest nearby, and goes back (2010.01412)."""

    def step(self, x, y):
        variables = self.trainable_variables

        def gradients():
            return self.gradients(lambda: self.loss_of(x, y), variables)

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


class BYOL(OwnStep):
    """Predicts what a target network gives, which the step assigns (2006.07733)."""

    def make(self):
        self.online, self.predictor = mlp(4, 5), mlp(5, 5)
        self.target = mlp(4, 5, trainable=False)

    def loss_of(self, x, y):
        target = normalized(self.target(ops.flip(x, 1)))
        predicted = normalized(self.predictor(self.online(x)))
        return ops.mean(2.0 - 2.0 * ops.sum(target * predicted, -1))

    def after_update(self, x, y):
        for slow, weight in zip(self.target.variables, self.online.variables):
            slow.assign(0.9 * slow + 0.1 * weight)


class NNCLR(OwnStep):
    """Compares with the nearest of a queue of embeddings, which the step assigns (2104.14548)."""

    def make(self):
        self.encoder, self.predictor = mlp(4, 5), mlp(5, 5)
        initializer = keras.initializers.RandomNormal(seed=7)
        self.queue = self.add_weight(shape=(32, 5), initializer=initializer, trainable=False)

    def loss_of(self, x, y):
        a, b = normalized(self.encoder(x)), self.predictor(self.encoder(ops.flip(x, 1)))
        nearest = ops.argmax(ops.matmul(a, ops.transpose(ops.convert_to_tensor(self.queue))), 1)
        found = ops.take(ops.convert_to_tensor(self.queue), nearest, 0)
        return contrast(a + ops.stop_gradient(found - a), b)

    def after_update(self, x, y):
        embeddings = normalized(self.encoder(x))
        queue = ops.convert_to_tensor(self.queue)
        self.queue.assign(ops.concatenate([embeddings, queue])[:32])


class Centers(OwnStep):
    """Keeps a center of its outputs, from which they are to stay away."""

    def make(self):
        super().make()
        self.center = self.add_weight(shape=(2,), initializer="zeros", trainable=False)

    def loss_of(self, x, y):
        z = self.net(x)
        return ops.mean(ops.square(z - y)) - 0.1 * ops.mean(ops.square(z - self.center))

    def after_update(self, x, y):
        self.center.assign(0.9 * self.center + 0.1 * ops.mean(self.net(x), 0))


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


class ClipsWeights(OwnStep):
    """As the first GANs with a Wasserstein distance do."""

    def after_update(self, x, y):
        for variable in self.trainable_variables:
            variable.assign(ops.clip(variable, -0.3, 0.3))


class Mixture(OwnStep):
    """Of experts, whose load is balanced by a product of means over samples (2101.03961)."""

    def make(self):
        self.gate, self.experts = layers.Dense(2), [layers.Dense(2), layers.Dense(2)]
        for part in (self.gate, *self.experts):
            part.build((None, 4))

    def loss_of(self, x, y):
        shares = ops.softmax(self.gate(x))
        z = sum(shares[:, i : i + 1] * expert(x) for i, expert in enumerate(self.experts))
        chosen = ops.one_hot(ops.argmax(shares, -1), 2, dtype=shares.dtype)
        balance = 2.0 * ops.sum(ops.mean(chosen, 0) * ops.mean(shares, 0))
        return ops.mean(ops.square(z - y)) + 0.1 * balance


class Critic(OwnStep):
    """Has a penalty on the norm of a gradient with respect to inputs (1704.00028)."""

    def loss_of(self, x, y):
        norm = ops.sqrt(ops.sum(ops.square(self.slopes(lambda x: self.net(x)[:, 0], x)), -1))
        return ops.mean(self.net(x)) + ops.mean(ops.square(norm - 1.0))


# What is set of the optimizer, and what is logged.


class SetsRate(OwnStep):
    """Sets the learning rate before its update."""

    def changed(self, gradients):
        self.optimizer.learning_rate.assign(self.rate(self.optimizer.learning_rate))
        return gradients


class FollowsASchedule(SetsRate):
    def rate(self, rate):
        return 0.1 / (1.0 + ops.cast(self.optimizer.iterations, rate.dtype))


class LowersRate(SetsRate):
    def rate(self, rate):
        return 0.9 * rate


class LogsNumbers(OwnStep):
    """Logs a number of each kind beside its loss."""

    def step(self, x, y):
        logs = super().step(x, y)
        z = ops.stop_gradient(self.net(x))  # with the weights that the update made
        mask = ops.cast(y > 0, z.dtype)
        return {
            **logs,
            "mean": ops.mean(ops.abs(y)),
            "masked": ops.sum(mask * y) / ops.sum(mask),
            "count": ops.sum(mask),
            **self.more(y, z),
        }

    def more(self, y, z):
        return {}


class LogsWhatComparesSamples(LogsNumbers):
    def more(self, y, z):
        return {"spread": ops.std(y)}


class LogsAfterTheUpdate(LogsNumbers):
    def more(self, y, z):
        return {"late": ops.mean(ops.square(y - z))}


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
    """Moves its weights by itself."""

    def step(self, x, y):
        variables = self.trainable_variables
        loss, gradients = self.gradients(lambda: self.loss_of(x, y), variables)
        for variable, gradient in zip(variables, gradients):
            variable.assign(variable - 0.1 * gradient)
        return {"own": loss}


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


COMPARES = {"across": Warns(TRIED)}


def field_step(make, told=False, learning_rate=0.05, **kwargs):
    data = getattr(make, "data", dense_data)
    given = {"compile": sgd(None, learning_rate), "expects": COMPARES if told else {}, **kwargs}
    return Case(make, data, **given)


def of_networks(make, **kwargs):
    return field_step(make, compile=of_two, backends=("tensorflow", "torch"), **kwargs)


CASES = {
    "SimCLR": field_step(SimCLR, True),
    "Barlow twins": field_step(BarlowTwins, True),
    "dual encoder": field_step(DualEncoder, True),
    "distillation": field_step(Distillation, True),
    "adaptive weights": field_step(AdaptiveWeights, True),
    "mixup": field_step(Mixup, True),
    "hardest triplet": field_step(HardestTriplet, True),
    "supervised contrast": field_step(SupervisedContrast, True),
    "pairwise ranking": field_step(PairwiseRanking, True),
    "correlation": field_step(Correlation, True),
    "maximum mean discrepancy": field_step(MaximumMeanDiscrepancy, True),
    "mixture of experts": field_step(Mixture, True),
    "masked mean of predictions": field_step(MaskedMean),
    "detector": field_step(
        Detector, learning_rate=0.02, expects={"across": Warns(f"Updates so far|{TRIED}")}
    ),
    "detector of two terms": field_step(DetectorOfTwoTerms, True, 0.02),
    "masked language model": field_step(MaskedLanguageModel),
    # TensorFlow computes it in float32.
    "CTC": field_step(CTC, learning_rate=0.003, precision="float32"),
    "sequences": field_step(Sequences, True),
    "random field": field_step(RandomField),
    "VAE": field_step(VAE, learning_rate=0.005),
    "VAE that adds a sum": field_step(VAEThatAddsASum, learning_rate=0.005),
    "VAE that adds a mean": field_step(VAEThatAddsAMean, True, 0.005),
    "annealed term": field_step(Annealed),
    "learned uncertainty": field_step(LearnedUncertainty),
    "physics": field_step(PhysicsInformed),
    "forces": field_step(Forces),
    "adversarial": field_step(Adversarial),
    "penalty on a gradient": field_step(Critic),
    "doubled gradients": field_step(Doubles),
    "gradients clipped by norm": field_step(ClipsByNorm, True),
    "sharpness": field_step(Sharpness, True),
    "BYOL": field_step(BYOL, True),
    "NNCLR": field_step(NNCLR, True),
    "centers": field_step(Centers, True),
    "multiplier": field_step(Multiplier, expects={"across": Warns(f"(?s){TRIED}.*price")}),
    "clipped weights": field_step(ClipsWeights, True),
    "GAN": of_networks(GAN, told=True),
    "GAN of one state": of_networks(GANOfOneState),
    "Wasserstein GAN": of_networks(WassersteinGAN, expects={"across": Refused("optimizer twice")}),
}
BUT_LOGS = tuple(name for name in ALL if name != "logs")
CASES |= {
    "a schedule of its own": field_step(FollowsASchedule),
    "a rate that it lowers": field_step(LowersRate, True),
    "logs of numbers": field_step(LogsNumbers),
    **{
        f"logs of {what}": field_step(make, expects={"across": Warns(TRIED, BUT_LOGS)})
        for what, make in {
            "what compares samples": LogsWhatComparesSamples,
            "updated weights": LogsAfterTheUpdate,
        }.items()
    },
    "weighs by a metric": field_step(WeighsByAMetric, True),
    "applies twice": field_step(AppliesTwice, expects={"across": Refused("twice")}),
    "applies none": field_step(
        AppliesNone, expects={"across": Refused("applies none", is_late=True)}
    ),
}
# Whether a batch is left out is known at its end, and so are all its updates made there.
LEFT_OUT = {
    "SimCLR": {},
    "masked language model": {},
    "mixture of experts": {},
    "BYOL": {"within": Warns(TRIED)},
    "GAN": {"within": Warns(TRIED)},
    "Wasserstein GAN": {"within": Refused("applies the same optimizer twice")},
}
CASES |= {
    f"may be left out, {name}": dataclasses.replace(
        CASES[name], settings=("left out",), expects=expects
    )
    for name, expects in LEFT_OUT.items()
}
CASES = {f"step: {name}": case for name, case in CASES.items()}
