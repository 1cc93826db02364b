"""Running a step on the full batch, and its calls of layers by microbatches.

A call goes forward without keeping activations, and again, one microbatch at a time, when its
gradient is asked for. Exact for any step, at the cost of one more forward pass.

May import `hearing` and what stands below it.
"""
