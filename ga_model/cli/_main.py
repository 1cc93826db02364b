"""The entry point of the command line. All arguments are checked before any training.

Slow imports are left to the commands (`_commands`), so `--help` answers at once.
"""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Sequence

from ga_model.cli._parser import make_parser
from ga_model.tools._process import CommandError, start_tensorflow


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line with the arguments (default: `sys.argv`); return the exit status."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    options = make_parser().parse_args(words or ["--help"])
    command = options.command
    try:
        backend = os.environ.get("KERAS_BACKEND") or "tensorflow"
        if backend == "tensorflow":
            start_tensorflow()  # before another import of it prints messages
        elif backend not in ("torch", "jax") or (backend, command) == ("jax", "bench"):
            others = "" if command == "bench" else ", or jax"
            raise CommandError(
                f"{command!r} runs on other backends of Keras. Received: "
                f"KERAS_BACKEND={backend!r}. Set it to tensorflow or torch{others}, or leave it "
                "unset."
            )
        if getattr(options, "dtype", None) == "float64" and backend != "tensorflow":
            raise CommandError(
                "--dtype float64 is for the TensorFlow backend: Keras has no float64 on others. "
                f"Received: --dtype float64 with KERAS_BACKEND={backend}. "
                "Set KERAS_BACKEND=tensorflow, or leave the option out."
            )
        from ga_model.cli import _commands

        return getattr(_commands, command)(options)  # type: ignore[no-any-return]
    except KeyboardInterrupt:
        print(f"\nga_model {command}: interrupted", file=sys.stderr)
        return 130
    except CommandError as error:
        print(f"ga_model {command}: error: {error}", file=sys.stderr)
        return 2
    except Exception:  # an error in the user's script, or a bug
        traceback.print_exc()
        return 2
