"""JAX: functions of the core become pure functions of the values of variables."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Hashable, Iterable, Iterator
from itertools import chain
from typing import TYPE_CHECKING, TypeAlias

import jax
import jax.numpy as jnp
import keras
import numpy as np

from ga_model.backends.jax import layer_calls, refusals
from ga_model.backends.jax.noting import UNNOTED, Noting
from ga_model.base._context import ThreadValue
from ga_model.base._internals import (
    iterations_variable,
    stateless_scope,
    stateless_scope_with,
    value_in,
)
from ga_model.base._internals_jax import MORE_METHODS_OF_STEP, restore_variables, sync_variables
from ga_model.base._types import Gradient, Logs, Nest, Scalar, Tensor
from ga_model.core.backend import Backend
from ga_model.core.backend_types import GROUPS, Applied, Function, Group, Name, States
from ga_model.core.proof.noted import Draws, Noted
from ga_model.core.stand_ins import SCALE_LOSS, recorded

if TYPE_CHECKING:
    from ga_model.core.recorder import Recording
    from ga_model.core.window import Sums

# Texts of failed allocations: of a device, and of the CPU.
_EXHAUSTED = ("RESOURCE_EXHAUSTED", "Out of memory")
_Values: TypeAlias = dict[Group, list[jax.Array]]  # of all variables of groups
_Changed: TypeAlias = dict[Group, dict[int, jax.Array]]  # new values of some, by index
_State: TypeAlias = tuple[list[jax.Array], ...]  # the values of `GROUPS`, as Keras passes them


def _stateless_apply(
    recording: Recording,
    optimizer: keras.optimizers.Optimizer,
    optimizer_variables: list[jax.Array],
    grads: list[jax.Array | None],
    trainable_variables: list[jax.Array],
) -> tuple[list[jax.Array], list[jax.Array]]:
    """Record the gradients that a step applies, and make the surrogate update of a trial."""
    applied = Applied(optimizer, tuple(recording.model.trainable_variables))
    recording.apply(applied, grads, values=optimizer_variables)
    if not recording.is_moving:
        return trainable_variables, optimizer_variables
    rate = recording.rate_of(grads, trainable_variables)
    with recording.backend.unnoted():
        moved = [_moved(*pair, rate) for pair in zip(trainable_variables, grads)]
    counter = iterations_variable(optimizer)
    pairs = zip(optimizer.variables, optimizer_variables)
    return moved, [x + (rate != 0).astype(x.dtype) if v is counter else x for v, x in pairs]


def _moved(weight: jax.Array, gradient: jax.Array | None, rate: jax.Array) -> jax.Array:
    """Return a weight after the surrogate update of a trial."""
    if gradient is None:
        return weight
    return jnp.where(rate == 0, weight, weight - (rate * gradient).astype(weight.dtype))


class JaxBackend(Backend):
    """Holds the values of a model's variables while the train function runs.

    During `fit`, Keras takes them out of the variables and passes them to the train function.
    """

    recorded_methods = SCALE_LOSS, recorded("stateless_apply", _stateless_apply)
    methods_of_step = (*Backend.methods_of_step, *MORE_METHODS_OF_STEP)
    noted_class = Noting
    has_several_optimizers = False

    def __init__(self, model: keras.Model) -> None:
        super().__init__(model)
        self._values: _Values = {}
        self._step_values = ThreadValue({})  # values at the start of the running step

    def variables(self, group: Group) -> list[keras.Variable]:
        """Return the variables of a group, in the order in which Keras passes values."""
        if group == "optimizer":
            return list(self._model.optimizer.variables)
        return list(getattr(self._model, f"{group}_variables"))

    @property
    def step_groups(self) -> tuple[Group, ...]:  # type: ignore[override]
        # Passing an optimizer's hundreds of arrays would cost time in each call.
        scale_loss = self._model.optimizer.__class__.scale_loss
        if scale_loss is keras.optimizers.Optimizer.scale_loss:
            return ("trainable", "non_trainable", "metrics")
        return GROUPS

    # Compiled functions.

    def _compiled(self, name: Name, function: Function) -> Compiled:
        return Compiled(self, function, is_brief=name[0] == "trial")

    def key_of(self, arguments: tuple[Nest, ...]) -> Hashable:
        leaves, structure = jax.tree.flatten(arguments)
        kinds = tuple((jnp.shape(leaf), str(jnp.result_type(leaf))) for leaf in leaves)
        return structure, kinds, len(self.values("trainable"))

    @property
    def num_devices(self) -> int:  # type: ignore[override]
        distribution = keras.distribution.distribution()
        return 1 if distribution is None else int(distribution.device_mesh.devices.size)

    def on_device(self, data: Nest) -> Nest:
        if (distribution := keras.distribution.distribution()) is None:
            return data

        # A slice of a batch is on some of its devices only, or copied to all: share it evenly.
        def place(leaf: Tensor) -> Tensor:
            if not jnp.ndim(leaf):
                return leaf
            layout = distribution.get_data_layout(leaf.shape)
            return keras.distribution.distribute_tensor(leaf, layout)

        return keras.tree.map_structure(place, data)

    def copied(self, nest: Nest) -> Nest:
        return jax.tree.map(jnp.copy, nest)

    def zeros(self, name: Name, shapes: Sums) -> Sums:
        def nothing(shape: jax.ShapeDtypeStruct) -> jax.Array:
            return jnp.full(shape.shape, -0.0, shape.dtype)

        made = self.compiled(name, lambda: jax.tree.map(nothing, shapes), [])()
        if keras.distribution.distribution() is None:
            return made  # type: ignore[no-any-return]
        mesh = self._values["trainable"][0].sharding.mesh
        on_all_devices = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
        return jax.device_put(made, on_all_devices)  # type: ignore[no-any-return]

    # The values of variables.

    def values(self, group: Group) -> list[jax.Array]:
        """Return the present values of a group, inside or outside a `StatelessScope`."""
        if (scope := stateless_scope()) is None:
            return self._values[group]
        return [value_in(scope, variable) for variable in self.variables(group)]

    def put(self, values: _Changed) -> None:
        """Set new values of variables, by group and index."""
        for group, changed in values.items():
            if stateless_scope() is None:
                before = enumerate(self._values[group])
                self._values[group] = [changed.get(place, value) for place, value in before]
            else:
                variables = self.variables(group)
                for place, value in changed.items():
                    variables[place].assign(value)

    def read(self, variables: Iterable[keras.Variable]) -> Iterator[np.ndarray]:
        places = self._places()
        pairs = (places[id(variable)] for variable in variables)
        return (np.asarray(self._values[group][place]) for group, place in pairs)

    def assign(self, values: Iterable[tuple[keras.Variable, np.ndarray]]) -> None:
        places = self._places()
        changed: _Changed = {group: {} for group in GROUPS}
        for variable, value in values:
            group, place = places[id(variable)]
            before, array = self._values[group][place], jnp.array(value)
            # A function is compiled anew for arrays that are committed to devices, or not.
            array = jax.device_put(array, before.sharding) if before.committed else array
            changed[group][place] = array
        self.put(changed)

    def _places(self) -> dict[int, tuple[Group, int]]:
        """Return the group and index of each variable, by its id."""
        groups = ((group, enumerate(self.variables(group))) for group in GROUPS)
        return {id(v): (group, place) for group, members in groups for place, v in members}

    def scope_with(self, values: _Values) -> keras.StatelessScope:
        """Return a scope in which variables have these values."""
        variables = chain.from_iterable(map(self.variables, values))
        return stateless_scope_with(variables, chain.from_iterable(values.values()))

    def values_in(self, scope: keras.StatelessScope, groups: Iterable[Group]) -> _Values:
        """Return the values of groups of variables in a scope."""
        return {g: list(map(scope.get_current_value, self.variables(g))) for g in groups}

    def train(self, state: _State, run: Callable[[], Logs]) -> tuple[Logs, _State]:
        """Run a function with the values that Keras passes to a train function.

        Returns:
            The logs that it returns, and the values of variables after it.
        """
        self._values = dict(zip(GROUPS, map(list, state)))
        try:
            logs = run()
            return logs, tuple(self._values[group] for group in GROUPS)
        except BaseException:  # KeyboardInterrupt, too
            # Otherwise Keras loses them if this is the first step of `fit`.
            restore_variables(self._model, self._values)
            raise
        finally:
            self._values = {}

    @contextlib.contextmanager
    def keeping_state(self) -> Iterator[None]:
        before = dict(self._values)
        try:
            yield
        except BaseException:
            self._values = before
            raise

    def state(self) -> States:
        return States(_Held(self), super().state())

    @contextlib.contextmanager
    def outside_of_training(self) -> Iterator[None]:
        sync_variables(self._model)
        variables = {group: self.variables(group) for group in GROUPS}
        self._values = {group: [v.value for v in variables[group]] for group in GROUPS}
        try:
            yield
            for group in GROUPS:
                for variable, value in zip(variables[group], self._values[group]):
                    variable.assign(value)
        finally:
            self._values = {}

    # Steps.

    def run_step(self, data: Nest) -> tuple[Logs, list[keras.Variable]]:
        before = self._values_read()
        state = tuple(list(before.get(group, ())) for group in GROUPS)
        with self.running_step(), self._step_values.set(before):
            logs, state = self._model.train_step(state, data)
        after = dict(zip(GROUPS, state))
        changed = {group: _changed(after[group], before[group]) for group in before}
        self.put(changed)
        others = self.variables("non_trainable")
        return logs, [others[place] for place in changed["non_trainable"]]

    def _values_read(self) -> _Values:
        """Return the values of the groups of variables that the running function got."""
        known = stateless_scope().state_mapping
        variables = ((group, self.variables(group)) for group in GROUPS)
        read = [group for group, members in variables if all(id(v) in known for v in members)]
        return {group: self.values(group) for group in read}

    def microbatch_weight(self, data: Nest) -> Scalar | str | None:
        outer = stateless_scope()  # while a loss is scaled, it has optimizer variables only
        with self.scope_with(self._values if outer is None else self._step_values.get()) as scope:
            scope.state_mapping.update({} if outer is None else outer.state_mapping)
            return super().microbatch_weight(data)

    def unnoted(self) -> contextlib.AbstractContextManager[None]:
        return jax.named_scope(UNNOTED)  # type: ignore[no-any-return]

    def noting(
        self, function: Callable[..., Nest], arguments: tuple[Nest, ...], draws: Draws | None = None
    ) -> tuple[Nest, Noted]:
        def pure(values: _Values, arguments: tuple[Nest, ...]) -> tuple[Nest, _Changed]:
            with self.scope_with(values) as scope:
                result = function(*arguments)
            refusals.check_known(self._model, scope, map(self.variables, values))
            after = self.values_in(scope, values)
            return result, {group: _changed(after[group], values[group]) for group in values}

        inputs = self._values_read(), arguments
        (result, changed), noted = super().noting(pure, inputs, draws)
        self.put(changed)
        return result, noted

    def run_plain(
        self,
        train_step: Callable[..., tuple[Logs, _State]],
        state: _State,
        data: Nest,
    ) -> tuple[Logs, _State]:
        logs, state = train_step(state, data)
        values = dict(zip(GROUPS, state))
        with self.scope_with(values) as scope:
            self._model.on_update()
        refusals.check_known(self._model, scope, map(self.variables, values))
        return logs, tuple(self.values_in(scope, values).values())

    def apply(self, applied: Applied, gradients: list[Gradient]) -> None:
        before = self.values("optimizer"), gradients, self.values("trainable")
        trainable, optimizer = self._model.optimizer.stateless_apply(*before)
        self.put({"trainable": dict(enumerate(trainable)), "optimizer": dict(enumerate(optimizer))})

    # Checks, and calls of layers.

    def check(self) -> None:
        refusals.check(self._model)

    run_isolated = staticmethod(layer_calls.run_isolated)
    by_microbatches = staticmethod(layer_calls.by_microbatches)

    # Memory.

    @property
    def is_on_cpu(self) -> bool:
        return bool(jax.default_backend() == "cpu")

    def wait_for(self, nest: Nest) -> None:
        jax.block_until_ready(nest)

    def out_of_memory(self, error: Exception) -> Exception | None:
        is_of_jax = isinstance(error, jax.errors.JaxRuntimeError)
        is_exhausted = is_of_jax and any(text in str(error) for text in _EXHAUSTED)
        is_exhausted |= isinstance(error, MemoryError)
        return error.with_traceback(None) if is_exhausted else None

    @contextlib.contextmanager
    def restoring(self, is_own: bool) -> Iterator[None]:
        state = self.state()
        try:
            yield
        finally:
            state.restore()


class _Held:
    """A snapshot of the values that a backend holds while it trains."""

    def __init__(self, backend: JaxBackend) -> None:
        self._backend, self._values = backend, dict(backend._values)

    def restore(self) -> None:
        self._backend._values = dict(self._values)


class Compiled:
    """A function of the core as a pure function, which is compiled if the model is.

    With `is_brief` it is compiled without optimization, as it runs only a few times.
    """

    def __init__(self, backend: JaxBackend, function: Function, is_brief: bool) -> None:
        self._backend, self._function = backend, function
        self._reads = [group for group in function.reads if group not in function.updates]
        self._pure: Callable[..., Nest] = self._run
        model = backend._model
        if model.jit_compile and not model.run_eagerly:
            options = layer_calls.BRIEF_OPTIONS if is_brief else None
            self._pure = jax.jit(self._run, donate_argnums=0, compiler_options=options)

    def __call__(self, *arguments: Nest) -> Nest:
        result, values = self._pure(*self._inputs(arguments))
        self._backend.put(values)
        return result

    def shapes(self, arguments: tuple[Nest, ...]) -> Nest:
        """Return the shapes of the function's results, without running it."""
        return jax.eval_shape(self._pure, *self._inputs(arguments))[0]

    def _inputs(self, arguments: tuple[Nest, ...]) -> tuple[Nest, ...]:
        number = int(self._function.consumes)
        updated = {group: self._backend.values(group) for group in self._function.updates}
        read = {group: self._backend.values(group) for group in self._reads}
        return (updated, arguments[:number]), read, arguments[number:]

    def _run(
        self,
        donated: tuple[_Values, tuple[Nest, ...]],
        read: _Values,
        arguments: tuple[Nest, ...],
    ) -> tuple[Nest, _Changed]:
        """Return the function's result and new values: all of the groups that it updates, and only
        the changed ones of other groups, because results of a program are copied.
        """
        updated, consumed = donated
        values, backend = {**updated, **read}, self._backend
        with backend.scope_with(values) as scope:
            result = self._function.run(*consumed, *arguments)
        refusals.check_known(backend._model, scope, map(backend.variables, values))
        after = backend.values_in(scope, values)
        changed = {group: _changed(after[group], read[group]) for group in read}
        return result, {**changed, **{group: dict(enumerate(after[group])) for group in updated}}


def _changed(after: Iterable[jax.Array], before: Iterable[jax.Array]) -> dict[int, jax.Array]:
    """Return the values that have changed, by index."""
    return {i: new for i, (new, old) in enumerate(zip(after, before)) if new is not old}
