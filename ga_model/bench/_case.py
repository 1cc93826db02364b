"""What the benchmark trains: a model and its data."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np


@dataclass(frozen=True)
class Case:
    """A model and the data of one microbatch.

    Attributes:
        make_model: returns the model, compiled with nothing.
        make_optimizer: takes the arguments of an optimizer and returns one.
        make_data: takes a number of rows and returns x and y.
        rows: of a microbatch.
        loss: what the model is compiled with.
    """

    make_model: Callable[[], Any]
    make_optimizer: Callable[..., Any]
    make_data: Callable[[int], tuple[Any, Any]]
    rows: int
    loss: Any = "sparse_categorical_crossentropy"


def random_numbers(*shape: int) -> Callable[[int], tuple[Any, Any]]:
    """Return what makes rows of a shape, in ten classes."""

    def make(rows: int) -> tuple[Any, Any]:
        generator = np.random.default_rng(0)
        x = generator.normal(size=(rows, *shape)).astype("float32")
        return x, generator.integers(0, 10, size=rows)

    return make


def random_ids(most: int, length: int, targets: tuple[int, ...], classes: int) -> Any:
    """Return what makes rows of ids below `most`, and targets of a shape."""

    def make(rows: int) -> tuple[Any, Any]:
        generator = np.random.default_rng(0)
        x = generator.integers(0, most, size=(rows, length)).astype("int32")
        return x, generator.integers(0, classes, size=(rows, *targets))

    return make
