"""Run a layer call by microbatches: `jax.lax.scan` over a rematerialized function.

For gradients, JAX runs the function again and sums those of weights in its loop.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from ga_model.backends.jax.noting import Noting
from ga_model.core.call_types import IsolatedCall, Split, Traced
from ga_model.core.proof import calls
from ga_model.core.proof.noted import Draws
from ga_model.core.statistics import Moments

# Options of XLA for a program that runs a few times, and takes longer to compile than to run.
BRIEF_OPTIONS = {"xla_backend_optimization_level": 0}


def by_microbatches(split: Split) -> tuple[list[jax.Array], Traced]:
    """Run a function by microbatches: see `Backend.by_microbatches`."""
    samples, size = split.samples, split.size
    rows = samples[0].shape[0]
    num_full, rest = divmod(rows, size)

    @functools.partial(jax.checkpoint, prevent_cse=False, static_argnums=2)
    def run(
        carried: list[jax.Array], samples: list[jax.Array], share: float
    ) -> tuple[list[jax.Array], Traced]:
        return split.function(carried, split.fixed, samples, share)

    stacked = [a[: num_full * size].reshape(num_full, size, *a.shape[1:]) for a in samples]
    carried, traced = jax.lax.scan(lambda *part: run(*part, size / rows), split.carried, stacked)
    joined = jax.tree.map(lambda a: a.reshape(num_full * size, *a.shape[2:]), traced[:2])
    losses = list(map(jnp.sum, traced.losses))
    moments = list(map(Moments.of_stacked, traced.moments))
    if rest:
        carried, last = run(carried, [a[num_full * size :] for a in samples], rest / rows)
        joined = jax.tree.map(lambda *parts: jnp.concatenate(parts), joined, last[:2])
        losses = [a + b for a, b in zip(losses, last.losses)]
        moments = [a.plus(b) for a, b in zip(moments, last.moments)]
    return carried, traced._replace(
        outputs=joined[0], attached=joined[1], losses=losses, moments=moments
    )


def run_isolated(
    call: IsolatedCall, with_gradients: bool = False
) -> Callable[..., list[np.ndarray]]:
    """Return a function that runs a call during a trace: see `Backend.run_isolated`."""
    function = functools.partial(_gradients, call.function) if with_gradients else call.function

    @functools.partial(jax.jit, compiler_options=BRIEF_OPTIONS)
    def with_draws(
        fixed: list[jax.Array], samples: list[jax.Array], begin: jax.Array
    ) -> list[jax.Array]:
        draws = Draws(samples[0].shape[0], calls.TOTAL, begin, begin)
        return Noting(draws).run(function, (fixed, samples))  # type: ignore[no-any-return]

    def run(
        fixed: list[np.ndarray], arrays: list[np.ndarray], begin: int, end: int
    ) -> list[np.ndarray]:
        arguments = fixed, [array[begin:end] for array in arrays], np.int32(begin)
        try:
            with jax.ensure_compile_time_eval():
                results = with_draws(*arguments)
        except NotImplementedError:  # raised for loops, up to JAX 0.6
            results = with_draws.lower(*arguments).compile()(*arguments)
        return list(map(np.asarray, results))

    return run


def _gradients(
    function: Callable[..., list[jax.Array]], fixed: list[jax.Array], samples: list[jax.Array]
) -> list[jax.Array]:
    def run(samples: list[jax.Array], fixed: list[jax.Array]) -> list[jax.Array]:
        return list(filter(_is_inexact, function(fixed, samples)))

    results, pullback = jax.vjp(run, samples, fixed)
    return list(filter(_is_inexact, jax.tree.leaves(pullback(results))))


def _is_inexact(array: jax.Array) -> bool:
    return bool(jnp.issubdtype(array.dtype, jnp.inexact))
