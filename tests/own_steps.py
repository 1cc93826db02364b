"""Steps of the field: small models with a `train_step` of their own.

Their steps draw random numbers from seeds of the model, in the step itself, so that all numbers are
drawn for the full batch: microbatches then see those that plain Keras draws.

No weight has a gradient that is zero in exact arithmetic, such as a bias in front of a mean that is
subtracted: Adam makes full steps of its rounding.
"""

import functools

import keras
import numpy as np
import tensorflow as tf
from helpers import dense_model
from keras import layers, ops

optimizers_by_name = {}  # as of a training script with globals


def normal(rows, *shape, seed=3):
    generator = np.random.default_rng(seed)
    return generator.normal(size=(rows, *shape)).astype(keras.config.floatx())


def vectors(rows):
    return (normal(rows, 6),)


def vectors_and_targets(rows):
    return normal(rows, 6), normal(rows, 5, seed=4)


def mlp(features, outputs, use_bias=True):
    return keras.Sequential(
        [
            keras.Input((features,)),
            layers.Dense(8, activation="tanh"),
            layers.Dense(outputs, use_bias=use_bias),
        ]
    )


def variables_of(*parts):
    return [variable for part in parts for variable in part.trainable_variables]


class OwnStep(keras.Model):
    """A model with a step of its own.

    `make` creates its parts, and `trained` tells the variables of each of its optimizers. Its
    `state` is all that training changes, and that no optimizer has.
    """

    data = staticmethod(vectors)
    optimizer_class = staticmethod(functools.partial(keras.optimizers.Adam, 0.01))

    def __init__(self):
        super().__init__()
        self.tracker = keras.metrics.Mean(name="loss")
        self.make()

    @property
    def metrics(self):
        return [self.tracker]

    def compile(self, *optimizers, **kwargs):
        super().compile(optimizers[0], **kwargs)
        self.optimizers = optimizers

    def trained(self):
        return [self.trainable_variables]

    def state(self):
        return self.variables

    def update(self, tape, loss, variables=None):
        variables = self.trainable_variables if variables is None else variables
        self.optimizer.apply_gradients(zip(tape.gradient(loss, variables), variables))
        return self.tracked(loss)

    def tracked(self, loss):
        self.tracker.update_state(loss)
        return {"loss": self.tracker.result()}


# Losses that compare samples.


def contrastive(a, b, temperature=0.2):
    """Of all rows of the batch, each is to find the one in its own place."""
    scores = tf.math.l2_normalize(a, -1) @ tf.transpose(tf.math.l2_normalize(b, -1)) / temperature
    own = tf.range(tf.shape(scores)[0])
    entropy = tf.nn.sparse_softmax_cross_entropy_with_logits
    return entropy(own, scores) + entropy(own, tf.transpose(scores))


class SimCLR(OwnStep):
    """Two views, drawn in the step, through an encoder and a head (2002.05709)."""

    def make(self):
        self.augment = keras.Sequential([layers.GaussianNoise(0.3, seed=3), layers.Rescaling(2.0)])
        self.encoder, self.head = mlp(6, 5), mlp(5, 4)

    def augmented(self, x):
        return self.augment(x, training=True)

    def train_step(self, x):
        views = [self.augmented(x) for _ in range(2)]
        with tf.GradientTape() as tape:
            a, b = (self.head(self.encoder(view, training=True)) for view in views)
            loss = contrastive(a, b)
        return self.update(tape, loss)


class BarlowTwins(OwnStep):
    """Both views in one call of twice the rows (2103.03230)."""

    def make(self):
        self.encoder = mlp(6, 5, use_bias=False)

    def train_step(self, x):
        with tf.GradientTape() as tape:
            embeddings = self.encoder(tf.concat([x, x[:, ::-1]], 0), training=True)
            a, b = (
                (z - tf.reduce_mean(z, 0)) / tf.math.reduce_std(z, 0)
                for z in tf.split(embeddings, 2)
            )
            correlation = tf.transpose(a) @ b / tf.cast(tf.shape(a)[0], a.dtype)
            loss = tf.reduce_sum(tf.square(correlation - tf.eye(5, dtype=a.dtype)))
        return self.update(tape, loss)


class BYOL(OwnStep):
    """Predicts what a target network gives, which the step assigns (2006.07733)."""

    def make(self):
        self.online, self.target, self.predictor = mlp(6, 5), mlp(6, 5), mlp(5, 5)
        self.target.trainable = False

    def train_step(self, x):
        with tf.GradientTape() as tape:
            target = tf.math.l2_normalize(self.target(x[:, ::-1]), -1)
            predicted = tf.math.l2_normalize(self.predictor(self.online(x)), -1)
            loss = tf.reduce_mean(2.0 - 2.0 * tf.reduce_sum(target * predicted, -1))
        logs = self.update(tape, loss, variables_of(self.online, self.predictor))
        for slow, weight in zip(self.target.variables, self.online.variables, strict=True):
            slow.assign(0.9 * slow + 0.1 * weight)
        return logs


class NNCLR(OwnStep):
    """Compares with the nearest of a queue of embeddings, which the step assigns (2104.14548)."""

    def make(self):
        self.encoder, self.predictor = mlp(6, 5), mlp(5, 5)
        initializer = keras.initializers.RandomNormal(seed=7)
        self.queue = self.add_weight(shape=(32, 5), initializer=initializer, trainable=False)

    def nearest(self, embeddings):
        embeddings = tf.math.l2_normalize(embeddings, -1)
        nearest = tf.gather(self.queue, tf.argmax(embeddings @ tf.transpose(self.queue), 1))
        return embeddings + tf.stop_gradient(nearest - embeddings)

    def train_step(self, x):
        with tf.GradientTape() as tape:
            a, b = self.encoder(x), self.encoder(x[:, ::-1])
            loss = contrastive(self.nearest(a), self.predictor(b))
            loss += contrastive(self.nearest(b), self.predictor(a))
        logs = self.update(tape, loss)
        embeddings = tf.math.l2_normalize(a, -1)
        self.queue.assign(tf.concat([embeddings, self.queue[: -tf.shape(x)[0]]], 0))
        return logs


class QueueOfTensorFlow(NNCLR):
    """Has its queue in a variable that Keras does not know."""

    def make(self):
        self.encoder, self.predictor = mlp(6, 5), mlp(5, 5)
        initializer = keras.initializers.RandomNormal(seed=7)
        self.queue = tf.Variable(initializer((32, 5), keras.config.floatx()), trainable=False)

    def state(self):
        return [*self.variables, self.queue]


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

    def train_step(self, data):
        image, text = data
        with tf.GradientTape() as tape:
            a, b = self.image(image, training=True), self.text(list(text), training=True)
            loss = tf.reduce_mean(contrastive(a, b))
        return self.update(tape, loss)


# Several networks against one another.


class GAN(OwnStep):
    """Updates its discriminator, then its generator, as Keras's guide does."""

    def make(self):
        self.generator, self.discriminator = mlp(3, 6), mlp(6, 1)
        self.entropy = keras.losses.BinaryCrossentropy(from_logits=True)
        self.seeds = keras.random.SeedGenerator(5)

    def trained(self):
        return [variables_of(self.discriminator), variables_of(self.generator)]

    def compile(self, d_optimizer, g_optimizer, **kwargs):
        super(OwnStep, self).compile(**kwargs)
        self.d_optimizer, self.g_optimizer = d_optimizer, g_optimizer

    def noise(self, x):
        return keras.random.normal((tf.shape(x)[0], 3), seed=self.seeds)

    def train_step(self, x):
        rows = tf.shape(x)[0]
        both = tf.concat([self.generator(self.noise(x)), x], 0)
        labels = tf.concat([tf.ones((rows, 1)), tf.zeros((rows, 1))], 0)
        labels += 0.05 * keras.random.uniform(tf.shape(labels), seed=self.seeds, dtype="float32")
        with tf.GradientTape() as tape:
            d_loss = self.entropy(labels, self.discriminator(both))
        variables = self.discriminator.trainable_weights
        self.d_optimizer.apply_gradients(zip(tape.gradient(d_loss, variables), variables))
        with tf.GradientTape() as tape:
            fake = self.discriminator(self.generator(self.noise(x)))
            g_loss = self.entropy(tf.zeros((rows, 1)), fake)
        variables = self.generator.trainable_weights
        self.g_optimizer.apply_gradients(zip(tape.gradient(g_loss, variables), variables))
        return {**self.tracked(g_loss), "d_loss": d_loss}


class GANOfOneTape(GAN):
    """Updates its discriminator before it takes the generator's gradient of the same tape."""

    def train_step(self, x):
        rows = tf.shape(x)[0]
        with tf.GradientTape(persistent=True) as tape:
            fake = self.discriminator(self.generator(self.noise(x)))
            real = self.discriminator(x)
            d_loss = self.entropy(tf.ones((rows, 1)), real)
            d_loss += self.entropy(tf.zeros((rows, 1)), fake)
            g_loss = self.entropy(tf.ones((rows, 1)), fake)
        variables = self.discriminator.trainable_weights
        self.d_optimizer.apply_gradients(zip(tape.gradient(d_loss, variables), variables))
        variables = self.generator.trainable_weights
        self.g_optimizer.apply_gradients(zip(tape.gradient(g_loss, variables), variables))
        return {**self.tracked(g_loss), "d_loss": d_loss}


class WassersteinGAN(GAN):
    """Updates its critic three times, with a gradient penalty (1704.00028)."""

    @staticmethod
    def data(rows):
        generator = np.random.default_rng(4)
        positions = generator.uniform(size=(rows, 3, 1)).astype(keras.config.floatx())
        return normal(rows, 6), {"noise": normal(rows, 4, 3, seed=5), "positions": positions}

    def penalty(self, mixed):
        with tf.GradientTape() as tape:
            tape.watch(mixed)
            scores = self.discriminator(mixed, training=True)
        slopes = tape.gradient(scores, [mixed])[0]
        return tf.reduce_mean(tf.square(tf.norm(slopes, axis=-1) - 1.0))

    def train_step(self, data):
        x, (noise, positions) = data[0], (data[1][name] for name in ("noise", "positions"))
        variables = self.discriminator.trainable_variables
        for i in range(3):
            fake = self.generator(noise[:, i], training=True)
            with tf.GradientTape() as tape:
                d_loss = tf.reduce_mean(tf.tanh(self.discriminator(fake, training=True)))
                d_loss -= tf.reduce_mean(self.discriminator(x, training=True))
                d_loss += 10.0 * self.penalty(x + positions[:, i] * (fake - x))
            self.d_optimizer.apply(tape.gradient(d_loss, variables), variables)
        variables = self.generator.trainable_variables
        with tf.GradientTape() as tape:
            fake = self.generator(noise[:, 3], training=True)
            g_loss = -tf.reduce_mean(self.discriminator(fake, training=True))
        self.g_optimizer.apply(tape.gradient(g_loss, variables), variables)
        return {**self.tracked(g_loss), "d_loss": d_loss}


class CycleGAN(OwnStep):
    """Two generators and two discriminators, four optimizers, one tape (1703.10593)."""

    data = staticmethod(lambda rows: (normal(rows, 4), normal(rows, 4, seed=4)))

    def make(self):
        self.to_y, self.to_x = mlp(4, 4), mlp(4, 4)
        self.is_x, self.is_y = mlp(4, 1), mlp(4, 1)

    def trained(self):
        return [variables_of(part) for part in (self.to_y, self.to_x, self.is_x, self.is_y)]

    def train_step(self, data):
        x, y = data

        def apart(scores, target):
            return tf.sqrt(tf.reduce_mean(tf.square(scores - target)))

        with tf.GradientTape(persistent=True) as tape:
            fake_y, fake_x = self.to_y(x), self.to_x(y)
            around = apart(self.to_x(fake_y), x) + apart(self.to_y(fake_x), y)
            same_y, same_x = self.to_y(y), self.to_x(x)
            fakes = self.is_y(fake_y), self.is_x(fake_x)
            losses = [
                apart(fakes[0], 1.0) + around + apart(same_y, y),
                apart(fakes[1], 1.0) + around + apart(same_x, x),
                apart(self.is_x(x), 1.0) + apart(fakes[1], 0.0),
                apart(self.is_y(y), 1.0) + apart(fakes[0], 0.0),
            ]
        for loss, optimizer, variables in zip(losses, self.optimizers, self.trained(), strict=True):
            optimizer.apply(tape.gradient(loss, variables), variables)
        return {**self.tracked(losses[0]), "is_x": losses[2]}


class Distillation(OwnStep):
    """A student learns from a frozen teacher, at its own temperature in each batch."""

    data = staticmethod(vectors_and_targets)

    def make(self):
        self.student, self.teacher = mlp(6, 5), mlp(6, 5)
        self.teacher.trainable = False

    def train_step(self, data):
        x, y = data
        expected = self.teacher(x, training=False)
        temperature = 2.0 * tf.math.reduce_std(expected)
        with tf.GradientTape() as tape:
            found = self.student(x, training=True)
            soft = keras.losses.KLDivergence()(
                tf.nn.softmax(expected / temperature), tf.nn.softmax(found / temperature)
            )
            loss = 0.3 * tf.reduce_mean(tf.square(found - y)) + soft
        return self.update(tape, loss)


# Generative models.


def kl_divergence(mean, log_variance):
    """Return the divergence of each sample from the standard normal distribution."""
    return -0.5 * ops.sum(1.0 + log_variance - ops.square(mean) - ops.exp(log_variance), -1)


class Divergence(layers.Layer):
    def __init__(self, reduce):
        super().__init__()
        self.reduce = reduce

    def call(self, inputs):
        self.add_loss(0.1 * self.reduce(kl_divergence(*inputs)))
        return inputs


class VAE(OwnStep):
    """Draws its codes in a layer of its own, and sums the error over pixels and samples."""

    reduce = None

    def make(self):
        inputs = keras.Input((6,))
        hidden = layers.Dense(8, activation="tanh")(inputs)
        outputs = [layers.Dense(3)(hidden), layers.Dense(3)(hidden)]
        if self.reduce is not None:
            outputs = Divergence(self.reduce)(outputs)
        self.encoder, self.decoder = keras.Model(inputs, outputs), mlp(3, 6)
        self.sampling = Sampling()

    def added(self, mean, log_variance):
        return tf.reduce_sum(kl_divergence(mean, log_variance))

    def train_step(self, x):
        with tf.GradientTape() as tape:
            mean, log_variance = self.encoder(x)
            error = tf.reduce_sum(tf.square(x - self.decoder(self.sampling([mean, log_variance]))))
            loss = error + self.added(mean, log_variance)
        return {**self.update(tape, loss), "error": error}


class Sampling(layers.Layer):
    def __init__(self):
        super().__init__()
        self.seeds = keras.random.SeedGenerator(6)

    def call(self, inputs):
        mean, log_variance = inputs
        noise = keras.random.normal(ops.shape(mean), dtype=mean.dtype, seed=self.seeds)
        return mean + ops.exp(0.5 * log_variance) * noise


class VAEThatAddsAMean(VAE):
    reduce = staticmethod(ops.mean)

    def added(self, mean, log_variance):
        return sum(self.losses)


class VAEThatAddsASum(VAEThatAddsAMean):
    reduce = staticmethod(ops.sum)


class VAEThatAddsARoot(VAEThatAddsAMean):
    reduce = staticmethod(lambda values: ops.sqrt(ops.mean(values)))


class Diffusion(OwnStep):
    """Denoises at random times, with a slow copy of its network (2010.02502)."""

    def make(self):
        def network():
            inputs = [keras.Input((6,)), keras.Input((1,))]
            return keras.Model(inputs, mlp(7, 6)(layers.Concatenate()(inputs)))

        self.network, self.slow = network(), network()
        self.slow.trainable = False
        self.seeds = keras.random.SeedGenerator(5)

    def train_step(self, x):
        noise = keras.random.normal(tf.shape(x), dtype=x.dtype, seed=self.seeds)
        times = keras.random.uniform((tf.shape(x)[0], 1), dtype=x.dtype, seed=self.seeds)
        noisy = tf.cos(times) * x + tf.sin(times) * noise
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.abs(self.network([noisy, times**2], training=True) - noise))
        logs = self.update(tape, loss, self.network.trainable_weights)
        for weight, slow in zip(self.network.weights, self.slow.weights, strict=True):
            slow.assign(0.9 * slow + 0.1 * weight)
        return logs


class TokensAndPositions(keras.Model):
    """Built when it is first called."""

    def __init__(self):
        super().__init__()
        self.tokens, self.positions = layers.Embedding(9, 5), layers.Embedding(6, 5)
        self.mix = layers.Dense(5, activation="tanh")

    def call(self, tokens):
        hidden = self.tokens(tokens) + self.positions(ops.arange(ops.shape(tokens)[-1]))
        return hidden + self.mix(ops.cumsum(hidden, 1))


class MaskedLanguageModel(OwnStep):
    """Of the hidden tokens alone, with output weights that are the embeddings."""

    optimizer_class = staticmethod(functools.partial(keras.optimizers.SGD, 0.1, momentum=0.9))

    @staticmethod
    def data(rows):
        generator = np.random.default_rng(3)
        tokens = generator.integers(1, 9, size=(rows, 6))
        is_hidden = generator.uniform(size=(rows, 6)) < np.linspace(0.1, 0.6, rows)[:, None]
        return np.where(is_hidden, 0, tokens), tokens, is_hidden

    def make(self):
        self.embedder, self.head = TokensAndPositions(), layers.Dense(5, activation="tanh")
        self.head(self.embedder(np.zeros((1, 6), "int32")))

    def train_step(self, data):
        tokens, expected, is_hidden = data
        with tf.GradientTape() as tape:
            hidden = self.head(self.embedder(tokens))
            scores = hidden @ tf.transpose(tf.convert_to_tensor(self.embedder.tokens.embeddings))
            losses = tf.nn.sparse_softmax_cross_entropy_with_logits(expected, scores)
            is_hidden = tf.cast(is_hidden, losses.dtype)
            loss = tf.reduce_sum(is_hidden * losses) / tf.reduce_sum(is_hidden)
        return self.update(tape, loss)


# What steps make of losses and gradients.


class OwnLoss(OwnStep):
    data = staticmethod(vectors_and_targets)

    def make(self):
        self.net = mlp(6, 5)

    def call(self, x):
        return self.net(x)

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            loss = self.loss_of(tf.square(self.net(x, training=True) - y))
        return self.update(tape, loss)


class Mean(OwnLoss):
    def loss_of(self, errors):
        return tf.reduce_mean(errors)


class MaskedMean(OwnLoss):
    def loss_of(self, errors):
        mask = tf.cast(tf.stop_gradient(errors) > 0.3, errors.dtype)
        return tf.reduce_sum(mask * errors) / tf.reduce_sum(mask)


class Root(OwnLoss):
    def loss_of(self, errors):
        return tf.sqrt(tf.reduce_mean(errors))


class Sum(OwnLoss):
    def loss_of(self, errors):
        return tf.reduce_sum(errors)


class Vector(OwnLoss):
    """Takes the gradient of a loss for each row."""

    def loss_of(self, errors):
        return tf.reduce_mean(errors, -1)


class AdaptiveWeights(OwnLoss):
    """Divides by the largest loss of the batch, and clips gradients by their norm."""

    def loss_of(self, errors):
        losses = tf.reduce_mean(errors, -1)
        return tf.reduce_mean(losses**2) / tf.stop_gradient(tf.reduce_max(losses))

    def update(self, tape, loss):
        variables = self.trainable_variables
        gradients, _ = tf.clip_by_global_norm(tape.gradient(loss, variables), 0.05)
        self.optimizer.apply(gradients, variables)
        return self.tracked(loss)


class OptimizerOfTheScript(Root):
    """Reaches its optimizer by a global name."""

    def compile(self, optimizer, **kwargs):
        super(OwnStep, self).compile(**kwargs)
        optimizers_by_name["of this model"] = optimizer

    def update(self, tape, loss):
        variables = self.trainable_variables
        optimizers_by_name["of this model"].apply(tape.gradient(loss, variables), variables)
        return self.tracked(loss)


class Adversarial(OwnLoss):
    """Moves its inputs along a gradient first (1412.6572)."""

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            tape.watch(x)
            loss = tf.sqrt(tf.reduce_mean(tf.square(self.net(x) - y)))
        return super().train_step((x + 0.1 * tf.sign(tape.gradient(loss, x)), y))

    loss_of = Root.loss_of


class Sharpness(OwnLoss):
    """Takes its gradient where the loss is largest nearby, and goes back (2010.01412)."""

    def train_step(self, data):
        x, y = data
        variables = self.trainable_variables

        def gradients():
            with tf.GradientTape() as tape:
                loss = tf.sqrt(tf.reduce_mean(tf.square(self.net(x) - y)))
            return loss, tape.gradient(loss, variables)

        loss, first = gradients()
        shifts = [0.1 * gradient / tf.linalg.global_norm(first) for gradient in first]
        before = [tf.identity(variable.value) for variable in variables]
        for variable, shift in zip(variables, shifts, strict=True):
            variable.assign_add(shift)
        _, second = gradients()
        for variable, value in zip(variables, before, strict=True):
            variable.assign(value)
        self.optimizer.apply(second, variables)
        return self.tracked(loss)


class Mixup(Root):
    """Mixes the samples of its batch, in an order that it draws (1710.09412)."""

    def make(self):
        super().make()
        self.seeds = keras.random.SeedGenerator(5)

    def train_step(self, data):
        x, y = data
        order = keras.random.shuffle(tf.range(tf.shape(x)[0]), seed=self.seeds)
        share = keras.random.uniform((tf.shape(x)[0], 1), dtype=x.dtype, seed=self.seeds)
        x, y = (share * t + (1.0 - share) * tf.gather(t, order) for t in (x, y))
        return super().train_step((x, y))


class PhysicsInformed(OwnStep):
    """Solves an equation of first and second derivatives with respect to inputs (1711.10561)."""

    data = staticmethod(lambda rows: (normal(rows, 2), normal(rows, 2, seed=4)))

    def make(self):
        self.net = mlp(2, 1, use_bias=False)

    def train_step(self, data):
        inside, border = data
        x, time = inside[:, :1], inside[:, 1:]
        with tf.GradientTape() as tape:
            with tf.GradientTape() as second:
                second.watch(x)
                with tf.GradientTape() as first:
                    first.watch([x, time])
                    u = self.net(tf.concat([x, time], 1))
                by_x, by_time = first.gradient(u, [x, time])
            residual = by_time + u * by_x - 0.1 * second.gradient(by_x, x)
            at_border = self.net(border) - tf.sin(border[:, :1])
            loss = tf.reduce_mean(tf.square(residual)) + tf.reduce_mean(tf.square(at_border))
        return self.update(tape, loss)


STEPS = {
    "SimCLR": SimCLR,
    "Barlow twins": BarlowTwins,
    "BYOL": BYOL,
    "NNCLR": NNCLR,
    "NNCLR, a queue of TensorFlow": QueueOfTensorFlow,
    "dual encoder": DualEncoder,
    "GAN": GAN,
    "GAN of one tape": GANOfOneTape,
    "Wasserstein GAN": WassersteinGAN,
    "CycleGAN": CycleGAN,
    "distillation": Distillation,
    "VAE": VAE,
    "VAE that adds a mean": VAEThatAddsAMean,
    "VAE that adds a sum": VAEThatAddsASum,
    "diffusion": Diffusion,
    "masked language model": MaskedLanguageModel,
    "mean": Mean,
    "masked mean": MaskedMean,
    "root of a mean": Root,
    "sum over samples": Sum,
    "vector": Vector,
    "adaptive weights": AdaptiveWeights,
    "optimizer of the script": OptimizerOfTheScript,
    "adversarial": Adversarial,
    "sharpness": Sharpness,
    "mixup": Mixup,
    "physics": PhysicsInformed,
}


class TwoOptimizers(keras.Model):
    """Two networks, each with an optimizer of its own, both updated from one window's start."""

    def __init__(self):
        super().__init__()
        self.a, self.b = dense_model(), dense_model()

    b_optimizer = None  # a default that the class has

    def compile(self, a_optimizer, b_optimizer):
        super().compile()
        self.a_optimizer, self.b_optimizer = a_optimizer, b_optimizer

    def call(self, inputs):
        return self.a(inputs) * self.b(inputs)

    def train_step(self, data):
        x, y = data
        with tf.GradientTape(persistent=True) as tape:
            a_loss = tf.reduce_mean(tf.square(self.a(x) * self.b(x) - y))
            b_loss = tf.reduce_mean(tf.abs(self.a(x) + self.b(x) - y))
            scaled = self.b_optimizer.scale_loss(b_loss)
        a, b = self.a.trainable_variables, self.b.trainable_variables
        self.a_optimizer.apply(tape.gradient(a_loss, a), a)
        self.b_optimizer.apply(tape.gradient(scaled, b), b)
        return {"a_loss": a_loss, "b_loss": b_loss}
