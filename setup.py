"""Make what a package index shows of the README, where its relative links lead nowhere."""

import re
from pathlib import Path


def description() -> str:
    """Return the README with the text of relative links and images in their place."""
    readme = (Path(__file__).parent / "README.md").read_text()
    readme = re.sub(r'<img src="(?!https?:)[^>]*\balt="([^"]*)"[^>]*>', r"*\1*", readme)
    return re.sub(r"\[([^\]]*)\]\((?!https?:)[^)]*\)", r"\1", readme)


if __name__ == "__main__":
    from setuptools import setup

    setup(long_description=description())
