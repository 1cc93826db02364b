"""Names that Keras and its backends keep private are used in four modules, and nowhere else."""

import ast
from collections import OrderedDict
from pathlib import Path

import keras
import numpy as np
import pytest

import ga_model
from ga_model.base import _internals

PACKAGE = Path(ga_model.__file__).parent
FILES = {f.relative_to(PACKAGE).as_posix(): f for f in sorted(PACKAGE.rglob("*.py"))}
INTERNALS = "base/_internals"
OVERRIDDEN = {
    "_compile_loss",
    "_loss_tracker",
    "_aggregate_additional_loss",
    "_maybe_symbolic_build",
    "_make_function",
}
# What single files may name, and no other.
IN_FILE = {
    "backends/hooks.py": OVERRIDDEN,
    "backends/tensorflow/engine.py": OVERRIDDEN,
    "__init__.py": {path.stem for path in PACKAGE.glob("*.py")},  # modules that are imported late
    "base/_names.py": {"_Arguments", "_Function"},  # type variables, which are told their names
}
# Of named tuples and of Python; and what the copy of a compiled loss has in its `__dict__`.
OTHERS = {"_replace", "_asdict", "_fields", "_getframe", "_terms"}


def is_private(name):
    return name.startswith("_") and name.isidentifier() and name.strip("_") and name[:2] != "__"


def defined_in(tree):
    """Yield the private names that classes define: in their bodies, and as attributes of `self`."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef):
            for part in node.body:
                targets = getattr(part, "targets", [getattr(part, "target", None)])
                yield from (target.id for target in targets if isinstance(target, ast.Name))
                if isinstance(part, ast.FunctionDef):
                    yield part.name
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield from [node.attr] if ast.unparse(node.value) == "self" else []


def used_in(tree):
    """Yield line and name of attributes, of texts that may be names of such, and of imports."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            yield node.lineno, node.attr
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.lineno, node.value
        elif isinstance(node, ast.ImportFrom):
            yield from ((node.lineno, f"{node.module}.{alias.name}") for alias in node.names)
        elif isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)


def foreign_names(sources):
    """Return places and private names in sources, by their names, that are not their own."""
    trees = {name: ast.parse(source) for name, source in sources.items()}
    own = {name for tree in trees.values() for name in defined_in(tree)} - OVERRIDDEN | OTHERS
    return [
        f"{file}:{line} {name}"
        for file, tree in trees.items()
        for line, name in used_in(tree)
        if name.startswith(("keras.src", "tensorflow.python"))
        or (is_private(name) and name not in own | IN_FILE.get(file, set()))
    ]


def test_private_names_of_keras_are_used_in_modules_for_them():
    found = foreign_names({name: path.read_text() for name, path in FILES.items()})
    assert [name for name in found if not name.startswith(INTERNALS)] == []
    assert len([name for name in found if name.startswith(INTERNALS)]) > 20


@pytest.mark.every_case
@pytest.mark.parametrize(
    ("source", "is_foreign"),
    [
        ("layers = model._flatten_layers()", True),
        ("loss = self._compile_loss", True),
        ("mask = getattr(tensor, '_keras_mask', None)", True),
        ("loss = vars(model)['_compile_loss']", True),
        ("from keras.src.backend.tensorflow.trainer import reduce_per_replica", True),
        ("import tensorflow.python.eager.record", True),
        ("class A:\n    def _f(self): ...\nA()._f()", False),
        ("class A:\n    _size = 1\nA()._size", False),
        ("class A:\n    def __init__(self): self._size = 1\nA()._size", False),
        ("entry._replace(loss=None)", False),
        ("name.__dict__, '__module__', '_'", False),
        ("from ga_model.check._plan import run", False),
    ],
)
def test_private_names_are_found_and_own_ones_are_not(source, is_foreign):
    assert bool(foreign_names({"_step.py": source})) == is_foreign


def test_a_name_is_found_that_a_module_or_a_function_of_ours_has_too():
    sources = {"_step.py": "layer._losses, layer._build()", "_losses.py": "def _build(): ..."}
    assert foreign_names(sources) == ["_step.py:1 _losses", "_step.py:1 _build"]


def test_the_global_seed_is_the_one_that_draws():
    keras.utils.set_random_seed(1)
    _internals.set_global_seed(None)
    keras.random.normal((2,))
    made = _internals.global_seed()
    state = keras.ops.convert_to_numpy(made.state)
    keras.random.normal((2,))
    assert _internals.global_seed() is made
    assert (keras.ops.convert_to_numpy(made.state) != state).any()


@pytest.mark.every_case
@pytest.mark.skipif(keras.backend.backend() != "tensorflow", reason="iterators of TensorFlow")
@pytest.mark.parametrize("kind", [tuple, dict, OrderedDict, "ragged"])
def test_elements_of_a_dataset_are_those_of_its_iterator(kind):
    import tensorflow as tf

    from ga_model.base import _internals_tf

    x = np.arange(5.0)
    data = {"z": x, "a": x + 10}
    if kind == "ragged":
        data["b"] = tf.ragged.range(np.arange(5))
    data = tuple(data.values()) if kind is tuple else data if kind == "ragged" else kind(data)
    dataset = tf.data.Dataset.from_tensor_slices(data).batch(2)
    expected, found = list(dataset), list(_internals_tf.elements_of(iter(dataset)))
    assert [type(element) for element in found] == [type(element) for element in expected]
    assert repr(found) == repr(expected)  # structure, values and shapes
