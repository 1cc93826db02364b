"""Run a layer call by microbatches.

The forward pass keeps no activations; the backward pass repeats the call. A backend implements
both. Values of variables are arguments of the call, and the state that it writes is carried from
one microbatch to the next, so each microbatch draws other random numbers, and both passes draw the
same. Where functions are not traced, Python state is restored for each microbatch.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
from keras import ops

from ga_model.base import _numbers
from ga_model.base._context import ThreadValue
from ga_model.base._internals import (
    MOMENTS,
    is_built,
    layer_of_loss,
    layers_in,
    losses_of_scope,
    mask_of,
    seed_ids,
    set_mask,
    stateless_scope,
    stateless_scope_with,
    value_in,
)
from ga_model.base._method_patch import MethodPatch
from ga_model.base._python_state import SMALL, PythonState, inside_split_call, leaves_in
from ga_model.base._types import Nest, Scalar, Tensor
from ga_model.core.backend import Backend
from ga_model.core.call_types import IsolatedCall, Split, Traced
from ga_model.core.messages import text_of
from ga_model.core.metric_calls import delaying_updates
from ga_model.core.models import unrecorded
from ga_model.core.proof.calls import HALF, NotByRowsError, kinds_of_call
from ga_model.core.proof.own_code import has_own_gradients, may_run_user_code
from ga_model.core.statistics import Call, MomentsRecorder, current_recorder, is_known

_NOT_ROWS = "it combines samples, or gives something other than one value per sample"
_NOT_ROWS_BACK = "it has a custom gradient that combines samples"
_uses_averages = ThreadValue(False)  # whether BatchNormalization uses running averages


class LayerCall:
    """A call of a layer, as a function of tensors.

    Args:
        backend: the backend of the model.
        layer: the layer.
        call: its `call`.
        args, kwargs: arguments of the call. The first array whose axis 0 is not 1 long has the
            samples on axis 0, and so have all arrays of its length.
        size: samples per microbatch.
        known: returns samples of an array from the batch, for a trial, or None.

    Attributes:
        samples: the arrays with samples, and their masks.
        kinds: reduction over samples of each loss that layers add: "mean", "sum" or None.
        normalizations: calls of BatchNormalization layers inside the call.

    Raises:
        NotByRowsError: if there are no more samples than `size`, or the layer cannot be built.
    """

    def __init__(
        self,
        backend: Backend,
        layer: keras.Layer,
        call: Callable[..., Nest],
        args: tuple[Nest, ...],
        kwargs: dict[str, Nest],
        size: int,
        samples_of: Callable[[Tensor], np.ndarray | None],
    ) -> None:
        self._backend, self._layer, self._call = backend, layer, call
        self._arguments, self._size, self._samples_of = (args, kwargs), size, samples_of
        self._leaves: list[Any] = []  # in the order of `map_structure`, unlike that of `flatten`
        keras.tree.map_structure(self._leaves.append, self._arguments)
        self._leaves = list(map(_tensor_of, self._leaves))
        tensors = [(i, leaf) for i, leaf in enumerate(self._leaves) if _is_array(leaf)]
        arrays = [(place, tensor) for place, tensor in tensors if len(tensor.shape)]
        first_array = next((tensor for _, tensor in arrays if tensor.shape[0] != 1), None)
        rows = 0 if first_array is None else _numbers.shape_of(first_array)[0]
        if isinstance(rows, int) and rows <= size:
            raise NotByRowsError("")
        if why := backend.reason_not_to_split(layer):
            raise NotByRowsError(why)
        self._build()
        length = None if first_array is None else first_array.shape[0]
        self._places = [place for place, tensor in arrays if tensor.shape[0] == length]
        self._shared = [place for place, _ in tensors if place not in self._places]
        samples = [self._leaves[place] for place in self._places]
        masks = [mask_of(tensor) for tensor in samples]
        self._masked = [place for place, m in zip(self._places, masks) if m is not None]
        self.samples = samples + [mask for mask in masks if mask is not None]
        self._variables = list(layer.variables)
        self._scope = stateless_scope()
        self._state = [value_in(self._scope, variable) for variable in self._variables]
        self._python = PythonState(layer, most_bytes=SMALL)
        self.kinds: list[str | None] = []
        self._adders: list[keras.Layer] = []
        self._written: list[int] = []  # indices of the variables that it writes to
        self.normalizations: list[Call] = []
        self._outputs: Nest = None  # structure, with 0 in place of tensors
        self._tensors: list[int] = []  # indices of the tensors among its leaves

    def _build(self) -> None:
        """Create the variables of the layer: not possible in a stateless scope."""
        if is_built(self._layer):
            return
        leaves = (
            keras.KerasTensor(leaf.shape, keras.backend.standardize_dtype(leaf.dtype))
            if _is_array(leaf)
            else leaf
            for leaf in self._leaves
        )
        args, kwargs = keras.tree.map_structure(lambda _: next(leaves), self._arguments)
        try:
            with inside_split_call.set(True):
                keras.backend.compute_output_spec(self._layer, *args, **kwargs)
        except Exception as error:  # custom code may not support symbolic inputs
            raise NotByRowsError("it is not built, and cannot be built without a call") from error

    @property
    def _fixed(self) -> list[Tensor]:
        return [*self._state, *(self._leaves[place] for place in self._shared)]

    def _run(
        self, fixed: list[Tensor], samples: list[Tensor], knows_others: bool = True
    ) -> tuple[list[Tensor], Traced]:
        """Trace the call on some samples.

        Args:
            fixed: values of the layer's variables, and arrays shared by all samples.
            samples: arrays with samples, and their masks.
            knows_others: whether the values of other variables are available, too.

        Returns:
            The values of the variables after the call, and its results.
        """
        state, leaves = fixed[: len(self._variables)], list(self._leaves)
        for place, array in zip(self._shared, fixed[len(state) :]):
            leaves[place] = array
        for place, array in zip(self._places, samples):
            leaves[place] = array
        for place, mask in zip(self._masked, samples[len(self._places) :]):
            leaves[place] = ops.copy(leaves[place])  # its other uses may have other masks
            set_mask(leaves[place], mask)
        remaining = iter(leaves)
        args, kwargs = keras.tree.map_structure(lambda _: next(remaining), self._arguments)
        other_values = dict(self._scope.state_mapping) if self._scope and knows_others else {}
        recorder = MomentsRecorder(self._backend.current_graph)
        self._python.restore()
        with stateless_scope_with(self._variables, state) as scope:
            for key, value in other_values.items():  # other variables, of layers that share them
                scope.state_mapping.setdefault(key, value)
            before = dict(scope.state_mapping)
            recorded = current_recorder.set(recorder)
            with unrecorded(), delaying_updates(None), inside_split_call.set(True), recorded:
                outputs = self._call(*args, **kwargs)
            losses = losses_of_scope(scope)
            mapping = scope.state_mapping
        own_ids = {id(variable) for variable in self._variables}
        if any(mapping[key] is not before.get(key) for key in mapping if key not in own_ids):
            raise NotByRowsError("it writes to a variable of another layer")
        values = (mapping[id(variable)] for variable in self._variables)
        if not all(map(self._backend.is_available, values)):
            raise NotByRowsError(
                "it writes to a variable in a branch, a loop or a function of its own"
            )
        self._adders = [layer_of_loss(loss, self._layer) for loss in losses]
        self.normalizations = recorder.calls
        output_leaves: list[Any] = []
        keras.tree.map_structure(output_leaves.append, outputs)
        if any(_holds_tensors(leaf) for leaf in output_leaves if not _is_array(leaf)):
            raise NotByRowsError("it returns tensors in an object that cannot be concatenated")
        for part, name, value in self._python.changed():
            if not type(part).__module__.startswith("keras.") and _has_tensors([value]):
                raise NotByRowsError(f"it stores a tensor in its attribute `{name}`")
        self._tensors = [place for place, leaf in enumerate(output_leaves) if _is_array(leaf)]
        self._outputs = keras.tree.map_structure(lambda x: 0 if _is_array(x) else x, outputs)
        tensors = [output_leaves[place] for place in self._tensors]
        attached = {
            f"{place} {name}": tensor
            for place, output in enumerate(tensors)
            for name, tensor in self._backend.attached_to(output).items()
        }
        averages = recorder.written()
        after = [
            old if id(variable) in averages else mapping[id(variable)]
            for variable, old in zip(self._variables, state)
        ]
        pairs = enumerate(zip(after, state))
        self._written = [place for place, (new, old) in pairs if new is not old]
        return after, Traced(tensors, attached, losses, recorder.moments)

    def analyze(self, training: bool | None) -> str | None:
        """Return why the call cannot be split, or None, and set `kinds`.

        Args:
            training: whether the call runs in training mode, or None.
        """
        cache = self._backend.known_calls  # by layer, mode and shapes
        arrays = [(tuple(a.shape[1:]), str(a.dtype)) for a in self.samples]
        shared = [(place, tuple(self._leaves[place].shape)) for place in self._shared]
        static = str([leaf for leaf in self._leaves if not _is_array(leaf)])
        key = (id(self._layer), training, static, *self._places, *arrays, *shared)
        if key not in cache:
            cache[key] = self._layer, *self._analyze()  # with the layer, to keep its id unique
        reason: str | None
        _, reason, self.kinds, self._written = cache[key]
        return reason

    def _analyze(self) -> tuple[str | None, list[str | None], list[int]]:
        """Try the call. Return a reason or None, kinds of losses, indices of written variables."""
        num_outputs = 1  # of outputs and attached tensors

        def outputs(fixed: list[Tensor], samples: list[Tensor]) -> list[Tensor]:
            nonlocal num_outputs
            _, traced = self._run(fixed, samples, knows_others=False)
            arrays = [*traced.outputs, *traced.attached.values()]
            num_outputs = len(arrays)
            return [*arrays, *map(ops.sum, traced.losses)]

        def without_losses(fixed: list[Tensor], samples: list[Tensor]) -> list[Tensor]:
            return outputs(fixed, samples)[:num_outputs]

        normalizing = [layer for layer in layers_in(self._layer) if is_known(layer)]
        python_state = self._python
        try:
            with _averaging.of(normalizing), _uses_averages.set(True):
                self._python = PythonState(self._layer, most_bytes=SMALL)  # after patching methods
                trained = [bool(variable.trainable) for variable in self._variables]
                trained += [True for _ in self._shared]
                arguments = self._layer, self._fixed, self.samples
                run = self._backend.run_isolated(IsolatedCall(outputs, *arguments))
                gradients = None
                if has_own_gradients(self._layer, self._backend):
                    of_outputs = IsolatedCall(without_losses, *arguments)
                    gradients = self._backend.run_isolated(of_outputs, with_gradients=True)
                dtypes = {part.compute_dtype for part in layers_in(self._layer)}
                is_half = not dtypes.isdisjoint(HALF)
                is_own = may_run_user_code(self._layer, self._backend)
                trial_data = [self._samples_of(array) if is_own else None for array in self.samples]
                kinds, adds_up = kinds_of_call(
                    run, gradients, self._fixed, self.samples, trial_data, trained, is_half
                )
        except NotByRowsError as error:
            return str(error), [], self._written
        except Exception as error:  # custom code may raise anything on trial data
            if isinstance(error, Warning) or self._backend.out_of_memory(error) is not None:
                raise
            return f"it cannot be run by itself ({text_of(error)})", [], self._written
        finally:
            self._python = python_state
            python_state.restore()
        output_kinds = kinds[:num_outputs]
        reason = None if adds_up else _NOT_ROWS_BACK
        reason = reason if all(kind == "rows" for kind in output_kinds) else _NOT_ROWS
        return reason, kinds[num_outputs:], self._written

    def written(self) -> list[str]:
        """Return the paths of variables that it writes to, except seeds and BatchNormalization."""
        parts = layers_in(self._layer)
        normal = [part for part in parts if isinstance(part, keras.layers.BatchNormalization)]
        excluded = seed_ids(self._layer)
        excluded |= {id(variable) for part in normal for variable in part.variables}
        written = [self._variables[place] for place in self._written]
        return sorted({variable.path for variable in written if id(variable) not in excluded})

    def by_microbatches(self, most: int | None) -> Nest:
        """Run the call by microbatches, and return its outputs.

        Args:
            most: see `splitting_calls`.
        """
        written = list(self._written)

        def run(
            carried: list[Tensor], fixed: list[Tensor], samples: list[Tensor], share: Scalar
        ) -> tuple[list[Tensor], Traced]:
            values = list(fixed)
            for place, value in zip(written, carried):
                values[place] = value
            state, traced = self._run(values, samples)
            if len(traced.losses) != len(self.kinds):
                raise NotByRowsError("it adds another number of losses than before")
            losses = [
                ops.sum(loss) * (1.0 if kind == "sum" else _numbers.like(loss, share))
                for loss, kind in zip(traced.losses, self.kinds)
            ]
            return [state[place] for place in written], traced._replace(losses=losses)

        initial = [self._state[place] for place in written]
        arguments = self._layer, run, initial, self._fixed, self.samples, self._size, most
        try:
            carried, traced = self._backend.by_microbatches(Split(*arguments))
        except BaseException:
            self._python.restore()
            raise
        for place, value in zip(written, carried):
            self._variables[place].assign(value)
        for adder, loss in zip(self._adders, traced.losses):
            adder.add_loss(loss)
        for call, moments in zip(self.normalizations, traced.moments):
            if (recorder := current_recorder.get()) is not None:
                recorder.calls.append(call)
                recorder.moments.append(moments)
            else:
                call.move(moments)
        outputs = list(traced.outputs)
        for key, tensor in traced.attached.items():
            index, name = key.split()
            output = outputs[int(index)]
            outputs[int(index)] = self._backend.with_attached(output, name, tensor)
        leaves: list[Any] = []
        keras.tree.map_structure(leaves.append, self._outputs)
        for place, output in zip(self._tensors, outputs):
            leaves[place] = output
        remaining = iter(leaves)
        return keras.tree.map_structure(lambda _: next(remaining), self._outputs)


def _tensor_of(leaf: Any) -> Any:
    """Return the tensor of a variable or numeric array, and any other leaf unchanged."""
    if isinstance(leaf, keras.Variable):
        return value_in(stateless_scope(), leaf)
    # Keras does not convert arrays passed to a functional model directly.
    is_numbers = isinstance(leaf, np.ndarray) and leaf.dtype.kind in "biuf"
    return ops.convert_to_tensor(leaf) if is_numbers else leaf


def _is_array(leaf: Any) -> bool:
    return hasattr(leaf, "shape") and hasattr(leaf, "dtype")


def _holds_tensors(value: Any) -> bool:
    attributes = [getattr(value, name, None) for name in getattr(value, "__slots__", ())]
    return _has_tensors([*attributes, getattr(value, "__dict__", {})])


def _has_tensors(values: list[Any]) -> bool:
    return any(map(ops.is_tensor, leaves_in(values)))


def _with_averages(
    layer: keras.Layer, moments: Callable[..., tuple[Tensor, ...]]
) -> Callable[..., tuple[Tensor, ...]]:
    def averages(inputs: Tensor, mask: Tensor | None) -> tuple[Tensor, ...]:
        if not _uses_averages.get():
            return moments(inputs, mask)
        return tuple(
            ops.cast(ops.convert_to_tensor(v.value), inputs.dtype)
            for v in (layer.moving_mean, layer.moving_variance)
        )

    return averages


_averaging = MethodPatch(MOMENTS, _with_averages)
