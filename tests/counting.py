"""Models that count how often their `train_step` is traced."""

import keras

from ga_model import AccumulatingModel, accumulate


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


class CountingSubclass(AccumulatingModel, Counting):
    pass


def make(style, **compile_args):
    model = Counting() if style == "wrap" else CountingSubclass()
    model.build((None, 4))
    if style == "wrap":
        model = accumulate(model, accumulation_steps=3)
    else:
        model.accumulation_steps = 3
    model.compile("adam", "mse", **compile_args)
    model.optimizer.build(model.trainable_variables)  # TensorFlow traces twice where one is made
    return model
