"""Off TensorFlow, accumulation makes the updates of plain Keras on the whole window.

All models of the zoo, optimizers, windows, microbatches and both; even epochs, ragged last batches,
and partial last windows.
"""

import keras
import pytest
from helpers import in_the_sweep
from pairs import TOLERANCE, difference_of_fits, difference_of_orders
from zoo import OPTIMIZERS, ZOO

WINDOWS = {  # rows, steps, size, rows of the epoch
    "both": (4, 3, 2, 31),
    "steps": (4, 3, None, 31),
    "size": (12, 1, 5, 31),
    "even": (4, 2, None, 32),
    "one": (12, 1, 1, 24),
}


def in_turns(names):
    """Return pairs of names and windows, each name with another window, and then all others."""
    windows = list(WINDOWS)
    first = [(name, windows[i % len(windows)]) for i, name in enumerate(names)]
    others = [(name, window) for name in names for window in windows]
    return [*first, *(in_the_sweep(*pair) for pair in others if pair not in first)]


@pytest.mark.filterwarnings("ignore:Gradients do not exist for variables:UserWarning:keras")
@pytest.mark.every_case
@pytest.mark.parametrize(("name", "window"), in_turns(ZOO))
def test_zoo_matches_the_full_batch(name, window, record_property):
    make, make_data = ZOO[name]
    rows, steps, size, total = WINDOWS[window]
    data = make_data(total)

    def arguments():
        return {"optimizer": keras.optimizers.SGD(0.1, momentum=0.9), "loss": "mse"}

    order = difference_of_orders(make, arguments, data, rows=rows * steps)
    found = difference_of_fits(make, arguments, data, rows=rows, steps=steps, size=size)
    record_property("order", float(order))
    record_property("found", float(found))
    assert order <= TOLERANCE
    assert found <= max(10 * order, 1e-6)  # rounding that grows with what the machine rounds


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_optimizers_match_the_full_batch(optimizer):
    make, make_data = ZOO["dense"]

    def arguments():
        return {"optimizer": OPTIMIZERS[optimizer](), "loss": "mse"}

    found = difference_of_fits(make, arguments, make_data(31), rows=4, steps=3, size=3)
    assert found <= TOLERANCE
