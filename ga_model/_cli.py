"""The command line. Every argument is checked here, before anything is trained."""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from ga_model import _demo, _report

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


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return the exit status.

    Args:
        arguments: the words after the program's name. None takes those of `sys.argv`.
    """
    parser = _make_parser()
    options = parser.parse_args(arguments)
    command: Callable[[argparse.ArgumentParser, argparse.Namespace], int] = options.command
    try:
        return command(parser, options)
    except _demo.DemoError as error:
        print(f"{parser.prog}: error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(f"\n{parser.prog}: interrupted", file=sys.stderr)
        return 130


def _make_parser() -> argparse.ArgumentParser:
    """Return the parser. `command` of its namespace is the function that does the job."""
    tolerances = ", ".join(f"{value:.0e} in {dtype}" for dtype, value in _report.TOLERANCE.items())
    parser = argparse.ArgumentParser(
        prog="ga_model",
        usage="%(prog)s [options]",
        description=_DESCRIPTION,
        epilog=_EPILOG.format(tolerances=tolerances),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    _add_demo_options(parser)
    parser.set_defaults(command=_run_demo)
    return parser


def _add_demo_options(parser: argparse.ArgumentParser) -> None:
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
        type=_integer_from(1),
        default=default.batch_size,
        metavar="B",
        help="rows of the big batch (default: %(default)s)",
    )
    add(
        "--accumulation-steps",
        type=_integer_from(2),
        default=default.accumulation_steps,
        metavar="K",
        help="small batches per update; they have B/K rows (default: %(default)s)",
    )
    add("--epochs", type=_integer_from(1), default=default.epochs, help="default: %(default)s")
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
        type=_learning_rate,
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
        type=_integer_from(0, 2**32 - 1),
        default=default.seed,
        help="of the split, the start weights and the order of rows (default: %(default)s)",
    )
    add(
        "--plot",
        type=_plot_path,
        metavar="FILE",
        help="draw loss and memory into a file, such as demo.png (needs matplotlib)",
    )


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


def _integer_from(least: int, most: int | None = None) -> Callable[[str], int]:
    expected = f"an integer >= {least}" if most is None else f"an integer from {least} to {most}"

    def parse(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            value = least - 1
        if value < least or (most is not None and value > most):
            raise argparse.ArgumentTypeError(f"must be {expected}. Received: {text!r}.")
        return value

    return parse


def _learning_rate(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0.0 < value < math.inf:
        raise argparse.ArgumentTypeError(
            f"must be a positive number. Received: {text!r}. "
            "Leave it out for the optimizer's default."
        )
    return value


def _plot_path(text: str) -> Path:
    path = Path(text)
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
    except ImportError:
        raise argparse.ArgumentTypeError(
            'needs matplotlib, which is not installed. Run: pip install "ga_model[demo]"'
        ) from None
    formats = FigureCanvasAgg.get_supported_filetypes()
    if path.suffix[1:].lower() not in formats:
        raise argparse.ArgumentTypeError(
            f"must end in a format that matplotlib writes: {', '.join(sorted(formats))}. "
            f"Received: {text!r}. Pass a name such as {path.stem or 'demo'}.png."
        )
    if path.is_dir() or not path.parent.is_dir():
        raise argparse.ArgumentTypeError(
            f"must be a file in a folder that exists. Received: {text!r}. "
            f"Create the folder {str(path.parent)!r} first, or pass another name."
        )
    return path
