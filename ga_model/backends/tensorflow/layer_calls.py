"""Run a layer call by microbatches: one loop forward, and one for gradients.

Each loop calls one function that is not inlined. Otherwise the second loop would reuse activations
of the first, which would then keep those of all microbatches. Sparse gradients keep all rows.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from ga_model.backends.tensorflow.noting import Noting
from ga_model.backends.tensorflow.state import Variables
from ga_model.base._context import is_package_code
from ga_model.base._internals import (
    layers_in,
    logits_of,
    mask_of,
    saved_call_scopes,
    set_logits,
    set_mask,
)
from ga_model.base._internals_tf import (
    NOT_INLINED,
    are_watched_by_tape,
    has_forward_derivatives,
    has_second_derivatives,
    pause_tapes,
    record_on_tapes,
    resume_tapes,
    stateful_draws,
)
from ga_model.base._python_state import leaves_in
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
        self._split, self._jit_compile = split, jit_compile
        tensors = [*split.fixed, *split.samples]
        if not all(isinstance(tensor, tf.Tensor) for tensor in tensors):
            raise NotByRowsError("it takes ragged or sparse tensors")
        self._sources = list(filter(_has_gradient, tensors))
        if tf.executing_eagerly() and has_forward_derivatives(self._sources):
            raise NotByRowsError("its forward-mode derivatives are taken")
        self._rows = _rows_of(split.samples[0])
        self._number = (self._rows + split.size - 1) // split.size
        if split.most is not None:
            self._number = tf.minimum(self._number, split.most)
        self._in_call = saved_call_scopes()

    def run(self) -> tuple[list[tf.Tensor], Traced]:
        """Run all microbatches, and record them on tapes."""
        split = self._split
        specs = [_specs(split.carried), _specs(split.fixed), _specs(split.samples, True)]
        specs.append(tf.TensorSpec([], tf.float64))  # of its share
        run_one = self._in_graph(self._run_one, specs)
        if tf.executing_eagerly():
            with pause_tapes():
                _, form = run_one(split.carried, split.fixed, *self._part(0))
        else:
            _, form = run_one.structured_outputs
        backward = None
        if are_watched_by_tape(self._sources):
            # XLA differentiates no function in which it compiles a loop.
            self._jit_compile = self._jit_compile and not has_second_derivatives(self._sources)
            outputs, losses = _differentiable(form)
            specs += [_specs(outputs, True), _specs(losses)]
            backward = self._in_graph(self._gradients_of_one, specs)
        with pause_tapes():
            carried, begun, traced = self._forward(run_one, form)
        if backward is not None:
            outputs, losses = _differentiable(traced)
            results = [*outputs, *losses]

            def gradient(*upstream: Gradient) -> list[Gradient]:
                every = list(map(_or_zeros, upstream, results))
                return self._backward(backward, begun, every[: len(outputs)], every[len(outputs) :])

            record_on_tapes("Microbatches", results, self._sources, gradient)
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
            after, traced = self._split.function(carried, fixed, samples, share)
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
        sources = list(filter(_has_gradient, [*fixed, *samples]))
        with tf.GradientTape(watch_accessed_variables=False) as tape:
            tape.watch(sources)
            _, traced = self._run_one(carried, fixed, samples, share)
        outputs, losses = _differentiable(traced)
        gradients = tape.gradient([*outputs, *losses], sources, [*of_outputs, *of_losses])
        return list(map(_tensors_of, gradients))

    def _rows_at(self, index: tf.Tensor) -> slice:
        size = self._split.size
        return slice(index * size, tf.minimum((index + 1) * size, self._rows))

    def _part(self, index: tf.Tensor) -> tuple[list[tf.Tensor], tf.Tensor]:
        """Return the samples of a microbatch, and their share of all samples."""
        rows = self._rows_at(index)
        part = [tensor[rows] for tensor in self._split.samples]
        with is_package_code.set(True):
            return part, tf.cast(_rows_of(part[0]), tf.float64) / tf.cast(self._rows, tf.float64)

    def _forward(
        self, run_one: Callable[..., tuple[list[tf.Tensor], Traced]], form: Traced
    ) -> tuple[list[tf.Tensor], list[tf.TensorArray], Traced]:
        """Return the state after all microbatches, that before each, and the results of all.

        `form` has the results of one microbatch, or specs of them.
        """
        initial = self._split.carried

        def step(
            index: tf.Tensor,
            carried: list[tf.Tensor],
            begun: list[tf.TensorArray],
            given: Nest,
            losses: list[tf.Tensor],
            sums: list[Moments],
        ) -> tuple[Nest, ...]:
            begun = [array.write(index, value) for array, value in zip(begun, carried)]
            carried, traced = run_one(carried, self._split.fixed, *self._part(index))
            given = tf.nest.map_structure(lambda a, t: a.write(index, t), given, traced[:2])
            losses = [a + b for a, b in zip(losses, traced.losses)]
            sums = [a.plus(b) for a, b in zip(sums, traced.moments)]
            return index + 1, carried, begun, given, losses, sums

        begin = [
            tf.constant(0),
            initial,
            [self._array(t, has_samples=False) for t in initial],
            tf.nest.map_structure(self._array, form[:2]),
            [tf.zeros((), loss.dtype) for loss in form.losses],
            tf.nest.map_structure(lambda t: tf.zeros(t.shape, t.dtype), form.moments),
        ]
        _, carried, begun, given, losses, sums = self._loop(step, begin)
        outputs, attached = tf.nest.map_structure(self._joined, given)
        return carried, begun, Traced(outputs, attached, losses, sums)

    def _backward(
        self,
        backward: Callable[..., list[tuple[tf.Tensor, ...]]],
        begun: list[tf.TensorArray],
        of_outputs: list[tf.Tensor],
        of_losses: list[tf.Tensor],
    ) -> list[Gradient]:
        """Return the gradients of the sources, or None."""

        def gradients(index: tf.Tensor) -> list[tuple[tf.Tensor, ...]]:
            rows = self._rows_at(index)
            carried = [array.read(index) for array in begun]
            upstream = [gradient[rows] for gradient in of_outputs]
            part = self._part(index)
            return backward(carried, self._split.fixed, *part, upstream, of_losses)

        def initial(
            gradient: tuple[tf.Tensor, ...], is_shared: bool
        ) -> tuple[tf.Tensor | tf.TensorArray, ...]:
            if not _is_joined(gradient, is_shared):
                return gradient
            return tuple(self._array(tensor).write(0, tensor) for tensor in gradient)

        def step(index: tf.Tensor, totals: Nest) -> tuple[tf.Tensor, Nest]:
            def added(
                total: tf.Tensor | tf.TensorArray, new: tf.Tensor
            ) -> tf.Tensor | tf.TensorArray:
                if isinstance(total, tf.TensorArray):
                    return total.write(index, new)
                return total + new if _has_gradient(new) else total  # indices stay

            return index + 1, tf.nest.map_structure(added, totals, gradients(index))

        # A placeholder, so that no shape depends on the index, as in the loop.
        first = gradients(tf.compat.v1.placeholder_with_default(0, []))
        num_shared = sum(map(_has_gradient, self._split.fixed))
        are_shared = (place < num_shared for place in range(len(first)))
        _, totals = self._loop(step, [tf.constant(1), list(map(initial, first, are_shared))])
        return list(map(self._gradient, self._sources, totals))

    def _gradient(
        self, source: tf.Tensor, total: tuple[tf.Tensor | tf.TensorArray, ...]
    ) -> Gradient:
        """Return the gradient of a source from its combined tensors."""
        if len(total) < 2:
            whole = next(iter(total), None)
            return self._joined(whole) if isinstance(whole, tf.TensorArray) else whole
        tensors = [t.concat() if isinstance(t, tf.TensorArray) else t for t in total]
        return tf.IndexedSlices(*tensors, tf.constant(list(source.shape), tf.int64))

    def _loop(self, step: Callable[..., tuple[Nest, ...]], begin: list[Nest]) -> Nest:
        return tf.while_loop(
            lambda index, *_: index < self._number, step, begin, parallel_iterations=1
        )

    def _array(self, tensor: tf.Tensor, has_samples: bool = True) -> tf.TensorArray:
        """Return an array for such a tensor of each microbatch."""
        (spec,) = _specs([tensor], has_samples)
        return tf.TensorArray(
            spec.dtype,
            size=self._number,
            infer_shape=False,
            element_shape=spec.shape,
            clear_after_read=False,
        )

    def _joined(self, array: tf.TensorArray) -> tf.Tensor:
        """Return the concatenated outputs, with zeros for samples that did not run."""
        joined = array.concat()
        if self._split.most is not None:
            missing = self._rows - _rows_of(joined)
            shape = tf.concat([[missing], tf.shape(joined)[1:]], 0)
            joined = tf.concat([joined, tf.zeros(shape, joined.dtype)], 0)
        joined.set_shape([self._split.samples[0].shape[0], *joined.shape[1:]])
        return joined


def _specs(tensors: Sequence[tf.Tensor], have_samples: bool = False) -> list[tf.TensorSpec]:
    return [
        tf.TensorSpec([None, *t.shape[1:]] if have_samples else t.shape, t.dtype) for t in tensors
    ]


def _rows_of(tensor: tf.Tensor) -> tf.Tensor:
    return tf.shape(tensor)[0]


def _has_gradient(tensor: tf.Tensor) -> bool:
    return bool(tensor.dtype.is_floating or tensor.dtype.is_complex)


def _differentiable(traced: Traced) -> tuple[list[tf.Tensor], list[tf.Tensor]]:
    """Return the outputs, with what is attached to them, and the losses that have a gradient."""
    outputs = tf.nest.flatten(traced[:2])
    return list(filter(_has_gradient, outputs)), list(filter(_has_gradient, traced.losses))


def _tensors_of(gradient: Gradient) -> tuple[tf.Tensor, ...]:
    if isinstance(gradient, tf.IndexedSlices):
        return gradient.values, gradient.indices
    return () if gradient is None else (gradient,)


def _is_joined(gradient: tuple[tf.Tensor, ...], is_shared: bool) -> bool:
    """Return whether to concatenate a gradient over microbatches, instead of adding it.

    Sparse gradients with a fixed number of rows are lookups by position, so these are summed.
    """
    if len(gradient) < 2:
        return not is_shared
    return tf.executing_eagerly() or gradient[1].shape[0] is None


def _or_zeros(gradient: Gradient, tensor: tf.Tensor) -> tf.Tensor:
    return tf.zeros_like(tensor) if gradient is None else tf.convert_to_tensor(gradient)


def run_isolated(
    call: IsolatedCall, with_gradients: bool = False
) -> Callable[..., list[np.ndarray]]:
    """Return a function that runs a call during a trace: see `Backend.run_isolated`."""
    held = leaves_in(value for part in layers_in(call.layer) for value in vars(part).values())
    not_of_keras = [leaf for leaf in held if isinstance(leaf, tf.Variable)]

    def run(
        fixed: list[np.ndarray], arrays: list[np.ndarray], begin: int, end: int
    ) -> list[np.ndarray]:
        with tf.init_scope(), _keeping(not_of_keras):
            noting = Noting(Draws(end - begin, TOTAL, begin, begin))
            arguments = list(map(tf.constant, fixed)), [tf.constant(a[begin:end]) for a in arrays]
            if not with_gradients:
                return list(map(np.asarray, noting.run(call.function, arguments)))
            sources = list(filter(_has_gradient, [*arguments[1], *arguments[0]]))
            with resume_tapes(), tf.GradientTape(watch_accessed_variables=False) as tape:
                tape.watch(sources)
                outputs = list(filter(_has_gradient, noting.run(call.function, arguments)))
            gradients = tape.gradient(outputs, sources, outputs)
            return list(map(np.asarray, map(_or_zeros, gradients, sources)))

    return run


@contextlib.contextmanager
def _keeping(variables: Sequence[tf.Variable]) -> Iterator[None]:
    """Restore variables after the block.

    Raises:
        NotByRowsError: at its end, if the block wrote to them.
    """
    before = Variables(variables)
    try:
        yield
    finally:
        written = before.written()
        before.restore()
    if written:
        raise NotByRowsError(f"it writes to {written} in each call")


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
