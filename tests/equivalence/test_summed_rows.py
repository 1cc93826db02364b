"""Lookups that are summed to bound the memory are told of, where that changes the update."""

import functools
import warnings

import keras
import pytest
import tensorflow as tf
from helpers import (
    TOLERANCE,
    scope,
    seeded,
)
from keras.optimizers import SGD, Adam, Lion
from training import difference_of_fits
from zoo import embedding, embedding_data

from ga_model import GradientAccumulator, accumulate

ROWS, SIZE = 24, 8
TOLD = "looked up more rows"


def trained(optimizer, num_ids, **settings):
    ids, y = embedding_data(ROWS)
    with scope():
        model = accumulate(seeded(functools.partial(embedding, num_ids)))
        model.compile(optimizer(), "mse", **settings)
    model.fit(ids, y, batch_size=SIZE, epochs=2, shuffle=False, verbose=0)
    return model


@pytest.mark.parametrize("way", [{}, {"jit_compile": True}, {"run_eagerly": True}])
@pytest.mark.parametrize(
    "optimizer", [functools.partial(Adam, 0.01), functools.partial(SGD, 0.1, clipnorm=1.0)]
)
def test_an_update_that_differs_is_told_of_once(optimizer, way, float64):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", UserWarning)
        trained(optimizer, 7, accumulation_steps=3, **way)
    told = [str(warning.message) for warning in caught if TOLD in str(warning.message)]
    assert len(told) == 1
    assert "embedding/embeddings" in told[0]
    assert "`microbatch_size`" in told[0]


def test_a_loop_of_batches_is_told_once(float64):
    ids, y = embedding_data(ROWS)
    model = accumulate(seeded(functools.partial(embedding, 7)), accumulation_steps=3)
    model.compile(Adam(0.01), "mse")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", UserWarning)
        for begin in range(0, ROWS, SIZE):
            model.train_on_batch(ids[begin : begin + SIZE], y[begin : begin + SIZE])
    assert [TOLD in str(warning.message) for warning in caught] == [True]


@pytest.mark.parametrize(
    ("optimizer", "num_ids", "settings"),
    [
        (functools.partial(Adam, 0.01), 200, {"accumulation_steps": 3}),
        (functools.partial(Adam, 0.01), 7, {"microbatch_size": 3}),
        (functools.partial(SGD, 0.1, momentum=0.9, nesterov=True), 7, {"accumulation_steps": 3}),
        (functools.partial(Lion, 0.01), 7, {"accumulation_steps": 3}),
        (functools.partial(type("OwnSGD", (SGD,), {}), 0.1), 7, {"accumulation_steps": 3}),
    ],
)
def test_an_update_that_does_not_differ_is_not_told_of(optimizer, num_ids, settings, float64):
    steps = settings.get("accumulation_steps", 1)
    difference = difference_of_fits(
        functools.partial(embedding, num_ids),
        lambda: {"optimizer": optimizer(), "loss": "mse"},
        embedding_data(ROWS),
        rows=SIZE,
        steps=steps,
        size=settings.get("microbatch_size"),
    )
    assert difference <= TOLERANCE[float64]


@pytest.mark.one_device("adds outside of replicas")
def test_a_loop_of_ones_own_is_told_by_apply():
    table = keras.Variable([[0.0], [0.0]], name="table")
    accumulator, optimizer = GradientAccumulator(), Adam(0.01)
    for number in range(3):
        rows = tf.IndexedSlices(tf.ones([1, 1]), tf.constant([0]), tf.constant([2, 1]))
        accumulator.add([rows], [table], weight=1)
        assert accumulator.summed_variables == ([table] if number == 2 else [])
    with pytest.warns(UserWarning, match=TOLD):
        accumulator.apply(optimizer)
    accumulator.apply(optimizer)  # says it once
