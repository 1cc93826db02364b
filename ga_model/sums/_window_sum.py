"""The sum of a window's weighted gradients over several calls, in variables, and its update.

The algebra is that of `_sums`; here its sums live in variables.

Why the buffers are not zeroed after an update: the first microbatch of a window takes the place of
what is there, which saves one pass over the memory of all trainable variables per window.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from ga_model.base import _validate
from ga_model.base._messages import late_gradient_message
from ga_model.replicas import _optimizers, _strategy
from ga_model.sums import _messages, _sums
from ga_model.sums._gradient_noise import Squares
from ga_model.sums._noise import GradientNoise
from ga_model.sums._one_gradient import term_like
from ga_model.sums._places import Parts
from ga_model.sums._rows import Rows, sum_dtype
from ga_model.sums._sums import GradientSum


class WindowSum:
    """The open window of one optimizer: sums that microbatches are added to, and their update.

    Each replica has its own. The buffers are made by the first microbatch.

    Args:
        jit_compile: whether XLA may compile the updates. There is then one optimizer in all of
            them.
        needs_weight: whether a window whose weights are all zero makes no update. Otherwise it
            makes one with gradients of zero, as plain Keras does. That is a window of a model,
            whose number of microbatches is known.

    Attributes:
        num_microbatches: int64 scalar variable, microbatches added since the last reset.
        unit: float64 scalar variable, what their weights are counted in.
        variables: those whose gradients are summed; none before the first microbatch.
        in_pairs: whether the optimizer's `apply_gradients` makes the updates, and not its `apply`.
    """

    def __init__(self, jit_compile: bool = False, needs_weight: bool = True) -> None:
        self._strategy = _strategy.current()
        self.num_microbatches, self._total, self.unit = _strategy.make_variables(
            lambda: [tf.zeros((), dtype) for dtype in (tf.int64, tf.float64, tf.float64)]
        )
        self.variables: list[Any] = []
        self.in_pairs = False
        self._buffers: list[Any] = []  # of each variable a `tf.Variable`, `Rows` of them, or None
        self._summed: list[Any] = []  # of each variable a bool `tf.Variable`, or None
        self._is_rescaled: Any = None  # bool `tf.Variable`, if a variable remembers its gradients
        # Whether a term was lost in the open window, and in any so far: see `note_lost`.
        self._lost: Any = None
        self._squares: Squares | None = None  # of variables, once somebody asks for the noise
        self._least: float | None = None  # see `add`
        self._jit_compile = jit_compile
        self._needs_weight = needs_weight
        self._compiled: Callable[..., Any] | None = None  # what then makes the updates

    def add(
        self,
        part: GradientSum,
        variables: Sequence[Any],
        least: float | None,
        has_counted: Any = True,
    ) -> None:
        """Add weighted gradients, whose unit has grown from that of the window.

        Args:
            part: the gradients.
            variables: the variables.
            least: what the sum of the window's weights counts as at least, or None where gradients
                are summed and not averaged.
            has_counted: whether they are those of a microbatch that was not left out.
        """
        self._check_is_on_replica()
        self.prepare(part, variables, least)
        dense, rows = self._parted(part)
        self._add_in_place(dense)
        self.add_rest(rows, has_counted)

    def add_compiled(
        self, part: GradientSum, variables: Sequence[Any], least: float | None
    ) -> GradientSum:
        """Add one microbatch to dense buffers, in a function that XLA compiles.

        Returns the rest, for `add_rest`: what goes into lists of rows, which XLA cannot keep.
        """
        self.prepare(part, variables, least)
        dense, rows = self._parted(part)
        self._store(self._sum(with_rows=False).plus(dense, variables, in_one_pass=True))
        return rows

    def _parted(self, part: GradientSum) -> tuple[GradientSum, GradientSum]:
        """Return what is added to dense buffers, and what to lists of rows."""
        is_list = [isinstance(buffer, Rows) for buffer in self._buffers]
        dense = [None if listed else g for listed, g in zip(is_list, part.gradients)]
        rows = [g if listed else None for listed, g in zip(is_list, part.gradients)]
        nothing = [None for _ in is_list]
        return part._replace(gradients=dense), part._replace(gradients=rows, maxima=nothing)

    def _add_in_place(self, part: GradientSum) -> None:
        """Add to dense buffers, each as soon as its gradient is there, which is then freed."""
        so_far = GradientSum([], [], self._total.read_value(), self.unit.read_value())
        shrink = so_far.shrink_for(part)
        parts = list(zip(self._buffers, part.gradients, part.maxima, self.variables))
        pairs = [
            (buffer, term_like(buffer, gradient, variable))
            for buffer, gradient, maximum, variable in parts
            if not (buffer is None or isinstance(buffer, Rows) or maximum is not None)
        ]

        def branch(write: Callable[[Any, Any], Any]) -> Callable[[], Any]:
            def run() -> Any:
                for pair in pairs:
                    write(*pair)
                return tf.constant(0)

            return run

        branches = [
            branch(lambda buffer, term: None),
            branch(lambda buffer, term: buffer.assign(term)),
            branch(lambda buffer, term: buffer.assign_add(term)),
            branch(lambda buffer, term: buffer.assign(buffer * tf.cast(shrink, term.dtype) + term)),
        ]
        if pairs:
            tf.switch_case(so_far.case_of(part), branches)
        is_first = tf.equal(self.num_microbatches, 0)
        for buffer, _, maximum, _ in parts:
            if maximum is not None:
                before = tf.where(is_first, buffer.dtype.min, buffer)
                buffer.assign(tf.maximum(before, tf.cast(maximum, buffer.dtype)))

    def add_rest(self, rest: GradientSum, has_counted: Any = True) -> None:
        """Add what `add_compiled` returned, and count the microbatch if it was not left out."""
        if any(value is not None for value in rest.gradients):
            self._store(self._sum(with_dense=False).plus(rest, self.variables))
        self._count(rest, has_counted)

    def _sum(self, with_dense: bool = True, with_rows: bool = True) -> GradientSum:
        """Return the sum so far, that of all variables or without those of a kind."""

        def read(buffer: Any) -> Any:
            if buffer is None or not (with_rows if isinstance(buffer, Rows) else with_dense):
                return None
            return tf.nest.map_structure(lambda part: part.read_value(), buffer)

        weight = _sums.Weight(self._total.read_value(), self.unit.read_value())
        values = [read(buffer) for buffer in self._buffers]
        whole = GradientSum.of(values, self.variables, weight, scale=False)
        is_empty = tf.equal(self.num_microbatches, 0)
        maxima = [None if m is None else tf.where(is_empty, m.dtype.min, m) for m in whole.maxima]
        return whole._replace(maxima=maxima)

    def _store(self, whole: GradientSum) -> None:
        values = zip(self._buffers, whole.values(), self.variables, self._summed)
        for buffer, value, variable, is_summed in values:
            if isinstance(value, Rows):
                is_summed.assign(is_summed | value.is_long(variable))
                value = value.bounded(variable)
            if value is not None:
                tf.nest.map_structure(lambda b, v: b.assign(tf.cast(v, b.dtype)), buffer, value)

    def _count(self, part: GradientSum, has_counted: Any) -> None:
        shrink = tf.math.divide_no_nan(self.unit, part.unit)  # a power of two, mostly 1
        if part.squares is not None:
            self._squares = self._squares or _strategy.make_variables(Squares.of_nothing)
            squares = self._read_squares().plus(part.squares, shrink)
            tf.nest.map_structure(lambda s, value: s.assign(value), self._squares, squares)
        self._total.assign(self._total * shrink + part.total)
        self.unit.assign(part.unit)
        self.num_microbatches.assign_add(tf.cast(has_counted, tf.int64))

    def _read_squares(self) -> Squares:
        return tf.nest.map_structure(lambda s: s.read_value(), self._squares)  # type: ignore[no-any-return]

    def mean(self) -> list[Any]:
        """Return the replica's share of the mean: see `GradientAccumulator.mean`."""
        self._check_is_on_replica()
        share = self._sum().of_replica(self.variables)
        return share.mean(self.variables, self._least)

    def update(
        self, optimizer: Any, condition: Any = True, noise: GradientNoise | None = None
    ) -> None:
        """Update the variables with the mean, and start the next window.

        An empty window changes nothing.

        Args:
            optimizer: a `keras.optimizers.Optimizer`.
            condition: bool scalar tensor, where False does nothing.
            noise: what measures the noise of the gradients, or None.
        """
        variables = self.variables

        def on_replica() -> None:
            _optimizers.build(optimizer, variables)
            weight = self._total * self.unit  # units differ between replicas
            if not self._needs_weight:
                weight = tf.cast(self.num_microbatches, tf.float64)
            estimate = None if noise is None else noise.of(optimizer)
            update = functools.partial(self._update, optimizer, estimate)
            _strategy.update_if(condition, weight, update, after=self.reset)

        _strategy.run_on_replicas(self._strategy, on_replica)

    def _update(self, optimizer: Any, estimate: Any) -> None:
        """Apply the optimizer to the mean. Replicas communicate, and all have to call it."""

        def apply(share: GradientSum) -> None:
            gradients = share.mean(self.variables, self._least)
            _optimizers.apply(optimizer, gradients, self.variables, self.in_pairs)

        if not self._needs_weight:
            _strategy.run_if(tf.equal(self._total, 0.0), self._clear)
        if self._lost is not None:
            is_lost, was_lost = self._lost
            has_weight = tf.not_equal(self._total, 0.0) | (_strategy.num_replicas() > 1)
            was_lost.assign(was_lost | (is_lost & has_weight))
        if self._is_rescaled is not None:
            is_other = tf.greater(tf.abs(self._total - 1.0), 1e-6)  # 1 if full of equal weights
            self._is_rescaled.assign(self._is_rescaled | is_other)
        whole = self._sum()
        share = whole.of_replica(self.variables).or_zero()
        if estimate is not None:
            estimate.update(whole._replace(squares=self._read_squares()), share, optimizer)
        has_rows = any(isinstance(buffer, Rows) for buffer in self._buffers)
        # For each number of rows XLA compiles: a window's are sums of many numbers, which are
        # padded with zeros. What an optimizer of the user's own makes of these is not known.
        is_compiled = self._jit_compile and _optimizers.can_compile()
        if is_compiled and (not has_rows or _optimizers.is_of_keras(optimizer)):
            self._compiled = self._compiled or _optimizers.compiled(apply)
            self._compiled(share.padded())
        else:
            apply(share)

    def note_lost(self, is_lost: Any) -> bool:
        """Note whether a microbatch has a term that was made zero: a bool scalar tensor.

        Returns whether it is the first time.
        """
        is_new = self._lost is None
        if is_new:
            self._lost = _strategy.make_variables(lambda: [tf.constant(False) for _ in range(2)])
        self._lost[0].assign(self._lost[0] | is_lost)
        return is_new

    def has_lost(self) -> bool:
        """Return whether a window with weight had such a microbatch so far."""
        return self._lost is not None and any(map(bool, _strategy.copies(self._lost[1])))

    def _clear(self) -> None:
        """Zero the dense buffers, which have an earlier window's sum until something has weight."""
        zero = self._total.read_value()  # constants would be kept in memory, as large as these
        for buffer in self._buffers:
            if not (buffer is None or isinstance(buffer, Rows)):
                buffer.assign(tf.fill(buffer.shape, tf.cast(zero, buffer.dtype)))

    def summed_variables(self) -> list[Any]:
        """Return those of the variables whose rows were summed in a window so far."""
        pairs = [(v, flag) for v, flag in zip(self.variables, self._summed) if flag is not None]
        return [v for v, flag in pairs if any(map(bool, _strategy.copies(flag)))]

    def messages(self, optimizer: Any) -> list[str]:
        """Return what there is to tell of rows that were summed, and of float8 layers."""
        summed = [] if _optimizers.adds_up_rows(optimizer) else self.summed_variables()
        names = [getattr(variable, "path", variable.name) for variable in summed]
        found = [_messages.summed_rows_message(names, optimizer.name)] if names else []
        if self._is_rescaled is not None and any(map(bool, _strategy.copies(self._is_rescaled))):
            kept = [v.path for v in self.variables if _sums.overwrites(v)]
            found.append(_messages.rescaled_message(kept))
        return found

    def reset(self) -> None:
        """Forget the open window. Dense buffers stay allocated."""
        for state in (self.num_microbatches, self._total, self.unit):
            state.assign(tf.zeros((), state.dtype))
        if self._lost is not None:
            self._lost[0].assign(False)
        for buffer, variable in zip(self._buffers, self.variables):
            if isinstance(buffer, Rows):
                tf.nest.map_structure(lambda b, v: b.assign(v), buffer, Rows.none(variable))

    def _check_is_on_replica(self) -> None:
        if _strategy.current() is not self._strategy or not _strategy.is_on_replica():
            raise ValueError(_messages.accumulator_scope_message())

    def is_for(self, variables: Sequence[Any]) -> bool:
        """Return whether `variables` are those whose gradients are summed, in the same order."""
        return [id(v) for v in variables] == [id(v) for v in self.variables]

    def prepare(self, part: GradientSum, variables: Sequence[Any], least: float | None) -> None:
        """Make what a microbatch is added to, if it is the first one, or check that it fits."""
        if not self.variables:
            pairs = list(zip(part.values(), variables))
            _check_shapes(pairs)
            self.variables = list(variables)
            self._least = least
            self._buffers = _strategy.make_variables(
                lambda: [_nothing(value, variable) for value, variable in pairs]
            )
            self._summed = _strategy.make_variables(
                lambda: [tf.constant(False) if isinstance(b, Rows) else None for b in self._buffers]
            )
            if not self._needs_weight and any(map(_sums.overwrites, variables)):
                self._is_rescaled = _strategy.make_variables(lambda: tf.constant(False))
            return
        if not self.is_for(variables):
            raise ValueError(_messages.unknown_variables_message())
        if (least is None) != (self._least is None):
            raise ValueError(_messages.mixed_weights_message())
        late = [
            variable
            for variable, value, buffer in zip(variables, part.values(), self._buffers)
            if value is not None and buffer is None
        ]
        if late:
            raise RuntimeError(late_gradient_message(late))


def _check_shapes(pairs: Sequence[tuple[Any, Any]]) -> None:
    """Check the gradients of a first microbatch against their variables."""
    # As an argument of a `tf.function` a Keras variable arrives as a tensor.
    _validate.check_variables([v for _, v in pairs if not tf.is_symbolic_tensor(v)])
    for value, variable in pairs:
        shape = getattr(value, "shape", None)
        if shape is not None and not tf.TensorShape(variable.shape).is_compatible_with(shape):
            raise ValueError(_messages.gradient_message(value, variable))


def _nothing(value: Any, variable: Any) -> Any:
    """Return what a sum of such gradients begins with: zeros, no rows, or None."""
    if isinstance(value, (Rows, Parts)):
        return Rows.none(variable)
    return None if value is None else tf.zeros(variable.shape, sum_dtype(variable.dtype))
