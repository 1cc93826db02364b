"""Search for the size of microbatches in a GB of address space, train, and print the size."""

import resource

import keras
import numpy as np
import psutil
from keras import layers

from ga_model import accumulate

x = np.random.default_rng(0).random((512, 64, 64, 3), "float32")
convolutions = [layers.Conv2D(32, 3, padding="same", activation="relu") for _ in range(3)]
pooled = layers.GlobalAveragePooling2D(), layers.Dense(1)
model = keras.Sequential([keras.Input((64, 64, 3)), *convolutions, *pooled])
model = accumulate(model, microbatch_size="auto")
model.compile("sgd", "mse")
limit = psutil.Process().memory_info().vms + 1000 * 1024**2
resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
model.fit(x, x[:, 0, 0, :1], batch_size=512, epochs=2, verbose=0)
assert all(np.isfinite(weight).all() for weight in model.get_weights())
print(model.microbatch_size)
