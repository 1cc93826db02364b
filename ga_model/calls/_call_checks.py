"""Whether a call can be split into microbatches, or the reasons why not.

All of them are found before anything of the call has run.
"""

from __future__ import annotations

import re
from typing import Any

import keras
import tensorflow as tf

from ga_model.base._context import graph_being_made
from ga_model.base._identity import is_in, unique
from ga_model.base._internals import layers_in, raw
from ga_model.base._internals_tf import is_followed
from ga_model.calls._call_state import EagerScope, NotingScope, read, state_of, write
from ga_model.calls._microbatch_call import MicrobatchCall, leaves_of
from ga_model.graphs._microbatch import rows_of
from ga_model.hearing._models import instances_in
from ga_model.hearing._splitting import NotByRowsError
from ga_model.reading._custom_gradients import mixing, reading_variables
from ga_model.reading._loss_reading import kind_of_scalar, why_mixed
from ga_model.reading._place import place_of
from ga_model.replicas import _strategy

# Operations that draw other numbers every time that they run.
_UNSEEDED = re.compile(
    "Random(?!.*Dataset)|Stateful(Uniform|Standard|Truncated|Random)|TruncatedNormal|Multinomial"
    "|ParameterizedTruncatedNormal|RngReadAndSkip|SampleDistorted"
)


def check_outputs(outputs: list[Any], layer: Any) -> None:
    """Check that a layer can be called twice on each microbatch, and its outputs put together.

    Args:
        outputs: what it gave.
        layer: the layer.

    Raises:
        NotByRowsError: an output has no axis of samples, or follows from several; or the call draws
            random numbers that the second pass cannot draw again.
    """
    for output in outputs:
        if not isinstance(output, tf.Tensor) or output.shape.rank == 0:
            raise NotByRowsError(f"an output has the shape {output.shape}")
    if (reason := why_mixed(outputs, layer)) is not None:
        raise NotByRowsError(reason)
    if (graph := graph_being_made()) is not None:
        nodes = [op.node_def for op in graph.get_operations()]
        nodes += [n for f in graph.as_graph_def().library.function for n in f.node_def]
        if (op := mixing(graph)) is not None:
            raise NotByRowsError(f"its custom gradient may mix samples: {place_of(op)}")
        if (op := reading_variables(graph)) is not None:
            reason = "a `tf.custom_gradient` or `keras.remat` inside it reads weights"
            raise NotByRowsError(f"{reason}: {place_of(op)}")
        unseeded = sorted({node.op for node in nodes if _UNSEEDED.match(node.op)})
        if unseeded:
            raise NotByRowsError(f"it draws unseeded random numbers, by {unseeded}")


def check_axes(call: MicrobatchCall) -> None:
    """Raise NotByRowsError if outputs are not by rows, as far as graphs for 3 and 5 samples tell.

    Outputs of shape (samples, samples) would be put together to (samples of the batch, samples of a
    microbatch), and what has the same rows for every batch would be repeated.
    """

    def drawn(leaves: list[Any]) -> list[Any]:
        with NotingScope():  # which keeps the losses that layers add
            return leaves_of(call.run(leaves))

    shapes = []
    for rows in (3, 5):
        trace = tf.function(drawn, autograph=False)
        concrete = trace.get_concrete_function(call.batch.signature_of(rows))
        check_captures(call, concrete.graph)
        shapes.append([tensor.shape for tensor in concrete.structured_outputs])
    for few, many in zip(*shapes):
        has_rows = few[0] in (3, None) and many[0] in (5, None)
        others = zip(few[1:], many[1:])
        if not has_rows or any(a != b and None not in (a, b) for a, b in others):
            raise NotByRowsError(f"an output has the shape {few} for 3 samples")


def check_captures(call: MicrobatchCall, graph: Any) -> None:
    """Raise NotByRowsError if a call uses a tensor of the step that is none of its inputs."""
    own = [*call.arguments.shared, call.batch.rows]
    for tensor, _ in graph.captures:
        is_of_step = tf.is_symbolic_tensor(tensor) or is_followed(tensor)
        if tensor.dtype != tf.resource and is_of_step and not is_in(tensor, own):
            raise NotByRowsError("it uses a tensor that is not one of its inputs")


def foreign_variables(layer: Any, graph: Any) -> list[Any]:
    """Return variables that a call uses, and that Keras does not know as the layer's.

    Raises:
        NotByRowsError: one of them can be trained.
    """
    own = [raw(variable) for variable in [*layer.variables, *state_of(layer)]]
    own += [copy for variable in own for copy in _strategy.copies(variable)]
    foreign = [v for v in graph.variables if not is_in(v, own)]
    if any(variable.trainable for variable in foreign):
        names = sorted(variable.name for variable in foreign)
        raise NotByRowsError(f"it uses the variables {names}, which are not its own weights")
    return foreign


def check_followed(call: MicrobatchCall) -> None:
    """Do what `check_captures` and `foreign_variables` do where there is no graph, by a call.

    A tape that follows what comes of inputs and weights that it does not follow has another
    reason to. The call changes nothing.
    """
    inputs = call.batch.microbatch(tf.zeros((), tf.int64))
    inputs = [tf.stop_gradient(t) if isinstance(t, tf.Tensor) else t for t in inputs]
    shared = [tf.stop_gradient(tensor) for tensor in call.arguments.shared]
    variables = unique(call.layer.variables)
    values = [(variable, tf.stop_gradient(variable.value)) for variable in variables]
    before = read(state_of(call.layer))
    with tf.GradientTape() as tape, EagerScope(values):
        outputs = leaves_of(call.run(inputs, shared))
    # Functions that were traced before know no scope: they write, and read weights directly.
    write(before)
    known = any(is_in(v, [raw(own) for own in variables]) for v in tape.watched_variables())
    if any(map(is_followed, outputs)) and not known:
        raise NotByRowsError(
            "it uses a tensor or variable that is neither its input nor its weight"
        )


def check_state(layer: Any, written: list[Any]) -> list[Any]:
    """Check that a call leaves nothing that follows from all samples at once.

    Args:
        layer: the layer.
        written: variables that it has written to.

    Returns:
        BatchNormalization layers that have written their statistics.

    Raises:
        NotByRowsError: it writes to other state than seeds and the statistics of
            BatchNormalization; or keeps a tensor in an attribute, which the step might read.
    """
    layers = layers_in(layer)
    normal = [part for part in layers if isinstance(part, keras.layers.BatchNormalization)]
    statistics = [variable for part in normal for variable in part.variables]
    others = [v for v in written if not is_in(v, statistics) and not _is_seed(v)]
    if others:
        names = sorted({variable.path for variable in others})
        raise NotByRowsError(f"it writes to {names} in each call")
    graph = graph_being_made()
    for part in layers:
        if graph is None or type(part).__module__.startswith("keras."):
            continue
        for name, value in vars(part).items():
            left = instances_in(value, tf.Tensor)
            if any(tf.is_symbolic_tensor(tensor) and tensor.graph is graph for tensor in left):
                raise NotByRowsError(f"it stores a tensor in its attribute `{name}`")
    return [part for part in normal if any(is_in(v, written) for v in part.variables)]


def _is_seed(variable: Any) -> bool:
    """Return whether a variable is the state of a `keras.random.SeedGenerator`, of any owner."""
    return str(variable.path).endswith("seed_generator_state")


def is_sum(loss: Any) -> bool:
    """Return whether a loss that a layer added is summed over samples.

    Raises:
        NotByRowsError: nothing tells. Eagerly, a scalar is taken as a mean.
    """
    if loss.shape.rank != 0:
        return True
    kind = kind_of_scalar(loss) if tf.is_symbolic_tensor(loss) else "mean"
    if kind is None:
        raise NotByRowsError("it adds a loss that is neither a mean nor a sum over samples")
    return kind == "sum"


def assertions(
    call: MicrobatchCall, outputs: list[Any], leaves: list[Any], shapes: list[Any] | None
) -> list[Any]:
    """Return assertions that the outputs of a microbatch can be put together with the others'.

    Args:
        call: the call.
        outputs: of the microbatch.
        leaves: its inputs.
        shapes: of a sample of each output of the first microbatch, or None if it is that one.
    """
    rows, name = rows_of(leaves[0]), call.layer.name
    checks = []
    for number, tensor in enumerate(outputs):
        message = _outputs_message(name, tensor.shape)
        is_by_rows = tf.equal(rows_of(tensor), rows) | ~call.arguments.is_split
        checks.append(tf.debugging.Assert(is_by_rows, [message]))
        if shapes is not None and not tensor.shape[1:].is_fully_defined():
            message = _other_shape_message(name, tensor.shape)
            shape = tf.shape(tensor)[1:]
            checks.append(tf.debugging.assert_equal(shape, shapes[number], message))
    return [check for check in checks if check is not None]


def _outputs_message(layer: str, shape: Any) -> str:
    return (
        "To be split into microbatches, a call must return one row per sample in every output. "
        f"Received: {layer!r} with an output of shape {shape}, which has not. "
        "Set `microbatch_size=None`."
    )


def _other_shape_message(layer: str, shape: Any) -> str:
    return (
        "To be split into microbatches, a call must return outputs of the same shape (except axis "
        f"0) for all of them. Received: {layer!r} with an output of shape {shape}, which differs. "
        "Pad it to a fixed length, or set `microbatch_size=None`."
    )
