"""Choose the classes for the backend of Keras. No other module of the package chooses:

* `Backend` runs the functions of the core for one compiled model.
* `Hooks`, a base of the mixin, defines the methods of a model that Keras calls on that backend.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import keras

from ga_model.base import _validate

_validate.check_backend(keras.backend.backend())

if TYPE_CHECKING or keras.backend.backend() == "tensorflow":
    from ga_model.backends.tensorflow.adapter import TensorFlowBackend as Backend
    from ga_model.backends.tensorflow.engine import Hooks
elif keras.backend.backend() == "jax":
    from ga_model.backends.jax.adapter import JaxBackend as Backend
    from ga_model.backends.jax.engine import Hooks
else:
    from ga_model.backends.torch.adapter import TorchBackend as Backend
    from ga_model.backends.torch.engine import Hooks

__all__ = ["Backend", "Hooks"]
