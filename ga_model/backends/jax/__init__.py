"""JAX: functions of the core become pure functions, compiled by XLA.

On JAX a step is a function: it takes the values of all variables and returns new ones. So `adapter`
has these values while `fit` runs, and passes to each program those that it reads.

Where the step sees the full batch, its calls of layers go by microbatches: `layer_calls`. Whether a
call treats samples one by one is tried: `call_trial`. What a step divides by is noted by `noting`.
"""
