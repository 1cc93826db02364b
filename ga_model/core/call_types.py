"""Types that the core and a backend exchange to try or split a layer call."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from ga_model.core.statistics import Moments


class Traced(NamedTuple):
    """The results of a layer call on some samples.

    Attributes:
        outputs: output tensors.
        attached: tensors that Keras's losses read from outputs, such as masks, by the index of the
            output and a name.
        losses: scalars that layers added.
        moments: moments of the calls of BatchNormalization layers.
    """

    outputs: list[Any]
    attached: dict[str, Any]
    losses: list[Any]
    moments: list[Moments]


class IsolatedCall(NamedTuple):
    """A layer call to run on trial data, outside of the step.

    Attributes:
        function: takes lists that replace `fixed` and `samples`, and returns a list of tensors.
        layer: the called layer.
        fixed: tensors shared by all samples, the layer's variables first.
        samples: tensors with samples on axis 0.
    """

    function: Callable[..., list[Any]]
    layer: Any
    fixed: list[Any]
    samples: list[Any]


class Split(NamedTuple):
    """A layer call to run by microbatches.

    Attributes:
        layer: the called layer.
        function: takes `carried`, `fixed`, some samples, and their share of all samples. Returns
            new values of `carried`, and a `Traced` whose losses add up to those of all samples.
        carried: tensors passed from one microbatch to the next.
        fixed: tensors shared by all microbatches.
        samples: tensors with samples on axis 0.
        size: samples per microbatch.
        most: see `splitting_calls`.
    """

    layer: Any
    function: Callable[..., tuple[list[Any], Traced]]
    carried: list[Any]
    fixed: list[Any]
    samples: list[Any]
    size: int
    most: int | None
