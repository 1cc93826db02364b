"""A layer's call on all samples that is split into microbatches, forward and backward.

Forward, each microbatch goes through the layer without its activations being kept. The outputs of
all samples are what the call gives. When their gradient is asked for, each microbatch goes through
the layer again, from the state that the first pass found there, with its rows of the gradient; the
gradients of weights are summed. This is what `torch.utils.checkpoint` does, for parts of a batch.

What the first pass has changed (seeds, running averages) is written when it is through.
"""

from __future__ import annotations

from typing import Any

import keras
import torch

from ga_model.backends.torch import refusals
from ga_model.backends.torch.call_arguments import Arguments, Nest
from ga_model.backends.torch.call_hooks import without_hooks
from ga_model.backends.torch.microbatch_call import Autocast, Given, KeptTensors, run_on
from ga_model.backends.torch.random_numbers import random_kept, random_state, set_random_state
from ga_model.base import _numbers
from ga_model.base._call_again import PythonState
from ga_model.base._internals import copy_of, layers_in, raw, seeds
from ga_model.base._internals_torch import times_written
from ga_model.core.statistics import Listener, Moments
from ga_model.recording._models import instances_in
from ga_model.recording._moments_heard import is_known, listener
from ga_model.recording._splitting import NotByRowsError


class UnknownLossError(NotByRowsError):
    """A loss that was zero in the trial is not: the next call is tried again."""


class SplitCall:
    """A call that goes by microbatches.

    Args:
        layer: the layer.
        arguments: what it was called with.
        training: whether it is called in training, or None.
        kinds: of the losses that the layer adds, "mean" or "sum", or None: it was zero so far.

    Attributes:
        normalizing: names of BatchNormalization layers that have normalized microbatches: those
            whose running averages move by the statistics of all samples, and others.
    """

    def __init__(
        self, layer: Any, arguments: Arguments, training: Any, kinds: list[str | None]
    ) -> None:
        self.normalizing: tuple[list[str], list[str]] = ([], [])
        self._layer, self._arguments = layer, arguments
        self._training, self._kinds = training, kinds
        self._python, self._tensors = PythonState(layer), KeptTensors(layer)
        self._autocast = Autocast()
        self._begun: list[Any] = []  # values and random state that each microbatch begins with
        self._outputs: Nest | None = None  # without tensors
        self._num_tensors = 0  # in it, with masks
        weights = {id(p): p for p in layer.parameters() if p.requires_grad}
        self._weights = list(weights.values())
        parts = layers_in(layer)
        self._normal = [p for p in parts if isinstance(p, keras.layers.BatchNormalization)]
        # The variables that a call may change: running averages, and those of random numbers.
        self._changing = [v for part in self._normal for v in part.non_trainable_variables]
        self._changing += [v for part in parts for v in seeds(part)]
        changing = set(map(id, self._changing))
        found = [("an input", t) for t in arguments.tensors]
        found += [(v.path, raw(v)) for v in layer.variables if id(v) not in changing]
        self._versions = [(name, t, times_written(t)) for name, t in found]

    def outputs(self) -> Any:
        """Make the call, and return what it gives. The losses that layers added are the layer's.

        Raises:
            NotByRowsError: what it gives, or writes, is not of samples one by one.
        """
        is_source = [t.requires_grad for t in self._arguments.tensors]
        inputs = [t for t, yes in zip(self._arguments.tensors, is_source) if yes]
        random = random_state()
        try:
            found = Split.apply(self, is_source, *inputs, *self._weights)
        except BaseException:
            self._python.put_back()
            self._tensors.put_back()
            set_random_state(random)
            raise
        if losses := list(found[self._num_tensors :]):
            keras.layers.Layer.add_loss(self._layer, losses)  # a Functional's own refuses
        assert self._outputs is not None
        return self._outputs.packed(found[: self._num_tensors])

    def first_pass(self) -> list[Any]:
        """Run the microbatches forward, and return outputs, masks and losses of all samples."""
        arguments, joined, losses = self._arguments, list[Any](), list[Any]()
        values = [(v, copy_of(v)) for v in self._changing]
        heard: Listener | None = None
        moments: list[Moments] = []
        for share in arguments.shares():
            self._begun.append((values, random_state()))
            hears, rows = Listener(), share.stop - share.start
            given = self._run(arguments.part(arguments.tensors, share), values, hears)
            self._check(given, rows)
            if not joined:
                self._outputs, self._num_tensors = given.outputs, len(given.tensors)
                joined = [t.new_empty((arguments.rows, *t.shape[1:])) for t in given.tensors]
            if heard is not None and len(hears.moments) != len(moments):
                raise NotByRowsError("it normalizes microbatches differently")
            pairs = zip(moments, hears.moments)
            moments = [a.plus(b) for a, b in pairs] if heard else hears.moments
            heard = hears
            for whole, tensor in zip(joined, given.tensors, strict=True):
                if tensor.shape[1:] != whole.shape[1:]:
                    text = "its outputs have different shapes for different microbatches"
                    raise NotByRowsError(text)
                whole[share] = tensor
            parts = [loss * factor for loss, factor in self._weighted(given.losses, rows)]
            losses = [a + b for a, b in zip(losses, parts)] if losses else parts
            values = given.values
        assert heard is not None
        for whole in joined:
            whole[share.stop :] = whole[:1]  # of samples that are left out
        pooled = heard.written()
        for variable, value in values:
            if id(variable) not in pooled:
                variable.assign(value)
        for call, own in zip(heard.calls, moments):
            if (outer := listener.get()) is not None:
                outer.calls.append(call)
                outer.moments.append(own)
            else:
                call.move(own)
        return [*joined, *losses]

    def check_unchanged(self) -> None:
        """Raise RuntimeError if what the call was made of has been written to since."""
        changed = {name for name, t, version in self._versions if times_written(t) != version}
        if changed:
            raise RuntimeError(refusals.changed_message(self._layer.name, sorted(changed)))

    def second_pass(
        self, is_source: list[bool], sources: tuple[Any, ...], upstream: tuple[Any, ...]
    ) -> list[Any]:
        """Run the microbatches again, and return the gradients of the sources.

        Args:
            is_source: of each tensor among the arguments, whether it is a source.
            sources: these tensors, and the weights.
            upstream: the gradients of what `first_pass` gave, of which some are None.
        """
        arguments, is_differentiable = self._arguments, torch.is_grad_enabled()  # once more
        given = iter(sources)
        tensors = [next(given) if yes else t for t, yes in zip(arguments.tensors, is_source)]
        has_rows = [rows for rows, yes in zip(arguments.has_rows, is_source) if yes]
        sums = [_Sum(rows) for rows in has_rows] + [_Sum(False) for _ in self._weights]
        python = PythonState(self._layer)
        try:
            with random_kept(), without_hooks(self._weights):
                for share, (values, random) in zip(arguments.shares(), self._begun, strict=True):
                    set_random_state(random)
                    parts = arguments.part(tensors, share)
                    with torch.enable_grad():
                        if not is_differentiable:
                            pairs = zip(parts, is_source)
                            parts = [p.detach().requires_grad_(yes) for p, yes in pairs]
                        run = self._run(parts, values, None)
                        own = [p for p, yes in zip(parts, is_source) if yes] + self._weights
                        pairs = self._pairs(run, share, upstream)
                        gradients = gradients_of(pairs, own, is_differentiable)
                    for total, gradient, source in zip(sums, gradients, own):
                        total.add(gradient, source)
        finally:
            python.put_back()
        return [total.result(source) for total, source in zip(sums, sources)]

    def _pairs(self, run: Given, share: slice, upstream: tuple[Any, ...]) -> Any:
        """Return pairs of what a microbatch gave and its gradient, where it has one."""
        count = len(run.tensors)
        pairs = [(t, g[share]) for t, g in zip(run.tensors, upstream) if g is not None]
        weighted = self._weighted(run.losses, share.stop - share.start)
        of_losses = zip(weighted, upstream[count:], strict=True)
        pairs += [(loss, g * factor) for (loss, factor), g in of_losses if g is not None]
        return [(tensor, gradient) for tensor, gradient in pairs if tensor.requires_grad]

    def _weighted(self, losses: list[Any], rows: int) -> list[tuple[Any, float]]:
        """Return the losses that layers added for a microbatch, with what each counts."""
        share = rows / self._arguments.rows
        return [(loss, 1.0 if kind == "sum" else share) for loss, kind in zip(losses, self._kinds)]

    def _run(self, tensors: list[Any], values: list[Any], hears: Listener | None) -> Given:
        self._python.put_back()
        with listener.set(hears), self._autocast.again():
            return run_on(self._layer, self._arguments, tensors, self._training, values)

    def _check(self, given: Given, rows: int) -> None:
        """Check that outputs are of the samples, and that nothing else is written."""
        for tensor in given.tensors:
            if tensor.ndim == 0 or tensor.shape[0] != rows:
                shape = tuple(tensor.shape)
                raise NotByRowsError(f"an output has the shape {shape} for {rows} samples")
        if len(given.losses) != len(self._kinds):
            raise NotByRowsError("it adds another number of losses than before")
        if any(kind is None and loss.any() for loss, kind in zip(given.losses, self._kinds)):
            raise UnknownLossError("")
        for part, name, value in self._python.changed():
            if instances_in(value, torch.Tensor) and not type(part).__module__.startswith("keras."):
                raise NotByRowsError(f"it stores a tensor in its attribute `{name}`")
        expected = set(map(id, self._changing))
        others = {v.path for v in given.written if id(v) not in expected}
        others = {path for path in others if not path.endswith("seed_generator_state")}
        if changed := sorted([*others, *self._tensors.written()]):
            raise NotByRowsError(f"it writes to {changed} in each call")
        written = set(map(id, given.written))
        normal = [p for p in self._normal if any(id(v) in written for v in p.variables)]
        pooled = [part.name for part in normal if is_known(part)]
        self.normalizing = pooled, [part.name for part in normal if not is_known(part)]


class Split(torch.autograd.Function):
    """The two passes of a call, as one operation of PyTorch's."""

    @staticmethod
    def forward(ctx: Any, call: SplitCall, is_source: list[bool], *sources: Any) -> Any:
        ctx.call, ctx.is_source = call, is_source
        ctx.save_for_backward(*sources)  # which then knows if they are written to
        ctx.set_materialize_grads(False)
        found = call.first_pass()
        ctx.mark_non_differentiable(*[t for t in found if not t.is_floating_point()])
        return tuple(found)

    @staticmethod
    def backward(ctx: Any, *upstream: Any) -> Any:
        ctx.call.check_unchanged()  # before PyTorch looks at what it has saved
        gradients = ctx.call.second_pass(ctx.is_source, ctx.saved_tensors, upstream)
        return (None, None, *gradients)


class _Sum:
    """The gradient of a source, from those of microbatches.

    Args:
        has_rows: whether each microbatch has rows of its own.
    """

    def __init__(self, has_rows: bool) -> None:
        self._has_rows = has_rows
        self._rows: list[Any] = []
        self._total: Any = None

    def add(self, gradient: Any, source: Any) -> None:
        """Add what a microbatch gave for its part of the source: None if there is none."""
        if self._has_rows:
            self._rows.append((gradient, source))
        elif gradient is not None:
            wide = _numbers.widened(gradient)
            if self._total is None:  # in memory that nothing else has
                self._total = wide.clone() if wide is gradient else wide
            elif self._total.requires_grad or wide.requires_grad:
                self._total = self._total + wide
            else:
                self._total.add_(wide)

    def result(self, source: Any) -> Any:
        """Return the gradient of a source, or None. Samples that were left out have zeros."""
        if not self._has_rows:
            return None if self._total is None else self._total.to(source.dtype)
        if all(gradient is None for gradient, _ in self._rows):
            return None
        parts = [torch.zeros_like(s) if g is None else g for g, s in self._rows]
        missing = len(source) - sum(map(len, parts))
        return torch.cat([*parts, *([torch.zeros_like(source[:missing])] if missing else [])])


def gradients_of(pairs: Any, sources: list[Any], create_graph: bool) -> list[Any]:
    """Return the gradients of what a microbatch gave, None where there is none."""
    followed = [source for source in sources if source.requires_grad]
    if not pairs or not followed:
        return [None for _ in sources]
    outputs, gradients = zip(*pairs)
    found = iter(
        torch.autograd.grad(
            outputs, followed, gradients, create_graph=create_graph, allow_unused=True
        )
    )
    return [next(found) if source.requires_grad else None for source in sources]
