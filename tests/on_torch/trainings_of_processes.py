"""What the processes of `test_torch_processes.py` train, each with its share of the data.

The full batch of an update is the batches of a window of each process, one after the other.
"""

import itertools
import warnings
from unittest import mock

import keras
import numpy as np
import torch
import zoo
from gradients import gradients_of
from helpers import dense_data, dense_model, seeded
from noise import DECAY, FEATURES, averages_by_formula, linear_model, normal_rows

from ga_model import GradientAccumulator, GradientNoiseScale, accumulate
from ga_model.backends.torch import process_group

# Rows of the batches of each process; processes have different numbers of batches.
BATCHES = {2: [[4, 4, 4, 4, 4], [6, 6, 2]], 3: [[3, 3, 3], [5, 5], [2, 2, 2, 1]]}
WORLD = torch.distributed.group.WORLD


def sgd():
    return keras.optimizers.SGD(0.1, momentum=0.9)


def of(optimizer=sgd, loss="mse"):
    """Return a function that returns arguments of `compile`."""
    return lambda: {"optimizer": optimizer(), "loss": loss}


def of_keras(optimizer, loss="mse", **kwargs):
    return lambda: {"optimizer": getattr(keras.optimizers, optimizer)(**kwargs), "loss": loss}


def scaled():
    return keras.optimizers.LossScaleOptimizer(sgd(), initial_scale=8.0, dynamic_growth_steps=2)


def unused():
    """Return a model with weights that get no gradient."""
    model = zoo.WithUnusedVariable()
    model.build((None, 4))
    return model


STEPS, SIZE = {"accumulation_steps": 2}, {"microbatch_size": 3}
SUM = of_keras("SGD", keras.losses.MeanSquaredError("sum"), learning_rate=0.005)
WEIGHTED = of(loss=keras.losses.MeanSquaredError("mean_with_sample_weight"))
CLIPPED = of_keras("Adam", learning_rate=0.01, global_clipnorm=0.1)
DECAYED = of_keras("SGD", learning_rate=0.1, weight_decay=0.1)
MASKED = zoo.ZOO["masked_recurrent"]
DENSE = zoo.ZOO["dense"]

# Name: model, data, arguments of `compile`, and settings.
CASES = {
    "steps": (*DENSE, of(), STEPS),
    "size": (*DENSE, of(), SIZE),
    "both": (*DENSE, of(), {**STEPS, **SIZE}),
    "neither": (*DENSE, of(), {}),
    "skips": (*DENSE, of(), {"skip_nonfinite": True}),
    "masked": (*MASKED, of(), STEPS),
    "masked, by size": (*MASKED, of(), {"microbatch_size": 2}),
    "regularized": (*zoo.ZOO["regularized"], of(), STEPS),
    "sum": (*DENSE, SUM, {**STEPS, **SIZE}),
    "sample weights": (*DENSE, WEIGHTED, STEPS),
    "unused": (unused, dense_data, DECAYED, STEPS),
    "clipped": (*DENSE, CLIPPED, STEPS),
    "loss scaling": (*DENSE, of(scaled), STEPS),
}


def shares(name, size):
    """Return the data of a case: of each process its batches, and the full batch of each update."""
    _, make_data, _, settings = CASES[name]
    total = sum(map(sum, BATCHES[size]))
    data = make_data(total)
    if name == "sample weights":
        data = (*data, np.random.default_rng(4).uniform(0.1, 3.0, total).astype("float32"))
    batches, first = [], 0
    for rows in BATCHES[size]:
        edges = np.cumsum([first, *rows])
        batches.append([tuple(d[a:b] for d in data) for a, b in itertools.pairwise(edges)])
        first = edges[-1]
    steps = settings.get("accumulation_steps", 1)
    windows = []
    for begin in range(0, max(map(len, batches)), steps):
        parts = [batch for own in batches for batch in own[begin : begin + steps]]
        windows.append(tuple(np.concatenate(column) for column in zip(*parts)))
    return batches, windows


class Batches(keras.utils.PyDataset):
    def __init__(self, batches):
        super().__init__()
        self.batches = batches

    def __len__(self):
        return len(self.batches)

    def __getitem__(self, index):
        return self.batches[index]


def counted():
    """Count the exchanges of gradients in a block."""
    all_reduce = torch.distributed.all_reduce
    return mock.patch.object(torch.distributed, "all_reduce", side_effect=all_reduce)


def fitted(name, rank, size):
    make, _, compile_args, settings = CASES[name]
    model = accumulate(seeded(make), **settings)
    model.process_group = WORLD
    model.compile(**compile_args())
    batches, _ = shares(name, size)
    # One process validates alone, as it may.
    more = {"validation_data": batches[0][0]} if rank == 0 and name == "steps" else {}
    with counted() as exchanges:
        model.fit(Batches(batches[rank]), epochs=2, shuffle=False, verbose=0, **more)
    return model.get_weights(), exchanges.call_count


def reference(name, size):
    """Return the weights before and after plain Keras on the full batches, and its updates."""
    make, _, compile_args, _ = CASES[name]
    model = seeded(make)
    model.compile(**compile_args())
    start = model.get_weights()
    _, windows = shares(name, size)
    model.fit(Batches(windows), epochs=2, shuffle=False, verbose=0)
    return model.get_weights(), start, 2 * len(windows)


def loss_of(model, x, y, reduction):
    squares = keras.ops.square(model(x) - keras.ops.convert_to_tensor(y))
    return (keras.ops.mean if reduction == "mean" else keras.ops.sum)(squares)


def looped(rank, size, reduction):
    """Train by a loop of one's own, under `DistributedDataParallel`."""
    model = seeded(dense_model)
    module = torch.nn.parallel.DistributedDataParallel(model)
    optimizer = keras.optimizers.SGD(0.02, momentum=0.9)
    accumulator = GradientAccumulator(process_group=WORLD)
    variables = model.trainable_variables
    batches, _ = shares("steps", size)
    with counted() as exchanges:
        for _ in range(2):
            for number, (x, y) in enumerate(batches[rank], start=1):
                model.zero_grad()
                with module.no_sync():
                    loss_of(module, x, y, reduction).backward()
                weight = len(x) if reduction == "mean" else None
                accumulator.add([v.value.grad for v in variables], variables, weight=weight)
                if number % 2 == 0:
                    accumulator.apply(optimizer)
            accumulator.apply(optimizer, is_last=True)
    return model.get_weights(), exchanges.call_count


def looped_reference(size, reduction):
    model = seeded(dense_model)
    optimizer = keras.optimizers.SGD(0.02, momentum=0.9)
    start = model.get_weights()
    _, windows = shares("steps", size)
    for x, y in windows * 2:
        gradients = gradients_of(model, lambda x=x, y=y: loss_of(model, x, y, reduction))
        with torch.no_grad():
            optimizer.apply(gradients, model.trainable_variables)
    return model.get_weights(), start, 2 * len(windows)


def train_on_batches(rank, size):
    make, _, compile_args, settings = CASES["both"]
    model = accumulate(seeded(make), **settings)
    model.compile(**compile_args())
    model.process_group = WORLD
    batches, _ = shares("both", size)
    with counted() as exchanges:
        for _ in range(2):
            for batch in batches[rank]:
                model.train_on_batch(*batch)
            model.close_window()
    return model.get_weights(), exchanges.call_count


def error_of(call):
    try:
        call()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


def model_of(seed=1, group=WORLD, make=dense_model, **compile_args):
    keras.utils.set_random_seed(seed)
    model = accumulate(make(), accumulation_steps=2)
    model.process_group = group
    model.compile(**{"optimizer": sgd(), "loss": "mse", **compile_args})
    return model


class StopsInOne(keras.callbacks.Callback):
    def __init__(self, rank):
        super().__init__()
        self.rank = rank

    def on_epoch_end(self, epoch, logs=None):
        self.model.stop_training = self.rank == 0


class SlowsOne(StopsInOne):
    def on_epoch_end(self, epoch, logs=None):
        if self.rank == 0:
            self.model.optimizer.learning_rate = 0.01


def errors(rank, size):
    """Return what is said of trainings that do not go together."""
    x, y = dense_data(8)
    fit = {"batch_size": 4, "verbose": 0, "epochs": 2}
    own = torch.distributed.new_group([rank], use_local_synchronization=True)

    def regularized():
        return keras.Sequential([keras.Input((4,)), keras.layers.Dense(2, kernel_regularizer="l2")])

    alone = model_of(group=None)
    of_first = torch.distributed.new_group([0])
    found = {
        "choice without it": error_of(lambda: model_of(group=of_first)),
        "no choice": error_of(lambda: alone.train_on_batch(x, y)),
        "choice by name": error_of(lambda: model_of(group="world")),
        "other weights": error_of(lambda: model_of(seed=rank).fit(x, y, **fit)),
        "other epochs": error_of(lambda: model_of().fit(x, y, **{**fit, "epochs": 1 + rank})),
        "stopped": error_of(lambda: model_of().fit(x, y, callbacks=[StopsInOne(rank)], **fit)),
        "slowed": error_of(lambda: model_of().fit(x, y, callbacks=[SlowsOne(rank)], **fit)),
        "noise of one": error_of(
            lambda: model_of().fit(x, y, callbacks=[GradientNoiseScale()][rank:], **fit)
        ),
        "regularized sum": error_of(lambda: model_of(make=regularized, **SUM()).fit(x, y, **fit)),
        "no batch": error_of(lambda: model_of().fit(x, y, **fit)),
        "a group of its own": error_of(
            lambda: model_of(seed=rank, group=own).fit(x, y, **{**fit, "epochs": 1 + rank})
        ),
    }

    def loop(number, process_group=WORLD):
        model = seeded(dense_model)
        variables = model.trainable_variables
        accumulator = GradientAccumulator(process_group=process_group)
        ones = [torch.ones(tuple(v.shape)) for v in variables]
        for weight in [1, None][rank : rank + 1] if number == 2 else [1]:
            accumulator.add(ones, variables, weight=weight)
        accumulator.apply(sgd())

    found["loop without a group"] = error_of(lambda: loop(1, None))
    found["loop with both"] = error_of(lambda: loop(2))
    return found


class Sum(keras.layers.Layer):
    """Adds a loss that is a sum over samples."""

    def call(self, x):
        self.add_loss(0.01 * keras.ops.sum(keras.ops.square(x), axis=1))
        return x


def with_a_sum():
    model = dense_model()
    return keras.Sequential([keras.Input((4,)), model.layers[0], Sum(), model.layers[1]])


def with_batch_normalization():
    normalization = keras.layers.BatchNormalization()
    return keras.Sequential([keras.Input((4,)), normalization, keras.layers.Dense(2)])


# Settings, and rows of a batch: 6 rows of a process are an update.
WAYS = {
    "steps": ({"accumulation_steps": 2}, 3),
    "size": ({"microbatch_size": 3}, 6),
    "neither": ({}, 6),
}


def told(rank, size, make, way):
    """Return what is told where equal batches train, and the weights."""
    x, y = dense_data(12 * size)
    settings, rows = WAYS[way]
    model = accumulate(seeded(make), **settings)
    model.process_group = WORLD
    model.compile(keras.optimizers.SGD(0.01), "mse")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", UserWarning)
        model.fit(x[rank::size], y[rank::size], batch_size=rows, shuffle=False, verbose=0)
    return model.get_weights(), [str(warning.message) for warning in caught]


def told_reference(size, make):
    x, y = dense_data(12 * size)
    model = seeded(make)
    model.compile(keras.optimizers.SGD(0.01), "mse")
    start = model.get_weights()
    model.fit(x, y, batch_size=6 * size, shuffle=False, verbose=0)
    return model.get_weights(), start


def in_small_buckets(rank, size):
    """Train with gradients that are summed one by one."""
    with mock.patch.object(process_group, "_BUCKET", 1):
        return fitted("both", rank, size)


NOISE_SETTINGS = {"accumulation_steps": 2, "microbatch_size": 3}


def rows_and_batches(size):
    """Return samples, and of each process where its batches are."""
    x, _, _ = normal_rows(sum(map(sum, BATCHES[size])))
    edges = iter(itertools.pairwise(np.cumsum([0, *itertools.chain(*BATCHES[size])])))
    return x, [[slice(*next(edges)) for _ in own] for own in BATCHES[size]]


def measured(rank, size):
    """Return the averages that a process has of the noise of gradients."""
    x, batches = rows_and_batches(size)
    model = linear_model(settings=NOISE_SETTINGS)
    model.layers[0].kernel.assign(np.ones((FEATURES, 1)))
    model.process_group = WORLD
    noise = GradientNoiseScale(DECAY)
    own = Batches([(x[part], np.zeros(part.stop - part.start)) for part in batches[rank]])
    model.fit(own, shuffle=False, verbose=0, callbacks=[noise])
    return tuple(noise.noise_scales["optimizer"].averages)


def measured_reference(size):
    """Return the averages by the formula: the gradient of a microbatch is the mean of its rows."""
    x, batches = rows_and_batches(size)
    steps, rows = NOISE_SETTINGS["accumulation_steps"], NOISE_SETTINGS["microbatch_size"]
    windows = [
        [
            slice(i, min(i + rows, part.stop))
            for own in batches
            for part in own[begin : begin + steps]
            for i in range(part.start, part.stop, rows)
        ]
        for begin in range(0, max(map(len, batches)), steps)
    ]
    data = x.astype("float64"), x, np.ones(len(x))
    return averages_by_formula(lambda x, *_: x.mean(0), lambda *_: None, data, windows)


def everything(rank, size):
    """Return what a process trained, by the name of the case."""
    results = {name: fitted(name, rank, size) for name in CASES}
    results["loop, mean"] = looped(rank, size, "mean")
    results["loop, sum"] = looped(rank, size, "sum")
    results["train_on_batch"] = train_on_batches(rank, size)
    return {
        "trained": results,
        "noise": measured(rank, size),
        "small buckets": in_small_buckets(rank, size),
        "told": {
            make.__name__ + " " + way: told(rank, size, make, way)
            for make in (with_a_sum, with_batch_normalization)
            for way in WAYS
        },
        "errors": errors(rank, size),
    }


def a_few(rank, size):
    """The same with fewer cases."""
    names = ["both", "masked"]
    results = {name: fitted(name, rank, size) for name in names}
    results["loop, mean"] = looped(rank, size, "mean")
    return {"trained": results}
