"""Try a call of a layer, on random numbers for its weights and for a few samples."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import keras
import numpy as np
import torch

from ga_model.backends.torch.call_arguments import Arguments
from ga_model.backends.torch.call_hooks import noting_hooks
from ga_model.backends.torch.microbatch_call import Autocast, Given, KeptTensors, run_on
from ga_model.backends.torch.noting import Noting
from ga_model.backends.torch.random_numbers import random_kept
from ga_model.base._call_again import PythonState
from ga_model.base._internals import layers_in, own_state, raw
from ga_model.base._internals_torch import function_of
from ga_model.core.proof import calls
from ga_model.core.proof.draws import Draws
from ga_model.core.proof.runner import averaging
from ga_model.recording._moments_heard import listener
from ga_model.recording._splitting import NotByRowsError

_SCALES = (1.0, 0.1, 3.0)  # of samples: what saturates hides what it combines
_LIBRARIES = ("torch.", "ga_model.")


def kinds_of_losses(layer: Any, arguments: Arguments, training: Any) -> list[str | None]:
    """Check that a layer treats samples one by one, and return what the losses are that it adds.

    Args:
        layer: the layer, which is built.
        arguments: of its call.
        training: whether it trains, or None.

    Returns:
        For each loss "mean" or "sum", or None where it is zero, which does not tell.

    Raises:
        NotByRowsError: it does not, or a loss is neither; the call uses or writes to something that
            is no argument or weight, or cannot be run on other numbers.
    """
    if any(True for part in layers_in(layer) for _ in part.buffers()):
        raise NotByRowsError("it has PyTorch buffers, which a call may write to")
    trials = [_Trial(layer, arguments, training, seed) for seed in range(len(_SCALES))]
    try:
        with (
            random_kept(),
            Autocast().again(),
            _saving_as_always(),
            averaging(layers_in(layer)),
            listener.set(None),
        ):
            has_custom = trials[0].has_custom_gradients()
            found = [trial.kinds(has_custom) for trial in trials]
    except Exception as error:  # whatever code of the user's raises on other numbers
        text = str(error)
        if isinstance(error, (NotByRowsError, Warning, MemoryError)) or "memory" in text:
            raise
        line = next(iter(text.splitlines()), type(error).__name__)
        raise NotByRowsError(f"it cannot be run by itself ({line})") from error
    outputs, losses, gradients = (
        calls.agreed([kinds[part] for kinds in found]) for part in trials[0].parts()
    )
    if any(kind != "rows" for kind in outputs):
        text = "it combines samples, or gives something other than one value per sample"
        raise NotByRowsError(text)
    if None in gradients:
        raise NotByRowsError("it has a custom gradient that combines samples")
    seen = [any(found) for found in zip(*(trial.is_seen for trial in trials))]
    kinds = [kind if is_seen else None for kind, is_seen in zip(losses, seen)]
    if any(is_seen and kind not in ("mean", "sum") for kind, is_seen in zip(kinds, seen)):
        raise NotByRowsError("it adds a loss that is neither a mean nor a sum over samples")
    return kinds


class _Trial:
    """A trial of a call, on numbers of its own.

    Args:
        layer, arguments, training: as `kinds_of_losses` takes them.
        seed: of the numbers.

    Attributes:
        is_seen: of each loss that the call adds, whether it was not zero.
    """

    def __init__(self, layer: Any, arguments: Arguments, training: Any, seed: int) -> None:
        self._layer, self._arguments, self._training = layer, arguments, training
        self._seed = seed
        generator = np.random.default_rng(seed)
        self._samples = [
            _sample_like(tensor, generator, _SCALES[seed]) if has_rows else tensor.detach()
            for tensor, has_rows in zip(arguments.tensors, arguments.has_rows)
        ]
        self._num_tensors = 0
        self._has_losses = False
        self.is_seen: list[bool] = []

    def has_custom_gradients(self) -> bool:
        """Return whether a `torch.autograd.Function` of a user's is in what the call gives.

        Raises:
            NotByRowsError: hooks are, or what is no argument or weight.
        """
        with noting_hooks() as hooks, torch.enable_grad(), self._apart() as run:
            given, sources = run(calls.TOTAL - 2, calls.TOTAL)
        if hooks:
            raise NotByRowsError("its tensors have hooks, which would see each microbatch")
        self._has_losses = bool(given.losses)
        return _has_custom_gradients([*given.tensors, *given.losses], sources)

    def kinds(self, of_gradients: bool) -> list[str | None]:
        """Return what the call gives: of outputs, losses, and gradients if they are asked for."""
        with self._apart() as run_apart:

            def run(begin: int, end: int) -> list[Any]:
                with torch.set_grad_enabled(of_gradients or self._has_losses):
                    given, sources = run_apart(begin, end)
                self._num_tensors = len(given.tensors)
                losses = [_with_slope(loss, sources) for loss in given.losses]
                seen = [bool((loss != 0).any()) for loss in losses]
                pairs = zip(self.is_seen or seen, seen)
                self.is_seen = [before or now for before, now in pairs]
                gradients = _gradients(given.tensors, sources, begin, end) if of_gradients else []
                found = (*given.tensors, *losses, *gradients)
                return [keras.ops.convert_to_numpy(tensor) for tensor in found]

            kinds = calls.kinds_of(run)
        # A gradient that is the same for each sample is one for each.
        _, _, part = self.parts()
        kinds[part] = ["rows" if kind == "alike" else kind for kind in kinds[part]]
        return kinds

    def parts(self) -> tuple[slice, slice, slice]:
        """Return where outputs, losses and gradients are."""
        number = self._num_tensors + len(self.is_seen)
        return slice(self._num_tensors), slice(self._num_tensors, number), slice(number, None)

    @contextlib.contextmanager
    def _apart(self) -> Iterator[Callable[[int, int], tuple[Given, list[Any]]]]:
        """Yield what runs the call on some samples, and leaves everything as it was.

        It returns what the call gave, and the tensors that a gradient may be taken of.
        """
        layer, python = self._layer, PythonState(self._layer)
        generator = np.random.default_rng(self._seed)
        with _exchanged(layer, generator):
            kept = KeptTensors(layer)

            def run(begin: int, end: int) -> tuple[Given, list[Any]]:
                python.put_back()
                kept.put_back()
                parts = self._arguments.part(self._samples, slice(begin, end))
                parts = [part.detach().requires_grad_(part.is_floating_point()) for part in parts]
                with Noting(Draws(end - begin, calls.TOTAL, begin, begin)):
                    given = run_on(layer, self._arguments, parts, self._training, [])
                if changed := kept.written(by_value=True):
                    raise NotByRowsError(f"it writes to {changed} in each call")
                return given, [t for t in (*parts, *layer.parameters()) if t.requires_grad]

            try:
                yield run
            finally:
                kept.put_back()
                python.put_back()


def _has_custom_gradients(results: list[Any], sources: list[Any]) -> bool:
    """Return whether custom gradients are in what a call gave.

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


def _with_slope(loss: Any, sources: list[Any]) -> Any:
    """Return a loss and its derivative along its sources: it may be zero and have a gradient."""
    if not loss.requires_grad:
        return loss.reshape(1)
    found = torch.autograd.grad(loss, sources, retain_graph=True, allow_unused=True)
    slopes = [(g * source).sum() for g, source in zip(found, sources) if g is not None]
    return torch.stack([loss.detach(), sum(slopes, torch.zeros_like(loss)).detach()])


def _gradients(outputs: list[Any], sources: list[Any], begin: int, end: int) -> list[Any]:
    """Return the gradients of a random sum of outputs of some samples."""
    followed = [output for output in outputs if output.requires_grad]
    generator = np.random.default_rng(0)
    upstream = []
    for output in followed:
        numbers = generator.normal(size=(calls.TOTAL, *output.shape[1:]))[begin:end]
        upstream.append(torch.as_tensor(numbers).to(output.device, output.dtype))
    found = torch.autograd.grad(followed, sources, upstream, allow_unused=True)
    return [
        (torch.zeros_like(source) if gradient is None else gradient).to(followed[0].dtype)
        for gradient, source in zip(found, sources)
    ]


def _sample_like(tensor: Any, generator: Any, scale: float) -> Any:
    """Return random samples, in the range of those of a tensor: they may be looked up by."""
    shape = (calls.TOTAL, *tensor.shape[1:])
    found = torch.as_tensor(calls.drawn(tensor.dtype, shape, generator, scale))
    if tensor.is_floating_point() and tensor.numel():
        low, high = (float(limit) for limit in tensor.detach().aminmax())
        if 0.0 < high - low < np.inf:
            found = low + torch.remainder(found - low, high - low)
    return found.to(tensor.device, tensor.dtype)


@contextlib.contextmanager
def _exchanged(layer: Any, generator: Any) -> Iterator[None]:
    """Give all weights other values in a block, in other memory: what was computed stays valid."""
    state = {id(raw(v)) for part in layers_in(layer) for v in own_state(part)}
    tensors = {id(t): t for t in (*layer.parameters(), *map(raw, layer.variables))}
    before = [(tensor, tensor.data) for tensor in tensors.values()]
    try:
        for tensor, data in before:
            scale = _scale(tensor) if id(tensor) not in state or tensor.ndim > 1 else None
            values = calls.drawn(tensor.dtype, tuple(tensor.shape), generator, scale)
            tensor.data = torch.as_tensor(values).to(data.device, data.dtype)
        yield
    finally:
        for tensor, data in before:
            tensor.data = data


def _scale(weight: Any) -> float:
    """Return a size of a weight that saturates nothing."""
    return float(np.prod(weight.shape[:-1])) ** -0.5 if weight.ndim > 1 else 0.3


def _saving_as_always() -> Any:
    """Return a context in which no hook sees what is saved, as `torch.utils.checkpoint` counts."""
    return torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor, lambda tensor: tensor)
