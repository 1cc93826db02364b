"""Weighted sums of gradients: as tensors, in variables, for sparse gradients as lists of rows; and
the noise of gradients.

May import `reading` and the rooms below it.
"""
