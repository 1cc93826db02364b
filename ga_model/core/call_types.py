"""Types that the core and a backend exchange to try or split a layer call."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import keras

from ga_model.base._types import Scalar, Tensor
from ga_model.core.statistics import Moments


class Traced(NamedTuple):
    """The results of a layer call on some samples.

    Attributes:
        outputs: output tensors.
        attached: tensors that Keras's losses read from outputs, such as masks, by the index of the
            output and a name.
        losses: what layers passed to `add_loss`.
        moments: moments of the calls of BatchNormalization layers.
    """

    outputs: list[Tensor]
    attached: dict[str, Tensor]
    losses: list[Tensor]
    moments: list[Moments]


class IsolatedCall(NamedTuple):
    """A layer call to run on trial data, outside of the step.

    Attributes:
        function: takes lists that replace `fixed` and `samples`, and returns a list of tensors.
        layer: the called layer.
        fixed: tensors shared by all samples, the layer's variables first.
        samples: tensors with samples on axis 0.
    """

    function: Callable[[list[Tensor], list[Tensor]], list[Tensor]]
    layer: keras.Layer
    fixed: list[Tensor]
    samples: list[Tensor]


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

    layer: keras.Layer
    function: Callable[
        [list[Tensor], list[Tensor], list[Tensor], Scalar], tuple[list[Tensor], Traced]
    ]
    carried: list[Tensor]
    fixed: list[Tensor]
    samples: list[Tensor]
    size: int
    most: int | None
