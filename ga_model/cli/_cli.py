"""The command line. Every argument is checked here, before anything is trained."""

from __future__ import annotations

import argparse
import json
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ga_model._settings import NAMES
from ga_model.bench import _bench, _bench_report
from ga_model.bench._bench_cases import CASES, USUAL_CASES
from ga_model.check import _check
from ga_model.check._plan import make_plan
from ga_model.cli import _script
from ga_model.cli._arguments import integer_from, path, plot_path, positive_number
from ga_model.demo import _demo, _report
from ga_model.tools._process import ProcessError

_DESCRIPTION = """\
Train one small convolutional network four times, from the same weights and on the
same rows in the same order: with big batches; with the same batches that
`ga_model.accumulate` splits; with small batches that it joins to the same updates;
and with small batches alone. Then compare their weights, peak memory and time.

Each training has a process of its own, on the CPU, whose peak memory is its own.
What this needs is installed by: pip install "ga_model[demo]"
"""

_EPILOG = """\
Exit status: 0 if both ways gave the big batch's weights within the tolerance,
1 if one did not, 2 if there is no result (a bad argument, a training that failed).

Tolerance, on ||w - w_big|| / ||w_big - w_start|| of the worst variable:
{tolerances}.
Rounding differs with the order of a sum, and training amplifies it: in float32 to
1e-4 at most with the defaults. The smallest mistake, one ragged batch that counts
like a full one, gives 4e-3. With lion, whose signs flip, and at learning rates that
are nearly too high, float32 can not tell the two apart and --dtype float64 does.
"""


_CHECK_DESCRIPTION = """\
Check that accumulation makes the updates of the whole batch, on a model of yours.

FILE.py:function names a function without arguments in a script of yours that returns
a compiled model and some of its data: (model, x, y), or also sample weights. The
file is imported and the function is called; see `ga_model.check_equivalence` for
what is done with the model.

Exit status: 0 if the updates are shown to be equal, 1 if they are not, 2 if there is
no result.
"""

_BENCH_DESCRIPTION = """\
Time and peak memory of accumulation, side by side with plain Keras.

Trains models (dense, convolutional, transformer, embedding) in every way, and
prints ratios to plain Keras with batches of the microbatch's size. Times are taken
in alternation, round after round, in one process for each model; what is shown is
the median of the rounds' ratios, with half of the distance between their quartiles.
Memory is the peak that making and training the model add in a process of its own.
What this needs is installed by: pip install "ga_model[demo]"
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return the exit status.

    Args:
        arguments: the words after the program's name. None takes those of `sys.argv`.
    """
    words = list(sys.argv[1:] if arguments is None else arguments)
    commands = {"check": (_check_parser, _run_check), "bench": (_bench_parser, _run_bench)}
    make_parser, command = commands.get(words[0] if words else "", (_demo_parser, _run_demo))
    parser = make_parser()
    options = parser.parse_args(words[1:] if words and words[0] in commands else words)
    try:
        return command(parser, options)
    except (_demo.DemoError, _script.ScriptError, ProcessError) as error:
        print(f"{parser.prog}: error: {error}", file=sys.stderr)
        return 2
    except Exception:  # of the user's script, or a defect
        traceback.print_exc()
        return 2
    except KeyboardInterrupt:
        print(f"\n{parser.prog}: interrupted", file=sys.stderr)
        return 130


def _demo_parser() -> argparse.ArgumentParser:
    tolerances = ", ".join(f"{value:.0e} in {dtype}" for dtype, value in _report.TOLERANCE.items())
    parser = argparse.ArgumentParser(
        prog="ga_model",
        usage="%(prog)s [options]\n       %(prog)s check --help\n       %(prog)s bench --help",
        description=_DESCRIPTION,
        epilog=_EPILOG.format(tolerances=tolerances),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    default = _demo.Settings()
    add = parser.add_argument
    add(
        "--dataset",
        choices=list(_demo.DATASETS),
        default=default.dataset,
        help="handwritten digits: `digits` comes with scikit-learn; `mnist` is downloaded, and has "
        "40 times as many rows, so it takes 40 times as long (default: %(default)s)",
    )
    add(
        "--batch-size",
        type=integer_from(1),
        default=default.batch_size,
        metavar="B",
        help="rows of the big batch (default: %(default)s)",
    )
    add(
        "--accumulation-steps",
        type=integer_from(2),
        default=default.accumulation_steps,
        metavar="K",
        help="small batches per update; they have B/K rows (default: %(default)s)",
    )
    add("--epochs", type=integer_from(1), default=default.epochs, help="default: %(default)s")
    add(
        "--optimizer",
        type=str.lower,
        choices=list(_demo.OPTIMIZERS),
        default=default.optimizer,
        metavar="NAME",
        help="an optimizer of Keras, such as sgd, adamw, rmsprop (default: %(default)s)",
    )
    add(
        "--learning-rate",
        type=positive_number,
        metavar="RATE",
        help="default: that of the optimizer",
    )
    add(
        "--dtype",
        choices=list(_report.TOLERANCE),
        default=default.dtype,
        help="of weights and activations (default: %(default)s)",
    )
    add(
        "--seed",
        type=integer_from(0, 2**32 - 1),
        default=default.seed,
        help="of the split, the start weights and the order of rows (default: %(default)s)",
    )
    add(
        "--plot",
        type=plot_path,
        metavar="FILE",
        help="draw loss and memory into a file, such as demo.png (needs matplotlib)",
    )
    return parser


def _run_demo(parser: argparse.ArgumentParser, options: argparse.Namespace) -> int:
    rows, steps = options.batch_size, options.accumulation_steps
    if rows % steps:
        parser.error(
            "--batch-size must be divisible by --accumulation-steps, so that small batches line up "
            f"with the big ones. Received: --batch-size {rows} --accumulation-steps {steps}. "
            f"Pass --batch-size {rows + steps - rows % steps}."
        )
    settings = _demo.Settings(
        dataset=options.dataset,
        batch_size=rows,
        accumulation_steps=steps,
        epochs=options.epochs,
        optimizer=options.optimizer,
        learning_rate=options.learning_rate,
        dtype=options.dtype,
        seed=options.seed,
    )
    return _demo.run_demo(settings, plot=options.plot)


def _parser_of(command: str, description: str) -> argparse.ArgumentParser:
    formatter = argparse.RawDescriptionHelpFormatter
    return argparse.ArgumentParser(
        prog=f"ga_model {command}", description=description, formatter_class=formatter
    )


def _check_parser() -> argparse.ArgumentParser:
    parser = _parser_of("check", _CHECK_DESCRIPTION)
    add = parser.add_argument
    add("script", metavar="FILE.py:function", help="what returns the model and the data")
    add(
        "--batch-size",
        type=integer_from(1),
        required=True,
        metavar="B",
        help="rows per batch of `fit`",
    )
    add("--accumulation-steps", type=integer_from(1), metavar="K", help="batches per update")
    add(
        "--microbatch-size",
        type=integer_from(1),
        metavar="ROWS",
        help="rows that a batch is split into (default of both: what the model is set to)",
    )
    add(
        "--loss-over",
        choices=["auto", "microbatch", "batch"],
        help="what the loss sees at a time (default: what the model is set to)",
    )
    add(
        "--updates",
        type=integer_from(1),
        default=3,
        metavar="N",
        help="updates to compare (default: %(default)s)",
    )
    add("--json", type=path, metavar="FILE", help="write the report into a file, too")
    return parser


def _run_check(parser: argparse.ArgumentParser, options: argparse.Namespace) -> int:
    model, data = _script.load(options.script)
    settings = {name: getattr(options, name, None) for name in NAMES}
    given = {name: value for name, value in settings.items() if value is not None}
    try:
        plan = make_plan(model, data, options.batch_size, options.updates, **given)
    except (TypeError, ValueError, RuntimeError) as error:
        parser.error(str(error))
    report = _check.compare(model, plan)
    print(report)
    if options.json is not None:
        _write_json(options.json, report.to_dict())
    return 0 if report.equivalent else 1


def _bench_parser() -> argparse.ArgumentParser:
    parser = _parser_of("bench", _BENCH_DESCRIPTION)
    add = parser.add_argument
    add(
        "--models",
        nargs="+",
        choices=list(CASES),
        default=list(USUAL_CASES),
        help=f"(default: {' '.join(USUAL_CASES)})",
    )
    add(
        "--microbatches",
        nargs="+",
        type=integer_from(1),
        default=[1, 4, 16],
        metavar="K",
        help="microbatches per window (default: 1 4 16)",
    )
    add("--jit", choices=["off", "on", "both"], default="both", help="XLA (default: %(default)s)")
    add(
        "--minutes",
        type=positive_number,
        default=4.5,
        metavar="M",
        help="about how long to measure; every way is timed three times at least "
        "(default: %(default)g)",
    )
    add("--json", type=path, metavar="FILE", help="write every measurement into a file, too")
    add("--plot", type=plot_path, metavar="FILE", help="draw the ratios into a file")
    return parser


def _run_bench(parser: argparse.ArgumentParser, options: argparse.Namespace) -> int:
    try:
        from rich.console import Console
        from rich.progress import Progress
    except ImportError:
        parser.error('rich is not installed. Run: pip install "ga_model[demo]"')
    jit_compile = {"off": [False], "on": [True], "both": [False, True]}[options.jit]
    models, numbers = (list(dict.fromkeys(v)) for v in (options.models, options.microbatches))
    with Progress(console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("", total=1.0)
        measured = _bench.measure(
            models,
            sorted(numbers),
            jit_compile,
            60 * options.minutes,
            lambda text, share: bar.update(task, description=text, completed=min(share, 1.0)),
        )
    print(_bench_report.tables(measured))
    if options.json is not None:
        _write_json(options.json, _bench_report.to_dict(measured))
    if options.plot is not None:
        _bench_report.draw(measured).savefig(options.plot)
    return 0


def _write_json(file: Path, value: dict[str, Any]) -> None:
    file.write_text(json.dumps(value, indent=2) + "\n")
