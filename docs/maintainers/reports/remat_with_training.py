import keras
import numpy as np

with keras.RematScope("full"):
    dense = keras.layers.Dense(1)
model = keras.Sequential([keras.Input((4,)), dense])
model.compile("sgd", "mse")
model.fit(np.ones((8, 4)), np.ones((8, 1)), verbose=0)
