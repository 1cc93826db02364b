"""Measure time and memory of every way to train, side by side.

`WAYS` says how models are trained, and `_bench_cases` which. Times of one case are taken in one
process, in alternation, so that what the machine does meanwhile hits all ways alike; the memory of
each way in a process of its own.
"""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import keras
import numpy as np
from keras import layers

from ga_model._wrap import accumulate
from ga_model.bench._backend_functions import gradient_function, loop_by_hand, repeated
from ga_model.bench._bench_cases import CASES
from ga_model.bench._case import Case, random_numbers
from ga_model.tools._cpu import on_cpu
from ga_model.tools._memory import give_back_freed_memory, peak_memory, reset_peak_memory
from ga_model.tools._process import in_own_process

_LEAST_ROUNDS = 3
_FEWEST = 4  # microbatches of a way in a round


REFERENCE = "plain Keras"
FLOOR = "gradients only"
WHOLE = "full batch"
KERAS = "Keras's own"
HAND = "by hand"
STEPS = "accumulation_steps"
SIZE = "microbatch_size"
RECOMPUTING = "recomputing"

# What is trained with each number of microbatches per window.
WAYS = (REFERENCE, FLOOR, WHOLE, KERAS, HAND, STEPS, SIZE, RECOMPUTING)


def ways_of(num_microbatches: int) -> list[str]:
    """Return the ways that are another thing with so many microbatches than they are with one."""
    own = [STEPS, SIZE, RECOMPUTING]
    return own if num_microbatches == 1 else [WHOLE, KERAS, HAND, *own]


class Times(NamedTuple):
    """What one case took.

    Attributes:
        case, jit_compile: what was trained.
        seconds: of each way and number of microbatches per window (`REFERENCE` and `FLOOR` have 1),
            those per row in each round.
        first_seconds: of each, those of the first call. What is traced for one number of
            microbatches is there for the next, but for Keras's own and for no accumulation.
    """

    case: str
    jit_compile: bool
    seconds: dict[tuple[str, int], list[float]]
    first_seconds: dict[tuple[str, int], float]


class Memory(NamedTuple):
    """What one way added to the peak of its process.

    Attributes:
        case, jit_compile, way, num_microbatches: what was trained.
        size: bytes that making the model and training it added, or None if nothing tells.
        trainable_size: bytes of the trainable variables.
        batch_size: bytes of what one batch of the training holds.
    """

    case: str
    jit_compile: bool
    way: str
    num_microbatches: int
    size: int | None
    trainable_size: int
    batch_size: int


class Measured(NamedTuple):
    """All of it. `num_microbatches` are the numbers per window that were asked for."""

    num_microbatches: list[int]
    times: list[Times]
    memory: list[Memory]


def measure(
    cases: Sequence[str],
    num_microbatches: Sequence[int],
    jit_compile: Sequence[bool],
    seconds: float,
    progress: Callable[[str, float], None],
) -> Measured:
    """Measure all combinations.

    Args:
        cases: keys of `CASES`.
        num_microbatches: microbatches per window.
        jit_compile: whether with XLA, without, or both. Memory is measured with the first of them.
        seconds: what it may take in all. Every way is timed at least three times, however long
            that takes.
        progress: called with what comes next, and the share of `seconds` that what was there before
            it may have taken, from 0 to 1.

    Raises:
        ProcessError: one of the processes failed.
    """
    most = max(num_microbatches)
    pairs = list(itertools.product(cases, jit_compile))
    end = time.monotonic() + seconds
    progress("memory", 0.0)
    with ThreadPoolExecutor(min(4, os.cpu_count() or 1)) as pool:
        memory = []
        for case, way in itertools.product(cases, (REFERENCE, *ways_of(most))):
            job = (measure_memory, case, jit_compile[0], way, most)
            memory.append(pool.submit(in_own_process, _name(case, jit_compile[0]), *job))
        try:
            for result in memory:
                result.result()
                progress("memory", 1 - (end - time.monotonic()) / seconds)
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    times = []
    for i, (case, jit) in enumerate(pairs):
        left = end - time.monotonic()
        progress(f"time: {_name(case, jit)}", 1 - left / seconds)
        share = left / (len(pairs) - i)
        args = (case, jit, list(num_microbatches), share)
        times.append(in_own_process(_name(case, jit), measure_times, *args))
    return Measured(list(num_microbatches), times, [result.result() for result in memory])


def _name(case: str, jit_compile: bool) -> str:
    return f"{case} with XLA" if jit_compile else case


@on_cpu()
def measure_memory(case: str, jit_compile: bool, way: str, num_microbatches: int) -> Memory:
    """Train two windows in this process, of which nothing else must have been asked yet.

    The second one has all state from its beginning on. Something small is trained first, so that
    what the backend itself takes is not counted.
    """
    give_back_freed_memory()
    _warm_up(jit_compile)
    reset_peak_memory()
    before = peak_memory()
    training = Training(CASES[case], jit_compile, way, num_microbatches)
    training.run(2 * num_microbatches)
    after = peak_memory()
    variables = training.model.trainable_variables
    return Memory(
        case,
        jit_compile,
        way,
        num_microbatches,
        None if before is None or after is None else after - before,
        sum(np.dtype(v.dtype).itemsize * int(np.prod(v.shape)) for v in variables),
        sum(v.nbytes for v in keras.tree.flatten(CASES[case].make_data(training.rows))),
    )


@on_cpu()
def measure_times(
    case: str, jit_compile: bool, num_microbatches: list[int], seconds: float
) -> Times:
    """Time all ways in alternation, round after round, for so many seconds in all.

    A round trains every way on whole windows, of four microbatches or more.
    """
    end = time.monotonic() + seconds
    _warm_up(jit_compile)
    keys = [(REFERENCE, 1), (FLOOR, 1)]
    keys += [(way, number) for number in num_microbatches for way in ways_of(number)]
    microbatches = {key: -(-_FEWEST // key[1]) * key[1] for key in keys}
    trainings: dict[tuple[str, int], Training] = {}
    first = {}
    for way, number in keys:
        # One model and one trace serve all numbers, but where the number is in them.
        like = (
            None
            if way in (KERAS, HAND)
            else next((t for t in trainings.values() if t.way == way), None)
        )
        training = Training(CASES[case], jit_compile, way, number, like)
        trainings[way, number] = training
        of_one_call = training.rows // CASES[case].rows
        first[way, number] = training.run(of_one_call)
        training.run(number - of_one_call)
    for training in trainings.values():
        # TensorFlow optimizes a function again when others were made since.
        training.run(training.num_microbatches)
    taken: dict[tuple[str, int], list[float]] = {key: [] for key in keys}
    generator = np.random.default_rng(0)
    while len(taken[keys[0]]) < _LEAST_ROUNDS or time.monotonic() < end:
        for i in generator.permutation(len(keys)):
            key, number = keys[i], microbatches[keys[i]]
            taken[key].append(trainings[key].run(number) / (number * CASES[case].rows))
    return Times(case, jit_compile, taken, first)


def _warm_up(jit_compile: bool) -> None:
    """Start the backend. Something small is trained for that."""

    def make_model() -> Any:
        return keras.Sequential([keras.Input((4,)), layers.Dense(10, "softmax")])

    case = Case(make_model, keras.optimizers.Adam, random_numbers(4), 2)
    Training(case, jit_compile, REFERENCE, 1).run(1)


class Training:
    """A model that is trained in one way, on the same rows again and again.

    Args:
        case: what is trained.
        jit_compile: whether with XLA.
        way: one of `WAYS`.
        num_microbatches: microbatches per window.
        like: a training of the same case and way, whose model and functions are used.

    Attributes:
        model: the model.
        way, num_microbatches: the arguments.
        rows: of each batch.
    """

    def __init__(
        self,
        case: Case,
        jit_compile: bool,
        way: str,
        num_microbatches: int,
        like: Training | None = None,
    ) -> None:
        self.way = way
        self.num_microbatches = num_microbatches
        self.model: Any
        self._function: Callable[[Any], Any]
        if like is not None:
            self.model, self._function = like.model, like._function
        else:
            self.model = _make_model(case, jit_compile, way, num_microbatches)
            self.model.make_train_function()
            self._function = self.model.train_function
        self._is_window = way in (WHOLE, SIZE, RECOMPUTING)  # each batch
        self.rows = rows = case.rows * (num_microbatches if self._is_window else 1)
        self._batches = repeated(case.make_data(rows))
        if way == FLOOR:
            self.run(1)  # TensorFlow copies a table at every use once its rows were written to
            self._function = gradient_function(self.model)
        elif way == HAND and like is None:
            self._function = loop_by_hand(self.model, num_microbatches)

    def run(self, microbatches: int) -> float:
        """Train on so many microbatches, whole windows of them, and return the seconds it took."""
        if self.way == STEPS:
            self.model.accumulation_steps = self.num_microbatches
        begin = time.perf_counter()
        for _ in range(microbatches // self.num_microbatches if self._is_window else microbatches):
            self._function(self._batches)
        return time.perf_counter() - begin


def _make_model(case: Case, jit_compile: bool, way: str, num_microbatches: int) -> Any:
    keras.utils.set_random_seed(0)
    model = case.make_model()
    keras_accumulates = {"gradient_accumulation_steps": num_microbatches}
    optimizer = case.make_optimizer(**(keras_accumulates if way == KERAS else {}))
    if way == STEPS:
        accumulate(model)
    elif way == SIZE:
        accumulate(model, microbatch_size=case.rows, loss_over="microbatch")
    elif way == RECOMPUTING:
        accumulate(model, microbatch_size=case.rows, loss_over="batch")
    model.compile(optimizer, case.loss, jit_compile=jit_compile)
    return model
