"""Microbatches of a call of a layer: a loop over them, forward, and one for gradients.

Each loop calls one function, which is not inlined: what the second one computes again is not shared
with the first, with the memory of all microbatches. Sums of sparse gradients are all of their rows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from ga_model.backends.tensorflow.noting import Noting
from ga_model.base._context import is_unnoted
from ga_model.base._internals import call_scopes, logits_of, mask_of, set_logits, set_mask
from ga_model.base._internals_tf import (
    NOT_INLINED,
    has_forward_derivatives,
    has_second_derivatives,
    is_followed,
    record_on_tapes,
    seen_by_tapes,
    stateful_draws,
    unseen_by_tapes,
)
from ga_model.core.call_types import Apart, Split, Traced
from ga_model.core.proof.calls import TOTAL, NotByRowsError
from ga_model.core.proof.draws import Draws
from ga_model.core.statistics import Moments

# The activations whose inputs Keras's losses compute with, where they find them in the graph.
_ACTIVATIONS = {"Softmax": tf.nn.softmax, "Sigmoid": tf.math.sigmoid}


class Microbatches:
    """Runs a function by microbatches.

    Args:
        split: what is to run.
        jit_compile: whether XLA compiles what is run for each.
    """

    def __init__(self, split: Split, jit_compile: bool) -> None:
        self._function, self._are_sums = split.function, split.are_sums
        self._carried, self._fixed, self._samples = split.carried, split.fixed, split.samples
        self._size, self._jit_compile = split.size, jit_compile
        if not all(isinstance(tensor, tf.Tensor) for tensor in (*self._samples, *self._fixed)):
            raise NotByRowsError("it takes ragged or sparse tensors")
        self._sources = [*self._fixed, *self._samples]
        if tf.executing_eagerly() and has_forward_derivatives(self._sources):
            raise NotByRowsError("its forward-mode derivatives are taken")
        self._rows = _rows_of(self._samples[0])
        self._is_limited = split.most is not None
        self._number = (self._rows + self._size - 1) // self._size
        if split.most is not None:
            self._number = tf.minimum(self._number, split.most)
        self._places = [i for i, source in enumerate(self._sources) if _has_gradient(source)]
        self._in_call = call_scopes()
        self._form: Any = None  # of what is given, without its tensors
        self._ways: list[tuple[str, ...]] = []  # of the gradients of sources, as `_ways_of` has it

    def run(self) -> tuple[list[Any], Traced]:
        """Run all microbatches, and record them on tapes."""
        specs = [_specs(self._carried), _specs(self._fixed), _specs(self._samples, True), _SHARE]
        run_one = self._in_graph(self._run_one, specs)
        if self._form is None:  # where nothing is traced
            with unseen_by_tapes():
                self._run_one(self._carried, self._fixed, self._part(0), tf.ones((), tf.float64))
        backward = None
        sources = [self._sources[place] for place in self._places]
        if any(map(is_followed, sources)):
            # XLA differentiates no function in which it compiles a loop.
            self._jit_compile = self._jit_compile and not has_second_derivatives(sources)
            outputs = tf.nest.flatten(self._form[1][:2])
            upstream = [_specs(outputs, True), _specs(self._form[1].losses)]
            backward = self._in_graph(self._gradients_of_one, [*specs, *upstream])
        with unseen_by_tapes():
            carried, begun, outputs, losses, moments = self._forward(run_one)
        if backward is not None:
            self._record(backward, begun, outputs, losses)
        first, attached = tf.nest.pack_sequence_as(self._form[1][:2], outputs)
        moments = tf.nest.pack_sequence_as(self._form[1].moments, moments)
        return carried, Traced(first, attached, losses, moments)

    def _in_graph(self, function: Callable[..., Any], specs: list[Any]) -> Callable[..., Any]:
        """Return a function of a microbatch that is traced once where a graph is made.

        Raises:
            NotByRowsError: it uses a tensor or a variable that is none of its arguments, or draws
                random numbers that it cannot draw again.
        """
        if tf.executing_eagerly():
            return function
        traced = tf.function(
            function,
            autograph=False,
            jit_compile=self._jit_compile or None,
            experimental_attributes=NOT_INLINED,
        ).get_concrete_function(*specs)
        if any(
            tf.is_symbolic_tensor(t) or t.dtype == tf.resource for t, _ in traced.graph.captures
        ):
            text = "it uses a tensor or variable that is neither its input nor its weight"
            raise NotByRowsError(text)
        if drawing := stateful_draws(traced.graph):
            raise NotByRowsError(f"it draws unseeded random numbers, by {drawing}")
        return traced  # type: ignore[no-any-return]

    def _run_one(
        self, carried: list[Any], fixed: list[Any], samples: list[Any], share: Any
    ) -> tuple[list[Any], Traced]:
        """Run the function on a microbatch, which is a share of all samples."""
        with self._in_call():
            after, traced = self._function(carried, fixed, samples)
        if not all(isinstance(t, tf.Tensor) and t.shape.rank for t in traced.outputs):
            raise NotByRowsError("it returns tensors in an object that cannot be concatenated")
        after = [tf.cast(new, old.dtype) for new, old in zip(after, carried)]
        losses = [
            tf.reduce_sum(loss) * (1.0 if is_sum else tf.cast(share, loss.dtype))
            for loss, is_sum in zip(traced.losses, self._are_sums)
        ]
        moments = [Moments(*map(tf.convert_to_tensor, part)) for part in traced.moments]
        traced = traced._replace(losses=losses, moments=moments)
        self._form = after, traced
        return after, traced

    def _gradients_of_one(
        self,
        carried: list[Any],
        fixed: list[Any],
        samples: list[Any],
        share: Any,
        of_outputs: list[Any],
        of_losses: list[Any],
    ) -> list[Any]:
        """Return the tensors of the gradients of sources, for those of outputs and losses."""
        form = self._form
        sources = [*fixed, *samples]
        sources = [sources[place] for place in self._places]
        with tf.GradientTape(watch_accessed_variables=False) as tape:
            tape.watch(sources)
            _, traced = self._run_one(carried, fixed, samples, share)
        self._form = form
        results = [*tf.nest.flatten(traced[:2]), *traced.losses]
        pairs = [pair for pair in zip(results, [*of_outputs, *of_losses]) if _has_gradient(pair[0])]
        found = tape.gradient(
            [a for a, _ in pairs], sources, output_gradients=[b for _, b in pairs]
        )
        are_shared = (place < len(self._fixed) for place in self._places)
        self._ways = list(map(_ways_of, found, are_shared))
        sparse = [(g.values, g.indices) if isinstance(g, tf.IndexedSlices) else (g,) for g in found]
        return [tensor for of_one in sparse for tensor in of_one if tensor is not None]

    def _rows_at(self, index: Any) -> slice:
        return slice(index * self._size, tf.minimum((index + 1) * self._size, self._rows))

    def _part(self, index: Any) -> list[Any]:
        rows = self._rows_at(index)
        return [tensor[rows] for tensor in self._samples]

    def _share_of(self, part: list[Any]) -> Any:
        with is_unnoted.set(True):
            return tf.cast(_rows_of(part[0]), tf.float64) / tf.cast(self._rows, tf.float64)

    def _forward(self, run_one: Callable[..., Any]) -> Any:
        """Return the state after all and before each microbatch, outputs, losses and moments."""
        after, form = self._form
        outputs = tf.nest.flatten(form[:2])
        moments = tf.nest.flatten(form.moments)

        def step(index: Any, carried: Any, begun: Any, arrays: Any, losses: Any, sums: Any) -> Any:
            part = self._part(index)
            begun = [array.write(index, value) for array, value in zip(begun, carried)]
            carried, traced = run_one(carried, self._fixed, part, self._share_of(part))
            given = tf.nest.flatten(traced[:2])
            arrays = [array.write(index, value) for array, value in zip(arrays, given)]
            losses = [a + b for a, b in zip(losses, traced.losses)]
            pairs = zip(tf.nest.pack_sequence_as(form.moments, sums), traced.moments)
            sums = tf.nest.flatten([a.plus(b) for a, b in pairs])
            return index + 1, carried, begun, arrays, losses, sums

        begin = [
            tf.constant(0),
            self._carried,
            [self._array(t.dtype, t.shape) for t in after],
            [self._array(t.dtype, [None, *t.shape[1:]]) for t in outputs],
            [tf.zeros((), loss.dtype) for loss in form.losses],
            [tf.zeros(t.shape, t.dtype) for t in moments],
        ]
        _, carried, begun, arrays, losses, sums = self._loop(step, begin)
        joined = [self._joined(array, t) for array, t in zip(arrays, outputs)]
        return carried, begun, joined, losses, sums

    def _record(
        self, backward: Callable[..., Any], begun: Any, outputs: list[Any], losses: list[Any]
    ) -> None:
        results = [*outputs, *losses]
        places = [place for place, result in enumerate(results) if _has_gradient(result)]

        def gradient(*given: Any) -> list[Any]:
            known = dict(zip(places, given))
            every = [_or_zeros(known.get(place), t) for place, t in enumerate(results)]
            return self._backward(backward, begun, every[: len(outputs)], every[len(outputs) :])

        followed = [results[place] for place in places]
        sources = [self._sources[place] for place in self._places]
        record_on_tapes("Microbatches", followed, sources, gradient)

    def _backward(
        self, backward: Callable[..., Any], begun: Any, of_outputs: list[Any], of_losses: list[Any]
    ) -> list[Any]:
        """Return the gradients of the sources that can have one, or None."""

        def gradients(index: Any) -> list[Any]:
            part, rows = self._part(index), self._rows_at(index)
            carried = [array.read(index) for array in begun]
            upstream = [gradient[rows] for gradient in of_outputs]
            share = self._share_of(part)
            found: list[Any] = backward(carried, self._fixed, part, share, upstream, of_losses)
            return found

        def step(index: Any, so_far: list[Any]) -> Any:
            every = zip(ways, so_far, gradients(index))
            return index + 1, [_added(way, before, index, value) for way, before, value in every]

        first = gradients(tf.constant(0))
        ways = [way for of_one in self._ways for way in of_one]
        so_far = [
            self._array(t.dtype, [None, *t.shape[1:]]).write(0, t) if way == "joined" else t
            for way, t in zip(ways, first)
        ]
        _, so_far = self._loop(step, [tf.constant(1), so_far])
        found = iter(zip(so_far, first))
        pairs = zip(self._places, self._ways)
        return [self._gradient(place, [next(found) for _ in of_one]) for place, of_one in pairs]

    def _gradient(self, place: int, found: list[tuple[Any, Any]]) -> Any:
        """Return the gradient of a source from what its tensors came to, and the first of each."""
        if len(found) == 1:
            total, first = found[0]
            return self._joined(total, first) if isinstance(total, tf.TensorArray) else total
        tensors = [t.concat() if isinstance(t, tf.TensorArray) else t for t, _ in found]
        shape = tf.constant(list(self._sources[place].shape), tf.int64)
        return tf.IndexedSlices(*tensors, shape) if found else None

    def _loop(self, step: Callable[..., Any], begin: list[Any]) -> Any:
        return tf.while_loop(
            lambda index, *_: index < self._number,
            lambda *variables: step(*variables),
            begin,
            shape_invariants=tf.nest.map_structure(_invariant, begin),
            parallel_iterations=1,
        )

    def _array(self, dtype: Any, shape: Any) -> Any:
        return tf.TensorArray(
            dtype, size=self._number, infer_shape=False, element_shape=shape, clear_after_read=False
        )

    def _joined(self, array: Any, part: Any) -> Any:
        """Return outputs joined, with zeros for samples that did not run."""
        joined = array.concat()
        if self._is_limited:
            missing = self._rows - _rows_of(joined)
            shape = tf.concat([[missing], tf.shape(joined)[1:]], 0)
            joined = tf.concat([joined, tf.zeros(shape, joined.dtype)], 0)
        joined.set_shape([self._samples[0].shape[0], *part.shape[1:]])
        return joined


_SHARE = tf.TensorSpec([], tf.float64)


def _invariant(value: Any) -> Any:
    return None if isinstance(value, tf.TensorArray) else tf.TensorShape(value.shape)


def _specs(tensors: Sequence[Any], have_samples: bool = False) -> list[Any]:
    return [
        tf.TensorSpec([None, *t.shape[1:]] if have_samples else t.shape, t.dtype) for t in tensors
    ]


def _rows_of(tensor: Any) -> Any:
    return tf.shape(tensor)[0]


def _has_gradient(tensor: Any) -> bool:
    return bool(tensor.dtype.is_floating or tensor.dtype.is_complex)


def _ways_of(gradient: Any, is_shared: bool) -> tuple[str, ...]:
    """Return how each tensor of a gradient of microbatches is put together: values and indices of a
    sparse one. One with the same rows for any number of samples is that of positions.
    """
    if gradient is None:
        return ()
    if not isinstance(gradient, tf.IndexedSlices):
        return ("summed" if is_shared else "joined",)
    is_by_position = not tf.executing_eagerly() and gradient.indices.shape[0] is not None
    return ("summed", "alike") if is_by_position else ("joined", "joined")


def _added(way: str, so_far: Any, index: Any, value: Any) -> Any:
    if way == "joined":
        return so_far.write(index, value)
    return so_far + value if way == "summed" else so_far


def _or_zeros(gradient: Any, tensor: Any) -> Any:
    return tf.zeros_like(tensor) if gradient is None else tf.convert_to_tensor(gradient)


def run_apart(call: Apart, derives: bool = False) -> Callable[..., Any]:
    """Return a function that runs while another is traced, as `Backend.run_apart` does."""

    def run(fixed: list[Any], arrays: list[Any], begin: int, end: int) -> list[Any]:
        with tf.init_scope():
            draws = Draws(end - begin, TOTAL, begin, begin)
            given = list(map(tf.constant, fixed)), [tf.constant(a[begin:end]) for a in arrays]
            if not derives:
                return list(map(np.asarray, Noting(draws).run(call.function, given)))
            sources = [tensor for tensor in (*given[1], *given[0]) if _has_gradient(tensor)]
            with seen_by_tapes(), tf.GradientTape(watch_accessed_variables=False) as tape:
                tape.watch(sources)
                outputs = Noting(draws).run(call.function, given)
            followed = [output for output in outputs if _has_gradient(output)]
            gradients = tape.gradient(followed, sources, followed)
            return list(map(np.asarray, map(_or_zeros, gradients, sources)))

    return run


def attached_to(output: Any) -> dict[str, Any]:
    """Return the tensors that Keras's losses read from an output, such as mask and logits."""
    found = {"mask": mask_of(output), "logits": logits_of(output)}
    is_in_graph = tf.is_symbolic_tensor(output)
    if found["logits"] is None and is_in_graph and output.op.type in _ACTIVATIONS:
        found[output.op.type] = output.op.inputs[0]
    return {name: tensor for name, tensor in found.items() if tensor is not None}


def with_attached(output: Any, name: str, tensor: Any) -> Any:
    """Return an output with what `attached_to` has found at it."""
    if name in _ACTIVATIONS:
        return _ACTIVATIONS[name](tensor)
    if name == "mask":
        set_mask(output, tensor)
    else:
        set_logits(output, tensor)
    return output
