"""A model looks as a plain one does, and its optimizer is the user's own."""

import h5py
import keras
import pytest
import tensorflow as tf
from helpers import dense_data, seeded

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
def test_the_model_has_the_plain_models_parts_summary_and_files(style, tmp_path):
    x, y = dense_data(28)
    seen = []
    for accumulates in (False, True):
        keras.utils.clear_session()  # so that both number their layers from the start
        m = seeded(AccumulatingNet if accumulates and style == "subclass" else Net)
        m.name = "net"
        if accumulates:
            m = accumulate(m, accumulation_steps=3, microbatch_size=2, skip_nonfinite=True)
        optimizer = keras.optimizers.Adam(name="adam")
        m.compile(optimizer, "mse")
        m.fit(x, y, batch_size=4, epochs=2, shuffle=False, verbose=0)
        assert m.optimizer is optimizer
        checkpoint = tf.train.Checkpoint(model=m).write(str(tmp_path / "checkpoint"))
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
                "attributes": vars(m).keys() - {"_accumulation"},
                "attributes of the optimizer": vars(optimizer).keys(),
                "tracked": m._trackable_children().keys(),
                "checkpoint": sorted(tf.train.list_variables(checkpoint)),
            }
        )
    assert seen[1] == seen[0]
