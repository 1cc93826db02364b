"""Run a layer call by microbatches: one loop forward, and one for gradients.

Each loop calls one function that is not inlined. Otherwise the second loop would reuse activations
of the first, which would then keep those of all microbatches. Sparse gradients keep all rows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from ga_model.backends.tensorflow.noting import Noting
from ga_model.base._context import is_package_code
from ga_model.base._internals import logits_of, mask_of, saved_call_scopes, set_logits, set_mask
from ga_model.base._internals_tf import (
    NOT_INLINED,
    has_forward_derivatives,
    has_second_derivatives,
    is_watched_by_tape,
    pause_tapes,
    record_on_tapes,
    resume_tapes,
    stateful_draws,
)
from ga_model.base._types import Gradient, Nest
from ga_model.core.call_types import IsolatedCall, Split, Traced
from ga_model.core.proof.calls import TOTAL, NotByRowsError
from ga_model.core.proof.noted import Draws
from ga_model.core.statistics import Moments

# Activations whose inputs, if found in the graph, Keras's losses use as logits.
_ACTIVATIONS = {"Softmax": tf.nn.softmax, "Sigmoid": tf.math.sigmoid}


class Microbatches:
    """Runs the function of a `Split` by microbatches, each compiled by XLA with `jit_compile`."""

    def __init__(self, split: Split, jit_compile: bool) -> None:
        self._function = split.function
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
        self._in_call = saved_call_scopes()

    def run(self) -> tuple[list[tf.Tensor], Traced]:
        """Run all microbatches, and record them on tapes."""
        specs = [_specs(self._carried), _specs(self._fixed), _specs(self._samples, True)]
        specs.append(tf.TensorSpec([], tf.float64))  # of its share
        run_one = self._in_graph(self._run_one, specs)
        if tf.executing_eagerly():
            with pause_tapes():
                form = run_one(self._carried, self._fixed, self._part(0), tf.ones((), tf.float64))
        else:
            form = run_one.structured_outputs
        backward = None
        sources = [self._sources[place] for place in self._places]
        if any(map(is_watched_by_tape, sources)):
            # XLA differentiates no function in which it compiles a loop.
            self._jit_compile = self._jit_compile and not has_second_derivatives(sources)
            upstream = [_specs(tf.nest.flatten(form[1][:2]), True), _specs(form[1].losses)]
            backward = self._in_graph(self._gradients_of_one, [*specs, *upstream])
        with pause_tapes():
            carried, begun, traced = self._forward(run_one, *form)
        if backward is not None:
            self._record(backward, begun, traced)
        return carried, traced

    def _in_graph(self, function: Callable[..., Nest], specs: list[Nest]) -> Any:
        """Return a function of a microbatch, traced once if the step runs in a graph.

        Raises:
            NotByRowsError: it uses a tensor or variable that is not an argument, or draws random
                numbers that a second pass cannot repeat.
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
        return traced

    def _run_one(
        self,
        carried: list[tf.Tensor],
        fixed: list[tf.Tensor],
        samples: list[tf.Tensor],
        share: tf.Tensor,
    ) -> tuple[list[tf.Tensor], Traced]:
        """Run the function on one microbatch, with this share of all samples."""
        with self._in_call():
            after, traced = self._function(carried, fixed, samples, share)
        if not all(isinstance(t, tf.Tensor) and t.shape.rank for t in traced.outputs):
            raise NotByRowsError("it returns tensors in an object that cannot be concatenated")
        after = [tf.cast(new, old.dtype) for new, old in zip(after, carried)]
        moments = [Moments(*map(tf.convert_to_tensor, part)) for part in traced.moments]
        return after, traced._replace(moments=moments)

    def _gradients_of_one(
        self,
        carried: list[tf.Tensor],
        fixed: list[tf.Tensor],
        samples: list[tf.Tensor],
        share: tf.Tensor,
        of_outputs: list[tf.Tensor],
        of_losses: list[tf.Tensor],
    ) -> list[tuple[tf.Tensor, ...]]:
        """Return `_tensors_of` each source's gradient, from the gradients of outputs and losses."""
        sources = [*fixed, *samples]
        sources = [sources[place] for place in self._places]
        with tf.GradientTape(watch_accessed_variables=False) as tape:
            tape.watch(sources)
            _, traced = self._run_one(carried, fixed, samples, share)
        results = [*tf.nest.flatten(traced[:2]), *traced.losses]
        pairs = [pair for pair in zip(results, [*of_outputs, *of_losses]) if _has_gradient(pair[0])]
        gradients = tape.gradient(
            [a for a, _ in pairs], sources, output_gradients=[b for _, b in pairs]
        )
        return list(map(_tensors_of, gradients))

    def _rows_at(self, index: tf.Tensor) -> slice:
        return slice(index * self._size, tf.minimum((index + 1) * self._size, self._rows))

    def _part(self, index: tf.Tensor) -> list[tf.Tensor]:
        rows = self._rows_at(index)
        return [tensor[rows] for tensor in self._samples]

    def _share_of(self, part: list[tf.Tensor]) -> tf.Tensor:
        with is_package_code.set(True):
            return tf.cast(_rows_of(part[0]), tf.float64) / tf.cast(self._rows, tf.float64)

    def _forward(
        self,
        run_one: Callable[..., tuple[list[tf.Tensor], Traced]],
        after: list[tf.Tensor],
        form: Traced,
    ) -> tuple[list[tf.Tensor], list[tf.TensorArray], Traced]:
        """Return the state after all microbatches, that before each, and the results of all.

        Args:
            run_one: runs one microbatch.
            after, form: its results, or specs of them.
        """

        def step(
            index: tf.Tensor,
            carried: list[tf.Tensor],
            begun: list[tf.TensorArray],
            given: Nest,
            losses: list[tf.Tensor],
            sums: list[Moments],
        ) -> tuple[Nest, ...]:
            part = self._part(index)
            begun = [array.write(index, value) for array, value in zip(begun, carried)]
            carried, traced = run_one(carried, self._fixed, part, self._share_of(part))
            given = tf.nest.map_structure(lambda a, t: a.write(index, t), given, traced[:2])
            losses = [a + b for a, b in zip(losses, traced.losses)]
            sums = [a.plus(b) for a, b in zip(sums, traced.moments)]
            return index + 1, carried, begun, given, losses, sums

        begin = [
            tf.constant(0),
            self._carried,
            [self._array(t.dtype, t.shape) for t in after],
            tf.nest.map_structure(lambda t: self._array(t.dtype, [None, *t.shape[1:]]), form[:2]),
            [tf.zeros((), loss.dtype) for loss in form.losses],
            tf.nest.map_structure(lambda t: tf.zeros(t.shape, t.dtype), form.moments),
        ]
        _, carried, begun, given, losses, sums = self._loop(step, begin)
        outputs, attached = tf.nest.map_structure(self._joined, given, form[:2])
        return carried, begun, Traced(outputs, attached, losses, sums)

    def _record(
        self,
        backward: Callable[..., list[tuple[tf.Tensor, ...]]],
        begun: list[tf.TensorArray],
        traced: Traced,
    ) -> None:
        outputs = tf.nest.flatten(traced[:2])
        results = [*outputs, *traced.losses]
        places = [place for place, result in enumerate(results) if _has_gradient(result)]

        def gradient(*upstream: Gradient) -> list[Gradient]:
            known = dict(zip(places, upstream))
            every = [_or_zeros(known.get(place), t) for place, t in enumerate(results)]
            return self._backward(backward, begun, every[: len(outputs)], every[len(outputs) :])

        followed = [results[place] for place in places]
        sources = [self._sources[place] for place in self._places]
        record_on_tapes("Microbatches", followed, sources, gradient)

    def _backward(
        self,
        backward: Callable[..., list[tuple[tf.Tensor, ...]]],
        begun: list[tf.TensorArray],
        of_outputs: list[tf.Tensor],
        of_losses: list[tf.Tensor],
    ) -> list[Gradient]:
        """Return the gradients of the sources that can have one, or None."""

        def gradients(index: tf.Tensor) -> list[tuple[tf.Tensor, ...]]:
            part, rows = self._part(index), self._rows_at(index)
            carried = [array.read(index) for array in begun]
            upstream = [gradient[rows] for gradient in of_outputs]
            share = self._share_of(part)
            found: list[tuple[tf.Tensor, ...]] = backward(
                carried, self._fixed, part, share, upstream, of_losses
            )
            return found

        def initial(way: str, first: tf.Tensor) -> tf.Tensor | tf.TensorArray:
            if way != "joined":
                return first
            return self._array(first.dtype, [None, *first.shape[1:]]).write(0, first)

        def step(index: tf.Tensor, totals: Nest) -> tuple[tf.Tensor, Nest]:
            def added(
                way: str, before: tf.Tensor | tf.TensorArray, value: tf.Tensor
            ) -> tf.Tensor | tf.TensorArray:
                if way == "joined":
                    return before.write(index, value)
                return before + value if way == "summed" else before

            return index + 1, tf.nest.map_structure(added, ways, totals, gradients(index))

        # A placeholder, so that no shape depends on the index, as in the loop.
        first = gradients(tf.compat.v1.placeholder_with_default(0, []))
        are_shared = (place < len(self._fixed) for place in self._places)
        ways = list(map(_ways_of, first, are_shared))
        totals = tf.nest.map_structure(initial, ways, first)
        _, totals = self._loop(step, [tf.constant(1), totals])
        sources = (self._sources[place] for place in self._places)
        return list(map(self._gradient, sources, totals, first))

    def _gradient(
        self,
        source: tf.Tensor,
        total: tuple[tf.Tensor | tf.TensorArray, ...],
        first: tuple[tf.Tensor, ...],
    ) -> Gradient:
        """Return the gradient of a source from the combined tensors and those of microbatch 0."""
        if not total:
            return None
        if len(total) == 1:
            (whole,), (part,) = total, first
            return self._joined(whole, part) if isinstance(whole, tf.TensorArray) else whole
        tensors = [t.concat() if isinstance(t, tf.TensorArray) else t for t in total]
        return tf.IndexedSlices(*tensors, tf.constant(list(source.shape), tf.int64))

    def _loop(self, step: Callable[..., tuple[Nest, ...]], begin: list[Nest]) -> Nest:
        def invariant(value: tf.Tensor | tf.TensorArray) -> tf.TensorShape | None:
            return None if isinstance(value, tf.TensorArray) else tf.TensorShape(value.shape)

        return tf.while_loop(
            lambda index, *_: index < self._number,
            step,
            begin,
            shape_invariants=tf.nest.map_structure(invariant, begin),
            parallel_iterations=1,
        )

    def _array(self, dtype: tf.DType, shape: tf.TensorShape | list[int | None]) -> tf.TensorArray:
        return tf.TensorArray(
            dtype, size=self._number, infer_shape=False, element_shape=shape, clear_after_read=False
        )

    def _joined(self, array: tf.TensorArray, part: tf.Tensor | tf.TensorSpec) -> tf.Tensor:
        """Return the concatenated outputs, with zeros for samples that did not run."""
        joined = array.concat()
        if self._is_limited:
            missing = self._rows - _rows_of(joined)
            shape = tf.concat([[missing], tf.shape(joined)[1:]], 0)
            joined = tf.concat([joined, tf.zeros(shape, joined.dtype)], 0)
        joined.set_shape([self._samples[0].shape[0], *part.shape[1:]])
        return joined


def _specs(tensors: Sequence[tf.Tensor], have_samples: bool = False) -> list[tf.TensorSpec]:
    return [
        tf.TensorSpec([None, *t.shape[1:]] if have_samples else t.shape, t.dtype) for t in tensors
    ]


def _rows_of(tensor: tf.Tensor) -> tf.Tensor:
    return tf.shape(tensor)[0]


def _has_gradient(tensor: tf.Tensor) -> bool:
    return bool(tensor.dtype.is_floating or tensor.dtype.is_complex)


def _tensors_of(gradient: Gradient) -> tuple[tf.Tensor, ...]:
    if isinstance(gradient, tf.IndexedSlices):
        return gradient.values, gradient.indices
    return () if gradient is None else (gradient,)


def _ways_of(tensors: tuple[tf.Tensor, ...], is_shared: bool) -> tuple[str, ...]:
    """Return how to combine each tensor of a gradient over microbatches.

    Sparse gradients with a fixed number of rows are lookups by position, so these are summed.
    """
    if len(tensors) < 2:
        return ("summed" if is_shared else "joined",) * len(tensors)
    is_by_position = not tf.executing_eagerly() and tensors[1].shape[0] is not None
    return ("summed", "alike") if is_by_position else ("joined", "joined")


def _or_zeros(gradient: Gradient, tensor: tf.Tensor) -> tf.Tensor:
    return tf.zeros_like(tensor) if gradient is None else tf.convert_to_tensor(gradient)


def run_isolated(
    call: IsolatedCall, with_gradients: bool = False
) -> Callable[..., list[np.ndarray]]:
    """Return a function that runs a call during a trace: see `Backend.run_isolated`."""

    def run(
        fixed: list[np.ndarray], arrays: list[np.ndarray], begin: int, end: int
    ) -> list[np.ndarray]:
        with tf.init_scope():
            draws = Draws(end - begin, TOTAL, begin, begin)
            arguments = list(map(tf.constant, fixed)), [tf.constant(a[begin:end]) for a in arrays]
            if not with_gradients:
                return list(map(np.asarray, Noting(draws).run(call.function, arguments)))
            sources = [tensor for tensor in (*arguments[1], *arguments[0]) if _has_gradient(tensor)]
            with resume_tapes(), tf.GradientTape(watch_accessed_variables=False) as tape:
                tape.watch(sources)
                outputs = Noting(draws).run(call.function, arguments)
            differentiable = [output for output in outputs if _has_gradient(output)]
            gradients = tape.gradient(differentiable, sources, differentiable)
            return list(map(np.asarray, map(_or_zeros, gradients, sources)))

    return run


def attached_to(output: tf.Tensor) -> dict[str, tf.Tensor]:
    """Return the tensors that Keras's losses read from an output, such as mask and logits."""
    attached = {"mask": mask_of(output), "logits": logits_of(output)}
    is_in_graph = tf.is_symbolic_tensor(output)
    if attached["logits"] is None and is_in_graph and output.op.type in _ACTIVATIONS:
        attached[output.op.type] = output.op.inputs[0]
    return {name: tensor for name, tensor in attached.items() if tensor is not None}


def with_attached(output: tf.Tensor, name: str, tensor: tf.Tensor) -> tf.Tensor:
    """Return an output with a tensor that `attached_to` found."""
    if name in _ACTIVATIONS:
        return _ACTIVATIONS[name](tensor)
    if name == "mask":
        set_mask(output, tensor)
    else:
        set_logits(output, tensor)
    return output
