"""Show on a user's own model whether accumulation gives the updates of the whole batch."""

from __future__ import annotations

import contextlib
import math
import random
import warnings
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import keras
import numpy as np
import tensorflow as tf

from ga_model import _diagnosis, _strategy, _validate
from ga_model._equivalence_report import EquivalenceReport, VariableDifference
from ga_model._randomness import shared_randomness
from ga_model._recorder import optimizers_in
from ga_model._wrap import accumulate

# Of each dtype, the distance of 1 from the next larger number.
_ROUNDING = {"float64": 2.0**-52, "float32": 2.0**-23, "bfloat16": 2.0**-7, "float16": 2.0**-10}

# What `AccumulatingModel` keeps on an instance, and what a trained function depends on.
_PLAIN: dict[str, Any] = {
    "_accumulation_steps": 1,
    "_microbatch_size": None,
    "_skip_nonfinite": False,
    "_accumulation_window": None,
    "_accumulation_warnings": frozenset(),
    "_num_skipped": None,
    "train_function": None,
}


def check_equivalence(
    model: keras.Model,
    x: Any,
    y: Any = None,
    sample_weight: Any = None,
    *,
    batch_size: int,
    accumulation_steps: int | None = None,
    microbatch_size: int | None = None,
    updates: int = 3,
) -> EquivalenceReport:
    """Compare accumulation with the whole batch, on a model of yours and a few of its rows.

    Trains the model through `fit` from its present weights, first with plain Keras on whole
    windows, then with accumulation on the same rows in the same order, and compares all weights and
    the state of all optimizers. How much of a difference is rounding is measured, too: by a third
    training, with plain Keras on whole windows again, that starts from weights of which each is
    rounded to a neighbouring number.

    Afterwards weights, optimizers, metrics, random state and settings are what they were. What was
    not built yet is built, as by a first batch. The model need not be an `AccumulatingModel`, and
    does not become one.

    For the comparison `Dropout` layers drop the same units of every row in all three trainings, and
    other random layers are switched off; the report says which.

    Args:
        model: a compiled `keras.Model`.
        x, y, sample_weight: rows as `fit` takes them: arrays, tensors, pandas objects, or nests of
            them, with rows along axis 0. No datasets or generators. The first
            `batch_size * accumulation_steps * updates` rows are used. With fewer, the last window
            is a partial one.
        batch_size: rows per batch of `fit`.
        accumulation_steps: batches per window, an integer >= 1. None takes the model's setting.
        microbatch_size: rows that each batch is split into, an integer >= 1. None takes the model's
            setting.
        updates: how many to make, an integer >= 1.

    Returns:
        An `EquivalenceReport`. Print it, or ask for its `equivalent`.

    Raises:
        TypeError, ValueError: an argument is not what it should be, or there are too few rows for
            two microbatches.
        RuntimeError: the model is not compiled, or an optimizer that only the `train_step` of an
            eager model knows is not built.

    Example:

    ```python
    model.compile("adam", "mse")
    report = check_equivalence(model, x, y, batch_size=32, microbatch_size=8)
    print(report)
    assert report.equivalent
    ```
    """
    data = (x, y, sample_weight)
    plan = make_plan(model, data, batch_size, accumulation_steps, microbatch_size, updates)
    return compare(model, plan)


def compare(model: Any, plan: Plan) -> EquivalenceReport:
    """Do what `check_equivalence` promises."""
    with (
        warnings.catch_warnings(record=True) as caught,
        _left_as_it_was(model, plan) as state,
        shared_randomness(model) as randomness,
    ):
        warnings.simplefilter("always")
        _fit(model, plan, plan.window_rows)
        whole = state.read()
        state.restore()
        rounded = _rounded(model, state)
        _fit(model, plan, plan.window_rows)
        rounding = _differences(state.read(), whole, state.values, rounded)
        state.restore()
        accumulate(
            model,
            accumulation_steps=plan.accumulation_steps,
            microbatch_size=plan.microbatch_size,
        )
        model.skip_nonfinite = plan.skip_nonfinite
        _fit(model, plan, plan.batch_size)
        differences = _differences(state.read(), whole, state.values, state.values)
        said = model._accumulation_warnings
        state.restore()
        report = EquivalenceReport(
            batch_size=plan.batch_size,
            accumulation_steps=plan.accumulation_steps,
            microbatch_size=plan.microbatch_size,
            updates=plan.updates,
            rows=plan.rows,
            variables=[
                VariableDifference(path, variable.dtype, math.prod(variable.shape), *pair)
                for path, variable, *pair in zip(
                    state.paths, state.variables, differences, rounding
                )
            ],
            is_finite=all(np.isfinite(value).all() for value in whole),
            random_layers=randomness,
            reasons=[],
        )
        if not report.equivalent:
            reasons = [*said, *_diagnosis.reasons(model, plan, report)]
            report = report._replace(reasons=reasons)
    for warning in caught:
        if str(warning.message) not in said:
            warnings.warn_explicit(
                warning.message, warning.category, warning.filename, warning.lineno
            )
    return report


class Plan(NamedTuple):
    """What is trained, and how.

    Attributes:
        data: x, y and sample weight, the rows that are used.
        rows: their number.
        batch_size: rows per batch of `fit` with accumulation.
        updates: windows that the rows make.
    """

    data: tuple[Any, Any, Any]
    rows: int
    batch_size: int
    accumulation_steps: int
    microbatch_size: int | None
    skip_nonfinite: bool
    updates: int

    @property
    def window_rows(self) -> int:
        return self.batch_size * self.accumulation_steps

    @property
    def microbatch_rows(self) -> int:
        return min(self.batch_size, self.microbatch_size or self.batch_size)

    def slice(self, begin: int, end: int) -> tuple[Any, Any, Any]:
        """Return the rows of `data` from `begin` up to `end`."""
        part: tuple[Any, Any, Any] = keras.tree.map_structure(
            lambda a: _slice(a, begin, end), self.data
        )
        return part


def _slice(array: Any, begin: int, end: int) -> Any:
    if isinstance(array, tf.SparseTensor):
        rest = [0] * (array.shape.rank - 1)
        return tf.sparse.slice(array, [begin, *rest], [end - begin, *array.shape[1:]])
    return None if array is None else array[begin:end]


def make_plan(
    model: Any,
    data: Any,
    batch_size: Any,
    accumulation_steps: Any,
    microbatch_size: Any,
    updates: Any,
) -> Plan:
    """Check all arguments, and take the rows that are needed."""
    if not isinstance(model, keras.Model):
        raise TypeError(_validate.not_a_model_message(model, "check_equivalence"))
    if not model.compiled:
        raise RuntimeError(_validate.not_compiled_message(model.name))
    batch_size = _validate.check_integer("batch_size", batch_size)
    updates = _validate.check_integer("updates", updates)
    if accumulation_steps is None:
        accumulation_steps = getattr(model, "accumulation_steps", 1)
    if microbatch_size is None:
        microbatch_size = getattr(model, "microbatch_size", None)
    skip_nonfinite = getattr(model, "skip_nonfinite", False)
    optimizers = optimizers_in(vars(model))
    steps, size, skip = _validate.check_settings(
        accumulation_steps, microbatch_size, skip_nonfinite, optimizers
    )
    rows = _validate.check_rows(data, keras.tree.flatten(data))
    plan = Plan(data, rows, batch_size, steps, size, skip, updates)
    plan = plan._replace(rows=min(rows, plan.window_rows * updates))
    if min(plan.rows, plan.window_rows) <= plan.microbatch_rows:
        raise ValueError(_validate.one_microbatch_message(rows, batch_size, steps, size))
    plan = plan._replace(data=plan.slice(0, plan.rows))
    return plan._replace(updates=-(-plan.rows // plan.window_rows))


def _fit(model: Any, plan: Plan, batch_size: int) -> None:
    x, y, sample_weight = plan.data
    model.fit(
        x,
        y,
        sample_weight=sample_weight,
        batch_size=batch_size,
        epochs=1,
        shuffle=False,
        verbose=0,
    )


class _State:
    """The variables of a model and its optimizers, with the values they had at first."""

    def __init__(self, model: Any) -> None:
        compared = {id(v): v for v in model.weights}
        self.paths = [v.path for v in compared.values()]
        for optimizer in optimizers_in(vars(model)):
            for variable in optimizer.variables:
                if id(variable) not in compared:
                    compared[id(variable)] = variable
                    self.paths.append(_path(optimizer, variable))
        self.variables = list(compared.values())
        others = {id(v): v for v in [*model.variables, *model.metrics_variables]}
        self._others = [v for key, v in others.items() if key not in compared]
        self.values = self.read()
        self._values_of_others = [v.numpy() for v in self._others]

    def read(self) -> list[Any]:
        return [v.numpy() for v in self.variables]

    def restore(self) -> None:
        for variable, value in zip(self.variables, self.values):
            variable.assign(value)
        for variable, value in zip(self._others, self._values_of_others):
            variable.assign(value)


def _path(optimizer: Any, variable: Any) -> str:
    has_name = variable.path.startswith(f"{optimizer.name}/")
    return str(variable.path) if has_name else f"{optimizer.name}/{variable.path}"


@contextlib.contextmanager
def _left_as_it_was(model: Any, plan: Plan) -> Iterator[_State]:
    """Make a plain Keras model of `model`, with everything built. In the end undo all but that."""
    attributes, model_class = vars(model), type(model)
    settings = {name: attributes[name] for name in _PLAIN if name in attributes}
    attributes.update(_PLAIN)
    try:
        _build(model, plan)
        before = {name: value for name, value in attributes.items() if name not in _PLAIN}
        random_state, numpy_state = random.getstate(), np.random.get_state()
        with model.distribute_strategy.scope():
            state = _State(model)
            try:
                yield state
            finally:
                # `model.__class__` of a wrapped model is the class that it had before.
                object.__dict__["__class__"].__set__(model, model_class)
                state.restore()
                random.setstate(random_state)
                np.random.set_state(numpy_state)
                for name in set(attributes) - set(before):
                    del attributes[name]
                attributes.update(before)
    finally:
        for name in _PLAIN:
            attributes.pop(name, None)
        attributes.update(settings)


def _build(model: Any, plan: Plan) -> None:
    """Make all variables, without a step of training."""
    data = keras.tree.map_structure(_as_tensor, plan.slice(0, plan.microbatch_rows))
    with model.distribute_strategy.scope():
        in_graph = not model.run_eagerly
        if not model.built and not (in_graph and _strategy.num_replicas() == 1):
            with contextlib.suppress(NotImplementedError):  # of a model that has no `call`
                model(data[0])
        if model.built and model.optimizer is not None:
            _strategy.build_optimizer(model.optimizer, model.trainable_variables)
        if in_graph:
            _strategy.trace(model, keras.utils.pack_x_y_sample_weight(*data))
    unbuilt = [o.name for o in optimizers_in(vars(model)) if not o.built]
    if unbuilt:
        raise RuntimeError(_validate.unbuilt_message(unbuilt))


def _as_tensor(array: Any) -> Any:
    """Return what Keras makes of an array: floating-point numbers have its `floatx`."""
    if array is None or isinstance(array, (tf.Tensor, tf.RaggedTensor, tf.SparseTensor)):
        return array
    array = np.asarray(array)
    dtype = keras.config.floatx() if array.dtype.kind == "f" else array.dtype
    return tf.convert_to_tensor(array.astype(dtype))


def _rounded(model: Any, state: _State) -> list[Any]:
    """Change weights by what rounding changes a number of 1, up or down, and return all values."""
    dtypes = {layer.compute_dtype for layer in model._flatten_layers()}
    step = max(_ROUNDING.get(dtype, 0.0) for dtype in dtypes)
    generator = np.random.default_rng(0)
    for variable in model.trainable_weights:
        value = variable.numpy()
        sign = generator.choice([-step, step], size=value.shape)
        variable.assign((value + value * sign).astype(value.dtype))
    return state.read()


def _differences(
    values: Sequence[Any], reference: Sequence[Any], start: Sequence[Any], own_start: Sequence[Any]
) -> list[float]:
    """Return the relative difference of the change of each variable."""
    return [
        _relative(_change(w, w0), _change(r, r0))
        for w, r, r0, w0 in zip(values, reference, start, own_start)
    ]


def _change(value: Any, start: Any) -> Any:
    return value.astype("float64") - start.astype("float64")


def _relative(change: Any, reference: Any) -> float:
    error, size = float(np.linalg.norm(change - reference)), float(np.linalg.norm(reference))
    if not error:
        return 0.0
    return error / size if size else math.inf
