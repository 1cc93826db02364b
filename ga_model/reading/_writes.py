"""Which variables a step writes to, besides those it passes to its optimizers.

A step of a window runs once per microbatch. What it writes by itself (a target network, a queue,
the state of a layer) then moves more often than with the full batch; and an optimizer that is not
listened to is applied to gradients of microbatches. Both is read from the graph, where one is
made. Eagerly, values are compared before and after a step.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import keras
import tensorflow as tf

from ga_model.base._context import ThreadValue, graph_being_made
from ga_model.base._identity import is_in, unique
from ga_model.base._internals import counter_of, layers_in, own_weights, raw, variables_to_train
from ga_model.base._internals_tf import written_handles
from ga_model.reading._dependence import dependence_of
from ga_model.reading._following import walk_back, written_from
from ga_model.replicas import _strategy
from ga_model.replicas._all_variables import living

# Variables that may be written to once per microbatch, by the last part of their names: where
# random numbers begin.
_HARMLESS = ("seed_generator_state", "StateVar")

READS = ("ReadVariableOp", "ResourceGather", "ResourceGatherNd", "VariableShape")

_VARIABLES = (keras.Variable, tf.Variable)
_OF_BATCH = ("Placeholder", "IteratorGetNext")


class Written(NamedTuple):
    """What a step has written to.

    Attributes:
        normalization: BatchNormalization layers whose statistics have moved.
        optimizers: optimizers that were applied.
        others: names of other variables. Metrics and random state are none of them, and neither
            are those of known optimizers that every microbatch gives the same value.
        metrics: variables of metrics, with those of the ones that wait.
    """

    normalization: list[Any]
    optimizers: list[Any]
    others: list[str]
    metrics: list[Any]


NOTHING = Written([], [], [], [])

# Of a graph, where operations begin and end that are left out: a list while a step is recorded.
left_out = ThreadValue()


@contextlib.contextmanager
def unseen() -> Iterator[None]:
    """Ignore writes in this block: they are undone, or reported elsewhere."""
    graph = graph_being_made()
    first = 0 if graph is None else len(graph.get_operations())
    try:
        yield
    finally:
        if graph is not None:
            last = len(graph.get_operations())
            if left_out.get() is not None:
                left_out.get().append((graph, first, last))


class Writes:
    """What is written to from now on, in the graph that is made or eagerly.

    Args:
        model: the model whose step runs.
    """

    def __init__(self, model: Any) -> None:
        self._model = model
        self._present = {id(variable) for variable in _of_layers(model)}
        # Handles that an operation of the graph itself writes to, and no branch: a variable that
        # is made while a graph is gets its first value in one.
        self._assigned: set[int] = set()
        # Of operations their numbers, and handles that they write to.
        self._written: list[tuple[int, Any, Any]] = []
        # Eagerly, optimizers that there were before, and those of them that were not built.
        self._optimizers: list[Any] = []
        self._unbuilt: list[Any] = []
        self._graph = graph_being_made()
        if self._graph is not None:
            self._number = len(self._graph.get_operations())
        else:
            self._optimizers = optimizers = living(keras.optimizers.Optimizer)
            self._unbuilt = [optimizer for optimizer in optimizers if not optimizer.built]
            variables = [*_of_layers(model), *_of_optimizers(optimizers)]
            variables += map(counter_of, self._unbuilt)
            variables += [v for v in vars(model).values() if isinstance(v, tf.Variable)]
            pairs = [(v, tf.identity(v)) for v in map(raw, variables)]
            # One that a graph made, which was given up, has no value.
            self._before = [(v, value) for v, value in pairs if v.shape == value.shape]

    def read(
        self,
        known: Sequence[Any],
        applied_at: dict[int, int],
        waiting: Sequence[Any],
        may_apply: bool,
    ) -> Written:
        """Return what was written to.

        Args:
            known: optimizers of which it is known.
            applied_at: by the id of one of them, the number of operations before it was applied.
            waiting: variables of metrics that are written to later.
            may_apply: whether the step may apply known optimizers. Otherwise one whose counter and
                variables were written to was applied past the recording.
        """
        written = self._in_graph() if self._graph is not None else self._eagerly()
        past = [] if may_apply else [o for o in unique(known) if _has_updated(o, written)]
        known = _with_inner(known)

        def found_in(variables: Iterable[Any]) -> list[Any]:
            """Return those that were written to, and take them as found."""
            found = [v for v in variables if written & handles_of(v)]
            written.difference_update(*map(handles_of, found))
            return found

        normalization, names = [], []
        for layer in layers_in(self._model):
            found = found_in(own_weights(layer))
            found = [v for v in found if id(v) in self._present or self._assigned & handles_of(v)]
            if isinstance(layer, keras.layers.BatchNormalization) and found:
                normalization.append(layer)
            else:
                names += [variable.path for variable in found]
        if self._graph is not None:
            moved = [
                variable.path
                for optimizer in known
                for variable in _of_optimizers([optimizer])
                if self._moves(variable, applied_at.get(id(optimizer)), waiting)
            ]
            names += dict.fromkeys(moved)
        changed = found_in(_of_optimizers(known))
        if self._graph is None and not (may_apply or past):  # set by the step, perhaps too late
            names += dict.fromkeys(variable.path for variable in changed)
        of_metrics = [*waiting, *found_in(self._model.metrics_variables)]
        built = [o for o in (*self._unbuilt, *self._made()) if o.built and not is_in(o, known)]
        if not written:
            return Written(normalization, past + built, names, of_metrics)
        found = living((keras.optimizers.Optimizer, keras.metrics.Metric, tf.Variable))
        optimizers = [v for v in found if isinstance(v, keras.optimizers.Optimizer)]
        optimizers = [o for o in optimizers if o.built and found_in([counter_of(o)])]
        optimizers += [o for o in built if not is_in(o, optimizers)]
        metrics = [v for v in found if isinstance(v, keras.metrics.Metric)]
        found_in(_of_optimizers(optimizers))
        of_metrics += found_in(v for metric in metrics for v in metric.variables)
        if _strategy.num_replicas() == 1:  # or others might be those of a replica in between
            others = map(_name, found_in(v for v in found if isinstance(v, tf.Variable)))
            names += [name for name in others if name not in _HARMLESS]
        return Written(normalization, past + optimizers, names, of_metrics)

    def _made(self) -> list[Any]:
        """Return the optimizers that an eager step has made for the model's weights."""
        if self._graph is not None:
            return []
        weights = self._model.trainable_variables
        found = [o for o in living(keras.optimizers.Optimizer) if not is_in(o, self._optimizers)]
        return [
            o for o in found if o.built and any(is_in(v, weights) for v in variables_to_train(o))
        ]

    def undo(self) -> None:
        """Put back what was written to, as far as that has happened: eagerly."""
        if self._graph is None:
            for variable, value in self._before:
                variable.assign(value)

    def _in_graph(self) -> set[int]:
        """Return the handles of variables that new operations of the graph write to, as ids."""
        graph: Any = self._graph
        unseen = _spans(graph, left_out.get())
        for number, op in enumerate(graph.get_operations()):
            if number >= self._number and not any(number in span for span in unseen):
                self._written += [(number, op, handle) for handle in written_handles(op)]
        assigned = {id(h) for _, op, h in self._written if op.type.startswith("Assign")}
        self._assigned = _captured(graph, assigned)
        return _captured(graph, {id(handle) for *_, handle in self._written})

    def _moves(self, variable: Any, first: int | None, waiting: Iterable[Any]) -> bool:
        """Return whether a window gives an optimizer's variable other values than the full batch.

        It does if the value follows from the samples or from a variable that is written to, as it
        is itself, or is written after the update: the window updates later.

        Args:
            variable: the variable.
            first: the number of operations before the optimizer was applied, or None.
            waiting: variables that are written to later.
        """
        writes = self._writes_to([variable])
        if first is not None and any(number >= first for number, *_ in writes):
            return True
        tensors = walk_back(_values_of(writes), self._graph)
        changing = {id(handle) for *_, handle in self._written}
        return bool(_used(self._graph, tensors, waiting)) or any(
            id(tensor) in changing
            or (tensor.op.type in _OF_BATCH and dependence_of(tensor).on_values)
            for tensor in tensors
        )

    def values_for(self, variables: Iterable[Any], but: Sequence[range] = ()) -> list[Any]:
        """Return what the values that are written to variables follow from, in a graph.

        Args:
            variables: the variables.
            but: numbers of operations that are left out.
        """
        writes = self._writes_to(variables)
        return _values_of(w for w in writes if not any(w[0] in numbers for numbers in but))

    def _writes_to(self, variables: Iterable[Any]) -> list[tuple[int, Any, Any]]:
        handles = {handle for variable in variables for handle in handles_of(variable)}
        own = {id(inner) for outer, inner in self._graph.captures if id(outer) in handles}
        return [write for write in self._written if id(write[2]) in own]

    def _eagerly(self) -> set[int]:
        """Return the same of variables that have other values than before."""
        changed = [v for v, value in self._before if not bool(tf.reduce_all(tf.equal(v, value)))]
        return {handle for variable in changed for handle in handles_of(variable)}


def _values_of(writes: Iterable[tuple[int, Any, Any]]) -> list[Any]:
    return [tensor for _, op, handle in writes for tensor in written_from(op, handle)]


def written_by_functions(graph: Any, first: int, unseen: Any) -> set[int]:
    """Return the handles of variables that calls of functions write to, as ids.

    Args:
        graph: the graph.
        first: of the operations, the number of the first that counts.
        unseen: what `left_out` holds, or None.
    """
    spans = _spans(graph, unseen)
    calls = [
        op
        for number, op in enumerate(graph.get_operations())
        if number >= first
        and not op.type.startswith("Assign")
        and not any(number in span for span in spans)
    ]
    return _captured(graph, {id(handle) for op in calls for handle in written_handles(op)})


def _spans(graph: Any, unseen: Any) -> list[range]:
    """Return the numbers of a graph's operations that are left out."""
    return [range(*span) for other, *span in unseen or () if other is graph]


def used_since(
    graph: Any, first: int, variables: Iterable[Any], gradients: Iterable[Any]
) -> list[str]:
    """Return the names of variables that gradients follow from by late operations of a graph.

    Args:
        graph: the graph.
        first: of the operations, the number of the first that is late.
        variables: variables.
        gradients: tensors, or None.
    """
    late = {op.name for op in graph.get_operations()[first:]}
    variables = list(variables)
    given = [part for part in tf.nest.flatten(gradients) if isinstance(part, _VARIABLES)]
    handles = {handle for part in given for handle in handles_of(part)}
    parts = tf.nest.flatten(gradients, expand_composites=True)
    tensors = walk_back(parts, graph, lambda tensor: tensor.op.name in late)
    used = [variable.path for variable in variables if handles_of(variable) & handles]
    return list(dict.fromkeys([*used, *_used(graph, tensors, variables)]))


def used_in(graph: Any, variables: Iterable[Any], gradients: Iterable[Any]) -> list[str]:
    """Return the names of variables whose values gradients of a graph follow from."""
    parts = tf.nest.flatten(gradients, expand_composites=True)
    return _used(graph, walk_back(parts, graph), variables)


def _used(graph: Any, tensors: Iterable[Any], variables: Iterable[Any]) -> list[str]:
    """Return the names of variables whose handles are among tensors of a graph."""
    used = _captured(graph, {id(tensor) for tensor in tensors})
    return [variable.path for variable in variables if used & handles_of(variable)]


def _captured(graph: Any, inner: set[int]) -> set[int]:
    """Return the tensors that a graph captures as some of its own, all by their ids."""
    return {id(outer) for outer, own in graph.captures if id(own) in inner}


def _of_layers(model: Any) -> list[Any]:
    return [variable for layer in layers_in(model) for variable in own_weights(layer)]


def _has_updated(optimizer: Any, written: set[int]) -> bool:
    """Return whether an optimizer has counted, and changed what it trains, by written handles."""
    trained = variables_to_train(optimizer) if optimizer.built else []
    changed = any(written & handles_of(variable) for variable in trained)
    return changed and bool(written & handles_of(counter_of(optimizer)))


def _with_inner(optimizers: Iterable[Any]) -> list[Any]:
    """Return optimizers and those that are in them."""
    found = []
    for optimizer in optimizers:
        inner = getattr(optimizer, "inner_optimizer", None)
        found += [optimizer, *getattr(optimizer, "optimizers", ())]
        found += [] if inner is None else [inner]
    return found


def _of_optimizers(optimizers: Iterable[Any]) -> list[Any]:
    return [v for o in _with_inner(optimizers) if o.built for v in o.variables]


def handles_of(variable: Any) -> set[int]:
    """Return the handles of a variable's copies, as ids."""
    return {id(copy.handle) for copy in _strategy.copies(raw(variable))}


def _name(variable: Any) -> str:
    """Return the last part of a variable's name, but for that of a replica."""
    parts = str(variable.name).split(":")[0].split("/")
    return [part for part in parts if not part.startswith("replica_")][-1]
