"""The commands, their arguments and their help. Imports nothing slow."""

from __future__ import annotations

import argparse
import dataclasses
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ga_model import __version__
from ga_model.bench._names import NAMES, USUAL_NAMES
from ga_model.demo._options import DATASETS, TOLERANCE, Settings

# For each command: its line in the list of commands, and the text before and after its options.
COMMANDS = {
    "demo": (
        "train one network with and without accumulation, and compare",
        """\
Train one small convolutional network four times, from the same weights and on the
same samples in the same order: with full batches; with the same batches that
`ga_model.accumulate` splits into microbatches; with small batches that it
accumulates to the same updates; and with small batches alone. Then compare their
weights, peak memory and time.

Each training runs in a separate process on the CPU, to measure its peak memory.
Needs scikit-learn, for --plot also matplotlib: pip install scikit-learn matplotlib
""",
        f"""\
Exit status: 0 if both methods reproduce the weights of the full batch within the
tolerance, 1 if one does not, 2 on errors (a bad argument, a failed training).

Tolerance, on ||w - w_full|| / ||w_full - w_start|| of the worst variable:
{", ".join(f"{value:.0e} in {dtype}" for dtype, value in TOLERANCE.items())}.
Rounding depends on the order of a sum, and training amplifies it: in float32 to at
most 1e-4 with the defaults. The smallest mistake, one short batch that counts like
a full one, gives 4e-3. With lion, or at very high learning rates, float32 cannot
distinguish the two; use --dtype float64.
""",
    ),
    "check": (
        "is accumulation exact for your model? (FILE.py:function)",
        """\
Check on your own model that accumulation makes the updates of the full batch.

FILE.py:function names a function of your script, without arguments, that returns a
compiled model and some data: (model, x, y) or (model, x, y, sample_weight).
`ga_model.check_equivalence` explains the check.
""",
        "Exit status: 0 if the updates are equal, 1 if they differ, 3 if the check is\n"
        "undecided, 2 on errors (a bad argument, a script that fails).",
    ),
    "bench": (
        "time and memory, compared with plain Keras",
        """\
Time and peak memory of accumulation, side by side with plain Keras.

Every model is trained with every method. The tables show time against small batches
and against the full batch, and memory against the full batch, in percent: below 100%
is faster, or takes less memory.
""",
        "Times are measured in turns in one process per model, memory in one per method.",
    ),
}


def make_parser() -> argparse.ArgumentParser:
    """Return the parser of the command line. It sets `command` to one of `COMMANDS`."""
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(
        prog="ga_model",
        description="Exact gradient accumulation for Keras: train with the updates of a batch\n"
        "that does not fit in memory.",
        epilog="Help of a command: ga_model COMMAND --help\nIn a script: "
        "from ga_model import accumulate; model = accumulate(model, microbatch_size=16)",
        formatter_class=raw,
    )
    parser.add_argument("--version", action="version", version=f"ga_model {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for name, (line, description, epilog) in COMMANDS.items():
        command = commands.add_parser(
            name, help=line, description=description, epilog=epilog, formatter_class=raw
        )
        {"demo": _add_demo, "check": _add_check, "bench": _add_bench}[name](command)
    return parser


def _add_demo(parser: argparse.ArgumentParser) -> None:
    add, positive = parser.add_argument, _integer_from(1)
    digits = (
        "handwritten digits: `digits` comes with scikit-learn; `mnist` is downloaded, and has 40 "
        "times as many samples, so it takes 40 times as long (default: %(default)s)"
    )
    add("--dataset", choices=DATASETS, help=digits)
    rows = "samples of the full batch (default: %(default)s)"
    add("--batch-size", type=positive, metavar="B", help=rows)
    steps = "small batches per update; they have B/K samples (default: %(default)s)"
    add("--accumulation-steps", type=_integer_from(2), metavar="K", help=steps)
    add("--epochs", type=positive, help="default: %(default)s")
    optimizer = "an optimizer of Keras, such as sgd, adamw, rmsprop (default: %(default)s)"
    add("--optimizer", type=str.lower, metavar="NAME", help=optimizer)
    rate = "default: that of the optimizer"
    add("--learning-rate", type=_positive_number, metavar="RATE", help=rate)
    dtype = "of weights and activations (default: %(default)s)"
    add("--dtype", choices=list(TOLERANCE), help=dtype)
    seed = "of the split, the initial weights and the order of samples (default: %(default)s)"
    add("--seed", type=_integer_from(0, 2**32 - 1), help=seed)
    plot = "save a plot of loss and memory, such as demo.png (needs matplotlib)"
    add("--plot", type=_plot_path, metavar="FILE", help=plot)
    parser.set_defaults(**dataclasses.asdict(Settings()))


def _add_check(parser: argparse.ArgumentParser) -> None:
    add, size = parser.add_argument, _integer_from(1)
    add("script", metavar="FILE.py:function", help="a function that returns the model and data")
    add("--batch-size", type=size, required=True, metavar="B", help="samples per batch of `fit`")
    add("--accumulation-steps", type=size, metavar="K", help="batches per update")
    microbatch = "samples per microbatch (default of both: the model's settings)"
    add("--microbatch-size", type=size, metavar="M", help=microbatch)
    loss = "what the loss sees at a time (default: the model's setting)"
    add("--loss-over", choices=["auto", "microbatch", "batch"], help=loss)
    updates = "updates to compare (default: %(default)s)"
    add("--updates", type=size, default=3, metavar="N", help=updates)
    dtype = (
        "default dtype of Keras while the script creates its model; float64 has the least "
        "rounding (default: Keras's setting)"
    )
    add("--dtype", choices=["float32", "float64"], help=dtype)
    add("--table", action="store_true", help="always show the variables that differ most")
    add("--json", type=_path, metavar="FILE", help="also write the report to a file")


def _add_bench(parser: argparse.ArgumentParser) -> None:
    add, usual = parser.add_argument, list(USUAL_NAMES)
    models = f"of {', '.join(NAMES)} (default: {' '.join(usual)})"
    add("--models", nargs="+", choices=NAMES, default=usual, metavar="MODEL", help=models)
    number, numbers = _integer_from(1), "microbatches per update (default: 8)"
    add("--microbatches", nargs="+", type=number, default=[8], metavar="K", help=numbers)
    jit = "XLA (default: %(default)s, as in Keras on a CPU)"
    add("--jit", choices=["off", "on", "both"], default="off", help=jit)
    minutes = (
        "stop after about so long, and leave out what is not measured by then; it ends earlier "
        "after 20 rounds of each model (default: %(default)g)"
    )
    add("--minutes", type=_positive_number, default=10, metavar="M", help=minutes)
    add("--json", type=_path, metavar="FILE", help="also write every measurement to a file")
    add("--plot", type=_plot_path, metavar="FILE", help="save a plot of the ratios")


# Types of arguments: each returns the value, or raises an error that says what is expected.


def _number(
    kind: Callable[[str], Any], least: float, most: float, expected: str, way_out: str
) -> Callable[[str], Any]:
    def parse(text: str) -> Any:
        try:
            value = kind(text)
        except ValueError:
            value = math.nan
        if not least <= value <= most:
            raise argparse.ArgumentTypeError(f"must be {expected}. Received: {text!r}. {way_out}")
        return value

    return parse


def _integer_from(least: int, most: float = math.inf) -> Callable[[str], int]:
    """Return the argument type for integers from `least` to `most`."""
    expected = (
        f"an integer >= {least}" if most == math.inf else f"an integer from {least} to {most}"
    )
    return _number(int, least, most, expected, f"Pass {least}, for example.")


_LIMITS = math.ulp(0.0), math.nextafter(math.inf, 0.0)
_DEFAULT = "Omit the option for the default."
_positive_number = _number(float, *_LIMITS, "a positive number", _DEFAULT)


def _path(text: str) -> Path:
    """Return the path of a file in an existing folder, or raise ArgumentTypeError."""
    file = Path(text)
    if file.is_dir():
        raise argparse.ArgumentTypeError(
            f"must be a file. Received: {text!r}, which is a folder. Pass a file name."
        )
    if not file.parent.is_dir():
        raise argparse.ArgumentTypeError(
            f"must be a file in a folder that exists. Received: {text!r}. "
            f"Create the folder {str(file.parent)!r} first, or pass another path."
        )
    return file


def _plot_path(text: str) -> Path:
    """Return the path of a file in a format that matplotlib supports: see `_path`."""
    file = Path(text)
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
    except ImportError:
        raise argparse.ArgumentTypeError(
            "needs matplotlib, which is not installed. Run: pip install matplotlib"
        ) from None
    formats = FigureCanvasAgg.get_supported_filetypes()
    if file.suffix[1:].lower() not in formats:
        raise argparse.ArgumentTypeError(
            f"must end in a format that matplotlib supports: {', '.join(sorted(formats))}. "
            f"Received: {text!r}. Pass a name such as {file.stem or 'demo'}.png."
        )
    return _path(text)
