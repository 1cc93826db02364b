"""Where windows end: every kind of data, every epoch, and where settings change in between."""

import keras
import pytest
import tensorflow as tf
from helpers import Batches, assert_changed, assert_close, dense_data, dense_model, seeded

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
    assert_close(model, reference, start)


def dataset(x, y, rows):
    return {"x": tf.data.Dataset.from_tensor_slices((x, y)).batch(rows)}


def dataset_without_cardinality(x, y, rows):
    batches = tf.data.Dataset.from_tensor_slices((x, y)).batch(rows)
    return {"x": batches.filter(lambda x, y: True)}


def repeated_dataset(x, y, rows):
    return {"x": dataset(x, y, rows)["x"].repeat(), "steps_per_epoch": -(-len(x) // rows)}


def py_dataset_with_workers(x, y, rows):
    return {"x": Batches(x, y, rows, workers=2, max_queue_size=4)}


@pytest.mark.filterwarnings("ignore:Your input ran out of data:UserWarning:keras")
@pytest.mark.parametrize("rows", [36, 34])
@pytest.mark.parametrize(
    "source", [dataset_without_cardinality, repeated_dataset, py_dataset_with_workers]
)
def test_every_kind_of_data_matches_the_whole_batch(source, rows, float64):
    """A step that runs into the end of the data fails after some of its operations could run."""
    x, y = dense_data(rows)
    model, reference = make_pair()
    start = model.get_weights()
    arguments = {"epochs": 2, "shuffle": False, "verbose": 0}
    # Keras counts an iteration too many where it runs into the end of data of unknown size.
    reference_source = dataset if source is dataset_without_cardinality else source
    reference.fit(**reference_source(x, y, FULL), **arguments)
    model.fit(**source(x, y, ROWS), **arguments)
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


@pytest.mark.parametrize("how", ["CallbackList", "callback", "tuple", "positional"])
def test_callbacks_are_taken_in_every_form_and_left_as_they_were(how):
    x, y = dense_data(28)
    model, _ = make_pair()
    epochs = []
    watch = keras.callbacks.LambdaCallback(on_epoch_end=lambda epoch, logs: epochs.append(epoch))
    made = keras.callbacks.CallbackList([watch], model=model, add_history=True)
    given = {"callback": watch, "tuple": (watch,), "CallbackList": made}.get(how, [watch])
    before = list(made.callbacks)
    for _ in range(2):
        if how == "positional":
            model.fit(x, y, ROWS, 1, 0, given)
        else:
            model.fit(x, y, batch_size=ROWS, verbose=0, callbacks=given)
    assert made.callbacks == before
    assert model.optimizer.iterations == 3 * len(epochs) == 6


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
