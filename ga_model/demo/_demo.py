"""Train the same network four ways, each in a process of its own, and compare.

The list in `make_runs` says what is trained. Its first entry is the reference; to try another way
to the same updates, add an entry.
"""

from __future__ import annotations

import inspect
import sys
import textwrap
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import keras
import numpy as np

from ga_model._wrap import accumulate
from ga_model.demo import _plot, _report
from ga_model.demo._batches import ShuffledBatches
from ga_model.demo._options import Settings
from ga_model.demo._report import Result, Run
from ga_model.tools._cpu import on_cpu
from ga_model.tools._errors import ToldError
from ga_model.tools._memory import peak_memory
from ga_model.tools._process import ProcessError, in_own_process


class DemoError(ToldError):
    """There is no result. The message says why, and what to do."""


def make_runs(settings: Settings) -> list[Run]:
    """Return what is trained, the reference first."""
    rows, steps = settings.batch_size, settings.accumulation_steps
    return [
        Run("full batch", rows),
        Run("full batch, split", rows, {"microbatch_size": rows // steps}),
        Run("accumulation", rows // steps, {"accumulation_steps": steps}),
        Run("no accumulation", rows // steps, is_control=True),
    ]


@dataclass(frozen=True)
class Dataset:
    """Images of shape (rows, height, width, 1) from 0 to 1, labels of shape (rows,)."""

    x: Any
    y: Any
    x_validation: Any
    y_validation: Any


def run_demo(settings: Settings, *, plot: Path | None = None) -> int:
    """Train all runs, print the report and return the exit status, 0 or 1.

    Args:
        settings: what to train.
        plot: file for the figure, or None.

    Raises:
        DemoError: the data cannot be loaded, a training failed, or the plot cannot be written.
    """
    data = load_dataset(settings)  # before any training, so that it is there or the job ends here
    runs = make_runs(settings)
    print(_heading(settings, data), flush=True)
    results = []
    for number, run in enumerate(runs, start=1):
        print(f"\n{_report.announcement(run, number, len(runs))}", flush=True)
        results.append(train_in_own_process(run, settings))
    verdict = _report.judge(results, settings.dtype)
    print(f"\n{_report.table(results)}\n\n{textwrap.fill(verdict.text, 100)}", flush=True)
    if plot is not None:
        try:
            _plot.draw(results).savefig(plot)
        except OSError as error:
            raise DemoError(f"The plot cannot be written to {str(plot)!r}: {error}.") from None
        print(f"\nPlot: {plot}")
    return 0 if verdict.is_reproduced else 1


def _heading(settings: Settings, data: Dataset) -> str:
    """Return what all runs have in common."""
    rate = "" if settings.learning_rate is None else f" (learning rate {settings.learning_rate:g})"
    epochs = "1 epoch" if settings.epochs == 1 else f"{settings.epochs} epochs"
    return (
        f"{settings.dataset}: {len(data.x):,} samples for training, {len(data.x_validation):,} for "
        f"validation. {epochs} of {settings.optimizer}{rate} in {settings.dtype}, "
        f"seed {settings.seed}."
    )


def load_digits(seed: int) -> tuple[Any, Any, Any, Any]:
    """Return scikit-learn's digits of 8 x 8 pixels: 1,500 for training and 297 for validation."""
    try:
        from sklearn.datasets import load_digits
    except ImportError:
        raise DemoError(
            "The dataset `digits` comes with scikit-learn, which is not installed. "
            'Run: pip install "ga_model[demo]"'
        ) from None
    x, y = load_digits(return_X_y=True)
    order = np.random.default_rng(seed).permutation(len(x))
    x, y = x[order].reshape(-1, 8, 8) / 16, y[order]
    # 1,500 is no multiple of 128 or 32: each epoch ends with a window that is not full.
    return x[:1500], y[:1500], x[1500:], y[1500:]


def load_mnist(seed: int) -> tuple[Any, Any, Any, Any]:
    """Return Keras's MNIST of 28 x 28 pixels in its own split: 60,000 and 10,000."""
    try:
        (x, y), (x_validation, y_validation) = keras.datasets.mnist.load_data()
    except Exception as error:  # Keras raises bare `Exception` when a download fails
        raise DemoError(
            f"The dataset `mnist` cannot be downloaded: {error}. "
            "Check the network, or pass --dataset digits, which needs no network."
        ) from None
    return x / 255, y, x_validation / 255, y_validation


_LOADERS: dict[str, Callable[[int], tuple[Any, Any, Any, Any]]] = {
    "digits": load_digits,
    "mnist": load_mnist,
}


def load_dataset(settings: Settings) -> Dataset:
    """Return the rows that all runs train on.

    Raises:
        DemoError: a package or a file that it needs is not there.
    """
    x, y, x_validation, y_validation = _LOADERS[settings.dataset](settings.seed)
    images = [a[..., np.newaxis].astype(settings.dtype) for a in (x, x_validation)]
    return Dataset(images[0], y, images[1], y_validation)


def _needs_arguments(function: Callable[..., Any]) -> bool:
    parameters = inspect.signature(function).parameters.values()
    return any(p.default is p.empty and p.kind is not p.VAR_KEYWORD for p in parameters)


# Keras's optimizers by their names in `compile`, without those that need arguments.
OPTIMIZERS: dict[str, Callable[[], Any]] = {
    name.lower(): value
    for name, value in sorted(vars(keras.optimizers).items())
    if isinstance(value, type)
    and issubclass(value, keras.optimizers.Optimizer)
    and not _needs_arguments(value)
}


def make_model(size: int) -> keras.Model:
    """Return the network for images of `size` x `size` pixels.

    Images are enlarged to about 64 x 64, so that activations fill the memory and not weights. There
    is no BatchNormalization and no dropout: they see microbatches, see the README. Activations are
    smooth: at the kink of a ReLU rounding decides between two gradients, and equal trainings drift
    apart to 1e-2 within 60 updates in float32 (to 3e-14 in float64).
    """
    layers = keras.layers

    def convolution(filters: int) -> keras.layers.Layer:
        return layers.Conv2D(filters, 3, padding="same", activation="tanh")

    return keras.Sequential(
        [
            keras.Input((size, size, 1)),
            layers.UpSampling2D(64 // size),
            convolution(16),
            convolution(16),
            convolution(16),
            layers.AveragePooling2D(4),
            convolution(32),
            layers.AveragePooling2D(2),
            layers.Flatten(),
            layers.Dense(64, activation="tanh"),
            layers.Dense(10, activation="softmax"),
        ]
    )


@on_cpu()
def train(run: Run, settings: Settings) -> Result:
    """Train the network in this process, with Keras's progress on standard output."""
    keras.config.set_floatx(settings.dtype)
    keras.config.set_dtype_policy(settings.dtype)
    keras.utils.set_random_seed(settings.seed)
    data = load_dataset(settings)
    model = make_model(data.x.shape[1])
    if run.accumulate:
        model = accumulate(model, **run.accumulate)
    optimizer = OPTIMIZERS[settings.optimizer]()
    if settings.learning_rate is not None:
        optimizer.learning_rate = settings.learning_rate
    model.compile(optimizer, "sparse_categorical_crossentropy", metrics=["accuracy"])
    start = model.get_weights()

    batches = ShuffledBatches(data.x, data.y, run.batch_size, settings.seed)
    base_memory = peak_memory()
    started = time.perf_counter()
    history = model.fit(
        batches,
        epochs=settings.epochs,
        shuffle=False,  # `batches` does
        validation_data=(data.x_validation, data.y_validation),
        validation_batch_size=run.accumulate.get("microbatch_size", run.batch_size),
        verbose=1 if sys.stdout.isatty() else 2,
    )
    seconds = time.perf_counter() - started
    return Result(
        run=run,
        start=start,
        weights=model.get_weights(),
        updates=int(model.optimizer.iterations),
        history=history.history,
        seconds=seconds,
        base_memory=base_memory,
        peak_memory=peak_memory(),
    )


def train_in_own_process(run: Run, settings: Settings) -> Result:
    """Return `train(run, settings)`, computed in a new process.

    Raises:
        DemoError: the process failed.
    """
    try:
        return in_own_process(f"The run {run.name!r}", train, run, settings)  # type: ignore[no-any-return]
    except ProcessError as error:
        hint = ""
        if error.exit_code == -9:
            hint = "\nThat is what happens when memory runs out. Pass a smaller --batch-size."
        raise DemoError(f"{error}{hint}") from None
