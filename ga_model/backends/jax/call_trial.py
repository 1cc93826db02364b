"""Try a function while a step is traced, on arrays of its own: there are no values yet."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ga_model.backends.jax.noting import Noting
from ga_model.core.proof import calls
from ga_model.core.proof.draws import Draws


def kinds_of(
    function: Callable[[Any, Any], list[Any]], state: list[Any], samples: list[Any]
) -> list[str | None]:
    """Return what the outputs of a function are to the samples, as `calls.kinds_of` does.

    Args:
        function: takes both lists, and returns a list of arrays.
        state: arrays that have no samples, of which shapes and dtypes matter.
        samples: arrays that have samples on axis 0, likewise.

    Raises:
        Exception: whatever the function raises for another number of samples.
    """
    generator = np.random.default_rng(0)
    values = [_drawn(array, array.shape, generator) for array in state]
    arrays = [_drawn(array, (calls.TOTAL, *array.shape[1:]), generator) for array in samples]
    compiled: dict[int, Any] = {}

    def run(begin: int, end: int) -> list[Any]:
        arguments = values, [array[begin:end] for array in arrays], np.int32(begin)
        if end - begin not in compiled:
            compiled[end - begin] = jax.jit(functools.partial(_with_draws, function, end - begin))
        with jax.ensure_compile_time_eval():
            return [np.asarray(output) for output in compiled[end - begin](*arguments)]

    return calls.kinds_of(run)


def _with_draws(function: Any, rows: int, state: Any, samples: Any, begin: Any) -> Any:
    return Noting(Draws(rows, calls.TOTAL, begin, begin)).run(function, (state, samples))


def _drawn(array: Any, shape: tuple[int, ...], generator: Any) -> Any:
    """Return random numbers of a dtype: small ones, as they may be indices, or divide."""
    dtype = array.dtype
    if jnp.issubdtype(dtype, jnp.bool_):
        return generator.random(shape) < 0.5
    if jnp.issubdtype(dtype, jnp.floating):
        drawn = generator.uniform(0.2, 1.2, shape)
        if shape:  # entries of axis 0, perhaps samples, are unlike
            drawn *= np.linspace(1.0, 3.0, shape[0]).reshape(-1, *[1] * (len(shape) - 1))
        return drawn.astype(dtype)
    if dtype == np.uint32:  # seeds
        return np.zeros(shape, dtype)
    return generator.integers(0, 2, shape).astype(dtype)
