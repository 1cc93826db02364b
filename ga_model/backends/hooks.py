"""Methods of a model that Keras calls, the same on every backend."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import keras

from ga_model.base._internals import compiled_loss
from ga_model.base._types import Logs, Tensor
from ga_model.core.models import current_recording

if TYPE_CHECKING:
    from keras import Model as _Base  # what `super()` finds
else:
    _Base = object


class CoreHooks(_Base):
    """Methods that Keras calls: the base of each backend's `Hooks`."""

    train_function: Callable[..., Logs] | None
    steps_per_execution: int
    _accumulation: Any  # the `core.driver.Driver`, whose backend is that of this class

    def _check_compile_arguments(self, arguments: Mapping[str, Any]) -> None:
        """Do nothing: every argument of Keras's `compile` is supported."""

    @property
    def _compile_loss(self) -> keras.losses.Loss | None:
        """The compiled loss or None. While a step is recorded, a copy that records its terms.

        The loss itself is in the instance's `__dict__` by this name, where Keras's saving finds it.
        """
        compiled, recording = compiled_loss(self), current_recording(self)
        if compiled is None or recording is None:
            return compiled
        return recording.observed_loss(compiled)

    @_compile_loss.setter
    def _compile_loss(self, value: keras.losses.Loss | None) -> None:
        self.__dict__["_compile_loss"] = value

    def _aggregate_additional_loss(self, loss: Tensor) -> Tensor:
        total = super()._aggregate_additional_loss(loss)
        if (recording := current_recording(self)) is not None:
            recording.losses.note_additional(total)
        return total

    def make_train_function(self, force: bool = False) -> Callable[..., Logs]:
        """Make the function that `fit` calls for each execution: Keras's own, or ours."""
        if self.train_function is None or force:
            super().make_train_function(force=True)
            of_keras = self.train_function

            def run(*arguments: Any) -> Logs:
                self._accumulation.check_step()
                train = of_keras if self._accumulation.is_plain() else self._train
                return train(*arguments)  # type: ignore[misc]

            self.train_function = run
        return self.train_function

    def _train(self, *arguments: Any) -> Logs:
        """Train one execution with accumulation; arguments are those of Keras's function."""
        raise NotImplementedError
