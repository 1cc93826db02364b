import keras
import numpy as np
import tensorflow as tf

cpu = tf.config.list_physical_devices("CPU")[0]
tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * 2)
x, y = np.array([[1.0], [1.0]]), np.array([[4.0], [-3.0]])  # gradients of -8 and of 6
for devices in (["CPU:0"], ["CPU:0", "CPU:1"]):
    with tf.distribute.MirroredStrategy(devices).scope():
        dense = keras.layers.Dense(1, use_bias=False, kernel_initializer="zeros")
        model = keras.Sequential([keras.Input((1,)), dense])
        model.compile(keras.optimizers.SGD(1.0, clipvalue=0.5), "mse")
    model.fit(x, y, batch_size=2, verbose=0)
    print(f"{len(devices)} device(s): weight {model.get_weights()[0].item():+.2f} after one update")
