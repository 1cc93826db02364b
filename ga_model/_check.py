"""Show on a user's own model whether accumulation gives the updates of the whole batch."""

from __future__ import annotations

import contextlib
import functools
import math
import random
import warnings
from collections.abc import Iterator, Sequence
from typing import Any

import keras
import numpy as np

from ga_model import _diagnosis, _messages, _optimizers, _strategy
from ga_model._equivalence_report import EquivalenceReport, VariableDifference
from ga_model._internals import layers_in, raw
from ga_model._plan import Plan, as_tensor, make_plan
from ga_model._randomness import Randomness, shared_randomness
from ga_model._recorder import optimizers_in
from ga_model._wrap import accumulate

# The distance of 1 from the next larger number.
_ROUNDING = {"float64": 2.0**-52, "float32": 2.0**-23, "bfloat16": 2.0**-7, "float16": 2.0**-10}

# What `AccumulatingModel` keeps on an instance, and what a trained function depends on.
_PLAIN: dict[str, Any] = {
    "_accumulation_steps": 1,
    "_microbatch_size": None,
    "_is_automatic": False,
    "_is_scheduled": False,
    "_gradient_noise": None,
    "_skip_nonfinite": False,
    "_loss_over": "auto",
    "_adds_up": True,
    "_has_read_loss": False,
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
    loss_over: str | None = None,
    updates: int = 3,
) -> EquivalenceReport:
    """Compare accumulation with the whole batch, on a model of yours and a few of its rows.

    Trains the model through `fit` from its present weights, first with plain Keras on whole
    windows, then with accumulation on the same rows in the same order, and compares all weights and
    the state of all optimizers. How much of a difference is rounding is measured, too: by a third
    training, with plain Keras on whole windows again, that starts from weights to which a rounding
    error was added.

    Afterwards weights, optimizers, metrics, random state and settings are what they were, and so is
    any other variable that the step uses. What was not built yet is built, as by a first batch. Not
    put back are attributes of layers and other Python objects that training changes, and in eager
    mode what TensorFlow's own random operations draw. The model need not be an `AccumulatingModel`,
    and does not become one.

    For the comparison `Dropout` layers drop the same units of every row in all three trainings, and
    Keras's other random layers are switched off; the report says which.

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
        loss_over: "auto", "microbatch" or "batch". None takes the model's setting.
        updates: how many to make, an integer >= 1.

    Returns:
        An `EquivalenceReport`. Print it, or ask for its `equivalent`.

    Raises:
        TypeError, ValueError: an argument is not what it should be, there are too few rows for two
            microbatches.
        RuntimeError: the model is not compiled, or an optimizer that only the `train_step` of an
            eager model knows is not built.
        NotImplementedError: the model was made for several replicas.

    Example:

    ```python
    model.compile("adam", "mse")
    report = check_equivalence(model, x, y, batch_size=32, microbatch_size=8)
    print(report)
    assert report.equivalent
    ```
    """
    data = (x, y, sample_weight)
    plan = make_plan(
        model, data, batch_size, accumulation_steps, microbatch_size, loss_over, updates
    )
    return compare(model, plan)


def compare(model: Any, plan: Plan) -> EquivalenceReport:
    """Do what `check_equivalence` promises."""
    said: list[str] = []  # what accumulation has to say about the model goes into the report
    with (
        _other_warnings_than(said),
        _left_as_it_was(model, plan) as state,
        shared_randomness(model) as randomness,
    ):
        return _compared(model, plan, state, randomness, said)


@contextlib.contextmanager
def _other_warnings_than(said: list[str]) -> Iterator[None]:
    """Let warnings through, once each, but those that are listed in the end."""
    caught: list[warnings.WarningMessage] = []
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            yield
    finally:
        for text, warning in {str(w.message): w for w in caught}.items():
            if text not in said:
                warnings.warn_explicit(
                    warning.message, warning.category, warning.filename, warning.lineno
                )


def _compared(
    model: Any, plan: Plan, state: _State, randomness: Randomness, said: list[str]
) -> EquivalenceReport:
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
        skip_nonfinite=plan.skip_nonfinite,
        loss_over=plan.loss_over,
    )
    _fit(model, plan, plan.batch_size)
    differences = _differences(state.read(), whole, state.values, state.values)
    said += sorted(model._accumulation_warnings)
    found = "batch" if model._takes_full_batch() else "microbatch"
    state.restore()
    weights = {id(v) for v in model.weights}
    lowest = functools.reduce(_coarser, _computed_in(model).values(), "float64")
    report = EquivalenceReport(
        batch_size=plan.batch_size,
        accumulation_steps=plan.accumulation_steps,
        microbatch_size=plan.microbatch_size,
        loss_over=plan.loss_over,
        updates=plan.updates,
        rows=plan.rows,
        variables=[
            VariableDifference(
                path=path,
                dtype=_coarser(str(variable.dtype), lowest),
                size=math.prod(variable.shape),
                is_moved_weight=id(variable) in weights and bool(np.any(value != start)),
                difference=difference,
                rounding=by_rounding,
            )
            for path, variable, value, start, difference, by_rounding in zip(
                state.paths, state.variables, whole, state.values, differences, rounding
            )
        ],
        is_finite=all(
            np.isfinite(_change(value, start)).all() for value, start in zip(whole, state.values)
        ),
        random_layers=randomness,
        reasons=list(said),
    )
    if not report.equivalent:
        found_reasons = _diagnosis.reasons(model, plan._replace(loss_over=found), report)
        report = report._replace(reasons=found_reasons)
    return report


def _fit(model: Any, plan: Plan, batch_size: int) -> None:
    x, y, sample_weight = plan.data
    weights = {} if sample_weight is None else {"sample_weight": sample_weight}
    model.fit(x, y, batch_size=batch_size, epochs=1, shuffle=False, verbose=0, **weights)


class _State:
    """The variables of a model and its optimizers, with the values they had at first.

    Args:
        model: the model.
        traced: variables that its `train_step` uses, whoever has them.
    """

    def __init__(self, model: Any, traced: Sequence[Any]) -> None:
        compared = {id(v): v for v in model.weights}
        self.paths = [v.path for v in compared.values()]
        for optimizer in optimizers_in(vars(model)):
            for variable in optimizer.variables:
                if id(variable) not in compared:
                    compared[id(variable)] = variable
                    self.paths.append(_path(optimizer, variable))
        self.variables = list(compared.values())
        known = {id(v.value) for v in self.variables}
        others = {id(raw(v)): v for v in [*model.variables, *model.metrics_variables, *traced]}
        self._others = [v for key, v in others.items() if key not in known]
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
        random_states = random.getstate(), np.random.get_state()
        is_new = not model.built
        traced = _build(model, plan)
        if is_new:  # layers may have drawn their seeds
            random_states = random.getstate(), np.random.get_state()
        before = {name: value for name, value in attributes.items() if name not in _PLAIN}
        with model.distribute_strategy.scope():
            state = _State(model, traced)
            try:
                yield state
            finally:
                # `model.__class__` of a wrapped model is the class that it had before.
                object.__dict__["__class__"].__set__(model, model_class)
                state.restore()
                random.setstate(random_states[0])
                np.random.set_state(random_states[1])
                for name in set(attributes) - set(before):
                    del attributes[name]
                attributes.update(before)
    finally:
        for name in _PLAIN:
            attributes.pop(name, None)
        attributes.update(settings)


def _build(model: Any, plan: Plan) -> Sequence[Any]:
    """Make all variables, without a step of training, and return those that `train_step` uses.

    Eagerly that is known of the model's own optimizer only, and none are returned.
    """
    data = keras.tree.map_structure(as_tensor, plan.slice(0, plan.microbatch_rows))
    with model.distribute_strategy.scope():
        if not model.run_eagerly:
            return _strategy.trace(model, keras.utils.pack_x_y_sample_weight(*data))
        if not model.built:
            with contextlib.suppress(NotImplementedError):  # of a model that has no `call`
                model(data[0])
        if model.optimizer is not None and model.built:
            _optimizers.build(model.optimizer, model.trainable_variables)
    unbuilt = [o.name for o in optimizers_in(vars(model)) if not o.built]
    if unbuilt:
        raise RuntimeError(_messages.unbuilt_message(unbuilt))
    return []


def _rounded(model: Any, state: _State) -> list[Any]:
    """Add a rounding error to every weight, up or down, and return all values.

    It is one of the dtype that the weight's layer computes in. Frozen weights have one, too.
    """
    computed_in = _computed_in(model)
    generator = np.random.default_rng(0)
    for variable in model.weights:
        if variable.dtype in _ROUNDING:
            value = variable.numpy()
            finite = np.where(np.isfinite(value), value, 0)
            error = _ROUNDING[_coarser(str(variable.dtype), computed_in[id(variable)])]
            sign = generator.choice([-error, error], size=value.shape)
            variable.assign((value + finite * sign).astype(value.dtype))
    return state.read()


def _computed_in(model: Any) -> dict[int, str]:
    """Return what each weight's layer computes in, by the identity of the weight."""
    computed_in = {}
    for layer in layers_in(model):  # the layers of a layer follow it
        computed_in.update({id(v): layer.compute_dtype for v in layer.weights})
    return computed_in


def _coarser(dtype: str, other: str) -> str:
    """Return the dtype that rounds more. One that does not round, such as int64, stays."""
    rounds_more = dtype in _ROUNDING and _ROUNDING.get(other, 0.0) > _ROUNDING[dtype]
    return other if rounds_more else dtype


def _differences(
    values: Sequence[Any], reference: Sequence[Any], start: Sequence[Any], own_start: Sequence[Any]
) -> list[float]:
    """Return the relative difference of the change of each variable."""
    return [
        _relative(_change(w, w0), _change(r, r0))
        for w, r, r0, w0 in zip(values, reference, start, own_start)
    ]


def _change(value: Any, start: Any) -> Any:
    """Return what has been added to the start. That is zero also where both are infinite."""
    with np.errstate(all="ignore"):
        change = value.astype("float64") - start.astype("float64")
        return np.where((value == start) | (np.isnan(value) & np.isnan(start)), 0.0, change)


def _relative(change: Any, reference: Any) -> float:
    with np.errstate(all="ignore"):
        error, size = np.linalg.norm(change - reference), np.linalg.norm(reference)
    if not error:
        return 0.0
    return float(error / size) if size else math.inf
