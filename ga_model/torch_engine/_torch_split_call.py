"""A layer's call on all samples that is split into microbatches, forward and backward.

Forward, each microbatch goes through the layer without its activations being kept. The outputs of
all samples are what the call gives. When their gradient is asked for, each microbatch goes through
the layer again, from the state that the first pass found there, with its rows of the gradient; the
gradients of weights are summed. This is what `torch.utils.checkpoint` does, for parts of a batch.

A `keras.StatelessScope` keeps the passes from writing to variables. What the first pass has changed
(seeds, running averages) is written when it is through.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import keras
import torch

from ga_model.backends.torch.microbatch_call import Autocast
from ga_model.backends.torch.random_numbers import random_kept, random_state, set_random_state
from ga_model.backends.torch.refusals import changed_message
from ga_model.backends.torch.split_call import Split, gradients_of
from ga_model.base._call_again import PythonState
from ga_model.base._internals import layers_in, own_state, raw, seeds, set_mask
from ga_model.base._internals_torch import times_written
from ga_model.hearing._models import instances_in
from ga_model.hearing._moments_heard import is_known, listener
from ga_model.hearing._splitting import NotByRowsError
from ga_model.torch_engine._gradient_hooks import without_hooks
from ga_model.torch_engine._source_sum import SourceSum
from ga_model.torch_engine._tensors import Tensors
from ga_model.torch_engine._torch_arguments import Arguments
from ga_model.torch_engine._torch_microbatch_call import Given, Place, run_on
from ga_model.torch_engine._torch_statistics import Listener, Statistics


class _Found(NamedTuple):
    """What a microbatch begins with.

    Attributes:
        values: pairs of a variable that calls change, and its value.
        random: the state of PyTorch's random numbers, of the CPU and of each GPU.
    """

    values: list[tuple[Any, Any]]
    random: tuple[Any, list[Any]]


class SplitCall:
    """A call that goes by microbatches.

    Args:
        layer: the layer.
        arguments: what it was called with.
        training: whether it is called in training, or None.
        kinds: of the losses that the layer adds, "mean" or "sum", or None: they were zero so far.

    Attributes:
        normalizing: names of BatchNormalization layers that have normalized microbatches: those
            whose running averages move by the statistics of all samples, and others.
    """

    def __init__(
        self, layer: Any, arguments: Arguments, training: Any, kinds: list[str | None]
    ) -> None:
        self.normalizing: tuple[list[str], list[str]] = ([], [])
        self._layer = layer
        self._arguments = arguments
        self._training = training
        self._kinds = kinds
        self._state = PythonState(layer)
        self._found: list[_Found] = []
        self._form: Any = None  # of the outputs
        weights = {id(p): p for p in layer.parameters() if p.requires_grad}
        self._weights = list(weights.values())
        layers = layers_in(layer)
        self._normal = [p for p in layers if isinstance(p, keras.layers.BatchNormalization)]
        # The variables that a call may change: running averages, and those of random numbers.
        self._changing = [v for part in self._normal for v in part.non_trainable_variables]
        self._changing += [v for part in layers for v in seeds(part)]
        self._autocast = Autocast()
        self._tensors = Tensors(layer, [v for part in layers for v in own_state(part)])
        changing = {id(v) for v in self._changing}
        others = [(v.path, raw(v)) for v in layer.variables if id(v) not in changing]
        found = [*(("an input", t) for t in arguments.tensors), *others]
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
        except NotByRowsError:
            self._state.put_back()
            self._tensors.put_back()
            set_random_state(random)
            raise
        tensors, masks = list(found[: self._form.num_tensors]), found[self._form.num_tensors :]
        for number, mask in zip(self._form.masked, masks):
            set_mask(tensors[number], mask)
        losses = list(masks[len(self._form.masked) :])
        if losses:
            keras.layers.Layer.add_loss(self._layer, losses)  # a Functional's own refuses
        return keras.tree.map_structure(
            lambda leaf: tensors[leaf.number] if isinstance(leaf, Place) else leaf,
            self._form.outputs,
        )

    def first_pass(self) -> list[Any]:
        """Run the microbatches forward, and return outputs, masks and losses of all samples."""
        joined: list[Any] = []
        losses: list[Any] = []
        statistics = Statistics()
        values = [(v, raw(v).detach().clone()) for v in self._changing]
        for share in self._arguments.shares():
            self._found.append(_Found(values, random_state()))
            part = self._arguments.part(self._arguments.tensors, share)
            hears = Listener()
            given = self._run(part, values, hears)
            statistics.add(hears.heard)
            rows = share.stop - share.start
            self._check(given, rows)
            if not joined:
                self._form = given.form
                rows_of_all = self._arguments.rows
                joined = [t.new_empty((rows_of_all, *t.shape[1:])) for t in given.tensors]
            for whole, tensor in zip(joined, given.tensors, strict=True):
                if tensor.shape[1:] != whole.shape[1:]:
                    raise NotByRowsError(
                        "its outputs have different shapes for different microbatches"
                    )
                whole[share] = tensor
            shares = [loss * factor for loss, factor in self._weighted(given.losses, rows)]
            losses = [a + b for a, b in zip(losses, shares)] if losses else shares
            values = given.values
        for whole in joined:
            whole[share.stop :] = whole[:1]  # of samples that are left out
        pooled = {id(v) for call in statistics.calls() for v in call.layer.non_trainable_variables}
        for variable, value in values:
            if id(variable) not in pooled:
                raw(variable).copy_(value)
        statistics.move()
        return [*joined, *losses]

    def check_unchanged(self) -> None:
        """Raise RuntimeError if what the call was made of has been written to since."""
        changed = [name for name, t, version in self._versions if times_written(t) != version]
        if changed:
            raise RuntimeError(changed_message(self._layer.name, sorted(set(changed))))

    def second_pass(
        self, is_source: list[bool], sources: tuple[Any, ...], upstream: tuple[Any, ...]
    ) -> list[Any]:
        """Run the microbatches again, and return the gradients of the sources.

        Args:
            is_source: of each tensor among the arguments, whether it is a source.
            sources: these tensors, and the weights.
            upstream: the gradients of what `first_pass` gave, of which some are None.
        """
        is_differentiable = torch.is_grad_enabled()  # once more
        num_inputs = sum(is_source)
        tensors, given = list(self._arguments.tensors), iter(sources[:num_inputs])
        tensors = [next(given) if yes else t for t, yes in zip(tensors, is_source)]
        has_rows = [r for r, yes in zip(self._arguments.has_rows, is_source) if yes]
        sums = [SourceSum(rows) for rows in has_rows] + [SourceSum(False) for _ in self._weights]
        state = PythonState(self._layer)
        try:
            with random_kept(), without_hooks(self._weights):
                for share, found in zip(self._arguments.shares(), self._found, strict=True):
                    set_random_state(found.random)
                    parts = self._arguments.part(tensors, share)
                    with torch.enable_grad():
                        if not is_differentiable:
                            parts = [
                                p.detach().requires_grad_(yes) for p, yes in zip(parts, is_source)
                            ]
                        run = self._run(parts, found.values)
                        pairs = self._pairs(run, share, upstream)
                        own = [p for p, yes in zip(parts, is_source) if yes] + self._weights
                        gradients = gradients_of(pairs, own, is_differentiable)
                    for total, gradient, source in zip(sums, gradients, own):
                        total.add(gradient, source)
        finally:
            state.put_back()
        return [total.result(self._arguments.rows) for total in sums]

    def _pairs(self, run: Given, share: slice, upstream: tuple[Any, ...]) -> list[Any]:
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
        return [
            (loss, 1.0 if kind == "sum" else share)
            for loss, kind in zip(losses, self._kinds, strict=True)
        ]

    def _run(
        self, tensors: list[Any], values: list[tuple[Any, Any]], hears: Listener | None = None
    ) -> Given:
        self._state.put_back()
        with listener.set(hears), self._autocast.again():
            return run_on(self._layer, self._arguments, tensors, self._training, values)

    def _check(self, given: Given, rows: int) -> None:
        """Check that outputs are of the samples, and that nothing else is written."""
        if given.form.holds_objects:
            raise NotByRowsError("it returns tensors in an object that cannot be concatenated")
        for tensor in given.tensors:
            if tensor.ndim == 0 or tensor.shape[0] != rows:
                shape = tuple(tensor.shape)
                raise NotByRowsError(f"an output has the shape {shape} for {rows} samples")
        expected = {id(v) for v in self._changing}
        if len(given.losses) != len(self._kinds):
            raise NotByRowsError("it adds different losses in training")
        if any(kind is None and loss.any() for loss, kind in zip(given.losses, self._kinds)):
            raise NotByRowsError("")  # which the next call may answer
        for part, name, value in self._state.changed():
            if instances_in(value, torch.Tensor) and not type(part).__module__.startswith("keras."):
                raise NotByRowsError(f"it stores a tensor in its attribute `{name}`")
        if changed := self._tensors.changed():
            raise NotByRowsError(f"it writes to {changed} in each call")
        others = [v.path for v in given.written if id(v) not in expected]
        others = [path for path in others if not path.endswith("seed_generator_state")]
        if others:
            raise NotByRowsError(f"it writes to {sorted(set(others))} in each call")
        written = {id(v) for v in given.written}
        normal = [p for p in self._normal if any(id(v) in written for v in p.variables)]
        pooled = [part.name for part in normal if is_known(part)]
        self.normalizing = pooled, [part.name for part in normal if not is_known(part)]
