"""Measure time and memory of every way to train, within a time limit.

Times of a model are measured in one process, in turns, so that other load on the machine affects
all ways equally. Memory is measured in one process per way.
"""

from __future__ import annotations

import dataclasses
import itertools
import os
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, NamedTuple

import keras

from ga_model._wrap import accumulate
from ga_model.base._types import Nest, Tensor
from ga_model.bench._by_hand import loop_by_hand
from ga_model.bench._cases import CASES
from ga_model.tools._memory import give_back_freed_memory, peak_memory, reset_peak_memory
from ga_model.tools._process import in_own_process, on_cpu, prepare

if TYPE_CHECKING:
    import numpy as np

_MOST_ROUNDS = 20
_MIN_MICROBATCHES = 4  # microbatches per setup and round

SMALL = "small batches"
FULL = "full batch"
KERAS = "Keras gradient_accumulation_steps"
HAND = "loop by hand"
STEPS = "accumulation_steps"
TRIED = "accumulation_steps, custom loss"
SIZE = "microbatch_size"
RECOMPUTING = 'microbatch_size, loss_over="batch"'
WAYS = (SMALL, FULL, KERAS, HAND, STEPS, TRIED, SIZE, RECOMPUTING)


class Setup(NamedTuple):
    """A model of `CASES` and a way of `WAYS` to train it; `SMALL` has one microbatch per update."""

    model: str
    jit_compile: bool
    way: str
    microbatches: int

    @property
    def is_window(self) -> bool:
        """Whether each batch is a whole window."""
        return self.way in (FULL, SIZE, RECOMPUTING)


@dataclasses.dataclass
class Result:
    """The measurements of a setup. Those that there was no time for are missing."""

    # One per round. The last round may have ended before this setup's turn.
    seconds_per_sample: list[float] = dataclasses.field(default_factory=list)
    # Includes tracing and compiling, unless a setup with other microbatches has traced the same.
    seconds_of_first_call: float | None = None
    # What creating and training the model adds to the peak.
    bytes_of_peak_memory: int | None = None


def setups(model: str, jit_compile: bool, num_microbatches: Sequence[int]) -> list[Setup]:
    """Return all setups of a model, the references before what is compared with them."""
    ways = {number: WAYS[4:] if number == 1 else WAYS[1:] for number in num_microbatches}
    pairs = [(SMALL, 1), *((way, number) for number in ways for way in ways[number])]
    return [Setup(model, jit_compile, *pair) for pair in pairs]


def measure(
    models: Sequence[str],
    num_microbatches: Sequence[int],
    jit_compile: Sequence[bool],
    seconds: float,
) -> dict[Setup, Result]:
    """Measure all combinations, or as many as there is time for.

    Memory gets up to half of the time, with the most microbatches and the first of `jit_compile`;
    the models get equal shares of the rest. When the time is up, the running step is finished.
    """
    end = time.monotonic() + seconds
    pairs = list(itertools.product(models, jit_compile))
    results = {s: Result() for pair in pairs for s in setups(*pair, num_microbatches)}

    def add_memory(setup: Setup) -> None:
        if time.monotonic() < end - seconds / 2:
            name = f"memory: {setup.model}, {setup.way}"
            results[setup].bytes_of_peak_memory = _run(name, measure_memory, setup)

    most = [max(num_microbatches)]
    prepare()
    with ThreadPoolExecutor(min(4, os.cpu_count() or 1)) as pool:
        list(pool.map(add_memory, [s for m in models for s in setups(m, jit_compile[0], most)]))
    for i, (model, jit) in enumerate(pairs):
        share = (end - time.monotonic()) / (len(pairs) - i)
        if share > 0:
            name = f"time: {model}{', XLA' if jit else ''}"
            measured = _run(name, measure_times, setups(model, jit, num_microbatches), share)
            for setup, (first_call, per_sample) in measured.items():
                results[setup].seconds_of_first_call = first_call
                results[setup].seconds_per_sample = per_sample
    return results


def _run(name: str, function: Callable[..., Any], *args: Any) -> Any:
    print(f"{name}\n", end="", file=sys.stderr, flush=True)  # one write: other threads write, too
    return in_own_process(name, function, *args)


@on_cpu()
def measure_memory(setup: Setup) -> int:
    """Return the bytes that the model and two windows add to the peak memory of this process.

    In the second window, all state exists from the start. Run this in a fresh process. A small
    model is trained first, so that the backend's own memory is not counted.
    """
    give_back_freed_memory()
    Training(Setup("tiny", setup.jit_compile, SMALL, 1)).run(1)
    reset_peak_memory()
    before = peak_memory()
    Training(setup).run(2 * setup.microbatches)
    return peak_memory() - before


@on_cpu()
def measure_times(
    setups: Sequence[Setup], seconds: float
) -> dict[Setup, tuple[float, list[float]]]:
    """Return, for each setup, the seconds of the first call, and per sample in each round.

    Rounds are run until the time is up or there are enough. A round trains each setup on whole
    windows of at least four microbatches in total.
    """
    end = time.monotonic() + seconds
    Training(Setup("tiny", setups[0].jit_compile, SMALL, 1)).run(1)  # starts the backend
    trainings: dict[Setup, Training] = {}
    taken: dict[Setup, tuple[float, list[float]]] = {}
    for setup in setups:
        if time.monotonic() >= end:
            break
        # Numbers of microbatches share one model, unless its functions contain the number.
        same = [t for s, t in trainings.items() if s.way == setup.way not in (KERAS, HAND)]
        training = Training(setup, *same[:1])
        in_one_call = setup.microbatches if setup.is_window else 1
        taken[setup] = training.run(in_one_call), []
        training.run(setup.microbatches - in_one_call)
        trainings[setup] = training
    for _, setup in itertools.product(range(1 + _MOST_ROUNDS), trainings):
        if time.monotonic() >= end:
            break
        microbatches = -(-_MIN_MICROBATCHES // setup.microbatches) * setup.microbatches
        seconds_taken = trainings[setup].run(microbatches)
        taken[setup][1].append(seconds_taken / (microbatches * CASES[setup.model].rows))
    if all(len(per_sample) > 1 for _, per_sample in taken.values()):
        for _, per_sample in taken.values():
            del per_sample[0]  # TensorFlow re-optimizes functions if others were traced since
    return taken


class Training:
    """The training of a setup's model, repeatedly on the same batch.

    It reuses the model and function of `like`, a training of the same model and way.
    """

    def __init__(self, setup: Setup, like: Training | None = None) -> None:
        self._setup = setup
        case = CASES[setup.model]
        rows = case.rows * (setup.microbatches if setup.is_window else 1)
        self._batches = _repeated(case.make_data(rows))
        self.model: keras.Model = _make_model(setup) if like is None else like.model
        self._function: Callable[[Iterable[tuple[Nest, Tensor]]], Nest]
        if like is not None:
            self._function = like._function
        elif setup.way == HAND:
            self._function = loop_by_hand(self.model, setup.microbatches)
        else:
            self.model.make_train_function()
            self._function = self.model.train_function

    def run(self, microbatches: int) -> float:
        """Train on a number of microbatches that makes whole windows, and return the seconds."""
        way, number = self._setup[2:]
        if way in (STEPS, TRIED):
            self.model.accumulation_steps = number
        begin = time.perf_counter()
        for _ in range(microbatches // number if self._setup.is_window else microbatches):
            self._function(self._batches)
        return time.perf_counter() - begin


def _repeated(samples: tuple[Nest, np.ndarray]) -> Iterable[tuple[Nest, Tensor]]:
    """Return an endless dataset of the same batch for a model's train function."""
    if keras.backend.backend() == "torch":
        return [keras.tree.map_structure(keras.ops.convert_to_tensor, samples)]
    import tensorflow as tf

    batches = tf.data.Dataset.from_tensor_slices(samples)
    batches = batches.batch(len(samples[1]), drop_remainder=True)  # all of one known size
    return iter(batches.cache().repeat())  # type: ignore[no-any-return]


def _make_model(setup: Setup) -> keras.Model:
    case = CASES[setup.model]
    keras.utils.set_random_seed(0)
    model = case.make_model()
    settings: dict[str, dict[str, Any]] = {
        STEPS: {},
        TRIED: {},
        SIZE: {"microbatch_size": case.rows, "loss_over": "microbatch"},
        RECOMPUTING: {"microbatch_size": case.rows, "loss_over": "batch"},
    }
    if setup.way in settings:
        accumulate(model, **settings[setup.way])
    keras_accumulates = {"gradient_accumulation_steps": setup.microbatches}
    optimizer = case.make_optimizer(**(keras_accumulates if setup.way == KERAS else {}))
    loss = _as_custom(case.loss) if setup.way == TRIED else case.loss
    model.compile(optimizer, loss, jit_compile=setup.jit_compile)
    return model


def _as_custom(loss: Any) -> Callable[[Tensor, Tensor], Tensor]:
    """Return a loss as custom code, with which a step is tried in its first call."""
    function = keras.losses.get(loss)
    return lambda y_true, y_pred: function(y_true, y_pred)
