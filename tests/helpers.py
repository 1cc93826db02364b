"""What tests of every kind use: seeds, small models and data, replicas, what was said."""

import ast
import contextlib
import functools
import os
import re
import subprocess
import sys
from pathlib import Path

import keras
import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from keras.src.backend.common import global_state

if keras.backend.backend() == "tensorflow":
    import tensorflow as tf

ROOT = Path(__file__).parent.parent

# The promise: see "What is exact" in the README.
TOLERANCE = {"float32": 1e-5, "float64": 1e-12}
LIMIT = TOLERANCE["float32"]  # where Keras has no float64


def in_the_sweep(*arguments):
    """Return a case of a parametrized test that takes too long for every run."""
    return pytest.param(*arguments, marks=pytest.mark.sweep)


num_replicas = 1  # of the models that are compared with the full batch; `--replicas` sets it


@functools.cache
def mirrored(replicas):
    """Return a strategy on so many of the three logical CPUs.

    Collective operations, TensorFlow's default, serve one number of devices per process.
    """
    operations = None if replicas == 2 else tf.distribute.ReductionToOneDevice()
    devices = [f"CPU:{i}" for i in range(replicas)]
    return tf.distribute.MirroredStrategy(devices, cross_device_ops=operations)


@functools.cache
def metrics_of_replicas_add_up():
    """Return whether plain Keras's metrics are right with several replicas: asked of Keras.

    Up to 3.9 they count the updates before once more for each replica.
    """
    with mirrored(2).scope():
        metric = keras.metrics.Mean()
    for value in (0.0, 1.0):
        mirrored(2).run(metric.update_state, (value,))
    return float(metric.result()) == 0.5


@functools.cache
def averages_activities():
    """Return whether activity regularizers are means over samples: asked of Keras.

    Up to 3.13 they are sums.
    """
    layer = keras.layers.ActivityRegularization(l2=1.0, name="asked")
    layer(np.ones((2, 1)))
    return float(layer.losses[0]) == 1.0


class MeanOfSquares(keras.regularizers.Regularizer):
    """An activity regularizer that is a mean over samples, whatever Keras makes of it."""

    def __init__(self, factor):
        self.factor = factor
        self.is_averaged = averages_activities()

    def __call__(self, x):
        total = self.factor * keras.ops.sum(keras.ops.square(x))
        if self.is_averaged:
            return total
        return total / keras.ops.cast(keras.ops.shape(x)[0], total.dtype)

    def get_config(self):
        return {"factor": self.factor}


def num_updates(optimizer):
    """Return the updates that an optimizer has made, of which a LossScaleOptimizer may not know."""
    return int(getattr(optimizer, "inner_optimizer", optimizer).iterations.numpy())


def told(caught):
    """Return what the warnings for users say, of those that were caught."""
    return [str(w.message) for w in caught if issubclass(w.category, UserWarning)]


def files_told(caught):
    """Return the files in which the warnings for users are said to be."""
    return [w.filename for w in caught if issubclass(w.category, UserWarning)]


def scope(replicas=None):
    """Return the scope to make a model in, on one device by default."""
    replicas = replicas or num_replicas
    if replicas == 1 or keras.backend.backend() == "jax":
        return contextlib.nullcontext()
    return mirrored(replicas).scope()


@contextlib.contextmanager
def sharing(devices=None):
    """Let JAX share the samples of what is trained in a block among devices, one by default."""
    devices = devices or num_replicas
    if devices == 1 or keras.backend.backend() != "jax":
        yield
        return
    distribution = keras.distribution
    names = distribution.list_devices()[:devices]
    distribution.set_distribution(distribution.DataParallel(devices=names))
    try:
        yield
    finally:
        distribution.set_distribution(None)


def relative_difference(weights, reference, start):
    """Return the largest relative difference of the weight change over all variables."""
    differences = []
    for w, r, s in zip(weights, reference, start, strict=True):
        change, error = np.linalg.norm(r - s), np.linalg.norm(w - r)
        assert np.isfinite(error)
        assert np.isfinite(change)
        differences.append(error / change if change else (0.0 if not error else np.inf))
    return max(differences)


def assert_changed(weights, start):
    assert any(np.any(w != s) for w, s in zip(weights, start, strict=True))


def values_of(variables):
    """Return copies of the values of variables, as NumPy arrays."""
    return [np.array(keras.ops.convert_to_numpy(variable)) for variable in variables]


def state_of(model):
    """Return all that training changes in a model that is compiled."""
    return values_of([*model.variables, *model.optimizer.variables, *model.metrics_variables])


def assert_equal(found, expected):
    """Compare lists of arrays, which have to be equal to the bit, up to the sign of zeros."""
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_array_equal(one, other)


def assert_close(model, reference, start, limit=None):
    """Compare the weights of two models, within the tolerance of `floatx` if no limit is given."""
    difference = relative_difference(model.get_weights(), reference.get_weights(), start)
    assert difference <= (limit or TOLERANCE[keras.config.floatx()])


def set_random_seed(seed):
    """Set all seeds, also that of `keras.random`, which Keras leaves as it is up to 3.12."""
    keras.utils.set_random_seed(seed)
    global_state.set_global_attribute("global_seed_generator", None)


def seeded(make):
    set_random_seed(1)
    return make()


class Applies(keras.layers.Layer):
    def __init__(self, function):
        super().__init__()
        self.function = function

    def call(self, x):
        return self.function(x)


def sequential(shape, *parts):
    return keras.Sequential([keras.Input(shape), *parts])


def dense_model(outputs=2):
    """A small smooth model: every gradient is far from zero."""
    hidden = keras.layers.Dense(6, activation="tanh")
    return sequential((4,), hidden, keras.layers.Dense(outputs))


def dense_data(rows, features=4, outputs=2, seed=3):
    generator = np.random.default_rng(seed)
    dtype = keras.config.floatx()
    x = generator.normal(size=(rows, features)).astype(dtype)
    y = generator.normal(size=(rows, outputs)).astype(dtype)
    return x, y


def ruled(base, weight):
    """Return a class of models of which a microbatch weighs a function of model, x and y."""

    def microbatch_weight(self, x, y=None, sample_weight=None):
        return weight(self, x, y)

    return type("Ruled", (base,), {"microbatch_weight": microbatch_weight})


class Counting(keras.Model):
    """Counts how often Python runs its `train_step`; a traced function runs it once per trace."""

    def __init__(self):
        super().__init__()
        self.dense = keras.layers.Dense(2)
        self.traces = 0

    def build(self, shape):
        self.dense.build(shape)

    def call(self, inputs):
        return self.dense(inputs)

    def train_step(self, data):
        self.traces += 1
        return super().train_step(data)


def parts_of(x, y, rows):
    return [(x[i : i + rows], y[i : i + rows]) for i in range(0, len(x), rows)]


class Batches(keras.utils.PyDataset):
    def __init__(self, parts, **kwargs):
        super().__init__(**kwargs)
        self.parts = parts

    def __len__(self):
        return len(self.parts)

    def __getitem__(self, index):
        return self.parts[index]


def examples(number, is_search=False):
    """Let hypothesis draw so many examples, and others every time if it is to search."""
    return settings(
        max_examples=number,
        derandomize=not is_search,
        print_blob=is_search,
        deadline=None,
        database=None,
        suppress_health_check=list(HealthCheck),
    )


def run_python(*arguments, **environment):
    """Run Python in a process of its own, and return what it has printed, and told as errors."""
    command = [sys.executable, *map(str, arguments)]
    given = {"env": {**os.environ, **environment}, "cwd": ROOT, "timeout": 480}
    result = subprocess.run(command, capture_output=True, text=True, check=False, **given)
    assert result.returncode == 0, result.stderr
    return result.stdout, result.stderr


def python_blocks(text):
    return re.findall(r"```python\n(.*?)```", text, flags=re.DOTALL)


def strings_in(path):
    """Yield the texts in a module but for docstrings; f-strings have `{}` for what is put in."""
    nodes = list(ast.walk(ast.parse(path.read_text())))
    docstrings = [node.value for node in nodes if isinstance(node, ast.Expr)]
    for node in nodes:
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield from [] if node in docstrings else [node.value]
        elif isinstance(node, ast.JoinedStr):
            parts = (p.value if isinstance(p, ast.Constant) else "{}" for p in node.values)
            yield "".join(parts)
