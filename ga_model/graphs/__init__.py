"""Helpers for TensorFlow graphs: loops, lists of tensors, splitting a batch into microbatches.

May import `base`.
"""
