"""Where windows end: every kind of data, every epoch, before validation and before callbacks."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from helpers import (
    TOLERANCE,
    Batches,
    assert_changed,
    dense_data,
    dense_model,
    relative_difference,
    seeded,
)

from ga_model import accumulate

ROWS, STEPS = 4, 3
FULL = ROWS * STEPS


def sgd():
    return keras.optimizers.SGD(0.1, momentum=0.9)


def make_pair(**compile_args):
    reference = seeded(dense_model)
    reference.compile(sgd(), "mse", **compile_args)
    model = accumulate(seeded(dense_model), accumulation_steps=STEPS)
    model.compile(sgd(), "mse", **compile_args)
    return model, reference


def assert_same_training(model, reference, start):
    assert model.optimizer.iterations == reference.optimizer.iterations
    assert_changed(reference.get_weights(), start)
    difference = relative_difference(model.get_weights(), reference.get_weights(), start)
    assert difference <= TOLERANCE[keras.config.floatx()]


def arrays(x, y, rows):
    return {"x": x, "y": y, "batch_size": rows}


def dataset(x, y, rows):
    return {"x": tf.data.Dataset.from_tensor_slices((x, y)).batch(rows)}


def dataset_without_cardinality(x, y, rows):
    batches = tf.data.Dataset.from_tensor_slices((x, y)).batch(rows)
    return {"x": batches.filter(lambda x, y: True)}


def repeated_dataset(x, y, rows):
    return {**dataset(x, y, rows), "steps_per_epoch": -(-len(x) // rows)} | {
        "x": dataset(x, y, rows)["x"].repeat()
    }


def generator(x, y, rows):
    def batches():
        while True:
            yield from Batches(x, y, rows).parts

    return {"x": batches(), "steps_per_epoch": -(-len(x) // rows)}


def finite_generator(x, y, rows):
    def batches():
        for _ in range(2):
            yield from Batches(x, y, rows).parts

    return {"x": batches(), "steps_per_epoch": -(-len(x) // rows)}


def py_dataset(x, y, rows):
    return {"x": Batches(x, y, rows)}


def py_dataset_with_workers(x, y, rows):
    return {"x": Batches(x, y, rows, workers=2, max_queue_size=4)}


@pytest.mark.filterwarnings("ignore:Your input ran out of data:UserWarning:keras")
@pytest.mark.parametrize("rows", [36, 34])
@pytest.mark.parametrize(
    "source",
    [
        arrays,
        dataset,
        dataset_without_cardinality,
        repeated_dataset,
        generator,
        finite_generator,
        py_dataset,
        py_dataset_with_workers,
    ],
)
def test_every_kind_of_data_matches_the_whole_batch(source, rows, float64):
    x, y = dense_data(rows)
    model, reference = make_pair()
    start = model.get_weights()
    arguments = {"epochs": 2, "shuffle": False, "verbose": 0}
    # Keras counts an iteration too many where it runs into the end of data of unknown size.
    reference_source = dataset if source is dataset_without_cardinality else source
    reference.fit(**reference_source(x, y, FULL), **arguments)
    model.fit(**source(x, y, ROWS), **arguments)
    assert_same_training(model, reference, start)


@pytest.mark.filterwarnings("ignore:Your input ran out of data:UserWarning:keras")
@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("rows", [24, 28, 32, 36])
def test_running_into_the_end_of_the_data_leaves_no_trace(rows, reduction, float64):
    """A step that finds no data fails after some of its operations could have run."""
    x, y = dense_data(rows)
    model, reference = make_pair()
    for m in (model, reference):
        m.compile(keras.optimizers.Adam(0.01), keras.losses.MeanSquaredError(reduction=reduction))
    start = model.get_weights()
    for _ in range(3):
        model.fit(**dataset_without_cardinality(x, y, ROWS), epochs=2, shuffle=False, verbose=0)
        reference.fit(**dataset(x, y, FULL), epochs=2, shuffle=False, verbose=0)
    assert_same_training(model, reference, start)


@pytest.mark.parametrize(
    "strategy", [tf.distribute.OneDeviceStrategy, lambda d: tf.distribute.MirroredStrategy([d])]
)
def test_a_strategy_with_one_replica_matches_the_whole_batch(strategy, float64):
    x, y = dense_data(28)
    _, reference = make_pair()
    with strategy("/cpu:0").scope():
        model, _ = make_pair()
    start = model.get_weights()
    arguments = {"epochs": 2, "shuffle": False, "verbose": 0}
    reference.fit(x, y, batch_size=FULL, **arguments)
    model.fit(x, y, batch_size=ROWS, **arguments)
    assert_same_training(model, reference, start)


class Watch(keras.callbacks.Callback):
    """Notes the weights and the optimizer's iterations at every event."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def note(self, event):
        self.seen.append((event, int(self.model.optimizer.iterations), self.model.get_weights()))

    def on_test_begin(self, logs=None):
        self.note("validation")

    def on_epoch_end(self, epoch, logs=None):
        self.note("epoch end")


def test_the_window_closes_before_validation_and_before_callbacks(float64):
    x, y = dense_data(28)
    model, reference = make_pair()
    start = model.get_weights()
    watches = Watch(), Watch()
    histories = [
        m.fit(
            x, y, batch_size=b, epochs=3, shuffle=False, validation_data=(x, y), verbose=0,
            callbacks=[w],
        ).history
        for m, b, w in zip((model, reference), (ROWS, FULL), watches, strict=True)
    ]  # fmt: skip
    assert [s[:2] for s in watches[0].seen] == [s[:2] for s in watches[1].seen]
    for (_, _, weights), (_, _, expected) in zip(*(w.seen for w in watches), strict=True):
        assert relative_difference(weights, expected, start) <= TOLERANCE[float64]
    for key in ("loss", "val_loss"):
        np.testing.assert_allclose(histories[0][key], histories[1][key], rtol=1e-12)


@pytest.mark.parametrize("how", ["none", "callback", "list", "tuple", "positional", "CallbackList"])
def test_callbacks_are_taken_in_every_form(how, float64):
    x, y = dense_data(28)
    model, _ = make_pair()
    watch = Watch()
    if how == "none":
        model.fit(x, y, ROWS, 1, 0, None)
    elif how == "positional":
        model.fit(x, y, ROWS, 1, 0, [watch])
    else:
        callbacks = {
            "callback": watch,
            "list": [watch],
            "tuple": (watch,),
            "CallbackList": keras.callbacks.CallbackList([watch], model=model, add_history=True),
        }[how]
        for _ in range(2):
            model.fit(x, y, batch_size=ROWS, verbose=0, callbacks=callbacks)
    assert model.optimizer.iterations == 3 * max(1, len(watch.seen))


@pytest.mark.parametrize("run_eagerly", [False, True])
def test_train_on_batch_counts_windows_as_fit_does(run_eagerly, float64):
    x, y = dense_data(28)
    model, reference = make_pair(run_eagerly=run_eagerly)
    start = model.get_weights()
    for _ in range(2):
        for i in range(0, 28, ROWS):
            before = model.get_weights()
            model.train_on_batch(x[i : i + ROWS], y[i : i + ROWS])
            is_update = (i // ROWS + 1) % STEPS == 0
            assert any(np.any(a != b) for a, b in zip(model.get_weights(), before)) == is_update
        model.close_window()
        model.close_window()  # an empty window changes nothing
    reference.fit(x, y, batch_size=FULL, epochs=2, shuffle=False, verbose=0)
    assert_same_training(model, reference, start)


def test_a_callback_list_is_left_as_it_was(float64):
    x, y = dense_data(12)
    model, _ = make_pair()
    callbacks = keras.callbacks.CallbackList([Watch()], model=model, add_history=True)
    before = list(callbacks.callbacks)
    model.fit(x, y, batch_size=ROWS, verbose=0, callbacks=callbacks)
    assert callbacks.callbacks == before


def test_close_window_before_any_training_changes_nothing():
    model, _ = make_pair()
    start = model.get_weights()
    model.close_window()
    for w, s in zip(model.get_weights(), start, strict=True):
        np.testing.assert_array_equal(w, s)


def test_evaluate_in_a_callback_leaves_the_window_open(float64):
    x, y = dense_data(36)
    model, reference = make_pair()
    start = model.get_weights()

    class Evaluate(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            self.model.evaluate(x, y, verbose=0)

    model.fit(x, y, batch_size=ROWS, shuffle=False, verbose=0, callbacks=[Evaluate()])
    reference.fit(x, y, batch_size=FULL, shuffle=False, verbose=0)
    assert_same_training(model, reference, start)


def test_a_changed_setting_takes_effect_at_the_next_window(float64):
    x, y = dense_data(24)
    model, _ = make_pair()
    counts = []
    for i in range(6):
        if i == 2:
            model.accumulation_steps = 2
        model.train_on_batch(x[i * ROWS : (i + 1) * ROWS], y[i * ROWS : (i + 1) * ROWS])
        counts.append(int(model.optimizer.iterations))
    assert counts == [0, 0, 1, 1, 2, 2]  # a window of 3, one of 2, and one begun


def test_a_window_begun_before_a_change_to_1_is_finished(float64):
    x, y = dense_data(20)
    model, reference = make_pair()
    start = model.get_weights()
    for i in range(5):
        if i == 1:
            model.accumulation_steps = 1
        model.train_on_batch(x[i * ROWS : (i + 1) * ROWS], y[i * ROWS : (i + 1) * ROWS])
    for rows in (range(12), range(12, 16), range(16, 20)):
        reference.train_on_batch(x[rows], y[rows])
    assert_same_training(model, reference, start)
