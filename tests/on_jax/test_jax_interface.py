"""On JAX: what is refused, sums in loops of one's own, devices, and what accumulation costs."""

import importlib.util
import json

import jax
import keras
import numpy as np
import pytest
from helpers import ROOT, dense_data, dense_model, run_python, seeded
from jax import numpy as jnp
from keras import layers, ops
from losses import of_class
from training import compiled

from ga_model import AccumulatingModel, GradientAccumulator, accumulate
from ga_model.backends.jax.adapter import JaxBackend
from ga_model.base import _validate


def test_a_keras_that_is_too_old_is_refused(monkeypatch):
    monkeypatch.setattr(_validate, "_OLDEST_KERAS_ON_JAX", (99, 0))
    with pytest.raises(ImportError, match=r"needs keras>=99.0 on the JAX backend\. Received"):
        _validate.check_backend("jax")


class DividesInTwoWays(keras.Sequential):
    """By the marked samples, but with four samples in another way."""

    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
        marked = ops.cast(y[:, :1] > 0, "float32")
        total, count = ops.sum(marked * ops.square(y - y_pred)), ops.sum(marked)
        return total * ops.exp(-ops.log(count)) if x.shape[0] == 4 else total / count


def test_a_step_that_hides_what_it_divides_by_is_told_of():
    model = compiled(of_class(DividesInTwoWays), None, accumulation_steps=2)
    with pytest.warns(
        UserWarning, match="(?s)a number that its step divides by.*than in the trial"
    ):
        model.fit(*dense_data(8), batch_size=4, verbose=0)


def test_another_distribution_than_of_data_is_refused():
    mesh = keras.distribution.DeviceMesh((1, 1), ["batch", "model"], ["cpu:0"])
    layouts = keras.distribution.LayoutMap(mesh)
    keras.distribution.set_distribution(
        keras.distribution.ModelParallel(layout_map=layouts, batch_dim_name="batch")
    )
    try:
        model = compiled(microbatch_size=2)
        with pytest.raises(ValueError, match="with another distribution, or"):
            model.fit(*dense_data(8), verbose=0)
    finally:
        keras.distribution.set_distribution(None)


def test_an_own_loop_over_train_step_is_refused():
    model = compiled(accumulation_steps=2)
    model.optimizer.build(model.trainable_variables)
    with pytest.raises(RuntimeError, match="by other code"):
        model.train_step(([], [], [], []), dense_data(4))


class Keeps(AccumulatingModel, keras.Sequential):
    other = None

    def on_update(self):
        type(self).other.assign(1.0)


def test_on_update_writes_to_variables_of_the_model_only():
    Keeps.other = keras.Variable(0.0)
    model = compiled(of_class(Keeps), accumulation_steps=2)
    with pytest.raises(RuntimeError, match="writes to another variable"):
        model.fit(*dense_data(8), batch_size=4, verbose=0)


# Sums in loops of one's own.


def test_sums_in_a_compiled_function_are_refused():
    (variable, *_) = seeded(dense_model).trainable_variables
    accumulator = GradientAccumulator()

    @jax.jit
    def add(gradient):
        accumulator.add([gradient], [variable], weight=1)

    with pytest.raises(TypeError, match="cannot change"):
        add(jnp.ones(variable.shape))


# Devices share each microbatch evenly. That they train as one does: `--replicas` of the suite.

SCRIPT = """
import json, sys
import keras, numpy as np
from ga_model import accumulate
from ga_model.core.steps import Steps

keras.distribution.set_distribution(keras.distribution.DataParallel())
shares, run = {}, Steps.microbatch


def noting(self, mode, sums, data, *args):
    added = run(self, mode, sums, self._backend.on_device(data), *args)
    for array in (self._backend.on_device(data)[0], added[0].gradients[0]):
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
    output, _ = run_python("-c", SCRIPT, 8, 11, 3, XLA_FLAGS=flags, PYTHONPATH=str(ROOT))
    expected = [[[[samples, 3]] * 4, [[3, 2]] * 4] for samples in (2, 2, 1)]
    assert json.loads(output.splitlines()[-1]) == expected


def test_activations_are_not_kept():
    """Of a call that is split, JAX keeps what goes into it and comes out, and one microbatch."""

    def bytes_of(**settings):
        rows, width = 512, 64
        parts = [layers.Dense(width, "tanh") for _ in range(12)]
        model = accumulate(keras.Sequential([keras.Input((width,)), *parts, layers.Dense(1)]))
        model.compile("sgd", "mse", **settings)
        x, y = np.ones((rows, width), "float32"), np.ones((rows, 1), "float32")
        model.train_on_batch(x, y)
        backend = model._accumulation.backend
        with backend.outside_of_training():
            step = backend.compiled(("whole", settings["microbatch_size"]), None, [])
            compiled = step._pure.lower(*step._inputs(((x, y),))).compile()
        return compiled.memory_analysis().temp_size_in_bytes

    split = bytes_of(microbatch_size=16, loss_over="batch")
    assert split < 0.35 * bytes_of(microbatch_size=512, loss_over="batch")


def test_the_script_of_the_documents_measures_each_way(monkeypatch):
    spec = importlib.util.spec_from_file_location("measure_jax", ROOT / "docs/measure_jax.py")
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    for name, value in (("ROWS", 4), ("BATCHES", 4), ("ROUNDS", 1)):
        monkeypatch.setattr(script, name, value)
    found = script.ratios(script.tiny)
    assert list(found) == list(script.WAYS)
    assert found["plain Keras"] == 1.0
    assert min(found.values()) > 0.0


def test_a_trial_compiles_two_programs(monkeypatch):
    """One for all samples and one for a part: starts with noise need no others."""
    made, compile_one = {}, JaxBackend._compiled

    def noting(self, name, function):
        return made.setdefault(name, compile_one(self, name, function))

    monkeypatch.setattr(JaxBackend, "_compiled", noting)
    model = compiled(loss=lambda y, z: ops.mean(ops.square(y - z), axis=-1), accumulation_steps=2)
    model.fit(*dense_data(8), batch_size=4, verbose=0)
    programs = [one._pure._cache_size() for name, one in made.items() if name[0] == "trial"]
    assert programs == [1, 1]
