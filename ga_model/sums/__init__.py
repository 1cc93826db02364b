"""Weighted sums of gradients: as tensors, in variables, of sparse gradients as lists of rows, and
what they tell of the noise of gradients.

May import `reading` and what stands below it.
"""
