"""What the check needs from the backend of Keras."""

from typing import TYPE_CHECKING

import keras

if TYPE_CHECKING or keras.backend.backend() == "tensorflow":
    from ga_model.check import _on_tensorflow as backend
elif keras.backend.backend() == "jax":
    from ga_model.check import _on_jax as backend
else:
    from ga_model.check import _on_torch as backend

__all__ = ["backend"]
