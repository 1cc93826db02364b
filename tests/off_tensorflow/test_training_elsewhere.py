"""Off TensorFlow, all that is around an update is that of plain Keras on the full batch."""

import copy
import warnings

import keras
import numpy as np
import pytest
import zoo
from helpers import dense_data, dense_model, relative_difference, seeded
from keras import layers
from pairs import TOLERANCE, assert_same_logs, difference_of_fits, train

from ga_model import AccumulatingModel, AccumulationScheduler, accumulate

WAYS = {
    "both": {"rows": 4, "steps": 3, "size": 3},
    "steps": {"rows": 4, "steps": 3},
    "size": {"rows": 12, "size": 5},
}


def arguments(**kwargs):
    defaults = {"optimizer": keras.optimizers.SGD(0.1), "loss": "mse", "metrics": ["mae"]}
    return {**defaults, **kwargs}


def plain(data, rows=12, make=dense_model, compile_args=arguments, **kwargs):
    return train(make, compile_args, data, rows=rows, **kwargs)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(
    "options",
    [
        {"global_clipnorm": 0.1},
        {"clipnorm": 0.1},
        {"clipvalue": 0.02},
        {"use_ema": True, "ema_overwrite_frequency": 2},
        {"weight_decay": 0.1},
        {"learning_rate": "schedule"},
        {"loss_scale_factor": 8.0},
    ],
    ids=lambda options: next(iter(options)),
)
def test_what_optimizers_do_once_per_update_matches(options, way):
    def compile_args():
        given = {"learning_rate": 0.1, **options}
        if given["learning_rate"] == "schedule":
            given["learning_rate"] = keras.optimizers.schedules.ExponentialDecay(0.1, 2, 0.5)
        return arguments(optimizer=keras.optimizers.SGD(momentum=0.9, **given))

    assert difference_of_fits(dense_model, compile_args, dense_data(31), **WAYS[way]) <= TOLERANCE


def test_constraints_count_updates():
    def make():
        constraint = keras.constraints.UnitNorm()
        return keras.Sequential(
            [keras.Input((4,)), layers.Dense(6, kernel_constraint=constraint), layers.Dense(2)]
        )

    assert difference_of_fits(make, arguments, dense_data(31), **WAYS["both"]) <= TOLERANCE


def test_a_window_of_one_microbatch_is_plain_keras_to_the_bit():
    data = dense_data(31)
    reference, _ = plain(data)
    for settings in ({"microbatch_size": 12}, {"accumulation_steps": 1}, {"skip_nonfinite": True}):
        model, _ = plain(data, **settings)
        for a, b in zip(model.get_weights(), reference.get_weights(), strict=True):
            np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("run_eagerly", [False, True])
def test_train_on_batch_and_close_window_match(run_eagerly):
    x, y = dense_data(20)
    reference = seeded(dense_model)
    reference.compile(**arguments())
    start = reference.get_weights()
    model = accumulate(seeded(dense_model), accumulation_steps=3)
    model.compile(**arguments(run_eagerly=run_eagerly))
    assert model.has_updated
    for first in range(0, 20, 4):
        model.train_on_batch(x[first : first + 4], y[first : first + 4])
        assert model.has_updated == (first == 8)
    model.close_window()
    model.close_window()
    assert model.has_updated
    for part in (slice(0, 12), slice(12, 20)):
        reference.train_on_batch(x[part], y[part])
    assert int(model.optimizer.iterations) == 2
    difference = relative_difference(model.get_weights(), reference.get_weights(), start)
    assert difference <= TOLERANCE


def test_a_fit_begins_with_an_empty_window():
    x, y = dense_data(12)
    model = accumulate(seeded(dense_model), accumulation_steps=3)
    model.compile(**arguments())
    model.train_on_batch(100.0 * x[:4], y[:4])
    assert not model.has_updated
    reference, start = plain((x, y), epochs=1)
    model.fit(x, y, batch_size=4, shuffle=False, verbose=0)
    difference = relative_difference(model.get_weights(), reference.get_weights(), start)
    assert difference <= TOLERANCE


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", ["masked_recurrent", "two_outputs", "regularized", "dense"])
def test_logs_are_those_of_the_full_batch(name, way):
    make, make_data = zoo.ZOO[name]
    data = make_data(24)

    def compile_args():
        metrics = ["mae", "mse"]
        if name == "two_outputs":
            metrics = [metrics, ["mae"]]
        return arguments(metrics=metrics, loss_weights=None)

    reference, _ = train(make, compile_args, data, rows=12)
    given = WAYS[way]
    settings = {
        "accumulation_steps": given.get("steps", 1),
        "microbatch_size": given.get("size"),
    }
    model, _ = train(make, compile_args, data, rows=given["rows"], **settings)
    assert_same_logs(model, reference)


def test_callbacks_see_full_batches():
    seen = []

    class Noting(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            seen.append({name: float(value) for name, value in logs.items()})

    plain(dense_data(24), epochs=1, fit_args={"callbacks": [Noting()]})
    plain(dense_data(24), epochs=1, microbatch_size=5, fit_args={"callbacks": [Noting()]})
    assert len(seen) == 4
    for log, expected in zip(seen[2:], seen[:2]):
        assert list(log) == list(expected)
        np.testing.assert_allclose(list(log.values()), list(expected.values()), rtol=1e-5)


def test_validation_sees_the_last_update_of_an_epoch():
    data = dense_data(20)
    fit_args = {"validation_data": dense_data(8, seed=9)}
    reference, _ = plain(data, fit_args=fit_args)
    model, _ = plain(data, rows=4, accumulation_steps=3, fit_args=fit_args)
    expected = reference.history.history["val_loss"]
    np.testing.assert_allclose(model.history.history["val_loss"], expected, rtol=1e-5)


def test_a_scheduler_changes_the_window():
    model = accumulate(seeded(dense_model))
    model.compile(**arguments())
    scheduler = AccumulationScheduler({0: 1, 1: 2, 2: 4}, log=True)
    history = model.fit(*dense_data(16), batch_size=2, epochs=3, verbose=0, callbacks=[scheduler])
    assert history.history["num_updates"] == [8, 12, 14]


def test_batch_normalization_is_told():
    def make():
        return keras.Sequential([dense_model(), layers.BatchNormalization()])

    with pytest.warns(UserWarning, match="BatchNormalization layers in training mode"):
        plain(dense_data(12), make=make, microbatch_size=4)


def test_frozen_batch_normalization_matches():
    def make():
        return keras.Sequential([dense_model(), layers.BatchNormalization(trainable=False)])

    assert difference_of_fits(make, arguments, dense_data(31), **WAYS["both"]) <= TOLERANCE


@pytest.mark.parametrize("policy", ["mixed_float16", "mixed_bfloat16", "bfloat16"])
def test_half_precision_trains_near_the_full_batch(policy):
    keras.config.set_dtype_policy(policy)
    data = dense_data(24)
    reference, start = plain(data)
    model, _ = plain(data, rows=4, accumulation_steps=3, microbatch_size=2)
    if policy == "mixed_float16":
        assert isinstance(model.optimizer, keras.optimizers.LossScaleOptimizer)
    assert int(model.optimizer.iterations) == int(reference.optimizer.iterations)
    weights = [[np.asarray(w, "float32") for w in m.get_weights()] for m in (model, reference)]
    start = [np.asarray(w, "float32") for w in start]
    assert relative_difference(*weights, start) <= 0.1


def test_an_overflow_lowers_the_scale_once():
    keras.config.set_dtype_policy("mixed_float16")
    model = accumulate(seeded(dense_model), accumulation_steps=2)
    model.compile(keras.optimizers.SGD(0.1), "mse")
    x, y = dense_data(8)
    x[0] = 1e30
    before = [w.copy() for w in model.get_weights()]
    model.fit(x, y, batch_size=4, shuffle=False, verbose=0)
    assert float(model.optimizer.dynamic_scale) == 2.0**14
    for a, b in zip(model.get_weights(), before):
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("settings", [{"microbatch_size": 3}, {"accumulation_steps": 4}])
def test_microbatches_that_are_not_finite_are_left_out(settings):
    x, y = dense_data(12)
    bad = x.copy()
    bad[3:6] = np.nan

    def make():
        return keras.Sequential([dense_model(), layers.BatchNormalization(trainable=False)])

    model = accumulate(seeded(make), skip_nonfinite=True, **settings)
    model.compile(**arguments())
    start = model.get_weights()
    rows = 12 if "microbatch_size" in settings else 3
    with pytest.warns(UserWarning, match="were skipped"):
        model.fit(bad, y, batch_size=rows, shuffle=False, verbose=0)
    assert model.num_skipped_microbatches == 1
    rest = np.r_[0:3, 6:12]
    reference = seeded(make)
    reference.compile(**arguments())
    reference.fit(x[rest], y[rest], batch_size=9, shuffle=False, verbose=0)
    trained = [np.any(w != s) for w, s in zip(reference.get_weights(), start)]
    triples = zip(model.get_weights(), reference.get_weights(), start)
    changed = [triple for triple, is_trained in zip(triples, trained) if is_trained]
    assert relative_difference(*zip(*changed)) <= TOLERANCE
    assert_same_logs(model, reference)


def test_a_window_of_which_nothing_is_left_changes_nothing():
    x, y = dense_data(6)
    model = accumulate(seeded(dense_model), skip_nonfinite=True, microbatch_size=3)
    model.compile(**arguments(optimizer=keras.optimizers.SGD(0.1, weight_decay=0.1)))
    before = model.get_weights()
    with pytest.warns(UserWarning, match="were skipped"):
        model.train_on_batch(np.full_like(x, np.nan), y)
    assert int(model.optimizer.iterations) == 0
    for a, b in zip(model.get_weights(), before):
        np.testing.assert_array_equal(a, b)


def test_layers_that_are_unfrozen_in_between_are_trained():
    data = dense_data(24)
    weights = []
    for settings in ({}, {"accumulation_steps": 3}):
        model = seeded(zoo.frozen_layer)
        model = accumulate(model, **settings) if settings else model
        model.compile(**arguments())
        rows = 4 if settings else 12
        model.fit(*data, batch_size=rows, shuffle=False, verbose=0)
        model.layers[1].trainable = True
        model.compile(**arguments())
        model.fit(*data, batch_size=rows, shuffle=False, verbose=0)
        weights.append(model.get_weights())
    assert relative_difference(*weights, seeded(zoo.frozen_layer).get_weights()) <= TOLERANCE


class Subclassed(keras.Model):
    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.hidden, self.head = layers.Dense(5, activation="tanh"), layers.Dense(2)

    def call(self, inputs):
        return self.head(self.hidden(inputs["x"]))


def test_inputs_may_be_nested():
    x, y = dense_data(31)
    for way in WAYS.values():
        assert difference_of_fits(Subclassed, arguments, ({"x": x}, y), **way) <= TOLERANCE


def test_settings_are_in_the_files_of_a_mixin(tmp_path):
    model = Net([keras.Input((4,)), *dense_model().layers])
    model.compile(**arguments(), accumulation_steps=3, microbatch_size=2)
    model.save(tmp_path / "model.keras")
    loaded = keras.saving.load_model(tmp_path / "model.keras")
    assert (loaded.accumulation_steps, loaded.microbatch_size) == (3, 2)


@keras.saving.register_keras_serializable("tests")
class Net(AccumulatingModel, keras.Sequential):
    pass


def test_copies_and_clones_train_alike():
    data = dense_data(24)
    model = accumulate(seeded(dense_model), accumulation_steps=3)
    model.compile(**arguments())
    start = model.get_weights()
    copied = copy.deepcopy(model)
    cloned = accumulate(keras.models.clone_model(model), accumulation_steps=3)
    cloned.set_weights(start)
    cloned.compile(**arguments())
    for other in (model, copied, cloned):
        if not isinstance(other, AccumulatingModel):
            other = accumulate(other, accumulation_steps=3)
        assert other.accumulation_steps == 3
        other.fit(*data, batch_size=4, shuffle=False, verbose=0)
    for other in (copied, cloned):
        assert relative_difference(other.get_weights(), model.get_weights(), start) == 0.0


def test_training_goes_on_in_the_middle_of_an_epoch_after_a_backup(tmp_path):
    class Stops(keras.callbacks.Callback):
        def on_epoch_begin(self, epoch, logs=None):
            if epoch == 2 and self.stops:
                raise KeyboardInterrupt

    data = dense_data(20)
    reference, start = plain(data, rows=4, accumulation_steps=3, epochs=4)
    model = accumulate(seeded(dense_model), accumulation_steps=3)
    model.compile(**arguments())
    stops = Stops()
    for stops.stops in (True, False):
        backup = keras.callbacks.BackupAndRestore(tmp_path)
        try:
            model.fit(
                *data, batch_size=4, epochs=4, shuffle=False, verbose=0, callbacks=[backup, stops]
            )
        except KeyboardInterrupt:
            model = accumulate(seeded(dense_model), accumulation_steps=3)
            model.compile(**arguments())
    assert relative_difference(model.get_weights(), reference.get_weights(), start) == 0.0


def test_settings_without_effect_are_told():
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", UserWarning)
        plain(dense_data(12), microbatch_size=20)
        plain(dense_data(12), accumulation_steps=20)
    texts = [str(w.message) for w in caught]
    assert sum("has no effect" in text for text in texts) == 1
    assert sum("is more than the batches of an epoch" in text for text in texts) == 1
