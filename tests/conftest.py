"""Settings for all tests: quiet TensorFlow, few threads, fixed seeds, float32 by default.

The tests in `conformance` run on every backend. With the environment variable KERAS_BACKEND=torch
these and those in `on_torch` run, and no others; with KERAS_BACKEND=jax `conformance` and
`on_jax`.
"""

import collections
import gc
import os
import pathlib
import tempfile

if os.environ.get("KERAS_BACKEND") not in ("torch", "jax"):
    os.environ["KERAS_BACKEND"] = "tensorflow"
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
os.environ.setdefault("CUDA_VISIBLE_DEVICES", "-1")

import keras
import pytest

pytest.register_assert_rewrite("case", "helpers", "training")

import helpers  # noqa: E402 (with its assertions rewritten)

BACKEND = keras.backend.backend()
BACKENDS = {  # of folders
    "conformance": ["tensorflow", "torch", "jax"],
    "on_torch": ["torch"],
    "on_jax": ["jax"],
}

if BACKEND == "torch":
    import torch

    torch.set_num_threads(1)
elif BACKEND == "jax":
    if "PYTEST_XDIST_WORKER" not in os.environ:  # what one process compiles serves all
        _compiled = tempfile.TemporaryDirectory()
        os.environ["JAX_COMPILATION_CACHE_DIR"] = _compiled.name
    import jax

    jax.config.update("jax_compilation_cache_dir", os.environ["JAX_COMPILATION_CACHE_DIR"])
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", 0)
else:
    import tensorflow as tf

    # The suite runs in several processes, and its models are small.
    tf.config.threading.set_intra_op_parallelism_threads(1)
    tf.config.threading.set_inter_op_parallelism_threads(1)
    # Devices for `tf.distribute`.
    tf.config.set_logical_device_configuration(
        tf.config.list_physical_devices("CPU")[0], [tf.config.LogicalDeviceConfiguration()] * 3
    )

# Folders about parts of one backend, of whose tests the gate takes so many cases, and no others do.
PARTS = {"check": 1, "equivalence": 1, "on_torch": 4, "on_jax": 2}


def folder_of(path):
    """The folder of tests that a file lies in, whatever the folders above are named."""
    return path.relative_to(pathlib.Path(__file__).parent).parts[0]


def pytest_ignore_collect(collection_path):
    """Leave out the tests of other backends, which would fail as they are imported."""
    if collection_path.suffix != ".py":
        return None
    backends = BACKENDS.get(folder_of(collection_path), ["tensorflow"])
    return None if BACKEND in backends else True


def pytest_addoption(parser):
    parser.addoption(
        "--replicas",
        type=int,
        default=1,
        help="train what is compared with the full batch on so many logical CPUs",
    )


def pytest_configure(config):
    helpers.num_replicas = config.getoption("replicas")
    if BACKEND == "jax":  # which has not looked for its devices yet
        flags = os.environ.get("XLA_FLAGS", "")
        number = f"--xla_force_host_platform_device_count={helpers.num_replicas}"
        os.environ["XLA_FLAGS"] = f"{flags} {number}"


@pytest.hookimpl(tryfirst=True)  # before pytest chooses by markers
def pytest_collection_modifyitems(config, items):
    """Put the heart first, and leave a test's cases to the gate or the sweep as CONTRIBUTING says.

    The gate takes one case in 37, from the first of a test marked so, from the second of
    others: a number that has no factor in common with those of what cases are combined of.
    """
    items.sort(key=lambda item: folder_of(item.path) not in ("conformance", "equivalence"))
    seen = collections.Counter()
    for item in items:
        marks, most = {mark.name for mark in item.iter_markers()}, PARTS.get(folder_of(item.path))
        if "sweep" in marks or ("every_case" in marks and most is None):
            continue
        test = (item.path, item.originalname)
        number, seen[test] = seen[test], seen[test] + 1
        if most is not None:
            item.add_marker("gate" if number < most or "every_case" in marks else "sweep")
        elif number:
            first = 0 if "gate" in marks else 1
            item.add_marker("gate" if number % 37 == first else "sweep")
    if helpers.num_replicas > 1:
        out = [item for item in items if item.get_closest_marker("one_device")]
        config.hook.pytest_deselected(items=out)
        items[:] = [item for item in items if item not in out]


def set_dtype(dtype):
    """Set `floatx` and the dtype policy; policies of half precision keep `floatx` at float32."""
    keras.config.set_floatx(dtype if dtype == "float64" else "float32")
    keras.config.set_dtype_policy(dtype)


@pytest.fixture(autouse=True)
def fresh_keras(request):
    if BACKEND == "tensorflow":
        # The heart and the documents run as users' scripts do. Elsewhere it would take a fifth of
        # the time that TensorFlow rewrites graphs before they run.
        is_off = folder_of(request.path) not in ("conformance", "equivalence", "documents")
        tf.config.optimizer.set_experimental_options({"disable_meta_optimizer": is_off})
    keras.utils.clear_session()
    gc.freeze()  # what is alive now is not looked through at every collection of garbage to come
    helpers.set_random_seed(0)
    set_dtype("float32")
    yield
    set_dtype("float32")


@pytest.fixture
def float64():
    set_dtype("float64")
    return "float64"
