"""What processes that train one model agree on before they exchange anything.

Processes talk at the end of a window, and where an epoch begins and where `fit` ends, and always in
one way: each first tells all others in a few numbers what it is about to do. So what does not go
together is an error in all of them, and nobody waits for a process that is elsewhere in its
training.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch

from ga_model.base import _numbers
from ga_model.base._internals import raw

_BUCKET = 25 * 2**20  # bytes that are summed at a time, as `DistributedDataParallel` does
WINDOW, END, _EPOCH, _FINISH = range(4)
_NAMES = {
    WINDOW: "the update of a full window",
    END: "the last update of an epoch",
    _EPOCH: "the begin of an epoch",
    _FINISH: "the end of `fit`",
}
_LENGTH = 9  # numbers of a message


class Group:
    """The processes of a group.

    Args:
        group: the `torch.distributed.ProcessGroup`.

    Attributes:
        group: as it is passed.
        size: how many there are.
    """

    def __init__(self, group: Any) -> None:
        self.group = group
        self.size = num_processes(group)

    def begin_epoch(self, epoch: int, variables: Sequence[Any]) -> None:
        """Raise RuntimeError in all processes unless all begin this epoch, with equal variables."""
        self._agree(_EPOCH, epoch, variables)

    def finish(self, variables: Sequence[Any]) -> None:
        """Raise RuntimeError in all processes unless all are at the end of `fit`."""
        self._agree(_FINISH, 0, variables)

    def _agree(self, kind: int, epoch: int, variables: Sequence[Any]) -> None:
        device = raw(variables[0]).device if variables else None
        told = self.tell(kind, [epoch, *fingerprint(variables)], device)
        if len({row[1] for row in told}) > 1:
            raise RuntimeError(_elsewhere_message([f"epoch {int(row[1])}" for row in told]))
        check_alike([row[2:4] for row in told])

    def tell(self, kind: int, numbers: Iterable[float], device: Any) -> list[list[float]]:
        """Tell the other processes what this one is about to do, and return what each tells."""
        row = [float(kind), *map(float, numbers)]
        row += [0.0] * (_LENGTH - len(row))
        here = torch.tensor(row, dtype=torch.float64, device=device)
        told = [torch.empty_like(here) for _ in range(self.size)]
        torch.distributed.all_gather(told, here, group=self.group)
        rows: list[list[float]] = torch.stack(told).tolist()
        kinds = {int(row[0]) for row in rows}
        if len(kinds) > 1 and kinds != {WINDOW, END}:
            raise RuntimeError(_elsewhere_message([_NAMES[int(row[0])] for row in rows]))
        return rows


def num_processes(group: Any = None) -> int:
    """Return the processes of a group, of the default one where none is given; 1 without any."""
    distributed = torch.distributed
    if not (distributed.is_available() and distributed.is_initialized()):
        return 1
    return int(distributed.get_world_size(group))


def sum_dtype(variable: Any) -> torch.dtype:
    """Return the dtype in which gradients of a variable are summed."""
    dtype: torch.dtype = getattr(torch, _numbers.sum_dtype(variable.dtype))
    return dtype


def buckets(variables: Sequence[Any]) -> Iterator[list[Any]]:
    """Return variables in lists of one dtype whose gradients have about so many bytes."""
    bucket: list[Any] = []
    size = 0
    for variable in variables:
        dtype = sum_dtype(variable)
        num_bytes = raw(variable).numel() * dtype.itemsize
        is_other = bool(bucket) and dtype != sum_dtype(bucket[0])
        if bucket and (is_other or size + num_bytes > _BUCKET):
            yield bucket
            bucket, size = [], 0
        bucket.append(variable)
        size += num_bytes
    if bucket:
        yield bucket


def shape_of(groups: Iterable[Sequence[Any]]) -> float:
    """Return a number that tells the variables of one model from those of another."""
    shapes = [[tuple(v.shape) for v in variables] for variables in groups]
    return float(zlib.crc32(repr(shapes).encode()))


def fingerprint(variables: Sequence[Any]) -> list[float]:
    """Return two numbers that are the same where the variables are."""
    total: Any = 0.0
    squares: Any = 0.0
    with torch.no_grad():
        for number, variable in enumerate(variables):
            value = raw(variable).detach().double()
            total = total + (1.0 + number % 7) * value.sum()
            squares = squares + value.square().sum()
    return [float(total), float(squares)]


def check_alike(fingerprints: list[list[float]]) -> None:
    """Raise RuntimeError if variables differ between processes."""
    # Kinds of hardware may sum in another order.
    scale = 1e-9 * (1.0 + max(row[1] for row in fingerprints))
    for row in fingerprints:
        for a, b in zip(row, fingerprints[0]):
            if not (abs(a - b) <= scale or a == b or (math.isnan(a) and math.isnan(b))):
                raise RuntimeError(_unlike_weights_message())


def other_model_message() -> str:
    return (
        "All processes of a `process_group` must train the same model, and each needs a batch in "
        "the first window. Received: variables of different shapes in another process, or none. "
        "Create and compile the same model in all processes, and give each a share of the data."
    )


def not_measured_message() -> str:
    return (
        "`GradientNoiseScale` must run in all processes of a `process_group`. "
        "Received: the callback in only some of them. Pass one to `fit` in each process."
    )


def mixed_message() -> str:
    return (
        "`weight` must be a number in every call of a window, or None in every one, in all "
        "processes. Received: both. Pass a number in all of them, or None in all of them."
    )


def _unlike_weights_message() -> str:
    return (
        "All processes of a `process_group` must start with the same weights and optimizer state, "
        "and keep them equal. Received: different ones in another process. Call "
        "`keras.utils.set_random_seed` with the same number before the model is created, or load "
        "the same file. A callback that changes weights or the learning rate must do so in all "
        "processes; `ReduceLROnPlateau`, for example, reads logs of the process's own samples."
    )


def _elsewhere_message(places: list[str]) -> str:
    return (
        "All processes of a `process_group` must train the same epochs. Received: "
        f"{', '.join(places)} (by process). Pass the same `epochs` in all of them. A callback that "
        "stops training, such as `EarlyStopping`, must stop all of them, but logs are those of a "
        "process's own samples: let it monitor a value that is equal in all processes, such as "
        "validation on the same data."
    )
