"""Several machines: real processes that talk over loopback, under `MultiWorkerMirroredStrategy`.

The references are trained by plain Keras in one process, on the whole window.
"""

import concurrent.futures
import contextlib
import json
import os
import re
import shutil
import socket
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import tensorflow as tf
import worker
from helpers import (
    ROOT,
    dense_data,
    dense_model,
    in_the_sweep,
    metrics_of_replicas_add_up,
    python_blocks,
    relative_difference,
    seeded,
)

SECONDS = 240  # within which a cluster has to end

pytestmark = pytest.mark.gate


def free_ports(number):
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(number)]
        for each in sockets:
            each.bind(("localhost", 0))
        return [each.getsockname()[1] for each in sockets]


def run_job(number, directory, job):
    """Let so many workers do a job.

    Returns:
        Of each worker its exit status, its output, and when it ended, in seconds.
    """
    workers = [f"localhost:{port}" for port in free_ports(number)]

    def run(index):
        config = {"cluster": {"worker": workers}, "task": {"type": "worker", "index": index}}
        result = subprocess.run(
            [sys.executable, worker.__file__, job, directory],
            env={**os.environ, "TF_CONFIG": json.dumps(config)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=SECONDS,
        )
        return result.returncode, result.stdout, time.monotonic()

    with concurrent.futures.ThreadPoolExecutor(number) as pool:
        return list(pool.map(run, range(number)))


def run_to_the_end(number, directory, job):
    for status, output, _ in run_job(number, directory, job):
        assert status == 0, output


@pytest.fixture
def data(float64, tmp_path):
    x, y = dense_data(37)  # 5 batches of 8, the last one of 5 rows
    model = seeded(dense_model)
    worker.save(tmp_path / "start.npz", model, x=x, y=y)
    return model.get_weights(), x, y


def whole_batch(start, x, y, rows, epochs, **kwargs):
    model = worker.compiled(start, tf.distribute.get_strategy())
    model.fit(x, y, batch_size=rows, epochs=epochs, shuffle=False, verbose=0, **kwargs)
    return model


@pytest.mark.parametrize("number", [2, in_the_sweep(3)])
def test_fit_evaluate_and_predict_match_one_process_on_the_whole_batch(number, data, tmp_path):
    start, x, y = data
    run_to_the_end(number, tmp_path, "train")
    rows = worker.ROWS * worker.SETTINGS["accumulation_steps"]
    reference = whole_batch(start, x, y, rows, 2, validation_data=(x[:11], y[:11]))
    expected = reference.get_weights()
    for index in range(number):
        weights, result = worker.load(tmp_path / f"trained{index}.npz")
        assert relative_difference(weights, expected, start) <= 1e-12, index
        np.testing.assert_allclose(result["predictions"], reference.predict(x), rtol=1e-9)
        if not metrics_of_replicas_add_up():
            continue
        for key, value in reference.history.history.items():
            np.testing.assert_allclose(result[key], value, rtol=1e-6)
        for key, value in reference.evaluate(x, y, verbose=0, return_dict=True).items():
            np.testing.assert_allclose(result[f"evaluate_{key}"], value, rtol=1e-6)


@pytest.mark.sweep
@pytest.mark.parametrize("number", [2, 3])
def test_a_worker_that_dies_is_reported_and_a_restart_goes_on(number, data, tmp_path):
    start, x, y = data
    dead, *others = sorted(run_job(number, tmp_path, "die"), key=lambda result: result[2])
    assert dead[0] == -9
    for status, output, ended in others:
        assert status == 1
        assert ended - dead[2] < 60
        assert "Another worker of this cluster is unreachable" in output
        assert "epoch 3" not in output

    # One that lost its backup: nobody trains, everybody is told.
    shutil.move(tmp_path / "backup1", tmp_path / "lost")
    for status, output, _ in run_job(number, tmp_path, "resume"):
        assert status == 1
        assert "All workers must start with the same epoch" in output

    shutil.copytree(tmp_path / "backup0", tmp_path / "backup1", dirs_exist_ok=True)
    run_to_the_end(number, tmp_path, "resume")
    rows = 3 * worker.ROWS
    expected = whole_batch(start, x, y, rows, worker.EPOCHS).get_weights()
    for index in range(number):
        weights, _ = worker.load(tmp_path / f"resumed{index}.npz")
        assert relative_difference(weights, expected, start) <= 1e-12


def test_the_documents_script_runs_on_two_devices_and_as_two_processes(tmp_path):
    page = (ROOT / "docs/guides/distributed.md").read_text()
    script, _ = python_blocks(page)  # the other one is for PyTorch
    commands, _ = re.findall(r"```sh\n(.*?)```", page, flags=re.DOTALL)
    (tmp_path / "several.py").write_text(script)
    for port in free_ports(2):
        commands = re.sub(r"localhost:2020\d", f"127.0.0.1:{port}", commands, count=1)
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    result = subprocess.run(
        ["timeout", str(SECONDS), "bash", "-ec", commands + "wait\n"],
        cwd=tmp_path,
        env={**os.environ, "PATH": path},
        capture_output=True,
        text=True,
        check=True,
    )
    losses = re.findall(r"loss: (\S+)", result.stdout)
    # 5 epochs on two devices, and by each of two workers, whose outputs are mixed up.
    assert sorted(losses) == sorted(3 * list(set(losses))), result.stdout + result.stderr
    assert len(losses) == 15
