"""TensorFlow: functions of the core are `tf.function`s that read and write variables directly.

They are traced for any number of samples (`compiled`), and run on each replica of `tf.distribute`
(`replicas`). Sparse gradients keep their rows (`sparse`). If a step sees the full batch, its calls
of layers run by microbatches, in loops (`layer_calls`). A callback of operations sees the divisors
of a step, and its random numbers (`noting`).
"""
