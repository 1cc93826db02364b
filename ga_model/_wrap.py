"""`accumulate`, which adds the mixin to an existing model."""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable
from typing import Any, cast

import keras

from ga_model._model import AccumulatingModel
from ga_model._settings import UNCHANGED, Settings, passed
from ga_model.base._internals import unpickling
from ga_model.base._names import suggests_argument_names
from ga_model.core.models import optimizers_in


@suggests_argument_names
def accumulate(
    model: keras.Model,
    *,
    accumulation_steps: int | None = UNCHANGED,
    microbatch_size: int | str | None = UNCHANGED,
    skip_nonfinite: bool | None = UNCHANGED,
    loss_over: str | None = UNCHANGED,
    verify: bool | None = UNCHANGED,
) -> AccumulatingModel:
    """Make an existing Keras model accumulate gradients, and return the same object.

    Add this one line to a working script. The model may be Functional, Sequential or subclassed,
    built or not, compiled or not. Layers, weights, optimizer and all references to the model stay
    the same. `save` writes the file of the plain model, which loads without this package; so call
    `accumulate` again after `load_model`.

    Args:
        model: a `keras.Model`. If it is an `AccumulatingModel` already, only the settings that are
            passed change; None resets a setting to its default.
        accumulation_steps: batches of `fit` per update, an integer >= 1. None is 1.
        microbatch_size: samples that go through the model at a time, an integer >= 1: each batch of
            `fit` is split into microbatches of this size. Or "auto": search for the largest size
            that fits in memory, to within a tenth. None does not split batches.
        skip_nonfinite: whether to skip microbatches with NaN or Inf in a gradient. None is False.
        loss_over: "auto", "microbatch" or "batch": whether the loss of a split batch is added up
            from its microbatches or sees the full batch, which costs a second forward pass. See
            `AccumulatingModel.loss_over`. None is "auto".
        verify: whether to try your own steps, losses, layers and metrics on the first batch, at
            once and in microbatches, before they train. See `AccumulatingModel.verify`. None is
            True.

    Returns:
        `model`, which is now also an instance of `AccumulatingModel`.

    Raises:
        TypeError: `model` is not a Keras model, or a setting has the wrong type.
        ValueError: a setting has an invalid value, the model's optimizer has
            `gradient_accumulation_steps`, or `skip_nonfinite` is combined with a
            LossScaleOptimizer.

    Example:

    ```python
    model = keras.Sequential([keras.layers.Dense(16, activation="relu"), keras.layers.Dense(1)])
    model = accumulate(model, microbatch_size=16)
    model.compile("adam", "mse")
    model.fit(x, y, batch_size=128)  # updates of 128 samples, 16 at a time
    ```
    """
    check_model(model)
    settings = passed(locals())
    Settings(**settings).check_with(optimizers_in(vars(model)))
    if not isinstance(model, AccumulatingModel):
        wrapped = _wrapped_class(cast(Hashable, type(model)))
        object.__setattr__(model, "__class__", wrapped)
        model.train_function = None
    model._accumulation.change(**settings)
    return cast(AccumulatingModel, model)


class _Wrapped(AccumulatingModel):
    """The mixin for wrapped models. Their `__class__` is the class that the user wrote.

    Keras writes `__class__` to files and reads it to copy and clone: it sees the plain model.
    """

    def get_compile_config(self) -> dict[str, Any]:
        config: dict[str, Any] = super(AccumulatingModel, self).get_compile_config()
        return config

    def __dir__(self) -> list[str]:
        return sorted({*dir(type(self)), *vars(self)})  # the default lists names of `__class__`

    def __reduce__(self) -> tuple[Callable[..., keras.Model], tuple[Any, ...]]:
        _, arguments = super().__reduce__()
        return unpickling(self.__class__), arguments


@functools.cache
def _wrapped_class(original: type[keras.Model]) -> type:
    return type(
        original.__name__,
        (_Wrapped, original),
        {
            "__module__": original.__module__,
            "__qualname__": original.__qualname__,
            "__doc__": original.__doc__,
            "__class__": property(lambda self: original),
        },
    )


def check_model(value: Any, function: str = "accumulate") -> None:
    """Raise TypeError if the argument `model` of a function is not a Keras model."""
    if not isinstance(value, keras.Model):
        is_class = isinstance(value, type)
        hint = "Call the class first" if is_class else "Turn it into a `keras.Model` first"
        raise TypeError(
            f"`{function}` takes a Keras model. "
            f"Received: model={value!r} (of type {type(value).__name__}). {hint}."
        )
