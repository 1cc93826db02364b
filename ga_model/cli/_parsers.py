"""The arguments of each command, and their help. Imports nothing that takes long."""

from __future__ import annotations

import argparse
from collections.abc import Callable

from ga_model.bench._names import NAMES, USUAL_NAMES
from ga_model.cli._arguments import integer_from, path, plot_path, positive_number
from ga_model.demo._options import DATASETS, TOLERANCE, Settings

_DEMO = """\
Train one small convolutional network four times, from the same weights and on the
same samples in the same order: with full batches; with the same batches that
`ga_model.accumulate` splits into microbatches; with small batches that it
accumulates to the same updates; and with small batches alone. Then compare their
weights, peak memory and time.

Each training runs in a separate process on the CPU, to measure its peak memory.
To install what it needs: pip install "ga_model[demo]"
"""

_AFTER_DEMO = """\
Exit status: 0 if both methods reproduce the weights of the full batch within the
tolerance, 1 if one does not, 2 on errors (a bad argument, a failed training).

Tolerance, on ||w - w_full|| / ||w_full - w_start|| of the worst variable:
{tolerances}.
Rounding depends on the order of a sum, and training amplifies it: in float32 to at
most 1e-4 with the defaults. The smallest mistake, one short batch that counts like
a full one, gives 4e-3. With lion, or at very high learning rates, float32 cannot
distinguish the two; use --dtype float64.
"""

_CHECK = """\
Check on your own model that accumulation makes the updates of the full batch.

FILE.py:function names a function of your script, without arguments, that returns a
compiled model and some data: (model, x, y) or (model, x, y, sample_weight). The file
is imported and the function is called; `ga_model.check_equivalence` explains the
check.
"""

_AFTER_CHECK = """\
Exit status: 0 if the updates are equal, 1 if they differ, 3 if the check is
undecided, 2 on errors (a bad argument, a script that fails).
"""

_BENCH = """\
Time and peak memory of accumulation, side by side with plain Keras.

Every model is trained with every method; the tables show ratios to plain Keras with
batches of the size of a microbatch: below 1 is faster, or takes less memory. To
install what it needs: pip install "ga_model[demo]"
"""

_AFTER_BENCH = """\
Times are measured in turns, round after round, in one process per model; the tables
show the median of the rounds' ratios, +- half of the distance between their quartiles.
Memory is the peak that creating and training the model adds in a separate process.
"""


def _parser_of(command: str, description: str, epilog: str) -> argparse.ArgumentParser:
    return argparse.ArgumentParser(
        prog=f"ga_model {command}",
        description=description,
        epilog=epilog,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )


def _demo_parser() -> argparse.ArgumentParser:
    tolerances = ", ".join(f"{value:.0e} in {dtype}" for dtype, value in TOLERANCE.items())
    parser = _parser_of("demo", _DEMO, _AFTER_DEMO.format(tolerances=tolerances))
    default = Settings()
    add = parser.add_argument
    add(
        "--dataset",
        choices=DATASETS,
        default=default.dataset,
        help="handwritten digits: `digits` comes with scikit-learn; `mnist` is downloaded, and has "
        "40 times as many samples, so it takes 40 times as long (default: %(default)s)",
    )
    add(
        "--batch-size",
        type=integer_from(1),
        default=default.batch_size,
        metavar="B",
        help="samples of the full batch (default: %(default)s)",
    )
    add(
        "--accumulation-steps",
        type=integer_from(2),
        default=default.accumulation_steps,
        metavar="K",
        help="small batches per update; they have B/K samples (default: %(default)s)",
    )
    add("--epochs", type=integer_from(1), default=default.epochs, help="default: %(default)s")
    add(
        "--optimizer",
        type=str.lower,
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
        choices=list(TOLERANCE),
        default=default.dtype,
        help="of weights and activations (default: %(default)s)",
    )
    add(
        "--seed",
        type=integer_from(0, 2**32 - 1),
        default=default.seed,
        help="of the split, the initial weights and the order of samples (default: %(default)s)",
    )
    add(
        "--plot",
        type=plot_path,
        metavar="FILE",
        help="save a plot of loss and memory, such as demo.png (needs matplotlib)",
    )
    return parser


def _check_parser() -> argparse.ArgumentParser:
    parser = _parser_of("check", _CHECK, _AFTER_CHECK)
    add = parser.add_argument
    add("script", metavar="FILE.py:function", help="a function that returns the model and data")
    add(
        "--batch-size",
        type=integer_from(1),
        required=True,
        metavar="B",
        help="samples per batch of `fit`",
    )
    add("--accumulation-steps", type=integer_from(1), metavar="K", help="batches per update")
    add(
        "--microbatch-size",
        type=integer_from(1),
        metavar="M",
        help="samples per microbatch (default of both: the model's settings)",
    )
    add(
        "--loss-over",
        choices=["auto", "microbatch", "batch"],
        help="what the loss sees at a time (default: the model's setting)",
    )
    add(
        "--updates",
        type=integer_from(1),
        default=3,
        metavar="N",
        help="updates to compare (default: %(default)s)",
    )
    add(
        "--dtype",
        choices=["float32", "float64"],
        help="default dtype of Keras while the script creates its model; float64 has the least "
        "rounding (default: Keras's setting)",
    )
    add("--table", action="store_true", help="always show the variables that differ most")
    add("--json", type=path, metavar="FILE", help="also write the report to a file")
    return parser


def _bench_parser() -> argparse.ArgumentParser:
    parser = _parser_of("bench", _BENCH, _AFTER_BENCH)
    add = parser.add_argument
    add(
        "--models",
        nargs="+",
        choices=NAMES,
        default=list(USUAL_NAMES),
        metavar="MODEL",
        help=f"of {', '.join(NAMES)} (default: {' '.join(USUAL_NAMES)})",
    )
    add(
        "--microbatches",
        nargs="+",
        type=integer_from(1),
        default=[1, 4, 16],
        metavar="K",
        help="microbatches per window (default: 1 4 16)",
    )
    add("--jit", choices=["off", "on", "both"], help="XLA (default: both; on PyTorch off)")
    add(
        "--minutes",
        type=positive_number,
        default=4.5,
        metavar="M",
        help="about how long to measure; every method is timed at least three times "
        "(default: %(default)g)",
    )
    add("--json", type=path, metavar="FILE", help="also write every measurement to a file")
    add("--plot", type=plot_path, metavar="FILE", help="save a plot of the ratios")
    return parser


COMMANDS: dict[str, Callable[[], argparse.ArgumentParser]] = {
    "demo": _demo_parser,
    "check": _check_parser,
    "bench": _bench_parser,
}
