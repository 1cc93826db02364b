"""What a trial tells of a call: whether it treats samples one by one, or sums over them."""

import numpy as np
import pytest
from calls_alone import ALONE, FUNCTIONS, LOSSES, ROWS, SPLIT, adding, own, tried
from helpers import assert_equal, values_of
from keras import layers, ops

from ga_model.core.proof.calls import KNOWN, TOTAL, kinds_of

pytestmark = pytest.mark.every_case


def ones(*shape, dtype="float32"):
    return ops.ones((ROWS, *shape), dtype)


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")  # an error would hide an alarm
@pytest.mark.parametrize("name", ALONE)
def test_layers_that_treat_samples_one_by_one_are_known_and_left_as_they_were(name):
    layer = ALONE[name]()
    before = values_of(layer.variables)
    assert tried(layer, ones(*layer.input_shape[1:])) == SPLIT
    assert_equal(values_of(layer.variables), before)


def test_ids_are_looked_up_one_by_one():
    layer = layers.Embedding(9, 3)
    layer.build()
    assert tried(layer, ones(7, dtype="int32")) == SPLIT
    assert tried(layer, ops.reshape(ops.arange(42.0), (ROWS, 7)) % 9) == SPLIT


class Multiplies(layers.Dense):
    def call(self, x, table):
        return ops.matmul(super().call(x), table)


def test_what_all_samples_share_may_have_another_length():
    layer = Multiplies(7)
    layer.build((None, 4))
    assert tried(layer, ones(4), ops.ones((7, 3))) == SPLIT


@pytest.mark.parametrize("name", FUNCTIONS)
def test_functions(name):
    function, is_alone = FUNCTIONS[name]
    reason, _ = tried(own(lambda layer, x: function(x)), ones(4))
    assert reason is None if is_alone else "it combines samples" in reason


@pytest.mark.parametrize("name", LOSSES)
def test_losses_are_told_apart(name):
    function, kind = LOSSES[name]
    assert tried(adding(function), ones(4))[1] == [kind]


def test_a_loss_that_is_zero_is_not_known():
    losses = [ops.mean, ops.sum, lambda x: 0.0 * ops.sum(x)]
    assert tried(adding(*losses), ones(4))[1] == ["mean", "sum", "zero"]


def of_rows(layer, x):
    """Compute what rounding changes much where inputs are large, which differs with the size."""
    return ops.sin(layer.weight * x * (1 + 2.0**-23 * x.shape[0]))


def combines_rounded(layer, x):
    return of_rows(layer, x) + ops.where(x == 0.0, ops.mean(x, 0, keepdims=True), 0.0)


@pytest.mark.parametrize(("function", "is_split"), [(of_rows, True), (combines_rounded, False)])
def test_samples_of_a_batch_are_tried_up_to_their_rounding(function, is_split):
    samples = np.random.default_rng(0).normal(scale=1e4, size=(KNOWN, 4)).astype("float32")
    samples[::3, 1] = 0.0
    assert tried(own(function), ones(4))[0] is None
    reason, _ = tried(own(function), ones(4), known=samples)
    assert (reason is None) == is_split


KINDS = {
    "rows": (lambda x: x * 2 + 1, "rows"),
    "masked": (lambda x: np.where(x > 0, x, -np.inf), "rows"),
    "alike": (lambda x: np.ones_like(x), "alike"),
    "zero": (lambda x: (x * 0).sum(0), "zero"),
    "sum": (lambda x: x.sum(0), "sum"),
    "mean": (lambda x: x.mean(0), "mean"),
    "maximum": (lambda x: x.max(0), None),
    "centered": (lambda x: x - 0.01 * x.mean(0, keepdims=True), None),
    "one entry": (lambda x: np.where(np.arange(x.shape[1]) == 1, x + x.sum(0), x), None),
    "not a number": (lambda x: x * np.nan, None),
}


@pytest.mark.parametrize("width", [7, 10_000])
@pytest.mark.parametrize("name", KINDS)
def test_kinds_are_found_alike_in_small_arrays_and_in_large_ones_which_are_folded(name, width):
    function, kind = KINDS[name]
    x = np.random.default_rng(0).normal(size=(TOTAL, width)).astype("float32")
    assert kinds_of(lambda begin, end: [function(x[begin:end])]) == [kind]
