"""The documentation site: `python -m sphinx -W --keep-going -q docs docs/_build/html`."""

import os
import re
import shutil
import sys
from pathlib import Path

os.environ["KERAS_BACKEND"] = "tensorflow"
os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"
os.environ["COLUMNS"] = "88"  # of the command line's help, which this Python prints
os.environ["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
ROOT = Path(__file__).parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "docs")]
os.environ["PYTHONPATH"] = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])

import messages  # noqa: E402

import ga_model  # noqa: E402

project = "ga_model"
version = release = ga_model.__version__
copyright = "the authors of ga_model"
extensions = [
    "myst_nb",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx_copybutton",
    "sphinx_design",
    "sphinxcontrib.programoutput",
]
exclude_patterns = ["_build", "maintainers/reports"]
nitpicky = True  # a name that nothing defines is an error,
nitpick_ignore_regex = [("py:class", r"ga_model\..*\._.*")]  # but for types of private modules

# Pages are Markdown. The notebooks are shown as they were committed, and not run again.
myst_enable_extensions = ["colon_fence"]
myst_heading_anchors = 3
nb_execution_mode = "off"
nb_mime_priority_overrides = [("html", "image/png", 0)]
suppress_warnings = ["mystnb.unknown_mime_type"]
shutil.copytree(ROOT / "notebooks", Path(__file__).parent / "notebooks", dirs_exist_ok=True)
(Path(__file__).parent / "reference" / "messages.md").write_text(messages.page())

html_theme = "pydata_sphinx_theme"
html_title = "ga_model"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_sidebars = {"questions": []}  # a page without others
html_show_sourcelink = False
html_copy_source = False
html_theme_options = {
    "navigation_with_keys": False,
    "show_nav_level": 2,
    "show_toc_level": 2,
    "header_links_before_dropdown": 7,
    "footer_start": [],
    "footer_end": [],
    "secondary_sidebar_items": ["page-toc"],
}
copybutton_exclude = ".linenos, .gp, .go"

autodoc_member_order = "bysource"
toc_object_entries_show_parents = "hide"
autodoc_typehints = "none"  # the descriptions of arguments name the types
napoleon_numpy_docstring = False


def docstring_from_markdown(app, what, name, obj, options, lines):
    """Make reStructuredText of a docstring, which has Markdown's code blocks and code spans."""
    text = "\n".join(lines)
    parts = re.split(r"^( *)```python\n(.*?)^ *```$", text, flags=re.DOTALL | re.MULTILINE)
    result = [_spans(parts[0])]
    for indent, code, prose in zip(parts[1::3], parts[2::3], parts[3::3]):
        block = "".join(f"    {line}" for line in code.splitlines(keepends=True))
        result += [f"{indent}.. code-block:: python\n\n{block}", _spans(prose)]
    lines[:] = "".join(result).splitlines()


def _spans(prose):
    prose = re.sub(r"(?<!`)`([^`]+)`(?!`)", r"``\1``", prose)
    return re.sub(r"(?<!`)(\*args|\*\*kwargs|\|)(?!`)", r"\\\1", prose)


def setup(app):
    app.connect("autodoc-process-docstring", docstring_from_markdown, priority=400)
