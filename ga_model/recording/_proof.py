"""Prove that a `train_step` of the user's own adds up over microbatches.

With proof the step runs on microbatches, by one forward and backward pass. Without, it runs on the
full batch, which is exact for any step and takes one more forward pass. So all that is not known to
be the same in both refuses the proof: a loss or a log that is no mean or sum over samples, a
gradient that is not handed on as it is, anything that is written to or read in another order.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import keras
import tensorflow as tf

from ga_model.base._context import ThreadValue, graph_being_made
from ga_model.base._in_front import InFront
from ga_model.base._internals import layers_in, seeds
from ga_model.base._internals_tf import has_own_gradient, written_handles
from ga_model.hearing._metrics_of_user import counts_samples
from ga_model.hearing._models import recording_of_thread
from ga_model.reading._denominators import OF_SUM, OF_WEIGHTS, by_kind
from ga_model.reading._loss_reading import DoesNotAddUpError
from ga_model.reading._operations import BY_SAMPLE, COUNT, MEAN, SHARED, SUM
from ga_model.reading._strict import StrictReading, follow_from
from ga_model.reading._writes import READS, handles_of
from ga_model.recording._code_of_user import is_layer_of_keras
from ga_model.recording._logs import BatchLogs
from ga_model.recording._recorder import Recording

_proof = ThreadValue()  # the `StepProof` of this thread, or None


class StepProof:
    """What is known of a step that is drawn, to prove that it adds up.

    Args:
        model: the model.

    Attributes:
        has_created: whether variables were created.
    """

    def __init__(self, model: Any) -> None:
        self._model = model
        self._graph: Any = graph_being_made()
        self._of_keras: set[str] = set()  # names of operations: of Keras's layers,
        self._drawing: set[str] = set()  # of outermost calls of layers with weights,
        self._of_metrics: set[str] = set()  # and of updates of metrics
        self._updates: list[tuple[Any, Any]] = []  # metrics, and their arguments
        self._results: list[Any] = []  # metrics whose result was asked for
        self._is_inside = False  # of a layer
        self.has_created = False

    @contextlib.contextmanager
    def listening(self) -> Iterator[None]:
        """Note what the step calls, in a block."""
        metrics = self._model.metrics
        with (
            _calls.of(layers_in(self._model)),
            _metric_updates.of(metrics),
            _metric_results.of(metrics),
            _metric_resets.of(metrics),
            _proof.set(self),
            tf.variable_creator_scope(_create),
        ):
            yield

    def note_call(self, layer: Any, call: Callable[[], Any]) -> Any:
        """Make a call of a layer, and note the operations of it."""
        if graph_being_made() is not self._graph:
            return call()
        is_outermost, self._is_inside = not self._is_inside, True
        first = len(self._graph.get_operations())
        try:
            return call()
        finally:
            names = self._names_since(first)
            if is_outermost:
                self._is_inside = False
                self._drawing |= names if layer.weights else set()
            if is_layer_of_keras(layer):
                self._of_keras |= names

    def note_update(self, metric: Any, update: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Update a metric, and note that. The recording notes numbers that wait."""
        is_given_numbers = type(metric) in (keras.metrics.Mean, keras.metrics.Sum)
        if is_given_numbers and recording_of_thread.get().metrics.waits_for(*args, **kwargs):
            return type(metric).update_state(metric, *args, **kwargs)  # what is in front there
        if graph_being_made() is not self._graph or any(metric is m for m in self._results):
            raise DoesNotAddUpError
        if not getattr(metric, "built", True):
            with tf.init_scope():  # in a graph that is given up its variables would get no values
                metric.build(*args[:2])
        self._updates.append((metric, (args, kwargs)))
        first = len(self._graph.get_operations())
        try:
            return update(*args, **kwargs)
        finally:
            self._of_metrics |= self._names_since(first)

    def note_result(self, metric: Any, result: Callable[[], Any]) -> Any:
        self._results.append(metric)
        return result()

    def _names_since(self, first: int) -> set[str]:
        return {op.name for op in self._graph.get_operations()[first:]}

    def check(self, recording: Recording, logs: Any) -> None:
        """Raise DoesNotAddUpError if the step that was recorded is not proved to add up."""
        reading = StrictReading(self._graph, self._of_keras, self._drawing)
        reading.update()
        used = self._check_losses(recording, reading)
        used += self._check_metrics(recording, reading)
        used += self._check_logs(recording, reading, logs)
        self._check_operations(recording, used)
        _require(reading.has_one_number())

    def _check_losses(self, recording: Recording, reading: StrictReading) -> list[Any]:
        """Check what gradients are of, and return these losses."""
        used = []
        _require(recording.targets)
        for target, gradients in zip(recording.targets, recording.given):
            found = set()
            for gradient in filter(lambda gradient: gradient is not None, gradients):
                loss, sources = recording.losses.heard.taken_of(gradient)
                _require(
                    all(isinstance(source, (tf.Variable, keras.Variable)) for source in sources)
                )
                if recording.is_folded(target.optimizer):
                    loss = recording.before_scaling(target.optimizer, loss)
                kind = reading.of(loss) if loss is not None else None
                _require(kind in (MEAN, SUM))
                kinds = _kinds_of(recording, loss)
                _require(kinds == {"sum"} if kind == SUM else kinds and "sum" not in kinds)
                found |= kinds
                used.append(loss)
            _require(len(found) == 1 and recording.losses.known_kinds() <= found)
        return used

    def _check_metrics(self, recording: Recording, reading: StrictReading) -> list[Any]:
        """Check what metrics get, and return that."""
        used = []
        for metric, arguments in self._updates:
            _require(counts_samples(metric))
            leaves = [leaf for leaf in tf.nest.flatten(arguments) if tf.is_tensor(leaf)]
            kinds = {reading.kind_of(leaf) if leaf.shape.rank else None for leaf in leaves}
            _require(kinds == {BY_SAMPLE})
            used += leaves
        _require(not recording.metrics.has_late_updates)
        for _, value, sample_weight, _ in recording.metrics.updates:
            used.append(value)
            self._check_scalar(recording, reading, value)
            is_number = not tf.is_tensor(sample_weight)
            _require(is_number or reading.kind_of(sample_weight) == COUNT)
        return used

    def _check_logs(self, recording: Recording, reading: StrictReading, logs: Any) -> list[Any]:
        """Check what is logged beside metrics, and return that."""
        of_batch = BatchLogs(recording, logs)
        _require(not isinstance(logs, dict) or not of_batch.names & logs.keys())
        leaves = [leaf for leaf in of_batch.others() if tf.is_tensor(leaf)]
        for leaf in leaves:
            if reading.kind_of(leaf) != SHARED:
                self._check_scalar(recording, reading, leaf)
        return leaves

    def _check_scalar(self, recording: Recording, reading: StrictReading, value: Any) -> None:
        """Check that a number of the batch can be put together from those of the microbatches."""
        kind = reading.of(value) if tf.is_symbolic_tensor(value) else SHARED
        _require(kind is not None)
        if kind != SHARED:
            _require(value.dtype.is_floating and recording.numbers.is_mean_or_sum(value))

    def _check_operations(self, recording: Recording, used: list[Any]) -> None:
        """Check what the step does beside its losses, and what follows from that.

        Args:
            recording: the step.
            used: tensors that may not follow from what it writes to.
        """
        graph: Any = self._graph
        outer = {id(own): id(handle) for handle, own in graph.captures}
        states = [seed for layer in layers_in(self._model) for seed in seeds(layer)]
        of_seeds = {handle for seed in states for handle in handles_of(seed)}
        updated = [v for t in recording.targets for v in [*t.variables, *t.optimizer.variables]]
        late = {handle for variable in updated for handle in handles_of(variable)}
        operations = graph.get_operations()
        # What waits for the full batch is no operation of the graph.
        waiting = [v for update in recording.metrics.updates for v in update.metric.variables]
        waiting += self._model.metrics_variables
        to_be_written = {handle for variable in waiting for handle in handles_of(variable)}
        written = {own for own, handle in outer.items() if handle in to_be_written}
        for number, op in enumerate(operations):
            handles = [id(handle) for handle in written_handles(op)]
            written.update(handles)
            if op.name in self._of_metrics:
                continue
            if handles:
                is_seed = all(outer.get(handle) in of_seeds for handle in handles)
                _require(is_seed and op.name in self._drawing)
            if number >= recording.updates.first and op.type in READS:
                _require(outer.get(id(op.inputs[0])) not in late)
            if op.name not in self._of_keras:
                is_gradient = recording.losses.heard.has_made(number)
                is_stateful = op.op_def.is_stateful and not handles and op.type not in READS
                _require(is_gradient or not (is_stateful or has_own_gradient(op)))
        passed = {
            op.name
            for op in operations
            if op.type in READS
            and op.name in self._drawing
            and outer.get(id(op.inputs[0])) in of_seeds
        }
        _require(not follow_from(graph, used, written, passed))


def _kinds_of(recording: Recording, loss: Any) -> set[Any]:
    """Return the kinds of what a loss was read to be divided by: none if it mixes samples."""
    found = set(by_kind(recording.losses.heard.read(loss).denominators or ()))
    kinds = found - {OF_WEIGHTS.kind}
    return found if kinds == {OF_SUM.kind} else kinds  # with regularizers, a sum is not of one kind


def _require(condition: Any) -> None:
    if not condition:
        raise DoesNotAddUpError


def _create(next_creator: Callable[..., Any], **kwargs: Any) -> Any:
    """Create a variable, and not in a graph that is given up, where it would get no value."""
    if not tf.executing_eagerly():
        _proof.get().has_created = True
    with tf.init_scope():
        return next_creator(**kwargs)


def _telling(tell: Callable[..., Any]) -> Callable[[Any, Any], Any]:
    """Return what makes functions that stand in front of a method, and tell the proof."""

    def make(owner: Any, method: Any) -> Any:
        def told(*args: Any, **kwargs: Any) -> Any:
            proof = _proof.get()
            if proof is None:
                return method(*args, **kwargs)
            with _proof.set(proof):
                return tell(proof, owner, method, args, kwargs)

        return told

    return make


def _reset(*_: Any) -> None:
    raise DoesNotAddUpError


_calls = InFront(
    "call",
    _telling(
        lambda proof, layer, call, args, kw: proof.note_call(layer, lambda: call(*args, **kw))
    ),
)
_metric_updates = InFront(
    "update_state",
    _telling(lambda proof, metric, update, args, kw: proof.note_update(metric, update, args, kw)),
)
_metric_results = InFront(
    "result", _telling(lambda proof, metric, result, *_: proof.note_result(metric, result))
)
_metric_resets = InFront("reset_state", _telling(_reset))
