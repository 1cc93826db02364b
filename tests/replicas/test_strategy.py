"""Several devices: the updates of one device on the whole window, under `MirroredStrategy`.

The references are trained by plain Keras on one device. Batches are shared out so that replicas
have unlike numbers of rows, some of them none. With `--replicas 2` or 3 the conformance suite
trains on so many devices, too: here is what only several devices have.
"""

import dataclasses
import functools
import re

import helpers
import keras
import losses
import models
import numpy as np
import pytest
import tensorflow as tf
import training
from case import BUT_LOGS, MSE, SETTINGS, Case, check, rows_of, sgd
from conftest import set_dtype
from helpers import (
    Counting,
    assert_close,
    assert_equal,
    dense_data,
    dense_model,
    metrics_of_replicas_add_up,
    mirrored,
    scope,
    seeded,
)
from own_train_steps import GANOfOneState, of_two
from training import assert_close_logs, difference_of_fits, train, train_pair
from zoo import LazilyBuilt, float8, masked_data, masked_recurrent

from ga_model import GradientAccumulator, accumulate


def compiled(make=dense_model, replicas=1, **settings):
    """Return a model on so many replicas, on one without settings."""
    with scope(replicas):
        return training.compiled(make, optimizer=keras.optimizers.Adam(0.01), **settings)


class TwoNetworks(GANOfOneState):
    """Two networks, each with an optimizer of its own, and a loss of Keras's that looks at both."""

    def call(self, x):
        return self.generator(x)

    def loss_of_generator(self, x, y):
        return self.compute_loss(x, y, self(x) + self.discriminator(y))

    loss_of_discriminator = loss_of_generator


def overflowing(rows):
    x, y = dense_data(rows)
    y[23] = 1e38  # where the scaled gradient overflows, on one replica
    return x, y


def loss_scale():
    momentum = keras.optimizers.SGD(0.1, momentum=0.9)
    optimizer = keras.optimizers.LossScaleOptimizer(momentum, dynamic_growth_steps=2)
    return {"optimizer": optimizer, "loss": "mse"}


# How windows of 12 samples are made, and the replicas: three share a batch of 4 as 2 + 2 + 0, two
# the last one of 7 as 4 + 3, in a partial window, or the one of a single sample as 1 + 0; three the
# one of 7 as 3 + 3 + 1, of which one has fewer microbatches.
WAYS = {
    "windows": (SETTINGS["windows"], 3),
    "split": (SETTINGS["split"], 2),
    "both": ({"accumulation_steps": 2, "microbatch_size": 2}, 2),
    "microbatches of one": (SETTINGS["microbatches of one"], 3),
}
SUITE = models.CASES | losses.CASES
SUITE |= {
    "compiled by XLA": Case(dense_model, compile=sgd(jit_compile=True)),
    # Which plain Keras cannot do.
    "several batches per execution": Case(dense_model, compile=sgd(steps_per_execution=2)),
    "an overflow": Case(dense_model, overflowing, loss_scale, precision="float32"),
}
# A third of the samples weighs nothing, all those of a replica, too.
NAMES = """clipnorm; compiled by XLA; mean_with_sample_weight, masked, weights: zeros;
sum, masked, weights: zeros; sum_over_batch_size, masked, weights: zeros; own loss: mean;
several batches per execution; regularized; an overflow"""


def trainings():
    """Return each case in each way: one in every run, of each case one in the gate."""
    for turn, name in enumerate(re.split(r";\s", NAMES)):
        for place, way in enumerate(WAYS):
            marks = [pytest.mark.gate if place == turn % len(WAYS) else pytest.mark.sweep]
            yield pytest.param(name, way, marks=marks if turn + place else [])


@pytest.mark.every_case
@pytest.mark.filterwarnings("ignore:invalid value encountered in:RuntimeWarning")
@pytest.mark.parametrize(("name", "way"), list(trainings()))
def test_updates_are_those_of_one_device(name, way, monkeypatch):
    setting, replicas = WAYS[way]
    monkeypatch.setattr(helpers, "num_replicas", replicas)
    monkeypatch.setitem(SETTINGS, way, setting)
    case, is_right = SUITE[name], metrics_of_replicas_add_up()
    precision = case.precision or "float64"
    set_dtype(precision)
    if name == "compiled by XLA" and way == "windows" and not is_right:
        with pytest.raises(ValueError, match=r"keras>=3\.10, or set `jit_compile=False`"):
            check(case, way, precision)
        return
    seen = check(dataclasses.replace(case, compares=BUT_LOGS), way, precision)
    assert seen["logs"] <= 1e-6 or not is_right or name == "an overflow"


@pytest.mark.gate
@pytest.mark.parametrize("way", WAYS)
def test_several_optimizers_make_the_updates_of_one_device(way, float64):
    """Over the batch the step is plain Keras's, where replicas count alike whatever they have."""
    (settings, replicas), data = WAYS[way], dense_data(31)
    trained = functools.partial(train, TwoNetworks, lambda: {**of_two(), "loss": "mse"}, data)
    reference, start = trained(rows=12)
    given = {"rows": rows_of(settings), "replicas": replicas, "loss_over": "microbatch"}
    model, _ = trained(**given, **settings)
    assert_close(model, reference, start)


@pytest.mark.gate
def test_control_plain_keras_weighs_replicas_alike(float64):
    """Parts larger than the batch are the way out."""
    arguments = masked_recurrent, MSE, masked_data(25)
    assert difference_of_fits(*arguments, rows=8, steps=1, replicas=2) > 1e-2
    assert_close(*train_pair(*arguments, rows=8, steps=1, size=8, replicas=2))


@pytest.mark.gate
def test_float8_layers_match_the_whole_batch():
    settings = {"rows": 8, "steps": 2, "size": 2, "replicas": 2}
    assert_close(*train_pair(float8, MSE, dense_data(48), **settings))


def normalized(synchronized):
    return lambda: keras.Sequential(
        [dense_model(), keras.layers.BatchNormalization(synchronized=synchronized)]
    )


@pytest.mark.gate
def test_running_averages_are_those_of_the_samples_of_all_replicas(float64):
    """Layers that are synchronized need replicas that can communicate."""
    data = dense_data(24)
    for synchronized in (False, True):
        model = compiled(normalized(synchronized), 2, accumulation_steps=3)
        inputs, normal = model.layers[0].predict(data[0], verbose=0), model.layers[-1]
        with pytest.warns(UserWarning, match="BatchNormalization layers in training mode"):
            model.fit(*data, batch_size=8, verbose=0)
        step = 1 - normal.momentum
        np.testing.assert_allclose(normal.moving_mean, step * inputs.mean(0))
        np.testing.assert_allclose(normal.moving_variance, 1 + step * (inputs.var(0) - 1))
    with pytest.raises(ValueError, match="cannot exchange the statistics of microbatches"):
        compiled(normalized(True), 2, microbatch_size=3).fit(*data, batch_size=8, verbose=0)


# When replicas communicate.


class Counts(tf.distribute.ReductionToOneDevice):
    """Counts the tensors that are reduced over replicas while a graph runs."""

    def __init__(self):
        super().__init__()
        self.sizes = []

    def reduce_implementation(self, reduce_op, per_replica_value, destinations, options):
        tf.numpy_function(self.sizes.append, [tf.size(per_replica_value.values[0])], [])
        return super().reduce_implementation(reduce_op, per_replica_value, destinations, options)

    def gradients(self):
        return sum(int(size > 1) for size in self.sizes)

    def compiled(self, optimizer, **settings):
        """Return a model whose replicas communicate by this."""
        with tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"], cross_device_ops=self).scope():
            return training.compiled(optimizer=optimizer(), **settings)


@pytest.mark.parametrize(("clipnorm", "times"), [(None, 1), (1.0, 2)])
def test_gradients_are_reduced_at_the_update_and_not_before(clipnorm, times):
    counts = Counts()
    model = counts.compiled(lambda: keras.optimizers.Adam(clipnorm=clipnorm), accumulation_steps=3)
    reduced = []
    watch = keras.callbacks.LambdaCallback(
        on_epoch_begin=lambda epoch, logs: counts.sizes.clear(),
        on_train_batch_end=lambda batch, logs: reduced.append(counts.gradients()),
        on_epoch_end=lambda epoch, logs: reduced.append(counts.gradients()),
    )
    model.fit(*dense_data(31), batch_size=4, epochs=2, verbose=0, callbacks=[watch])
    n = len(model.trainable_variables) * times
    # 8 batches: two full windows, and a partial one of two that the end of the epoch closes.
    assert reduced == 2 * [0, 0, n, n, n, 2 * n, 2 * n, 2 * n, 3 * n]


def test_microbatches_of_a_batch_are_summed_before_replicas_are(float64):
    counts = Counts()
    model = counts.compiled(keras.optimizers.SGD, microbatch_size=2)
    model.fit(*dense_data(24), batch_size=12, verbose=0)
    assert counts.gradients() == 2 * len(model.trainable_variables)


@pytest.mark.gate
def test_nothing_is_traced_again(float64):
    model = compiled(Counting, 2, accumulation_steps=2)
    for steps in (2, 3):
        model.accumulation_steps = steps
        model.fit(*dense_data(29), batch_size=8, epochs=2, verbose=0)
        assert model.traces == 2  # one for each replica


# Around `fit`.


@pytest.mark.gate
@pytest.mark.parametrize(
    "strategy", [tf.distribute.OneDeviceStrategy, lambda d: tf.distribute.MirroredStrategy([d])]
)
def test_a_strategy_with_one_replica_matches_the_whole_batch(strategy, float64):
    data, arguments = dense_data(28), {"epochs": 2, "shuffle": False, "verbose": 0}
    reference = compiled()
    with strategy("/cpu:0").scope():
        model = accumulate(compiled(), accumulation_steps=3)
    start = model.get_weights()
    reference.fit(*data, batch_size=12, **arguments)
    model.fit(*data, batch_size=4, **arguments)
    assert_close(model, reference, start)


@pytest.mark.gate
def test_windows_in_a_loop_over_train_on_batch(float64):
    """Every replica gets all of the batch there, in plain Keras too."""
    x, y = dense_data(20)
    model, reference = compiled(replicas=2, accumulation_steps=3), compiled()
    start = model.get_weights()
    for i in range(0, 20, 4):
        model.train_on_batch(x[i : i + 4], y[i : i + 4])
    model.close_window()
    model.close_window()  # an empty one changes nothing
    reference.train_on_batch(x[:12], y[:12])
    reference.train_on_batch(x[12:], y[12:])
    assert_close(model, reference, start)


def test_a_first_batch_that_replicas_share_unevenly_builds_the_model(float64):
    """Keras alone fails with it: keras#20585."""

    for make in (LazilyBuilt, lambda: accumulate(LazilyBuilt())):
        with mirrored(2).scope():
            model = make()
            model.compile("sgd", "mse")
        try:
            model.fit(*dense_data(7), batch_size=7, verbose=0)
        except tf.errors.InvalidArgumentError:
            assert type(model) is LazilyBuilt
    assert model.optimizer.iterations.numpy() == 1


@pytest.mark.gate
def test_bad_microbatches_are_left_out_on_any_replica(float64):
    x, y = dense_data(24)
    bad = [3, 14]  # of a first and of a second replica
    x[bad] = np.nan
    model, reference = compiled(replicas=2, microbatch_size=1, skip_nonfinite=True), compiled()
    start = model.get_weights()
    if not metrics_of_replicas_add_up():
        with pytest.raises(ValueError, match=r"keras>=3\.10, or set `skip_nonfinite=False`"):
            model.fit(x, y, batch_size=24, verbose=0)
        return
    with pytest.warns(UserWarning, match="were skipped"):
        model.fit(x, y, batch_size=24, shuffle=False, verbose=0)
    assert model.num_skipped_microbatches == 2
    rows = [row for row in range(24) if row not in bad]
    reference.fit(x[rows], y[rows], batch_size=24, shuffle=False, verbose=0)
    assert_close(model, reference, start)
    assert_close_logs(model.history.history, reference.history.history)


def test_skipped_shares_of_regularizers_are_told_of(float64):
    if not metrics_of_replicas_add_up():
        pytest.skip("Keras before 3.10 refuses `skip_nonfinite` with replicas, as tested above")
    x, y = dense_data(8)
    x[4:] = np.nan  # all of the second replica
    with mirrored(2).scope():
        layers = [keras.Input((4,)), keras.layers.Dense(2, kernel_regularizer="l2")]
        model = accumulate(keras.Sequential(layers), microbatch_size=2, skip_nonfinite=True)
        model.compile("sgd", keras.losses.MeanSquaredError(reduction="sum"))
    said = "a replica that skipped all of its microbatches had no share in the weight regularizers"
    with pytest.warns(UserWarning, match=said):
        model.fit(x, y, batch_size=8, shuffle=False, verbose=0)


@pytest.mark.gate
@pytest.mark.parametrize("replicas", [2, 3])
@pytest.mark.parametrize("inside", [True, False], ids=["apply in run", "apply outside"])
def test_an_accumulator_in_a_loop_of_ones_own_matches_the_whole_window(inside, replicas, float64):
    x, y = dense_data(29)
    strategy, loss = mirrored(replicas), keras.losses.MeanSquaredError()
    reference = seeded(dense_model)
    reference.compile(keras.optimizers.Adam(0.01, clipnorm=0.05), loss)
    start = reference.get_weights()
    reference.fit(x, y, batch_size=12, epochs=2, shuffle=False, verbose=0)
    with strategy.scope():
        model = seeded(dense_model)
        optimizer = keras.optimizers.Adam(0.01, clipnorm=0.05)
        accumulator = GradientAccumulator()

    def microbatch(x, y):
        with tf.GradientTape() as tape:
            value = loss(y, model(x, training=True))
        variables = model.trainable_variables
        accumulator.add(tape.gradient(value, variables), variables, weight=tf.shape(x)[0])

    run = tf.function(lambda *batch: strategy.run(microbatch, args=batch))

    def apply():
        accumulator.apply(optimizer)

    update = tf.function(lambda: strategy.run(apply)) if inside else apply
    batches = tf.data.Dataset.from_tensor_slices((x, y)).batch(4)
    for _ in range(2):
        for step, batch in enumerate(strategy.experimental_distribute_dataset(batches), start=1):
            run(*batch)
            if step % 3 == 0:
                update()
        update()
        update()  # an empty window changes nothing
    assert optimizer.iterations.numpy() == 6
    assert_close(model, reference, start)


# What is refused.


def test_a_strategy_that_was_not_tried_is_refused_by_name():
    strategy = tf.distribute.experimental.CentralStorageStrategy(["CPU:0", "CPU:1"])
    with strategy.scope():
        model = training.compiled(accumulation_steps=2)
    for call in (
        lambda: model.fit(*dense_data(8), verbose=0),
        lambda: model.train_on_batch(*dense_data(8)),
    ):
        with pytest.raises(NotImplementedError, match="Received: CentralStorageStrategy"):
            call()
    with strategy.scope(), pytest.raises(NotImplementedError, match="Received: CentralStorage"):
        GradientAccumulator()


def test_what_was_made_outside_of_the_scope_is_named():
    strategy, data = mirrored(2), dense_data(8)

    def model_of(layers):
        return accumulate(keras.Sequential([keras.Input((4,)), *layers]), accumulation_steps=2)

    model = model_of(dense_model().layers)
    model.compile("sgd", "mse")
    outside = pytest.raises(ValueError, match=r"the model .* and the optimizer '(?i:sgd)'")
    with strategy.scope(), outside:
        model.fit(*data, verbose=0)
    model.fit(*data, verbose=0)  # nothing is lost
    with strategy.scope():
        model = model_of(dense_model().layers)
    model.compile("sgd", "mse")
    with pytest.raises(ValueError, match=r"Received: the optimizer '(?i:sgd).*, created outside"):
        model.fit(*data, verbose=0)
    with strategy.scope():
        model.compile("sgd", "mse")
    model.fit(*data, verbose=0)
    layers = dense_model().layers
    with strategy.scope():
        model = model_of(layers)
        model.compile("sgd", "mse")
    with pytest.raises(ValueError, match=r"the variable '.*/kernel' and"):
        model.fit(*data, verbose=0)


def test_an_accumulator_made_outside_of_the_scope_is_refused():
    accumulator = GradientAccumulator()
    with mirrored(2).scope():
        model = dense_model()
    variables = model.trainable_variables

    def add():
        accumulator.add([tf.ones(v.shape) for v in variables], variables, weight=1.0)

    with pytest.raises(ValueError, match=r"Create it inside `with strategy\.scope"):
        mirrored(2).run(add)
    with mirrored(2).scope():
        accumulator = GradientAccumulator()
        for call in (add, accumulator.mean):
            with pytest.raises(ValueError, match=r"in the function that `strategy\.run` runs"):
                call()
    mirrored(2).run(add)
    for share in mirrored(2).experimental_local_results(mirrored(2).run(accumulator.mean)[0]):
        np.testing.assert_array_equal(share, np.ones(share.shape))


def test_weights_of_replicas_that_cancel_out_make_no_update(float64):
    """As on one device: they are compared as they are, not in each replica's unit."""
    with mirrored(2).scope():
        model, accumulator = dense_model(), GradientAccumulator()
        optimizer = keras.optimizers.SGD(1.0)
    start, variables = model.get_weights(), model.trainable_variables

    def add():
        replica = tf.distribute.get_replica_context().replica_id_in_sync_group
        weight = 1 - 2 * tf.cast(replica, tf.float64)
        accumulator.add([tf.ones(v.shape, v.dtype) for v in variables], variables, weight=weight)

    mirrored(2).run(add)
    accumulator.apply(optimizer)
    assert_equal(model.get_weights(), start)
