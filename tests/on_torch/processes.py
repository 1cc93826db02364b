"""Run one function in several processes of a group, each of which returns something."""

import pickle
import subprocess
import sys
import tempfile
from pathlib import Path

TESTS = Path(__file__).parent.parent
LIMIT = 300  # seconds, after which a test has failed

_CODE = """
import datetime, os, pickle, sys
os.environ["KERAS_BACKEND"] = "torch"
sys.path[:0] = {paths!r}
import torch
torch.set_num_threads(1)
store = torch.distributed.FileStore({store!r}, {size})
torch.distributed.init_process_group(
    "gloo", store=store, rank={rank}, world_size={size}, timeout=datetime.timedelta(seconds=30)
)
import warnings
warnings.simplefilter("ignore")
import {module} as module
result = getattr(module, {name!r})({rank}, {size})
with open({result!r}, "wb") as file:
    pickle.dump(result, file)
store.set("done {rank}", "")
store.wait([f"done {{other}}" for other in range({size})])  # nobody leaves while others talk
os._exit(0)  # the threads of gloo may abort a process that ends in another way
"""


def run_in_processes(module, name, size):
    """Return what `module.name(rank, size)` returns in each of `size` processes."""
    with tempfile.TemporaryDirectory() as folder:
        results = [str(Path(folder) / f"{rank}.pickle") for rank in range(size)]
        processes = [
            subprocess.Popen(
                [
                    sys.executable,
                    "-c",
                    _CODE.format(
                        paths=[str(TESTS / "on_torch"), str(TESTS), str(TESTS.parent)],
                        store=str(Path(folder) / "store"),
                        size=size,
                        rank=rank,
                        module=module,
                        name=name,
                        result=results[rank],
                    ),
                ],
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
            for rank in range(size)
        ]
        try:
            outputs = [process.communicate(timeout=LIMIT)[0] for process in processes]
        finally:
            for process in processes:
                process.kill()
        for process, output in zip(processes, outputs, strict=True):
            if process.returncode != 0:
                raise RuntimeError(output)
        return [pickle.loads(Path(result).read_bytes()) for result in results]
