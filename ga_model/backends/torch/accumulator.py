"""The public sum of gradients on PyTorch, for custom training loops."""

from __future__ import annotations

import keras
import torch

from ga_model.backends.torch import refusals
from ga_model.backends.torch.process_group import Processes, num_processes
from ga_model.base._names import suggests_argument_names
from ga_model.core.accumulator import Accumulator, added, check_optimizer
from ga_model.core.backend_types import Applied


class GradientAccumulator(Accumulator):
    """Sums weighted gradients over microbatches and applies their mean to an optimizer.

    The same class as on TensorFlow, for the PyTorch backend. There is one buffer per variable that
    has a gradient: float32 for float16 and bfloat16 variables, otherwise the variable's dtype.
    Gradients are copied, so clear them as usual.

    With a `process_group`, each process adds the gradients of its own samples, however many. All
    must call `apply` equally often: it makes the update of one process with all microbatches. Pass
    gradients that are not synchronized: use `with ddp.no_sync():` if the model is wrapped in
    `DistributedDataParallel`.

    Args:
        process_group: the processes that make updates together, such as
            `torch.distributed.group.WORLD`, or None.

    Attributes:
        num_microbatches: int, number of microbatches added since the last reset.

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

    _tensor_type = torch.Tensor
    _source = "what the backward pass leaves in `variable.value.grad`"
    _added = staticmethod(torch.no_grad()(added))
    _update = torch.no_grad()(Accumulator._update)

    @suggests_argument_names
    def __init__(self, *, process_group: torch.distributed.ProcessGroup | None = None) -> None:
        super().__init__()
        refusals.check_group(process_group)
        self._has_group, self._processes = process_group is not None, Processes(process_group)
        self._known: list[keras.Variable] = []  # variables of the last window

    def apply(self, optimizer: keras.optimizers.Optimizer, *, is_last: bool = False) -> None:
        """Update the variables with the window's gradient, and start the next window.

        One call is one `optimizer.apply`. An empty window, and one whose weights sum to zero,
        changes nothing.

        Args:
            optimizer: a `keras.optimizers.Optimizer`.
            is_last: whether the process has no samples left. With several processes, the call then
                takes part in the updates of the others until none has samples left, so they may
                have different numbers of windows.

        Raises:
            TypeError: `optimizer` is not an optimizer.
            ValueError: it accumulates gradients itself; or there are several processes, and no
                `process_group` was passed.
            RuntimeError: the processes differ in their variables.
        """
        check_optimizer(optimizer)
        if not self._has_group and num_processes() > 1:
            name = "`process_group`"
            raise ValueError(refusals.alone_message("a `GradientAccumulator`", name))
        is_end = False
        while not is_end:
            self._known = self.variables or self._known
            own_sums = self._sums
            self.reset()
            applied = [Applied(optimizer, tuple(self._known))]
            sums, is_end = self._processes.sum(applied, own_sums, is_end=is_last)
            self._update(optimizer, sums, self._known)
            is_end = is_end or not is_last
