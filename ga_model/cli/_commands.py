"""Run the commands on parsed arguments. Imports Keras, which is slow."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import re
from argparse import Namespace

import keras

from ga_model._settings import NAMES
from ga_model.bench._names import KERAS_HUB_NAMES
from ga_model.check import _compare
from ga_model.check._plan import make_plan
from ga_model.cli import _script
from ga_model.demo._options import Settings
from ga_model.tools._process import CommandError

_STATUS = {"equivalent": 0, "different": 1, "undecided": 3}


def demo(options: Namespace) -> int:
    """Run the demonstration."""
    from ga_model.demo import _run

    samples, steps = options.batch_size, options.accumulation_steps
    if samples % steps:
        raise CommandError(
            "--batch-size must be divisible by --accumulation-steps, so that small batches line up "
            f"with full ones. Received: --batch-size {samples} --accumulation-steps {steps}. "
            f"Pass --batch-size {samples + steps - samples % steps}."
        )
    try:
        keras.optimizers.get(options.optimizer)
    except Exception:  # not an optimizer of Keras, or one that needs arguments
        raise CommandError(
            "--optimizer must be one of Keras's that need no arguments, such as adam or sgd. "
            f"Received: {options.optimizer!r}. Pass --optimizer adam, for example."
        ) from None
    names = [field.name for field in dataclasses.fields(Settings)]
    settings = Settings(**{name: getattr(options, name) for name in names})
    return _run.run_demo(settings, plot=options.plot)


def check(options: Namespace) -> int:
    """Run the check on a user's model."""
    if options.dtype is not None:
        keras.config.set_floatx(options.dtype)
        keras.config.set_dtype_policy(options.dtype)
    model, data = _script.load(options.script)
    if options.dtype not in (None, model.variable_dtype):
        raise CommandError(
            f"--dtype sets Keras's default, and the script must not set another one. Received: "
            f"--dtype {options.dtype}, and a model in {model.variable_dtype}. Let the script leave "
            "the dtype to Keras, or leave the option out."
        )
    settings = {name: value for name, value in vars(options).items() if name in NAMES and value}
    try:
        plan = make_plan(model, data, options.batch_size, options.updates, **settings)
    except (TypeError, ValueError, RuntimeError) as error:
        raise CommandError(_in_options(str(error))) from None
    report = _compare.compare(model, plan)
    print(report.text(has_table=options.table or not report.equivalent))
    if options.json is not None:
        options.json.write_text(json.dumps(report.to_dict(), indent=2) + "\n")
    return _STATUS[report.verdict]


def _in_options(message: str) -> str:
    """Replace the arguments of `check_equivalence` in a message by command-line options."""

    def option(match: re.Match[str]) -> str:
        name, value = f"--{match[1].replace('_', '-')}", match[2]
        return f"no {name}" if value == "None" else name if value is None else f"{name} {value}"

    names = f"batch_size|{'|'.join(NAMES)}"
    message = re.sub(rf"`?\b({names})\b(?:=([^\s,.`]+))?`?", option, message)
    return message.replace("`check_equivalence`", "`ga_model check`")


def bench(options: Namespace) -> int:
    """Run the benchmark."""
    if options.jit != "off" and keras.backend.backend() == "torch":
        raise CommandError(
            "--jit is for the TensorFlow backend: on PyTorch no step is compiled. "
            f"Received: --jit {options.jit} with KERAS_BACKEND=torch. "
            "Pass --jit off, or leave it out."
        )
    hub_models = [model for model in options.models if model in KERAS_HUB_NAMES]
    if hub_models and importlib.util.find_spec("keras_hub") is None:
        raise CommandError(
            f"keras-hub is not installed, which makes the models {' '.join(hub_models)}. "
            "Run: pip install keras-hub. Or choose other `--models`."
        )
    from ga_model.bench import _measure, _report

    jit_compile = {"off": [False], "on": [True], "both": [False, True]}[options.jit]
    models, numbers = dict.fromkeys(options.models), sorted(set(options.microbatches))
    results = _measure.measure(list(models), numbers, jit_compile, 60 * options.minutes)
    print(_report.tables(results))
    if options.json is not None:
        parts = [{**setup._asdict(), **dataclasses.asdict(r)} for setup, r in results.items()]
        options.json.write_text(json.dumps(parts, indent=2) + "\n")
    if options.plot is not None:
        _report.draw(results).savefig(options.plot)
    return 0
