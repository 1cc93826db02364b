"""The texts of all errors and warnings, read from the code: `python docs/messages.py` prints them.

The page "All messages" of the site lists them, and a test checks that a test quotes each of them.
"""

import ast
import itertools
import re
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parent.parent
FEWEST_WORDS = 5  # of a text: shorter ones are parts of others
FIELD = "…"  # stands for a value


class Message(NamedTuple):
    """One text.

    Attributes:
        module: the file, relative to the repository.
        text: the text, with `FIELD` for each value.
    """

    module: Path
    text: str


def all_messages(package: Path = ROOT / "ga_model") -> list[Message]:
    """Return the texts of a package in the order of its modules."""
    found = []
    for path in sorted(package.rglob("*.py")):
        module = path.relative_to(package.parent)
        for node in ast.walk(ast.parse(path.read_text())):
            if _raises(node) or _makes_message(node):
                found += [Message(module, text) for text in _texts(node)]
    return list(dict.fromkeys(found))


def fragments(message: Message) -> list[str]:
    """Return all runs of three words of the text, without values."""
    parts = [part.split() for part in message.text.split(FIELD)]
    return [" ".join(p[i : i + 3]) for p in parts for i in range(len(p) - 2)]


def page() -> str:
    """Return the page in Markdown."""
    lines = [
        "# All messages",
        "",
        f"All errors and warnings, by module; {FIELD} stands for a value. Short texts are parts of "
        "others. The most common ones are explained under [questions, errors and "
        "warnings](../questions.md).",
    ]
    for module, messages in itertools.groupby(all_messages(), lambda message: message.module):
        lines += ["", f"## `{module}`", ""]
        lines += [f"* {_escaped(message.text)}" for message in messages]
    return "\n".join([*lines, ""])


def _raises(node: ast.AST) -> bool:
    """Return whether an error is raised that users may see: not one with a private name."""
    if not isinstance(node, ast.Raise):
        return False
    raised = node.exc.func if isinstance(node.exc, ast.Call) else node.exc
    return not (isinstance(raised, ast.Attribute) and raised.attr.startswith("_"))


def _makes_message(node: ast.AST) -> bool:
    return isinstance(node, ast.FunctionDef) and node.name.endswith(("_message", "_messages"))


def _texts(node: ast.AST) -> list[str]:
    """Return the texts in a function or a statement, without its docstring."""
    if isinstance(node, ast.JoinedStr):
        parts = [v.value if isinstance(v, ast.Constant) else FIELD for v in node.values]
        return _long_enough("".join(map(str, parts)))
    if isinstance(node, ast.Constant):
        return _long_enough(node.value) if isinstance(node.value, str) else []
    children = list(ast.iter_child_nodes(node))
    if isinstance(node, ast.FunctionDef) and ast.get_docstring(node) is not None:
        children.remove(node.body[0])
    return [text for child in children for text in _texts(child)]


def _long_enough(text: str) -> list[str]:
    text = " ".join(text.split())
    return [text] if len(text.replace(FIELD, "").split()) >= FEWEST_WORDS else []


def _escaped(text: str) -> str:
    """Return Markdown in which only spans of code are marked."""
    spans = re.split(r"(`[^`]*`)", text)
    return "".join(
        span if i % 2 else re.sub(r"([\\*_\[\]<>#])", r"\\\1", span) for i, span in enumerate(spans)
    )


if __name__ == "__main__":
    print(page())
