"""Public names that are for TensorFlow only, and say so when they are used."""

from __future__ import annotations

from typing import Any


class GradientNoiseScale:
    """Raises RuntimeError when it is made: it runs on TensorFlow."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        raise RuntimeError(_message("GradientNoiseScale", "leave the callback out"))


def _message(name: str, way_out: str) -> str:
    return (
        f"`{name}` works with the TensorFlow backend of Keras. "
        "Received: keras.backend.backend()='torch'. Set the environment variable "
        f"KERAS_BACKEND=tensorflow before importing keras, or {way_out}."
    )
