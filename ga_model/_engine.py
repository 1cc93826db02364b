"""Choose the engine for the backend of Keras, here and nowhere else.

An engine is a module with two names:

* `Accumulation` trains one compiled model batch by batch, and has its window.
* `Hooks` has the methods of a model that Keras calls on that backend: the base of the mixin.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import keras

from ga_model.base import _validate

_validate.check_backend(keras.backend.backend())

if TYPE_CHECKING or keras.backend.backend() == "tensorflow":
    from ga_model.backends.tensorflow.engine import Accumulation, Hooks
elif keras.backend.backend() == "jax":
    from ga_model.backends.jax.engine import Accumulation, Hooks
else:
    from ga_model.backends.torch.engine import Accumulation, Hooks

__all__ = ["Accumulation", "Hooks"]
