"""Read from a TensorFlow graph what a step does.

Which tensors depend on the samples; whether a loss adds up over microbatches, and what it is
divided by; what the tapes differentiate, and what happens to the gradients; which variables are
written to.

May import `replicas` and the rooms below it.
"""
