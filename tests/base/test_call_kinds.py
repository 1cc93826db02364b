"""Kinds of outputs are found alike in small arrays and in large ones, which are folded."""

import numpy as np
import pytest

from ga_model.core.proof import calls

_FUNCTIONS = {
    "rows": (lambda x: x * 2 + 1, "rows"),
    "masked": (lambda x: np.where(x > 0, x, -np.inf), "rows"),
    "alike": (lambda x: np.ones_like(x), "alike"),
    "zero": (lambda x: (x * 0).sum(0), "zero"),
    "sum": (lambda x: x.sum(0), "sum"),
    "mean": (lambda x: x.mean(0), "mean"),
    "maximum": (lambda x: x.max(0), None),
    "centered": (lambda x: x - 0.01 * x.mean(0, keepdims=True), None),
    "one entry": (lambda x: np.where(np.arange(x.shape[1]) == 1, x + x.sum(0), x), None),
    "not a number": (lambda x: x * np.nan, None),
}


@pytest.mark.every_case
@pytest.mark.parametrize("width", [7, 10_000])
@pytest.mark.parametrize("name", _FUNCTIONS)
def test_kinds_of_outputs(name: str, width: int) -> None:
    function, expected = _FUNCTIONS[name]
    x = np.random.default_rng(0).normal(size=(calls.TOTAL, width)).astype("float32")

    assert calls.kinds_of(lambda begin, end: [function(x[begin:end])]) == [expected]
