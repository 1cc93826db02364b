"""The sum of a window's weighted gradients over several calls, and their mean.

The algebra is that of `_sums`; here its sums live in variables.

Why the buffers are not zeroed after an update: the first microbatch of a window takes the place of
what is there, which saves one pass over the memory of all trainable variables per window.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import keras
import tensorflow as tf

from ga_model import _messages, _optimizers, _strategy, _sums, _validate
from ga_model._gradient_noise import GradientNoise, Squares
from ga_model._places import Parts
from ga_model._rows import Rows, sum_dtype
from ga_model._sums import GradientSum


class GradientAccumulator:
    """Sums weighted gradients over microbatches and applies their mean to an optimizer.

    Use it in a training loop of your own; `AccumulatingModel` uses it too. Everything works inside
    and outside of `tf.function`, but `add` not with sparse gradients in one that XLA compiles. The
    update equals that of the optimizer on the whole window when each weight says how much its
    microbatch counts in the loss's mean: the number of rows for a mean over rows, the number of
    valid tokens for a mean over tokens.

    There is one buffer per variable that has a gradient, made by the first `add`: float32 for
    float16 and bfloat16 variables, else the variable's own dtype. A variable whose gradients are
    None is handed to the optimizer with None. For a variable with `overwrite_with_gradient`, such
    as a float8 layer's scale, the largest value counts.

    Of `tf.IndexedSlices` the rows are kept one behind the other; where they outnumber the
    variable's by more than a quarter, those of equal indices are summed, and adaptive optimizers
    and clipping differ from the full batch: see `summed_variables`. Rows whose indices do not come
    from the samples, such as those of positions, are added one by one, as the full batch has each
    of them once. For that, take the gradients and call `add` in one `tf.function` that gets the
    samples as arguments: eagerly, it is not known what indices come from.

    Under a `tf.distribute` strategy make it in the strategy's scope and call `add` in
    `strategy.run`, with the gradients that `optimizer.apply` would take there: of a loss that is
    divided by the number of replicas, as Keras's losses are. Replicas communicate in `apply` only,
    which may be called there or outside.

    Attributes:
        num_microbatches: int64 scalar variable, microbatches added since the last reset.

    Example:

    ```python
    optimizer = keras.optimizers.Adam()
    accumulator = GradientAccumulator()

    @tf.function
    def microbatch_step(x, y):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(model(x, training=True) - y))
        variables = model.trainable_variables
        accumulator.add(tape.gradient(loss, variables), variables, weight=tf.shape(x)[0])
        return loss

    for step, (x, y) in enumerate(dataset, start=1):
        microbatch_step(x, y)
        if step % 4 == 0:
            accumulator.apply(optimizer)
    accumulator.apply(optimizer)  # what is left; nothing happens if nothing is
    ```
    """

    def __init__(self) -> None:
        self._strategy = _strategy.current()
        self.num_microbatches, self._total, self._unit = _strategy.make_variables(
            lambda: [tf.zeros((), dtype) for dtype in (tf.int64, tf.float64, tf.float64)]
        )
        self._variables: list[Any] = []
        self._buffers: list[Any] = []  # of each variable a `tf.Variable`, `Rows` of them, or None
        self._summed: list[Any] = []  # of each variable a bool `tf.Variable`, or None
        self._squares: Squares | None = None  # of variables, once somebody asks for the noise
        self._is_sum: bool | None = None
        self._tells = True  # whether `apply` warns
        self._jit_compile = False  # whether XLA may compile the updates, all of one optimizer
        self._compiled: Callable[..., Any] | None = None  # what then makes them

    def add(
        self, gradients: Collection[Any], variables: Collection[Any], *, weight: Any | None = 1.0
    ) -> None:
        """Add the gradients of one microbatch to the window.

        Args:
            gradients: one per variable: a tensor of its shape, `tf.IndexedSlices` or None.
            variables: the variables, the same ones in the same order in every call.
            weight: scalar number or tensor, what the microbatch counts in the window's mean (rows,
                or tokens, of a loss that is their mean). Zero changes nothing. None in every call
                for a loss that is a sum: the gradients are then summed and not divided. (In a graph
                `x.shape[0]` may be None, and `tf.shape(x)[0]` is not.)

        Raises:
            TypeError: these are no lists or the like, or no variables.
            ValueError: the lengths differ, or in the first call the shapes; the variables are not
                those of the first call; `weight` is no scalar number, or None in one call and a
                number in another; or the accumulator was made under another strategy, or is
                called outside of `strategy.run`.
            RuntimeError: a variable whose gradient was None at first has one now.
        """
        if not (_is_list(gradients) and _is_list(variables)):
            types = [f"{type(value).__name__!r}" for value in (gradients, variables)]
            raise TypeError(_messages.lengths_message(*types))
        gradients, variables = list(gradients), list(variables)
        is_sum = weight is None
        if not (is_sum or _is_scalar_number(weight)):
            raise ValueError(_messages.weight_message(weight))
        in_unit = _sums.in_unit(1.0 if is_sum else weight, self._unit)
        part = GradientSum.of(gradients, variables, in_unit, scale=not is_sum)
        self._add_sum(part, variables, is_sum)

    def _add_sum(self, part: GradientSum, variables: Sequence[Any], is_sum: bool) -> None:
        """Add weighted gradients, whose unit has grown from that of the window."""
        self._check_is_on_replica()
        self._check(part, variables, is_sum)
        self._store(self._sum().plus(part, variables))
        self._count(part)

    def _add_compiled(
        self, part: GradientSum, variables: Sequence[Any], is_sum: bool
    ) -> GradientSum:
        """Add one microbatch to dense buffers, in a function that XLA compiles.

        Returns the rest, for `_add_rest`: what goes into lists of rows, which XLA can not keep.
        """
        self._check(part, variables, is_sum)
        dense = [None if isinstance(b, Rows) else g for b, g in zip(self._buffers, part.gradients)]
        rows = [g if isinstance(b, Rows) else None for b, g in zip(self._buffers, part.gradients)]
        whole = self._sum(with_rows=False)
        self._store(whole.plus(part._replace(gradients=dense), variables, in_one_pass=True))
        return part._replace(gradients=rows, maxima=[None for _ in rows])

    def _add_rest(self, rest: GradientSum) -> None:
        """Add what `_add_compiled` returned, and count the microbatch."""
        if any(value is not None for value in rest.gradients):
            self._store(self._sum(with_dense=False).plus(rest, self._variables))
        self._count(rest)

    def _sum(self, with_dense: bool = True, with_rows: bool = True) -> GradientSum:
        """Return the sum so far, that of all variables or without those of a kind."""

        def read(buffer: Any) -> Any:
            if buffer is None or not (with_rows if isinstance(buffer, Rows) else with_dense):
                return None
            return tf.nest.map_structure(lambda part: part.read_value(), buffer)

        weight = _sums.Weight(self._total.read_value(), self._unit.read_value())
        values = [read(buffer) for buffer in self._buffers]
        whole = GradientSum.of(values, self._variables, weight, scale=False)
        is_empty = tf.equal(self.num_microbatches, 0)
        maxima = [None if m is None else tf.where(is_empty, m.dtype.min, m) for m in whole.maxima]
        return whole._replace(maxima=maxima)

    def _store(self, whole: GradientSum) -> None:
        values = zip(self._buffers, whole.values(), self._variables, self._summed)
        for buffer, value, variable, is_summed in values:
            if isinstance(value, Rows):
                is_summed.assign(is_summed | value.is_long(variable))
                value = value.bounded(variable)
            if value is not None:
                tf.nest.map_structure(lambda b, v: b.assign(tf.cast(v, b.dtype)), buffer, value)

    def _count(self, part: GradientSum) -> None:
        shrink = tf.math.divide_no_nan(self._unit, part.unit)  # a power of two, mostly 1
        if part.squares is not None:
            self._squares = self._squares or _strategy.make_variables(Squares.of_nothing)
            squares = self._read_squares().plus(part.squares, shrink)
            tf.nest.map_structure(lambda s, value: s.assign(value), self._squares, squares)
        self._total.assign(self._total * shrink + part.total)
        self._unit.assign(part.unit)
        self.num_microbatches.assign_add(1)

    def _read_squares(self) -> Squares:
        return tf.nest.map_structure(lambda s: s.read_value(), self._squares)  # type: ignore[no-any-return]

    def _update(self, optimizer: Any, estimate: Any) -> None:
        """Apply the optimizer to the mean. Replicas communicate, and all have to call it."""

        def apply(share: GradientSum) -> None:
            gradients = share.mean(self._variables, bool(self._is_sum))
            _optimizers.apply(optimizer, gradients, self._variables)

        whole = self._sum()
        share = whole.of_replica(self._variables)
        if estimate is not None:
            estimate.update(whole._replace(squares=self._read_squares()), share, optimizer)
        # For each number of rows XLA would compile again: a window's are sums of many numbers.
        has_rows = any(isinstance(buffer, Rows) for buffer in self._buffers)
        if self._jit_compile and not has_rows and not tf.executing_eagerly():
            self._compiled = self._compiled or _optimizers.compiled(apply)
        (self._compiled or apply)(share)

    @property
    def variables(self) -> list[Any]:
        """The variables whose gradients are summed; none before the first `add`."""
        return list(self._variables)

    @property
    def summed_variables(self) -> list[Any]:
        """Those of the variables whose rows were summed in a window so far, to bound the memory.

        What SGD without clipping makes of them is the same. Other optimizers treat each row of a
        sparse gradient by itself: their updates then are not those of the full batch. `apply` warns
        of it where it is called eagerly.
        """
        pairs = [(v, flag) for v, flag in zip(self._variables, self._summed) if flag is not None]
        return [v for v, flag in pairs if any(map(bool, _strategy.copies(flag)))]

    def mean(self) -> list[Any]:
        """Return the window's gradient, in the variables' dtypes.

        One per variable: a tensor, `tf.IndexedSlices` or None, as the first that was added.

        That is sum(w_i * g_i) / sum(w_i), or sum(g_i) where the weights are None. Not finite where
        the weights sum to zero. With several replicas, the replica's share of it: the shares add up
        to the window's gradient, as optimizers add them up.

        Raises:
            ValueError: with several replicas, called outside of `strategy.run`.
        """
        self._check_is_on_replica()
        share = self._sum().of_replica(self._variables)
        return share.mean(self._variables, bool(self._is_sum))

    def apply(
        self, optimizer: Any, *, _condition: Any = True, _noise: GradientNoise | None = None
    ) -> None:
        """Update the variables with the window's gradient, and start the next window.

        One call is one `optimizer.apply`, so iterations, schedules, weight decay, clipping,
        constraints and moving averages advance once. An empty window, and one whose weights sum to
        zero, changes nothing.

        Args:
            optimizer: a `keras.optimizers.Optimizer`.
            _condition: for the package's own use: bool scalar tensor, where False does nothing.
            _noise: for the package's own use: what measures the noise of the gradients, or None.

        Raises:
            TypeError: `optimizer` is none.
            ValueError: it accumulates gradients itself.
            RuntimeError: traced in a `tf.function` before any gradient was added.
        """
        if isinstance(optimizer, type) or not hasattr(optimizer, "apply"):
            raise TypeError(_messages.not_an_optimizer_message(optimizer))
        _validate.check_single_accumulation([optimizer])
        if not self._variables:
            if not tf.executing_eagerly():
                raise RuntimeError(_messages.empty_apply_message())
            return
        variables = self._variables

        def apply() -> None:
            _optimizers.build(optimizer, variables)
            weight = self._total * self._unit  # units differ between replicas
            estimate = None if _noise is None else _noise.of(optimizer)
            update = functools.partial(self._update, optimizer, estimate)
            _strategy.update_if(_condition, weight, update, after=self.reset)

        _strategy.run_on_replicas(self._strategy, apply)
        if self._tells and tf.executing_eagerly():
            for message in self._messages_of_sums(optimizer):
                self._tells = False
                _validate.warn(message)

    def _messages_of_sums(self, optimizer: Any) -> list[str]:
        """Return what there is to tell of rows that were summed, one message or none."""
        summed = [] if _adds_up_rows(optimizer) else self.summed_variables
        names = [getattr(variable, "path", variable.name) for variable in summed]
        return [_messages.summed_rows_message(names, optimizer.name)] if names else []

    def reset(self) -> None:
        """Forget the open window. Dense buffers stay allocated."""
        for state in (self.num_microbatches, self._total, self._unit):
            state.assign(tf.zeros((), state.dtype))
        for buffer, variable in zip(self._buffers, self._variables):
            if isinstance(buffer, Rows):
                tf.nest.map_structure(lambda b, v: b.assign(v), buffer, Rows.none(variable))

    def _check_is_on_replica(self) -> None:
        if _strategy.current() is not self._strategy or not _strategy.is_on_replica():
            raise ValueError(_messages.accumulator_scope_message())

    def _is_for(self, variables: Sequence[Any]) -> bool:
        """Return whether `variables` are those whose gradients are summed, in the same order."""
        return [id(v) for v in variables] == [id(v) for v in self._variables]

    def _check(self, part: GradientSum, variables: Sequence[Any], is_sum: bool) -> None:
        if not self._variables:
            pairs = list(zip(part.values(), variables))
            _check_shapes(pairs)
            self._variables = list(variables)
            self._is_sum = is_sum
            self._buffers = _strategy.make_variables(
                lambda: [_nothing(value, variable) for value, variable in pairs]
            )
            self._summed = _strategy.make_variables(
                lambda: [tf.constant(False) if isinstance(b, Rows) else None for b in self._buffers]
            )
            return
        if not self._is_for(variables):
            raise ValueError(_messages.unknown_variables_message())
        if is_sum != self._is_sum:
            raise ValueError(_messages.mixed_weights_message())
        late = [
            variable
            for variable, value, buffer in zip(variables, part.values(), self._buffers)
            if value is not None and buffer is None
        ]
        if late:
            raise RuntimeError(_messages.late_gradient_message(late))


def _adds_up_rows(optimizer: Any) -> bool:
    """Return whether equal rows of a sparse gradient may be summed before an update."""
    inner = getattr(optimizer, "inner_optimizer", optimizer)
    return type(inner) is keras.optimizers.SGD and not _optimizers.clips(inner)


def _is_list(values: Any) -> bool:
    """Return whether there is one value after the other: a list, a tuple, a dict's values."""
    return isinstance(values, Collection) and not isinstance(values, (str, Mapping))


def _is_scalar_number(weight: Any) -> bool:
    """Return whether a weight is one, as far as that is known without its value."""
    if isinstance(weight, (int, float)):
        return True
    try:
        tensor = tf.convert_to_tensor(weight)
    except (TypeError, ValueError):
        return False
    dtype = tensor.dtype
    return not tensor.shape.rank and (dtype.is_floating or dtype.is_integer or dtype.is_bool)


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
