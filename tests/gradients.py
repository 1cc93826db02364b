"""Gradients of a loss by the means of each backend, as loops of the user's own take them."""

import keras

BACKEND = keras.backend.backend()

if BACKEND == "tensorflow":
    import tensorflow as tf
elif BACKEND == "jax":
    import jax


def gradients_of(model, loss):
    """Return the gradients of `loss()` with respect to a model's trainable variables."""
    variables = model.trainable_variables
    if BACKEND == "tensorflow":
        with tf.GradientTape() as tape:
            value = loss()
        return tape.gradient(value, variables)
    if BACKEND == "torch":
        model.zero_grad()
        loss().backward()
        return [variable.value.grad for variable in variables]

    def loss_of(values):
        with keras.StatelessScope(list(zip(variables, values))):
            return loss()

    return jax.grad(loss_of)([variable.value for variable in variables])
