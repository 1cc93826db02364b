"""Public names that are for TensorFlow only, and say so when they are used."""

from __future__ import annotations

from typing import Any, NoReturn


def check_equivalence(*args: Any, **kwargs: Any) -> NoReturn:
    """Raise RuntimeError: it runs on TensorFlow."""
    way_out = "compare the weights with those of plain Keras after a few updates"
    raise RuntimeError(_message("check_equivalence", way_out))


class GradientNoiseScale:
    """Raises RuntimeError when it is made: it runs on TensorFlow."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        raise RuntimeError(_message("GradientNoiseScale", "leave the callback out"))


class EquivalenceReport:
    """Raises RuntimeError when it is made: it is what `check_equivalence` returns."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        raise RuntimeError(_message("EquivalenceReport", "leave it out"))


def _message(name: str, way_out: str) -> str:
    return (
        f"`{name}` works with the TensorFlow backend of Keras. "
        "Received: keras.backend.backend()='torch'. Set the environment variable "
        f"KERAS_BACKEND=tensorflow before importing keras, or {way_out}."
    )
