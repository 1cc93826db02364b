"""Several processes that train one model: their sums of gradients.

They are summed after the processes have agreed (`agreement`), and only if there are any.

With u_r the unit in which process r counts its weights, and U the largest of them, sums and weights
of all processes are

    sum_r(u_r / U * sum_i(w_ri / u_r * g_ri)),   sum_r(u_r / U * sum_i(w_ri / u_r))

and what is divided in the end is that of one process that had all microbatches.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from ga_model.backends.torch import agreement
from ga_model.base._internals import raw
from ga_model.core.noise import Squares
from ga_model.core.recorder import Applied
from ga_model.core.window import Sums


class Processes(agreement.Group):
    """The processes of a group, for one model."""

    def __init__(self, group: Any) -> None:
        super().__init__(group)
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
        prints = [0.0, 0.0] if self._has_compared else agreement.fingerprint(variables)
        told = self.tell(
            agreement.END if is_end else agreement.WINDOW,
            [
                number,
                total,
                unit,
                is_sum,
                agreement.shape_of([a.variables for a in applied]),
                *prints,
                is_measured,
            ],
            device,
        )
        is_end = all(row[0] == agreement.END for row in told)
        self._has_ended = is_end and self._is_in_fit
        counting = [row for row in told if row[1]]
        if not counting:
            return sums, is_end
        self._check(told, counting)
        largest = max(abs(row[3]) for row in counting)
        is_sum = bool(counting[0][4])
        if sums is None:
            sums = Sums([None] * len(variables), 0.0, 0.0, 0, 0, False, 0, [], [])
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
            raise RuntimeError(agreement.other_model_message())
        if len({row[8] for row in told}) > 1:
            raise RuntimeError(agreement.not_measured_message())
        if not self._has_compared:
            agreement.check_alike([row[6:8] for row in told])
        self._has_compared = True
        if len({row[4] for row in counting}) > 1:
            raise RuntimeError(agreement.mixed_message())

    def begin_epoch(self, epoch: int, variables: Sequence[Any]) -> None:
        self._is_in_fit, self._has_ended = True, False
        super().begin_epoch(epoch, variables)

    def end_fit(self) -> None:
        """Note that there are no epochs now."""
        self._is_in_fit = self._has_ended = False

    def _summed_squares(
        self, squares: tuple[Squares, ...], number: int, shrink: float, device: Any
    ) -> tuple[Squares, ...]:
        """Return the sums over processes, of each of so many optimizers."""
        squares = squares or (Squares(0.0, 0.0),) * number
        rows = [[float(s.total) * shrink, float(s.number)] for s in squares]
        sums = torch.tensor(rows, dtype=torch.float64, device=device)
        torch.distributed.all_reduce(sums, group=self.group)
        return tuple(Squares(*row) for row in sums.tolist())

    def _summed(self, variables: list[Any], gradients: list[Any]) -> list[Any]:
        """Return the sums over processes. A gradient that one of them has is a gradient."""
        found: list[Any] = []
        for bucket in agreement.buckets(variables):
            dtype, device = agreement.sum_dtype(bucket[0]), raw(bucket[0]).device
            pieces = gradients[len(found) : len(found) + len(bucket)]
            flags = [float(piece is not None) for piece in pieces]
            values = [
                torch.zeros(raw(v).numel(), dtype=dtype, device=device)
                if piece is None
                else piece.to(dtype).reshape(-1)
                for v, piece in zip(bucket, pieces)
            ]
            flat = torch.cat([torch.tensor(flags, dtype=dtype, device=device), *values])
            torch.distributed.all_reduce(flat, group=self.group)
            numbers = flat[: len(bucket)].tolist()
            sums = flat[len(bucket) :].split([raw(v).numel() for v in bucket])
            found += [
                piece.view(raw(v).shape) if number else None
                for v, number, piece in zip(bucket, numbers, sums)
            ]
        return found
