import keras
import numpy as np

x, y = np.full((8, 1), 2.0), np.ones((8, 1))
for eagerly in (True, False):
    dense = keras.layers.Dense(1, kernel_initializer="ones")
    model = keras.Sequential([keras.Input((1,)), dense])
    model.compile(keras.optimizers.ScheduleFreeAdamW(0.1), "mse", run_eagerly=eagerly)
    model.fit(x, y, batch_size=2, verbose=0)
    print(f"eager={eagerly}: weight {model.get_weights()[0].item():.4f} after 4 updates")
