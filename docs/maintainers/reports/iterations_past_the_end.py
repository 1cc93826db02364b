import keras
import numpy as np
import tensorflow as tf

data = tf.data.Dataset.from_tensor_slices((np.ones((8, 1)), np.ones((8, 1)))).batch(2)
unknown = data.filter(lambda x, y: True)  # the same batches, and a cardinality of -2
for name, each in {"known": data, "unknown": unknown}.items():
    model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
    model.compile("adam", "mse")
    model.fit(each, epochs=3, verbose=0)
    print(f"size {name}: {int(model.optimizer.iterations)} iterations after 3 epochs of 4 batches")
