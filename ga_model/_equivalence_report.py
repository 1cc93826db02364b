"""What `check_equivalence` found."""

from __future__ import annotations

import math
import textwrap
from typing import Any, NamedTuple

from ga_model._randomness import Randomness
from ga_model._table import aligned

# The relative difference that counts as equal where rounding does not make a larger one.
# Calibrated by `python tests/calibrate_check.py`.
TOLERANCE = {"float64": 1e-9, "float32": 1e-4}
_TOLERANCE_OF_OTHERS = 1e-2  # float16, bfloat16

# How many times the difference that rounding the start weights once makes.
_MARGIN = 10.0

# Of a variable with a larger tolerance nothing can be said: it moves by rounding alone.
_MOST = 0.1


class VariableDifference(NamedTuple):
    """How far one variable is from its value after training with the whole batch.

    Attributes:
        path: of the variable; of an optimizer's, behind the optimizer's name.
        dtype: its dtype.
        size: number of its entries.
        difference: ||w - w_whole|| / ||w_whole - w_start||, with accumulation.
        rounding: the same of a training on whole batches whose start weights are rounded once more.
    """

    path: str
    dtype: str
    size: int
    difference: float
    rounding: float

    @property
    def tolerance(self) -> float:
        """The largest difference that counts as equal, or infinity where nothing can be said."""
        if "int" in self.dtype or self.dtype == "bool":
            return 0.0
        tolerance = max(TOLERANCE.get(self.dtype, _TOLERANCE_OF_OTHERS), _MARGIN * self.rounding)
        return tolerance if tolerance <= _MOST else math.inf

    @property
    def is_equal(self) -> bool:
        """Whether the difference is within the tolerance. NaN is not."""
        return self.difference <= self.tolerance

    @property
    def is_told(self) -> bool:
        """Whether the comparison says anything about the variable."""
        return math.isfinite(self.tolerance)


class EquivalenceReport(NamedTuple):
    """Whether accumulation made the updates of plain Keras on the whole batch.

    `str(report)` is a text with a table of the variables that differ most, `report.to_dict()` all
    of it in plain Python values, and `report.assert_equivalent()` a test.

    Attributes:
        batch_size, accumulation_steps, microbatch_size: what was compared.
        updates: number of updates that were made.
        rows: rows that they used.
        variables: a `VariableDifference` for each weight and each variable of an optimizer.
        is_finite: whether the whole batch gave finite weights.
        random_layers: what was done about layers that draw random numbers.
        reasons: what was found out about why the trainings differ, in sentences.
    """

    batch_size: int
    accumulation_steps: int
    microbatch_size: int | None
    updates: int
    rows: int
    variables: list[VariableDifference]
    is_finite: bool
    random_layers: Randomness
    reasons: list[str]

    @property
    def verdict(self) -> str:
        """One of "equivalent", "different" and "undecided".

        Undecided where rounding alone, or random numbers that can not be shared, make trainings
        differ: the check can then not tell.
        """
        told = [v for v in self.variables if v.is_told]
        is_mostly_told = 2 * sum(v.size for v in told) >= sum(v.size for v in self.variables)
        if not self.is_finite or not is_mostly_told:
            return "undecided"
        if all(v.is_equal for v in told):
            return "equivalent"
        return "undecided" if self.random_layers.left else "different"

    @property
    def equivalent(self) -> bool:
        """Whether the verdict is "equivalent"."""
        return self.verdict == "equivalent"

    @property
    def worst(self) -> list[VariableDifference]:
        """The variables, those that exceed their tolerance most first."""

        def excess(variable: VariableDifference) -> float:
            if not variable.is_told or not variable.difference:
                return 0.0
            ratio = variable.difference / (variable.tolerance or math.ulp(0.0))
            return math.inf if math.isnan(ratio) else ratio

        return sorted(self.variables, key=excess, reverse=True)

    def assert_equivalent(self) -> None:
        """Raise AssertionError with the report as its message unless the verdict is equivalent."""
        if not self.equivalent:
            raise AssertionError(str(self))

    def to_dict(self) -> dict[str, Any]:
        """Return the report in plain Python values, the worst variables first."""
        return {
            "verdict": self.verdict,
            "equivalent": self.equivalent,
            **self._asdict(),
            "random_layers": self.random_layers._asdict(),
            "variables": [
                {**v._asdict(), "tolerance": v.tolerance, "is_equal": v.is_equal}
                for v in self.worst
            ],
        }

    def __str__(self) -> str:
        return "\n\n".join([_wrapped(self._heading()), self._table(), *self._remarks()])

    def _heading(self) -> str:
        settings = f"batch_size={self.batch_size}"
        if self.accumulation_steps > 1:
            settings += f", accumulation_steps={self.accumulation_steps}"
        if self.microbatch_size is not None:
            settings += f", microbatch_size={self.microbatch_size}"
        number = "1 update" if self.updates == 1 else f"{self.updates} updates"
        found = {
            "equivalent": "they are those of plain Keras on the whole batch",
            "different": "they are not those of plain Keras on the whole batch",
            "undecided": "whether they are those of plain Keras on the whole batch is not shown",
        }
        return f"{self.verdict.capitalize()}: {number} with {settings}; {found[self.verdict]}."

    def _table(self, most: int = 8) -> str:
        rows = [["variable", "difference", "by rounding", "equal up to", ""]]
        shown = [v for v in self.worst if v.difference][:most] or self.worst[:1]
        for variable in shown:
            tolerance = f"{variable.tolerance:.1e}" if variable.is_told else "-"
            numbers = [f"{variable.difference:.1e}", f"{variable.rounding:.1e}", tolerance]
            rows.append([variable.path, *numbers, "" if variable.is_equal else "differs"])
        table = aligned(rows)
        if others := len(self.variables) - len(shown):
            table += "\n... and 1 variable more" if others == 1 else f"\n... and {others} more"
        return table

    def _remarks(self) -> list[str]:
        shared, off = self.random_layers[:2]
        remarks = [f"Why: {reason}" for reason in self.reasons]
        if not self.is_finite:
            remarks.append(
                "The whole batch gives weights that are not finite. "
                "Check the data, or take a smaller learning rate."
            )
        if shared:
            remarks.append(
                f"All trainings dropped the same units of every row in: {_list(shared)}."
            )
        if off:
            remarks.append(f"Switched off, as they draw other numbers each time: {_list(off)}.")
        untold = [v for v in self.variables if not v.is_told]
        if untold and self.is_finite:
            remarks.append(
                f"Not told: {len(untold)} of {len(self.variables)} variables, because rounding "
                "alone changes what they become. Their gradient may be zero in exact arithmetic, "
                "or they are computed in half precision."
            )
        return [_wrapped(remark) for remark in remarks]


def _list(names: list[str]) -> str:
    return ", ".join(dict.fromkeys(names))


def _wrapped(text: str) -> str:
    return textwrap.fill(text, 100)
