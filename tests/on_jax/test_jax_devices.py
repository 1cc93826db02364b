"""Devices share each microbatch evenly. That they train as one does: `--replicas` of the suite."""

import json
import os
import subprocess
import sys

from helpers import ROOT

SCRIPT = """
import json, sys
import keras, numpy as np
from ga_model import accumulate
from ga_model.core.steps import Steps

keras.distribution.set_distribution(keras.distribution.DataParallel())
shares, run = {}, Steps.microbatch


def noting(self, mode, sums, data, *args):
    added = run(self, mode, sums, self._backend.placed(data), *args)
    for array in (self._backend.placed(data)[0], added[0].gradients[0]):
        shares[size].add(tuple(part.data.shape for part in array.addressable_shards))
    return added


Steps.microbatch = noting
for size in map(int, sys.argv[1:]):
    shares[size] = set()
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(2)])
    accumulate(model, microbatch_size=size).compile("sgd", "mse")
    model.fit(np.ones((24, 3)), np.ones((24, 2)), batch_size=16, verbose=0)
print(json.dumps([sorted(found) for found in shares.values()]))
"""


def test_devices_share_each_microbatch_evenly():
    """Four devices: of a size that is no multiple, the next smaller one."""
    flags = "--xla_force_host_platform_device_count=4"
    environment = {**os.environ, "XLA_FLAGS": flags, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", SCRIPT, "8", "11", "3"]
    output = subprocess.check_output(command, env=environment, text=True)
    expected = [[[[samples, 3]] * 4, [[3, 2]] * 4] for samples in (2, 2, 1)]
    assert json.loads(output.splitlines()[-1]) == expected
