import keras
import numpy as np

schedule = keras.optimizers.schedules.PiecewiseConstantDecay([2], [1.0, 0.0])  # 0 after 2 updates
rates = []
model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
model.compile(keras.optimizers.SGD(schedule, gradient_accumulation_steps=4), "mse")
note = keras.callbacks.LambdaCallback(
    on_train_batch_begin=lambda batch, logs: rates.append(float(model.optimizer.learning_rate))
)
model.fit(np.ones((32, 1)), np.ones((32, 1)), batch_size=2, callbacks=[note], verbose=0)
print(f"{int(model.optimizer.iterations)} updates, learning rate at each batch: {rates}")
