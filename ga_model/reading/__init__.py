"""What a TensorFlow graph tells of a step.

Which tensors follow from the samples; whether a loss adds up over microbatches, and what it is
divided by; what the tapes took gradients of, and what became of these; which variables were written
to.

May import `replicas` and what stands below it.
"""
