"""One call of `train_step`: every microbatch forward and backward, then what comes of the sum.

A batch is one microbatch, or with `microbatch_size` several. The first one stands outside of the
loop over the others: what a first call creates (layers, metrics, an optimizer's variables) can not
be created inside of a loop, and the first sum tells what the loop carries. All go through one
`tf.function`, so the user's step is traced once.

Under XLA that function alone is compiled. With the conditional update in the cluster, XLA would
copy all weights and optimizer state at every microbatch; with the loop in it, it takes many times
as long.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import tensorflow as tf

from ga_model import _strategy, _sums, _weights
from ga_model._logs import BatchLogs, MetricCalls
from ga_model._microbatch import Batch
from ga_model._recorder import Position, Target, optimizers_in, record, unpack
from ga_model._sums import GradientSum
from ga_model._window import Window


class _Part(NamedTuple):
    """What one microbatch gave, or several together.

    Attributes:
        sums: one per optimizer.
        logged: sums over the microbatches, as `BatchLogs.sums`.
        last: the last microbatch's, as `BatchLogs.last`; or the logs of a batch that is whole.
    """

    sums: list[GradientSum]
    logged: list[Any]
    last: Any

    def plus(self, other: _Part) -> _Part:
        return _Part(
            [a.plus(b) for a, b in zip(self.sums, other.sums)],
            [a + b for a, b in zip(self.logged, other.logged)],
            other.last,
        )


def run(model: Any, train_step: Callable[[Any], Any], data: Any, window: Window | None) -> Any:
    """Run a model's own `train_step` on a batch, and make the update if it is due.

    Args:
        model: an `AccumulatingModel`.
        train_step: takes the data of a microbatch and returns logs.
        data: the batch, as Keras passes it.
        window: the window that the batch is a part of, or None where it makes an update by itself.

    Returns:
        The logs of the batch.
    """
    _strategy.check_single_replica()
    batch = Batch(data, model.microbatch_size)
    optimizers = optimizers_in(vars(model))
    is_first: Any = tf.constant(True)
    steps: Any = tf.ones((), tf.int64)
    units = [tf.zeros((), tf.float64) for _ in optimizers]
    if window is not None:
        is_first, steps = window.begin_batch(), window.steps.read_value()
        units = [window.unit(optimizer) for optimizer in optimizers]
    num_microbatches = tf.cast(steps * batch.num_microbatches, tf.float64)
    whole = None
    if batch.is_split:
        whole = _weights.Whole(
            tf.cast(batch.rows, tf.float64), window is None, _weights_of(model, batch)
        )
    targets: list[Target] = []
    batch_logs: list[BatchLogs] = []

    def forward_and_backward(index: Any, units: list[Any], leaves: list[Any]) -> Any:
        is_first_of_batch = tf.equal(index, 0)
        position = Position(
            list(zip(optimizers, units)),
            steps,
            num_microbatches,
            tf.logical_and(is_first, is_first_of_batch),
            is_first_of_batch,
            whole,
        )
        microbatch = batch.pack(leaves)
        with record(model, microbatch, position) as recording:
            logs = train_step(microbatch)
        targets[:] = recording.targets
        if not batch.is_split:
            return _Part(recording.sums, [], logs)
        batch_logs[:] = [BatchLogs(recording, logs)]
        return _Part(recording.sums, batch_logs[0].sums, batch_logs[0].last)

    if not tf.executing_eagerly() and (model.jit_compile or batch.is_split):
        # Inlined, it would be there twice, each with the scratch memory of its convolutions.
        attributes = {"_noinline": True} if batch.is_split else None
        forward_and_backward = tf.function(
            forward_and_backward,
            input_signature=_signature(batch, len(units)) if batch.is_split else None,
            autograph=False,
            jit_compile=model.jit_compile or None,
            experimental_attributes=attributes,
        )

    first = tf.zeros((), tf.int64)
    part = forward_and_backward(first, units, batch.microbatch(first))
    if batch.is_split:
        part = part._replace(sums=[gradients.begin() for gradients in part.sums])

        def units_of(part: _Part) -> list[Any]:
            known = {id(t.optimizer): s.unit for t, s in zip(targets, part.sums)}
            return [known.get(id(o), unit) for o, unit in zip(optimizers, units)]

        def add(index: Any, part: _Part) -> _Part:
            return part.plus(forward_and_backward(index, units_of(part), batch.microbatch(index)))

        part = _loop(add, part, batch.num_microbatches)

    # Nothing but the data orders these state changes after the fetch of the data: without the
    # dependency some of them run before a step finds that its iterator is at an end.
    tensors = [t for t in tf.nest.flatten(data, expand_composites=True) if t is not None]
    with tf.control_dependencies(tensors):
        for target, gradients in zip(targets, part.sums):
            if window is None:
                _apply(target, gradients)
            else:
                window.add(target, gradients)
        if window is not None:
            window.end_batch()
        if batch.is_split:
            return batch_logs[0].finish(part.logged, part.last, batch.static_rows)
    return part.last


def _signature(batch: Batch, num_optimizers: int) -> list[Any]:
    unit = tf.TensorSpec((), tf.float64)
    return [tf.TensorSpec((), tf.int64), [unit] * num_optimizers, batch.signature]


def _apply(target: Target, part: GradientSum) -> None:
    """Update with the gradients of a batch."""
    total = None if target.is_sum else part.total
    gradients = [
        _sums.mean(gradient, total, variable.dtype)
        for gradient, variable in zip(part.gradients, target.variables)
    ]
    target.optimizer.apply(gradients, target.variables)


def _loop(add: Callable[[Any, Any], Any], first: Any, times: Any) -> Any:
    """Return `add(n - 1, ... add(2, add(1, first)))` for n `times`, one after the other.

    Args:
        add: function of an index, int64 scalar tensor, and what it returned the time before.
        first: a nest of tensors, `tf.IndexedSlices` and None. The number of rows may change in
            each.
    """
    present = [leaf for leaf in tf.nest.flatten(first) if leaf is not None]
    shapes = [part for leaf in present for part in _changing_shapes(leaf)]

    def flat(nest: Any) -> list[Any]:
        leaves = [leaf for leaf in tf.nest.flatten(nest) if leaf is not None]
        return tf.nest.flatten(leaves, expand_composites=True)  # type: ignore[no-any-return]

    def packed(tensors: list[Any]) -> Any:
        leaves = iter(tf.nest.pack_sequence_as(present, tensors, expand_composites=True))
        return tf.nest.map_structure(lambda leaf: None if leaf is None else next(leaves), first)

    # A loop starts with what is there already: without the dependency, the second microbatch's
    # activations would be there together with the first one's.
    with tf.control_dependencies(flat(first)):
        one = tf.identity(tf.ones((), tf.int64))
    _, tensors = tf.while_loop(
        lambda index, _: index < times,
        lambda index, tensors: (index + 1, flat(add(index, packed(tensors)))),
        (one, flat(first)),
        shape_invariants=(tf.TensorShape(()), shapes),
        parallel_iterations=1,  # or the activations of ten microbatches are there at a time
    )
    return packed(tensors)


def _changing_shapes(leaf: Any) -> list[tf.TensorShape]:
    if not isinstance(leaf, tf.IndexedSlices):
        return [leaf.shape]
    rows = [tf.TensorShape([None, *leaf.values.shape[1:]]), tf.TensorShape([None])]
    return rows if leaf.dense_shape is None else [*rows, leaf.dense_shape.shape]


def _weights_of(model: Any, batch: Batch) -> Callable[[], list[Any] | None]:
    """Return a function for the weights that the compiled loss's terms have in the whole batch.

    It runs the microbatches forward once more, of which TensorFlow leaves out what masks do not
    depend on. It does so where the batch is, and not in the graph of the microbatch that asks.
    """
    graph = None if tf.executing_eagerly() else tf.compat.v1.get_default_graph()
    known: list[list[Any]] = []

    def of_microbatch(leaves: list[Any]) -> list[Any]:
        x, y, sample_weight = unpack(batch.pack(leaves))
        y_pred = model(x, training=False) if model._call_has_training_arg else model(x)
        terms: list[_weights.Term] = []
        compiled = vars(model)["_compile_loss"]
        _weights.observed(compiled, terms.append, MetricCalls())(y, y_pred, sample_weight)
        weights = [tf.constant(0.0) if term.weight is None else term.weight for term in terms]
        return [tf.cast(weight, tf.float64) for weight in weights]

    def weights() -> list[Any] | None:
        if not all(_is_of_keras(model, name) for name in ("train_step", "compute_loss")):
            return None
        if vars(model)["_compile_loss"] is None:
            return []
        if not known:
            # In the batch's graph; without one, out of sight of the tape that is running.
            with tf.init_scope() if graph is None else graph.as_default():
                known.append(sums())
        return known[0]

    def sums() -> list[Any]:
        function: Any = of_microbatch
        if graph is not None:
            function = tf.function(
                of_microbatch, input_signature=[batch.signature], autograph=False
            )

        def add(index: Any, total: list[Any]) -> list[Any]:
            return [a + b for a, b in zip(total, function(batch.microbatch(index)))]

        first = function(batch.microbatch(tf.zeros((), tf.int64)))
        return _loop(add, first, batch.num_microbatches)  # type: ignore[no-any-return]

    return weights


def _is_of_keras(model: Any, name: str) -> bool:
    """Return whether a method of the model is Keras's own, below this package's."""
    for owner in type(model).__mro__:
        module = getattr(vars(owner).get(name), "__module__", "ga_model")
        if not module.startswith("ga_model"):
            return module.startswith("keras.")
    return False
