"""What the processes of `test_torch_processes.py` train, each with its share of the data.

The full batch of an update is the batches of a window of each process, one after the other.
"""

import datetime
import itertools
import os
import pickle
import tempfile
import warnings
from pathlib import Path
from unittest import mock

import keras
import losses
import models
import numpy as np
import torch
import zoo
from case import sgd
from helpers import Batches, dense_data, dense_model, seeded, sequential, set_random_seed, told
from noise import DECAY, FEATURES, averages_by_formula, linear_model, normal_rows
from training import compiled

from ga_model import GradientAccumulator, GradientNoiseScale, accumulate
from ga_model.backends.torch import process_group

# Rows of the batches of each process; processes have different numbers of batches.
BATCHES = {2: [[4, 4, 4, 4, 4], [6, 6, 2]], 3: [[3, 3, 3], [5, 5], [2, 2, 2, 1]]}
ALL = object()  # the group of all processes, which is there when it has been made


def run_in_processes(function, size):
    """Return what `function(rank, size)` returns in each process of a group of so many."""
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(_run, (function, size, Path(folder)), size)
        results = [(Path(folder) / f"{rank}.pickle").read_bytes() for rank in range(size)]
    return list(map(pickle.loads, results))


def _run(rank, function, size, folder):
    torch.set_num_threads(1)
    store = torch.distributed.FileStore(str(folder / "store"), size)
    limit = datetime.timedelta(seconds=30)
    group = {"store": store, "rank": rank, "world_size": size, "timeout": limit}
    torch.distributed.init_process_group("gloo", **group)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        result = function(rank, size)
    (folder / f"{rank}.pickle").write_bytes(pickle.dumps(result))
    store.set(f"done {rank}", "")
    store.wait([f"done {other}" for other in range(size)])  # nobody leaves while others talk
    os._exit(0)  # the threads of gloo may abort a process that ends in another way


def of_unused_weights():
    model = zoo.WithUnusedVariable()
    model.build((None, 4))
    return model


def of_suite(case, settings, compile_args=None):
    """Return model, data, arguments of `compile`, and settings."""
    return case.make, case.data, compile_args or case.compile, settings


STEPS, SIZE = {"accumulation_steps": 2}, {"microbatch_size": 3}
SUM = losses.compile_with("sum")
WEIGHTED = losses.CASES["mean_with_sample_weight, weights of samples"]
DENSE, MASKED = models.CASES["dense"], models.CASES["masked_recurrent"]
CASES = {
    "steps": of_suite(DENSE, STEPS),
    "size": of_suite(DENSE, SIZE),
    "both": of_suite(DENSE, {**STEPS, **SIZE}),
    "neither": of_suite(DENSE, {}),
    "skips": of_suite(DENSE, {"skip_nonfinite": True}),
    "masked": of_suite(MASKED, STEPS),
    "masked, by size": of_suite(MASKED, {"microbatch_size": 2}),
    "regularized": of_suite(models.CASES["regularized"], STEPS),
    "sum": of_suite(DENSE, {**STEPS, **SIZE}, SUM),
    "sample weights": of_suite(WEIGHTED, STEPS),
    "unused": (of_unused_weights, dense_data, models.CASES["weight decay"].compile, STEPS),
    "clipped": of_suite(models.CASES["global_clipnorm"], STEPS),
    "loss scaling": of_suite(models.CASES["loss scale"], STEPS),
}


def shares(name, size):
    """Return the data of a case: of each process its batches, and the full batch of each update."""
    _, make_data, _, settings = CASES[name]
    data = make_data(sum(map(sum, BATCHES[size])))
    batches = [[tuple(d[rows] for d in data) for rows in own] for own in rows_of(size)]
    steps = settings.get("accumulation_steps", 1)
    windows = []
    for begin in range(0, max(map(len, batches)), steps):
        parts = [batch for own in batches for batch in own[begin : begin + steps]]
        windows.append(tuple(np.concatenate(column) for column in zip(*parts)))
    return batches, windows


def rows_of(size):
    """Return of each process where its batches are."""
    edges = iter(itertools.pairwise(np.cumsum([0, *itertools.chain(*BATCHES[size])])))
    return [[slice(*next(edges)) for _ in own] for own in BATCHES[size]]


def counted():
    """Count the exchanges of gradients in a block."""
    all_reduce = torch.distributed.all_reduce
    return mock.patch.object(torch.distributed, "all_reduce", side_effect=all_reduce)


def model_of(make=dense_model, compile_args=models.MSE, group=ALL, seed=1, **settings):
    set_random_seed(seed)
    model = accumulate(make(), **settings)
    model.process_group = torch.distributed.group.WORLD if group is ALL else group
    model.compile(**compile_args())
    return model


def of_case(name):
    make, _, compile_args, settings = CASES[name]
    return model_of(make, compile_args, **settings)


def fitted(name, rank, size):
    model, (batches, _) = of_case(name), shares(name, size)
    # One process validates alone, as it may.
    more = {"validation_data": batches[0][0]} if rank == 0 and name == "steps" else {}
    with counted() as exchanges:
        model.fit(Batches(batches[rank]), epochs=2, shuffle=False, verbose=0, **more)
    return model.get_weights(), exchanges.call_count


def reference(name, size):
    """Return the weights before and after plain Keras on the full batches, and its updates."""
    make, _, compile_args, _ = CASES[name]
    _, windows = shares(name, size)
    return *fitted_plainly(make, compile_args, windows, epochs=2), 2 * len(windows)


def fitted_plainly(make, compile_args, windows, epochs):
    model = compiled(make, **compile_args())
    start = model.get_weights()
    model.fit(Batches(windows), epochs=epochs, shuffle=False, verbose=0)
    return model.get_weights(), start


def train_on_batches(rank, size):
    model, (batches, _) = of_case("both"), shares("both", size)
    with counted() as exchanges:
        for _ in range(2):
            for batch in batches[rank]:
                model.train_on_batch(*batch)
            model.close_window()
    return model.get_weights(), exchanges.call_count


# Loops of one's own.


LOSSES = {"mean": losses.mean, "sum": losses.total}


def looped(rank, size, reduction):
    """Train by a loop of one's own, under `DistributedDataParallel`."""
    model = seeded(dense_model)
    module = torch.nn.parallel.DistributedDataParallel(model)
    optimizer = keras.optimizers.SGD(0.02, momentum=0.9)
    accumulator = GradientAccumulator(process_group=torch.distributed.group.WORLD)
    variables = model.trainable_variables
    batches, _ = shares("steps", size)
    with counted() as exchanges:
        for _ in range(2):
            for number, (x, y) in enumerate(batches[rank], start=1):
                model.zero_grad()
                with module.no_sync():
                    LOSSES[reduction](torch.as_tensor(y), module(x)).backward()
                weight = len(x) if reduction == "mean" else None
                accumulator.add([v.value.grad for v in variables], variables, weight=weight)
                if number % 2 == 0:
                    accumulator.apply(optimizer)
            accumulator.apply(optimizer, is_last=True)
    return model.get_weights(), exchanges.call_count


def looped_reference(size, reduction):
    _, windows = shares("steps", size)
    compile_args = sgd(LOSSES[reduction], 0.02)
    return *fitted_plainly(dense_model, compile_args, windows, epochs=2), 2 * len(windows)


# What does not go together.


def error_of(call):
    try:
        call()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


def regularized():
    return sequential((4,), keras.layers.Dense(2, kernel_regularizer="l2"))


def errors(rank, size):
    """Return what is said of trainings that do not go together."""
    x, y = dense_data(8)
    own = torch.distributed.new_group([rank], use_local_synchronization=True)
    of_first = torch.distributed.new_group([0])
    alone = model_of(group=None, **STEPS)

    def fit_error(*callbacks, epochs=2, **kwargs):
        fit = {"batch_size": 4, "verbose": 0, "epochs": epochs, "callbacks": list(callbacks)}
        return error_of(lambda: model_of(**STEPS, **kwargs).fit(x, y, **fit))

    def in_one(change):
        """Return a callback that changes the model of one process after an epoch."""
        changes = keras.callbacks.Callback()
        if rank == 0:
            changes.on_epoch_end = lambda epoch, logs=None: change(changes.model)
        return changes

    def loop_error(number, process_group):
        variables = seeded(dense_model).trainable_variables
        accumulator = GradientAccumulator(process_group=process_group)
        ones = [torch.ones(tuple(v.shape)) for v in variables]

        def loop():
            for weight in [1, None][rank : rank + 1] if number == 2 else [1]:
                accumulator.add(ones, variables, weight=weight)
            accumulator.apply(keras.optimizers.SGD(0.1))

        return error_of(loop)

    return {
        "choice without it": error_of(lambda: model_of(group=of_first)),
        "no choice": error_of(lambda: alone.train_on_batch(x, y)),
        "choice by name": error_of(lambda: model_of(group="world")),
        "other weights": fit_error(seed=rank),
        "other epochs": fit_error(epochs=1 + rank),
        "stopped": fit_error(in_one(lambda model: setattr(model, "stop_training", True))),
        "slowed": fit_error(in_one(lambda model: setattr(model.optimizer, "learning_rate", 0.01))),
        "noise of one": fit_error(*[GradientNoiseScale()][rank:]),
        "regularized sum": fit_error(make=regularized, compile_args=SUM),
        "no batch": fit_error(),
        "a group of its own": fit_error(epochs=1 + rank, seed=rank, group=own),
        "loop without a group": loop_error(1, None),
        "loop with both": loop_error(2, torch.distributed.group.WORLD),
    }


# What is told of.

TOLD = {
    "with a sum": models.CASES["a layer that adds a value per sample"].make,
    "with batch normalization": models.normalized,
}
# Settings, and rows of a batch: 6 rows of a process are an update.
WAYS = {
    "steps": ({"accumulation_steps": 2}, 3),
    "size": ({"microbatch_size": 3}, 6),
    "neither": ({}, 6),
}


def trained_and_told(rank, size, make, way):
    """Return the weights and what is told where equal batches train."""
    x, y = dense_data(12 * size)
    settings, rows = WAYS[way]
    model = model_of(make, **settings)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", UserWarning)
        model.fit(x[rank::size], y[rank::size], batch_size=rows, shuffle=False, verbose=0)
    return model.get_weights(), told(caught)


def told_reference(size, make):
    x, y = dense_data(12 * size)
    windows = [(x[i : i + 6 * size], y[i : i + 6 * size]) for i in (0, 6 * size)]
    return fitted_plainly(make, models.MSE, windows, epochs=1)


def in_small_buckets(rank, size):
    """Train with gradients that are summed one by one."""
    with mock.patch.object(process_group, "_BUCKET", 1):
        return fitted("both", rank, size)


# The noise of gradients.


def measured(rank, size):
    """Return the averages that a process has of the noise of gradients."""
    x, _, _ = normal_rows(sum(map(sum, BATCHES[size])))
    model = linear_model(settings={**STEPS, **SIZE})
    model.layers[0].kernel.assign(np.ones((FEATURES, 1)))
    model.process_group = torch.distributed.group.WORLD
    noise = GradientNoiseScale(DECAY)
    own = [(x[part], np.zeros(part.stop - part.start)) for part in rows_of(size)[rank]]
    model.fit(Batches(own), shuffle=False, verbose=0, callbacks=[noise])
    return tuple(noise.noise_scales["optimizer"].averages)


def measured_reference(size):
    """Return the averages by the formula: the gradient of a microbatch is the mean of its rows."""
    x, _, _ = normal_rows(sum(map(sum, BATCHES[size])))
    steps, rows, batches = 2, 3, rows_of(size)
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
    results = {name: fitted(name, rank, size) for name in CASES}
    results |= {f"loop, {name}": looped(rank, size, name) for name in ("mean", "sum")}
    results["train_on_batch"] = train_on_batches(rank, size)
    return {
        "trained": results,
        "noise": measured(rank, size),
        "small buckets": in_small_buckets(rank, size),
        "told": {
            f"{name} {way}": trained_and_told(rank, size, make, way)
            for name, make in TOLD.items()
            for way in WAYS
        },
        "errors": errors(rank, size),
    }


def a_few(rank, size):
    """The same with fewer cases."""
    results = {name: fitted(name, rank, size) for name in ("both", "masked")}
    return {"trained": {**results, "loop, mean": looped(rank, size, "mean")}}
