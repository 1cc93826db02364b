import keras
import numpy as np

x, y = np.random.default_rng(0).normal(size=(2, 64, 4))


class Block(keras.layers.Layer):
    def call(self, inputs):
        return self.normalize(inputs)  # trains, as the model's `fit` does


for scope in (None, keras.RematScope("full")):
    normalize = keras.layers.BatchNormalization()
    with scope or keras.name_scope("plain"):
        block = Block()
    block.normalize = normalize
    model = keras.Sequential([keras.Input((4,)), block])
    model.compile(keras.optimizers.SGD(1.0), "mse")
    model.fit(x, y, batch_size=64, epochs=1, shuffle=False, verbose=0)
    print("plain: " if scope is None else "remat: ", normalize.gamma.numpy().round(4))
