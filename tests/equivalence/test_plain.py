"""A model looks as a plain one does, and its optimizer is the user's own."""

import h5py
import keras
import pytest
from helpers import dense_data, dense_model, seeded

from ga_model import AccumulatingModel, accumulate


class Net(keras.Model):
    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.hidden = keras.layers.Dense(6, activation="tanh")
        self.head = keras.layers.Dense(2)

    def call(self, inputs):
        return self.head(self.hidden(inputs))


class AccumulatingNet(AccumulatingModel, Net):
    pass


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
