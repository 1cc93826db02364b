"""Run a step on the full batch, and split its calls of layers into microbatches.

A call runs forward without keeping activations, and again, one microbatch at a time, when its
gradient is taken. Exact for any step, at the cost of one more forward pass.

May import `recording` and the rooms below it.
"""
