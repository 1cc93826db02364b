"""Listening to a `train_step` that knows nothing of accumulation.

While a step is recorded, attributes of the model answer with stand-ins: optimizers hand over
gradients in place of updating, the compiled loss notes what its terms average over, metrics keep
what waits for the full batch, and BatchNormalization layers tell what they average. From the terms
follows what a microbatch weighs.

May import `sums` and what stands below it.
"""
