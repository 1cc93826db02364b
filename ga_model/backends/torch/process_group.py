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
from typing import Any

import torch

from ga_model.base import _numbers
from ga_model.base._internals import raw
from ga_model.core.noise import Squares
from ga_model.core.recorder import Applied
from ga_model.core.window import Sums

_BUCKET = 25 * 2**20  # bytes that are summed at a time, as `DistributedDataParallel` does
_WINDOW, _END, _EPOCH, _FINISH = range(4)
_NAMES = {
    _WINDOW: "the update of a full window",
    _END: "the last update of an epoch",
    _EPOCH: "the begin of an epoch",
    _FINISH: "the end of `fit`",
}
_LENGTH = 9  # numbers of a message


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
        self._has_compared = False
        self._is_in_fit = self._has_ended = False  # `fit`, and the updates of its present epoch

    def sum(
        self,
        applied: Sequence[Applied],
        sums: Sums | None,
        is_measured: bool = False,
        is_end: bool = False,
    ) -> tuple[Sums | None, bool]:
        """Sum the window of this process and those of the others. All call it equally often.

        Args:
            applied: the optimizers and their variables, as of the last window of this process that
                had a microbatch, or nothing.
            sums: of this process's own window, which are not to be used again, or None.
            is_measured: whether the noise of the gradients is.
            is_end: whether this process has no batches left.

        Returns:
            The sums, of which no process has more than its own moments, amounts and numbers of what
            was skipped or lost; and whether no process has batches left.

        Raises:
            RuntimeError: the processes do not train the same model, or some measure the noise.
        """
        if is_end and sums is None and self._has_ended:  # one process may validate alone
            return None, True
        variables = [v for group in applied for v in group.variables]
        device = raw(variables[0]).device if variables else None
        number = 0 if sums is None else int(sums.num_counted)
        is_sum = sums is not None and sums.total is None
        total = unit = 0.0
        if sums is not None and number and not is_sum:
            total, unit = float(sums.total), float(sums.unit)
        prints = [0.0, 0.0] if self._has_compared else _fingerprint(variables)
        told = self._tell(
            _END if is_end else _WINDOW,
            [number, total, unit, is_sum, _shape_of(applied), *prints, is_measured],
            device,
        )
        is_end = all(row[0] == _END for row in told)
        self._has_ended = is_end and self._is_in_fit
        counting = [row for row in told if row[1]]
        if not counting:
            return sums, is_end
        self._check(told, counting)
        largest = max(abs(row[3]) for row in counting)
        is_sum = bool(counting[0][4])
        if sums is None:
            sums = Sums([None] * len(variables), 0.0, 0.0, 0, 0, False, [], [])
        shrink = unit / largest if unit and largest else 1.0
        gradients = [g if g is None or shrink == 1.0 else g.mul_(shrink) for g in sums.gradients]
        sums = sums._replace(
            gradients=self._summed(variables, gradients),
            total=math.fsum(row[2] * (row[3] / largest) for row in counting if largest),
            unit=largest,
            num_counted=int(sum(row[1] for row in counting)),
        )
        if is_sum:
            sums = sums._replace(total=None, unit=1.0)
        if is_measured:
            squares = self._summed_squares(sums.squares, len(applied), shrink, device)
            sums = sums._replace(squares=squares)
        return sums, is_end

    def _check(self, told: list[list[float]], counting: list[list[float]]) -> None:
        """Raise RuntimeError in all processes if these windows do not go together."""
        if len({row[5] for row in told}) > 1:
            raise RuntimeError(_other_model_message())
        if len({row[8] for row in told}) > 1:
            raise RuntimeError(_not_measured_message())
        if not self._has_compared:
            _check_alike([row[6:8] for row in told])
        self._has_compared = True
        if len({row[4] for row in counting}) > 1:
            raise RuntimeError(_mixed_message())

    def begin_epoch(self, epoch: int, variables: Sequence[Any]) -> None:
        """Raise RuntimeError in all processes unless all begin this epoch, with equal variables."""
        self._is_in_fit, self._has_ended = True, False
        self._agree(_EPOCH, epoch, variables)

    def finish(self, variables: Sequence[Any]) -> None:
        """Raise RuntimeError in all processes unless all are at the end of `fit`."""
        self._agree(_FINISH, 0, variables)

    def end_fit(self) -> None:
        """Note that there are no epochs now."""
        self._is_in_fit = self._has_ended = False

    def _agree(self, kind: int, epoch: int, variables: Sequence[Any]) -> None:
        device = raw(variables[0]).device if variables else None
        told = self._tell(kind, [epoch, *_fingerprint(variables)], device)
        if len({row[1] for row in told}) > 1:
            raise RuntimeError(_elsewhere_message([f"epoch {int(row[1])}" for row in told]))
        _check_alike([row[2:4] for row in told])

    def _tell(self, kind: int, numbers: Iterable[float], device: Any) -> list[list[float]]:
        """Tell the other processes what this one is about to do, and return what each tells."""
        row = [float(kind), *map(float, numbers)]
        row += [0.0] * (_LENGTH - len(row))
        here = torch.tensor(row, dtype=torch.float64, device=device)
        told = [torch.empty_like(here) for _ in range(self.size)]
        torch.distributed.all_gather(told, here, group=self._group)
        rows: list[list[float]] = torch.stack(told).tolist()
        kinds = {int(row[0]) for row in rows}
        if len(kinds) > 1 and kinds != {_WINDOW, _END}:
            raise RuntimeError(_elsewhere_message([_NAMES[int(row[0])] for row in rows]))
        return rows

    def _summed_squares(
        self, squares: tuple[Squares, ...], number: int, shrink: float, device: Any
    ) -> tuple[Squares, ...]:
        """Return the sums over processes, of each of so many optimizers."""
        squares = squares or (Squares(0.0, 0.0),) * number
        rows = [[float(s.total) * shrink, float(s.number)] for s in squares]
        sums = torch.tensor(rows, dtype=torch.float64, device=device)
        torch.distributed.all_reduce(sums, group=self._group)
        return tuple(Squares(*row) for row in sums.tolist())

    def _summed(self, variables: list[Any], gradients: list[Any]) -> list[Any]:
        """Return the sums over processes. A gradient that one of them has is a gradient."""
        found: list[Any] = []
        for bucket in _buckets(variables):
            dtype, device = _sum_dtype(bucket[0]), raw(bucket[0]).device
            pieces = gradients[len(found) : len(found) + len(bucket)]
            flags = [float(piece is not None) for piece in pieces]
            values = [
                torch.zeros(raw(v).numel(), dtype=dtype, device=device)
                if piece is None
                else piece.to(dtype).reshape(-1)
                for v, piece in zip(bucket, pieces)
            ]
            flat = torch.cat([torch.tensor(flags, dtype=dtype, device=device), *values])
            torch.distributed.all_reduce(flat, group=self._group)
            numbers = flat[: len(bucket)].tolist()
            sums = flat[len(bucket) :].split([raw(v).numel() for v in bucket])
            found += [
                piece.view(raw(v).shape) if number else None
                for v, number, piece in zip(bucket, numbers, sums)
            ]
        return found


def num_processes(group: Any = None) -> int:
    """Return the processes of a group, of the default one where none is given; 1 without any."""
    distributed = torch.distributed
    if not (distributed.is_available() and distributed.is_initialized()):
        return 1
    return int(distributed.get_world_size(group))


def _sum_dtype(variable: Any) -> torch.dtype:
    """Return the dtype in which gradients of a variable are summed."""
    dtype: torch.dtype = getattr(torch, _numbers.sum_dtype(variable.dtype))
    return dtype


def _buckets(variables: Sequence[Any]) -> Iterator[list[Any]]:
    """Return variables in lists of one dtype whose gradients have about so many bytes."""
    bucket: list[Any] = []
    size = 0
    for variable in variables:
        dtype = _sum_dtype(variable)
        num_bytes = raw(variable).numel() * dtype.itemsize
        is_other = bool(bucket) and dtype != _sum_dtype(bucket[0])
        if bucket and (is_other or size + num_bytes > _BUCKET):
            yield bucket
            bucket, size = [], 0
        bucket.append(variable)
        size += num_bytes
    if bucket:
        yield bucket


def _shape_of(applied: Sequence[Applied]) -> float:
    """Return a number that tells the variables of one model from those of another."""
    shapes = [[tuple(v.shape) for v in group.variables] for group in applied]
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
