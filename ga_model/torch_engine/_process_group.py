"""Several processes that train one model: their agreement, and their sums of gradients.

Processes talk at the end of a window, and where an epoch begins and where `fit` ends, and always in
one way: each first tells all others in a few numbers what it is about to do. So what does not go
together is an error in all of them, and nobody waits for a process that is elsewhere in its
training. Only then gradients are summed, and only if there are any.

With u_r the unit in which process r counts its weights, and U the largest of them, sums and weights
of all processes are

    sum_r(u_r / U * sum_i(w_ri / u_r * g_ri)),   sum_r(u_r / U * sum_i(w_ri / u_r))

and what is divided in the end is that of one process that had all microbatches.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch

from ga_model.base._internals import raw
from ga_model.torch_engine._part import Part, sum_dtype
from ga_model.torch_engine._torch_noise import Squares

_BUCKET = 25 * 2**20  # bytes that are summed at a time, as `DistributedDataParallel` does
_WINDOW, _END, _EPOCH, _FINISH = range(4)
_NAMES = {
    _WINDOW: "the update of a full window",
    _END: "the last update of an epoch",
    _EPOCH: "the begin of an epoch",
    _FINISH: "the end of `fit`",
}


class Sums(NamedTuple):
    """The window of all processes.

    Attributes:
        parts: the sums, one for each optimizer.
        total: the sum of the weights.
        unit: what they are counted in.
        has_counted: whether a microbatch of any process has counted.
        is_end: whether no process has batches left.
    """

    parts: list[Part]
    total: float
    unit: float
    has_counted: bool
    is_end: bool


class Processes:
    """The processes of a group, for one model.

    Args:
        group: the `torch.distributed.ProcessGroup`.

    Attributes:
        size: how many there are.
    """

    def __init__(self, group: Any) -> None:
        self._group = group
        self.size = num_processes(group)
        self._layout: list[tuple[Any, list[Any], bool]] = []  # what `Part` takes without gradients
        self._has_compared = False

    def sum(
        self,
        parts: list[Part],
        total: float,
        unit: float,
        has_counted: bool,
        is_end: bool,
        is_measured: bool = False,
    ) -> Sums:
        """Sum the window of this process and those of the others. All call it equally often.

        Args:
            parts, total, unit, has_counted: as the process's own window has them. A total without
                a unit is that of a sum that is not to be divided.
            is_end: whether it has no batches left.
            is_measured: whether the noise of the gradients is.

        Raises:
            RuntimeError: the processes do not train the same model, or some measure the noise.
        """
        if parts:
            self._layout = [(p.optimizer, p.variables, p.in_pairs) for p in parts]
        variables = [v for _, variables, _ in self._layout for v in variables]
        prints = [0.0, 0.0] if self._has_compared else _fingerprint(variables)
        kind = _END if is_end else _WINDOW
        device = raw(variables[0]).device if variables else None
        told = self._tell(
            kind, [has_counted, total, unit, _shape_of(self._layout), *prints, is_measured], device
        )
        if not any(row[1] for row in told):
            return Sums([], 0.0, 0.0, False, all(row[0] == _END for row in told))
        if len({row[4] for row in told}) > 1:
            raise RuntimeError(_other_model_message())
        if len({row[7] for row in told}) > 1:
            raise RuntimeError(_not_measured_message())
        if not self._has_compared:
            _check_alike([row[5:7] for row in told])
        self._has_compared = True
        largest = max(abs(row[3]) for row in told)
        if largest:
            if any(row[2] and not row[3] for row in told):
                raise RuntimeError(_mixed_message())
            total = math.fsum(row[2] * (row[3] / largest) for row in told)
        else:
            total = max(row[2] for row in told)
        parts = parts or [Part(o, v, [None] * len(v), pairs) for o, v, pairs in self._layout]
        for part in parts:
            part.scale(unit / largest if unit and largest else 1.0)
            self._sum_over_processes(part)
            if is_measured:
                self._sum_squares(part)
        return Sums(parts, total, largest, True, all(row[0] == _END for row in told))

    def begin_epoch(self, epoch: int, variables: Sequence[Any]) -> None:
        """Raise RuntimeError in all processes unless all begin this epoch, with equal variables."""
        self._agree(_EPOCH, epoch, variables)

    def finish(self, variables: Sequence[Any]) -> None:
        """Raise RuntimeError in all processes unless all are at the end of `fit`."""
        self._agree(_FINISH, 0, variables)

    def _agree(self, kind: int, epoch: int, variables: Sequence[Any]) -> None:
        device = raw(variables[0]).device if variables else None
        told = self._tell(kind, [epoch, *_fingerprint(variables)], device)
        if len({row[1] for row in told}) > 1:
            raise RuntimeError(_elsewhere_message([f"epoch {int(row[1])}" for row in told]))
        _check_alike([row[2:4] for row in told])

    def _tell(self, kind: int, numbers: Iterable[float], device: Any) -> list[list[float]]:
        """Tell the other processes what this one is about to do, and return what each tells."""
        row = [float(kind), *map(float, numbers)]
        here = torch.tensor(row + [0.0] * (8 - len(row)), dtype=torch.float64, device=device)
        told = [torch.empty_like(here) for _ in range(self.size)]
        torch.distributed.all_gather(told, here, group=self._group)
        rows: list[list[float]] = torch.stack(told).tolist()
        kinds = {int(row[0]) for row in rows}
        if len(kinds) > 1 and kinds != {_WINDOW, _END}:
            raise RuntimeError(_elsewhere_message([_NAMES[int(row[0])] for row in rows]))
        return rows

    def _sum_squares(self, part: Part) -> None:
        squares = part.squares or (0.0, 0.0)
        device = raw(part.variables[0]).device if part.variables else None
        sums = torch.tensor(squares, dtype=torch.float64, device=device)
        torch.distributed.all_reduce(sums, group=self._group)
        part.squares = Squares(*sums.tolist())

    def _sum_over_processes(self, part: Part) -> None:
        for variables in _buckets(part.variables):
            first = raw(variables[0])
            pieces = [part.gradient(v) for v in variables]
            # A gradient that one process has and another has not is a gradient.
            flags = torch.tensor(
                [float(piece is not None) for piece in pieces], device=first.device
            )
            dtype = sum_dtype(raw(variables[0]))
            values = [
                torch.zeros(raw(v).numel(), dtype=dtype, device=first.device)
                if piece is None
                else piece.to(dtype).reshape(-1)
                for v, piece in zip(variables, pieces)
            ]
            flat = torch.cat([flags.to(dtype), *values])
            torch.distributed.all_reduce(flat, group=self._group)
            numbers = flat[: len(variables)].tolist()
            sums = flat[len(variables) :].split([raw(v).numel() for v in variables])
            for variable, number, piece in zip(variables, numbers, sums):
                if number:
                    part.replace(variable, piece.view(raw(variable).shape))


def num_processes(group: Any = None) -> int:
    """Return the processes of a group, of the default one where none is given; 1 without any."""
    distributed = torch.distributed
    if not (distributed.is_available() and distributed.is_initialized()):
        return 1
    return int(distributed.get_world_size(group))


def _buckets(variables: Sequence[Any]) -> Iterator[list[Any]]:
    """Return variables in lists of one dtype whose gradients have about so many bytes."""
    bucket: list[Any] = []
    size = 0
    for variable in variables:
        num_bytes = raw(variable).numel() * sum_dtype(raw(variable)).itemsize
        is_other = bool(bucket) and sum_dtype(raw(variable)) != sum_dtype(raw(bucket[0]))
        if bucket and (is_other or size + num_bytes > _BUCKET):
            yield bucket
            bucket, size = [], 0
        bucket.append(variable)
        size += num_bytes
    if bucket:
        yield bucket


def _shape_of(layout: list[tuple[Any, list[Any], bool]]) -> float:
    """Return a number that tells the variables of one model from those of another."""
    shapes = [[tuple(v.shape) for v in variables] for _, variables, _ in layout]
    return float(zlib.crc32(repr(shapes).encode()))


def _fingerprint(variables: Sequence[Any]) -> list[float]:
    """Return two numbers that are the same where the variables are."""
    total: Any = 0.0
    squares: Any = 0.0
    with torch.no_grad():
        for number, variable in enumerate(variables):
            value = raw(variable).detach().double()
            total = total + (1.0 + number % 7) * value.sum()
            squares = squares + value.square().sum()
    return [float(total), float(squares)]


def _check_alike(fingerprints: list[list[float]]) -> None:
    """Raise RuntimeError if variables differ between processes."""
    # Kinds of hardware may sum in another order.
    scale = 1e-9 * (1.0 + max(row[1] for row in fingerprints))
    for row in fingerprints:
        for a, b in zip(row, fingerprints[0]):
            if not (abs(a - b) <= scale or a == b or (math.isnan(a) and math.isnan(b))):
                raise RuntimeError(_unlike_weights_message())


def _other_model_message() -> str:
    return (
        "All processes of a `process_group` must train the same model, and each needs a batch in "
        "the first window. Received: variables of different shapes in another process, or none. "
        "Create and compile the same model in all processes, and give each a share of the data."
    )


def _not_measured_message() -> str:
    return (
        "`GradientNoiseScale` must run in all processes of a `process_group`. "
        "Received: the callback in only some of them. Pass one to `fit` in each process."
    )


def _mixed_message() -> str:
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
