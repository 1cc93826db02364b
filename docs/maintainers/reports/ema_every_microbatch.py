import keras
import numpy as np

x, y = np.ones((8, 1), "float32"), np.ones((8, 1), "float32")


def average(batch_size, **settings):
    model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1, kernel_initializer="zeros")])
    sgd = keras.optimizers.SGD(0.1, use_ema=True, ema_momentum=0.9, **settings)
    model.compile(sgd, "mse")
    model.fit(x, y, batch_size=batch_size, epochs=4, shuffle=False, verbose=0)
    return model.get_weights()[0].item()  # `fit` ends by writing the average to the weights


full, accumulated = average(8), average(2, gradient_accumulation_steps=4)
print(f"moving average: {full:.4f} with batches of 8, {accumulated:.4f} with 4 x 2")
