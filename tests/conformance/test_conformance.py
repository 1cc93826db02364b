"""The promise, case by case and setting by setting, on the backend that the tests run on.

Each case trains twice through `fit`: plainly on the full batch, and with a setting. Weights, other
variables, seeds, the optimizer's state, the number of updates and logs must be equal to the
tolerance of the precision, or to what rounding makes of plain Keras, where that is more; nothing
may be warned of, unless the case expects it. Its cases are in `models`, `losses`, `metrics`,
`own_train_steps`, those of PyTorch alone in `of_torch`; on TensorFlow they train in float64 and in
float32. CONTRIBUTING says which run takes which.
"""

import importlib
import itertools
import zlib

import helpers
import keras
import losses
import metrics
import models
import own_train_steps
import pytest
import zoo
from case import BACKEND, Case, check, kind_of, sgd
from conftest import set_dtype

MODULES = [models, losses, metrics, own_train_steps]
if BACKEND == "torch":
    MODULES.append(importlib.import_module("of_torch"))
TABLE = {name: case for module in MODULES for name, case in module.CASES.items()}
GATE_TAKES_ONE_IN = {"torch": 4, "jax": 13, "tensorflow": 11}
PRECISIONS = ("float64", "float32") if BACKEND == "tensorflow" else ("float32",)


def named(text):
    """Return the names in a text, each of which has a case."""
    names = {name.strip() for name in text.split(";")}
    assert names <= TABLE.keys(), names - TABLE.keys()
    return names


# What trains in every run, by its setting there.
QUICK = {
    "windows": named(
        """regularized; batch normalization; a layer that combines samples;
        empty later, compiled: each_of_all_over_some; empty later, own: of_some_over_some;
        own train_step: masked mean; own train_step: contrastive;
        no positives in the middle, own: focal"""
    ),
    "split": named("convolution; nested; mixed_bfloat16: calls inside of a model"),
    "both": named(
        """embedding; adam; global_clipnorm; loss scale; a microbatch without weight;
        logs: a mask"""
    ),
    "recomputed": named("masked_recurrent; sum, masked, weights: positions"),
    "batches of one": named("attention"),
    "microbatches of one": named("own loss: contrastive"),
}
# What else does on PyTorch, which traces nothing: by its setting, if one shows most, and any other.
BY_SETTING = {
    "windows": named(
        """a window without weight; few positives: of_all_over_positives;
        an operation that combines samples; own compute_loss: with a rule of outputs;
        own loss: a number per output, of 1; own loss: a number per output, of 2"""
    ),
    "split": named("two masks; regularizers, sum"),
    "batches of one": named("own loss: masked mean with epsilon; own train_step: detector"),
    "microbatches of one": named("own train_step: sequences"),
}
FIRST_SETTING = {
    name: setting
    for table in (QUICK, BY_SETTING)
    for setting, names in table.items()
    for name in names
}
FIRST = {*FIRST_SETTING} | named(
    """two_outputs; unused_variable; lazily_built; stateful recurrent; language model; dicts;
    sample weights by output; a sample; a layer that adds a mean and a sum; activities beside a sum;
    schedule; moving average that overwrites; weight decay; constraints; mixed_float16: dense;
    eager; mixed_float16: scales that overflow;
    compiled by XLA; several steps per execution;
    mean_with_sample_weight, masked, weights: positions; class weights, sum_over_batch_size;
    a layer on demand, windows; a layer on demand, windows that may be left out;
    ignored class; own compute_loss: with a rule; logs: weighted metrics of a mask;
    own train_step: compute_loss; own train_step: sum;
    own loss: divides by its moving average"""
)


# Reasons, by beginnings of names, why a case is left out with `--replicas`.
ONE_DEVICE = {
    **dict.fromkeys(
        ("own ", "nested", "empty", "an empty", "microbatches of NaN"),
        "what is computed without Keras has to be divided by the replicas",
    ),
    "a layer on demand": "only some replicas would call it",
    "a layer that": "replicas add losses of their own samples",
    "mixed_bfloat16: calls inside": "replicas combine their own samples",
    "mixed_float16: calls inside": "replicas combine their own samples",
    "batch normalization": "replicas average their own samples, as in plain Keras",
    "stateful": "replicas have another number of samples",
    "several steps per execution": "Keras runs one step per execution there",
    "moving average that overwrites": "Keras does not overwrite weights there",
}
if BACKEND == "jax":
    ONE_DEVICE = {}


def trainings():
    """Return a parameter for each case, setting and precision that this backend has."""
    found, first = [], FIRST if BACKEND == "torch" else set().union(*QUICK.values())
    for name, case in TABLE.items():
        turn = zlib.crc32(name.encode())  # which other cases do not change
        if BACKEND not in case.backends:
            continue
        precisions = (case.precision,) if case.precision else PRECISIONS
        number = len(case.settings)
        order = [case.settings[(turn + i) % number] for i in range(number)]
        begin = FIRST_SETTING.get(name, order[0])
        order.sort(key=lambda setting: setting != begin)
        for setting, precision in itertools.product(order, precisions):
            is_taken = setting == order[0] and precision == precisions[0]
            marks = []
            if not (is_taken and name in first):
                is_alone = case.backends == (BACKEND,)
                in_turn = is_alone or turn % GATE_TAKES_ONE_IN[BACKEND] == 0
                is_for_gate = is_taken and (in_turn or name in FIRST)
                marks.append(pytest.mark.gate if is_for_gate else pytest.mark.sweep)
            reason = next((r for n, r in ONE_DEVICE.items() if name.startswith(n)), None)
            if BACKEND == "jax" and setting == "batches of one":
                reason = "a batch has a sample for each device"
            if reason:
                marks.append(pytest.mark.one_device(reason))
            found.append(
                pytest.param(
                    name, setting, precision, marks=marks, id=f"{name}-{setting}-{precision}"
                )
            )
    return found


@pytest.mark.every_case
@pytest.mark.filterwarnings("ignore:Gradients do not exist for variables:UserWarning:keras")
@pytest.mark.parametrize(("name", "setting", "precision"), trainings())
def test_training_is_that_of_the_full_batch(name, setting, precision, record_property):
    set_dtype(precision)
    for what, difference in check(TABLE[name], setting, precision).items():
        record_property(what, float(difference))


def weighs_alike(model, data, *loss, **kwargs):
    """Say that every microbatch counts the same: the mean of means that others take.

    Of what differs all roundings are measured: on TensorFlow eagerly, where nothing is traced.
    """
    base = helpers.ruled(keras.Sequential, lambda model, x, y: 1.0)
    arguments = sgd(*loss, run_eagerly=BACKEND == "tensorflow")
    return Case(lambda: base(model().layers), data, arguments, **kwargs)


DENSE = helpers.dense_model, helpers.dense_data
CONTROLS = {
    "even": weighs_alike(*DENSE, samples=24),
    "ragged": weighs_alike(*DENSE),
    "masked": weighs_alike(zoo.masked_recurrent, zoo.masked_data, samples=24),
    "sum": weighs_alike(*DENSE, losses.squared("sum"), 0.005, samples=24),
}
# One of each precision, and all of them in the sweep.
TAKEN = {
    ("even", PRECISIONS[0]),
    ("ragged", "float32"),
    ("sum", "mixed_bfloat16"),
    ("masked", "mixed_float16"),
}


def controls():
    for name, precision in itertools.product(
        CONTROLS, (*PRECISIONS, "mixed_bfloat16", "mixed_float16")
    ):
        marks = [] if (name, precision) in TAKEN else [pytest.mark.sweep]
        if name == "masked" and not marks:
            marks.append(pytest.mark.gate)
        if (name, BACKEND) == ("ragged", "jax"):
            marks.append(pytest.mark.one_device("devices share batches evenly"))
        yield pytest.param(name, precision, marks=marks)


@pytest.mark.every_case
@pytest.mark.parametrize(("name", "precision"), list(controls()))
def test_control_a_mean_of_means_is_found_to_differ(name, precision):
    set_dtype(precision)
    found = kind_of(CONTROLS[name], "windows", precision)
    assert found in (["nothing"] if name == "even" else ["silent", "inexact"])


def test_every_optimizer_of_keras_is_in_a_case():
    every = {
        cls
        for cls in vars(keras.optimizers).values()
        if isinstance(cls, type) and issubclass(cls, keras.optimizers.Optimizer)
    }
    tested = {type(make()) for make in models.OPTIMIZERS.values()}
    assert {cls.__name__ for cls in tested} == {
        cls.__name__ for cls in every - {keras.optimizers.Optimizer}
    }
