"""TensorFlow: functions of the core are `tf.function`s that read and write variables directly.

They are traced for any number of samples (`compiled`), and run on each replica of `tf.distribute`
(`replicas`). Sparse gradients keep their rows (`sparse`). If a step runs on the full batch, its
layer calls are loops over microbatches (`layer_calls`). A callback of operations records the
divisors of a step, and chooses its random numbers (`noting`).
"""
