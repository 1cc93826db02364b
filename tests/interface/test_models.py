"""Both styles, their files and exports, and what is refused or warned of."""

import json
import zipfile

import h5py
import keras
import numpy as np
import pytest
import tensorflow as tf
import zoo
from case import MSE
from helpers import TOLERANCE, assert_close, dense_data, dense_model, files_told, run_python, seeded
from training import train_pair

from ga_model import AccumulatingModel, accumulate
from ga_model.base import _validate


class Subclassed(AccumulatingModel, zoo.LazilyBuilt):
    pass


class Functional(AccumulatingModel, keras.Model):
    pass


def functional_call_of_a_subclass():
    inputs = keras.Input((4,))
    return Functional(inputs, dense_model()(inputs))


@pytest.mark.gate
def test_both_styles_live_in_one_process(float64):
    """Keras rewrites the bases of a class that is called with functional arguments, for good."""
    bases = AccumulatingModel.__bases__
    assert not any(issubclass(base, keras.Model) for base in bases)
    for make in (functional_call_of_a_subclass, Subclassed):
        assert_close(*train_pair(make, MSE, dense_data(34), rows=4, steps=3))
    assert AccumulatingModel.__bases__ == bases
    assert Subclassed.__bases__ == (AccumulatingModel, zoo.LazilyBuilt)


def test_accumulate_returns_the_same_object_with_the_same_parts():
    model = dense_model()
    layers, weights = model.layers, [id(w) for w in model.weights]
    wrapped = accumulate(model, accumulation_steps=2)
    assert wrapped is model
    assert isinstance(model, AccumulatingModel)
    assert isinstance(model, keras.Sequential)
    assert model.__class__ is keras.Sequential
    assert model.layers == layers
    assert [id(w) for w in model.weights] == weights
    assert accumulate(model, accumulation_steps=5) is model
    assert model.accumulation_steps == 5
    assert accumulate(model).accumulation_steps == 5


def without_object_ids(config):
    """Drop what differs between any two objects: Keras writes `id(...)` of shared ones."""
    if isinstance(config, dict):
        return {k: without_object_ids(v) for k, v in config.items() if k != "shared_object_id"}
    return [without_object_ids(v) for v in config] if isinstance(config, list) else config


@pytest.mark.gate
@pytest.mark.parametrize("style", ["wrap", "wrap when compiled", "subclass"])
def test_the_model_has_the_plain_models_parts_summary_and_files(style, tmp_path):
    settings = {"accumulation_steps": 3, "microbatch_size": 2, "skip_nonfinite": True}
    x, y = dense_data(28)
    seen = []
    for accumulates in (False, True):
        keras.utils.clear_session()  # so that both number their layers from the start
        m = seeded(Subclassed if accumulates and style == "subclass" else zoo.LazilyBuilt)
        m.name = "net"
        if accumulates and style != "wrap when compiled":
            m = accumulate(m, **settings)
        optimizer = keras.optimizers.Adam(name="adam")
        m.compile(optimizer, "mse")
        if accumulates:
            m = accumulate(m, **settings)
        m.fit(x, y, batch_size=4, epochs=2, shuffle=False, verbose=0)
        assert m.optimizer is optimizer
        checkpoint = tf.train.Checkpoint(model=m).write(str(tmp_path / "checkpoint"))
        path = tmp_path / "model.weights.h5"
        m.save_weights(path)
        with h5py.File(path) as file:
            keys = []
            file.visit(keys.append)
        m.save(tmp_path / "model.keras")
        with zipfile.ZipFile(tmp_path / "model.keras") as file:
            config = file.read("config.json").decode()
        if accumulates and style != "subclass":
            assert "ga_model" not in config
        lines = []
        m.summary(print_fn=lambda line, lines=lines: lines.append(line))
        names = Subclassed.__name__, zoo.LazilyBuilt.__name__
        summary = [line.replace(*names) for line in lines]
        seen.append(
            {
                "weights": [w.path for w in m.weights],
                "variables": [(v.path, v.shape) for v in m.variables],
                "optimizer": [(v.path, v.shape) for v in m.optimizer.variables],
                "parameters": m.count_params(),
                "summary": summary,
                "file": keys,
                "config": style == "subclass" or without_object_ids(json.loads(config)),
                "metrics": m.metrics_names,
                "attributes": vars(m).keys() - {"_accumulation"},
                "attributes of the optimizer": vars(optimizer).keys(),
                "tracked": m._trackable_children().keys(),
                "checkpoint": sorted(tf.train.list_variables(checkpoint)),
            }
        )
    assert seen[1] == seen[0]


# Files and exports.


class Net(AccumulatingModel, keras.Sequential):
    pass


class CompilesByNumber(keras.Sequential):
    """Its `compile` is its own, with the two methods that Keras asks for then."""

    def compile(self, accum_steps):
        super().compile("sgd", "mse")
        self.accum_steps = accum_steps

    def get_compile_config(self):
        return {"accum_steps": self.accum_steps}

    def compile_from_config(self, config):
        self.compile(config["accum_steps"])


@keras.saving.register_keras_serializable("tests")
class OwnCompile(AccumulatingModel, CompilesByNumber):
    pass


def test_a_compile_of_the_users_own_may_take_any_names_and_round_trips(tmp_path):
    model = OwnCompile([keras.Input((4,)), keras.layers.Dense(2)])
    model.compile(accum_steps=5, accumulation_steps=3)
    model.save(tmp_path / "model.keras")
    loaded = keras.models.load_model(tmp_path / "model.keras")
    assert (loaded.compiled, loaded.accum_steps, loaded.accumulation_steps) == (True, 5, 3)


@pytest.mark.gate
@pytest.mark.parametrize("style", ["wrapped", "subclass"])
def test_an_exported_model_serves_where_the_package_is_not_installed(style, tmp_path, float64):
    x, y = dense_data(24)
    model = accumulate(dense_model()) if style == "wrapped" else Net(dense_model().layers)
    model.accumulation_steps = 3
    model.compile("adam", "mse")
    model.fit(x, y, batch_size=4, epochs=2, shuffle=False, verbose=0)
    model.export(tmp_path / "exported", verbose=False)
    np.save(tmp_path / "x.npy", x)
    script = (
        "import sys; sys.modules['ga_model'] = sys.modules['keras'] = None\n"
        "import numpy as np, tensorflow as tf\n"
        f"model = tf.saved_model.load({str(tmp_path / 'exported')!r})\n"
        f"y = model.serve(np.load({str(tmp_path / 'x.npy')!r}))\n"
        f"np.save({str(tmp_path / 'y.npy')!r}, y)\n"
    )
    run_python("-c", script)
    expected = model.predict(x, verbose=0)
    np.testing.assert_allclose(np.load(tmp_path / "y.npy"), expected, rtol=TOLERANCE[float64])


# What is checked at import.

IMPORTS = """
try:
    from ga_model import accumulate
except (ImportError, RuntimeError) as e:
    print(e)
"""


@pytest.mark.gate
def test_another_backend_is_refused_at_import():
    out, _ = run_python("-c", "import keras; keras.backend.backend = lambda: 'numpy'\n" + IMPORTS)
    assert "Received: keras.backend.backend()='numpy'" in out
    assert "Set the environment variable KERAS_BACKEND to one of them" in out


@pytest.mark.sweep
@pytest.mark.parametrize(
    ("name", "version"), [("keras", "3.7.0"), ("tensorflow", "2.17.1"), ("keras", "2.15.0")]
)
def test_a_release_that_is_too_old_is_refused_at_import(name, version, tmp_path):
    metadata = tmp_path / f"{name}-{version}.dist-info" / "METADATA"
    metadata.parent.mkdir()
    metadata.write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    out, _ = run_python("-c", f"import sys; sys.path.insert(0, {str(tmp_path)!r})\n" + IMPORTS)
    needed = {"keras": "keras>=3.8", "tensorflow": "tensorflow>=2.18"}[name]
    assert out == f"`ga_model` needs {needed}. Received: {version}. Run `pip install '{needed}'`.\n"


def test_newer_releases_than_those_that_were_tried_are_let_through(monkeypatch):
    monkeypatch.setattr("importlib.metadata.version", lambda name: "3.99.0.dev2")
    _validate.check_releases()


def test_the_checks_import_neither_tensorflow_nor_keras():
    code = f"import runpy, sys; runpy.run_path({_validate.__file__!r}); "
    run_python("-c", f"{code}assert not {{'tensorflow', 'keras'}} & set(sys.modules)")


# Warnings.


class NormalizedWhenBuilt(keras.Model):
    def build(self, shape):
        self.norm = keras.layers.BatchNormalization(name="late")
        self.inner = keras.Sequential([keras.layers.BatchNormalization(name="inner")])
        self.norm.build(shape), self.inner.build(shape)

    def call(self, inputs, training=None):
        return self.inner(self.norm(inputs, training=training), training=training)


@pytest.mark.parametrize("is_wrapped", [False, True])
def test_batch_normalization_is_named_once_where_the_user_trains(is_wrapped):
    model = accumulate(NormalizedWhenBuilt()) if is_wrapped else NormalizedWhenBuilt()
    model.compile("sgd", "mse")
    x, _ = dense_data(12)
    model.fit(x, x, verbose=0)  # it says nothing yet
    accumulate(model, accumulation_steps=3)
    with pytest.warns(UserWarning, match=r"\['late', 'inner'\]") as caught:
        model.fit(x, x, batch_size=4, epochs=2, verbose=0)
    assert files_told(caught) == [__file__]
    model.fit(x, x, batch_size=4, epochs=2, verbose=0)  # now a warning is an error
