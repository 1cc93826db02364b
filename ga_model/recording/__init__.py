"""Record a step that TensorFlow draws in a graph, or runs eagerly.

What `hearing` listens to is read in the graph of the step: what its losses and logs are divided by,
whether gradients reach the optimizer as tapes gave them, what it writes to, and whether all of it
adds up over microbatches.

May import `sums` and the rooms below it, and `hearing`.
"""
