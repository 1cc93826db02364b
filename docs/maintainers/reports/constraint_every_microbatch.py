import keras
import numpy as np


class CountCalls(keras.constraints.Constraint):
    calls = keras.Variable(0, dtype="int32", trainable=False)

    def __call__(self, value):
        self.calls.assign_add(1)
        return 0.9 * value


model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1, kernel_constraint=CountCalls())])
model.compile(keras.optimizers.SGD(0.1, gradient_accumulation_steps=4), "mse")
model.fit(np.ones((8, 1)), np.ones((8, 1)), batch_size=2, verbose=0)
updates = int(model.optimizer.iterations)
print(f"{updates} update, {int(CountCalls.calls)} calls of the constraint")
