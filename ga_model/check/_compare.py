"""Train a user's model with plain Keras and with accumulation, compare, and restore it."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
import warnings
from collections.abc import Iterator

import keras
import numpy as np

from ga_model._engine import Backend
from ga_model._settings import UNCHANGED, passed
from ga_model._wrap import accumulate
from ga_model.base._identity import unique
from ga_model.base._internals import global_seed, is_built, layers_in
from ga_model.base._python_state import Attributes
from ga_model.base._types import Nest, Tensor
from ga_model.check import _diagnosis
from ga_model.check._equivalence_report import EquivalenceReport, VariableDifference
from ga_model.check._plan import Plan, make_plan
from ga_model.check._randomness import Randomness, shared_randomness
from ga_model.core.batch import samples_between
from ga_model.core.models import optimizers_in
from ga_model.core.proof.windows import rounded
from ga_model.core.snapshots import OtherVariables
from ga_model.core.user_code import others_of_user
from ga_model.tools._difference import change, relative_differences

# Attributes of a model that accumulation sets, or that were traced with its settings.
_OF_TRAINING = ("_accumulation", "train_function")

# Machine epsilon: the distance from 1 to the next larger number.
_ROUNDING = {"float64": 2.0**-52, "float32": 2.0**-23, "bfloat16": 2.0**-7, "float16": 2.0**-10}


def check_equivalence(
    model: keras.Model,
    x: Nest,
    y: Nest = None,
    sample_weight: Nest = None,
    *,
    batch_size: int,
    accumulation_steps: int | None = UNCHANGED,
    microbatch_size: int | None = UNCHANGED,
    loss_over: str | None = UNCHANGED,
    updates: int = 3,
) -> EquivalenceReport:
    """Compare accumulation with the full batch, on your own model and a few samples.

    The model trains with `fit` from its current weights: first with plain Keras on full batches,
    then with accumulation on the same samples in the same order. All weights and the state of all
    optimizers are compared. To measure how much of a difference is rounding, plain Keras trains on
    full batches once more, from weights with an added rounding error.

    Afterwards, weights, optimizers, metrics, random state, settings and all other variables of the
    step are restored, as are numbers, arrays, lists and dicts in attributes of the model, its
    layers, your own losses and metrics, and objects from the same packages. A model that was not
    built is built, as by a first batch. Not restored are other Python objects that training
    changes, and in eager mode the state of TensorFlow's own random operations. The model need not
    be an `AccumulatingModel`, and does not become one.

    For the comparison, `Dropout` layers drop the same units for every sample in all three
    trainings, and other random layers of Keras are switched off; the report names them.

    Args:
        model: a compiled `keras.Model`.
        x, y, sample_weight: samples, as you pass them to `fit`: arrays, tensors, pandas objects, or
            nested structures of them, with samples on axis 0. No datasets or generators. The first
            `batch_size * accumulation_steps * updates` samples are used. If there are fewer, the
            last window is partial.
        batch_size: samples per batch of `fit`.
        accumulation_steps: batches per window, an integer >= 1. None is 1. By default, the model's
            setting.
        microbatch_size: samples per microbatch, an integer >= 1. None does not split batches. By
            default, the model's setting.
        loss_over: "auto", "microbatch" or "batch". None is "auto". By default, the model's setting.
        updates: number of updates to compare, an integer >= 1.

    Returns:
        An `EquivalenceReport`. Print it, or read its `equivalent`.

    Raises:
        TypeError, ValueError: an argument is invalid, or there are too few samples for two
            microbatches.
        RuntimeError: the model is not compiled, or an optimizer that only the `train_step` of an
            eager model uses is not built.
        NotImplementedError: the model was created for several replicas.

    Example:

    ```python
    model.compile("adam", "mse")
    report = check_equivalence(model, x, y, batch_size=32, microbatch_size=8)
    print(report)
    assert report.equivalent
    ```
    """
    plan = make_plan(model, (x, y, sample_weight), batch_size, updates, **passed(locals()))
    return compare(model, plan)


def compare(model: keras.Model, plan: Plan) -> EquivalenceReport:
    """Train a model by a plan, compare, and restore it: see `check_equivalence`."""
    reported: list[str] = []  # warnings of accumulation, which go into the report
    with (
        _warnings_except(reported),
        _as_plain_keras_model(model, plan),
        shared_randomness(model) as randomness,
    ):
        state = _State(model)
        try:
            with state.others.recording():
                return _train_and_compare(model, plan, state, randomness, reported)
        finally:
            state.restore()


@contextlib.contextmanager
def _warnings_except(reported: list[str]) -> Iterator[None]:
    """Give the warnings of a block after it, each once, except those in `reported` by then."""
    caught: list[warnings.WarningMessage] = []
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            yield
    finally:
        for text, warning in {str(w.message): w for w in caught}.items():
            if text not in reported:
                warnings.warn_explicit(
                    warning.message, warning.category, warning.filename, warning.lineno
                )


def _train_and_compare(
    model: keras.Model, plan: Plan, state: _State, randomness: Randomness, reported: list[str]
) -> EquivalenceReport:
    seed_before = _seed_state()
    _fit(model, plan, plan.window_rows)
    if _seed_state() != seed_before:
        randomness.left.append(model.name)
    full, start = state.read(), state.values
    state.restore()
    _add_rounding_errors(model)
    perturbed = state.read()
    _fit(model, plan, plan.window_rows)
    roundings = relative_differences(state.read(), perturbed, full, start)
    state.restore()
    accumulate(model, **dataclasses.asdict(plan.settings))
    _fit(model, plan, plan.batch_size)
    differences = relative_differences(state.read(), start, full, start)
    reported += sorted(model._accumulation.warnings)
    weights = {id(v) for v in model.weights}
    coarsest = functools.reduce(_coarser, _compute_dtypes(model).values(), "float64")
    report = EquivalenceReport(
        batch_size=plan.batch_size,
        accumulation_steps=plan.settings.accumulation_steps,
        microbatch_size=plan.settings.microbatch_size,
        loss_over=plan.settings.loss_over,
        updates=plan.updates,
        samples=plan.rows,
        variables=[
            VariableDifference(
                path=path,
                dtype=_coarser(str(variable.dtype), coarsest),
                size=math.prod(variable.shape),
                is_moved_weight=id(variable) in weights and bool(np.any(value != before)),
                difference=difference,
                rounding=rounding,
            )
            for (path, variable), value, before, difference, rounding in zip(
                state.compared, full, start, differences, roundings
            )
        ],
        is_finite=all(np.isfinite(change(*pair)).all() for pair in zip(full, start)),
        random_layers=randomness,
        reasons=list(reported),
    )
    if report.equivalent:
        return report
    return report._replace(reasons=_diagnosis.reasons(model, report))


def _seed_state() -> list[int] | None:
    """Return a value that changes whenever `keras.random` draws without a seed."""
    seed = global_seed()
    return None if seed is None else _value_of(seed.state).tolist()


def _fit(model: keras.Model, plan: Plan, batch_size: int) -> None:
    x, y, sample_weight = plan.data
    weights = {} if sample_weight is None else {"sample_weight": sample_weight}
    model.fit(x, y, batch_size=batch_size, epochs=1, shuffle=False, verbose=0, **weights)


class _State:
    """The state that each training starts from: variables, and the Python state of the model.

    On TensorFlow it includes all other variables of the process, as the step may use them. Random
    state outside of variables is not included.

    Attributes:
        compared: pairs of path and variable, for weights and optimizer variables.
        values: the values of these variables at the start.
        others: variables of user code.
    """

    def __init__(self, model: keras.Model) -> None:
        self._model = model
        compared = {id(v): (v.path, v) for v in model.weights}
        for optimizer in optimizers_in(vars(model)):
            for variable in optimizer.variables:
                compared.setdefault(id(variable), (_path(optimizer, variable), variable))
        self.compared = list(compared.values())
        self.values = self.read()
        others = [v for v in (*model.variables, *model.metrics_variables) if id(v) not in compared]
        self._start = [(v, value) for (_, v), value in zip(self.compared, self.values)]
        self._start += [(v, _value_of(v)) for v in unique(others)]
        self.others = OtherVariables(model, Backend(model), [v for v, _ in self._start])
        if keras.backend.backend() == "tensorflow":
            from ga_model.backends.tensorflow.state import other_variables

            self._other_variables = other_variables([v for v, _ in self._start])
        self._python = Attributes([*layers_in(model), *others_of_user(model)])

    def read(self) -> list[np.ndarray]:
        return [_value_of(v) for _, v in self.compared]

    def restore(self) -> None:
        for variable, value in self._start:
            variable.assign(value)
        self.others.restore()
        if keras.backend.backend() == "tensorflow":
            self._other_variables.restore()
        attributes = vars(self._model)
        kept = {name: attributes[name] for name in _OF_TRAINING if name in attributes}
        self._python.restore()
        attributes.update(kept)


def _path(optimizer: keras.optimizers.Optimizer, variable: keras.Variable) -> str:
    has_name = variable.path.startswith(f"{optimizer.name}/")
    return str(variable.path) if has_name else f"{optimizer.name}/{variable.path}"


@contextlib.contextmanager
def _as_plain_keras_model(model: keras.Model, plan: Plan) -> Iterator[None]:
    """Build a model and make it a plain Keras model for a block; then undo all but the build."""
    attributes, model_class = vars(model), type(model)
    kept = {name: attributes.pop(name) for name in _OF_TRAINING if name in attributes}
    attributes["train_function"] = None
    strategy = getattr(model, "distribute_strategy", None)  # TensorFlow only
    try:
        with contextlib.nullcontext() if strategy is None else strategy.scope():
            backend = Backend(model)
            before = backend.state() if is_built(model, model.metrics) else None
            _build(model, backend, samples_between(plan.data, 0, plan.microbatch_rows))
            if before is not None:
                before.restore()
            state = backend.state()
            try:
                yield
            finally:
                # Assigning `model.__class__` fails, as it is a property if the model is wrapped.
                object.__dict__["__class__"].__set__(model, model_class)
                state.restore()
    finally:
        for name in _OF_TRAINING:
            attributes.pop(name, None)
        attributes.update(kept)


def _build(model: keras.Model, backend: Backend, data: Nest) -> None:
    """Create all variables of a model and its optimizers, without a training step."""
    data = keras.tree.map_structure(_as_tensor, data)
    backend.build(keras.utils.pack_x_y_sample_weight(*data))
    if keras.backend.backend() == "tensorflow" and backend.traces:
        return  # the trace has built all that the step uses
    if not model.built:
        with contextlib.suppress(NotImplementedError):  # a model without `call`
            model(data[0])
    if model.optimizer is not None and model.built and not model.optimizer.built:
        model.optimizer.build(model.trainable_variables)
    if unbuilt := [o.name for o in optimizers_in(vars(model)) if not o.built]:
        raise RuntimeError(
            "`check_equivalence` restores the optimizer state afterwards, so optimizers must be "
            f"built. Received: optimizers that are not: {unbuilt}. "
            "Call `optimizer.build(variables)` first, or compile without `run_eagerly=True`."
        )


def _as_tensor(array: Tensor | None) -> Tensor | None:
    """Convert an array to a tensor as Keras does: floating-point numbers to `floatx`."""
    if array is None or keras.ops.is_tensor(array):
        return array
    array = np.asarray(array)
    dtype = keras.config.floatx() if array.dtype.kind == "f" else array.dtype
    return keras.ops.convert_to_tensor(array.astype(dtype))


def _value_of(variable: keras.Variable) -> np.ndarray:
    """Return a copy of a variable's value as a NumPy array."""
    return np.array(keras.ops.convert_to_numpy(variable))


def _add_rounding_errors(model: keras.Model) -> None:
    """Add a rounding error, up or down, to every weight, frozen ones included.

    Its size is that of the dtype in which the weight's layer computes.
    """
    computed_in = _compute_dtypes(model)
    generator = np.random.default_rng(0)
    for variable in model.weights:
        if variable.dtype in _ROUNDING:
            error = _ROUNDING[_coarser(str(variable.dtype), computed_in[id(variable)])]
            variable.assign(rounded(_value_of(variable), error, generator))


def _compute_dtypes(model: keras.Model) -> dict[int, str]:
    """Return the compute dtype of each weight's layer, by id of the weight."""
    # Sublayers follow, and overwrite the dtype of their weights.
    return {id(v): layer.compute_dtype for layer in layers_in(model) for v in layer.weights}


def _coarser(dtype: str, other: str) -> str:
    """Return the less precise of two dtypes, or `dtype` if it does not round, such as int64."""
    rounds_more = dtype in _ROUNDING and _ROUNDING.get(other, 0.0) > _ROUNDING[dtype]
    return other if rounds_more else dtype
