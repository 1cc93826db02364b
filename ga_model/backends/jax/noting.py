"""Run a function, and record the scalars that it may divide by.

The function is traced to a jaxpr, which is evaluated equation by equation. Called jaxprs are
evaluated the same way; unknown equations are bound unchanged.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
from jax.extend.core import Literal

from ga_model.base._types import Nest
from ga_model.core.proof.noted import Draws, Noted

if TYPE_CHECKING:
    from jax.extend.core import Jaxpr, JaxprEqn, Var

# Equations that call one jaxpr with their inputs. `remat` is left out: JAX recomputes it.
_CALLS = {"pjit", "jit", "closed_call", "core_call", "custom_jvp_call"}
_CALLS |= {"custom_vjp_call", "custom_vjp_call_jaxpr"}
# Indices of the inputs that equations divide by, or bound a divisor with: `x / maximum(n, 1)`.
_DIVIDING = {"div": (1,), "max": (0, 1), "select_n": (1, 2), "integer_pow": (0,), "pow": (0,)}
# Equations that branch on their first input, and those whose result may be a bound.
_DECIDING = {"cond", "select_n"}
_BOUNDING = {"max", "min", "clamp", "select_n"}
UNNOTED = "ga_model.unnoted"  # named scope of computations of this package
_JAXPRS = ("jaxpr", "call_jaxpr", "fun_jaxpr")  # names of the parameter that holds it


class Noting(Noted):
    """Evaluates the jaxpr of a function, and records scalars."""

    def run(self, function: Callable[..., Nest], arguments: tuple[Nest, ...]) -> Nest:
        """Evaluate a function."""
        closed, shapes = jax.make_jaxpr(function, return_shape=True)(*arguments)
        outputs = self._evaluate(closed.jaxpr, [*closed.consts, *jax.tree.leaves(arguments)])
        return jax.tree.unflatten(jax.tree.structure(shapes), outputs)

    def _evaluate(
        self, jaxpr: Jaxpr, arrays: Sequence[jax.Array], is_noted: bool = True
    ) -> list[jax.Array]:
        """Evaluate a jaxpr on its constants and arguments."""
        known = dict(zip([*jaxpr.constvars, *jaxpr.invars], arrays))

        def value(variable: Var | Literal) -> jax.Array:
            return variable.val if isinstance(variable, Literal) else known[variable]

        for equation in jaxpr.eqns:
            outputs = self._outputs(equation, [value(v) for v in equation.invars], is_noted)
            known.update(zip(equation.outvars, outputs))
        return [value(v) for v in jaxpr.outvars]

    def _outputs(
        self, equation: JaxprEqn, inputs: list[jax.Array], is_noted: bool
    ) -> Sequence[jax.Array]:
        name, parameters = equation.primitive.name, equation.params
        is_noted = is_noted and not _is_skipped(equation)
        inner = next((parameters[key] for key in _JAXPRS if key in parameters), None)
        if name in _CALLS and inner is not None:
            jaxpr, constants = getattr(inner, "jaxpr", inner), getattr(inner, "consts", ())
            return self._evaluate(jaxpr, [*constants, *inputs], is_noted)
        if name == "random_bits" and self._draws is not None:
            dtype = jnp.dtype(f"uint{parameters['bit_width']}")
            return [_bits(self._draws, tuple(parameters["shape"]), dtype)]
        is_decided = name in _DECIDING and not jnp.shape(inputs[0])
        noted = [inputs[0].astype("float32")] if is_decided else []
        places = _DIVIDING.get(name, ())
        is_bound = name in _BOUNDING
        noted += [
            inputs[i] for i in places if is_bound or not isinstance(equation.invars[i], Literal)
        ]
        bound = equation.primitive.get_bind_params(parameters)
        functions, bound = bound if isinstance(bound, tuple) else ((), bound)  # before JAX 0.10
        outputs = equation.primitive.bind(*functions, *inputs, **bound)
        outputs = outputs if equation.primitive.multiple_results else [outputs]
        noted += outputs[:1] if is_bound else []
        for value in noted if is_noted else ():
            kind = jnp.number if name == "max" else jnp.floating  # the maximum of a count
            if not jnp.shape(value) and jnp.issubdtype(jnp.result_type(value), kind):
                self.note(name, jnp.asarray(value, jnp.result_type(value, "float32")))
        return outputs

    def _place(self) -> None:
        """Number each equation: loops are not unrolled, so none is passed twice."""


def _is_skipped(equation: JaxprEqn) -> bool:
    """Return whether an equation is of this package or of a backward pass.

    `JaxBackend.unnoted` marks the former. The latter repeats what the forward pass shows, times the
    weight of the microbatch.
    """
    source = getattr(equation, "source_info", None)
    names = str(getattr(source, "name_stack", ""))
    return UNNOTED in names or "transpose(" in names


def _bits(draws: Draws, shape: tuple[int, ...], dtype: jnp.dtype) -> jax.Array:
    """Return random bits in which a sample has the same ones wherever it is in a batch."""
    key, kind = jax.random.key(draws.next_seed()), draws.kind_of(shape)
    if kind == "by sample":
        every = jax.random.bits(key, (draws.total, *shape[1:]), dtype)
        return jax.lax.dynamic_slice_in_dim(every, draws.begin, shape[0])
    if kind == "alike":
        return jnp.broadcast_to(jax.random.bits(key, (1, *shape[1:]), dtype), shape)
    return jax.random.bits(jax.random.fold_in(key, draws.run), shape, dtype)
