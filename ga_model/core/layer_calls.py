"""Run the outermost calls of layers in a step that is traced by microbatches.

The step of a model runs once, as it is, on the full batch. While it runs, a function stands in
front of the `call` of each layer, and lets a call on the samples of the batch go by microbatches:
forward without keeping activations, and once more when its gradient is asked for. How is the
backend's. The values of variables are arguments of what is run, and what a call writes to is
carried from one microbatch to the next, so each draws other random numbers, the same ones in both
passes.

A call that is not known to treat samples one by one runs whole, and the calls that it makes are
then the outermost ones: always exact, at the cost of memory.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import keras
from keras import ops

from ga_model.base import _numbers
from ga_model.base._call_again import PythonState, inside_of_call
from ga_model.base._context import ThreadValue
from ga_model.base._identity import is_in
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
from ga_model.base._method_patch import MethodPatch
from ga_model.core.backend import Backend
from ga_model.core.proof.calls import HALF, kinds_of_call
from ga_model.core.statistics import Listener, Moments
from ga_model.recording._metric_calls import waiting
from ga_model.recording._models import unrecorded
from ga_model.recording._moments_heard import is_known, listener
from ga_model.recording._splitting import NotByRowsError, Splitting, splitting_by

_NOT_ROWS = "combines samples, or gives something other than one value per sample"
_NOT_ROWS_BACK = "has a custom gradient that combines samples"
_is_read = ThreadValue(False)  # whether BatchNormalization is to normalize by running averages


class Traced(NamedTuple):
    """What a call gives for some samples.

    Attributes:
        outputs: tensors.
        attached: what losses of Keras's find at them: tensors, by the number of the output and a
            name.
        losses: scalars that layers added.
        moments: of the calls of BatchNormalization layers.
    """

    outputs: list[Any]
    attached: dict[str, Any]
    losses: list[Any]
    moments: list[Moments]


class Split(NamedTuple):
    """A function that is to run by microbatches.

    Attributes:
        function: takes `carried`, `fixed` and some samples; returns new values for the first, and a
            `Traced`.
        carried: tensors that go from one microbatch to the next.
        fixed: tensors that all have.
        samples: tensors that have the samples on axis 0.
        size: samples of a microbatch.
        are_sums: of each loss in a `Traced`, whether it is a sum, and no mean.
        most: as `Backend.splitting_calls` takes it.
    """

    function: Callable[..., tuple[list[Any], Traced]]
    carried: list[Any]
    fixed: list[Any]
    samples: list[Any]
    size: int
    are_sums: list[bool]
    most: int | None


class LayerCall:
    """One call of a layer, as a function of tensors.

    Args:
        backend: what the model runs on.
        layer: the layer.
        call: its `call`.
        args, kwargs: the arguments. Arrays whose axis 0 is as long as that of the first one have
            the samples.

    Attributes:
        rows: samples, or 0 if there are none.
        samples: the arrays that have them, and their masks.
        kinds: what each loss that layers add is over samples, "mean", "sum" or None.
        heard: calls of BatchNormalization layers in it.
    """

    def __init__(
        self, backend: Backend, layer: Any, call: Callable[..., Any], args: Any, kwargs: Any
    ) -> None:
        self._backend, self._layer, self._call = backend, layer, call
        self._arguments = args, kwargs
        self._leaves: list[Any] = []  # in the order of `map_structure`, unlike that of `flatten`
        keras.tree.map_structure(self._leaves.append, self._arguments)
        self._leaves = [
            value_in(stateless_scope(), leaf) if isinstance(leaf, keras.Variable) else leaf
            for leaf in self._leaves
        ]
        tensors = [(i, leaf) for i, leaf in enumerate(self._leaves) if _is_array(leaf)]
        found = [(place, tensor) for place, tensor in tensors if len(tensor.shape)]
        self.rows = _numbers.shape_of(found[0][1])[0] if found else 0
        length = found[0][1].shape[0] if found else 0
        self._places = [place for place, tensor in found if tensor.shape[0] == length]
        self._shared = [place for place, _ in tensors if place not in self._places]
        samples = [self._leaves[place] for place in self._places]
        masks = [mask_of(tensor) for tensor in samples]
        self._masked = [place for place, m in zip(self._places, masks) if m is not None]
        self.samples = samples + [mask for mask in masks if mask is not None]
        self._variables = list(layer.variables)
        self._scope = stateless_scope()
        self._state = [value_in(self._scope, variable) for variable in self._variables]
        self._python = PythonState(layer)
        self.kinds: list[Any] = []
        self._adders: list[Any] = []
        self._written: list[int] = []  # places of the variables that it writes to
        self.heard: list[Any] = []
        self._outputs: Any = None  # without its tensors
        self._tensors: list[int] = []  # places of these among its leaves

    @property
    def _fixed(self) -> list[Any]:
        return [*self._state, *(self._leaves[place] for place in self._shared)]

    def _run(
        self, fixed: list[Any], samples: list[Any], knows_others: bool = True
    ) -> tuple[list[Any], Traced]:
        """Trace the call for some samples.

        Args:
            fixed: values of the variables of the layer, and arrays that all samples share.
            samples: arrays, and their masks.
            knows_others: whether the values of other variables are known, too.

        Returns:
            The values behind the call, and what it gives.
        """
        state, leaves = fixed[: len(self._variables)], list(self._leaves)
        for place, array in zip(self._shared, fixed[len(state) :]):
            leaves[place] = array
        for place, array in zip(self._places, samples):
            leaves[place] = array
        for place, mask in zip(self._masked, samples[len(self._places) :]):
            leaves[place] = ops.copy(leaves[place])  # another may have another mask
            set_mask(leaves[place], mask)
        rest = iter(leaves)
        args, kwargs = keras.tree.map_structure(lambda _: next(rest), self._arguments)
        known = dict(self._scope.state_mapping) if self._scope and knows_others else {}
        hears = Listener(place=self._backend.place)
        self._python.put_back()
        with scope_of(self._variables, state) as scope:
            for key, value in known.items():  # of other variables, for layers that share them
                scope.state_mapping.setdefault(key, value)
            before = dict(scope.state_mapping)
            with unrecorded(), inside_of_call.set(True), listener.set(hears):
                outputs = self._call(*args, **kwargs)
            losses = losses_of_scope(scope)
            now = scope.state_mapping
        own = {id(variable) for variable in self._variables}
        if any(now[key] is not before.get(key) for key in now if key not in own):
            raise NotByRowsError("it writes to a variable of another layer")
        values = (now[id(variable)] for variable in self._variables)
        if not all(map(self._backend.is_at_hand, values)):
            raise NotByRowsError(
                "it writes to a variable in a branch, a loop or a function of its own"
            )
        self._adders = [adder_of(loss, self._layer) for loss in losses]
        self.heard = hears.calls
        given: list[Any] = []
        keras.tree.map_structure(given.append, outputs)
        self._tensors = [place for place, leaf in enumerate(given) if _is_array(leaf)]
        self._outputs = keras.tree.map_structure(lambda x: 0 if _is_array(x) else x, outputs)
        tensors = [given[place] for place in self._tensors]
        attached = {
            f"{place} {name}": tensor
            for place, output in enumerate(tensors)
            for name, tensor in self._backend.attached_to(output).items()
        }
        kept = hears.written()
        after = [
            old if id(variable) in kept else now[id(variable)]
            for variable, old in zip(self._variables, state)
        ]
        pairs = enumerate(zip(after, state))
        self._written = [place for place, (new, old) in pairs if new is not old]
        return after, Traced(tensors, attached, losses, hears.moments)

    def read(self, known: dict[Any, Any]) -> str | None:
        """Return why samples are not known to be treated one by one, or None, and note losses.

        Args:
            known: what was found so far, by layers and shapes.
        """
        shapes = tuple((tuple(a.shape), str(a.dtype)) for a in self.samples)
        static = str([leaf for leaf in self._leaves if not _is_array(leaf)])
        key = (id(self._layer), shapes, static, tuple(self._places), tuple(self._shared))
        if key not in known:
            known[key] = self._layer, *self._read()  # with the layer, whose id no other one gets
        why: str | None
        _, why, self.kinds, self._written = known[key]
        return why

    def _read(self) -> tuple[str | None, list[Any], list[int]]:
        """Return that, the kinds of losses, and what the call writes to."""
        number = 1  # of outputs and what is attached to them

        def outputs(fixed: list[Any], samples: list[Any]) -> list[Any]:
            nonlocal number
            _, traced = self._run(fixed, samples, knows_others=False)
            arrays = [*traced.outputs, *traced.attached.values()]
            number = len(arrays)
            return [*arrays, *map(ops.sum, traced.losses)]

        def without_losses(fixed: list[Any], samples: list[Any]) -> list[Any]:
            return outputs(fixed, samples)[:number]

        normalizing = [layer for layer in layers_in(self._layer) if is_known(layer)]
        before = self._python
        try:
            with _averaging.of(normalizing), _is_read.set(True), waiting(None):
                self._python = PythonState(self._layer)  # with what stands in front of methods
                trained = [bool(variable.trainable) for variable in self._variables]
                trained += [True for _ in self._shared]
                run = self._backend.run_apart(outputs)
                gradients = self._backend.run_apart(without_losses, derives=True)
                dtypes = {part.compute_dtype for part in layers_in(self._layer)}
                is_half = not dtypes.isdisjoint(HALF)
                found, adds_up = kinds_of_call(
                    run, gradients, self._fixed, self.samples, trained, is_half
                )
        except Exception as error:  # whatever code of the user's raises on other arrays
            line = next(iter(str(error).splitlines()), type(error).__name__)
            return f"cannot be run by itself ({line})", [], self._written
        finally:
            self._python = before
            before.put_back()
        others = found[:number]
        why = None if adds_up else _NOT_ROWS_BACK
        why = why if all(kind == "rows" for kind in others) else _NOT_ROWS
        return why, found[number:], self._written

    def written(self) -> list[str]:
        """Return what it writes to but seeds and the statistics of BatchNormalization."""
        parts = layers_in(self._layer)
        normal = [part for part in parts if isinstance(part, keras.layers.BatchNormalization)]
        known = {id(seed) for part in parts for seed in seeds(part)}
        known |= {id(variable) for part in normal for variable in part.variables}
        found = [self._variables[place] for place in self._written]
        return sorted({variable.path for variable in found if id(variable) not in known})

    def by_microbatches(self, size: int, most: int | None) -> Any:
        """Run the call by microbatches of `size` samples, and return its outputs.

        Args:
            most: as `Backend.splitting_calls` takes it.
        """
        written = list(self._written)

        def run(
            carried: list[Any], fixed: list[Any], samples: list[Any]
        ) -> tuple[list[Any], Traced]:
            values = list(fixed)
            for place, value in zip(written, carried):
                values[place] = value
            state, traced = self._run(values, samples)
            return [state[place] for place in written], traced

        begun = [self._state[place] for place in written]
        are_sums = [kind == "sum" for kind in self.kinds]
        split = Split(run, begun, self._fixed, self.samples, size, are_sums, most)
        carried, traced = self._backend.by_microbatches(split)
        for place, value in zip(written, carried):
            self._variables[place].assign(value)
        for adder, loss in zip(self._adders, traced.losses):
            adder.add_loss(loss)
        for call, moments in zip(self.heard, traced.moments):
            if (hears := listener.get()) is not None:
                hears.calls.append(call)
                hears.moments.append(moments)
            else:
                call.move(moments)
        outputs = list(traced.outputs)
        for key, tensor in traced.attached.items():
            number, name = key.split()
            output = outputs[int(number)]
            outputs[int(number)] = self._backend.with_attached(output, name, tensor)
        leaves: list[Any] = []
        keras.tree.map_structure(leaves.append, self._outputs)
        for place, output in zip(self._tensors, outputs):
            leaves[place] = output
        rest = iter(leaves)
        return keras.tree.map_structure(lambda _: next(rest), self._outputs)


def _is_array(leaf: Any) -> bool:
    return hasattr(leaf, "shape") and hasattr(leaf, "dtype")


class _Splitting(Splitting):
    """How the calls of one step are split.

    Args:
        model: the model whose step is traced.
        backend: what it runs on.
        size: samples per microbatch.
        known: as `LayerCall.read` takes it.
        most: as `Backend.splitting_calls` takes it.
    """

    def __init__(
        self, model: Any, backend: Backend, size: int, known: dict[Any, Any], most: int | None
    ) -> None:
        super().__init__(model)
        self._backend, self._size, self._known, self._most = backend, size, known, most

    def applies(self, layer: Any) -> bool:
        if inside_of_call.get() or is_symbolic() or not self._backend.is_in_step():
            return False
        has_weights = bool(layer.weights)
        self._has_heard = self._has_heard or has_weights
        return has_weights and not any(map(is_rematerialized, layers_in(layer)))

    def _by_microbatches(
        self, layer: Any, call: Callable[..., Any], args: Any, kwargs: Any, training: Any
    ) -> tuple[Any, tuple[list[str], list[str]]]:
        found = LayerCall(self._backend, layer, call, args, kwargs)
        if isinstance(found.rows, int) and found.rows <= self._size:
            raise NotByRowsError("")
        why = found.read(self._known)
        if why is None and None in found.kinds:
            why = "adds a loss that is neither a mean nor a sum over samples"
        if why is None and (written := found.written()):
            why = f"writes to {written} in each call"
        if why is not None:
            raise NotByRowsError(f"it {why}")
        outputs = found.by_microbatches(self._size, self._most)
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
            ops.cast(ops.convert_to_tensor(v.value), inputs.dtype)
            for v in (layer.moving_mean, layer.moving_variance)
        )

    return averages


_averaging = MethodPatch(MOMENTS, _with_averages)


def splitting_calls(
    model: Any, backend: Backend, size: int, known: dict[Any, Any], most: int | None
) -> AbstractContextManager[None]:
    """Return a context in which the outermost calls of layers go by microbatches.

    Args:
        model: the model whose step is traced.
        backend: what it runs on.
        size: samples per microbatch.
        known: what was found so far, by layers and shapes.
        most: as `Backend.splitting_calls` takes it.
    """
    return splitting_by(model, _Splitting(model, backend, size, known, most))
