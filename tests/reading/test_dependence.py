"""The graph tells what depends on the values of the samples, and what on their number."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import ops

from ga_model.reading._dependence import dependence_of, is_made_for_rows

STEP = tf.constant([3, 1, 2])
TABLE = tf.Variable([[0, 1, 2], [2, 1, 0]])
GENERATOR = tf.random.Generator.from_seed(1)
SEEDS = keras.random.SeedGenerator(1)

NOTHING, ROWS, ALL = (False, False), (False, True), (True, True)

# Of a batch x of unknown shape: (samples, length).
TENSORS = {
    # What comes from constants, variables and the length.
    "range": (lambda x: tf.range(5), NOTHING),
    "captured": (lambda x: STEP + 1, NOTHING),
    "variable": (lambda x: TABLE + 1, NOTHING),
    "part of a variable": (lambda x: tf.gather(TABLE, [1]), NOTHING),
    "shape of a variable": (lambda x: tf.zeros(tf.shape(TABLE)), NOTHING),
    "length": (lambda x: tf.range(tf.shape(x)[1]), NOTHING),
    "length, from the end": (lambda x: tf.range(tf.shape(x)[-1]), NOTHING),
    "length, by Keras": (lambda x: ops.arange(ops.shape(x)[1]), NOTHING),
    "length, unpacked": (lambda x: tf.range(tf.unstack(tf.shape(x))[1]), NOTHING),
    "length, cast": (lambda x: tf.range(tf.cast(tf.shape(x), tf.int64)[1]), NOTHING),
    "all axes but the first": (lambda x: tf.zeros(tf.shape(x)[1:]), NOTHING),
    "length of what has samples": (lambda x: tf.range(tf.shape(tf.cast(x, "float32"))[1]), NOTHING),
    "like positions": (lambda x: tf.ones_like(tf.range(tf.shape(x)[1])), NOTHING),
    "shape of positions": (lambda x: tf.range(tf.shape(tf.range(tf.shape(x)[1]))[0]), NOTHING),
    "size of positions": (lambda x: tf.range(tf.size(tf.range(tf.shape(x)[1]))), NOTHING),
    "distances": (lambda x: tf.range(tf.shape(x)[1])[:, None] - tf.range(5), NOTHING),
    "rank": (lambda x: tf.range(tf.rank(x)), NOTHING),
    # What comes from the number of samples, too.
    "number": (lambda x: tf.range(tf.shape(x)[0]), ROWS),
    "number, from the end": (lambda x: tf.range(tf.shape(x)[-2]), ROWS),
    "number, unpacked": (lambda x: tf.range(tf.unstack(tf.shape(x))[0]), ROWS),
    "first axes": (lambda x: tf.zeros(tf.shape(x)[:1]), ROWS),
    "shape backwards": (lambda x: tf.range(tf.reduce_prod(tf.shape(x)[::-1])), ROWS),
    "zeros like": (lambda x: tf.zeros_like(x), ROWS),
    "zeros like, by Keras": (lambda x: ops.zeros_like(x), ROWS),
    "size": (lambda x: tf.range(tf.size(x)), ROWS),
    "broadcast": (lambda x: tf.broadcast_to(tf.range(5), tf.shape(x)), ROWS),
    "repeated": (lambda x: tf.repeat(tf.range(5)[None], tf.shape(x)[0], 0), ROWS),
    "like what has samples": (lambda x: tf.ones_like(tf.zeros_like(x) + 1), ROWS),
    # What comes from the values of the samples, or cannot be known.
    "values": (lambda x: x + 1, ALL),
    "added": (lambda x: x + tf.range(tf.shape(x)[1]), ALL),
    "looked up": (lambda x: tf.gather(TABLE, x), ALL),
    "drawn": (lambda x: tf.random.uniform((3,)), ALL),
    "drawn with a seed": (lambda x: tf.random.stateless_uniform((3,), (1, 2)), ALL),
    "drawn by a generator": (lambda x: GENERATOR.uniform((3,)), ALL),
    "drawn by Keras": (lambda x: keras.random.randint((3,), 0, 5, seed=SEEDS), ALL),
    "by a function": (lambda x: tf.function(lambda: tf.range(5) + TABLE[0, 0])(), ALL),
    "by Python": (lambda x: tf.py_function(lambda: 3, [], tf.int32), ALL),
    "by a loop": (lambda x: tf.while_loop(lambda i: i < 3, lambda i: [i + 1], [0])[0], ALL),
}

pytestmark = pytest.mark.every_case


def graph_of(function, shape):
    """Return what `function` makes of a batch, in its graph."""
    made = []
    trace = tf.function(lambda x: made.append(function(x)), autograph=False)
    trace.get_concrete_function(tf.TensorSpec(shape, tf.int32))
    return made[0]


@pytest.mark.parametrize("name", TENSORS)
def test_a_graph_tells_what_a_tensor_depends_on(name):
    function, expected = TENSORS[name]
    assert dependence_of(graph_of(function, (None, None))) == expected


def test_what_a_function_captures_is_followed():
    def inner(function):
        def captures(x):
            outer, made = function(x), []
            trace = tf.function(lambda: made.append(outer + 1), autograph=False)
            trace.get_concrete_function()
            return made[0]

        return dependence_of(graph_of(captures, (None, None)))

    assert inner(lambda x: x) == ALL
    assert inner(lambda x: tf.shape(x)[0]) == ROWS
    assert inner(lambda x: tf.range(tf.shape(x)[1])) == NOTHING


def test_eagerly_all_may_depend_on_everything():
    assert dependence_of(tf.range(3)) == ALL


SQUARE = np.arange(16).reshape(4, 4) % 3

# Of a batch of 4 samples of length 4, and of one sample.
FOR_ROWS = {
    "zeros like": (lambda x: tf.zeros_like(x), True),
    "zeros": (lambda x: ops.zeros(ops.shape(x), dtype="int32"), True),
    "broadcast": (lambda x: ops.broadcast_to(ops.arange(4), ops.shape(x)), True),
    "repeated": (lambda x: tf.tile(tf.range(4)[None], [x.shape[0], 1]) + 1, True),
    "positions": (lambda x: tf.range(4), False),
    "with an axis": (lambda x: tf.range(4)[None], False),
    "with an axis, by Keras": (lambda x: ops.expand_dims(ops.arange(4), 0), False),
    "constant, with an axis": (lambda x: tf.constant(np.arange(4)[None]), False),
    "distances": (lambda x: tf.range(4)[:, None] - tf.range(4)[None], False),
    "table": (lambda x: tf.constant(SQUARE), False),
    "table of positions": (lambda x: tf.reshape(tf.range(4), (1, 4)), False),
}


@pytest.mark.parametrize("rows", [4, 1])
@pytest.mark.parametrize("name", FOR_ROWS)
def test_what_is_made_for_a_number_of_samples_that_the_graph_knows_is_seen(name, rows):
    function, expected = FOR_ROWS[name]
    ids = graph_of(function, (rows, 4))
    assert dependence_of(ids) == NOTHING
    assert is_made_for_rows(ids) is expected


def test_of_several_samples_one_number_each_is_seen():
    assert is_made_for_rows(graph_of(lambda x: tf.zeros(x.shape[:1], tf.int32) + 1, (4, 3)))
    assert is_made_for_rows(graph_of(lambda x: tf.zeros(x.shape[:1], tf.int32)[:, None], (4, 3)))


def test_a_length_that_only_axis_1_has_is_not_the_number_of_samples():
    assert not is_made_for_rows(graph_of(lambda x: tf.zeros((4, 4), tf.int32), (3, 4)))
    assert not is_made_for_rows(graph_of(lambda x: tf.zeros((4, 4), tf.int32), (None, 4)))
