"""Every error and warning is provoked by a test, which quotes what it says."""

import runpy
from pathlib import Path

from helpers import ROOT, strings_in

messages = runpy.run_path(str(ROOT / "docs" / "messages.py"))
MESSAGES = messages["all_messages"]()
FILES = sorted((ROOT / "tests").rglob("*.py"))
# Each text as one line, without what regular expressions have put before characters.
TEXTS = (text.replace("\\", "").split() for path in FILES for text in strings_in(path))
TESTS = "\n".join(" ".join(words) for words in TEXTS)


def test_every_message_is_quoted_by_a_test():
    unquoted = []
    for message in MESSAGES:
        fragments = messages["fragments"](message)
        if fragments and not any(fragment in TESTS for fragment in fragments):
            unquoted.append(message.text)
    assert unquoted == []


def test_a_message_that_no_test_quotes_is_found(tmp_path):
    package = tmp_path / "package"
    package.mkdir()
    words = ["Never", "said", "anywhere:"]
    text = f"{' '.join(words)} {{x!r}} of these."
    (package / "module.py").write_text(f'def f(x):\n    """Say it."""\n    raise E(f"{text}")\n')
    (message,) = messages["all_messages"](package)
    assert message == (Path("package/module.py"), f"{' '.join(words)} … of these.")
    assert messages["fragments"](message) == [" ".join(words)]
    assert " ".join(words) not in TESTS


def test_the_page_has_all_texts():
    page = messages["page"]()
    assert page.count("\n* ") == len(MESSAGES)
    assert "\n## `ga_model/core/messages.py`\n" in page
