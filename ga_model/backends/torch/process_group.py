"""Several processes that train one model: agree on the next action, and sum gradients.

They communicate at the end of each window, at the start of each epoch and at the end of `fit`. Each
first sends all others a few numbers that say what it is about to do: a mismatch is an error in all,
and none waits for a process that is elsewhere in its training. Then gradients are summed, if any.

With u_r the unit in which process r counts its weights, and U the largest of them, sums and weights
of all processes are

    sum_r(u_r / U * sum_i(w_ri / u_r * g_ri)),   sum_r(u_r / U * sum_i(w_ri / u_r))

and their quotient is the mean gradient of all microbatches.
"""

from __future__ import annotations

import itertools
import math
import weakref
import zlib
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import keras
import torch

from ga_model.base import _numbers
from ga_model.base._internals import raw
from ga_model.base._types import Scalar
from ga_model.core.backend_types import Applied
from ga_model.core.noise import Squares
from ga_model.core.window import Sums

_BUCKET = 25 * 2**20  # bytes summed at a time, as in `DistributedDataParallel`
_WINDOW, _END, _EPOCH, _FINISH = range(4)
_NAMES = {
    _WINDOW: "the update of a full window",
    _END: "the last update of an epoch",
    _EPOCH: "the begin of an epoch",
    _FINISH: "the end of `fit`",
}


class _Message(NamedTuple):
    """The numbers that a process sends the others."""

    kind: float  # what it is about to do, a key of `_NAMES`
    epoch: float = 0.0  # the epoch that it begins
    print_of_sum: float = 0.0  # this and the next: the `_fingerprint` of its variables
    print_of_squares: float = 0.0
    number: float = 0.0  # this and the next three: its window's, as in `Sums`
    total: float = 0.0
    unit: float = 0.0
    is_sum: float = 0.0
    shape: float = 0.0  # the `_shape_of` its variables
    is_measured: float = 0.0  # whether the noise of gradients is


class Processes:
    """The processes of a group that train one model, or this process if `group` is None.

    Attributes:
        size: number of processes. One exchanges nothing.
    """

    def __init__(self, group: torch.distributed.ProcessGroup | None) -> None:
        # Weakly: a group that lives until its process exits may abort it.
        self._reference = None if group is None else weakref.ref(group)
        self.size = 1 if group is None else num_processes(group)
        self._has_compared = False
        self._is_in_fit = self._has_ended = False  # the latter: its epoch has made all updates

    @property
    def group(self) -> torch.distributed.ProcessGroup | None:
        """The group, until it is destroyed."""
        return None if self._reference is None else self._reference()

    def begin_epoch(self, epoch: int, variables: Sequence[keras.Variable]) -> None:
        """Raise RuntimeError in all processes unless all begin this epoch, with equal variables."""
        self._is_in_fit, self._has_ended = True, False
        self._agree(_EPOCH, epoch, variables)

    def finish(self, variables: Sequence[keras.Variable]) -> None:
        """Raise RuntimeError in all processes unless all are at the end of `fit`."""
        self._agree(_FINISH, 0, variables)

    def end_fit(self) -> None:
        """Note that no epoch is running."""
        self._is_in_fit = self._has_ended = False

    def _agree(self, kind: int, epoch: int, variables: Sequence[keras.Variable]) -> None:
        if self.size == 1:
            return
        message = _Message(kind, epoch, *_fingerprint(variables))
        messages = self._exchange(message, _device_of(variables))
        if len({message.epoch for message in messages}) > 1:
            raise RuntimeError(_elsewhere_message([f"epoch {int(m.epoch)}" for m in messages]))
        _check_equal(messages)

    def _exchange(self, message: _Message, device: torch.device | None) -> list[_Message]:
        """Send a message to all processes, and return those of all, in order of ranks."""
        here = torch.tensor(list(map(float, message)), dtype=torch.float64, device=device)
        gathered = [torch.empty_like(here) for _ in range(self.size)]
        torch.distributed.all_gather(gathered, here, group=self.group)
        messages = list(map(_Message._make, torch.stack(gathered).tolist()))
        kinds = {int(message.kind) for message in messages}
        if len(kinds) > 1 and kinds != {_WINDOW, _END}:
            raise RuntimeError(_elsewhere_message([_NAMES[int(m.kind)] for m in messages]))
        return messages

    def sum(
        self,
        applied: Sequence[Applied],
        sums: Sums | None,
        is_measured: bool = False,
        is_end: bool = False,
    ) -> tuple[Sums | None, bool]:
        """Sum the windows of all processes: see `Backend.exchange_sums`.

        Moments, amounts and the numbers of skipped and lost microbatches are not exchanged.

        Args:
            applied: optimizers and variables of the last window of this process that had a
                microbatch, or nothing.

        Raises:
            RuntimeError: the processes do not train the same model, or some measure the noise.
        """
        # A process whose epoch has ended may validate alone.
        if self.size == 1 or (is_end and sums is None and self._has_ended):
            return sums, is_end
        variables = [v for group in applied for v in group.variables]
        device = _device_of(variables)
        own = sums or Sums.of_nothing(len(variables))
        number, is_sum = int(own.num_counted), own.total is None
        total, unit = (float(own.total), float(own.unit)) if number and not is_sum else (0.0, 0.0)
        prints = (0.0, 0.0) if self._has_compared else _fingerprint(variables)
        kind, shape = _END if is_end else _WINDOW, _shape_of([a.variables for a in applied])
        messages = self._exchange(
            _Message(kind, 0.0, *prints, number, total, unit, is_sum, shape, is_measured), device
        )
        is_end = all(message.kind == _END for message in messages)
        self._has_ended = is_end and self._is_in_fit
        counting = [message for message in messages if message.number]
        if not counting:
            return sums, is_end
        self._check(messages, counting)
        largest = max(abs(message.unit) for message in counting)
        is_sum = bool(counting[0].is_sum)
        shrink = unit / largest if unit and largest else 1.0
        gradients = [g if g is None or shrink == 1.0 else g.mul_(shrink) for g in own.gradients]
        total = math.fsum(m.total * (m.unit / largest) for m in counting if largest)
        sums = own._replace(
            gradients=self._summed(variables, gradients),
            total=None if is_sum else total,
            unit=1.0 if is_sum else largest,
            num_counted=int(sum(message.number for message in counting)),
        )
        if is_measured:
            squares = self._summed_squares(sums.squares, len(applied), shrink, device)
            sums = sums._replace(squares=squares)
        return sums, is_end

    def _check(self, messages: list[_Message], counting: list[_Message]) -> None:
        """Raise RuntimeError in all processes unless their windows can be summed."""
        if len({message.shape for message in messages}) > 1:
            raise RuntimeError(
                "All processes of a `process_group` must train the same model, and each needs a "
                "batch in the first window. Received: variables of different shapes in another "
                "process, or none. Create and compile the same model in all processes, and give "
                "each a share of the data."
            )
        if len({message.is_measured for message in messages}) > 1:
            raise RuntimeError(
                "`GradientNoiseScale` must run in all processes of a `process_group`. "
                "Received: the callback in only some of them. Pass one to `fit` in each process."
            )
        _check_equal(messages)
        self._has_compared = True
        if len({message.is_sum for message in counting}) > 1:
            raise RuntimeError(
                "`weight` must be a number in every call of a window, or None in every one, in all "
                "processes. Received: both. Pass a number in all of them, or None in all of them."
            )

    def _summed_squares(
        self, squares: tuple[Squares, ...], number: int, shrink: float, device: torch.device | None
    ) -> tuple[Squares, ...]:
        """Return the sums over processes, for each of `number` optimizers."""
        squares = squares or (Squares(0.0, 0.0),) * number
        rows = [[float(s.total) * shrink, float(s.number)] for s in squares]
        sums = torch.tensor(rows, dtype=torch.float64, device=device)
        torch.distributed.all_reduce(sums, group=self.group)
        return tuple(Squares(*row) for row in sums.tolist())

    def _summed(
        self, variables: list[keras.Variable], gradients: list[torch.Tensor | None]
    ) -> list[torch.Tensor | None]:
        """Return the sums over processes, None where no process has a gradient."""
        summed: list[torch.Tensor | None] = []
        for bucket in _buckets(variables):
            dtype, device = _sum_dtype(bucket[0]), raw(bucket[0]).device
            pieces = gradients[len(summed) : len(summed) + len(bucket)]
            flags = [float(piece is not None) for piece in pieces]
            values = [
                (torch.zeros_like(raw(v)) if piece is None else piece).to(dtype).reshape(-1)
                for v, piece in zip(bucket, pieces)
            ]
            flat = torch.cat([torch.tensor(flags, dtype=dtype, device=device), *values])
            torch.distributed.all_reduce(flat, group=self.group)
            numbers = flat[: len(bucket)].tolist()
            sums = flat[len(bucket) :].split([raw(v).numel() for v in bucket])
            summed += [
                piece.view(raw(v).shape) if number else None
                for v, number, piece in zip(bucket, numbers, sums)
            ]
        return summed


def num_processes(group: torch.distributed.ProcessGroup | None = None) -> int:
    """Return the size of a group, by default of the default group; 1 without any."""
    distributed = torch.distributed
    if not (distributed.is_available() and distributed.is_initialized()):
        return 1
    return int(distributed.get_world_size(group))


def _device_of(variables: Sequence[keras.Variable]) -> torch.device | None:
    return raw(variables[0]).device if variables else None


def _sum_dtype(variable: keras.Variable) -> torch.dtype:
    """Return the dtype in which gradients of a variable are summed."""
    dtype: torch.dtype = getattr(torch, _numbers.sum_dtype(variable.dtype))
    return dtype


def _buckets(variables: Sequence[keras.Variable]) -> Iterator[list[keras.Variable]]:
    """Yield lists of variables of one dtype whose gradients have about `_BUCKET` bytes."""
    sizes = (raw(variable).numel() * _sum_dtype(variable).itemsize for variable in variables)
    pairs = zip(variables, itertools.accumulate(sizes))
    for _, bucket in itertools.groupby(pairs, lambda p: (_sum_dtype(p[0]), p[1] // _BUCKET)):
        yield [variable for variable, _ in bucket]


def _shape_of(groups: Iterable[Sequence[keras.Variable]]) -> float:
    """Return a checksum of the shapes of variables, to detect different models."""
    shapes = [[tuple(v.shape) for v in variables] for variables in groups]
    return float(zlib.crc32(repr(shapes).encode()))


def _fingerprint(variables: Sequence[keras.Variable]) -> tuple[float, float]:
    """Return two sums over all values, which are equal if the variables are."""
    total: Scalar = 0.0
    squares: Scalar = 0.0
    with torch.no_grad():
        for number, variable in enumerate(variables):
            value = raw(variable).detach().double()
            total = total + (1.0 + number % 7) * value.sum()
            squares = squares + value.square().sum()
    return float(total), float(squares)


def _check_equal(messages: list[_Message]) -> None:
    """Raise RuntimeError if variables differ between processes."""
    prints = [(message.print_of_sum, message.print_of_squares) for message in messages]
    # Different hardware may sum in a different order.
    scale = 1e-9 * (1.0 + max(squares for _, squares in prints))
    for row in prints:
        for a, b in zip(row, prints[0]):
            if not (abs(a - b) <= scale or a == b or (math.isnan(a) and math.isnan(b))):
                raise RuntimeError(
                    "All processes of a `process_group` must start with the same weights and "
                    "optimizer state, and keep them equal. Received: different ones in another "
                    "process. Call `keras.utils.set_random_seed` with the same number before the "
                    "model is created, or load the same file. A callback that changes weights or "
                    "the learning rate must do so in all processes; `ReduceLROnPlateau`, for "
                    "example, reads logs of the process's own samples."
                )


def _elsewhere_message(places: list[str]) -> str:
    return (
        "All processes of a `process_group` must train the same epochs. Received: "
        f"{', '.join(places)} (by process). Pass the same `epochs` in all of them. A callback that "
        "stops training, such as `EarlyStopping`, must stop all of them, but logs are those of a "
        "process's own samples: let it monitor a value that is equal in all processes, such as "
        "validation on the same data."
    )
