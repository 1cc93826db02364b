"""Run the `train_step` of a model in a trial, on any samples and from any values of variables."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator
from typing import NamedTuple

import keras
import numpy as np
from keras import ops

from ga_model.base import _numbers
from ga_model.base._identity import is_in, unique
from ga_model.base._internals import iterations_variable, layers_in, seed_ids
from ga_model.base._method_patch import without_training
from ga_model.base._types import Nest, Scalar
from ga_model.core.backend import Backend
from ga_model.core.backend_types import GROUPS
from ga_model.core.batch import samples_between
from ga_model.core.losses import Kinds, Position
from ga_model.core.proof.noted import Draws
from ga_model.core.proof.weighing import Seen
from ga_model.core.proof.windows import MOVES_BY, About, Change, Outcome
from ga_model.core.recorder import record
from ga_model.core.statistics import is_known
from ga_model.core.user_code import parts_of
from ga_model.core.weights import FullBatch

_ROUNDING = {"float16": 2.0**-11, "bfloat16": 2.0**-8}  # relative, of one operation


class Step(NamedTuple):
    """The `train_step` of a model, and the kind of windows to try it for.

    Attributes:
        model: the model.
        backend: its backend.
        is_own: whether the step is the user's own.
        is_split: whether a window is one split batch, for which weights of all terms are known.
        is_single_microbatch: whether windows are one microbatch: only updates can differ.
    """

    model: keras.Model
    backend: Backend
    is_own: bool
    is_split: bool
    is_single_microbatch: bool = False


class StepRunner:
    """Runs the `train_step` of a model.

    The model's variables keep what a run writes to them, and the next one starts from it.

    Args:
        step: the step.
        data: samples of the trial, as arrays.
        is_folded: whether the weight of a part is folded into its loss, as in Keras's step.
        kinds: reductions of the user's own losses.
        restore: restores the model.

    Attributes:
        variables: all variables that are read and changed.
        names: names of the variables, for messages.
        trained: indices of the trained variables.
        ignored: indices of the variables whose values after a step are ignored: random state, and
            state of metrics that wait for the full batch.
        perturbed: indices of the variables that starts may change, if they are trained or scalars.
        scales: indices of the variables that scale losses.
        epsilon: rounding of one float32 operation, relative.
        has_warning: whether recording the step warns about its loss terms.
        has_own_loss: whether the loss, or a part of it, is the user's own.
        says_weight: whether compiled losses or the user's rule determine the weight; set by a run.
        is_folded: as passed; may be set later.
        is_plain: whether folding leaves gradients unchanged; set by a run.
        written: paths of the variables that the step wrote to.
        of_shapes, unwatched: see `Noted`.
    """

    def __init__(
        self, step: Step, data: Nest, is_folded: bool, kinds: Kinds, restore: Callable[[], None]
    ) -> None:
        model, backend = self._model, self._backend = step[:2]
        self._data = data
        self._runs = itertools.count(1)
        self._is_split = step.is_split
        self._kinds = kinds
        self._restore = restore
        self.is_folded, self.is_plain = is_folded, True
        self.has_warning = self.has_own_loss = self.says_weight = False
        self.written: set[str] = set()
        optimizers = backend.optimizers()
        if not backend.has_several_optimizers:  # a step gets no variables of other optimizers
            optimizers = [model.optimizer]
        numbers = [v for o in optimizers for v in o.variables if len(v.shape) == 0]  # such as rates
        counters = [iterations_variable(optimizer) for optimizer in optimizers]
        groups = (model.trainable_variables, model.non_trainable_variables, model.metrics_variables)
        self.variables = unique([*(v for group in groups for v in group), *counters, *numbers])
        self._places = {id(variable): place for place, variable in enumerate(self.variables)}
        metrics = [part for metric in model.metrics for part in parts_of(metric)]
        names = {id(v): f"the metric {part.name!r}" for part in metrics for v in part.variables}
        self.names = [names.get(id(v), v.path) for v in self.variables]
        scales = [getattr(optimizer, "dynamic_scale", None) for optimizer in optimizers]
        self.scales = [self._places[id(scale)] for scale in scales if scale is not None]
        self.trained = range(len(model.trainable_variables))
        random = seed_ids(model)
        self.ignored = {place for key, place in self._places.items() if key in random}
        unperturbed = random | set(map(id, [*model.metrics_variables, *numbers]))
        self.perturbed = {p for key, p in self._places.items() if key not in unperturbed}
        # By the samples of a run and of the window: variables and counter of each optimizer, and
        # `Outcome.about`.
        self._static: dict[tuple[int, int], tuple[list[tuple[list[int], int]], About]] = {}
        self.epsilon = float(np.finfo("float32").eps)
        self._dtypes = {layer.compute_dtype for layer in layers_in(model)}  # runs add theirs
        self.of_shapes, self.unwatched = set[str](), set[str]()

    @property
    def rounding(self) -> float:
        """The relative rounding of one operation, in the lowest precision seen so far."""
        return max([self.epsilon, *(_ROUNDING[d] for d in self._dtypes if d in _ROUNDING)])

    def values(self) -> Iterator[np.ndarray]:
        """Yield the present values of all variables."""
        return iter(self._backend.read(self.variables))

    def begin(self, *changes: Change) -> None:
        """Restore the model, and change the values of variables one after the other."""
        self._restore()
        for change in changes:
            changed = (change(place, value) for place, value in enumerate(self.values()))
            pairs = zip(self.variables, changed)
            self._backend.assign((v, value) for v, value in pairs if value is not None)

    def run(self, begin: int, end: int, whole: Outcome | None = None) -> Outcome:
        """Run the step on the samples from `begin` up to `end`.

        Args:
            whole: the outcome of all samples of the window, of which these are a part and make no
                update; or None if these are all.

        Returns:
            The outcome, without the values of variables.
        """
        rows = total = end - begin
        totals: list[np.ndarray] = []
        moves_by, number = MOVES_BY, 0
        if whole is not None:
            total, moves_by = whole.seen.rows, 0.0
            if rows < total:  # draws per batch differ between parts only
                totals, number = whole.terms, next(self._runs)
        run = self._backend.compiled(
            ("trial", rows, total), functools.partial(self._run, rows, total), GROUPS
        )
        numbers_of_run = np.float32(moves_by), np.int32(begin), np.int32(number)
        data = samples_between(self._data, begin, end)
        arguments = self._backend.as_traced(data), totals, *numbers_of_run  # as in training
        (rates, numbers, logs, loss_weight), scalars, fields = keras.tree.map_structure(
            lambda x: None if x is None else ops.convert_to_numpy(x),
            run(*self._backend.copied(arguments)),
        )
        applied, about = self._static[rows, total]
        rates = [float(rate) for rate in rates] or [0.0] * len(applied)
        return Outcome(
            places=[place for places, _ in applied for place in places],
            rates=[rate for (places, _), rate in zip(applied, rates) for _ in places],
            counters=[counter for (_, counter), rate in zip(applied, rates) if rate],
            numbers={**dict(enumerate(numbers)), **logs},
            about=about,
            seen=Seen(rows, scalars, loss_weight),
            **fields,
        )

    def _run(
        self,
        rows: int,
        total: int,
        data: Nest,
        totals: list[Scalar],
        moves_by: Scalar,
        begin: Scalar,
        number: Scalar,
    ) -> tuple[Nest, dict[str, Scalar], dict[str, Nest]]:
        draws = Draws(rows, total, begin, number)
        step = functools.partial(self._step, draws, totals, moves_by)
        (numbers, fields), noted = self._backend.noting(step, (data,), draws)
        self._dtypes |= {str(dtype).removeprefix("torch.") for dtype in noted.dtypes}
        self.of_shapes |= noted.of_shapes
        self.unwatched |= noted.unwatched
        return numbers, noted.scalars, fields

    def _step(
        self, draws: Draws, totals: list[Scalar], moves_by: Scalar, data: Nest
    ) -> tuple[tuple[Nest, ...], dict[str, Nest]]:
        """Return the numbers that an outcome is computed from, and fields of it."""
        model, backend = self._model, self._backend
        rows, total, whole = draws.rows, draws.total, None
        is_part = rows < total
        if is_part and self._is_split:
            whole = FullBatch(_numbers.float64(total), True, lambda: totals)
        zero, parts = _numbers.float64(0.0), _numbers.float64(3.0 if is_part else 1.0)
        # The unit is the weight, so gradients are those of the loss.
        position = Position(1.0, parts, 1.0, draws.begin == 0, zero, whole)
        moves_by = 0.0 if is_part else moves_by  # a Python number, known in a trace
        options = {"is_own": not self.is_folded, "moves_by": moves_by, "waits": is_part}
        with (
            model._accumulation.holding_back(),
            without_training.of(filter(is_known, layers_in(model))),  # BatchNormalization only
            record(model, data, position, backend, kinds=self._kinds, **options) as recording,
        ):
            logs, written = backend.run_step(data)
        if is_part and not self._is_split:
            recording.update_metrics()  # as after each batch of training
        self.written |= {variable.path for variable in written}
        losses = recording.losses
        if is_part:  # waiting metrics are not updated yet; their numbers are compared instead
            waiting = {id(v) for update, _ in recording.updates() for v in update.metric.variables}
            self.ignored |= {place for key, place in self._places.items() if key in waiting}
        self.has_warning = self.has_warning or losses.has_warning
        self.has_own_loss = losses.has_own
        applied = recording.applied
        counters = [iterations_variable(a.optimizer) for a in applied]
        of_applied = [
            ([self._places[id(v)] for v in a.variables], self._places[id(counter)])
            for a, counter in zip(applied, counters)
        ]
        self.says_weight = recording.says_weight
        self.is_plain = self.is_plain and losses.terms().is_plain and not self.scales
        terms = [0.0 if term.weight is None else term.weight for term in losses.compiled]
        loss_weight = losses.terms().weight
        loss_weight = None if loss_weight is None else _numbers.float64(loss_weight)
        own_logs = recording.split_logs(logs)[0]
        metrics = [update.metric.name for update, _ in recording.updates()]
        are_losses = [mean is not None for mean in recording.means()]
        about: About = dict(enumerate(zip((f"the metric {n!r}" for n in metrics), are_losses)))
        about |= {name: (f"the log {name!r}", True) for name in own_logs}
        self._static[rows, total] = of_applied, about
        fields = {
            "gradients": recording.gradients,
            "terms": [_numbers.float64(weight) for weight in terms],
            "compiled": dict(losses.values),
            "added": dict(enumerate(map(_numbers.float64, losses.added))),
            "at_updates": {
                self._places[id(v)]: value
                for v, value in recording.at_updates
                if id(v) in self._places and not is_in(v, counters)
            },
        }
        numbers = recording.rates, recording.numbers(), own_logs, loss_weight
        recording.release()
        return numbers, fields
