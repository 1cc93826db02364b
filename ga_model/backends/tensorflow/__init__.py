"""TensorFlow: functions of the core are `tf.function`s, and variables are as they are.

Microbatches of a source that does not tell how many samples each batch has are traced for any
number, as plain Keras does. Sparse gradients keep their rows: `adapter`. Where the step sees the
full batch, calls of layers go by microbatches, which `layer_calls` runs in loops. What a step
divides by, and what it draws, is seen by a callback of operations: `noting`.

Functions of the core run on each replica of `tf.distribute`: `replicas`. A loop of the user's own
that `tf.function` compiles is refused.
"""
