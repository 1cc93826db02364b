"""Run a layer call by microbatches, as one operation of autograd.

The first pass runs each microbatch and keeps no activations. The backward pass runs each again,
from the same state, with its rows of the gradient, and sums the gradients of weights. This is
`torch.utils.checkpoint` for parts of a batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from itertools import compress
from typing import Any

import keras
import torch

from ga_model.backends.torch import refusals
from ga_model.backends.torch.call_hooks import without_hooks
from ga_model.backends.torch.state import (
    TensorSnapshot,
    preserving_random_state,
    random_state,
    set_random_state,
)
from ga_model.base import _numbers
from ga_model.base._internals import layers_in, saved_call_scopes, seed_ids
from ga_model.base._internals_torch import times_written
from ga_model.base._python_state import SMALL, PythonState
from ga_model.core.call_types import Split, Traced
from ga_model.core.proof.calls import NotByRowsError
from ga_model.core.statistics import Moments

# Modules whose calls read variables of Keras, which have their values in a scope.
_READING_VARIABLES = (keras.Layer, torch.nn.ParameterDict)


class Microbatches:
    """Runs the function of a `Split` by microbatches."""

    def __init__(self, split: Split) -> None:
        if not all(map(torch.is_tensor, (*split.fixed, *split.samples))):
            raise NotByRowsError("it takes something that is no tensor of PyTorch")
        self._tensors = TensorSnapshot(split.layer)
        split = split._replace(fixed=_with_copies(split, self._tensors.modules))
        tensors = [*split.fixed, *split.samples]
        self._split, self._rows = split, len(split.samples[0])
        starts = range(0, self._rows, split.size)[: split.most]
        self._shares = [slice(start, min(start + split.size, self._rows)) for start in starts]
        self._is_source = [tensor.requires_grad for tensor in tensors]
        others = parameters_beside(split.layer, split.fixed)
        self._sources = [t for t in (*tensors, *others) if t.requires_grad]
        self._in_call, self._autocast = saved_call_scopes(), autocast_scopes()
        # The `carried` and the random state before each microbatch.
        self._starts: list[tuple[list[torch.Tensor], tuple[torch.Tensor, list[torch.Tensor]]]] = []
        self._carried = [tensor.detach().clone() for tensor in split.carried]  # it is written to
        self._moments: list[Moments] = []
        self._num_outputs = 0
        self._attached: list[str] = []
        self._versions = [(name, t, times_written(t)) for name, t in _expected_unchanged(split)]

    def run(self) -> tuple[list[torch.Tensor], Traced]:
        """Run all microbatches, as one operation of autograd.

        Raises:
            NotByRowsError: the outputs or writes of the function are not per sample.
        """
        random = random_state()
        try:
            results = _Operation.apply(self, *self._sources)
        except BaseException:
            self._tensors.restore()
            set_random_state(random)
            raise
        outputs, others = list(results[: self._num_outputs]), results[self._num_outputs :]
        attached = dict(zip(self._attached, others))
        losses = list(others[len(attached) :])
        return self._carried, Traced(outputs, attached, losses, self._moments)

    def first_pass(self) -> list[torch.Tensor]:
        """Return the outputs of all samples, the tensors attached to them, and the losses."""
        split, joined, losses = self._split, list[Any](), list[Any]()
        for share in self._shares:
            self._starts.append((self._carried, random_state()))
            part = [tensor[share] for tensor in split.samples]
            arguments = self._carried, split.fixed, part, self._part_of(share)
            self._carried, traced = split.function(*arguments)
            tensors = [*traced.outputs, *traced.attached.values()]
            self._check(tensors, share.stop - share.start)
            if not joined:
                self._num_outputs, self._attached = len(traced.outputs), list(traced.attached)
                joined = [t.new_empty((self._rows, *t.shape[1:])) for t in tensors]
                self._moments = traced.moments
            elif len(traced.moments) != len(self._moments):
                raise NotByRowsError("it normalizes microbatches differently")
            else:
                moments = zip(self._moments, traced.moments)
                self._moments = [a.plus(b) for a, b in moments]
            for whole, tensor in zip(joined, tensors, strict=True):
                if tensor.shape[1:] != whole.shape[1:]:
                    text = "its outputs have different shapes for different microbatches"
                    raise NotByRowsError(text)
                whole[share] = tensor
            losses = [a + b for a, b in zip(losses, traced.losses)] if losses else traced.losses
        for whole in joined:
            whole[share.stop :] = whole[:1]  # any value for samples that `most` leaves out
        return [*joined, *losses]

    def check_unchanged(self) -> None:
        """Raise RuntimeError if inputs or variables were written to after the first pass."""
        changed = {name for name, t, version in self._versions if times_written(t) != version}
        if changed:
            raise RuntimeError(refusals.changed_message(self._split.layer.name, sorted(changed)))

    def second_pass(
        self, sources: tuple[torch.Tensor, ...], upstream: tuple[torch.Tensor | None, ...]
    ) -> list[torch.Tensor | None]:
        """Run the microbatches again, and return the gradients of the sources.

        Args:
            sources: the tensors, as saved by autograd.
            upstream: gradients of what `first_pass` returned; some may be None.
        """
        split, is_differentiable = self._split, torch.is_grad_enabled()  # for second derivatives
        saved, num_fixed = iter(sources), len(split.fixed)
        in_fixed, in_samples = self._is_source[:num_fixed], self._is_source[num_fixed:]
        fixed = [next(saved) if yes else t for t, yes in zip(split.fixed, in_fixed)]
        samples = [next(saved) if yes else t for t, yes in zip(split.samples, in_samples)]
        if not is_differentiable:  # leaves stay: a PyTorch module may read such a parameter itself
            fixed = [t if t.is_leaf else t.detach().requires_grad_() for t in fixed]
        shared = [*compress(fixed, in_fixed), *saved]
        sums: list[torch.Tensor | None] = [None for _ in shared]
        rows: list[list[torch.Tensor]] = [[] for _ in compress(samples, in_samples)]
        python = PythonState(split.layer, most_bytes=SMALL)
        try:
            with preserving_random_state(), without_hooks(shared):
                for share, (carried, random) in zip(self._shares, self._starts, strict=True):
                    set_random_state(random)
                    parts = [t[share] for t in samples]
                    with torch.enable_grad(), self._in_call(), self._autocast():
                        if not is_differentiable:
                            parts = [
                                p.detach().requires_grad_(yes) for p, yes in zip(parts, in_samples)
                            ]
                        _, traced = split.function(carried, fixed, parts, self._part_of(share))
                        pairs = self._pairs(traced, share, upstream)
                        part_sources = list(compress(parts, in_samples))
                        gradients = gradients_of(pairs, [*shared, *part_sources], is_differentiable)
                    sums = [_added(a, b) for a, b in zip(sums, gradients)]
                    for part, gradient, found in zip(part_sources, gradients[len(shared) :], rows):
                        found.append(torch.zeros_like(part) if gradient is None else gradient)
        finally:
            python.restore()
        sums = [a if a is None else a.to(t.dtype) for a, t in zip(sums, shared)]
        joined = [
            torch.cat([*found, t.new_zeros((self._rows - share.stop, *t.shape[1:]))])
            for found, t in zip(rows, compress(samples, in_samples))
        ]
        num_in_fixed = sum(in_fixed)
        return [*sums[:num_in_fixed], *joined, *sums[num_in_fixed:]]

    def _pairs(
        self, traced: Traced, share: slice, upstream: tuple[torch.Tensor | None, ...]
    ) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Return pairs of an output or loss of a microbatch and its gradient, where it has one."""
        tensors = [*traced.outputs, *traced.attached.values()]
        rows, of_losses = upstream[: len(tensors)], upstream[len(tensors) :]
        gradients = [*(None if g is None else g[share] for g in rows), *of_losses]
        pairs = zip([*tensors, *traced.losses], gradients, strict=True)
        return [(t, g) for t, g in pairs if g is not None and t.requires_grad]

    def _part_of(self, share: slice) -> float:
        return float((share.stop - share.start) / self._rows)

    def _check(self, tensors: list[torch.Tensor], rows: int) -> None:
        """Raise NotByRowsError unless outputs have one row per sample and writes go via Keras."""
        for tensor in tensors:
            if tensor.ndim == 0 or tensor.shape[0] != rows:
                shape = tuple(tensor.shape)
                raise NotByRowsError(f"an output has the shape {shape} for {rows} samples")
        if written := self._tensors.written():
            raise NotByRowsError(f"it writes to {written} in each call")


class _Operation(torch.autograd.Function):
    """The two passes as one operation of autograd."""

    @staticmethod
    def forward(ctx: Any, call: Microbatches, *sources: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.call = call
        ctx.save_for_backward(*sources)  # PyTorch then detects writes to them
        ctx.set_materialize_grads(False)
        results = call.first_pass()
        ctx.mark_non_differentiable(*[t for t in results if not t.is_floating_point()])
        return tuple(results)

    @staticmethod
    def backward(ctx: Any, *upstream: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        ctx.call.check_unchanged()  # before `saved_tensors` raises PyTorch's own error
        return (None, *ctx.call.second_pass(ctx.saved_tensors, upstream))


def gradients_of(
    pairs: Sequence[tuple[torch.Tensor, torch.Tensor]],
    sources: list[torch.Tensor],
    create_graph: bool,
) -> list[torch.Tensor | None]:
    """Return the gradients with respect to sources, or None for each without one."""
    differentiable = [source for source in sources if source.requires_grad]
    if not pairs or not differentiable:
        return [None for _ in sources]
    outputs, gradients = zip(*pairs)
    options = {"create_graph": create_graph, "allow_unused": True}
    results = iter(torch.autograd.grad(outputs, differentiable, gradients, **options))
    return [next(results) if source.requires_grad else None for source in sources]


def _added(total: torch.Tensor | None, gradient: torch.Tensor | None) -> torch.Tensor | None:
    """Return the sum of two gradients, in float32 at least."""
    if gradient is None:
        return total
    wide = _numbers.widened(gradient)
    if total is None:  # own memory, as it is added to in place
        return wide.clone() if wide is gradient else wide
    return total + wide if total.requires_grad or wide.requires_grad else total.add_(wide)


def _expected_unchanged(split: Split) -> list[tuple[str, torch.Tensor]]:
    """Return names and tensors that must not be written to before the second pass."""
    parts, changing = layers_in(split.layer), seed_ids(split.layer)
    normal = [part for part in parts if isinstance(part, keras.layers.BatchNormalization)]
    changing |= {id(v) for part in normal for v in part.non_trainable_variables}
    variables = split.layer.variables
    found = [("an input", t) for t in (*split.samples, *split.fixed[len(variables) :])]
    pairs = zip(variables, split.fixed)
    return found + [(v.path, t) for v, t in pairs if id(v) not in changing]


def _with_copies(split: Split, modules: Sequence[torch.nn.Module]) -> list[torch.Tensor]:
    """Return `fixed` with copies of small variables that are not trained, which user code may
    write to before the second pass. Modules of PyTorch read theirs themselves.

    Args:
        modules: all modules in the layer.
    """
    others = [module for module in modules if not isinstance(module, _READING_VARIABLES)]
    excluded = {id(p) for module in others for p in module.parameters(recurse=False)}
    num_variables, fixed = len(split.layer.variables), split.fixed

    def is_copied(tensor: torch.Tensor) -> bool:
        is_trained = tensor.requires_grad or id(tensor) in excluded
        return not is_trained and tensor.nbytes <= SMALL

    copied = [t.clone() if is_copied(t) else t for t in fixed[:num_variables]]
    return [*copied, *fixed[num_variables:]]


def parameters_beside(layer: keras.Layer, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    """Return the trainable parameters of a layer that are not among these tensors."""
    known = set(map(id, tensors))
    return [p for p in layer.parameters() if p.requires_grad and id(p) not in known]


def autocast_scopes() -> Callable[[], AbstractContextManager[None]]:
    """Return a function that returns contexts with the `torch.autocast` that is on here.

    Their cache is off, because a cached cast may have no gradient.
    """
    devices = ["cpu", "cuda"] if torch.cuda.is_initialized() else ["cpu"]
    dtypes = {d: torch.get_autocast_dtype(d) for d in devices if torch.is_autocast_enabled(d)}

    @contextmanager
    def again() -> Iterator[None]:
        with ExitStack() as stack:
            for device, dtype in dtypes.items():
                stack.enter_context(torch.autocast(device, dtype=dtype, cache_enabled=False))
            yield

    return again
