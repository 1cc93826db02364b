"""Whatever is drawn (model, loss, optimizer, data, windows): the updates are the full batch's.

Or a warning says that they are not: in windows of several batches, of loss terms that average over
different things.
"""

import dataclasses
import functools
import warnings

import keras
import numpy as np
import pytest
from helpers import TOLERANCE, MeanOfSquares, examples
from hypothesis import event, given
from hypothesis import strategies as st
from keras import layers, losses, optimizers
from training import difference_of_fits

POSITIONS, FEATURES = 5, 3
IDS = 200  # with as many as a window looks up, an Embedding's gradient stays a list of rows

LAYERS = {
    "dense": lambda x: layers.Dense(4, "tanh")(x),
    "residual": lambda x: x + layers.Dense(x.shape[-1], "softplus")(x),
    "recurrent": lambda x: layers.SimpleRNN(4, return_sequences=True)(x),
    "normalization": lambda x: layers.LayerNormalization()(x),
    # A key's bias has a gradient of zero in exact arithmetic.
    "attention": lambda x: layers.MultiHeadAttention(2, 3, use_bias=False)(x, x),
    "activity": lambda x: layers.Dense(4, "tanh", activity_regularizer=MeanOfSquares(0.01))(x),
    "regularized": lambda x: layers.Dense(4, "tanh", kernel_regularizer="l2")(x),
}

LOSSES = {
    "squared": losses.MeanSquaredError,
    "absolute": losses.MeanAbsoluteError,
    "huber": losses.Huber,
    "binary": functools.partial(losses.BinaryCrossentropy, from_logits=True),
    "categorical": functools.partial(losses.CategoricalCrossentropy, from_logits=True),
}

SCHEDULES = {
    "constant": lambda rate: rate,
    "exponential": lambda rate: optimizers.schedules.ExponentialDecay(rate, 2, 0.7),
    "piecewise": lambda rate: optimizers.schedules.PiecewiseConstantDecay([1], [rate, rate / 3]),
    "warmup": lambda rate: optimizers.schedules.CosineDecay(
        rate / 9, 4, alpha=0.1, warmup_target=rate, warmup_steps=2
    ),
}

OPTIMIZERS = {
    optimizers.SGD: [{}, {"momentum": 0.9}, {"momentum": 0.5, "nesterov": True}],
    optimizers.RMSprop: [{}, {"momentum": 0.9, "centered": True}],
    optimizers.Adam: [{}, {"beta_1": 0.5, "amsgrad": True}],
    optimizers.AdamW: [{}],
    optimizers.Adadelta: [{}],
    optimizers.Adagrad: [{}],
    optimizers.Adamax: [{}],
    optimizers.Adafactor: [{}, {"relative_step": False}],
    optimizers.Nadam: [{}],
    optimizers.Ftrl: [{}, {"l2_regularization_strength": 0.1}],
    optimizers.Lion: [{}],
    optimizers.Lamb: [{}],
}


@dataclasses.dataclass(frozen=True)
class Training:
    """What is drawn."""

    rows: int
    batch_size: int
    steps: int
    size: int | None
    loss_over: str
    epochs: int
    layers: list[str]
    ids: bool
    masked: bool
    losses: list[tuple[str, str]]  # of each output: the loss, its reduction
    sample_weight: str
    optimizer: type
    arguments: dict
    rate: float
    schedule: str

    def make_model(self):
        """Return a model of sequences."""
        inputs = keras.Input((POSITIONS,) if self.ids else (POSITIONS, FEATURES))
        if self.ids:
            x = layers.Embedding(IDS, FEATURES, mask_zero=self.masked)(inputs)
        else:
            x = layers.Masking()(inputs) if self.masked else inputs
        for name in self.layers:
            x = LAYERS[name](x)
        return keras.Model(inputs, [layers.Dense(2, name=n)(x) for n in self._outputs()])

    def _outputs(self):
        return [f"output_{i}" for i in range(len(self.losses))]

    def compile_args(self):
        # A sum of many values would make steps that are too long.
        per_value = {"sum": 1 / (self.rows * POSITIONS)}
        return {
            "optimizer": self.optimizer(SCHEDULES[self.schedule](self.rate), **self.arguments),
            "loss": [LOSSES[loss](reduction=reduction) for loss, reduction in self.losses],
            "loss_weights": [per_value.get(reduction, 0.7) for _, reduction in self.losses],
        }

    def data(self):
        """Return x, y and sample weights, of which no window lacks all."""
        generator = np.random.default_rng(self.rows)
        shape = (self.rows, POSITIONS)
        lengths = generator.integers(0, POSITIONS + 1, self.rows)
        lengths[:: self.batch_size * self.steps] = POSITIONS
        is_valid = np.arange(POSITIONS) < lengths[:, np.newaxis]
        if self.ids:
            x = generator.integers(1, 7, shape) * is_valid
        else:
            x = generator.normal(size=(*shape, FEATURES)) * is_valid[..., np.newaxis]
        several = len(self.losses) > 1
        y = [generator.uniform(size=(*shape, 2)) for _ in self.losses]
        if self.sample_weight == "none":
            return x, y if several else y[0]
        if self.sample_weight == "rows":
            shape = (self.rows, 1)
        weight = generator.uniform(0.1, 3.0, shape) * (generator.uniform(size=shape) > 0.2)
        weight[:: self.batch_size * self.steps] = 1.0
        return (x, y, [weight, weight]) if several else (x, y[0], weight)

    def is_sure_to_be_exact(self):
        """Return whether there is one batch in a window, or one term, or all average over rows."""
        reductions = {reduction for _, reduction in self.losses}
        if self.sample_weight == "none":
            reductions -= {"mean_with_sample_weight"}  # which then is the other mean
        are_over_rows = not self.masked and reductions <= {"sum_over_batch_size"}
        return (
            self.steps == 1
            or are_over_rows
            or len(self.losses) + self.layers.count("activity") == 1
        )


REDUCTIONS = ["sum_over_batch_size", "mean_with_sample_weight", "sum"]
CLIPPING = [{}, {"clipnorm": 0.01}, {"clipvalue": 0.01}, {"global_clipnorm": 0.01}]
AVERAGES = [{}, {"use_ema": True, "ema_momentum": 0.5, "ema_overwrite_frequency": 2}]
DECAY = [{}, {"weight_decay": 0.1}]


@st.composite
def trainings(draw):
    steps = draw(st.integers(1, 4))
    optimizer = draw(st.sampled_from(list(OPTIMIZERS)))
    choices = [OPTIMIZERS[optimizer], CLIPPING, AVERAGES, DECAY]
    arguments = {}
    for choice in choices:
        arguments.update(draw(st.sampled_from(choice)))
    return Training(
        rows=draw(st.integers(1, 30)),
        batch_size=draw(st.integers(1, 12)),
        steps=steps,
        size=draw(st.integers(1, 7) if steps == 1 else st.none() | st.integers(1, 7)),
        loss_over=draw(st.sampled_from(["microbatch", "batch"])),
        epochs=draw(st.integers(1, 2)),
        layers=draw(st.lists(st.sampled_from(list(LAYERS)), max_size=3)),
        ids=draw(st.booleans()),
        masked=draw(st.booleans()),
        losses=draw(
            st.lists(
                st.tuples(st.sampled_from(list(LOSSES)), st.sampled_from(REDUCTIONS)),
                min_size=1,
                max_size=2,
            )
        ),
        sample_weight=draw(st.sampled_from(["none", "rows", "positions"])),
        optimizer=optimizer,
        arguments=arguments,
        rate=draw(st.sampled_from([0.001, 0.01, 0.03])),
        schedule=draw(st.sampled_from(list(SCHEDULES))),
    )


def check(training, **compile_args):
    keras.utils.clear_session()
    with warnings.catch_warnings(record=True) as caught:
        warnings.filterwarnings("always", "The terms of .* loss")
        difference = difference_of_fits(
            training.make_model,
            lambda: {**training.compile_args(), **compile_args},
            training.data(),
            rows=training.batch_size,
            steps=training.steps,
            size=training.size,
            loss_over=training.loss_over,
            epochs=training.epochs,
        )
    is_exact = not caught
    event(f"{'several batches' if training.steps > 1 else 'one batch'}, exact: {is_exact}")
    assert is_exact or not training.is_sure_to_be_exact()
    assert difference <= TOLERANCE["float64"] or not is_exact


@pytest.mark.parametrize(
    ("compile_args", "number"),
    [
        ({"run_eagerly": True}, 3),
        # In the sweep, others every time.
        ({}, 1_000),
        ({"run_eagerly": True}, 2_000),
        ({"jit_compile": True}, 100),
    ],
)
def test_updates_are_the_big_batchs(compile_args, number, float64):
    @examples(number, is_search=number >= 100)
    @given(trainings())
    def agree(training):
        check(training, **compile_args)

    agree()
