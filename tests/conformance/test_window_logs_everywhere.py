"""Logs of windows are those of plain Keras on the full batch, after each update, on any backend."""

import logged
import numpy as np
import pytest
from case import BACKEND
from helpers import dense_data, seeded
from logged import ROWS, SETTINGS, STEPS, dense, tagger, tokens

from ga_model import accumulate

CASES = [name for name in logged.CASES if name != "layer" or BACKEND != "jax"]


@pytest.mark.parametrize("settings", SETTINGS)
@pytest.mark.parametrize("case", CASES)
def test_logs_of_windows_are_those_of_the_full_batch(case, settings):
    logged.check(logged.CASES[case], settings)


def test_metrics_that_are_reset_within_a_window_begin_again():
    model = accumulate(seeded(tagger), accumulation_steps=STEPS)
    model.compile("sgd", "mse")
    x, y = tokens()
    batches = [(x[i : i + ROWS], y[i : i + ROWS]) for i in range(0, ROWS * STEPS, ROWS)]
    expected = float(model.test_on_batch(x[: ROWS * STEPS], y[: ROWS * STEPS]))
    for batch in batches:
        model.reset_metrics()
        loss = model.train_on_batch(*batch)
    np.testing.assert_allclose(loss, expected, rtol=1e-6)  # of the window, and nothing twice


@pytest.mark.filterwarnings("ignore:Microbatches of")
def test_microbatches_that_are_skipped_count_for_nothing():
    x, y = dense_data(ROWS * STEPS)
    y[:ROWS] = np.nan
    model = accumulate(seeded(dense), accumulation_steps=STEPS, skip_nonfinite=True)
    model.compile("sgd", "mse")
    expected = float(model.test_on_batch(x[ROWS:], y[ROWS:]))
    model.reset_metrics()
    for i in range(0, ROWS * STEPS, ROWS):
        loss = model.train_on_batch(x[i : i + ROWS], y[i : i + ROWS])
    np.testing.assert_allclose(loss, expected, rtol=1e-6)
