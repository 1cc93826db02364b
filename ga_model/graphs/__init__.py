"""What runs inside of a TensorFlow graph: loops, lists of tensors, a batch cut into microbatches.

May import `base`.
"""
