"""What a step shows later, and no sample of its trial did: it is tried again, and told or exact."""

import itertools
import warnings

import keras
import losses
import numpy as np
import pytest
from helpers import LIMIT, dense_data, dense_model, relative_difference, seeded, told
from keras import layers, ops

from ga_model import accumulate
from ga_model.core.proof import proof
from ga_model.core.proof.runner import StepRunner

SAYS = "does not train as the full batch"
WAYS = {
    "steps": {"accumulation_steps": 3},
    "size": {"microbatch_size": 4},
    "both": {"accumulation_steps": 2, "microbatch_size": 4},
}
ROWS = {"steps": 4, "size": 12, "both": 8}  # of a batch of `fit`


def counts(y):
    return ops.cast(y[:, 0] > -0.3, "float32")


def errors(y, z):
    return ops.mean(ops.square(z - y), 1)


# Losses that are zero where nothing counts, but not in the full batch.


def of_all_over_some(y, z):
    return ops.divide_no_nan(ops.sum(errors(y, z)), ops.sum(counts(y)))


def of_all_over_some_unsafe(y, z):
    return ops.sum(errors(y, z)) / ops.sum(counts(y))


def each_of_all_over_some(y, z):
    return ops.sum(ops.divide_no_nan(errors(y, z), ops.sum(counts(y))))


def of_all_in_one_branch(y, z):
    number = ops.sum(counts(y))
    return ops.where(number > 0, ops.sum(errors(y, z)) / ops.maximum(number, 1e-9), 0.0)


def without_infinity(y, z):
    return ops.nan_to_num(ops.sum(errors(y, z)) / ops.sum(counts(y)), posinf=0.0)


def signed(y, z):
    """The first column weighs, by numbers of both signs where it is -0.3 or less."""
    weights = ops.where(y[:, 0] > -0.3, 1.0, y[:, 1])
    return ops.divide_no_nan(ops.sum(weights * errors(y, z)), ops.sum(weights))


def at_least_two(y, z):
    """The bound is never reached in the trial."""
    return ops.sum(errors(y, z)) / ops.maximum(ops.sum(counts(y)), 2.0)


LOST = [
    of_all_over_some,
    of_all_over_some_unsafe,
    each_of_all_over_some,
    of_all_in_one_branch,
    without_infinity,
    signed,
    at_least_two,
]

# Losses of which nothing is lost.


def of_some_over_some(y, z):
    return ops.divide_no_nan(ops.sum(counts(y) * errors(y, z)), ops.sum(counts(y)))


def each_over_some(y, z):
    return ops.sum(counts(y) * ops.divide_no_nan(errors(y, z), ops.sum(counts(y))))


def bounded(y, z):
    return ops.sum(counts(y) * errors(y, z)) / ops.maximum(ops.sum(counts(y)), 1.0)


EXACT = [of_some_over_some, each_over_some, bounded]


def data(num_empty=4):
    """Return samples, of which those from the 28th on do not count."""
    x, y = dense_data(48)
    y[:, 0] = np.abs(y[:, 0])
    y[28 : 28 + num_empty, 0] = -1.0
    y[28 : 28 + num_empty, 1] = np.resize([1.0, -1.0, 2.0, -2.0], num_empty)
    return x, y


def make_of(loss, is_own):
    """Return what makes a model, and its arguments of `compile`."""
    if not is_own:
        return dense_model, {"loss": loss}
    return losses.of_class(own_loss(loss)), {}


def own_loss(loss):
    return losses.computing(lambda of_keras, y, z: loss(y, z))


def trained(loss, way, samples, is_own=False):
    """Return how far two epochs are from those of the full batch, and what was said."""
    make, arguments = make_of(loss, is_own)
    found = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for settings, rows in (({}, 12), (WAYS[way], ROWS[way])):
            model = accumulate(seeded(make), **settings)
            model.compile(keras.optimizers.SGD(0.1), **arguments)
            start = model.get_weights()
            rows = 16 if way == "both" and not settings else rows
            model.fit(*samples, batch_size=rows, epochs=2, shuffle=False, verbose=0)
            found.append(model.get_weights())
    return relative_difference(found[1], found[0], start), told(caught)


def cases():
    """Return parameters: of each loss one in the gate, and two in every run."""
    found = []
    for turn, loss in enumerate((*LOST, *EXACT)):
        ways = list(itertools.product(WAYS, (False, True)))
        for place, (way, is_own) in enumerate(ways):
            is_taken = place == turn % len(ways)
            marks = (
                []
                if is_taken and turn in (2, 7)
                else [pytest.mark.gate if is_taken else pytest.mark.sweep]
            )
            name = f"{loss.__name__}-{way}-{'own' if is_own else 'compiled'}"
            found.append(pytest.param(loss, way, is_own, marks=marks, id=name))
    return found


@pytest.mark.every_case
@pytest.mark.parametrize(("loss", "way", "is_own"), cases())
def test_what_a_microbatch_loses_later_is_told_of(loss, way, is_own):
    """And a batch that is split is trained again, and what loses nothing is exact and silent."""
    difference, said = trained(loss, way, data(), is_own)
    if loss in EXACT or way == "size":
        assert difference <= LIMIT
        assert not said
    else:
        # With both settings, its batches are trained at once from then on.
        assert way == "both" or not difference <= 10 * LIMIT
        assert [SAYS in text for text in said] == [True]


@pytest.mark.parametrize("loss", [of_all_over_some, of_some_over_some])
def test_a_window_without_weight_is_not_told_of(loss):
    """It makes an update with gradients of zero, as plain Keras does."""
    x, y = data(12)
    y = np.concatenate([y[:24], y[28:40]])
    difference, said = trained(loss, "steps", (x[:36], y))
    assert difference <= LIMIT
    assert not said


def test_news_of_batches_of_other_lengths_are_tried_with_what_is_alike():
    x, y = data(12)
    lengths, found = (3, 2, 2, 4), []
    parts = [
        (x[i : i + 4, None].repeat(n, 1), y[i : i + 4]) for i, n in zip((0, 8, 28, 4), lengths)
    ]

    def make():
        pool = layers.GlobalAveragePooling1D()
        return own_loss(of_some_over_some)([keras.Input((None, 4)), pool, *dense_model().layers])

    for accumulation_steps in (1, 4):
        model = accumulate(seeded(make), accumulation_steps=accumulation_steps)
        model.compile("sgd")
        start = model.get_weights()
        for part in parts if accumulation_steps > 1 else [joined(parts)]:
            model.train_on_batch(*map(ops.convert_to_tensor, part))
        found.append(model.get_weights())
    assert relative_difference(found[1], found[0], start) <= LIMIT


def joined(parts):
    """Return one batch of several, whose samples do not change with their positions."""
    return tuple(np.concatenate(part) for part in zip(*[(x[:, :2], y) for x, y in parts]))


def test_what_shows_nothing_new_is_tried_once(monkeypatch):
    """Metrics count on from batch to batch, which is no news of the step."""
    tried = []
    for name in ("of_step", "of_microbatches"):
        original = getattr(proof, name)
        monkeypatch.setattr(
            proof, name, lambda *a, f=original: (tried.append(f.__name__), f(*a))[1]
        )
    model = accumulate(seeded(dense_model), accumulation_steps=3)
    model.compile("sgd", lambda y, z: ops.mean(errors(y, z)), metrics=["mae"])
    model.fit(*dense_data(48), batch_size=4, epochs=2, verbose=0)
    assert tried == ["of_step"]


def test_a_mean_is_tried_in_one_way_and_not_noted_while_it_trains(monkeypatch):
    """The divisor of a mean's gradient is the number of samples, which is known without a look."""
    model = accumulate(seeded(make_of(lambda y, z: ops.mean(errors(y, z)), True)[0]))
    model.accumulation_steps = 3
    model.compile("sgd")
    runs, noted, run = [], [], StepRunner.run
    monkeypatch.setattr(StepRunner, "run", lambda *a: (runs.append(a[1:3]), run(*a))[1])
    kind = type(model._accumulation.backend)
    note = kind.noting
    monkeypatch.setattr(kind, "noting", lambda *a: (noted.append(len(a) > 3), note(*a))[1])
    model.fit(*dense_data(12), batch_size=4, verbose=0)
    assert len(runs) == 18
    assert len({end - begin for begin, end in runs}) == 3  # programs
    assert all(noted)  # by trials, which give what is drawn
