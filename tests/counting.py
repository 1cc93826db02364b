"""A model that counts how often its `train_step` is traced."""

import keras


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
