"""Record the gradients that optimizers apply, and give those of `torch.optim` Keras's interface.

While a step is recorded, `step` of the `torch.optim` optimizers in attributes of the model passes
the gradients of their parameters to the recording. The update sets `.grad` to the gradients of the
window, and calls the original `step`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import torch

from ga_model.backends.torch import refusals
from ga_model.base._internals import iterations_variable, raw
from ga_model.base._internals_torch import note_step
from ga_model.core.backend_types import Applied
from ga_model.core.models import is_of_keras
from ga_model.core.recorder import CannotAccumulateError, Recording
from ga_model.core.stand_ins import recorded


def record_gradients(
    recording: Recording, applied: Applied, gradients: list[torch.Tensor | None]
) -> None:
    """Record the gradients that a step applies, and make the surrogate update of a trial."""
    optimizer, variables, _ = applied
    if not optimizer.built:
        with keras.name_scope(optimizer.name):
            optimizer.build(variables)
    is_own, sums = not is_of_keras(recording.model, "train_step"), recording.sums
    for variable, gradient in () if sums and sums.is_in_grad else zip(variables, gradients):  # type: ignore[attr-defined]
        if raw(variable).grad is gradient:  # the window owns it now; the user's step gets a copy
            raw(variable).grad = gradient.clone() if is_own and gradient is not None else None
    gradients = [None if gradient is None else gradient.detach() for gradient in gradients]
    recording.apply(applied, gradients)
    if recording.moves_by and (rate := float(recording.rate_of(gradients, variables))):
        with torch.no_grad():
            for variable, gradient in zip(variables, gradients):
                if gradient is not None:
                    raw(variable).sub_((rate * gradient).to(raw(variable).dtype))
            iterations_variable(optimizer).assign_add(1)


class TorchOptimizer:
    """A `torch.optim.Optimizer` with the interface of a Keras optimizer.

    Its `variables` are `iterations` and, as of the last `note_numbers`, rates and other numbers.
    """

    built = True

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer
        self.name = type(optimizer).__name__
        with keras.device("cpu"):
            self.iterations = _number("int", f"iterations_of_{self.name}")
            self._numbers = {  # by index of the parameter group, and name
                (place, key): _number("float32", f"{self.name}_{key}")
                for place, group in enumerate(optimizer.param_groups)
                for key, value in group.items()
                if _is_number(value)
            }
        self.variables = [self.iterations, *self._numbers.values()]
        self.note_numbers()

    def note_numbers(self) -> None:
        """Copy the optimizer's numbers to the variables."""
        for (place, key), variable in self._numbers.items():
            variable.assign(float(self._optimizer.param_groups[place][key]))

    def scale_loss(self, loss: torch.Tensor) -> torch.Tensor:
        return loss

    def apply(self, gradients: list[torch.Tensor | None], variables: list[keras.Variable]) -> None:
        """Update the variables. Their `grad` is then what was applied, as in plain training."""
        for variable, gradient in zip(variables, gradients):
            raw(variable).grad = None if gradient is None else gradient.to(raw(variable).dtype)
        self._optimizer.step()
        self.iterations.assign_add(1)


def _number(dtype: str, name: str) -> keras.Variable:
    return keras.Variable(0, dtype=dtype, trainable=False, name=name)


def _is_number(value: Any) -> bool:
    is_tensor = torch.is_tensor(value) and value.numel() == 1
    return is_tensor or (isinstance(value, (int, float)) and not isinstance(value, bool))


def _record_step(
    recording: Recording,
    optimizer: torch.optim.Optimizer,
    closure: Callable[[], Any] | None = None,
) -> None:
    model = recording.model
    if closure is not None:
        raise CannotAccumulateError(refusals.closure_message(model.name))
    wrapper: TorchOptimizer = recording.backend.wrapper_of(optimizer)  # type: ignore[attr-defined]
    known = {id(raw(variable)): variable for variable in model.trainable_variables}
    parameters = (p for group in optimizer.param_groups for p in group["params"])
    updated = [p for p in parameters if p.requires_grad]
    if not all(id(parameter) in known for parameter in updated):
        raise CannotAccumulateError(refusals.foreign_message(model.name, wrapper.name))
    if recording.moves_by is not None:  # in a trial, which compares them
        wrapper.note_numbers()
    note_step(optimizer)
    variables = tuple(known[id(parameter)] for parameter in updated)
    record_gradients(recording, Applied(wrapper, variables), [p.grad for p in updated])


STEP = recorded("step", _record_step)
