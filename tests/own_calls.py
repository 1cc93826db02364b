"""Calls of layers, of every kind that a step may make. See `own_steps`."""

import dataclasses
import functools
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from keras import layers, ops
from own_steps import OwnStep, VAEThatAddsARoot, mlp, normal, variables_of


def root(outputs):
    """Return a loss of any outputs that does not add up over samples."""
    outputs = [tf.cast(t, keras.config.floatx()) for t in tf.nest.flatten(outputs) if t is not None]
    return sum(tf.sqrt(tf.reduce_mean(tf.square(t - 0.3))) for t in outputs)


class Calls(OwnStep):
    """Trains on all that its calls return."""

    def train_step(self, data):
        with tf.GradientTape() as tape:
            loss = root(self.outputs(data)) + sum(self.losses)
        return self.update(tape, loss)


def sequences(rows):
    return (normal(rows, 5, 3),)


def tokens(rows, length=7):
    return (np.random.default_rng(1).integers(0, 5, size=(rows, length)),)


def built(layer, *shapes):
    """Return a layer that has its weights."""
    layer.build(*shapes)
    return layer


class SeveralCalls(Calls):
    """Of one network, one on top of the other, too."""

    def make(self):
        self.net = mlp(6, 6)

    def outputs(self, x):
        return self.net(x), self.net(self.net(2.0 * x)), self.net(x[:, ::-1])


class OfNests(keras.Model):
    def __init__(self):
        super().__init__()
        self.first, self.last = layers.Dense(4, activation="tanh"), layers.Dense(3)

    def call(self, inputs, training=None):
        (scale,) = inputs["others"][1]
        hidden = self.first(inputs["x"]) * scale
        return {"hidden": hidden, "others": (None, [self.last(hidden), scale]), "number": 3}


class Nests(Calls):
    """Of dicts, lists, tuples and None, as inputs and as outputs."""

    def make(self):
        self.scale, self.net = mlp(6, 4), OfNests()
        self.net({"x": np.ones((1, 6)), "others": [None, (np.ones((1, 4)),)]})

    def outputs(self, x):
        outputs = self.net({"x": x, "others": [None, (self.scale(x),)]})
        assert (outputs["number"], outputs["others"][0]) == (3, None)
        return outputs["hidden"], outputs["others"][1]


class OfKeywords(layers.Layer):
    def __init__(self):
        super().__init__()
        self.dense = layers.Dense(4, activation="tanh")

    def build(self, shape):
        self.dense.build((None, 6))

    def call(self, x, *, scale=1.0, is_negative=False, table=0.0):
        return self.dense(x) * (-scale if is_negative else scale) + table


class Keywords(Calls):
    """Some of them tensors with samples, some for all samples, and some no tensors."""

    def make(self):
        self.net, self.scale = built(OfKeywords(), None), mlp(6, 4)

    def outputs(self, x):
        table = tf.constant([0.1, 0.2, 0.3, 0.4], x.dtype)
        negative = self.net(x=x, scale=self.scale(x), is_negative=True, table=table[None])
        return negative, self.net(x, scale=tf.constant(2.0, x.dtype))


class Shared(Calls):
    """Trains what all samples share, and what a call gets as an argument."""

    def make(self):
        self.net = built(OfKeywords(), None)
        self.table = self.add_weight(shape=(1, 4))
        self.number = self.add_weight(shape=(), initializer="ones")

    def outputs(self, x):
        return self.net(x, scale=2.0 * self.number, table=tf.convert_to_tensor(self.table))


class Attention(Calls):
    """With keys and masks by keyword, and its scores as an output."""

    data = staticmethod(sequences)

    def make(self):
        self.queries = built(layers.Dense(3), (None, 5, 3))
        shapes = [(None, 5, 3)] * 2
        self.net = built(layers.MultiHeadAttention(2, 3, use_bias=False), *shapes)

    def outputs(self, x):
        mask = tf.sequence_mask(tf.argmax(x[:, :, 0], 1) + 1, 5)[:, None]
        queries = self.queries(x)
        return self.net(queries, x, key=2.0 * x, attention_mask=mask, return_attention_scores=True)


class Masks(Calls):
    """Attached to the outputs of one call, and found at the inputs of the next."""

    data = staticmethod(tokens)

    def make(self):
        self.embedding = built(layers.Embedding(5, 3, mask_zero=True), (None, 7))
        self.lstm = built(layers.LSTM(4), (None, 7, 3))

    def outputs(self, x):
        embedded = self.embedding(x)
        assert embedded._keras_mask is not None
        return self.lstm(embedded)


class Logits(OwnStep):
    """Keras's losses find the logits of probabilities that are rounded to zero and one."""

    data = staticmethod(lambda rows: (normal(rows, 6), np.arange(rows) % 5))

    def make(self):
        steep = [keras.initializers.RandomNormal(0.0, 20.0, seed=seed) for seed in (2, 3)]
        self.classes = keras.Sequential(
            [keras.Input((6,)), layers.Dense(5, kernel_initializer=steep[0]), layers.Softmax()]
        )
        dense = layers.Dense(1, activation="sigmoid", kernel_initializer=steep[1])
        self.is_large = built(dense, (None, 6))

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            loss = tf.sqrt(keras.losses.SparseCategoricalCrossentropy()(y, self.classes(x)))
            loss += tf.sqrt(keras.losses.BinaryCrossentropy()(y[:, None] > 2, self.is_large(x)))
        return self.update(tape, loss)


class LayersWithoutWeights(Calls):
    """One of which draws random numbers."""

    def make(self):
        self.net, self.dropout = mlp(6, 6), layers.Dropout(0.5, seed=3)
        self.parts = keras.Sequential([layers.Reshape((2, 3)), layers.GlobalAveragePooling1D()])

    def outputs(self, x):
        return self.parts(self.dropout(self.net(x), training=True))


class OutsideOfTapes(OwnStep):
    def make(self):
        self.net, self.other = mlp(6, 6), mlp(6, 6)

    def train_step(self, x):
        target = self.other(self.net(x))
        with tf.GradientTape() as tape:
            stopped = tf.stop_gradient(self.net(target))
            loss = root([self.net(x + target), self.other(stopped)])
        return self.update(tape, loss)


class TwoTapes(OwnStep):
    """Follow the same call, each for a loss of its own."""

    def make(self):
        self.net, self.head = mlp(6, 6), mlp(6, 3)

    def trained(self):
        return [variables_of(self.net), variables_of(self.head)]

    def train_step(self, x):
        with tf.GradientTape() as tape, tf.GradientTape() as other:
            hidden = self.net(x)
            loss, of_head = root(hidden), root(self.head(hidden))
        for which, target, optimizer, variables in zip(
            (tape, other), (loss, of_head), self.optimizers, self.trained(), strict=True
        ):
            optimizer.apply(which.gradient(target, variables), variables)
        return self.tracked(loss + of_head)


class PersistentTape(OwnStep):
    """Asks for gradients of one call three times, with respect to other things."""

    def make(self):
        self.net = mlp(6, 6)

    def train_step(self, x):
        variables = self.trainable_variables
        with tf.GradientTape(persistent=True) as tape:
            tape.watch(x)
            outputs = self.net(x)
            losses = root(outputs), root(tf.square(outputs))
        first, second = (tape.gradient(loss, variables) for loss in losses)
        slope = tf.norm(tape.gradient(losses[0], x))
        gradients = [a + slope * b for a, b in zip(first, second, strict=True)]
        self.optimizer.apply(gradients, variables)
        return {**self.tracked(sum(losses)), "slope": slope}


class WatchedByHand(OwnStep):
    """Of some weights only."""

    def make(self):
        self.net = mlp(6, 6)

    def trained(self):
        return [self.net.trainable_variables[:2]]

    def train_step(self, x):
        (variables,) = self.trained()
        with tf.GradientTape(watch_accessed_variables=False) as tape:
            tape.watch([variable.value for variable in variables])
            loss = root(self.net(x))
        return self.update(tape, loss, variables)


class FrozenInTheMiddle(Calls):
    """Normalizes by statistics that are frozen, too."""

    def make(self):
        self.first, self.last = mlp(6, 6), mlp(4, 2)
        self.frozen = keras.Sequential(
            [keras.Input((6,)), layers.Dense(4, activation="tanh"), layers.BatchNormalization()]
        )
        self.frozen.trainable = False

    def outputs(self, x):
        return self.last(self.frozen(self.first(x), training=True))


class Regularizers(Calls):
    """Of weights, and of outputs: those of the outermost layer of a call, and of one inside."""

    def make(self):
        regularizers = [keras.regularizers.L2(number) for number in (0.02, 0.1, 0.3)]
        first = layers.Dense(
            5,
            activation="tanh",
            activity_regularizer=regularizers[0],
            kernel_regularizer=regularizers[1],
        )
        self.first = built(first, (None, 6))
        inner = layers.Dense(
            4,
            activity_regularizer=keras.regularizers.L1(0.01),
            bias_regularizer=regularizers[2],
        )
        self.last = keras.Sequential([keras.Input((5,)), inner])

    def outputs(self, x):
        return self.last(self.first(x))


class Recurrent(Calls):
    """Hands states from one call to another."""

    data = staticmethod(sequences)

    def make(self):
        gru = layers.GRU(4, return_sequences=True, return_state=True)
        self.encoder = built(gru, (None, 5, 3))
        self.decoder = built(layers.SimpleRNN(4, return_state=True), (None, 5, 4))

    def outputs(self, x):
        hidden, state = self.encoder(x)
        return self.decoder(hidden, initial_state=2.0 * state)


class Tables(Calls):
    """Calls with no samples among their inputs: a table of positions, and a style."""

    def make(self):
        self.net, self.mapping = mlp(6, 4), mlp(3, 4)
        self.positions = built(layers.Embedding(5, 4), (5,))
        self.style = self.add_weight(shape=(3,))

    def outputs(self, x):
        table = self.positions(tf.range(5)) * self.mapping(self.style[None])
        return self.net(x)[:, None] * table


class OfMemory(layers.Layer):
    def build(self, shape):
        self.queries, self.keys = self.add_weight(shape=(6, 3)), self.add_weight(shape=(3, 3))

    def call(self, x, memory):
        scores = x @ self.queries @ tf.transpose(memory @ self.keys)
        return tf.nn.softmax(scores) @ memory


class Memory(Calls):
    """A constant table beside samples."""

    def make(self):
        self.net = built(OfMemory(), None)
        self.memory = normal(7, 3, seed=5)

    def outputs(self, x):
        return self.net(x, memory=tf.constant(self.memory))


class MadeOfTheirNumber(Calls):
    """Inputs that follow from the number of samples, and from nothing else of them."""

    def make(self):
        self.net, self.code = mlp(6, 4), mlp(3, 4)
        self.start = built(layers.Embedding(2, 4), (None,))

    def outputs(self, x):
        rows = tf.shape(x)[0]
        zeros, numbers = tf.zeros((rows, 3), x.dtype), tf.cast(tf.range(rows), x.dtype)
        factor = self.code(zeros + 0.01 * numbers[:, None]) + self.start(tf.zeros([rows], "int32"))
        return self.net(x) * factor, self.code(tf.zeros_like(x[:, :3]))


class InnerLayers(Calls):
    """Called by themselves, and a `call` that is called by its name."""

    def make(self):
        self.net = mlp(6, 4)

    def outputs(self, x):
        return self.net.call(x), self.net.layers[0](x)


class SharedEmbedding(Calls):
    """Its gradient is a list of rows, of two calls."""

    data = staticmethod(lambda rows: (*tokens(rows), *tokens(rows, 3)))

    def make(self):
        self.embedding = built(layers.Embedding(5, 3), (None, 7))
        self.long = keras.Sequential(
            [keras.Input((7,)), self.embedding, layers.Flatten(), layers.Dense(4)]
        )
        self.short = mlp(3, 4)

    def outputs(self, data):
        long, short = data
        return self.long(long), self.short(tf.reduce_mean(self.embedding(short), 1))


class Features(Calls):
    """Gram matrices of what layers of a frozen network give (1508.06576)."""

    data = staticmethod(lambda rows: (normal(rows, 6, 6, 2),))

    def make(self):
        inputs = keras.Input((6, 6, 2))
        first = layers.Conv2D(3, 3, activation="tanh")(inputs)
        last = layers.Conv2D(3, 3, activation="tanh")(first)
        self.features = keras.Model(inputs, [first, last])
        self.features.trainable = False
        self.net = keras.Sequential([keras.Input((6, 6, 2)), layers.Conv2D(2, 3, padding="same")])

    def outputs(self, x):
        return [tf.matmul(t, t, transpose_a=True) for t in self.features(self.net(x))]


class PartsOfTheBatch(Calls):
    """Some samples, none of them, their parts, and the mean of all."""

    data = staticmethod(lambda rows: (normal(rows, 6), np.arange(rows) % 3))

    def make(self):
        self.net, self.short = mlp(6, 4), mlp(3, 4)

    def outputs(self, data):
        x, classes = data
        chosen, none = tf.boolean_mask(x, classes > 0), tf.boolean_mask(x, classes > 3)
        halves = tf.reshape(self.short(tf.reshape(x, (-1, 3))), (-1, 2, 4))
        mean = self.net(tf.reduce_mean(x, 0, keepdims=True))
        return self.net(chosen), self.net(x[:7]), halves, mean + tf.reduce_sum(self.net(none))


class OtherOutputs(Calls):
    """Integers and booleans beside numbers, and outputs that no loss depends on."""

    optimizer_class = staticmethod(
        functools.partial(keras.optimizers.AdamW, 0.01, weight_decay=0.1)
    )

    def make(self):
        inputs = keras.Input((6,))
        hidden = layers.Dense(4, activation="tanh")(inputs)
        largest = layers.Lambda(lambda t: tf.argmax(t, -1))(hidden)
        is_positive = layers.Lambda(lambda t: t > 0.0)(hidden)
        self.net = keras.Model(inputs, [hidden, largest, is_positive, layers.Dense(3)(hidden)])

    def outputs(self, x):
        hidden, largest, is_positive, _ = self.net(x)
        scaled = hidden * tf.cast(largest, hidden.dtype)[:, None]
        return tf.where(is_positive, scaled, 2.0 * hidden)


class GradientsOfGradients(OwnStep):
    """With respect to weights."""

    def make(self):
        self.net = mlp(6, 4)

    def train_step(self, x):
        variables = self.trainable_variables
        with tf.GradientTape() as tape:
            with tf.GradientTape() as inner:
                loss = root(self.net(x))
            gradients = inner.gradient(loss, variables)
            loss += sum(tf.reduce_sum(tf.square(gradient)) for gradient in gradients)
        return self.update(tape, loss)


class RecurrentGradientsOfGradients(GradientsOfGradients):
    def make(self):
        recurrent = layers.LSTM(3)
        self.net = keras.Sequential([keras.Input((6,)), layers.Reshape((3, 2)), recurrent])


class RaggedInputs(Calls):
    class Net(keras.Model):
        def build(self, shape):
            self.embedding = built(layers.Embedding(5, 3), (None, 7))

        def call(self, x):
            return tf.reduce_sum(self.embedding(x.to_tensor(shape=(None, 7))), 1)

    @staticmethod
    def data(rows):
        lengths = 1 + np.arange(rows) % 7
        values = np.random.default_rng(1).integers(0, 5, size=lengths.sum())
        return tf.data.Dataset.from_tensor_slices(tf.RaggedTensor.from_row_lengths(values, lengths))

    def make(self):
        self.net = built(self.Net(), None)

    def outputs(self, x):
        return self.net(x)


class RaggedMeans(RaggedInputs):
    class Net(RaggedInputs.Net):
        def call(self, x):
            return tf.reduce_mean(tf.ragged.map_flat_values(self.embedding, x), 1)


class CenteredRagged(RaggedInputs):
    """Computes with the embeddings of all samples, before it puts those of each together."""

    class Net(RaggedInputs.Net):
        def call(self, x):
            values = self.embedding(x.flat_values)
            return tf.reduce_mean(x.with_flat_values(values - tf.reduce_mean(values, 0)), 1)

    def make(self):
        self.net = built(self.Net(name="whole"), None)


class SparseInputs(Calls):
    """Whose gradient is a list of rows."""

    optimizer_class = staticmethod(functools.partial(keras.optimizers.SGD, 0.1))

    @staticmethod
    def data(rows):
        values = tf.sparse.from_dense(np.maximum(normal(rows, 6), 0.0))
        return tf.data.Dataset.from_tensor_slices(values)

    def make(self):
        self.net = built(layers.Dense(4), (None, 6))

    def outputs(self, x):
        return self.net(x)


class CenteredSparse(SparseInputs):
    class Net(keras.Model):
        def build(self, shape):
            self.dense = built(layers.Dense(4, use_bias=False), (None, 6))

        def call(self, x):
            hidden = self.dense(x)
            return hidden - tf.reduce_mean(hidden, 0)

    def make(self):
        self.net = built(self.Net(name="whole"), None)


class SparseInputsWithAdam(SparseInputs):
    optimizer_class = staticmethod(OwnStep.optimizer_class)


class Stateless(OwnStep):
    """Calls with weights that are a step of gradient descent away (1703.03400)."""

    def make(self):
        self.net = mlp(6, 6)

    def train_step(self, x):
        variables = self.net.trainable_variables
        with tf.GradientTape() as tape:
            with tf.GradientTape() as inner:
                before = root(self.net(x))
            gradients = inner.gradient(before, variables)
            moved = [v - 0.1 * g for v, g in zip(variables, gradients, strict=True)]
            outputs, _ = self.net.stateless_call(moved, [], x[:, ::-1])
            loss = root(outputs)
        return self.update(tape, loss)


class Jacobian(OwnStep):
    use_pfor = True

    def make(self):
        self.net = mlp(6, 3)

    def train_step(self, x):
        with tf.GradientTape() as tape:
            with tf.GradientTape(persistent=True) as inner:
                inner.watch(x)
                outputs = self.net(x)
            slopes = inner.batch_jacobian(outputs, x, experimental_use_pfor=self.use_pfor)
            loss = root([slopes, outputs])
        return self.update(tape, loss)


class JacobianInALoop(Jacobian):
    use_pfor = False


class ForwardMode(OwnStep):
    def make(self):
        self.net = mlp(6, 3)

    def train_step(self, x):
        with tf.GradientTape() as tape:
            with tf.autodiff.ForwardAccumulator(x, tf.ones_like(x)) as forward:
                outputs = self.net(x)
            loss = root([forward.jvp(outputs, tf.UnconnectedGradients.ZERO), outputs])
        return self.update(tape, loss)


class ScalesBy(layers.Layer):
    """Has a gradient of its own with respect to its weight, which is passed to it."""

    def build(self, shape):
        self.weight = self.add_weight(shape=(6,), initializer="ones")

    def call(self, x):
        @tf.custom_gradient
        def scaled(x, weight):
            return x * weight, lambda up: (up * weight, tf.reduce_sum(up * x, 0))

        return scaled(x, tf.convert_to_tensor(self.weight))


class OwnGradient(Calls):
    def make(self):
        self.net = keras.Sequential([keras.Input((6,)), ScalesBy(), layers.Dense(3)])

    def outputs(self, x):
        return self.net(x)


CALLS = {
    "shared": Shared,
    "several": SeveralCalls,
    "nests": Nests,
    "keywords": Keywords,
    "attention": Attention,
    "masks": Masks,
    "logits": Logits,
    "layers without weights": LayersWithoutWeights,
    "outside of tapes": OutsideOfTapes,
    "two tapes": TwoTapes,
    "persistent tape": PersistentTape,
    "watched by hand": WatchedByHand,
    "frozen in the middle": FrozenInTheMiddle,
    "regularizers": Regularizers,
    "recurrent": Recurrent,
    "tables": Tables,
    "memory": Memory,
    "made of their number": MadeOfTheirNumber,
    "inner layers": InnerLayers,
    "shared embedding": SharedEmbedding,
    "features": Features,
    "parts of the batch": PartsOfTheBatch,
    "other outputs": OtherOutputs,
    "gradients of gradients": GradientsOfGradients,
    "recurrent, gradients of gradients": RecurrentGradientsOfGradients,
    "ragged inputs": RaggedInputs,
    "ragged means": RaggedMeans,
    "sparse inputs": SparseInputs,
    "sparse inputs with Adam": SparseInputsWithAdam,
    "stateless": Stateless,
    "Jacobian in a loop": JacobianInALoop,
    "gradient of its own": OwnGradient,
}


# Calls that cannot be split.


class Between(Calls):
    """Calls a layer on what another one gives."""

    def make(self):
        self.first = mlp(6, 4, use_bias=False)
        self.layer = built(self.make_layer(), (None, 4))

    def outputs(self, x):
        return self.layer(self.first(x))


def layer_of(function):
    """Return a class of layers with a weight, that then do what a function says."""

    class Layer(layers.Layer):
        def build(self, shape):
            self.weight = self.add_weight(shape=(4, 4), initializer="orthogonal")

        def call(self, x):
            return function(x @ self.weight)

    return Layer


def with_layer(make_layer):
    return type("With", (Between,), {"make_layer": lambda self: make_layer(name="whole")})


class WithVariable(layers.Layer):
    def build(self, shape):
        self.weight = self.add_weight(shape=(4, 4))
        self.variable = tf.Variable(np.eye(4) + 0.1)

    def call(self, x):
        return x @ self.weight @ self.variable


class TrainsItsVariable(Between):
    make_layer = staticmethod(functools.partial(WithVariable, name="whole"))

    def state(self):
        return [*self.variables, self.layer.variable]

    def update(self, tape, loss):
        variables = self.trainable_variables
        *gradients, last = tape.gradient(loss, [*variables, self.layer.variable])
        self.optimizer.apply(gradients, variables)
        self.layer.variable.assign_sub(0.1 * last)
        return self.tracked(loss)


class TwoTowers(keras.Model):
    """Scores each sample of one tower against all of the other."""

    def __init__(self):
        super().__init__(name="whole")
        self.towers = [mlp(6, 4), mlp(6, 4, use_bias=False)]

    def call(self, x):
        a, b = (tower(x) for tower in self.towers)
        return tf.nn.log_softmax(a @ tf.transpose(b))


class ScoresInside(Calls):
    def make(self):
        self.net = TwoTowers()
        self.net(np.ones((2, 6)))

    def outputs(self, x):
        return self.net(x)


class Stateful(Calls):
    data = staticmethod(lambda rows: sequences(48))  # 24 in each batch

    def make(self):
        self.net = built(layers.LSTM(4, stateful=True, name="whole"), (24, 5, 3))

    def state(self):
        return [*self.variables, *self.net.states]

    def outputs(self, x):
        return self.net(x)


class RunningMean(layers.Layer):
    def build(self, shape):
        self.weight = self.add_weight(shape=(4, 4))
        self.mean = self.add_weight(shape=(4,), initializer="zeros", trainable=False)

    def call(self, x):
        self.mean.assign(0.9 * self.mean + 0.1 * tf.reduce_mean(x, 0))
        return (x - self.mean) @ self.weight


class Rematerializes(layers.Layer):
    def build(self, shape):
        self.dense = built(layers.Dense(4, activation="tanh"), shape)

    def call(self, x):
        return tf.recompute_grad(lambda x: self.dense(x))(x)


class SpectralNormalization(Between):
    def make_layer(self):
        return layers.SpectralNormalization(layers.Dense(4), name="whole")

    def outputs(self, x):
        return self.layer(self.first(x), training=True)


class WithTable(layers.Layer):
    """Gives its weights, too."""

    def build(self, shape):
        self.weight = self.add_weight(shape=(4, 4), initializer="orthogonal")

    def call(self, x):
        return x @ self.weight, 2.0 * self.weight


class GivesATable(Between):
    make_layer = staticmethod(functools.partial(WithTable, name="whole"))


class Sums(layers.Layer):
    """Takes a list, of tensors or ragged ones."""

    def build(self, shapes):
        self.weight = self.add_weight(shape=(4, 4), initializer="orthogonal")

    def call(self, inputs):
        x, other = inputs
        other = other.to_tensor() if isinstance(other, tf.RaggedTensor) else other
        return x @ self.weight * other


class TakesOnes(Between):
    """Calls its layer with as many rows of ones as there are samples."""

    make_layer = staticmethod(functools.partial(Sums, name="whole"))

    def others(self, x):
        return tf.ones((tf.shape(x)[0], 4), x.dtype)

    def outputs(self, x):
        hidden = self.first(x)
        return self.layer([hidden, self.others(hidden)])


class TakesRagged(TakesOnes):
    def others(self, x):
        return tf.RaggedTensor.from_tensor(2.0 * x)


class Remembers(layers.Layer):
    """Leaves its features in an attribute, which the step takes."""

    def build(self, shape):
        self.weight = self.add_weight(shape=(4, 4))

    def call(self, x):
        self.features = tf.tanh(x @ self.weight)
        return 2.0 * self.features


class RemembersFeatures(Between):
    make_layer = staticmethod(functools.partial(Remembers, name="whole"))

    def outputs(self, x):
        return self.layer(self.first(x)), self.layer.features


class Conditioned(layers.Layer):
    def __init__(self):
        super().__init__(name="whole")
        self.dense = built(layers.Dense(4), (None, 6))
        self.built = True

    def call(self, x):
        return self.dense(x) * self.style


class TensorInAnAttribute(Calls):
    """That a step has computed, and that all samples share."""

    def make(self):
        self.net, self.style = Conditioned(), mlp(6, 4)

    def style_of(self, x):
        return tf.reduce_mean(x, 0, keepdims=True)

    def outputs(self, x):
        self.net.style = self.style(self.style_of(x))
        return self.net(x)


class SamplesInAnAttribute(TensorInAnAttribute):
    def style_of(self, x):
        return x


@dataclasses.dataclass
class Style:
    value: Any


class ConditionedByObject(Conditioned):
    def call(self, x, style):
        return self.dense(x) * style.value


class TensorInAnObject(TensorInAnAttribute):
    def make(self):
        self.net, self.style = ConditionedByObject(), mlp(6, 4)

    def outputs(self, x):
        return self.net(x, style=Style(self.style(self.style_of(x))))


class InABranch(Calls):
    def make(self):
        self.net = mlp(6, 4)
        self.net.name = "whole"

    def outputs(self, x):
        return tf.cond(tf.size(x) > 0, lambda: self.net(x), lambda: self.net(2.0 * x))


class InAFunction(InABranch):
    def outputs(self, x):
        return tf.function(self.net)(x)


class InALoop(InABranch):
    def outputs(self, x):
        return tf.map_fn(lambda row: self.net(row[None])[0], x)


class AddsItsSquares(layers.Layer):
    def build(self, shape):
        self.dense = built(layers.Dense(4, "tanh"), shape)

    def call(self, x):
        x = self.dense(x)
        self.add_loss(0.3 * ops.mean(ops.square(x)))
        return x


class LossesOfTwoCalls(layers.Layer):
    """Calls a layer twice that adds a loss, and compares samples."""

    def build(self, shape):
        self.part = built(AddsItsSquares(), shape)

    def call(self, x):
        x = self.part(self.part(x))
        return x - ops.mean(x, 0)


# name: (model, what the warning says)
TokensAsRows = with_layer(layer_of(lambda x: tf.reshape(x, (-1, 2))))

WHOLE = {
    "scores in a model": (ScoresInside, "depend on other samples"),
    "losses of two calls": (with_layer(LossesOfTwoCalls), "depend on other samples"),
    "scalar": (with_layer(layer_of(tf.reduce_mean)), r"shape \(\)"),
    "table": (GivesATable, r"an output has the shape \(4, 4\) for 3 samples"),
    "ones": (TakesOnes, "it is unclear which of its inputs have a batch axis"),
    "ragged": (TakesRagged, "a ragged or sparse input needs a gradient"),
    "centered ragged": (CenteredRagged, "depend on other samples"),
    "centered sparse": (CenteredSparse, "depend on other samples"),
    "every other row": (with_layer(layer_of(lambda x: x[::2])), "depend on"),
    "twice the rows": (with_layer(layer_of(lambda x: tf.concat([x, -x], 0))), "depend on"),
    "centered": (
        with_layer(layer_of(lambda x: x - tf.reduce_mean(x, 0))),
        "depend on other samples",
    ),
    "attends to samples": (
        with_layer(layer_of(lambda x: tf.nn.softmax(x @ tf.transpose(x)) @ x)),
        "depend on other samples",
    ),
    "over their number": (
        with_layer(layer_of(lambda x: 9.0 * x / tf.cast(tf.shape(x)[0], x.dtype))),
        "depend on other samples",
    ),
    "by their place": (
        with_layer(layer_of(lambda x: x * tf.cast(tf.range(tf.shape(x)[0]), x.dtype)[:, None])),
        "depend on other samples",
    ),
    "against the first": (with_layer(layer_of(lambda x: x - 0.5 * x[:1])), "depend on"),
    "against the last": (with_layer(layer_of(lambda x: x * tf.reverse(x, [0]))), "depend on"),
    "random numbers of TensorFlow": (
        with_layer(layer_of(lambda x: x + tf.random.normal(tf.shape(x), dtype=x.dtype, seed=3))),
        "it draws unseeded random numbers, by .*RandomStandardNormal",
    ),
    "variable of TensorFlow": (TrainsItsVariable, "not its own weights"),
    "stateful": (Stateful, r"it writes to \[.whole/"),
    "rematerialized": (with_layer(Rematerializes), "inside it reads weights: 'IdentityN' in"),
    "running mean": (with_layer(RunningMean), r"it writes to \[.whole/"),
    "spectral normalization": (SpectralNormalization, r"it writes to \[.whole/"),
    "features in an attribute": (RemembersFeatures, "in its attribute `features`"),
    "tensor in an attribute": (TensorInAnAttribute, "a tensor that is not one of its inputs"),
    "samples in an attribute": (SamplesInAnAttribute, "a tensor that is not one of its inputs"),
    "tensor in an object": (TensorInAnObject, "a tensor that is not one of its inputs"),
    "root of divergences": (VAEThatAddsARoot, "neither a mean nor a sum"),
    "in a branch": (InABranch, "inside `tf.cond`"),
    "in a function": (InAFunction, "nested `tf.function`"),
    "in a loop": (InALoop, "a loop"),
}
