"""With accumulation_steps=1 training is plain Keras to the bit; the model always looks plain."""

import copy
import json
import pickle
import subprocess
import sys
import zipfile

import h5py
import keras
import numpy as np
import pytest
from helpers import dense_data, dense_model, seeded
from zoo import ZOO

from ga_model import AccumulatingModel, accumulate


@pytest.mark.filterwarnings("ignore:Gradients do not exist for variables:UserWarning:keras")
@pytest.mark.parametrize("jit_compile", [False, True])
@pytest.mark.parametrize("name", ZOO)
def test_one_batch_per_window_is_plain_keras_to_the_bit(name, jit_compile):
    make, _, make_data = ZOO[name]
    x, y = make_data(30)
    trained = []
    for wrap in (lambda m: m, lambda m: accumulate(m, accumulation_steps=1)):
        model = wrap(seeded(make))
        model.compile("adam", "mse", jit_compile=jit_compile)
        keras.utils.set_random_seed(3)
        model.fit(x, y, batch_size=8, epochs=2, verbose=0)
        trained.append([*model.get_weights(), *(v.numpy() for v in model.optimizer.variables)])
    for w, expected in zip(*trained, strict=True):
        np.testing.assert_array_equal(w, expected)


def test_windows_of_one_batch_in_between_are_plain_keras_to_the_bit():
    x, y = dense_data(32)
    plain, model = seeded(dense_model), accumulate(seeded(dense_model), accumulation_steps=3)
    for m in (plain, model):
        m.compile("adam", "mse")
    model.train_on_batch(x[:4], y[:4])
    model.close_window()  # a window of one microbatch, made by the accumulating function
    plain.train_on_batch(x[:4], y[:4])
    model.accumulation_steps = 1
    for m in (plain, model):
        m.fit(x, y, batch_size=4, shuffle=False, verbose=0)
    for w, expected in zip(model.get_weights(), plain.get_weights(), strict=True):
        np.testing.assert_array_equal(w, expected)


class Net(keras.Model):
    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.hidden = keras.layers.Dense(6, activation="tanh")
        self.head = keras.layers.Dense(2)

    def call(self, inputs):
        return self.head(self.hidden(inputs))


class AccumulatingNet(AccumulatingModel, Net):
    pass


@keras.saving.register_keras_serializable("tests")
class SavedNet(AccumulatingModel, keras.Model):
    def __init__(self, units=6, **kwargs):
        super().__init__(**kwargs)
        self.units = units
        self.hidden = keras.layers.Dense(units, activation="tanh")
        self.head = keras.layers.Dense(2)

    def call(self, inputs):
        return self.head(self.hidden(inputs))

    def get_config(self):
        return {**super().get_config(), "units": self.units}


@pytest.mark.parametrize("style", ["wrap", "subclass"])
def test_the_model_has_the_plain_models_weights_summary_and_weight_file(style, tmp_path):
    x, y = dense_data(28)
    seen = []
    for accumulates in (False, True):
        keras.utils.clear_session()  # so that both number their layers from the start
        m = seeded(AccumulatingNet if accumulates and style == "subclass" else Net)
        m.name = "net"
        if accumulates:
            m = accumulate(m, accumulation_steps=3)
        m.compile(keras.optimizers.Adam(name="adam"), "mse")
        m.fit(x, y, batch_size=4, epochs=2, shuffle=False, verbose=0)
        path = tmp_path / "model.weights.h5"
        m.save_weights(path)
        with h5py.File(path) as file:
            keys = []
            file.visit(keys.append)
        lines = []
        m.summary(print_fn=lambda line, lines=lines: lines.append(line))
        summary = [line.replace(AccumulatingNet.__name__, Net.__name__) for line in lines]
        seen.append(
            {
                "weights": [w.path for w in m.weights],
                "variables": [(v.path, v.shape) for v in m.variables],
                "optimizer": [(v.path, v.shape) for v in m.optimizer.variables],
                "parameters": m.count_params(),
                "summary": summary,
                "file": keys,
                "metrics": m.metrics_names,
            }
        )
    assert seen[1] == seen[0]


def without_object_ids(config):
    """Drop what differs between any two objects: Keras writes `id(...)` of shared ones."""
    if isinstance(config, dict):
        return {k: without_object_ids(v) for k, v in config.items() if k != "shared_object_id"}
    return [without_object_ids(v) for v in config] if isinstance(config, list) else config


@pytest.mark.parametrize("when", ["before compile", "after compile"])
def test_a_wrapped_models_file_is_the_plain_models_file(when, tmp_path):
    x, y = dense_data(24)
    configs = []
    for wrap in (False, True):
        keras.utils.clear_session()
        model = seeded(dense_model)
        if wrap and when == "before compile":
            model = accumulate(model, accumulation_steps=3)
        model.compile(keras.optimizers.Adam(), "mse", metrics=["mae"])
        if wrap and when == "after compile":
            model = accumulate(model, accumulation_steps=3)
        model.fit(x, y, batch_size=4, verbose=0)
        model.save(tmp_path / "model.keras")
        with zipfile.ZipFile(tmp_path / "model.keras") as file:
            configs.append(without_object_ids(json.loads(file.read("config.json"))))
    assert configs[1] == configs[0]
    assert "ga_model" not in json.dumps(configs[1])


def test_a_wrapped_models_file_opens_where_the_package_is_not_installed(tmp_path):
    x, y = dense_data(24)
    model = accumulate(dense_model(), accumulation_steps=3)
    model.compile("adam", "mse")
    model.fit(x, y, batch_size=4, verbose=0)
    model.save(tmp_path / "model.keras")
    np.save(tmp_path / "x.npy", x)
    script = (
        "import sys; sys.modules['ga_model'] = None\n"  # any import of it fails
        "import keras, numpy as np\n"
        f"model = keras.models.load_model({str(tmp_path / 'model.keras')!r})\n"
        f"y = model.predict(np.load({str(tmp_path / 'x.npy')!r}))\n"
        f"np.save({str(tmp_path / 'y.npy')!r}, y)\n"
        "assert int(model.optimizer.iterations) == 2, model.optimizer.iterations\n"
    )
    subprocess.run([sys.executable, "-c", script], check=True, capture_output=True, timeout=120)
    np.testing.assert_array_equal(np.load(tmp_path / "y.npy"), model.predict(x, verbose=0))


def test_a_subclass_round_trips_with_its_settings_and_optimizer_state(tmp_path):
    x, y = dense_data(24)
    model = SavedNet(units=5)
    model.compile("adam", "mse", accumulation_steps=3)
    model.fit(x, y, batch_size=4, shuffle=False, verbose=0)
    model.save(tmp_path / "model.keras")
    loaded = keras.models.load_model(tmp_path / "model.keras")
    assert type(loaded) is SavedNet
    assert loaded.accumulation_steps == 3
    for m in (model, loaded):
        m.fit(x, y, batch_size=4, shuffle=False, verbose=0)
    assert loaded.optimizer.iterations == 4
    for w, expected in zip(loaded.get_weights(), model.get_weights(), strict=True):
        np.testing.assert_array_equal(w, expected)


@keras.saving.register_keras_serializable("tests")
class OwnCompile(keras.Sequential):
    """Its `compile` is its own, with the two methods that Keras asks for then."""

    def compile(self, rate):
        super().compile(keras.optimizers.SGD(rate), "mse")
        self.rate = rate

    def get_compile_config(self):
        return {"rate": self.rate}

    def compile_from_config(self, config):
        self.compile(config["rate"])


@keras.saving.register_keras_serializable("tests")
class AccumulatingOwnCompile(AccumulatingModel, OwnCompile):
    pass


def test_a_compile_of_the_users_own_round_trips(tmp_path):
    model = AccumulatingOwnCompile([keras.Input((4,)), keras.layers.Dense(2)])
    model.compile(rate=0.25, accumulation_steps=3)
    model.save(tmp_path / "model.keras")
    loaded = keras.models.load_model(tmp_path / "model.keras")
    assert loaded.compiled
    assert loaded.rate == 0.25
    assert loaded.accumulation_steps == 3


@pytest.mark.parametrize("how", [copy.copy, copy.deepcopy, keras.models.clone_model, "pickle"])
def test_copies_of_a_wrapped_model_are_plain_models(how):
    x, y = dense_data(24)
    model = accumulate(dense_model(), accumulation_steps=3)
    model.compile("adam", "mse")
    model.fit(x, y, batch_size=4, verbose=0)
    made = pickle.loads(pickle.dumps(model)) if how == "pickle" else how(model)
    assert type(made) is keras.Sequential
    if how is not keras.models.clone_model:
        np.testing.assert_array_equal(made.predict(x, verbose=0), model.predict(x, verbose=0))
        assert made.optimizer.iterations == 2


def test_the_optimizer_is_the_users_own_object():
    optimizer = keras.optimizers.Adam()
    before = dict(vars(optimizer))
    model = accumulate(dense_model(), accumulation_steps=3)
    model.compile(optimizer, "mse")
    assert model.optimizer is optimizer
    assert vars(optimizer).keys() == before.keys()
    x, y = dense_data(24)
    model.fit(x, y, batch_size=4, verbose=0)
    assert model.optimizer is optimizer
    assert "apply" not in vars(optimizer)
    assert type(optimizer) is keras.optimizers.Adam
