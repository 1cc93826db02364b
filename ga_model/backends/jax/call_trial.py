"""Try a function while a step is traced, on arrays of its own: there are no values yet."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from ga_model.backends.jax.noting import Noting
from ga_model.core.proof import calls
from ga_model.core.proof.draws import Draws

_SCALES = (1.0, 0.1, 3.0)  # of samples: what saturates hides what it combines


def kinds_of(
    function: Callable[[Any, Any], list[Any]],
    state: list[Any],
    samples: list[Any],
    is_trained: Sequence[bool],
) -> list[str | None]:
    """Return what the outputs of a function are to the samples, as `calls.kinds_of` does.

    Args:
        function: takes both lists, and returns a list of arrays.
        state: arrays that have no samples, of which shapes and dtypes matter.
        samples: arrays that have samples on axis 0, likewise.
        is_trained: of each array of the state, whether it is a weight. Others may be variances.

    Raises:
        Exception: whatever the function raises for another number of samples.
    """
    compiled: dict[int, Any] = {}

    def run(values: list[Any], arrays: list[Any], begin: int, end: int) -> list[Any]:
        arguments = values, [array[begin:end] for array in arrays], np.int32(begin)
        if end - begin not in compiled:
            compiled[end - begin] = jax.jit(functools.partial(_with_draws, function, end - begin))
        try:
            with jax.ensure_compile_time_eval():
                outputs = compiled[end - begin](*arguments)
        except NotImplementedError:  # of loops, up to JAX 0.6
            outputs = compiled[end - begin].lower(*arguments).compile()(*arguments)
        return [np.asarray(output) for output in outputs]

    found = []
    for seed, scale in enumerate(_SCALES):
        generator = np.random.default_rng(seed)
        scales = [
            _scale(array) if is_weight else None for array, is_weight in zip(state, is_trained)
        ]
        values = [_drawn(a, a.shape, generator, own) for a, own in zip(state, scales)]
        shapes = [(calls.TOTAL, *array.shape[1:]) for array in samples]
        arrays = [_drawn(a, shape, generator, scale) for a, shape in zip(samples, shapes)]
        found.append(calls.kinds_of(functools.partial(run, values, arrays)))
    return calls.agreed(found)


def _scale(weight: Any) -> float:
    """Return a size of a weight that saturates nothing."""
    return float(np.prod(weight.shape[:-1])) ** -0.5 if len(weight.shape) > 1 else 0.3


def _with_draws(function: Any, rows: int, state: Any, samples: Any, begin: Any) -> Any:
    return Noting(Draws(rows, calls.TOTAL, begin, begin)).run(function, (state, samples))


def _drawn(array: Any, shape: tuple[int, ...], generator: Any, scale: float | None) -> Any:
    return calls.drawn(array.dtype, shape, generator, scale).astype(array.dtype)
