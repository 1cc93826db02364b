"""The compiled programs of one model: a microbatch, its logs, and an update.

A microbatch is one program, whatever comes before and after it: it adds what it gives to the sums
of its window, which it gets and returns. The optimizer is in a program of its own, and so are the
updates of metrics that wait for the full batch. So XLA compiles the forward and backward pass once
for each shape of microbatches, as in plain Keras, and nothing waits for a condition.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import keras

from ga_model.base import _numbers
from ga_model.base._identity import is_in
from ga_model.base._internals import layers_in, seeds
from ga_model.base._messages import batch_normalization_messages
from ga_model.hearing import _messages, _weights
from ga_model.hearing._attributes import watch_attributes
from ga_model.hearing._split import Batch
from ga_model.jax_engine import _jax_refusals
from ga_model.jax_engine._jax_calls import looking_at_calls, splitting_calls
from ga_model.jax_engine._jax_metrics import looking_at_metrics
from ga_model.jax_engine._jax_noise import Estimate, Squares, averaged, loss_scale, squared_norm
from ga_model.jax_engine._jax_recorder import Update, record
from ga_model.jax_engine._jax_statistics import Call, listening
from ga_model.jax_engine._jax_terms import Position
from ga_model.jax_engine._jax_window import Amount, Sums


class State(NamedTuple):
    """The values of a model's variables, as Keras passes them to `train_step`."""

    trainable: list[Any]
    non_trainable: list[Any]
    optimizer: list[Any]
    metrics: list[Any]


class Counters(NamedTuple):
    """What was counted since `compile`: int32 scalars, or zero.

    Attributes:
        skipped: microbatches that were left out.
        lost: windows with weight of which a microbatch had a term that was made zero.
    """

    skipped: Any = 0
    lost: Any = 0


class Mode(NamedTuple):
    """What a program of a microbatch is made for.

    Attributes:
        is_split: whether the microbatch is one of several of its batch.
        is_alone: whether the batch makes an update of its own.
        size: samples of microbatches that calls of layers go by, where the step sees the full
            batch, or None.
        skips: whether a microbatch with NaN or Inf in a gradient is skipped.
        must_add_up: whether what does not add up over microbatches is refused, and not told.
        is_measured: whether the noise of gradients is.
    """

    is_split: bool
    is_alone: bool
    size: int | None
    skips: bool
    must_add_up: bool
    is_measured: bool


class Structure(NamedTuple):
    """What is found out while a microbatch is traced.

    Attributes:
        updates: of metrics that wait for the full batch.
        calls: of BatchNormalization layers.
        entries: loss values of a sample, of each term that averages over them.
    """

    updates: list[Update]
    calls: list[Call]
    entries: tuple[float, ...]


class NeedsTotalsError(Exception):
    """What the terms of the loss weigh in the full batch has to be known before."""


class Programs:
    """The programs of a model.

    Args:
        model: the model.

    Attributes:
        needs_totals: whether a microbatch needs what the terms of the loss weigh in its batch.
    """

    def __init__(self, model: Any) -> None:
        self._model = model
        self.needs_totals = False
        self._made: dict[Any, Any] = {}
        self._structure: Structure | None = None  # of the program that is traced
        self._seen: dict[Any, Structure] = {}  # of microbatches, by modes and shapes
        self._shapes: dict[Any, Any] = {}  # of sums

    def _jit(self, name: Any, function: Callable[..., Any], **options: Any) -> Any:
        """Return a compiled function, the same one for the same name."""
        model = self._model
        if model.run_eagerly or not model.jit_compile:
            return function
        if name not in self._made:
            self._made[name] = jax.jit(function, **options)
        return self._made[name]

    def prepare(
        self,
        mode: Mode,
        batch: Batch,
        state: State,
        numbers: dict[str, Any],
        totals: list[Any] | None,
    ) -> tuple[Structure, Structure]:
        """Trace the step on the microbatches of a batch, each shape once, before anything runs.

        Args:
            mode, state, numbers, totals: as `microbatch` takes them.
            batch: the batch.

        Returns:
            What is known of its microbatches, and of the last one, which may be smaller.

        Raises:
            DoesNotAddUpError, NeedsTotalsError: a microbatch cannot run like this.
        """
        found = []
        for index in (0, batch.num_microbatches - 1):
            data = batch.microbatch(index)
            leaves, structure = jax.tree.flatten(data)
            kinds = tuple((getattr(a, "shape", None), str(getattr(a, "dtype", ""))) for a in leaves)
            key = (mode, totals is None, len(state.trainable), structure, kinds)
            if key not in self._seen:
                watch_attributes(self._model)
                inner, zero = self._inner(mode), _numbers.float64(0.0)
                arguments = (zero, zero == 0, state, data, numbers, totals)
                _, self._shapes[mode] = jax.eval_shape(inner, *arguments)
                assert self._structure is not None
                self._seen[key] = self._structure
            found.append(self._seen[key])
        return found[0], found[1]

    def _inner(self, mode: Mode) -> Any:
        return self._jit(("inner", mode), functools.partial(self._microbatch, mode))

    def begin(self, mode: Mode) -> Sums:
        """Return the sums of a window that has no microbatch, for a mode that is prepared."""
        shapes = self._shapes[mode]

        def zeros() -> Sums:
            made: Sums = jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), shapes)
            return made._replace(gradients=[-g for g in made.gradients])  # -0.0 + g is g, also -0.0

        return self._jit(("begin", mode), zeros)()  # type: ignore[no-any-return]

    def microbatch(
        self,
        mode: Mode,
        sums: Sums,
        state: State,
        data: Any,
        numbers: dict[str, Any],
        totals: list[Any] | None,
    ) -> tuple[State, Sums]:
        """Run the step on a microbatch, and add what it gives to the sums of its window.

        Args:
            mode: what the program is made for.
            sums: of the window so far, whose gradients are not to be used again.
            state: the values of variables.
            data: the microbatch.
            numbers: `steps`, `num_microbatches` and `parts`, as `Position` has them, and `rows`,
                the samples of the batch.
            totals: what the terms of the loss weigh in the batch, where it needs them.

        Returns:
            The values of variables, and the sums.
        """
        inner = self._inner(mode)
        arguments = (state, data, numbers, totals)

        def add(gradients: list[Any], others: Sums, *arguments: Any) -> Any:
            sums = others._replace(gradients=gradients)
            found, part = inner(sums.unit, sums.num_counted == 0, *arguments)
            return found, sums.plus(part)

        run = self._jit(("add", mode), add, donate_argnums=0)
        changed, sums = run(sums.gradients, sums._replace(gradients=[]), *arguments)
        return state._replace(**changed), sums

    def _microbatch(
        self,
        mode: Mode,
        unit: Any,
        is_first: Any,
        state: State,
        data: Any,
        numbers: dict[str, Any],
        totals: list[Any] | None,
    ) -> tuple[dict[str, list[Any]], Sums]:
        """Trace the step on a microbatch, and return values that it changes, and what it gives."""
        model = self._model
        whole = None
        if mode.is_split:
            whole = _weights.Whole(
                lambda: numbers["rows"], mode.is_alone, functools.partial(self._totals, totals)
            )
        position = Position(
            numbers["steps"],
            numbers["num_microbatches"],
            numbers["parts"],
            is_first,
            unit,
            whole,
            mode.must_add_up,
        )
        layers = model._batch_normalization_layers()
        with (
            record(model, data, position) as recording,
            listening(layers) as hears,
            looking_at_calls(model, recording.losses)
            if mode.size is None
            else splitting_calls(model, mode.size),
            looking_at_metrics(model, recording),
        ):
            _, after = model.train_step(tuple(state), data)
        after = State(*map(list, after))
        if recording.gradients is None:
            raise RuntimeError(_messages.not_recorded_message(model.name, []))
        if mode.size is None:
            heard = [call.layer for call in hears.calls]
            others = [layer.name for layer in layers if not is_in(layer, heard)]
            for message in batch_normalization_messages([part.name for part in heard], others):
                model._warn_once(message)
        updates, amounts = recording.amounts()
        lost = recording.losses.lost
        found = Sums(
            [_widened(gradient) for gradient in recording.gradients],
            recording.relative_weight,
            recording.unit,
            jnp.int32(1),
            jnp.int32(0),
            functools.reduce(jnp.logical_or, lost, jnp.zeros((), bool)),
            hears.moments,
            amounts,
        )
        if mode.is_measured:
            if recording.relative_weight is None:
                raise ValueError(_messages.noise_of_sum_message(model.name))
            scale = loss_scale(model.optimizer, state.optimizer)
            squares = Squares.of(found.gradients, recording.relative_weight, scale)
            found = found._replace(squares=squares)
        # Not the others: what a program returns is copied, also if it is as it was.
        changed = {
            "non_trainable": self._without(hears.written(), state, after),
            "metrics": after.metrics,
        }
        if mode.skips:
            before = {"non_trainable": state.non_trainable, "metrics": state.metrics}
            changed, found = _skipped(before, changed, found)
        self._structure = Structure(updates, hears.calls, recording.losses.entries())
        return changed, found

    def _totals(self, totals: list[Any] | None) -> list[Any]:
        if totals is None:
            raise NeedsTotalsError
        return totals

    def _without(self, heard: set[int], before: State, after: State) -> list[Any]:
        """Return the values of other variables, with the running averages that they had.

        Warns:
            UserWarning: others are written to that no random numbers are drawn with.
        """
        model = self._model
        known = {id(s) for layer in layers_in(model) for s in seeds(layer)}
        normalizing = model._batch_normalization_layers()  # which are told of
        known |= {id(v) for layer in normalizing for v in layer.non_trainable_variables}
        values, written = [], []
        triples = zip(model.non_trainable_variables, before.non_trainable, after.non_trainable)
        for variable, old, new in triples:
            is_kept = id(variable) in heard
            if not (is_kept or new is old or id(variable) in known):
                written.append(variable.path)
            values.append(old if is_kept else new)
        if written:
            model._warn_once(_messages.written_message(model.name, written))
        return values

    def totals(self, batch: Batch, state: State) -> list[Any]:
        """Return what the terms of the compiled loss weigh in a batch: a forward pass over it."""
        weigh = self._jit("weigh", self._weigh)
        parts = [weigh(state, batch.microbatch(i)) for i in range(batch.num_microbatches)]
        return [sum(weights) for weights in zip(*parts)]

    def _weigh(self, state: State, data: Any) -> list[Any]:
        model, zero = self._model, _numbers.float64(0.0)
        position = Position(1.0, 1.0, 1.0, True, zero, None, False)
        model._accumulation.held_back, before = [], model._accumulation.held_back
        try:
            with record(model, data, position) as recording:
                model.train_step(tuple(state), data)
        finally:
            model._accumulation.held_back = before
        weights = [term.weight for term in recording.losses.compiled_terms()]
        return [_numbers.float64(0.0 if weight is None else weight) for weight in weights]

    def report(
        self, structure: Structure, metrics: list[Any], before: list[Amount], now: list[Amount]
    ) -> tuple[Any, list[Any]]:
        """Give metrics what waited for the full batch, and return the logs and their variables.

        Args:
            structure: what is known of the sums.
            metrics: the values of their variables.
            before: the amounts of the window before the batch.
            now: those after it.
        """
        self._structure = structure
        logs, after = self._jit("report", self._report)(metrics, before, now)
        return logs, after

    def _report(self, metrics: list[Any], before: Any, now: Any) -> tuple[Any, list[Any]]:
        model, structure = self._model, self._structure
        assert structure is not None
        with keras.StatelessScope(list(zip(model.metrics_variables, metrics))) as scope:
            for update, first, last in zip(structure.updates, before, now):
                metric = update.metric
                is_mean = isinstance(metric, keras.metrics.Mean)
                if is_mean:  # one that was reset within the window has nothing of it
                    is_reset = metric.count.value == 0
                    first = jax.tree.map(lambda a, r=is_reset: jnp.where(r, 0, a), first)
                (total, count), (known, known_count) = update.added(last), update.added(first)
                metric.total.assign(metric.total.value + (total - known).astype(metric.total.dtype))
                if is_mean:
                    more = (count - known_count).astype(metric.count.dtype)
                    metric.count.assign(metric.count.value + more)
            logs = model.get_metrics_result()
        return logs, _values_in(scope, model.metrics_variables, metrics)

    def measure(self, estimate: Estimate, optimizer: list[Any], sums: Sums) -> None:
        """Take a window into averages.

        Args:
            estimate: the averages.
            optimizer: the values of the optimizer's variables.
            sums: what the microbatches of the window have come to.
        """
        sums = sums._replace(amounts=[], moments=[])
        measure = self._jit("measure", self._measure)
        estimate.sums = measure(estimate.sums, estimate.decay, optimizer, sums)

    def _measure(self, before: Any, decay: Any, optimizer: list[Any], sums: Sums) -> Any:
        assert sums.squares is not None
        scale = loss_scale(self._model.optimizer, optimizer)
        total = jnp.where(sums.total == 0, 1, sums.total)
        norm = squared_norm(sums.gradients, scale) / total**2
        squares = sums.squares._replace(total=sums.squares.total * sums.unit)
        return averaged(before, decay, squares, sums.total * sums.unit, norm)

    def update(
        self, structure: Structure, skips: bool, state: State, sums: Sums, counters: Counters
    ) -> tuple[State, Counters]:
        """Make the update of a window.

        Args:
            structure: what is known of its sums.
            skips: whether it may have none.
            state: the values of variables. Those of weights and optimizer are not to be used again.
            sums: what its microbatches have come to.
            counters: those of the windows before.
        """
        self._structure = structure
        run = self._jit(("update", skips), functools.partial(self._update, skips), donate_argnums=0)
        sums = sums._replace(amounts=[])
        donated = state.trainable, state.optimizer
        (trainable, others, optimizer), counters = run(donated, state.non_trainable, sums, counters)
        return State(trainable, others, optimizer, state.metrics), counters

    def _update(
        self, skips: bool, donated: Any, non_trainable: list[Any], sums: Sums, counters: Counters
    ) -> Any:
        trainable, optimizer = donated
        has_weight = True if sums.total is None else sums.total != 0
        counters = Counters(
            counters.skipped + sums.num_skipped,
            counters.lost + (sums.has_lost & has_weight).astype(jnp.int32),
        )

        def update() -> tuple[list[Any], list[Any], list[Any]]:
            divisor: Any = 1.0
            if sums.total is not None:  # without any weight gradients are zero, as plain Keras's
                divisor = jnp.where(sums.total == 0, 1, sums.total)
            gradients = [
                (g / jnp.asarray(divisor, g.dtype)).astype(v.dtype)
                for g, v in zip(sums.gradients, trainable)
            ]
            applied = self._model.optimizer.stateless_apply(optimizer, gradients, trainable)
            weights, state = map(list, applied)
            return self._end_update(weights, state, non_trainable, sums)

        if not skips:
            return update(), counters
        keep = (trainable, non_trainable, optimizer)
        return jax.lax.cond(sums.num_counted > 0, update, lambda: keep), counters

    def _end_update(
        self, trainable: list[Any], optimizer: list[Any], others: list[Any], sums: Sums | None
    ) -> tuple[list[Any], list[Any], list[Any]]:
        """Move running averages, and do what the model does once per update."""
        model, structure = self._model, self._structure
        groups = [
            (model.trainable_variables, trainable),
            (model.non_trainable_variables, others),
            (model.optimizer.variables, optimizer),
        ]
        mapping = [pair for variables, values in groups for pair in zip(variables, values)]
        with keras.StatelessScope(mapping) as scope:
            if sums is not None and structure is not None:
                for call, moments in zip(structure.calls, sums.moments):
                    call.move(moments)
            if model._on_update is not None:
                model._on_update()
        unknown = set(scope.state_mapping) - {id(variable) for variable, _ in mapping}
        if unknown:
            raise RuntimeError(_jax_refusals.unknown_variable_message(model.name))
        first, second, third = (_values_in(scope, *group) for group in groups)
        return first, second, third

    def after_update(self, state: State) -> State:
        """Do what the model does once per update, after one that Keras has made."""
        if self._model._on_update is None:
            return state
        found = self._end_update(state.trainable, state.optimizer, state.non_trainable, None)
        return State(*found, state.metrics)

    def whole(self, size: int, state: State, data: Any) -> tuple[Any, State]:
        """Run the step as it is on the full batch, with its calls of layers by microbatches."""
        run = self._jit(("whole", size), self.step_of(size), donate_argnums=0)
        logs, after = run(state, data)
        return logs, after

    def step_of(self, size: int) -> Callable[[Any, Any], tuple[Any, State]]:
        """Return the function that does so, which is not compiled."""

        def run(state: Any, data: Any) -> tuple[Any, State]:
            model = self._model
            with model._accumulation.tracing(), splitting_calls(model, size):
                logs, after = model.train_step(tuple(state), data)
            return logs, self.after_update(State(*map(list, after)))

        return run


def _widened(gradient: Any) -> Any:
    """Return a gradient in the dtype that it is summed in."""
    is_half = gradient.dtype in (jnp.float16, jnp.bfloat16)
    return gradient.astype(jnp.float32) if is_half else gradient


def _skipped(
    before: dict[str, Any], after: dict[str, Any], found: Sums
) -> tuple[dict[str, Any], Sums]:
    """Return what there is after a microbatch that is left out if a gradient is not finite."""
    is_finite = functools.reduce(
        jnp.logical_and, [jnp.isfinite(g).all() for g in found.gradients], jnp.ones((), bool)
    )
    kept = jax.tree.map(lambda new, old: jnp.where(is_finite, new, old), after, before)
    nothing = jax.tree.map(jnp.zeros_like, found)._replace(unit=found.unit)
    part = jax.tree.map(lambda new, none: jnp.where(is_finite, new, none), found, nothing)
    unit = jnp.where(jnp.isfinite(found.unit), found.unit, 1.0)
    return kept, part._replace(num_skipped=jnp.int32(~is_finite), unit=unit)


def _values_in(scope: Any, variables: list[Any], values: list[Any]) -> list[Any]:
    """Return what variables have in a scope that they had values in."""
    found = [scope.get_current_value(variable) for variable in variables]
    return [old if new is None else new for new, old in zip(found, values)]
