"""Nests of arrays, which JAX takes apart and rebuilds with the keys of dicts sorted."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import keras


def with_leaves(nest: Any, leaves: Sequence[Any]) -> Any:
    """Return a nest with other leaves, its dicts in the order that they have.

    Args:
        nest: the nest.
        leaves: one for each that `jax.tree.leaves` finds in it.
    """
    rebuilt = jax.tree.unflatten(jax.tree.structure(nest), leaves)
    return keras.tree.pack_sequence_as(nest, keras.tree.flatten(rebuilt))
