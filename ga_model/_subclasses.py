"""Check and prepare classes that have the mixin among their bases."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

import keras

from ga_model._settings import NAMES
from ga_model.base._context import ThreadValue

# What makes a layer a model: `keras.Model` has its `train_step` from there. Keras's own tests mix
# it with layers.
Trainer = next(c for c in keras.Model.__mro__ if "train_step" in vars(c))

_in_step = ThreadValue()  # the model whose outermost `train_step` runs


def accumulated(train_step: Callable[..., Any]) -> Callable[..., Any]:
    """Make a `train_step` run by microbatches. The outermost one of a model does the work."""
    train_step = getattr(train_step, "python_function", train_step)  # of a `tf.function`

    @functools.wraps(train_step)
    def accumulated(self: Any, *args: Any) -> Any:
        if _in_step.get() is self:  # in a step that calls that of its base
            return train_step(self, *args)
        with _in_step.set(self):
            return self._accumulation.run_step(functools.partial(train_step, self), *args)

    return accumulated


def prepare(cls: Any, mixin: type) -> None:
    """Let a class accumulate with whatever `train_step` it has.

    Args:
        cls: the class.
        mixin: `AccumulatingModel`, one of its bases.

    Raises:
        TypeError: the bases are no Keras model, or in the wrong order; or a setting is an
            attribute of the class.
    """
    mro = cls.__mro__
    if Trainer not in mro and any(
        base is not object and not issubclass(base, mixin) for base in cls.__bases__
    ):
        raise TypeError(no_keras_model_message(cls.__name__))
    if Trainer in mro and mro.index(Trainer) < mro.index(mixin):
        raise TypeError(_wrong_side_message(cls.__name__))
    for name in NAMES:
        if not hasattr(value := inspect.getattr_static(cls, name), "__set__"):
            raise TypeError(_class_attribute_message(cls.__name__, name, value))
    owner = next(c for c in mro if "train_step" in vars(c))
    if owner is cls or not issubclass(owner, mixin):
        cls.train_step = accumulated(vars(owner)["train_step"])
    # The user's own definition has priority, even behind the mixin.
    for name in ("microbatch_weight", "on_update"):
        if owners := [c for c in mro if c is not mixin and name in vars(c)]:
            setattr(cls, name, vars(owners[0])[name])


def _wrong_side_message(name: str) -> str:
    return (
        "`AccumulatingModel` must come before the Keras model class in the list of bases. "
        f"Received: class {name} with a Keras model class first. "
        f"Write `class {name}(AccumulatingModel, keras.Model)`."
    )


def _class_attribute_message(name: str, setting: str, value: Any) -> str:
    return (
        f"`{setting}` is a setting of each model and cannot be a class attribute. "
        f"Received: class {name} with {setting}={value!r}. "
        f"Pass it to `compile()`, or set `self.{setting}` in `__init__`."
    )


def no_keras_model_message(name: str) -> str:
    return (
        "`AccumulatingModel` is a mixin for Keras model classes. "
        f"Received: class {name}, which is not a subclass of `keras.Model`. "
        f"Write `class {name}(AccumulatingModel, keras.Model)`."
    )
