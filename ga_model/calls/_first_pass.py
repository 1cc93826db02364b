"""The first pass of a split call: the outputs of all samples, and no activations.

It changes what the layer changes when it is called, microbatch by microbatch, and notes the values
that it found. Nothing has run before it is known that the call can be split.
"""

from __future__ import annotations

import weakref
from typing import Any, NamedTuple

import tensorflow as tf

from ga_model.base._internals import losses_of_scope
from ga_model.calls._call_checks import (
    assertions,
    check_axes,
    check_captures,
    check_followed,
    check_outputs,
    check_state,
    foreign_variables,
    is_sum,
)
from ga_model.calls._call_state import NotingScope, state_of
from ga_model.calls._microbatch_call import MicrobatchCall, attached_to, leaves_of
from ga_model.graphs import _lists
from ga_model.graphs._loop import loop
from ga_model.hearing._splitting import NotByRowsError
from ga_model.reading._inner_graphs import has_loop
from ga_model.recording._normalization import Call, listening, names_by_fate, pass_on
from ga_model.sums._moments import Moments

# Of layers that ran eagerly, the kinds of calls that were checked.
_checked_before: weakref.WeakKeyDictionary[Any, set[str]] = weakref.WeakKeyDictionary()


class Form(NamedTuple):
    """What a call gives, but for the tensors' values. Known when it was traced.

    Attributes:
        outputs: what it returns, with tensors that are of use as places only.
        attached: numbers of outputs, and the names of what is attached to them.
        is_sum: of each loss that layers added, whether it is summed over samples.
        had_axes: of each, whether it was no scalar.
        changed: variables that the call writes to, or may write to.
    """

    outputs: Any
    attached: list[tuple[int, str]]
    is_sum: list[bool]
    had_axes: list[bool]
    changed: list[Any]


class _Part(NamedTuple):
    """What the first pass gave for one microbatch.

    Attributes:
        outputs: tensors of shape (rows, ...), the call's outputs and what is attached to them.
        found: the values that the variables had which the call has changed.
        losses: what layers added, as scalars that are summed over microbatches.
        moments: of the `statistics` of the pass.
    """

    outputs: list[Any]
    found: list[Any]
    losses: list[Any]
    moments: list[Moments]


class FirstPass:
    """Calls a layer on every microbatch, and keeps the outputs.

    Args:
        call: the call.

    Attributes:
        form: what the call gives, known after `check`, as is
        normalizing: names of BatchNormalization layers that have normalized microbatches: those
            whose running averages move by the statistics of all samples, and others.
        outputs: of all samples, with what is attached to them; known after `run`, as are
        losses: that layers added, of all samples: scalars, and
        found: of each variable that was changed, a list of the values that microbatches found.
    """

    form: Form
    outputs: list[Any]
    losses: list[Any]
    found: list[Any]

    def __init__(self, call: MicrobatchCall) -> None:
        self.normalizing: tuple[list[str], list[str]] = ([], [])
        self._statistics: list[Call] = []  # calls of BatchNormalization layers
        self._call = call
        self._is_eager = tf.executing_eagerly()
        self._foreign: list[Any] = []  # variables that the call uses and that are not the layer's
        self._function: Any = self._microbatch

    def check(self) -> None:
        """Check that the call can be split. Nothing has run then.

        Raises:
            NotByRowsError: an output has no row for each sample, or its other axes depend on their
                number; or the call draws random numbers that a second pass cannot draw again.
        """
        check = self._check_eagerly if tf.executing_eagerly() else self._check_in_graph
        try:
            check([self._call.batch.signature_of(None)])
        except NotByRowsError:
            raise
        except Exception as error:  # which a call of all samples will raise again, or get by
            reason = f"with another number of samples it fails with a {type(error).__name__}"
            raise NotByRowsError(reason) from error

    def _check_eagerly(self, signature: list[Any]) -> None:
        call = self._call
        kind = f"{call.arguments.kind} {call.training}"
        if kind not in _checked_before.setdefault(call.layer, set()):
            tf.function(self._microbatch, autograph=False).get_concrete_function(*signature)
            check_axes(call)
            check_followed(call)
            _checked_before[call.layer].add(kind)

    def _check_in_graph(self, signature: list[Any]) -> None:
        call = self._call
        self._function = call.in_graph(self._microbatch, signature)
        concrete = self._function.get_concrete_function()
        check_captures(call, concrete.graph)
        self._foreign = foreign_variables(call.layer, concrete.graph)
        if self._foreign:  # which are noted, too
            self._function = call.in_graph(self._microbatch, signature)
            concrete = self._function.get_concrete_function()
        shapes = [tensor.shape for tensor in concrete.structured_outputs.outputs]
        if any(shape[0] is not None or None in shape[1:] for shape in shapes):
            check_axes(call)

    def has_loop(self) -> bool:
        """Return whether the call may have a loop, in a graph."""
        if tf.executing_eagerly():
            return False
        try:
            return has_loop(self._function.get_concrete_function().graph)
        except Exception:  # of a graph that is not what it is taken for
            return True

    def run(self) -> None:
        """Run the microbatches, one after the other."""
        call = self._call

        def part_of(index: Any, shapes: list[Any] | None) -> _Part:
            leaves = call.batch.microbatch(index)
            part: _Part = self._function(leaves)
            with tf.control_dependencies(assertions(call, part.outputs, leaves, shapes)):
                return part._replace(outputs=[tf.identity(tensor) for tensor in part.outputs])

        part = part_of(tf.zeros((), tf.int64), None)
        tensors = part.outputs
        shapes = [tf.shape(tensor)[1:] for tensor in tensors]
        lists = [_lists.empty(t.dtype, [None, *t.shape[1:]]) for t in tensors]
        lists += [_lists.empty(v.dtype, v.shape) for v in part.found]

        def add(index: Any, so_far: Any) -> Any:
            lists, losses, moments = so_far
            part = part_of(index, shapes)
            lists = _lists.all_pushed(lists, [*part.outputs, *part.found])
            moments = [a.plus(b) for a, b in zip(moments, part.moments)]
            return lists, [a + b for a, b in zip(losses, part.losses)], moments

        lists = _lists.all_pushed(lists, [*part.outputs, *part.found])
        so_far = (lists, part.losses, part.moments)
        lists, self.losses, moments = loop(add, so_far, call.num_microbatches)
        pass_on(self._statistics, moments)
        self.outputs = call.joined(lists, tensors)
        self.found = lists[len(tensors) :]

    def _microbatch(self, leaves: list[Any]) -> _Part:
        """Call the layer on one microbatch, and note what it changes."""
        call = self._call
        noted = [*state_of(call.layer), *self._foreign]
        with NotingScope(noted=noted) as scope, listening(not scope.is_inner) as hears:
            outputs = call.run(leaves, hears=hears)
            tensors = leaves_of(outputs)
            check_outputs(tensors, call.layer)
            self.normalizing = names_by_fate(check_state(call.layer, scope.written))
            self._statistics, moments = ([], []) if hears is None else hears.heard()
        attached = attached_to(tensors)
        losses = call.added_losses(losses_of_scope(scope), outputs)
        form = Form(
            outputs,
            [(number, name) for number, name, _ in attached],
            [is_sum(loss) for loss in losses],
            [loss.shape.rank != 0 for loss in losses],
            [variable for variable, _ in scope.found],
        )
        if self._is_eager and form.is_sum != form.had_axes and not tf.executing_eagerly():
            raise NotByRowsError("it adds a loss that is a sum over samples")  # nothing tells later
        self.form = form
        return _Part(
            [*tensors, *(tensor for _, _, tensor in attached)],
            [value for _, value in scope.found],
            call.shares(losses, form.is_sum, leaves),
            moments,
        )
