"""What the commands do, once their arguments are read. Importing it takes long."""

from __future__ import annotations

import argparse
import importlib.util
import json
from pathlib import Path
from typing import Any

import keras

from ga_model._settings import NAMES
from ga_model.bench._names import KERAS_HUB_NAMES
from ga_model.check import _check
from ga_model.check._plan import make_plan
from ga_model.cli import _script

_STATUS = {"equivalent": 0, "different": 1, "undecided": 3}


def demo(parser: argparse.ArgumentParser, options: argparse.Namespace) -> int:
    """Run the demonstration."""
    from ga_model.demo import _demo
    from ga_model.demo._options import Settings

    _check_dtype(parser, options.dtype)
    samples, steps = options.batch_size, options.accumulation_steps
    if samples % steps:
        parser.error(
            "--batch-size must be divisible by --accumulation-steps, so that small batches line up "
            f"with full ones. Received: --batch-size {samples} --accumulation-steps {steps}. "
            f"Pass --batch-size {samples + steps - samples % steps}."
        )
    if options.optimizer not in _demo.OPTIMIZERS:
        parser.error(
            f"--optimizer must be one of {', '.join(_demo.OPTIMIZERS)}. "
            f"Received: {options.optimizer!r}. Pass --optimizer adam, for example."
        )
    settings = Settings(
        dataset=options.dataset,
        batch_size=samples,
        accumulation_steps=steps,
        epochs=options.epochs,
        optimizer=options.optimizer,
        learning_rate=options.learning_rate,
        dtype=options.dtype,
        seed=options.seed,
    )
    return _demo.run_demo(settings, plot=options.plot)


def check(parser: argparse.ArgumentParser, options: argparse.Namespace) -> int:
    """Check a model of the user's."""
    _check_dtype(parser, options.dtype)
    if options.dtype is not None:
        keras.config.set_floatx(options.dtype)
        keras.config.set_dtype_policy(options.dtype)
    model, data = _script.load(options.script)
    if options.dtype not in (None, model.variable_dtype):
        parser.error(
            f"--dtype sets Keras's default, and the script must not set another one. Received: "
            f"--dtype {options.dtype}, and a model in {model.variable_dtype}. Let the script leave "
            "the dtype to Keras, or leave the option out."
        )
    settings = {name: getattr(options, name, None) for name in NAMES}
    given = {name: value for name, value in settings.items() if value is not None}
    try:
        plan = make_plan(model, data, options.batch_size, options.updates, **given)
    except (TypeError, ValueError, RuntimeError) as error:
        parser.error(str(error))
    report = _check.compare(model, plan)
    print(report.text(has_table=options.table or not report.equivalent))
    if options.json is not None:
        _write_json(options.json, report.to_dict())
    return _STATUS[report.verdict]


def bench(parser: argparse.ArgumentParser, options: argparse.Namespace) -> int:
    """Run the benchmark."""
    is_on_torch = keras.backend.backend() == "torch"
    jit = options.jit or ("off" if is_on_torch else "both")
    if is_on_torch and jit != "off":
        parser.error(
            "--jit is for the TensorFlow backend: on PyTorch no step is compiled. "
            f"Received: --jit {jit} with KERAS_BACKEND=torch. Pass --jit off, or leave it out."
        )
    try:
        from rich.console import Console
        from rich.progress import Progress
    except ImportError:
        parser.error('rich is not installed. Run: pip install "ga_model[demo]"')
    hub_models = [model for model in options.models if model in KERAS_HUB_NAMES]
    if hub_models and importlib.util.find_spec("keras_hub") is None:
        parser.error(_no_keras_hub_message(hub_models))
    from ga_model.bench import _bench, _bench_report

    jit_compile = {"off": [False], "on": [True], "both": [False, True]}[jit]
    models, numbers = (list(dict.fromkeys(v)) for v in (options.models, options.microbatches))
    with Progress(console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("", total=1.0)

        def show(text: str, share: float) -> None:
            if text != bar.tasks[task].description and not bar.console.is_terminal:
                bar.console.print(text)  # a line each in a log file
            bar.update(task, description=text, completed=min(share, 1.0))

        measured = _bench.measure(models, sorted(numbers), jit_compile, 60 * options.minutes, show)
    print(_bench_report.tables(measured))
    if options.json is not None:
        _write_json(options.json, _bench_report.to_dict(measured))
    if options.plot is not None:
        _bench_report.draw(measured).savefig(options.plot)
    return 0


def _check_dtype(parser: argparse.ArgumentParser, dtype: str | None) -> None:
    """Exit if Keras does not compute in a dtype."""
    if dtype == "float64" and keras.backend.backend() != "tensorflow":
        parser.error(
            "--dtype float64 is for the TensorFlow backend: Keras has no float64 on others. "
            "Received: it on another one. Set KERAS_BACKEND=tensorflow, or leave the option out."
        )


def _no_keras_hub_message(models: list[str]) -> str:
    return (
        f"keras-hub is not installed, which makes the models {' '.join(models)}. "
        "Run: pip install keras-hub. Or choose other `--models`."
    )


def _write_json(file: Path, value: dict[str, Any]) -> None:
    file.write_text(json.dumps(value, indent=2) + "\n")
