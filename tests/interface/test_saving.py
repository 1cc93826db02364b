"""Files, copies, exports: a wrapped model's are the plain one's, a subclass keeps its settings."""

import keras
import numpy as np
import pytest
from helpers import TOLERANCE, dense_data, dense_model, run_python

from ga_model import AccumulatingModel, accumulate


class Subclass(AccumulatingModel, keras.Sequential):
    pass


class CompilesByRate(keras.Sequential):
    """Its `compile` is its own, with the two methods that Keras asks for then."""

    def compile(self, rate):
        super().compile(keras.optimizers.SGD(rate), "mse")
        self.rate = rate

    def get_compile_config(self):
        return {"rate": self.rate}

    def compile_from_config(self, config):
        self.compile(config["rate"])


@keras.saving.register_keras_serializable("tests")
class OwnCompile(AccumulatingModel, CompilesByRate):
    pass


def test_a_compile_of_the_users_own_round_trips(tmp_path):
    model = OwnCompile([keras.Input((4,)), keras.layers.Dense(2)])
    model.compile(rate=0.25, accumulation_steps=3)
    model.save(tmp_path / "model.keras")
    loaded = keras.models.load_model(tmp_path / "model.keras")
    assert (loaded.compiled, loaded.rate, loaded.accumulation_steps) == (True, 0.25, 3)


@pytest.mark.gate
@pytest.mark.parametrize("style", ["wrapped", "subclass"])
def test_an_exported_model_serves_where_the_package_is_not_installed(style, tmp_path, float64):
    x, y = dense_data(24)
    model = accumulate(dense_model()) if style == "wrapped" else Subclass(dense_model().layers)
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
