"""The command line. Every argument is checked before anything is trained.

What takes long to import is imported by the command that needs it (`_commands`), so help is there
at once.
"""

from __future__ import annotations

import argparse
import difflib
import os
import sys
import traceback
from collections.abc import Sequence

from ga_model import __version__
from ga_model.cli._parsers import COMMANDS
from ga_model.tools._errors import ToldError
from ga_model.tools._quiet import start_tensorflow

_DESCRIPTION = """\
Exact gradient accumulation for Keras: train with the updates of a batch that
does not fit in memory.

Commands:
  demo     train one network with and without accumulation, and compare
  check    is accumulation exact for your model? (FILE.py:function)
  bench    time and memory, compared with plain Keras
"""

_EPILOG = """\
Help of a command: ga_model COMMAND --help
In a script: from ga_model import accumulate; model = accumulate(model, microbatch_size=16)
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return the exit status.

    Args:
        arguments: the words after the program's name. None takes those of `sys.argv`.
    """
    words = list(sys.argv[1:] if arguments is None else arguments)
    parser = _parser()
    if not words:
        parser.print_help()
        return 0
    if words[0] not in COMMANDS:
        parser.parse_known_args(words[:1])  # which ends with the help or the version
        parser.error(_no_command_message(words[0]))
    parser = COMMANDS[words[0]]()
    options = parser.parse_args(words[1:])
    try:
        backend = os.environ.get("KERAS_BACKEND") or "tensorflow"
        if backend == "tensorflow":
            start_tensorflow()  # before anything else imports it
        elif backend not in ("torch", "jax") or (backend, words[0]) == ("jax", "bench"):
            raise ToldError(_backend_message(words[0], backend))
        from ga_model.cli import _commands

        return getattr(_commands, words[0])(parser, options)  # type: ignore[no-any-return]
    except KeyboardInterrupt:
        print(f"\n{parser.prog}: interrupted", file=sys.stderr)
        return 130
    except ToldError as error:
        print(f"{parser.prog}: error: {error}", file=sys.stderr)
        return 2
    except Exception:  # of the user's script, or a defect
        traceback.print_exc()
        return 2


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="ga_model",
        usage="%(prog)s {" + ",".join(COMMANDS) + "} [options]",
        description=_DESCRIPTION,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"ga_model {__version__}")
    return parser


def _backend_message(command: str, backend: str) -> str:
    others = "" if command == "bench" else ", or jax"
    return (
        f"{command!r} runs on other backends of Keras. Received: KERAS_BACKEND={backend!r}. "
        f"Set it to tensorflow or torch{others}, or leave it unset."
    )


def _no_command_message(word: str) -> str:
    commands = ", ".join(COMMANDS)
    if word.startswith("-"):
        expected = f"options must follow a command ({commands})"
        return (
            f"{expected}. Received: {word!r} without one. Write ga_model demo {word}, for example."
        )
    close = difflib.get_close_matches(word, COMMANDS, 1) or list(COMMANDS)
    return f"the command must be one of {commands}. Received: {word!r}. Write ga_model {close[0]}."
