"""Aliases that name what a signature takes where no class is declared for it.

A type checker sees `Any`, for these and for Keras's own classes: Keras ships no type information.
"""

from typing import Any, TypeAlias

Tensor: TypeAlias = Any  # of the backend; while a function is traced, its placeholder
Scalar: TypeAlias = Any  # a Python number, or a tensor of shape ()
Gradient: TypeAlias = Any  # a tensor, sparse rows, or None for a variable without a gradient
Nest: TypeAlias = Any  # tensors, arrays and None in tuples, lists and dicts
Logs: TypeAlias = Any  # what a step returns: scalars by name, perhaps in nested dicts
