"""On PyTorch, a window costs no buffer where Keras's own step runs in float32."""

import importlib.util

import pytest
from helpers import ROOT


def measured(name, way):
    spec = importlib.util.spec_from_file_location("measure_torch", ROOT / "docs/measure_torch.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    (found,) = [whole for whole in module.WAYS if whole.startswith(way)]
    return module.in_process(name, found)


@pytest.mark.sweep
def test_peak_memory_is_near_that_of_plain_small_batches():
    plain = measured("deep", "plain Keras, batches of 32")
    weights = 20 * 1024 * 1024 * 4 / 1e6
    assert measured("deep", "accumulation_steps") < plain + 0.15 * weights
    assert measured("deep", "microbatch_size") < plain + 0.15 * weights
    assert measured("deep", "Keras's") > plain + weights  # the control


@pytest.mark.sweep
def test_activations_are_those_of_a_microbatch():
    plain, full = (measured("convolution", f"plain Keras, batches of {n}") for n in (32, 256))
    assert full > 3 * plain
    assert measured("convolution", "microbatch_size") < 1.2 * plain
    assert measured("convolution", "the same, loss_over") < 1.2 * plain
