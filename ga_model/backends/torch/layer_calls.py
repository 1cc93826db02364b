"""Microbatches of a call of a layer: one operation of autograd, forward and again backward.

Forward, each microbatch goes through the layer without its activations being kept. When the
gradient of the outputs is asked for, each goes through it again, from the state that the first pass
found there, with its rows of the gradient; the gradients of weights are summed. This is what
`torch.utils.checkpoint` does, for parts of a batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import keras
import numpy as np
import torch

from ga_model.backends.torch import refusals
from ga_model.backends.torch.call_hooks import noting_hooks, without_hooks
from ga_model.backends.torch.noting import Noting
from ga_model.backends.torch.random_numbers import random_kept, random_state, set_random_state
from ga_model.base import _numbers
from ga_model.base._call_again import PythonState
from ga_model.base._internals import call_scopes, layers_in, own_state, raw, seeds
from ga_model.base._internals_torch import function_of, times_written
from ga_model.core.call_types import Apart, Split, Traced
from ga_model.core.proof import calls
from ga_model.core.proof.calls import NotByRowsError
from ga_model.core.proof.draws import Draws
from ga_model.core.statistics import Moments

_LIBRARIES = ("torch.", "ga_model.")


class Microbatches:
    """Runs a function by microbatches.

    Args:
        split: what is to run.

    Attributes:
        sources: the tensors that gradients can be asked of.
    """

    def __init__(self, split: Split) -> None:
        given = [*split.fixed, *split.samples]
        if not all(map(torch.is_tensor, given)):
            raise NotByRowsError("it takes something that is no tensor of PyTorch")
        self._split, self._rows = split, len(split.samples[0])
        starts = range(0, self._rows, split.size)[: split.most]
        self._shares = [slice(start, min(start + split.size, self._rows)) for start in starts]
        self._is_source = [tensor.requires_grad for tensor in given]
        others = parameters_beside(split.layer, split.fixed)
        self.sources = [t for t in (*given, *others) if t.requires_grad]
        self._tensors, self._autocast = KeptTensors(split.layer), Autocast()
        self._in_call = call_scopes()
        self._begun: list[Any] = []  # what each microbatch begins with, and random state
        self._carried = [tensor.detach().clone() for tensor in split.carried]  # it is written to
        self._moments: list[Moments] = []
        self._number = 0  # of outputs
        self._attached: list[str] = []
        self._versions = [(name, t, times_written(t)) for name, t in _expected_unchanged(split)]

    def run(self) -> tuple[list[Any], Traced]:
        """Run all of them, as one operation of autograd.

        Raises:
            NotByRowsError: what the function gives, or writes to, is not of samples one by one.
        """
        random = random_state()
        try:
            found = _Operation.apply(self, *self.sources)
        except BaseException:
            self._tensors.put_back()
            set_random_state(random)
            raise
        outputs, others = list(found[: self._number]), found[self._number :]
        attached = dict(zip(self._attached, others))
        losses = list(others[len(attached) :])
        return self._carried, Traced(outputs, attached, losses, self._moments)

    def first_pass(self) -> list[Any]:
        """Return outputs, what is attached to them, and losses of all samples."""
        split, joined, losses = self._split, list[Any](), list[Any]()
        for share in self._shares:
            self._begun.append((self._carried, random_state()))
            part = [tensor[share] for tensor in split.samples]
            self._carried, traced = split.function(self._carried, split.fixed, part)
            found = [*traced.outputs, *traced.attached.values()]
            self._check(found, share.stop - share.start)
            if not joined:
                self._number, self._attached = len(traced.outputs), list(traced.attached)
                joined = [t.new_empty((self._rows, *t.shape[1:])) for t in found]
                self._moments = traced.moments
            elif len(traced.moments) != len(self._moments):
                raise NotByRowsError("it normalizes microbatches differently")
            else:
                moments = zip(self._moments, traced.moments)
                self._moments = [a.plus(b) for a, b in moments]
            for whole, tensor in zip(joined, found, strict=True):
                if tensor.shape[1:] != whole.shape[1:]:
                    text = "its outputs have different shapes for different microbatches"
                    raise NotByRowsError(text)
                whole[share] = tensor
            weighted = [loss * factor for loss, factor in self._weighted(traced.losses, share)]
            losses = [a + b for a, b in zip(losses, weighted)] if losses else weighted
        for whole in joined:
            whole[share.stop :] = whole[:1]  # of samples that are left out
        return [*joined, *losses]

    def check_unchanged(self) -> None:
        """Raise RuntimeError if what the function was run on has been written to since."""
        changed = {name for name, t, version in self._versions if times_written(t) != version}
        if changed:
            raise RuntimeError(refusals.changed_message(self._split.layer.name, sorted(changed)))

    def second_pass(self, sources: tuple[Any, ...], upstream: tuple[Any, ...]) -> list[Any]:
        """Run the microbatches again, and return the gradients of the sources.

        Args:
            sources: the tensors, as autograd has saved them.
            upstream: the gradients of what `first_pass` gave, of which some are None.
        """
        split, is_differentiable = self._split, torch.is_grad_enabled()  # once more
        saved = iter(sources)
        given = [next(saved) if is_source else None for is_source in self._is_source]
        number = len(split.fixed)
        fixed = [_or(*pair) for pair in zip(given[:number], split.fixed)]
        if not is_differentiable:  # a leaf may be a parameter that a module of PyTorch reads itself
            fixed = [t if t.is_leaf else t.detach().requires_grad_() for t in fixed]
        samples = [_or(*pair) for pair in zip(given[number:], split.samples)]
        is_source = self._is_source[number:]
        shared = [t for t, yes in zip(fixed, self._is_source) if yes]
        shared += sources[sum(self._is_source) :]
        sums: list[Any] = [None for _ in shared]
        rows: list[list[Any]] = [[] for yes in is_source if yes]
        python = PythonState(split.layer)
        try:
            with random_kept(), without_hooks(shared):
                for share, (carried, random) in zip(self._shares, self._begun, strict=True):
                    set_random_state(random)
                    parts = [t[share] for t in samples]
                    with torch.enable_grad(), self._in_call(), self._autocast.again():
                        if not is_differentiable:
                            parts = [
                                p.detach().requires_grad_(yes) for p, yes in zip(parts, is_source)
                            ]
                        _, traced = split.function(carried, fixed, parts)
                        pairs = self._pairs(traced, share, upstream)
                        own = [p for p, yes in zip(parts, is_source) if yes]
                        gradients = gradients_of(pairs, [*shared, *own], is_differentiable)
                    sums = [_added(a, b) for a, b in zip(sums, gradients)]
                    for part, gradient, found in zip(own, gradients[len(shared) :], rows):
                        found.append(torch.zeros_like(part) if gradient is None else gradient)
        finally:
            python.put_back()
        sums = [a if a is None else a.to(t.dtype) for a, t in zip(sums, shared)]
        joined = [
            torch.cat([*found, t.new_zeros((self._rows - share.stop, *t.shape[1:]))])
            for found, t in zip(rows, [t for t, yes in zip(samples, is_source) if yes])
        ]
        number = sum(self._is_source[:number])
        return [*sums[:number], *joined, *sums[number:]]

    def _pairs(self, traced: Traced, share: slice, upstream: tuple[Any, ...]) -> Any:
        """Return pairs of what a microbatch gave and its gradient, where it has one."""
        found = [*traced.outputs, *traced.attached.values()]
        pairs = [(t, g[share]) for t, g in zip(found, upstream) if g is not None]
        of_losses = zip(self._weighted(traced.losses, share), upstream[len(found) :], strict=True)
        pairs += [(loss, g * factor) for (loss, factor), g in of_losses if g is not None]
        return [(tensor, gradient) for tensor, gradient in pairs if tensor.requires_grad]

    def _weighted(self, losses: list[Any], share: slice) -> list[tuple[Any, float]]:
        """Return the losses that layers added for a microbatch, with what each counts."""
        part = (share.stop - share.start) / self._rows
        pairs = zip(losses, self._split.are_sums)
        return [(loss.sum(), 1.0 if is_sum else part) for loss, is_sum in pairs]

    def _check(self, tensors: list[Any], rows: int) -> None:
        """Check that outputs are of the samples, and that nothing is written past Keras."""
        for tensor in tensors:
            if tensor.ndim == 0 or tensor.shape[0] != rows:
                shape = tuple(tensor.shape)
                raise NotByRowsError(f"an output has the shape {shape} for {rows} samples")
        if written := self._tensors.written():
            raise NotByRowsError(f"it writes to {written} in each call")


class _Operation(torch.autograd.Function):
    """The two passes, as one operation of PyTorch's."""

    @staticmethod
    def forward(ctx: Any, call: Microbatches, *sources: Any) -> Any:
        ctx.call = call
        ctx.save_for_backward(*sources)  # which then knows if they are written to
        ctx.set_materialize_grads(False)
        found = call.first_pass()
        ctx.mark_non_differentiable(*[t for t in found if not t.is_floating_point()])
        return tuple(found)

    @staticmethod
    def backward(ctx: Any, *upstream: Any) -> Any:
        ctx.call.check_unchanged()  # before PyTorch looks at what it has saved
        return (None, *ctx.call.second_pass(ctx.saved_tensors, upstream))


def run_apart(call: Apart, derives: bool) -> Callable[..., Any]:
    """Return what runs a function on other numbers, as `Backend.run_apart` has it.

    Samples are in the range of those that they replace, as tables may be looked up by them. The
    gradients, of the samples and of what is trained, are empty unless a custom gradient is found.
    """
    function, layer, fixed, samples = call
    limits = [_limits_of(tensor) for tensor in samples]
    state = raw_tensors(layer)
    given = [t if id(t) in state else t.detach().requires_grad_(t.requires_grad) for t in fixed]

    def run(values: list[Any], arrays: list[Any], begin: int, end: int) -> list[Any]:
        parts = [
            _within(torch.as_tensor(array[begin:end]), own).to(tensor.device)
            for array, own, tensor in zip(arrays, limits, samples)
        ]
        with (
            random_kept(),
            Autocast().again(),
            _saving_as_always(),
            _exchanged(state, zip(given, values)),
            noting_hooks() as hooks,
            torch.set_grad_enabled(derives),
        ):
            kept = KeptTensors(layer)
            try:
                if derives:
                    parts = [part.requires_grad_(part.is_floating_point()) for part in parts]
                with Noting(Draws(end - begin, calls.TOTAL, begin, begin)):
                    outputs = function(given, parts)
                if changed := kept.written(by_value=True):
                    raise NotByRowsError(f"it writes to {changed} in each call")
                if derives:
                    if hooks:
                        text = "its tensors have hooks, which would see each microbatch"
                        raise NotByRowsError(text)
                    others = parameters_beside(layer, given)
                    sources = [t for t in (*parts, *given, *others) if t.requires_grad]
                    outputs = _gradients_apart(outputs, sources)
            finally:
                kept.put_back()
            return [keras.ops.convert_to_numpy(output) for output in outputs]

    return run


def _gradients_apart(outputs: list[Any], sources: list[Any]) -> list[Any]:
    """Return the gradients of half the sum of squares, if a custom gradient is part of them."""
    if not has_custom_gradients(outputs, sources):
        return []
    pairs = [(output, output.detach()) for output in outputs if output.requires_grad]
    gradients = zip(gradients_of(pairs, sources, create_graph=False), sources)
    dtype = pairs[0][0].dtype
    return [(torch.zeros_like(t) if g is None else g).to(dtype) for g, t in gradients]


def has_custom_gradients(results: list[Any], sources: list[Any]) -> bool:
    """Return whether a `torch.autograd.Function` of the user's is in what a call gave.

    Raises:
        NotByRowsError: it follows from something other than the sources.
    """
    results = [result for result in results if result.requires_grad]
    leaves = [result for result in results if result.grad_fn is None]
    nodes, has_custom = [t.grad_fn for t in results if t.grad_fn is not None], False
    seen = set(nodes)
    while nodes:
        node = nodes.pop()
        leaves += [node.variable] if hasattr(node, "variable") else []
        module = getattr(function_of(node), "__module__", "torch")
        has_custom |= not f"{module}.".startswith(_LIBRARIES)
        new = {following for following, _ in node.next_functions if following is not None} - seen
        seen |= new
        nodes += new
    known = set(map(id, sources))
    if any(id(leaf) not in known for leaf in leaves):
        text = "it uses a tensor or variable that is neither its input nor its weight"
        raise NotByRowsError(text)
    return has_custom


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


def _added(total: Any, gradient: Any) -> Any:
    """Return the sum of two gradients, each a tensor or None, in float32 at least."""
    if gradient is None:
        return total
    wide = _numbers.widened(gradient)
    if total is None:  # in memory that nothing else has
        return wide.clone() if wide is gradient else wide
    return total + wide if total.requires_grad or wide.requires_grad else total.add_(wide)


def _or(found: Any, other: Any) -> Any:
    return other if found is None else found


def _expected_unchanged(split: Split) -> list[tuple[str, Any]]:
    """Return what must not be written to before the second pass, with names."""
    parts = layers_in(split.layer)
    normal = [part for part in parts if isinstance(part, keras.layers.BatchNormalization)]
    changing = {id(v) for part in normal for v in part.non_trainable_variables}
    changing |= {id(v) for part in parts for v in seeds(part)}
    variables = split.layer.variables
    found = [("an input", t) for t in (*split.samples, *split.fixed[len(variables) :])]
    return found + [(v.path, raw(v)) for v in variables if id(v) not in changing]


def raw_tensors(layer: Any) -> dict[int, Any]:
    """Return the tensors of a layer's variables and parameters by ids."""
    return {id(t): t for t in (*layer.parameters(), *map(raw, layer.variables))}


def parameters_beside(layer: Any, tensors: list[Any]) -> list[Any]:
    """Return the parameters of a layer that are to be trained and are none of some tensors."""
    known = set(map(id, tensors))
    found = {id(p): p for p in layer.parameters() if p.requires_grad}
    return [parameter for key, parameter in found.items() if key not in known]


class KeptTensors:
    """What a call may write to past Keras: the state of layers, and tensors in attributes.

    Args:
        layer: the layer that is called.
    """

    def __init__(self, layer: Any) -> None:
        parts = layers_in(layer)
        modules = {id(m): m for part in parts for m in part.modules()}
        found = [(v.path, raw(v)) for part in parts for v in own_state(part)]
        found += [
            (f"the tensor `{name}` of {getattr(module, 'name', type(module).__name__)!r}", value)
            for module in modules.values()
            for name, value in vars(module).items()
            if torch.is_tensor(value) and not value.is_meta
        ]
        self._found = [(n, t, times_written(t), t.detach().clone()) for n, t in found]

    def written(self, by_value: bool = False) -> list[str]:
        """Return the names of those that were written to.

        Args:
            by_value: whether values are compared, which shows what is written through `.data`.
        """
        return [
            name
            for name, tensor, version, value in self._found
            if times_written(tensor) != version or (by_value and not _is_same(tensor, value))
        ]

    def put_back(self) -> None:
        """Let them be as they were."""
        for _, tensor, _, value in self._found:
            if not _is_same(tensor, value):
                tensor.detach().copy_(value)


def _is_same(tensor: Any, value: Any) -> bool:
    return bool(torch.equal(tensor.detach().nan_to_num(), value.nan_to_num()))


class Autocast:
    """The `torch.autocast` of a call, which it is made again in."""

    def __init__(self) -> None:
        devices = ["cpu", "cuda"] if torch.cuda.is_initialized() else ["cpu"]
        self._dtypes = {
            device: torch.get_autocast_dtype(device)
            for device in devices
            if torch.is_autocast_enabled(device)
        }

    @contextmanager
    def again(self) -> Iterator[None]:
        """Run a block in it. Weights are cast again: a cast without its gradient is not kept."""
        with ExitStack() as stack:
            for device, dtype in self._dtypes.items():
                stack.enter_context(torch.autocast(device, dtype=dtype, cache_enabled=False))
            yield


def _limits_of(tensor: Any) -> tuple[float, float] | None:
    """Return the least and the greatest of the numbers in a tensor, if these are a range."""
    if not tensor.is_floating_point() or not tensor.numel():
        return None
    low, high = (float(limit) for limit in tensor.detach().aminmax())
    return (low, high) if 0.0 < high - low < np.inf else None


def _within(tensor: Any, limits: tuple[float, float] | None) -> Any:
    if limits is None:
        return tensor
    low, high = limits
    return low + torch.remainder(tensor - low, high - low)


@contextmanager
def _exchanged(state: dict[int, Any], pairs: Any) -> Iterator[None]:
    """Give variables other values in a block, in other memory: what was computed stays valid.

    Args:
        state: tensors by ids. Those without a value get random numbers.
        pairs: tensors, some of them of the state, and values.
    """
    values = {id(tensor): value for tensor, value in pairs}
    generator = np.random.default_rng(0)
    before = [(tensor, tensor.data) for tensor in state.values()]
    try:
        for tensor, data in before:
            shape = tuple(tensor.shape)
            value = values.get(id(tensor))
            if value is None:
                value = calls.drawn(tensor.dtype, shape, generator, 0.3)
            tensor.data = torch.as_tensor(value).to(data.device, data.dtype)
        yield
    finally:
        for tensor, data in before:
            tensor.data = data


def _saving_as_always() -> Any:
    """Return a context in which no hook sees what is saved, as `torch.utils.checkpoint` counts."""
    return torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor, lambda tensor: tensor)
