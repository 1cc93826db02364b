"""Run the outermost calls of layers in a step that is traced by microbatches.

A call that goes by microbatches is a scan over them, of a function that keeps nothing but its
inputs: JAX runs it again where it takes gradients, and adds up those of the weights in its loop.
The values of variables are arguments of that function, and what a call writes to is carried through
the scan, so each microbatch draws other random numbers, the same ones in both passes.

A call that is not known to treat samples one by one runs whole, and the calls that it makes are
then the outermost ones: always exact, at the cost of memory.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import keras

from ga_model.backends.jax.call_trial import kinds_of
from ga_model.backends.jax.nests import with_leaves
from ga_model.base._call_again import inside_of_call
from ga_model.base._context import ThreadValue
from ga_model.base._identity import is_in
from ga_model.base._in_front import InFront
from ga_model.base._internals import (
    MOMENTS,
    adder_of,
    is_rematerialized,
    is_symbolic,
    layers_in,
    losses_of_scope,
    mask_of,
    scope_of,
    seeds,
    set_mask,
    stateless_scope,
    value_in,
)
from ga_model.core.statistics import Listener, Moments
from ga_model.hearing._metric_calls import waiting
from ga_model.hearing._moments_heard import is_known, listener, telling
from ga_model.hearing._splitting import NotByRowsError, Splitting

_NOT_ROWS = "combines samples, or gives something other than one value per sample"
_calls = ThreadValue()  # what is done with outermost calls in this thread, or None
_is_read = ThreadValue(False)  # whether BatchNormalization is to normalize by running averages


class _Traced(NamedTuple):
    """What a call gives for some samples.

    Attributes:
        outputs: arrays.
        masks: of those outputs that have one, by their place.
        state: values of the variables of the layer.
        losses: scalars that layers added.
        moments: of the calls of BatchNormalization layers.
    """

    outputs: list[Any]
    masks: dict[int, Any]
    state: list[Any]
    losses: list[Any]
    moments: list[Moments]


class _Call:
    """One call of a layer, as a function of arrays.

    Args:
        layer: the layer.
        call: its `call`.
        args, kwargs: the arguments. Arrays whose axis 0 is as long as that of the first one have
            the samples.

    Attributes:
        rows: samples, or 0 if there are none.
        samples: the arrays that have them.
        kinds: what each loss that layers add is over samples, "mean", "sum" or None.
        heard: calls of BatchNormalization layers in it.
    """

    def __init__(self, layer: Any, call: Callable[..., Any], args: Any, kwargs: Any) -> None:
        self._layer, self._call = layer, call
        self._arguments = args, kwargs
        self._leaves, self._structure = jax.tree.flatten(self._arguments)
        shapes = [tuple(getattr(leaf, "shape", ())) for leaf in self._leaves]
        self.rows = next((shape[0] for shape in shapes if shape), 0)
        self._places = [i for i, shape in enumerate(shapes) if shape and shape[0] == self.rows]
        self.samples = [self._leaves[place] for place in self._places]
        self._variables = list(layer.variables)
        self._scope = stateless_scope()
        self.state = [value_in(self._scope, variable) for variable in self._variables]
        self.kinds: list[Any] = []
        self._adders: list[Any] = []
        self._written: list[int] = []  # places of the variables that it writes to
        self.heard: list[Any] = []
        self._outputs: Any = None  # without its arrays

    def run(self, state: list[Any], samples: list[Any], knows_others: bool = True) -> _Traced:
        """Trace the call for some samples, with values of variables.

        Args:
            state: values of the variables of the layer.
            samples: arrays.
            knows_others: whether the values of other variables are known, too.
        """
        leaves = list(self._leaves)
        for place, array in zip(self._places, samples):
            leaves[place] = array
        args, kwargs = with_leaves(self._arguments, leaves)
        known = dict(self._scope.state_mapping) if knows_others else {}
        hears = Listener()
        with scope_of(self._variables, state) as scope:
            for key, value in known.items():  # of other variables, for layers that share them
                scope.state_mapping.setdefault(key, value)
            before = dict(scope.state_mapping)
            with inside_of_call.set(True), listener.set(hears):
                outputs = self._call(*args, **kwargs)
            losses = losses_of_scope(scope)
            now = scope.state_mapping
        own = {id(variable) for variable in self._variables}
        if any(now[key] is not before.get(key) for key in now if key not in own):
            raise NotByRowsError("writes to a variable of another layer")
        self._adders = [adder_of(loss, self._layer) for loss in losses]
        self.heard = hears.calls
        flat = jax.tree.leaves(outputs)
        self._outputs = with_leaves(outputs, [0] * len(flat))
        masks = {i: m for i, array in enumerate(flat) if (m := mask_of(array)) is not None}
        kept = hears.written()
        after = [
            old if id(variable) in kept else now[id(variable)]
            for variable, old in zip(self._variables, state)
        ]
        pairs = enumerate(zip(after, state))
        self._written = [place for place, (new, old) in pairs if new is not old]
        return _Traced(flat, masks, after, losses, hears.moments)

    def read(self, known: dict[Any, Any]) -> str | None:
        """Return why samples are not known to be treated one by one, or None, and note losses.

        Args:
            known: what was found so far, by layers and shapes.
        """
        shapes = tuple((a.shape, str(a.dtype)) for a in self.samples)
        others = [leaf for place, leaf in enumerate(self._leaves) if place not in self._places]
        static = str([leaf for leaf in others if not hasattr(leaf, "shape")])
        key = (id(self._layer), shapes, static, str(self._structure))
        if key not in known:
            known[key] = self._read()
        why: str | None
        why, self.kinds, self._written = known[key]
        return why

    def _read(self) -> tuple[str | None, list[Any], list[int]]:
        """Return that, the kinds of losses, and what the call writes to."""
        number = 1  # of outputs and masks

        def outputs(state: list[Any], samples: list[Any]) -> list[Any]:
            nonlocal number
            traced = self.run(state, samples, knows_others=False)
            arrays = [*traced.outputs, *traced.masks.values()]
            number = len(arrays)
            return [*arrays, *map(jnp.sum, traced.losses)]

        normalizing = [layer for layer in layers_in(self._layer) if is_known(layer)]
        try:
            with _averaging.of(normalizing), _is_read.set(True), waiting(None):
                trained = [bool(variable.trainable) for variable in self._variables]
                found = kinds_of(outputs, self.state, self.samples, trained)
        except Exception as error:  # whatever code of the user's raises on other arrays
            line = next(iter(str(error).splitlines()), type(error).__name__)
            return f"cannot be run by itself ({line})", [], self._written
        others = found[:number]
        why = None if all(kind == "rows" for kind in others) else _NOT_ROWS
        return why, found[number:], self._written

    def written(self) -> list[str]:
        """Return what it writes to but seeds and the statistics of BatchNormalization."""
        parts = layers_in(self._layer)
        normal = [part for part in parts if isinstance(part, keras.layers.BatchNormalization)]
        known = {id(seed) for part in parts for seed in seeds(part)}
        known |= {id(variable) for part in normal for variable in part.variables}
        found = [self._variables[place] for place in self._written]
        return sorted({variable.path for variable in found if id(variable) not in known})

    def by_microbatches(self, size: int) -> Any:
        """Run the call by microbatches of `size` samples, and return its outputs."""
        number, rest = divmod(self.rows, size)
        written = list(self._written)

        @functools.partial(jax.checkpoint, prevent_cse=False)
        def run(carried: list[Any], samples: list[Any]) -> tuple[list[Any], _Traced]:
            state = list(self.state)
            for place, value in zip(written, carried):
                state[place] = value
            traced = self.run(state, samples)
            return [traced.state[place] for place in written], traced._replace(state=[])

        carried, found = [self.state[place] for place in written], []
        shares: list[int] = []
        if number > 0:
            stacked = [a[: number * size].reshape(number, size, *a.shape[1:]) for a in self.samples]
            carried, traced = jax.lax.scan(run, carried, stacked)
            joined = jax.tree.map(lambda a: a.reshape(number * size, *a.shape[2:]), traced[:2])
            losses = [
                jnp.sum(loss) if self._is_sum(place) else jnp.mean(loss)
                for place, loss in enumerate(traced.losses)
            ]
            moments = [Moments.of_stacked(m) for m in traced.moments]
            found.append(
                traced._replace(outputs=joined[0], masks=joined[1], losses=losses, moments=moments)
            )
            shares.append(number * size)
        if rest:
            carried, traced = run(carried, [a[number * size :] for a in self.samples])
            found.append(traced)
            shares.append(rest)
        for place, value in zip(written, carried):
            self._variables[place].assign(value)
        return self._ended(found, shares)

    def _is_sum(self, place: int) -> bool:
        """Return whether a loss that a layer adds is summed over microbatches."""
        return bool(self.kinds[place] == "sum")

    def _ended(self, found: list[_Traced], shares: list[int]) -> Any:
        """Put together what two parts of the samples gave."""
        weights = [share / self.rows for share in shares]
        for place, adder in enumerate(self._adders):
            parts = [jnp.sum(part.losses[place]) for part in found]
            is_sum = self._is_sum(place)
            adder.add_loss(sum(parts if is_sum else [w * p for w, p in zip(weights, parts)]))
        for place, call in enumerate(self.heard):
            moments = found[0].moments[place]
            for part in found[1:]:
                moments = moments.plus(part.moments[place])
            if (hears := listener.get()) is not None:
                hears.calls.append(call)
                hears.moments.append(moments)
            else:
                call.move(moments)
        flat = [jnp.concatenate(parts) for parts in zip(*(part.outputs for part in found))]
        for place in found[0].masks:
            set_mask(flat[place], jnp.concatenate([part.masks[place] for part in found]))
        return with_leaves(self._outputs, flat)


class _Splitting(Splitting):
    """How the calls of one step are split.

    Args:
        model: the model whose step is traced.
        size: samples per microbatch.
        known: as `_Call.read` takes it.
    """

    def __init__(self, model: Any, size: int, known: dict[Any, Any]) -> None:
        super().__init__(model)
        self._size = size
        self._known = known

    def applies(self, layer: Any) -> bool:
        if inside_of_call.get() or is_symbolic() or stateless_scope() is None:
            return False
        has_weights = bool(layer.weights)
        self._has_heard = self._has_heard or has_weights
        return has_weights and not any(map(is_rematerialized, layers_in(layer)))

    def _by_microbatches(
        self, layer: Any, call: Callable[..., Any], args: Any, kwargs: Any, training: Any
    ) -> tuple[Any, tuple[list[str], list[str]]]:
        found = _Call(layer, call, args, kwargs)
        if found.rows <= self._size:
            raise NotByRowsError("")
        why = found.read(self._known)
        if why is None and None in found.kinds:
            why = "adds a loss that is neither a mean nor a sum over samples"
        if why is None and (written := found.written()):
            why = f"writes to {written} in each call"
        if why is not None:
            raise NotByRowsError(f"it {why}")
        outputs = found.by_microbatches(self._size)
        trained = self._model._batch_normalization_layers() if training is True else []
        trained = [part for part in layers_in(layer) if is_in(part, trained)]
        normalizing = [part.name for part in trained if is_known(part)]
        others = [part.name for part in trained if not is_known(part)]
        return outputs, (normalizing, others)


def _with_averages(layer: Any, moments: Callable[..., Any]) -> Callable[..., Any]:
    def averages(inputs: Any, mask: Any) -> Any:
        if not _is_read.get():
            return moments(inputs, mask)
        return tuple(
            jnp.asarray(v.value, inputs.dtype) for v in (layer.moving_mean, layer.moving_variance)
        )

    return averages


_averaging = InFront(MOMENTS, _with_averages)


def _heard(layer: Any, call: Callable[..., Any]) -> Callable[..., Any]:
    def heard(*args: Any, **kwargs: Any) -> Any:
        calls = _calls.get()
        if calls is None or not calls.applies(layer):
            return call(*args, **kwargs)
        return calls.run(layer, call, args, kwargs)

    return heard


_in_front = InFront("call", _heard)


@contextlib.contextmanager
def splitting_calls(model: Any, size: int, known: dict[Any, Any]) -> Iterator[None]:
    """Let the outermost calls of layers go by microbatches.

    Args:
        model: the model whose step is traced.
        size: samples per microbatch.
        known: what was found so far, by layers and shapes.
    """
    splitting = _Splitting(model, size, known)
    heard = telling(model._batch_normalization_layers())
    with _in_front.of(layers_in(model)), heard, _calls.set(splitting):
        yield
        splitting.end()
