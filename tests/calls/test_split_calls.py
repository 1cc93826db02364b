"""Steps of the user's own: they run on full batches, and their calls of layers by microbatches.

References are plain Keras on the full batch, trained in the same test. Compared are all variables,
the state of all optimizers, seeds, and logs.

What is trained where:

* steps of the field (`own_steps.STEPS`), and calls of every kind (`CALLS`): batches of 24 and of 20
  samples in microbatches of 5, and batches of 24 samples in microbatches of 8, where the number of
  samples is known when the graph is made; half of these in the sweep;
* of them a few under XLA, eagerly, with several batches per execution, and in float32;
* calls that cannot be split (`WHOLE`), which have to be as exact.

No weight has a gradient that is zero in exact arithmetic: see `own_steps`.
"""

import collections
import functools
import types

import keras
import numpy as np
import pytest
import tensorflow as tf
from conftest import set_dtype
from helpers import (
    TOLERANCE,
    assert_changed,
    in_the_sweep,
    mirrored,
    relative_difference,
    seeded,
    set_random_seed,
)
from keras import layers
from own_calls import CALLS, WHOLE, Calls, ForwardMode, Jacobian, ScoresInside, TokensAsRows
from own_steps import (
    BYOL,
    GAN,
    STEPS,
    MaskedMean,
    Mean,
    OptimizerOfTheScript,
    OwnLoss,
    OwnStep,
    QueueOfTensorFlow,
    Root,
    Sampling,
    SimCLR,
    VAEThatAddsARoot,
    VAEThatAddsASum,
    WassersteinGAN,
    contrastive,
    mlp,
    normal,
    vectors_and_targets,
)
from own_training import assert_same, compiled, difference, train, values_of

from ga_model import AccumulatingModel, accumulate, check_equivalence
from ga_model.base._internals import is_rematerialized
from ga_model.bench import _bench
from ga_model.tools._memory import give_back_freed_memory, peak_memory, reset_peak_memory
from ga_model.tools._process import in_own_process

XLA, EAGER = {"jit_compile": True}, {"run_eagerly": True}


@pytest.fixture
def rows_seen(monkeypatch):
    """Numbers of samples that a layer with weights was called with, as far as they were known."""
    seen = set()

    def noted(call):
        @functools.wraps(call)
        def noting(self, inputs, *args, **kwargs):
            seen.add(inputs.shape[0])
            return call(self, inputs, *args, **kwargs)

        return noting

    for layer in (layers.Dense, layers.Conv2D, layers.Embedding, layers.LSTM, layers.GRU):
        monkeypatch.setattr(layer, "call", noted(layer.call))
    return seen


def in_microbatches(names):
    """Parametrize `name`, `size` and `is_static`. One of the two is in the sweep for each name."""
    values = []
    for i, name in enumerate(names):
        for j, (size, is_static) in enumerate([(5, False), (8, True)]):
            marks = [pytest.mark.sweep] if (i + j) % 2 else []
            values.append(pytest.param(name, size, is_static, marks=marks))
    return pytest.mark.parametrize(("name", "size", "is_static"), values)


# Steps of the field.


@in_microbatches(STEPS)
def test_steps_match_the_full_batch(name, size, is_static, rows_seen, float64):
    rows = 48 if is_static else 44
    training = train(STEPS[name], size, rows=rows, is_static=is_static)
    assert not rows_seen & {20, 24, 48}  # the last of two views in one call
    reference = train(STEPS[name], rows=rows, is_static=is_static)
    assert_same(training, reference, TOLERANCE[float64])


# XLA draws other numbers, so that what is trained with it draws none.
WAYS_OF_STEPS = [("Barlow twins", XLA), ("BYOL", XLA)]
WAYS_OF_STEPS += [(name, EAGER) for name in ("GAN of one tape", "Wasserstein GAN", "NNCLR")]
WAYS_OF_STEPS += [(name, {"steps_per_execution": 2}) for name in ("SimCLR", "BYOL")]
WAYS_OF_STEPS += [
    in_the_sweep(name, XLA)
    for name in ("NNCLR", "dual encoder", "Wasserstein GAN", "masked language model", "sharpness")
]
WAYS_OF_STEPS += [
    in_the_sweep(name, EAGER) for name in ("SimCLR", "CycleGAN", "VAE that adds a sum", "sharpness")
]
WAYS_OF_STEPS += [in_the_sweep("masked language model", EAGER)]


@pytest.mark.parametrize(("name", "way"), WAYS_OF_STEPS)
@pytest.mark.filterwarnings("ignore:In eager mode, a sparse gradient")
@pytest.mark.filterwarnings("ignore:.*it adds a loss that is a sum over samples")
def test_steps_match_in_every_way_to_run(name, way, float64):
    assert_same(train(STEPS[name], 5, **way), train(STEPS[name], **way), TOLERANCE[float64])


class DrawsNothing(VAEThatAddsASum):
    def make(self):
        super().make()
        self.sampling = layers.Lambda(lambda z: z[0] + 0.3 * tf.exp(0.5 * z[1]))


def test_a_step_that_adds_losses_matches_in_a_second_graph(float64):
    """TensorFlow compares the list of losses with a copy that it made in the first graph."""
    both = train(DrawsNothing, 5, rows=48, batch=12, is_static=True, accumulation_steps=2)
    reference = train(DrawsNothing, rows=48, is_static=True)
    assert difference(both, reference) < TOLERANCE[float64]


class AddsInItsCall(OwnStep):
    """Has a layer that is never called, so that none of its calls finds all of them built."""

    def make(self):
        self.hidden, self.net, self.unused = layers.Dense(8, "tanh"), mlp(8, 6), layers.Dense(2)
        self.hidden.build((None, 6))

    def call(self, x):
        hidden = self.hidden(x)
        self.add_loss(0.1 * tf.reduce_sum(tf.square(hidden)))
        return self.net(hidden)

    def train_step(self, x):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(self(x, training=True) - x)) + sum(self.losses)
        return self.update(tape, loss)


@pytest.mark.filterwarnings("ignore:`build..` was called on layer")
def test_a_call_of_a_model_that_adds_a_loss_and_is_not_built_matches(float64):
    assert_same(train(AddsInItsCall, 5), train(AddsInItsCall), TOLERANCE[float64])


class Reversed(SimCLR):
    """The same loss and gradients, but for rounding: the samples of both views in another order."""

    def augmented(self, x):
        return super().augmented(x)[::-1]


@pytest.mark.parametrize(
    ("name", "in_another_order"),
    [("SimCLR", Reversed), ("dual encoder", None), ("masked language model", None)],
)
def test_steps_match_in_single_precision(name, in_another_order):
    plain, tolerance = train(STEPS[name]), TOLERANCE["float32"]
    if in_another_order:  # plain Keras is as far from itself then
        tolerance = max(tolerance, 2 * difference(train(in_another_order), plain))
    assert_same(train(STEPS[name], 5), plain, tolerance)


@pytest.mark.parametrize("name", ["SimCLR", "root of a mean"])
def test_without_it_they_do_not_match_and_it_is_told(name, float64):
    with pytest.warns(
        UserWarning, match=r"Received: .*, in which .*(combines several samples|is not linear)"
    ):
        control = train(STEPS[name], 5, loss_over="microbatch")
    assert difference(control, train(STEPS[name])) > 1e-2


@pytest.mark.parametrize("rows", [27, in_the_sweep(25)])
def test_a_last_batch_below_the_microbatch_matches(rows, float64):
    """Of 3 samples, and of one."""
    training, reference = (train(Root, size, rows=rows) for size in (5, None))
    assert_same(training, reference, TOLERANCE[float64])


# Calls of every kind.

# Exact, and nothing tells samples from a table: no warning, as nothing is known to be wrong.
NOT_SPLIT = {"made of their number", "stateless"}


@in_microbatches(CALLS)
@pytest.mark.filterwarnings("ignore:Gradients do not exist for variables")
def test_calls_match_the_full_batch(name, size, is_static, rows_seen, float64):
    rows = 48 if is_static else 44
    training = train(CALLS[name], size, rows=rows, is_static=is_static)
    assert name in NOT_SPLIT or not rows_seen & {20, 24}
    reference = train(CALLS[name], rows=rows, is_static=is_static)
    assert_same(training, reference, TOLERANCE[float64])


UNDER_XLA = ["several", "attention", "masks", "two tapes", "recurrent", "shared embedding"]
UNDER_XLA += ["parts of the batch", "other outputs", "gradients of gradients"]


@pytest.mark.sweep
@pytest.mark.parametrize(
    ("name", "way"),
    [(name, XLA) for name in UNDER_XLA]
    + [(name, EAGER) for name in CALLS if name != "sparse inputs with Adam"],
)
@pytest.mark.filterwarnings("ignore:Gradients do not exist for variables")
@pytest.mark.filterwarnings("ignore:.*different numbers of samples")  # of a table, eagerly
def test_calls_match_in_every_way_to_run(name, way, float64):
    assert_same(train(CALLS[name], 5, **way), train(CALLS[name], **way), TOLERANCE[float64])


@pytest.mark.gate
def test_xla_compiles_no_loop_that_a_second_derivative_goes_through(float64):
    """It cannot keep what the loop has computed."""
    make = CALLS["recurrent, gradients of gradients"]
    assert_same(train(make, 5, **XLA), train(make, **XLA), TOLERANCE[float64])


def test_eagerly_columns_of_sparse_inputs_are_told_of(float64):
    make = CALLS["sparse inputs with Adam"]
    with pytest.warns(
        UserWarning, match="of the columns of sparse inputs is added once per microbatch"
    ):
        training = train(make, 5, **EAGER)
    assert difference(training, train(make, **EAGER)) > 1e-3


def test_a_jacobian_that_is_vectorized_is_refused_with_the_way_out():
    with pytest.raises(NotImplementedError, match="Pass `experimental_use_pfor=False`"):
        train(Jacobian, 5)


rematerializes = pytest.mark.skipif(
    not hasattr(keras, "RematScope"), reason="Keras has no RematScope before 3.9"
)


@rematerializes
def test_parts_that_keep_no_activations_match(float64):
    class Hidden(layers.Dense):
        def call(self, x):  # Keras passes no `training` on to what it rematerializes
            return super().call(x)

    class Rematerialized(Root):
        def make(self):
            with keras.RematScope("full"):
                hidden = Hidden(8, activation="tanh")
            self.net = keras.Sequential([keras.Input((6,)), hidden, layers.Dense(5)])

    assert_same(train(Rematerialized, 5), train(Rematerialized), TOLERANCE[float64])


@rematerializes
@pytest.mark.every_case
@pytest.mark.parametrize(
    ("scope", "is_kept"),
    [
        ({"mode": "full"}, False),
        ({"mode": None}, True),
        ({"mode": "list_of_layers", "layer_names": ["hidden"]}, False),
        ({"mode": "list_of_layers", "layer_names": ["other"]}, True),
    ],
)
def test_calls_that_keep_activations_are_told_from_others(scope, is_kept):
    with keras.RematScope(**scope):
        layer = layers.Dense(1, name="hidden")
    assert is_rematerialized(layer) == (not is_kept)


def test_forward_derivatives_run_whole(float64):
    with pytest.warns(UserWarning, match="its forward-mode derivatives are taken"):
        training = train(ForwardMode, 5)
    assert_same(training, train(ForwardMode), TOLERANCE[float64])


def test_outputs_with_other_rows_are_refused_by_name(float64):
    with pytest.raises(Exception, match=r"with an output of shape .*, which has not"):
        train(TokensAsRows, 5)


class Unbuilt(Calls):
    """Has no weights before its first step."""

    class Net(keras.Model):
        def __init__(self):
            super().__init__()
            self.first = layers.Dense(5, activation="tanh")
            self.last = keras.Sequential([layers.Dense(3)])

        def call(self, x):
            return self.last(self.first(x))

    def make(self):
        self.net = self.Net()
        self.heads = [keras.Sequential([layers.Dense(4, activation="tanh")]), layers.Dense(2)]

    def outputs(self, x):
        return [head(self.net(x)) for head in self.heads]


@pytest.mark.gate
@pytest.mark.parametrize("way", [{}, EAGER])
def test_calls_of_layers_that_are_not_built_match(way, float64):
    trained = []
    for settings in ({}, {"microbatch_size": 5}):
        model = accumulate(seeded(Unbuilt), **settings)
        model.compile(keras.optimizers.Adam(0.01), **way)
        model.fit(*model.data(44), batch_size=24, epochs=2, shuffle=False, verbose=0)
        trained.append(values_of([*model.variables, *model.optimizer.variables]))
    assert len(trained[0]) == 8 + 2 + 2 * 8
    for found, expected in zip(trained[1], trained[0], strict=True):
        np.testing.assert_allclose(found, expected, rtol=1e-9, atol=1e-14)


def test_layers_are_what_they_were_after_a_step_and_after_an_error():
    class Fails(Root):
        def train_step(self, data):
            if self.is_broken:
                self.net(data[0])
                raise KeyError("broken")
            return super().train_step(data)

    model = accumulate(seeded(Fails), microbatch_size=5)
    compiled(model)
    own = model.net.layers[0].call = model.net.layers[0].call
    for model.is_broken in (False, True):
        model.make_train_function(force=True)
        if model.is_broken:
            with pytest.raises(KeyError, match="broken"):
                model.fit(*model.data(24), batch_size=24, verbose=0)
        else:
            model.fit(*model.data(24), batch_size=24, verbose=0)
        assert vars(model.net.layers[0])["call"] is own
        others = [layer for layer in model._flatten_layers() if "call" in vars(layer)]
        assert others == [model.net.layers[0]]


class Domains(layers.Layer):
    """Computes by what its attributes are set to."""

    domain, factor = 0, 1.0

    def __init__(self):
        super().__init__()
        self.parts = [layers.Dense(5, activation="tanh") for _ in range(2)]

    def build(self, shape):
        for part in self.parts:
            part.build(shape)

    def call(self, x):
        return self.factor * self.parts[self.domain](x)


class SetsAttributes(OwnStep):
    """Sets attributes of a layer between its calls, and after them."""

    data = staticmethod(vectors_and_targets)

    def make(self):
        self.net = Domains()
        self.net.build((None, 6))

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            loss = 0.0
            for self.net.domain, self.net.factor in ((0, 0.5), (1, 2.0)):
                loss += tf.sqrt(tf.reduce_mean(tf.square(self.net(x) - y)))
        self.net.factor = 7.0
        return self.update(tape, loss)


@pytest.mark.parametrize("way", [{}, EAGER])
def test_attributes_are_in_both_passes_what_they_were_at_the_call(way, float64):
    assert_same(train(SetsAttributes, 5, **way), train(SetsAttributes, **way), TOLERANCE[float64])


class Centers(layers.Layer):
    def __init__(self):
        super().__init__()
        self.scale = self.add_weight(shape=(), initializer="ones", trainable=False)

    def call(self, x, centers=False):
        return self.scale * (x - tf.reduce_mean(x, 0) if centers else 2.0 * x)


class TwoModes(OwnLoss):
    def make(self):
        self.net = keras.Sequential([keras.Input((6,)), layers.Dense(5, activation="tanh")])
        self.center = Centers()

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            z = self.net(x)
            z = self.center(z) + self.center(z, centers=True)
            loss = tf.reduce_mean(tf.square(z - y))
        return self.update(tape, loss, self.net.trainable_variables)


@pytest.mark.parametrize("way", [{}, EAGER])
def test_each_kind_of_call_is_looked_at(way, float64):
    with pytest.warns(UserWarning, match="depend on other samples"):
        training = train(TwoModes, 5, **way)
    assert_same(training, train(TwoModes, **way), TOLERANCE[float64])


def test_layers_in_single_precision_keep_theirs_in_a_model_of_half():
    set_dtype("mixed_float16")
    trained = []
    for settings in ({}, {"microbatch_size": 5, "loss_over": "batch"}):
        inputs = keras.Input((6,))
        hidden = layers.Dense(8, activation="tanh", dtype="float32")(inputs)
        model = seeded(
            lambda inputs=inputs, hidden=hidden: keras.Model(
                inputs, layers.Dense(5, dtype="float32")(hidden)
            )
        )
        set_random_seed(2)
        model.set_weights([0.3 * keras.random.normal(w.shape) for w in model.get_weights()])
        start = model.get_weights()
        model = accumulate(model, **settings)
        model.compile(keras.optimizers.SGD(0.1), "mse", auto_scale_loss=False)
        model.fit(*vectors_and_targets(44), batch_size=24, epochs=2, shuffle=False, verbose=0)
        trained.append(model.get_weights())
    assert relative_difference(trained[1], trained[0], start) < TOLERANCE["float32"]


# Keras's own step, and models that call themselves.


class OfKeras(keras.Model):
    """Compiled with a loss of which nothing says that it adds up."""

    optimizer_class = staticmethod(OwnStep.optimizer_class)
    data = staticmethod(lambda rows: (normal(rows, 6), np.arange(rows)[:, None] % 3))

    def __init__(self, loss=None):
        super().__init__()
        self.net = mlp(6, 5)
        self.of_outputs = loss

    def call(self, x):
        return self.net(x)

    def compile(self, optimizer, **kwargs):
        super().compile(optimizer, self.of_outputs, metrics=["mae"], **kwargs)

    def trained(self):
        return [self.trainable_variables]

    def state(self):
        return self.variables


def dice(y, scores):
    """One number for all samples."""
    y, share = tf.cast(y > 1, scores.dtype), tf.sigmoid(scores)
    return 1.0 - 2.0 * tf.reduce_sum(y * share) / (tf.reduce_sum(y) + tf.reduce_sum(share))


def supervised_contrastive(y, embeddings):
    """Samples of a class attract one another (2004.11362)."""
    embeddings = tf.math.l2_normalize(embeddings, -1)
    scores = 2.0 * embeddings @ tf.transpose(embeddings)
    itself = tf.eye(tf.shape(scores)[0], dtype=scores.dtype)
    log_sum = tf.math.log(tf.reduce_sum(tf.exp(scores) * (1.0 - itself), 1, keepdims=True))
    is_same = tf.cast(tf.equal(y, tf.transpose(y)), scores.dtype) - itself
    return -tf.reduce_sum((scores - log_sum) * is_same, 1) / (tf.reduce_sum(is_same, 1) + 1.0)


def sum_of_squares(y, outputs):
    return tf.reduce_sum(tf.square(outputs - tf.cast(y, outputs.dtype)))


def root_of_squares(y, outputs):
    return tf.sqrt(tf.reduce_mean(tf.square(outputs - tf.cast(y, outputs.dtype))))


class OwnComputeLoss(OfKeras):
    """Calls itself once more for its loss."""

    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
        return tf.reduce_mean(contrastive(y_pred, self(x[:, ::-1], training=training)))


class OneOfTwoOutputs(OfKeras):
    def call(self, x):
        outputs = self.net(x)
        return {"a": outputs[:, :3], "b": outputs}

    def compile(self, optimizer, **kwargs):
        super(OfKeras, self).compile(optimizer, {"a": None, "b": root_of_squares}, **kwargs)

    data = staticmethod(lambda rows: (normal(rows, 6), {"b": normal(rows, 5, seed=4)}))


OF_KERAS = {
    "Dice": functools.partial(OfKeras, dice),
    "supervised contrastive": functools.partial(OfKeras, supervised_contrastive),
    "sum": functools.partial(OfKeras, sum_of_squares),
    "root": functools.partial(OfKeras, root_of_squares),
    "own `compute_loss`": OwnComputeLoss,
    "one of two outputs": OneOfTwoOutputs,
}


@pytest.mark.parametrize("name", OF_KERAS)
def test_the_step_of_keras_matches_with_losses_that_do_not_add_up(name, float64):
    make = OF_KERAS[name]
    assert_same(train(make, 5), train(make), TOLERANCE[float64])


# Calls that cannot be split.


@pytest.mark.parametrize("name", WHOLE)
def test_calls_that_cannot_be_split_are_exact_and_named_once(name, float64):
    make, reason = WHOLE[name]
    layer = "functional" if make is VAEThatAddsARoot else "whole"
    with pytest.warns(UserWarning, match=f"A call of '{layer}.*' .*{reason}") as caught:
        training = train(make, 5)
    assert [w.category for w in caught].count(UserWarning) == 1
    assert_same(training, train(make), TOLERANCE[float64])


@pytest.mark.sweep
@pytest.mark.parametrize("name", WHOLE)
@pytest.mark.filterwarnings("ignore:A call of .* takes the memory of the full batch")
def test_calls_that_cannot_be_split_are_exact_eagerly(name, float64):
    make, _ = WHOLE[name]
    assert_same(train(make, 5, **EAGER), train(make, **EAGER), TOLERANCE[float64])


class NetInAnObject(Root):
    """Keeps its network where the model does not look for layers."""

    net = property(lambda self: self.holder.net)

    def make(self):
        self.holder = types.SimpleNamespace(net=mlp(6, 5))

    def trained(self):
        return [self.net.trainable_variables]

    def state(self):
        return self.net.variables

    def update(self, tape, loss):
        return super().update(tape, loss, self.net.trainable_variables)


@pytest.mark.parametrize("run_eagerly", [False, True])
def test_a_step_in_which_no_call_is_split_is_exact_and_told_of(run_eagerly, float64):
    arguments = {"run_eagerly": run_eagerly}
    with pytest.warns(UserWarning, match="No call of a layer goes by microbatches in") as caught:
        training = train(NetInAnObject, 5, **arguments)
    assert [w.category for w in caught].count(UserWarning) == 1
    assert_same(training, train(NetInAnObject, **arguments), TOLERANCE[float64])


def test_parts_of_a_call_that_cannot_be_split_are(rows_seen):
    with pytest.warns(UserWarning, match="depend on other samples"):
        train(ScoresInside, 8, rows=48, is_static=True)
    assert 24 not in rows_seen


# Dropout, windows, and what else a model can be told.


class WithDropout(OwnStep):
    """Draws in its encoder: noise, what it drops, and its codes."""

    def make(self):
        inputs = keras.Input((6,))
        hidden = layers.Dense(8, activation="tanh")(layers.GaussianNoise(0.3)(inputs))
        codes = [layers.Dense(3)(layers.Dropout(0.4)(hidden)) for _ in range(2)]
        self.encoder = keras.Model(inputs, Sampling()(codes))

    def encoded(self, x):
        return self.encoder(x, training=True)

    def train_step(self, x):
        with tf.GradientTape() as tape:
            loss = contrastive(self.encoded(x), self.encoded(x))
        return self.update(tape, loss)


class OneAfterTheOther(WithDropout):
    """Calls its encoder on 5 of 24 samples, on the next 5 and so on."""

    def encoded(self, x):
        parts = [self.encoder(x[i : i + 5], training=True) for i in range(0, 24, 5)]
        return tf.concat(parts, 0)


@pytest.mark.gate
@pytest.mark.parametrize("way", [{}, in_the_sweep(XLA), in_the_sweep(EAGER)])
def test_both_passes_draw_the_same_numbers(way, float64):
    """Weights and seeds are those of plain Keras on the same parts, one after the other."""
    training = train(WithDropout, 5, rows=48, **way)
    assert_same(training, train(OneAfterTheOther, rows=48, **way), TOLERANCE[float64])


@pytest.mark.parametrize("loss_over", ["auto", "microbatch"])
def test_windows_of_split_batches_match_for_a_mean(loss_over, float64):
    settings = {"accumulation_steps": 2, "loss_over": loss_over}
    training, reference = train(Mean, 5, batch=12, **settings), train(Mean)
    assert difference(training, reference) < TOLERANCE[float64]


def test_an_optimizer_that_is_applied_three_times_has_no_window():
    with pytest.raises(RuntimeError, match=r"'wasserstein_gan.*', which applies 'adam.*' twice"):
        train(WassersteinGAN, 5, accumulation_steps=2)


def test_an_optimizer_that_is_out_of_sight_has_no_window():
    with pytest.raises(RuntimeError, match=r"applies \['adam'\], reached by a global variable"):
        train(OptimizerOfTheScript, 5, accumulation_steps=2)


@pytest.mark.parametrize("name", [name for name in STEPS if name != "optimizer of the script"])
def test_the_field_s_steps_match_where_a_batch_may_be_left_out(name, float64):
    training = train(STEPS[name], 5, skip_nonfinite=True)
    assert_same(training, train(STEPS[name]), TOLERANCE[float64])


@pytest.mark.filterwarnings("ignore:Microbatches of")
@pytest.mark.parametrize("run_eagerly", [False, True])
@pytest.mark.parametrize("make", [GAN, WassersteinGAN, BYOL, QueueOfTensorFlow, Root])
def test_a_batch_that_is_not_finite_is_left_out_whole(make, run_eagerly, float64):
    """Of the critic's three updates none is left where the generator's cannot be made."""

    def given(is_bad):
        first, *others = make.data(72)
        if not is_bad:
            return keras.tree.map_structure(
                lambda leaf: np.delete(leaf, range(24, 48), 0), (first, *others)
            )
        bad = others[0]["noise"][30, 3] if make is WassersteinGAN else first[30]
        bad[:] = np.nan
        return first, *others

    class Given(make):
        @staticmethod
        def data(rows):
            return given(rows == 72)

    arguments = {"epochs": 1, "run_eagerly": run_eagerly}
    training = train(Given, 5, rows=72, skip_nonfinite=True, **arguments)
    assert_same(training, train(Given, rows=48, **arguments), TOLERANCE[float64])


class HalfPrecision(MaskedMean):
    """Scales its loss, and has fewer targets in the first samples of a batch than in the last."""

    optimizer_class = staticmethod(functools.partial(keras.optimizers.SGD, 0.1))

    @staticmethod
    def data(rows):
        x, y = vectors_and_targets(rows)
        return x, y - np.linspace(1.5, 0.0, rows, dtype=y.dtype)[:, None]

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            mask = tf.cast(y > 0.0, "float32")
            errors = tf.square(tf.cast(self.net(x, training=True), "float32") - y)
            loss = tf.reduce_sum(mask * errors) / tf.reduce_sum(mask)
            scaled = self.optimizer.scale_loss(loss)
        variables = self.trainable_variables
        self.optimizer.apply(tape.gradient(scaled, variables), variables)
        return self.tracked(loss)


@pytest.mark.gate
def test_loss_scaling_matches_as_near_as_half_precision_rounds():
    set_dtype("mixed_float16")
    differences = []
    reference = seeded(HalfPrecision)
    start = reference.get_weights()
    trained = []
    ways = ({"loss_over": "batch"}, {"loss_over": "microbatch"})
    for settings in ({}, *({"microbatch_size": 5, **way} for way in ways)):
        model = accumulate(seeded(HalfPrecision), **settings)
        model.compile(model.optimizer_class())
        assert isinstance(model.optimizer, keras.optimizers.LossScaleOptimizer)
        model.fit(*model.data(44), batch_size=24, epochs=2, shuffle=False, verbose=0)
        trained.append(model.get_weights())
    differences = [relative_difference(weights, trained[0], start) for weights in trained[1:]]
    assert max(differences) < 5e-3


@pytest.mark.gate
@pytest.mark.one_device("makes replicas itself")
@pytest.mark.parametrize("make", [in_the_sweep(Mean), Root])
def test_each_replica_runs_the_step_on_its_own_samples_as_in_plain_keras(make, float64):
    trained = []
    for settings in ({}, {"microbatch_size": 5}):
        with mirrored(2).scope():
            model = accumulate(seeded(make), **settings)
            model(np.zeros((1, 6)))
            compiled(model)
        start = model.get_weights()
        model.fit(*model.data(48), batch_size=24, epochs=2, shuffle=False, verbose=0)
        trained.append(model.get_weights())
    assert_changed(trained[0], start)
    assert relative_difference(trained[1], trained[0], start) < TOLERANCE[float64]


traces = collections.Counter()


class Counting(keras.Sequential):
    """Counts how often Python calls it, out of sight of what is put back."""

    def call(self, *args, **kwargs):
        traces[self.name] += 1
        return super().call(*args, **kwargs)


class CountsTraces(SimCLR):
    """Two calls of an encoder and two of a head."""

    def make(self):
        super().make()
        self.encoder = Counting([self.encoder], name="encoder")
        self.head = Counting([self.head], name="head")


@pytest.mark.parametrize("way", [{}, XLA])
def test_each_call_is_traced_once_per_pass(way):
    model = accumulate(seeded(CountsTraces), microbatch_size=5)
    model.encoder(np.ones((1, 6)))
    model.head(np.ones((1, 5)))
    compiled(model, **way)
    traces.clear()
    for rows in (44, 24, 9, 44):
        dataset = tf.data.Dataset.from_tensor_slices(model.data(rows)[0]).batch(24)
        model.fit(dataset, epochs=2, shuffle=False, verbose=0)
        assert traces == {"encoder": 4, "head": 4}


# Settings.


class Saved(AccumulatingModel, keras.Model):
    """A step of its own, which Keras can save."""

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            loss = tf.sqrt(self.compute_loss(x, y, self(x, training=True)))
        variables = self.trainable_variables
        self.optimizer.apply(tape.gradient(loss, variables), variables)
        return {"loss": loss}


def make_saved():
    inputs = keras.Input((6,))
    return Saved(inputs, layers.Dense(5)(inputs))


@pytest.mark.filterwarnings("ignore:Gradients of microbatches add up")
@pytest.mark.parametrize("loss_over", [None, "microbatch", "batch"])
def test_the_choice_is_automatic_and_is_saved(loss_over, tmp_path, float64):
    model = seeded(make_saved)
    assert model.loss_over == "auto"
    model.compile(keras.optimizers.SGD(0.1), "mse", microbatch_size=5, loss_over=loss_over)
    expected = loss_over or "auto"
    assert model.loss_over == model.get_compile_config()["loss_over"] == expected
    model.save(tmp_path / "model.keras")
    again = keras.models.load_model(tmp_path / "model.keras", custom_objects={"Saved": Saved})
    assert (again.loss_over, again.microbatch_size) == (expected, 5)
    reference = seeded(make_saved)
    reference.compile(keras.optimizers.SGD(0.1), "mse")
    start = reference.get_weights()
    for m in (reference, again):
        m.fit(*vectors_and_targets(44), batch_size=24, shuffle=False, verbose=0)
    found = relative_difference(again.get_weights(), reference.get_weights(), start)
    assert found > 1e-2 if loss_over == "microbatch" else found < TOLERANCE[float64]


def test_check_equivalence_tells_of_a_step_of_ones_own(float64):
    model = seeded(GAN)
    compiled(model)
    report = check_equivalence(model, *model.data(48), batch_size=24, microbatch_size=5, updates=2)
    report.assert_equivalent()
    arguments = {"batch_size": 24, "microbatch_size": 5, "loss_over": "microbatch", "updates": 2}
    model = seeded(Root)
    compiled(model)
    assert check_equivalence(model, *model.data(48), **arguments).verdict == "different"


class Convolutional(OwnLoss):
    @staticmethod
    def data(rows):
        return normal(rows, 64, 64, 3), normal(rows, 10, seed=4)

    def make(self):
        convolutions = [layers.Conv2D(16, 3, padding="same", activation="relu") for _ in range(12)]
        ends = [layers.GlobalAveragePooling2D(), layers.Dense(10)]
        self.net = keras.Sequential([keras.Input((64, 64, 3)), *convolutions, *ends])

    loss_of = Root.loss_of


def memory_of(size):
    """Return the bytes that a batch of 256 samples adds to the peak of this process."""
    give_back_freed_memory()
    _bench._warm_up(False)
    data = Convolutional.data(256)
    reset_peak_memory()
    before = peak_memory()
    model = seeded(Convolutional)
    if size is not None:
        model = accumulate(model, microbatch_size=size)
    compiled(model)
    model.fit(*data, batch_size=256, verbose=0)
    return peak_memory() - before


@pytest.mark.sweep
def test_memory_is_that_of_a_microbatch():
    """Peak memory in processes of their own."""
    split, whole = (in_own_process(str(size), memory_of, size) for size in (16, None))
    assert 0 < split < 0.25 * whole


class CallsPython(layers.Layer):
    """Computes with all samples that it gets, in Python."""

    def call(self, inputs):
        def minus_mean(x):
            return x - x.mean(0)

        shifted = tf.numpy_function(minus_mean, [inputs], inputs.dtype)
        return inputs + tf.stop_gradient(tf.ensure_shape(shifted, inputs.shape))


def test_a_layer_that_calls_python_gets_the_full_batch(float64):
    class Model(STEPS["root of a mean"]):
        def make(self):
            self.net = keras.Sequential([CallsPython(), layers.Dense(5)])
            self.net.build((None, 6))

    with pytest.warns(UserWarning, match="follow from Python code"):
        found = train(Model, 5)
    assert_same(found, train(Model), TOLERANCE[float64])
