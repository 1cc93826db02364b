"""Several processes that train one model: their sums of gradients.

They are summed after the processes have agreed, and only if there are any.

With u_r the unit in which process r counts its weights, and U the largest of them, sums and weights
of all processes are

    sum_r(u_r / U * sum_i(w_ri / u_r * g_ri)),   sum_r(u_r / U * sum_i(w_ri / u_r))

and what is divided in the end is that of one process that had all microbatches.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch

from ga_model.backends.torch import agreement
from ga_model.base._internals import raw
from ga_model.torch_engine._part import Part, sum_dtype
from ga_model.torch_engine._torch_noise import Squares


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


class Processes(agreement.Group):
    """The processes of a group, for one model."""

    def __init__(self, group: Any) -> None:
        super().__init__(group)
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
        prints = [0.0, 0.0] if self._has_compared else agreement.fingerprint(variables)
        kind = agreement.END if is_end else agreement.WINDOW
        device = raw(variables[0]).device if variables else None
        told = self.tell(
            kind,
            [
                has_counted,
                total,
                unit,
                agreement.shape_of([variables for _, variables, _ in self._layout]),
                *prints,
                is_measured,
            ],
            device,
        )
        if not any(row[1] for row in told):
            return Sums([], 0.0, 0.0, False, all(row[0] == agreement.END for row in told))
        if len({row[4] for row in told}) > 1:
            raise RuntimeError(agreement.other_model_message())
        if len({row[7] for row in told}) > 1:
            raise RuntimeError(agreement.not_measured_message())
        if not self._has_compared:
            agreement.check_alike([row[5:7] for row in told])
        self._has_compared = True
        largest = max(abs(row[3]) for row in told)
        if largest:
            if any(row[2] and not row[3] for row in told):
                raise RuntimeError(agreement.mixed_message())
            total = math.fsum(row[2] * (row[3] / largest) for row in told)
        else:
            total = max(row[2] for row in told)
        parts = parts or [Part(o, v, [None] * len(v), pairs) for o, v, pairs in self._layout]
        for part in parts:
            part.scale(unit / largest if unit and largest else 1.0)
            self._sum_over_processes(part)
            if is_measured:
                self._sum_squares(part)
        return Sums(parts, total, largest, True, all(row[0] == agreement.END for row in told))

    def _sum_squares(self, part: Part) -> None:
        squares = part.squares or (0.0, 0.0)
        device = raw(part.variables[0]).device if part.variables else None
        sums = torch.tensor(squares, dtype=torch.float64, device=device)
        torch.distributed.all_reduce(sums, group=self.group)
        part.squares = Squares(*sums.tolist())

    def _sum_over_processes(self, part: Part) -> None:
        for variables in agreement.buckets(part.variables):
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
            torch.distributed.all_reduce(flat, group=self.group)
            numbers = flat[: len(variables)].tolist()
            sums = flat[len(variables) :].split([raw(v).numel() for v in variables])
            for variable, number, piece in zip(variables, numbers, sums):
                if number:
                    part.replace(variable, piece.view(raw(variable).shape))
