"""Check on a user's own model whether accumulation makes the updates of the full batch."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
import random
import warnings
from collections.abc import Iterator
from typing import Any

import keras
import numpy as np

from ga_model._settings import UNCHANGED, passed
from ga_model._wrap import accumulate
from ga_model.base._call_again import Attributes
from ga_model.base._internals import global_seed, is_built, layers_in, raw
from ga_model.check import _diagnosis
from ga_model.check._backend import backend
from ga_model.check._differences import (
    add_rounding_errors,
    change,
    coarser,
    compute_dtypes,
    relative_differences,
)
from ga_model.check._equivalence_report import EquivalenceReport, VariableDifference
from ga_model.check._plan import Plan, make_plan
from ga_model.check._randomness import Randomness, shared_randomness
from ga_model.recording._models import optimizers_in
from ga_model.recording._python_state import others_of_user, python_state

# What a model keeps of accumulation, and the function that was traced by its settings.
_OF_TRAINING = ("_accumulation", "train_function")


def check_equivalence(
    model: keras.Model,
    x: Any,
    y: Any = None,
    sample_weight: Any = None,
    *,
    batch_size: int,
    accumulation_steps: int | None = UNCHANGED,
    microbatch_size: int | None = UNCHANGED,
    loss_over: str | None = UNCHANGED,
    updates: int = 3,
) -> EquivalenceReport:
    """Compare accumulation with the full batch, on your own model and a few samples.

    Trains the model with `fit` from its current weights: first with plain Keras on full batches,
    then with accumulation on the same samples in the same order. It compares all weights and the
    state of all optimizers. To measure how much of a difference is rounding, it trains plain Keras
    on full batches again, from weights with an added rounding error.

    Afterwards, weights, optimizers, metrics, random state, settings and all other variables of the
    step are restored, and numbers, arrays, lists and dicts in attributes of the model, its layers
    and objects of the same packages. A model that was not built yet is built, as by a first batch.
    Not restored are other Python objects that training changes, and in eager mode the state of
    TensorFlow's own random operations. The model need not be an `AccumulatingModel`, and does not
    become one.

    For the comparison, `Dropout` layers drop the same units of every sample in all three trainings,
    and other random layers of Keras are switched off; the report names them.

    Args:
        model: a compiled `keras.Model`.
        x, y, sample_weight: samples, as you pass them to `fit`: arrays, tensors, pandas objects, or
            nested structures of them, with samples on axis 0. No datasets or generators. The first
            `batch_size * accumulation_steps * updates` samples are used. With fewer, the last
            window is partial.
        batch_size: samples per batch of `fit`.
        accumulation_steps: batches per window, an integer >= 1. None is 1. By default, the model's
            setting.
        microbatch_size: samples per microbatch, an integer >= 1. None keeps batches whole. By
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
    data = (x, y, sample_weight)
    plan = make_plan(
        model,
        data,
        batch_size,
        updates,
        **passed(
            accumulation_steps=accumulation_steps,
            microbatch_size=microbatch_size,
            loss_over=loss_over,
        ),
    )
    return compare(model, plan)


def compare(model: Any, plan: Plan) -> EquivalenceReport:
    """Do what `check_equivalence` promises."""
    said: list[str] = []  # warnings of accumulation go into the report
    with (
        _other_warnings_than(said),
        _left_as_it_was(model, plan) as state,
        shared_randomness(model) as randomness,
        state.with_python(),
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
    drawn = _num_drawn()
    _fit(model, plan, plan.window_rows)
    if _num_drawn() != drawn:
        randomness.left.append(model.name)
    whole = state.read()
    state.restore()
    add_rounding_errors(model)
    rounded = state.read()
    _fit(model, plan, plan.window_rows)
    rounding = relative_differences(state.read(), whole, state.values, rounded)
    state.restore()
    accumulate(model, **plan.settings.config())
    _fit(model, plan, plan.batch_size)
    differences = relative_differences(state.read(), whole, state.values, state.values)
    said += sorted(model._accumulation.warnings)
    found = "batch" if model._accumulation.takes_full_batch() else "microbatch"
    state.restore()
    weights = {id(v) for v in model.weights}
    lowest = functools.reduce(coarser, compute_dtypes(model).values(), "float64")
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
                dtype=coarser(str(variable.dtype), lowest),
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
            np.isfinite(change(value, start)).all() for value, start in zip(whole, state.values)
        ),
        random_layers=randomness,
        reasons=list(said),
    )
    if not report.equivalent:
        plan = plan._replace(settings=dataclasses.replace(plan.settings, loss_over=found))
        found_reasons = _diagnosis.reasons(model, plan, report)
        report = report._replace(reasons=found_reasons)
    return report


def _num_drawn() -> Any:
    """Return what changes when numbers are drawn by `keras.random` without a seed."""
    seed = global_seed()
    return None if seed is None else backend.value_of(seed.state).tolist()


def _fit(model: Any, plan: Plan, batch_size: int) -> None:
    x, y, sample_weight = plan.data
    weights = {} if sample_weight is None else {"sample_weight": sample_weight}
    model.fit(x, y, batch_size=batch_size, epochs=1, shuffle=False, verbose=0, **weights)


class _State:
    """The variables of a model and its optimizers, with the values they had at first.

    On TensorFlow also all other variables of the process, which the step may use.

    Args:
        model: the model.
    """

    def __init__(self, model: Any) -> None:
        self._model = model
        self._python: Attributes | None = None
        compared = {id(v): v for v in model.weights}
        self.paths = [v.path for v in compared.values()]
        for optimizer in optimizers_in(vars(model)):
            for variable in optimizer.variables:
                if id(variable) not in compared:
                    compared[id(variable)] = variable
                    self.paths.append(_path(optimizer, variable))
        self.variables = list(compared.values())
        known = {id(v.value) for v in self.variables}
        others = {id(raw(v)): v for v in [*model.variables, *model.metrics_variables]}
        self._others = [v for key, v in others.items() if key not in known]
        self.values = self.read()
        self._values_of_others = [backend.value_of(v) for v in self._others]
        self._all_variables = backend.AllVariables(but=[*self.variables, *self._others])

    def read(self) -> list[Any]:
        return [backend.value_of(v) for v in self.variables]

    def restore(self) -> None:
        for variable, value in zip(self.variables, self.values):
            variable.assign(value)
        for variable, value in zip(self._others, self._values_of_others):
            variable.assign(value)
        self._all_variables.put_back()
        if self._python is not None:
            self._restore_python(self._python)

    def _restore_python(self, python: Attributes) -> None:
        attributes = vars(self._model)
        kept = {name: attributes[name] for name in _OF_TRAINING if name in attributes}
        python.put_back()
        attributes.update(kept)

    def with_new(self) -> Any:
        """Restore also variables that are made in a block, to the values that they begin with."""
        return self._all_variables.with_new()

    @contextlib.contextmanager
    def with_python(self) -> Iterator[None]:
        """Restore in a block, and after it, also the Python state of the model."""
        parts = [*layers_in(self._model), *others_of_user(self._model)]
        self._python = python = Attributes(parts, has_arrays=True)
        try:
            yield
        finally:
            self._restore_python(python)
            self._python = None


def _path(optimizer: Any, variable: Any) -> str:
    has_name = variable.path.startswith(f"{optimizer.name}/")
    return str(variable.path) if has_name else f"{optimizer.name}/{variable.path}"


@contextlib.contextmanager
def _left_as_it_was(model: Any, plan: Plan) -> Iterator[_State]:
    """Make a plain Keras model of `model`, with everything built. In the end undo all but that."""
    attributes, model_class = vars(model), type(model)
    kept = {name: attributes.pop(name) for name in _OF_TRAINING if name in attributes}
    attributes["train_function"] = None
    try:
        random_states = _random_states()
        is_new = not model.built
        python = python_state(model) if is_built(model, model.metrics) else None
        _build(model, plan)
        if python is not None:
            python.put_back()
        if is_new:  # layers may have drawn their seeds
            random_states = _random_states()
        before = {name: value for name, value in attributes.items() if name not in _OF_TRAINING}
        with backend.scope(model):
            state = _State(model)
            try:
                with state.with_new():
                    yield state
            finally:
                # `model.__class__` of a wrapped model is the class that it had before.
                object.__dict__["__class__"].__set__(model, model_class)
                state.restore()
                random.setstate(random_states[0])
                np.random.set_state(random_states[1])
                backend.set_random_state(random_states[2])
                for name in set(attributes) - set(before):
                    del attributes[name]
                attributes.update(before)
    finally:
        for name in _OF_TRAINING:
            attributes.pop(name, None)
        attributes.update(kept)


def _random_states() -> tuple[Any, Any, Any]:
    return random.getstate(), np.random.get_state(), backend.random_state()


def _build(model: Any, plan: Plan) -> None:
    """Make all variables, without a step of training."""
    data = keras.tree.map_structure(backend.as_tensor, plan.slice(0, plan.microbatch_rows))
    with backend.scope(model):
        is_traced = backend.build(model, data)
    unbuilt = [o.name for o in optimizers_in(vars(model)) if not o.built]
    if unbuilt and not is_traced:  # a trace has built what it uses
        raise RuntimeError(_unbuilt_message(unbuilt))


def _unbuilt_message(optimizers: list[str]) -> str:
    return (
        "`check_equivalence` restores the optimizer state afterwards, so optimizers must be built. "
        f"Received: optimizers that are not: {optimizers}. "
        "Call `optimizer.build(variables)` first, or compile without `run_eagerly=True`."
    )
