"""The public sum of gradients on PyTorch, for custom training loops."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import keras
import numpy as np
import torch

from ga_model.base import _messages, _validate
from ga_model.base._internals import raw
from ga_model.base._names import answering
from ga_model.torch_engine import _refusals
from ga_model.torch_engine._part import Part, sum_dtype
from ga_model.torch_engine._process_group import Processes, num_processes
from ga_model.torch_engine._torch_window import Window

_WHERE = "what the backward pass leaves in `variable.value.grad`"


class GradientAccumulator:
    """Sums weighted gradients over microbatches and applies their mean to an optimizer.

    The same class as on TensorFlow, for the PyTorch backend. There is one buffer per variable that
    has a gradient: float32 for float16 and bfloat16 variables, otherwise the variable's dtype.
    Gradients are copied, so clear them as usual.

    With a `process_group`, each process adds the gradients of its own samples. `apply`, which all
    must call equally often, sums gradients and weights over processes: the update of one process on
    all microbatches, however many samples each has. Pass gradients that are not synchronized: use
    `with ddp.no_sync():` if the model is wrapped in `DistributedDataParallel`.

    Args:
        process_group: the processes that make updates together, such as
            `torch.distributed.group.WORLD`, or None.

    Attributes:
        num_microbatches: an integer, microbatches added since the last reset.

    Example:

    ```python
    optimizer = keras.optimizers.Adam()
    accumulator = GradientAccumulator()
    variables = model.trainable_variables
    for step, (x, y) in enumerate(batches, start=1):
        model.zero_grad()
        loss = keras.ops.mean(keras.ops.square(model(x, training=True) - y))
        loss.backward()
        gradients = [v.value.grad for v in variables]
        accumulator.add(gradients, variables, weight=len(x))
        if step % 4 == 0:
            accumulator.apply(optimizer)
    accumulator.apply(optimizer)  # the rest of the epoch; an empty window changes nothing
    ```
    """

    @answering
    def __init__(self, *, process_group: Any = None) -> None:
        _refusals.check_group(process_group)
        is_alone = process_group is None or num_processes(process_group) == 1
        self._processes = None if is_alone else Processes(process_group)
        self._has_group = process_group is not None
        self._window = Window(None, 1, self._processes)
        self._is_sum: bool | None = None
        self.num_microbatches = 0

    def add(
        self, gradients: Collection[Any], variables: Collection[Any], *, weight: Any | None
    ) -> None:
        """Add the gradients of one microbatch to the window.

        Args:
            gradients: one per variable: a tensor or an array of its shape, or None.
            variables: the variables, the same ones in the same order in every call.
            weight: scalar number or tensor, what the microbatch counts in the window's mean (rows,
                or tokens, of a loss that is their mean). Zero changes nothing. None in every call
                for a loss that is a sum: the gradients are then summed and not divided.

        Raises:
            TypeError: these are no lists or the like, or no variables; or a gradient is no tensor
                or array of real numbers.
            ValueError: the lengths or shapes differ; the variables are not those of the first call;
                `weight` is no scalar number, or None in one call and a number in another.
        """
        if not (_validate.is_list(gradients) and _validate.is_list(variables)):
            types = [f"{type(value).__name__!r}" for value in (gradients, variables)]
            raise TypeError(_messages.lengths_message(*types))
        gradients, variables = list(gradients), list(variables)
        _validate.check_variables(variables)
        _validate.check_lengths(gradients, variables)
        gradients = [_tensor(gradient, v) for gradient, v in zip(gradients, variables)]
        _validate.check_shapes(gradients, variables)
        _validate.check_same_variables(self.variables, variables)
        is_sum = weight is None
        if self._is_sum not in (None, is_sum):
            raise ValueError(_messages.mixed_weights_message())
        number = 1.0 if is_sum else _number(weight)
        self._is_sum = is_sum
        self.num_microbatches += 1
        relative = self._window.relative_weight(None if is_sum else number, 1.0)
        with torch.no_grad():
            part = Part(None, variables, [None if g is None else g.detach() for g in gradients])
            part.widen()
            if not (is_sum or number):
                part.leave_out()
            self._window.add([part.times(relative)], None if is_sum else relative)

    @property
    def variables(self) -> list[Any]:
        """The variables whose gradients are summed; none before the first `add`."""
        return [v for part in self._window.parts for v in part.variables]

    @property
    def summed_variables(self) -> list[Any]:
        """Variables whose rows were summed to bound the memory: none, as there are no rows."""
        return []

    def mean(self) -> list[Any]:
        """Return the window's gradient, one tensor or None per variable, in its dtype.

        That is sum(w_i * g_i) / sum(w_i), or sum(g_i) where the weights are None. Not finite where
        the weights sum to zero.
        """
        total = 1.0 if self._is_sum else self._window.total
        return [gradient for part in self._window.parts for gradient in part.mean(total)]

    def apply(self, optimizer: Any, *, is_last: bool = False) -> None:
        """Update the variables with the window's gradient, and start the next window.

        One call is one `optimizer.apply`. An empty window, and one whose weights sum to zero,
        changes nothing.

        Args:
            optimizer: a `keras.optimizers.Optimizer`.
            is_last: whether the process has no samples left. With several processes it then takes
                part in the updates of the others until all have none left, so processes may have
                different numbers of windows.

        Raises:
            TypeError: `optimizer` is none.
            ValueError: it accumulates gradients itself; or there are several processes, and no
                `process_group` was passed.
            RuntimeError: the processes differ in their variables.
        """
        if not isinstance(optimizer, keras.optimizers.Optimizer):
            raise TypeError(_messages.not_an_optimizer_message(optimizer))
        _validate.check_single_accumulation([optimizer])
        if not self._has_group and num_processes() > 1:
            name = "`process_group`"
            raise ValueError(_refusals.alone_message("a `GradientAccumulator`", name))
        is_end = False
        while not is_end:
            parts, unit, is_end = self._window.parts, self._window.unit, True
            total = 1.0 if self._is_sum else self._window.total
            self.reset()
            if self._processes is not None:
                sums = self._processes.sum(parts, total, unit, bool(parts), is_last)
                parts, total, is_end = sums.parts, sums.total, sums.is_end or not is_last
            for part in parts if total else []:
                with torch.no_grad():
                    optimizer.apply(part.mean(total), part.variables)

    def __repr__(self) -> str:
        number, variables = self.num_microbatches, len(self.variables)
        return f"<GradientAccumulator: {number} microbatches, {variables} variables>"

    def reset(self) -> None:
        """Forget the open window."""
        self._window.discard()
        self._is_sum = None
        self.num_microbatches = 0


def _tensor(gradient: Any, variable: Any) -> Any:
    """Return the gradient of a variable as a tensor, or None, or raise TypeError.

    An array is copied, in the dtype in which such gradients are summed.
    """
    gradient = raw(gradient)
    if gradient is None or torch.is_tensor(gradient):
        return gradient
    weight = raw(variable)
    try:
        array = np.asarray(gradient)
        if array.dtype.kind in "OUSc":
            raise TypeError
        return torch.tensor(array.astype("float64"), dtype=sum_dtype(weight), device=weight.device)
    except (TypeError, ValueError):
        raise TypeError(_messages.gradient_message(gradient, variable, _WHERE)) from None


def _number(weight: Any) -> float:
    """Return a weight as a float, or raise ValueError."""
    weight = raw(weight)
    is_scalar = not isinstance(weight, str) and len(getattr(weight, "shape", ())) == 0
    try:
        if not is_scalar:
            raise TypeError
        return float(weight.detach() if torch.is_tensor(weight) else weight)
    except (TypeError, ValueError):
        raise ValueError(_messages.weight_message(weight)) from None
