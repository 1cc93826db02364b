"""Types for a layer call that is tried or split, between the core and a backend."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from ga_model.core.statistics import Moments


class Traced(NamedTuple):
    """What a call gives for some samples.

    Attributes:
        outputs: tensors.
        attached: what losses of Keras's find at them: tensors, by the number of the output and a
            name.
        losses: scalars that layers added.
        moments: of the calls of BatchNormalization layers.
    """

    outputs: list[Any]
    attached: dict[str, Any]
    losses: list[Any]
    moments: list[Moments]


class IsolatedCall(NamedTuple):
    """A function to be run on other numbers, isolated from the step.

    Attributes:
        function: takes lists in place of `fixed` and of some samples, and returns one of tensors.
        layer: the layer that it calls.
        fixed: tensors that all samples share, of which the layer's variables are the first.
        samples: tensors that have the samples on axis 0.
    """

    function: Callable[..., list[Any]]
    layer: Any
    fixed: list[Any]
    samples: list[Any]


class Split(NamedTuple):
    """A function to be run by microbatches.

    Attributes:
        layer: the layer that it calls.
        function: takes `carried`, `fixed`, some samples, and their share of all; returns new values
            for the first, and a `Traced` whose losses are those of all samples when added up.
        carried: tensors that go from one microbatch to the next.
        fixed: tensors that all have.
        samples: tensors that have the samples on axis 0.
        size: samples of a microbatch.
        most: as `splitting_calls` takes it.
    """

    layer: Any
    function: Callable[..., tuple[list[Any], Traced]]
    carried: list[Any]
    fixed: list[Any]
    samples: list[Any]
    size: int
    most: int | None
