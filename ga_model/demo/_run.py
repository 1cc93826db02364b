"""Train the same network four ways, each in a separate process, and compare."""

from __future__ import annotations

import sys
import textwrap
import time
from pathlib import Path

import keras
import numpy as np

from ga_model._wrap import accumulate
from ga_model.demo import _report
from ga_model.demo._options import Settings
from ga_model.demo._report import Result, Run
from ga_model.tools._memory import peak_memory
from ga_model.tools._process import CommandError, ProcessError, in_own_process, on_cpu


def make_runs(settings: Settings) -> list[Run]:
    """Return the trainings, the reference first."""
    rows, steps = settings.batch_size, settings.accumulation_steps
    return [
        Run("full batch", rows),
        Run("full batch, split", rows, {"microbatch_size": rows // steps}),
        Run("accumulation", rows // steps, {"accumulation_steps": steps}),
        Run("no accumulation", rows // steps, is_control=True),
    ]


def run_demo(settings: Settings, *, plot: Path | None) -> int:
    """Train all runs, print the report and return the exit status, or raise CommandError."""
    (x, _), (x_validation, _) = load_dataset(settings)  # first, because it may fail
    runs = make_runs(settings)
    rate = "" if settings.learning_rate is None else f" (learning rate {settings.learning_rate:g})"
    epochs = "1 epoch" if settings.epochs == 1 else f"{settings.epochs} epochs"
    print(
        f"{settings.dataset}: {len(x):,} samples for training, {len(x_validation):,} for "
        f"validation. {epochs} of {settings.optimizer}{rate} in {settings.dtype}, "
        f"seed {settings.seed}.",
        flush=True,
    )
    results = []
    for number, run in enumerate(runs, start=1):
        arguments = "".join(f", {name}={value}" for name, value in run.accumulate.items())
        place = f"\n[{number}/{len(runs)}]"
        print(f"{place} {run.name}: batches of {run.batch_size}{arguments}", flush=True)
        results.append(train_in_own_process(run, settings))
    is_reproduced, verdict = _report.judge(results, settings.dtype)
    print(f"\n{_report.table(results)}\n\n{textwrap.fill(verdict, 100)}", flush=True)
    if plot is not None:
        try:
            _report.draw(results).savefig(plot)
        except OSError as error:
            raise CommandError(f"The plot cannot be written to {str(plot)!r}: {error}.") from None
        print(f"\nPlot: {plot}")
    return 0 if is_reproduced else 1


def load_dataset(
    settings: Settings,
) -> tuple[tuple[np.ndarray, np.ndarray], tuple[np.ndarray, np.ndarray]]:
    """Return the training and validation data: (samples, height, width, 1) images, labels."""
    load = {"digits": load_digits, "mnist": load_mnist}[settings.dataset]
    parts = [(x[..., np.newaxis].astype(settings.dtype), y) for x, y in load(settings.seed)]
    return parts[0], parts[1]


def load_digits(seed: int) -> tuple[tuple[np.ndarray, np.ndarray], tuple[np.ndarray, np.ndarray]]:
    """Return scikit-learn's digits of 8 x 8 pixels: 1,500 for training and 297 for validation."""
    try:
        from sklearn.datasets import load_digits
    except ImportError:
        raise CommandError(
            "The dataset `digits` comes with scikit-learn, which is not installed. "
            "Run: pip install scikit-learn"
        ) from None
    x, y = load_digits(return_X_y=True)
    order = np.random.default_rng(seed).permutation(len(x))
    x, y = x[order].reshape(-1, 8, 8) / 16, y[order]
    # 1,500 is not a multiple of 128 or 32: each epoch ends with a partial window.
    return (x[:1500], y[:1500]), (x[1500:], y[1500:])


def load_mnist(seed: int) -> tuple[tuple[np.ndarray, np.ndarray], tuple[np.ndarray, np.ndarray]]:
    """Return MNIST's digits of 28 x 28 pixels: 60,000 for training and 10,000 for validation."""
    try:
        (x, y), (x_validation, y_validation) = keras.datasets.mnist.load_data()
    except Exception as error:  # Keras raises a bare `Exception` if a download fails
        raise CommandError(
            f"The dataset `mnist` cannot be downloaded: {error}. "
            "Check the network, or pass --dataset digits, which needs no network."
        ) from None
    return (x / 255, y), (x_validation / 255, y_validation)


def make_model(size: int) -> keras.Model:
    """Return the network for images of `size` x `size` pixels.

    Images are enlarged to about 64 x 64, so that activations dominate the memory, and not weights.
    No layer combines samples or draws random numbers, and activations are smooth: at the kink of a
    ReLU, rounding decides between two gradients, and equal trainings drift apart by 1e-2 within 60
    updates in float32 (by 3e-14 in float64).
    """
    layers = keras.layers

    def convolution(filters: int) -> keras.layers.Layer:
        return layers.Conv2D(filters, 3, padding="same", activation="tanh")

    first = [convolution(16), convolution(16), convolution(16), layers.AveragePooling2D(4)]
    second = [convolution(32), layers.AveragePooling2D(2), layers.Flatten()]
    head = [layers.Dense(64, activation="tanh"), layers.Dense(10, activation="softmax")]
    enlarged = [keras.Input((size, size, 1)), layers.UpSampling2D(64 // size)]
    return keras.Sequential([*enlarged, *first, *second, *head])


@on_cpu()
def train(run: Run, settings: Settings) -> Result:
    """Train the network in this process. Keras prints its progress to standard output."""
    keras.config.set_floatx(settings.dtype)
    keras.config.set_dtype_policy(settings.dtype)
    keras.utils.set_random_seed(settings.seed)
    data = keras.tree.map_structure(keras.ops.convert_to_tensor, load_dataset(settings))
    samples, validation = data  # tensors, so that `fit` allocates no memory for the data
    model = make_model(samples[0].shape[1])
    if run.accumulate:
        model = accumulate(model, **run.accumulate)
    optimizer = keras.optimizers.get(settings.optimizer)
    if settings.learning_rate is not None:
        optimizer.learning_rate = settings.learning_rate
    model.compile(optimizer, "sparse_categorical_crossentropy", metrics=["accuracy"])
    start = model.get_weights()
    base_memory = peak_memory()
    started = time.perf_counter()
    history = model.fit(
        *samples,
        batch_size=run.batch_size,
        epochs=settings.epochs,
        shuffle=False,  # all runs have the same order
        validation_data=validation,
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
    """Return `train(run, settings)`, computed in a new process, or raise CommandError."""
    try:
        return in_own_process(f"The run {run.name!r}", train, run, settings)  # type: ignore[no-any-return]
    except ProcessError as error:
        hint = "\nThat is what happens when memory runs out. Pass a smaller --batch-size."
        raise CommandError(f"{error}{hint if error.exit_code == -9 else ''}") from None
