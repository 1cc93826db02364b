"""JAX: functions of the core become pure functions, compiled by XLA.

On JAX a step is a function: it takes the values of all variables and returns new ones. So `adapter`
has these values while `fit` runs, and passes to each program those that it reads.

Where the step sees the full batch, calls of layers go by microbatches, which `layer_calls` runs.
What a step divides by is noted by `noting`.
"""
