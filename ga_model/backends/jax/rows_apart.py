"""Read from a jaxpr whether a function treats samples one by one.

A sample has one entry, or several that stand behind one another, on one axis of each array that
follows from the samples. An operation that leaves it so is known by name; with any other one, the
function is not known to treat samples one by one, and the reason is told. What does not follow from
samples may be combined with them if it is the same for all of them: along their axis it must not
vary, as positions in the batch do, unless it is random.

Sums over samples, and what they are divided by, are followed further, to find out whether a loss
that is one number is a mean or a sum of what single samples give.

What Python computes with the number of samples is a constant of the jaxpr. So the function is
traced with two numbers of samples, and the constants that differ follow from that.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import keras
import numpy as np

_COUNTS = "computes with the number of samples"
_LARGEST_CONSTANT = 1_000_000  # entries of an array whose values are looked at


class Apart(NamedTuple):
    """Samples stand on an axis of an array.

    Attributes:
        axis: the axis.
        entries: of each sample, one behind the other.
    """

    axis: int
    entries: int = 1


class Shared(NamedTuple):
    """An array follows from no sample.

    Attributes:
        axes: along which it does not vary.
        value: of a scalar, or of an array that is the same all over, if it is known.
        counts: whether it follows from the number of samples.
        origin: the id of the constant that it is, or None.
    """

    axes: frozenset[int]
    value: Any = None
    counts: bool = False
    origin: Any = None


class Added(NamedTuple):
    """An array is a sum over samples of what follows from each.

    Attributes:
        divisor: by what it was divided, as far as numbers are known.
        base: what it is added to that follows from no sample, or None: the id of a constant, or
            "other".
    """

    divisor: float = 1.0
    base: Any = None


class Grows(NamedTuple):
    """A constant that a sum over samples is added to.

    Attributes:
        base: its id, or "other" if it is none.
    """

    base: Any


class MixedError(Exception):
    """Samples are combined, or that is not known. The text says by what.

    It stands for arrays that follow from such a combination: they may be of no use.
    """


def kinds_of(
    function: Callable[..., Any], arguments: Sequence[Any], rows: int, dtype: Any = None
) -> list[Any]:
    """Return what the outputs of a function are to the samples.

    Args:
        function: takes the arguments, and returns a nest of arrays.
        arguments: nests of arrays. Those whose axis 0 has a length of `rows` have the samples.
        rows: samples.
        dtype: that floating-point arguments are converted to, or None.

    Returns:
        For each output, "rows" if it has one entry of axis 0 for each sample, which follows from
        that sample alone; "mean" or "sum" of what single samples give; `Grows` if such a sum is
        added to what follows from no sample; "shared" if it follows from none; or a `MixedError`.
        One `MixedError` alone if the function cannot be analyzed: whatever fails here, no error is
        raised, as the user's code may well run.
    """
    try:
        return _kinds(function, arguments, rows, dtype)
    except Exception as error:
        return [MixedError(f"cannot be analyzed ({_first_line(error)})")]


def _first_line(error: Exception) -> str:
    return next(iter(str(error).splitlines()), type(error).__name__)


def _kinds(
    function: Callable[..., Any], arguments: Sequence[Any], rows: int, dtype: Any
) -> list[Any]:
    if rows == 1:  # of which all is one
        arguments, rows = [_with_rows(argument, 1, 2) for argument in arguments], 2
    more = [_with_rows(argument, rows, rows + 1) for argument in arguments]
    one = _Traced.of(function, arguments, rows, dtype)
    try:
        other = _Traced.of(function, more, rows + 1, dtype)
    except Exception:  # of the user's code, which may know one number only
        return [MixedError("cannot be traced with another number of samples")] * len(one.shapes)
    differing = _differing(one.closed, other.closed)
    if differing is None:
        return [MixedError("does other things with another number of samples")] * len(one.shapes)
    found = [_Reader(traced.rows, differing).outputs(traced) for traced in (one, other)]
    triples = zip(found[0], found[1], one.shapes)
    return [_kind(first, second, shape, rows) for first, second, shape in triples]


class _Traced(NamedTuple):
    """A function, traced with some samples.

    Attributes:
        closed: the closed jaxpr.
        states: what its inputs are.
        shapes: of its outputs.
        rows: samples.
    """

    closed: Any
    states: list[Any]
    shapes: list[tuple[int, ...]]
    rows: int

    @classmethod
    def of(
        cls, function: Callable[..., Any], arguments: Sequence[Any], rows: int, dtype: Any
    ) -> _Traced:
        """Trace a function, as `kinds_of` takes it."""

        def like(leaf: Any) -> Any:
            leaf = leaf if hasattr(leaf, "dtype") else np.asarray(leaf)
            kind = keras.backend.standardize_dtype(leaf.dtype)
            is_float = dtype is not None and keras.backend.is_float_dtype(kind)
            return jax.ShapeDtypeStruct(tuple(leaf.shape), dtype if is_float else kind)

        arguments = keras.tree.map_structure(like, list(arguments))
        closed, shapes = jax.make_jaxpr(function, return_shape=True)(*arguments)
        states = [
            Apart(0) if leaf.shape and leaf.shape[0] == rows else _vary(())
            for leaf in keras.tree.flatten(arguments)
        ]
        return cls(closed, states, [tuple(leaf.shape) for leaf in jax.tree.leaves(shapes)], rows)


def _kind(one: Any, other: Any, shape: tuple[int, ...], rows: int) -> Any:
    """Return the kind of an output, from what it is with `rows` samples, and with one more."""
    if isinstance(one, MixedError):
        return one
    if one == other == Apart(0) and shape and shape[0] == rows:
        return "rows"
    if isinstance(one, Shared) and isinstance(other, Shared) and not one.counts:
        return "shared"
    if isinstance(one, Added) and isinstance(other, Added):
        if math.isclose(one.divisor, other.divisor, rel_tol=1e-6):
            return "sum" if one.base is None else Grows(one.base)
        if one.base is not None:
            return MixedError("adds something to a sum over samples")
        if math.isclose(one.divisor / rows, other.divisor / (rows + 1), rel_tol=1e-6):
            return "mean"
        return MixedError("divides by something other than the number of samples")
    return MixedError("gives something other than one value per sample")


def _differing(one: Any, other: Any) -> set[tuple[int, int]] | None:
    """Return the constants in which two jaxprs differ: ids of equations, and places in them.

    None if they differ in more. Constants of the outermost jaxpr have its own id.
    """
    found: set[tuple[int, int]] = set()
    for place, (a, b) in enumerate(zip(one.consts, other.consts)):
        if not _is_equal(a, b):
            found |= {(id(one.jaxpr), place), (id(other.jaxpr), place)}
    if not _compare(one.jaxpr, other.jaxpr, found):
        return None
    return found


def _compare(one: Any, other: Any, found: set[tuple[int, int]]) -> bool:
    """Note the literals in which two jaxprs differ, and return whether all else is alike."""
    if len(one.eqns) != len(other.eqns):
        return False
    for a, b in zip(one.eqns, other.eqns):
        if a.primitive is not b.primitive or len(a.invars) != len(b.invars):
            return False
        for place, (x, y) in enumerate(zip(a.invars, b.invars)):
            if hasattr(x, "val") and hasattr(y, "val"):
                if not _is_equal(x.val, y.val):
                    found |= {(id(a), place), (id(b), place)}
            elif hasattr(x, "val") or hasattr(y, "val"):
                return False
        pairs = zip(_inner(a), _inner(b))
        if not all(_compare(x, y, found) for x, y in pairs):
            return False
    return True


def _is_equal(one: Any, other: Any) -> bool:
    """Return whether two constants have the same value all over, as far as these are known."""
    values = [_of_constant(value).value for value in (one, other)]
    return values[0] == values[1] or str(values[0]) == str(values[1])  # which are NaN, perhaps


def _inner(eqn: Any) -> list[Any]:
    """Return the jaxprs in an equation, not closed."""
    leaves = [v for p in eqn.params.values() for v in (p if isinstance(p, tuple) else (p,))]
    closed = [getattr(leaf, "jaxpr", leaf) for leaf in leaves]
    return [leaf for leaf in closed if hasattr(leaf, "eqns")]


def _with_rows(argument: Any, rows: int, number: int) -> Any:
    """Return the shapes of a nest with another number of samples."""

    def changed(leaf: Any) -> Any:
        leaf = leaf if hasattr(leaf, "dtype") else np.asarray(leaf)
        shape = tuple(leaf.shape)
        if shape and shape[0] == rows:
            shape = (number, *shape[1:])
        return jax.ShapeDtypeStruct(shape, leaf.dtype)

    return keras.tree.map_structure(changed, argument)


class _Reader:
    """Follows samples through jaxprs.

    Args:
        rows: samples.
        differing: constants that follow from their number, as `_differing` returns them.
    """

    def __init__(self, rows: int, differing: set[tuple[int, int]]) -> None:
        self._rows = rows
        self._differing = differing

    def outputs(self, traced: _Traced) -> list[Any]:
        """Return what the outputs of a traced function are."""
        jaxpr = traced.closed.jaxpr
        constants = [self._constant(jaxpr, *pair) for pair in enumerate(traced.closed.consts)]
        return self.run(jaxpr, [*constants, *traced.states])

    def _constant(self, owner: Any, place: int, value: Any) -> Shared:
        counts = (id(owner), place) in self._differing
        return _of_constant(value)._replace(counts=counts, origin=id(value))

    def closed(self, closed: Any, states: Sequence[Any]) -> list[Any]:
        """Return what the outputs of a closed jaxpr are, from what its inputs are."""
        constants = [_of_constant(value) for value in closed.consts]
        return self.run(closed.jaxpr, [*constants, *states])

    def run(self, jaxpr: Any, states: Sequence[Any]) -> list[Any]:
        """Return what the outputs of a jaxpr are, from what its constants and inputs are."""
        known: dict[Any, Any] = dict(zip([*jaxpr.constvars, *jaxpr.invars], states))

        def state_of(owner: Any, place: int, atom: Any) -> Any:
            if hasattr(atom, "val"):
                return self._constant(owner, place, atom.val)
            return known[atom]

        for eqn in jaxpr.eqns:
            states = [state_of(eqn, *pair) for pair in enumerate(eqn.invars)]
            known.update(zip(eqn.outvars, self._equation(eqn, states)))
        return [state_of(None, *pair) for pair in enumerate(jaxpr.outvars)]

    def _equation(self, eqn: Any, states: list[Any]) -> list[Any]:
        rule = _RULES.get(eqn.primitive.name, _Reader._other)
        mixed = [state for state in states if isinstance(state, MixedError)]
        if mixed and rule is not _Reader.nested:
            return mixed[:1] * len(eqn.outvars)
        counts = any(isinstance(state, Shared) and state.counts for state in states)
        if counts and rule is not _Reader.nested and any(isinstance(s, Apart) for s in states):
            return [MixedError(_COUNTS)] * len(eqn.outvars)
        try:
            found = rule(self, eqn, states)
        except MixedError as error:
            found = error
        except Exception:  # another release of JAX, perhaps, whose equations are unlike these
            found = _unknown(eqn)
        found = found if isinstance(found, list) else [found] * len(eqn.outvars)
        if counts and rule is not _Reader.nested:  # also what they are combined with
            found = [s._replace(counts=True) if isinstance(s, Shared) else s for s in found]
        return found

    def _other(self, eqn: Any, states: list[Any]) -> Any:
        name = eqn.primitive.name
        if name == "select_n" and isinstance(states[0], Shared) and states[0].value is not None:
            return states[1 + int(states[0].value)]
        if name in _ELEMENTWISE:
            return self._elementwise(eqn, states)
        if all(isinstance(state, Shared) for state in states):
            return Shared(frozenset())
        raise _unknown(eqn)

    # What follows takes an equation and what its inputs are.

    def _elementwise(self, eqn: Any, states: list[Any]) -> Any:
        name = eqn.primitive.name
        if any(isinstance(state, Added) for state in states):
            return self._of_sums(eqn, states)
        if all(isinstance(state, Shared) for state in states):
            rank = len(eqn.outvars[0].aval.shape)
            pairs = list(zip(eqn.invars, states))
            axes = frozenset(a for a in range(rank) if all(_is_same(*pair, a) for pair in pairs))
            counted = [s for s in states if s.counts and s.value]
            if name in ("add", "add_any") and not rank and len(counted) == 1:
                # A number of samples, of which each one adds its share.
                (base,) = (s for s in states if s is not counted[0])
                return Added(self._rows / counted[0].value, base.origin or "other")
            is_kept = name in _LINEAR and name != "neg"
            return Shared(axes, _folded(eqn, states), origin=states[0].origin if is_kept else None)
        return self.together(eqn, states)

    def together(self, eqn: Any, states: Sequence[Any], atoms: Any = None) -> Apart:
        """Return what arrays of equal shapes have in common, of which one has samples."""
        atoms = eqn.invars if atoms is None else atoms
        apart = {state for state in states if isinstance(state, Apart)}
        if len(apart) != 1 or any(isinstance(state, Added) for state in states):
            raise MixedError(f"combines samples with others (`{eqn.primitive.name}`)")
        (found,) = apart
        for atom, state in zip(atoms, states):
            if not (isinstance(state, Apart) or _is_same(atom, state, found.axis)):
                raise MixedError(
                    f"computes with the place of samples in the batch (`{eqn.primitive.name}`)"
                )
        return found

    def _of_sums(self, eqn: Any, states: list[Any]) -> Any:
        """Return what an operation makes of sums over samples: linear ones keep them so."""
        name = eqn.primitive.name
        sums = [state for state in states if isinstance(state, Added)]
        others = [state for state in states if not isinstance(state, Added)]
        bases = [state.base for state in sums if state.base is not None]
        if name in _LINEAR and len(states) == 1:
            return sums[0]
        if name in ("add", "sub", "add_any") and len({state.divisor for state in sums}) == 1:
            if not others and len(bases) <= (name != "sub"):
                return sums[0]._replace(base=next(iter(bases), None))
            if others and isinstance(others[0], Shared) and not others[0].counts:
                if others[0].value == 0.0:
                    return sums[0]
                if not bases and name != "sub":
                    return sums[0]._replace(base=others[0].origin or "other")
        is_alone = len(sums) == 1 == len(others) and not bases
        if is_alone and isinstance(others[0], Shared):
            value, counts = others[0].value, others[0].counts
            is_known = value is not None or not counts  # else a number that follows from no sample
            if name == "mul" and is_known:
                return sums[0] if value is None else Added(sums[0].divisor / _not_zero(value))
            if name == "div" and is_known and isinstance(states[0], Added):
                return sums[0] if value is None else Added(sums[0].divisor * value)
        raise MixedError(f"computes with a sum over samples (`{name}`)")

    def nested(self, eqn: Any, states: list[Any]) -> list[Any]:
        params = eqn.params
        inner = next(params[key] for key in ("jaxpr", "call_jaxpr", "fun_jaxpr") if key in params)
        if hasattr(inner, "consts"):
            return self.closed(inner, states)
        return self.run(inner, states)

    def broadcast(self, eqn: Any, states: list[Any]) -> Any:
        state, places = states[0], eqn.params["broadcast_dimensions"]
        before, after = eqn.invars[0].aval.shape, eqn.params["shape"]
        if isinstance(state, Apart):
            return Apart(places[state.axis], state.entries)
        if isinstance(state, Added):
            return state
        grown = {p for a, p in enumerate(places) if a in state.axes or before[a] != after[p]}
        return Shared(frozenset(set(range(len(after))) - set(places) | grown), state.value)

    def reshape(self, eqn: Any, states: list[Any]) -> Any:
        state, before = states[0], eqn.invars[0].aval.shape
        after = eqn.outvars[0].aval.shape
        if isinstance(state, Added):
            return state
        if isinstance(state, Apart):
            return _reshaped(state, before, after, self._rows)
        if len(state.axes) == len(before):
            return Shared(frozenset(range(len(after))), state.value)
        kept = {}  # axes by what stands in front of them, and their length
        for axis, length in enumerate(before):
            kept[math.prod(before[:axis]), length] = axis
        same = {a for a, n in enumerate(after) if kept.get((math.prod(after[:a]), n)) in state.axes}
        return Shared(frozenset(same), state.value)

    def transpose(self, eqn: Any, states: list[Any]) -> Any:
        return _moved(states[0], {old: new for new, old in enumerate(eqn.params["permutation"])})

    def squeeze(self, eqn: Any, states: list[Any]) -> Any:
        return _without(states[0], eqn.params["dimensions"], eqn)

    def expand_dims(self, eqn: Any, states: list[Any]) -> Any:
        rank, new = len(eqn.outvars[0].aval.shape), set(eqn.params["dimensions"])
        moved = _moved(states[0], dict(enumerate(a for a in range(rank) if a not in new)))
        return moved._replace(axes=moved.axes | new) if isinstance(moved, Shared) else moved

    def reduce(self, eqn: Any, states: list[Any]) -> Any:
        axes = eqn.params["axes"]
        state = states[0]
        if isinstance(state, Apart) and state.axis in axes and eqn.primitive.name == "reduce_sum":
            return Added()
        if isinstance(state, Added) and eqn.primitive.name == "reduce_sum":
            return state
        return _without(state, axes, eqn)

    def along(self, eqn: Any, states: list[Any]) -> list[Any]:
        """Of what an operation does along one axis."""
        params = eqn.params
        axis = next(params[k] for k in ("axis", "dimension", "dimensions") if k in params)
        axes = set(axis) if isinstance(axis, (list, tuple)) else {axis}
        return self._alone(eqn, states, axes)

    def last(self, eqn: Any, states: list[Any]) -> list[Any]:
        """Of what an operation does along the last axis, or the last two."""
        number = 1 if eqn.primitive.name in ("top_k", "approx_top_k") else 2
        if eqn.primitive.name == "fft":
            number = len(eqn.params["fft_lengths"])
        rank = len(eqn.invars[0].aval.shape)
        return self._alone(eqn, states, set(range(rank - number, rank)))

    def _alone(self, eqn: Any, states: list[Any], axes: set[int]) -> list[Any]:
        if all(isinstance(state, Shared) for state in states):
            return [_vary(frozenset.intersection(*(s.axes for s in states)) - axes)] * len(
                eqn.outvars
            )
        state = self.together(eqn, states)
        if state.axis in axes:
            raise MixedError(_over(eqn))
        return [state] * len(eqn.outvars)

    def dot(self, eqn: Any, states: list[Any]) -> Any:
        (contracted, batched) = eqn.params["dimension_numbers"]
        ranks = [len(atom.aval.shape) for atom in eqn.invars[:2]]
        free = [
            [a for a in range(rank) if a not in (*c, *b)]
            for rank, c, b in zip(ranks, contracted, batched)
        ]
        places: list[dict[int, int]] = []
        start = len(batched[0])
        for axes, batch in zip(free, batched):
            places.append({a: i for i, a in enumerate(batch)})
            places[-1].update({a: start + i for i, a in enumerate(axes)})
            start += len(axes)
        if any(isinstance(state, Added) for state in states):
            raise MixedError("computes with a sum over samples (`dot_general`)")
        if all(isinstance(state, Shared) for state in states):
            same = [
                {p[a] for a in s.axes if a in p} - set(range(len(batched[0])))
                for s, p in zip(states, places)
            ]
            both = {
                i
                for i, (a, b) in enumerate(zip(*batched))
                if a in states[0].axes and b in states[1].axes
            }
            return Shared(frozenset(same[0] | same[1] | both))
        apart = [isinstance(state, Apart) for state in states]
        for state, axes in zip(states, contracted):
            if isinstance(state, Apart) and state.axis in axes:
                raise MixedError(_over(eqn))
        one = apart.index(True)
        state, other = states[one], states[1 - one]
        if state.axis in batched[one]:
            pair = batched[1 - one][batched[one].index(state.axis)]
            is_same = other == Apart(pair, state.entries) if apart[1 - one] else pair in other.axes
            if not is_same:
                raise MixedError(f"combines samples with others (`{eqn.primitive.name}`)")
        elif apart[1 - one]:
            raise MixedError(f"combines samples with others (`{eqn.primitive.name}`)")
        return Apart(places[one][state.axis], state.entries)

    def convolution(self, eqn: Any, states: list[Any]) -> Any:
        numbers = eqn.params["dimension_numbers"]
        state, kernel = states
        if isinstance(state, Shared) and isinstance(kernel, Shared):
            is_same = _is_same(eqn.invars[0], state, numbers.lhs_spec[0])
            return _vary({numbers.out_spec[0]} if is_same else ())
        is_by_sample = isinstance(state, Apart) and state.axis == numbers.lhs_spec[0]
        is_plain = isinstance(kernel, Shared) and eqn.params["batch_group_count"] == 1
        if not (is_by_sample and is_plain):
            raise MixedError(f"combines samples with others (`{eqn.primitive.name}`)")
        return Apart(numbers.out_spec[0], state.entries)

    def window(self, eqn: Any, states: list[Any]) -> list[Any]:
        params = eqn.params
        if all(isinstance(state, Shared) for state in states):
            return [_vary(frozenset())] * len(eqn.outvars)
        state = self.together(eqn, states[:1], eqn.invars[:1])
        if params["window_dimensions"][state.axis] != 1:
            raise MixedError(_over(eqn))
        return [state] * len(eqn.outvars)

    def gather(self, eqn: Any, states: list[Any]) -> Any:
        operand, indices = states
        numbers, sizes = eqn.params["dimension_numbers"], eqn.params["slice_sizes"]
        rank = len(eqn.outvars[0].aval.shape)
        of_indices = [a for a in range(rank) if a not in numbers.offset_dims]
        pairs = dict(zip(numbers.operand_batching_dims, numbers.start_indices_batching_dims))
        if all(isinstance(state, Shared) for state in states):
            return _vary(frozenset(of_indices[a] for a in indices.axes if a < len(of_indices)))
        if isinstance(operand, Shared) and isinstance(indices, Apart):
            shape = eqn.invars[0].aval.shape
            is_table = all(p in operand.axes for p, i in pairs.items() if i == indices.axis)
            if is_table and indices.axis < len(of_indices) and shape:
                return Apart(of_indices[indices.axis], indices.entries)
        if isinstance(operand, Apart) and operand.axis in pairs:
            place = pairs[operand.axis]
            is_same = (
                indices == Apart(place, operand.entries)
                if isinstance(indices, Apart)
                else place in indices.axes
            )
            if is_same:
                return Apart(of_indices[place], operand.entries)
        if isinstance(operand, Apart) and isinstance(indices, Shared):
            axis, gone = operand.axis, (*numbers.collapsed_slice_dims, *pairs)
            is_whole = sizes[axis] == eqn.invars[0].aval.shape[axis] and axis not in gone
            if is_whole:
                kept = [a for a in range(len(sizes)) if a not in gone]
                return Apart(numbers.offset_dims[kept.index(axis)], operand.entries)
        raise MixedError(f"combines samples with others (`{eqn.primitive.name}`)")

    def scatter(self, eqn: Any, states: list[Any]) -> Any:
        operand, indices, updates = states
        numbers = eqn.params["dimension_numbers"]
        if all(isinstance(state, Shared) for state in states):
            return _vary(frozenset())
        shape, rank = eqn.invars[0].aval.shape, len(eqn.invars[2].aval.shape)
        of_indices = [a for a in range(rank) if a not in numbers.update_window_dims]
        pairs = dict(zip(numbers.operand_batching_dims, numbers.scatter_indices_batching_dims))
        for axis in range(len(shape)):
            if axis in pairs:
                places = (axis, pairs[axis], of_indices[pairs[axis]])
            elif axis not in (*numbers.inserted_window_dims, *pairs):
                kept = [a for a in range(len(shape)) if a not in numbers.inserted_window_dims]
                kept = [a for a in kept if a not in pairs]
                place = numbers.update_window_dims[kept.index(axis)]
                if eqn.invars[2].aval.shape[place] != shape[axis] or isinstance(indices, Apart):
                    continue
                places = (axis, None, place)
            else:
                continue
            fits = [place is None or _is_at(state, place) for state, place in zip(states, places)]
            if all(fits) and any(isinstance(s, Apart) for s in (operand, indices, updates)):
                return Apart(axis)
        raise MixedError(f"combines samples with others (`{eqn.primitive.name}`)")

    def cut(self, eqn: Any, states: list[Any]) -> Any:
        """Of slices: all samples are in them."""
        before, after = eqn.invars[0].aval.shape, eqn.outvars[0].aval.shape
        state = states[0]
        if any(isinstance(s, (Apart, Added)) for s in states[1:]) or isinstance(state, Added):
            raise MixedError(f"combines samples with others (`{eqn.primitive.name}`)")
        if isinstance(state, Apart) and before[state.axis] != after[state.axis]:
            raise MixedError("takes some of the samples apart from the others")
        return state if isinstance(state, Apart) else Shared(state.axes)

    def put(self, eqn: Any, states: list[Any]) -> Any:
        """Of an array of which a part is exchanged: all samples are in that part."""
        if all(isinstance(state, Shared) for state in states):
            return _vary(frozenset())
        if any(not isinstance(state, Shared) for state in states[2:]):
            raise MixedError(f"combines samples with others (`{eqn.primitive.name}`)")
        state = self.together(eqn, states[:2], eqn.invars[:2])
        shapes = [atom.aval.shape for atom in eqn.invars[:2]]
        if shapes[0][state.axis] != shapes[1][state.axis]:
            raise MixedError("takes some of the samples apart from the others")
        return state

    def concatenate(self, eqn: Any, states: list[Any]) -> Any:
        return self._alone(eqn, states, {eqn.params["dimension"]})

    def stack(self, eqn: Any, states: list[Any]) -> Any:
        new = eqn.params["axis"]
        places = {axis: axis + (axis >= new) for axis in range(len(eqn.invars[0].aval.shape))}
        moved = [_moved(state, places) for state in states]
        if all(isinstance(state, Shared) for state in moved):
            return Shared(frozenset.intersection(*(state.axes for state in moved)))
        return self.together(eqn, states) and next(s for s in moved if isinstance(s, Apart))

    def pad(self, eqn: Any, states: list[Any]) -> Any:
        state, config = states[0], eqn.params["padding_config"]
        padded = {axis for axis, numbers in enumerate(config) if any(numbers)}
        if isinstance(state, Shared) and isinstance(states[1], Shared):
            return Shared(state.axes - padded)
        if not isinstance(state, Apart) or not isinstance(states[1], Shared):
            raise MixedError(f"combines samples with others (`{eqn.primitive.name}`)")
        if state.axis in padded:
            raise MixedError("puts something between samples, or around them")
        return state

    def iota(self, eqn: Any, states: list[Any]) -> Any:
        rank = len(eqn.outvars[0].aval.shape)
        return Shared(frozenset(a for a in range(rank) if a != eqn.params["dimension"]))

    def random(self, eqn: Any, states: list[Any]) -> list[Any]:
        if not all(isinstance(state, Shared) for state in states):
            raise MixedError("draws random numbers by the values of samples")
        return [Shared(frozenset(range(len(v.aval.shape)))) for v in eqn.outvars]

    def scan(self, eqn: Any, states: list[Any]) -> list[Any]:
        params = eqn.params
        if "ft_in" in params:  # since JAX 0.11
            num_consts, num_carry, _ = map(len, params["ft_in"].unpack())
        else:
            num_consts, num_carry = params["num_consts"], params["num_carry"]
        consts, carry = states[:num_consts], states[num_consts : num_consts + num_carry]
        xs = [_without(x, (0,), eqn) for x in states[num_consts + num_carry :]]

        def body(carry: list[Any]) -> list[Any]:
            return self.closed(params["jaxpr"], [*consts, *carry, *xs])

        carry, outputs = self._until_stable(body, carry)
        ys = [_behind(state) for state in outputs[num_carry:]]
        return [*carry, *ys]

    def loop(self, eqn: Any, states: list[Any]) -> list[Any]:
        params = eqn.params
        first, second = params["cond_nconsts"], params["body_nconsts"]
        of_cond, of_body = states[:first], states[first : first + second]

        def body(carry: list[Any]) -> list[Any]:
            return self.closed(params["body_jaxpr"], [*of_body, *carry])

        carry, _ = self._until_stable(body, states[first + second :])
        (goes_on,) = self.closed(params["cond_jaxpr"], [*of_cond, *carry])
        if not isinstance(goes_on, Shared):
            raise MixedError("runs a loop as long as a sample needs it")
        return carry

    def _until_stable(
        self, body: Callable[[list[Any]], list[Any]], carry: list[Any]
    ) -> tuple[list[Any], list[Any]]:
        """Return what the carry of a loop is at any time, and the outputs of its body then."""
        for _ in range(2 + 4 * len(carry)):
            outputs = body(carry)
            joined = [_joined(a, b) for a, b in zip(carry, outputs)]
            if joined == carry:
                return carry, outputs
            carry = joined
        raise MixedError("runs a loop of which it is not known what it does to samples")

    def branches(self, eqn: Any, states: list[Any]) -> list[Any]:
        if not isinstance(states[0], Shared):
            raise MixedError("takes a branch by the values of samples")
        outputs = [self.closed(branch, states[1:]) for branch in eqn.params["branches"]]
        found = outputs[0]
        for others in outputs[1:]:
            found = [_joined(a, b) for a, b in zip(found, others)]
        return found


def _of_constant(value: Any) -> Shared:
    """Return what a constant is."""
    if isinstance(value, jax.core.Tracer):
        return _vary(frozenset())
    try:
        value = np.asarray(value)
    except Exception:  # keys of random numbers are no arrays
        return _vary(frozenset(range(len(getattr(value, "shape", ())))))
    if value.ndim == 0:
        is_number = np.issubdtype(value.dtype, np.number) or value.dtype == bool
        return Shared(frozenset(), float(value.real) if is_number else None)
    if value.size > _LARGEST_CONSTANT or not value.size:
        return _vary(())
    axes = [a for a in range(value.ndim) if (value == np.take(value, [0], axis=a)).all()]
    is_same = len(axes) == value.ndim
    return Shared(frozenset(axes), _of_constant(value.ravel()[0]).value if is_same else None)


def _vary(axes: Any) -> Shared:
    return Shared(frozenset(axes))


def _folded(eqn: Any, states: list[Any]) -> Any:
    """Return the value of what follows from others that are known, or None."""
    values = [state.value for state in states]
    if None in values:
        return None
    function = _NUMBERS.get(eqn.primitive.name)
    try:
        return None if function is None else function(*values)
    except (ArithmeticError, ValueError, TypeError):
        return None


def _not_zero(value: float) -> float:
    if not value:
        raise MixedError("multiplies a sum over samples by zero")
    return value


def _unknown(eqn: Any) -> MixedError:
    name = eqn.primitive.name
    return MixedError(f"runs `{name}`, of which it is not known what it does to samples")


def _over(eqn: Any) -> str:
    return f"computes over samples (`{eqn.primitive.name}`)"


def _is_same(atom: Any, state: Shared, axis: int) -> bool:
    """Return whether an array that follows from no sample does not vary along an axis."""
    return not atom.aval.shape or atom.aval.shape[axis] == 1 or axis in state.axes


def _is_at(state: Any, axis: int) -> bool:
    """Return whether samples stand on an axis, or nothing varies along it."""
    return state == Apart(axis) if isinstance(state, Apart) else axis in state.axes


def _reshaped(state: Apart, before: Any, after: Any, rows: int) -> Apart:
    front = math.prod(before[: state.axis])
    for axis, length in enumerate(after):
        if math.prod(after[:axis]) == front and length > 1 and length % rows == 0:
            return Apart(axis, length // rows)
    raise MixedError("puts samples together with others (`reshape`)")


def _moved(state: Any, places: dict[int, int]) -> Any:
    """Return what an array is whose axes stand in other places."""
    if isinstance(state, Apart):
        return Apart(places[state.axis], state.entries)
    if isinstance(state, Shared):
        return Shared(frozenset(places[a] for a in state.axes), state.value)
    return state


def _without(state: Any, axes: Any, eqn: Any) -> Any:
    """Return what an array is without some axes."""
    if isinstance(state, Apart) and state.axis in axes:
        raise MixedError(_over(eqn))
    if isinstance(state, Added):
        if eqn.primitive.name != "squeeze":
            raise MixedError(f"computes with a sum over samples (`{eqn.primitive.name}`)")
        return state
    rank = len(eqn.invars[0].aval.shape) if eqn.primitive.name != "scan" else 32
    kept = [a for a in range(rank) if a not in axes]
    places = {a: i for i, a in enumerate(kept)}
    if isinstance(state, Apart):
        return Apart(places[state.axis], state.entries)
    return Shared(frozenset(places[a] for a in state.axes if a in places), state.value)


def _behind(state: Any) -> Any:
    """Return what arrays are that are stacked in front."""
    if isinstance(state, Apart):
        return Apart(state.axis + 1, state.entries)
    if isinstance(state, Shared):
        return Shared(frozenset(a + 1 for a in state.axes))
    if isinstance(state, MixedError):
        return state
    raise MixedError("computes with a sum over samples (`scan`)")


def _joined(one: Any, other: Any) -> Any:
    """Return what an array is that is one of two."""
    if one == other or isinstance(one, MixedError):
        return one
    if isinstance(other, MixedError):
        return other
    if isinstance(one, Shared) and isinstance(other, Shared):
        return Shared(one.axes & other.axes)
    if isinstance(one, Apart) and isinstance(other, Shared) and one.axis in other.axes:
        return one
    if isinstance(other, Apart) and isinstance(one, Shared) and other.axis in one.axes:
        return other
    raise MixedError("combines samples with others in a loop or a branch")


_LINEAR = {"neg", "convert_element_type", "copy", "copy_p", "stop_gradient", "reduce_precision"}
_NUMBERS: dict[str, Callable[..., float]] = {
    "add": lambda a, b: a + b,
    "sub": lambda a, b: a - b,
    "mul": lambda a, b: a * b,
    "div": lambda a, b: a / b,
    "max": max,
    "min": min,
    "neg": lambda a: -a,
    "convert_element_type": lambda a: a,
    "copy": lambda a: a,
    "eq": lambda a, b: float(a == b),
    "ne": lambda a, b: float(a != b),
    "gt": lambda a, b: float(a > b),
    "ge": lambda a, b: float(a >= b),
    "lt": lambda a, b: float(a < b),
    "le": lambda a, b: float(a <= b),
}


def _names(text: str) -> list[str]:
    return text.split()


_ELEMENTWISE = set(
    _names(
        "abs acos acosh add add_any and asin asinh atan atan2 atanh bessel_i0e bessel_i1e "
        "bitcast_convert_type cbrt ceil clamp clz complex conj convert_element_type copy copy_p "
        "cos cosh digamma div eq erf erf_inv erfc exp exp2 expm1 floor ge gt igamma "
        "igamma_grad_a igammac imag integer_pow is_finite le lgamma log log1p logistic lt max min "
        "mul name ne neg nextafter not or polygamma population_count pow real real_imag "
        "reduce_precision regularized_incomplete_beta rem round rsqrt select_n "
        "sharding_constraint shift_left shift_right_arithmetic shift_right_logical sign sin sinh "
        "sqrt square stop_gradient sub tan tanh xor zeta"
    )
)
_Rule = Callable[[_Reader, Any, list[Any]], Any]
_BY_RULE: dict[_Rule, str] = {
    _Reader.nested: "jit pjit closed_call core_call remat remat2 checkpoint custom_jvp_call "
    "custom_vjp_call custom_vjp_call_jaxpr",
    _Reader.reduce: "reduce_sum reduce_max reduce_min reduce_prod reduce_and reduce_or reduce_xor "
    "argmax argmin",
    _Reader.along: "cumsum cumprod cummax cummin cumlogsumexp sort rev split",
    _Reader.last: "top_k fft cholesky eigh lu qr svd triangular_solve",
    _Reader.window: "reduce_window_sum reduce_window_max reduce_window_min reduce_window",
    _Reader.cut: "slice dynamic_slice",
    _Reader.scatter: "scatter scatter-add scatter_add scatter-mul",
    _Reader.random: "random_bits random_wrap random_unwrap random_seed random_split "
    "random_fold_in threefry2x32",
}
_RULES: dict[str, _Rule] = {
    **{name: rule for rule, text in _BY_RULE.items() for name in _names(text)},
    "broadcast_in_dim": _Reader.broadcast,
    "reshape": _Reader.reshape,
    "transpose": _Reader.transpose,
    "squeeze": _Reader.squeeze,
    "expand_dims": _Reader.expand_dims,
    "dot_general": _Reader.dot,
    "conv_general_dilated": _Reader.convolution,
    "gather": _Reader.gather,
    "dynamic_update_slice": _Reader.put,
    "concatenate": _Reader.concatenate,
    "stack": _Reader.stack,
    "pad": _Reader.pad,
    "iota": _Reader.iota,
    "scan": _Reader.scan,
    "while": _Reader.loop,
    "cond": _Reader.branches,
}
