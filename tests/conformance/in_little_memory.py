"""Train with a custom loss, and print the peak of memory in multiples of the weights."""

import sys
import warnings

import keras
import numpy as np
from keras import layers

from ga_model import accumulate
from ga_model.tools._memory import give_back_freed_memory, peak_memory, reset_peak_memory

WIDTH, DEPTH = 1024, 48  # 192 MB of weights

warnings.simplefilter("ignore")
hidden = [layers.Dense(WIDTH, "relu", use_bias=False) for _ in range(DEPTH)]
model = keras.Sequential([keras.Input((WIDTH,)), *hidden, layers.Dense(1)])
options = {"microbatch_size": 8, "loss_over": "microbatch", "verify": sys.argv[1] == "tried"}
accumulate(model, **options).compile("sgd", lambda y, z: keras.ops.mean((y - z) ** 2, axis=-1))
give_back_freed_memory()
reset_peak_memory()
before = peak_memory()
model.train_on_batch(np.ones((16, WIDTH), "float32"), np.ones((16, 1)))
print((peak_memory() - before) / (4 * WIDTH**2 * DEPTH))
