"""Logs of windows are those of plain Keras on the full batch, after each update, on any backend."""

import logged
import numpy as np
import pytest
from case import BACKEND
from helpers import seeded
from logged import ROWS, SETTINGS, STEPS, tagger, tokens

from ga_model import accumulate

CASES = [name for name in logged.CASES if name != "layer" or BACKEND != "jax"]


@pytest.mark.parametrize("settings", SETTINGS)
@pytest.mark.parametrize("case", CASES)
def test_logs_of_windows_are_those_of_the_full_batch(case, settings):
    logged.check(logged.CASES[case], settings)


def test_batches_of_a_window_log_what_it_has_so_far():
    """Where metrics are reset, a batch's log is the window's, with the batches before."""
    model = accumulate(seeded(tagger), accumulation_steps=STEPS)
    model.compile("sgd", "mse")
    x, y = tokens()
    ends = range(ROWS, ROWS * STEPS + 1, ROWS)
    expected = [float(model.test_on_batch(x[:end], y[:end])) for end in ends]
    found = []
    for end in ends:
        model.reset_metrics()  # up to Keras 3.14, `train_on_batch` does not
        found.append(model.train_on_batch(x[end - ROWS : end], y[end - ROWS : end]))
    np.testing.assert_allclose(found, expected, rtol=1e-6)
