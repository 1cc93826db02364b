"""The report of `check_equivalence`: the verdict, text, HTML, and plain data."""

from __future__ import annotations

import html
import math
import textwrap
from typing import Any, NamedTuple

from ga_model.check._randomness import Randomness
from ga_model.tools._table import text_table

# The relative difference that counts as equal, unless rounding makes a larger one. The models of
# tests/check/test_check.py whose losses are additive have at most 2.9e-5 in float32.
_TOLERANCE = {"float64": 1e-9, "float32": 1e-4, "float16": 1e-2, "bfloat16": 1e-2}

# The tolerance as a multiple of the difference that rounding errors in the start weights make.
_MARGIN = 10.0

# A variable with a larger tolerance cannot be compared: rounding alone moves it.
_MOST = {"float64": 1e-2, "float32": 1e-2, "float16": 0.1, "bfloat16": 0.1}

# For a verdict, the share of entries that must be comparable, among weights that training moves.
_COMPARABLE_SHARE = 0.9


class VariableDifference(NamedTuple):
    """The difference of one variable from its value after training with the full batch.

    Attributes:
        path: path of the variable; for an optimizer's variable, after the optimizer's name.
        dtype: its dtype, or the least precise compute dtype of the model if that rounds more.
        size: number of entries.
        is_moved_weight: whether the variable is a weight that training on the full batch changes.
        difference: ||w - w_full|| / ||w_full - w_start||, where w is trained with accumulation: 1
            is as large as the whole change of the variable.
        rounding: the same for full batches and start weights with an added rounding error.
    """

    path: str
    dtype: str
    size: int
    is_moved_weight: bool
    difference: float
    rounding: float

    @property
    def tolerance(self) -> float:
        """The largest difference that counts as equal; infinite if rounding alone is as large."""
        if "int" in self.dtype or self.dtype == "bool":
            return 0.0
        rounding = math.inf if math.isnan(self.rounding) else self.rounding
        tolerance = max(_TOLERANCE.get(self.dtype, 1e-2), _MARGIN * rounding)
        return tolerance if tolerance <= _MOST.get(self.dtype, 0.1) else math.inf

    @property
    def is_equal(self) -> bool:
        """Whether the difference is within the tolerance. False for NaN."""
        return self.difference <= self.tolerance

    @property
    def is_comparable(self) -> bool:
        """Whether the variable can be compared."""
        return math.isfinite(self.tolerance)


class EquivalenceReport(NamedTuple):
    """Whether accumulation made the updates of plain Keras on the full batch.

    `str(report)` is a text with a table of the variables that differ most; notebooks show it as
    HTML. `report.to_dict()` returns everything as plain Python values. Use
    `report.assert_equivalent()` in tests.

    Attributes:
        batch_size, accumulation_steps, microbatch_size, loss_over: the settings that were checked.
        updates: number of windows. Each makes an update, unless the optimizer skips it.
        samples: number of samples used.
        variables: a `VariableDifference` for each weight and each optimizer variable.
        is_finite: whether training on the full batch gave finite values.
        random_layers: how layers that draw random numbers were handled.
        reasons: sentences that say why the trainings differ. If they do not differ, the warnings of
            accumulation.

    Example:

    ```python
    from ga_model import check_equivalence

    model = keras.Sequential([keras.layers.Dense(16, activation="relu"), keras.layers.Dense(1)])
    model.compile("adam", "mse")
    report = check_equivalence(model, x, y, batch_size=32, microbatch_size=8)
    print(report.verdict, report.worst[0].difference)
    report.assert_equivalent()
    ```
    """

    batch_size: int
    accumulation_steps: int
    microbatch_size: int | None
    loss_over: str
    updates: int
    samples: int
    variables: list[VariableDifference]
    is_finite: bool
    random_layers: Randomness
    reasons: list[str]

    @property
    def verdict(self) -> str:
        """The verdict. One of "equivalent", "different" and "undecided".

        It is undecided if rounding alone, or random numbers that cannot be shared, make trainings
        differ, or if weights are not finite or do not change. Of the weights that the full batch
        changes, up to half, with at most a tenth of the entries, may be impossible to compare.
        """
        if not self.is_finite:
            return "undecided"
        if any(v.is_comparable and not v.is_equal for v in self.variables):
            return "undecided" if self.random_layers.left else "different"
        moved = [v for v in self.variables if v.is_moved_weight]
        comparable = [v for v in moved if v.is_comparable]
        is_conclusive = 2 * len(comparable) >= len(moved) and (
            sum(v.size for v in comparable) >= _COMPARABLE_SHARE * sum(v.size for v in moved)
        )
        return "equivalent" if moved and is_conclusive else "undecided"

    @property
    def equivalent(self) -> bool:
        """Whether the verdict is "equivalent"."""
        return self.verdict == "equivalent"

    @property
    def worst(self) -> list[VariableDifference]:
        """The variables, sorted by how far they exceed their tolerance, largest first."""

        def excess(variable: VariableDifference) -> float:
            if not variable.is_comparable or not variable.difference:
                return 0.0
            ratio = variable.difference / (variable.tolerance or math.ulp(0.0))
            return math.inf if math.isnan(ratio) else ratio

        return sorted(self.variables, key=excess, reverse=True)

    def assert_equivalent(self) -> None:
        """Raise AssertionError with the report as message, unless the verdict is "equivalent"."""
        if not self.equivalent:
            raise AssertionError(str(self))

    def to_dict(self) -> dict[str, Any]:
        """Return the report as plain Python values, the worst variables first.

        `tolerance` and `is_equal` are None for a variable that cannot be compared. Numbers that are
        not finite are strings.
        """
        return {
            "verdict": self.verdict,
            "equivalent": self.equivalent,
            **self._asdict(),
            "random_layers": self.random_layers._asdict(),
            "variables": [
                {
                    **v._asdict(),
                    "difference": _finite(v.difference),
                    "rounding": _finite(v.rounding),
                    "tolerance": v.tolerance if v.is_comparable else None,
                    "is_equal": v.is_equal if v.is_comparable else None,
                }
                for v in self.worst
            ],
        }

    def __str__(self) -> str:
        return self.text()

    def __repr__(self) -> str:
        return f"<EquivalenceReport: {self._heading()}>"

    def _repr_html_(self) -> str:
        """Return the report as HTML, for notebooks."""

        def of(tag: str, parts: list[str], is_text: bool = True) -> str:
            escaped = [html.escape(part) if is_text else part for part in parts]
            return "".join(f"<{tag}>{part}</{tag}>" for part in escaped)

        rows = [of("th", list(_HEADER)), *(of("td", row) for row in self._rows())]
        table = f"<table>{of('tr', rows, is_text=False)}</table>"
        return of("p", [self._heading()]) + table + of("p", [_SCALE, *self._remarks()])

    def text(self, has_table: bool = True) -> str:
        """Return `str(report)`, with or without its table."""
        parts = [self._heading(), *self._remarks()]
        parts = [textwrap.fill(part, 100) for part in parts]
        if has_table:
            parts.insert(1, self._table())
        return "\n\n".join(parts)

    def _heading(self) -> str:
        settings = f"batch_size={self.batch_size}"
        if self.accumulation_steps > 1:
            settings += f", accumulation_steps={self.accumulation_steps}"
        if self.microbatch_size is not None:
            settings += f", microbatch_size={self.microbatch_size}"
        if self.loss_over != "auto":
            settings += f", loss_over={self.loss_over!r}"
        number = "1 update" if self.updates == 1 else f"{self.updates} updates"
        worst = next((v for v in self.worst if v.is_comparable), None)
        finding = (
            "the check cannot tell whether the weights equal those of the full batch in plain Keras"
        )
        if self.verdict != "undecided" and worst is not None:
            equal = "equal" if self.equivalent else "differ from"
            finding = (
                f"the weights {equal} those of the full batch in plain Keras. Relative to its "
                f"tolerance, {worst.path} differs most: by {worst.difference:.1e} (1 = as large as "
                f"its whole change), where up to {worst.tolerance:.1e} counts as equal"
            )
        return f"{self.verdict.capitalize()}: after {number} with {settings}, {finding}."

    def _rows(self) -> list[list[str]]:
        rows = []
        for variable in [v for v in self.worst if v.difference][:_MOST_ROWS] or self.worst[:1]:
            tolerance = f"{variable.tolerance:.1e}" if variable.is_comparable else "-"
            numbers = [f"{variable.difference:.1e}", f"{variable.rounding:.1e}", tolerance]
            rows.append([variable.path, *numbers, "" if variable.is_equal else "differs"])
        return rows

    def _table(self) -> str:
        rows = self._rows()
        table = text_table(_HEADER, rows)
        if num_more := len(self.variables) - len(rows):
            table += f"\n... and {num_more} more variable{'' if num_more == 1 else 's'}"
        return f"{table}\n{_SCALE}"

    def _remarks(self) -> list[str]:
        shared, off = self.random_layers[:2]
        label = "Warning" if self.equivalent else "Why"
        remarks = [f"{label}: {reason}" for reason in self.reasons]
        if not self.is_finite:
            remarks.append(
                "The full batch gives weights that are not finite. "
                "Check the data, or use a smaller learning rate."
            )
        if shared:
            remarks.append(
                "For the comparison, these Dropout layers dropped the same units for every sample: "
                f"{_list(shared)}."
            )
        if off:
            remarks.append(
                "For the comparison, these layers ran without their random numbers, as in "
                f"inference: {_list(off)}."
            )
        num_hidden = sum(not v.is_comparable for v in self.variables)
        if num_hidden and self.is_finite:
            remarks.append(
                f"{num_hidden} of {len(self.variables)} variables cannot be compared: rounding "
                "alone changes them about as much as training does, for example because their "
                "exact gradient is zero."
            )
        return remarks


_MOST_ROWS = 8
_HEADER = ("variable", "difference", "rounding alone", "tolerance", "")
_SCALE = "Relative differences: 1 = as large as the whole change of the variable in training."


def _finite(number: float) -> float | str:
    return number if math.isfinite(number) else str(number)


def _list(names: list[str]) -> str:
    return ", ".join(dict.fromkeys(names))
