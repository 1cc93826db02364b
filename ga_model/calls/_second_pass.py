"""The second pass of a split call: gradients of weights and inputs, by microbatches.

Each microbatch begins with the state that the first pass found, and weights have the values that
they had in it. A tape of its own is seeded with the microbatch's part of the gradients that the
outputs got.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tensorflow as tf

from ga_model.base._identity import is_in
from ga_model.base._internals import losses_of_scope, raw
from ga_model.base._internals_tf import is_followed
from ga_model.calls._call_state import NotingScope, read, write
from ga_model.calls._first_pass import FirstPass
from ga_model.calls._microbatch_call import (
    MicrobatchCall,
    attached_to,
    is_differentiable,
    leaves_of,
)
from ga_model.graphs import _lists
from ga_model.graphs._loop import loop
from ga_model.graphs._microbatch import Batch
from ga_model.recording._recorder import note_call
from ga_model.sums._sums import GradientSum, Weight


class SecondPass:
    """Takes the gradient of a call that `FirstPass` has made.

    Args:
        call: the call.
        first: the first pass, which has run.
        inputs: of the arguments, the tensors that a tape follows.
        variables: the weights that a tape follows.
        values: what these had in the first pass.
        kept: pairs of other variables that the call does not write to, and their values.
    """

    def __init__(
        self,
        call: MicrobatchCall,
        first: FirstPass,
        inputs: list[Any],
        variables: list[Any],
        values: list[Any],
        kept: list[tuple[Any, Any]],
    ) -> None:
        self._call = call
        self._first = first
        self._inputs = inputs
        self._variables = variables
        self._values = values
        self._kept = kept
        leaves = call.batch.leaves
        self._places = [i for i, t in enumerate(leaves) if is_in(t, inputs)]  # of those by rows
        self._shared = [t for t in call.arguments.shared if is_in(t, inputs)]
        self._read_directly: list[Any] = []  # weights whose value no scope can hold

    def gradients(self, upstream: tuple[Any, ...], is_used: list[bool]) -> list[Any]:
        """Return the gradients of inputs and weights, from those of the outputs and losses.

        Args:
            upstream: gradients of outputs and losses.
            is_used: which of these a step has taken a gradient of.
        """
        call, changed = self._call, self._first.form.changed
        used = [tf.convert_to_tensor(g) for g, yes in zip(upstream, is_used) if yes]
        batch = Batch([call.batch.leaves, used], call.batch.size, is_checked=False)
        function = self._in_graph(batch, is_used)
        pairs = zip(self._variables, self._values)
        held = [(v, value) for v, value in pairs if is_in(v, self._read_directly)]
        left = read([*changed, *(v for v, _ in held if not is_in(v, changed))])
        write(held)

        def of_microbatch(index: Any) -> Any:
            found = [
                _lists.item(pieces, index, raw(variable).dtype, variable.shape)
                for pieces, variable in zip(self._first.found, changed)
            ]
            return function(batch.microbatch(index), found, self._values, self._shared)

        total, lists, first, of_shared = self._summed(of_microbatch)
        write(left)
        of_rows = call.joined(lists, first)
        note_call(of_rows)
        rows = [call.batch.leaves[i] for i in self._places]
        in_order, others = iter(of_rows), iter(of_shared)
        of_inputs = [next(in_order if is_in(t, rows) else others) for t in self._inputs]
        of_weights = total.with_slices(self._variables).mean(self._variables, least=None)
        return [*of_inputs, *of_weights]

    def _summed(
        self, of_microbatch: Callable[[Any], Any]
    ) -> tuple[GradientSum, list[Any], list[Any], list[Any]]:
        """Return the gradients of all microbatches.

        Args:
            of_microbatch: function of an index.

        Returns:
            The sum of those of weights; lists of those of inputs with samples, and these of the
            first microbatch; the sums of those of shared inputs.
        """
        variables = self._variables
        total, of_rows, of_shared = of_microbatch(tf.zeros((), tf.int64))
        lists = [_lists.empty(t.dtype, [None, *t.shape[1:]]) for t in of_rows]

        def add(index: Any, so_far: Any) -> Any:
            total, lists, sums = so_far
            part, of_rows, of_shared = of_microbatch(index)
            sums = [a + b for a, b in zip(sums, of_shared)]
            return total.plus_alike(part, variables), _lists.all_pushed(lists, of_rows), sums

        first = total.as_terms(variables), _lists.all_pushed(lists, of_rows), of_shared
        total, lists, of_shared = loop(add, first, self._call.num_microbatches)
        return total, lists, of_rows, of_shared

    def _in_graph(self, batch: Batch, is_used: list[bool]) -> Any:
        """Return `_microbatch`, as a function that is traced once where a graph is made."""

        def function(
            leaves: list[Any], found: list[Any], values: list[Any], shared: list[Any]
        ) -> Any:
            return self._microbatch(leaves, found, values, shared, is_used)

        changed = self._first.form.changed
        signature = [
            batch.signature_of(None),
            [tf.TensorSpec(v.shape, raw(v).dtype) for v in changed],
            [tf.TensorSpec(v.shape, v.dtype) for v in self._values],
            [tf.TensorSpec(t.shape, t.dtype) for t in self._shared],
        ]
        sources = tf.nest.flatten([batch.leaves, self._values, self._shared])
        # XLA cannot keep what a loop computes until the gradient of this gradient is taken.
        may_compile = not (any(map(is_followed, sources)) and self._first.has_loop())
        in_graph = self._call.in_graph(function, signature, may_compile)
        if not tf.executing_eagerly():
            in_graph.get_concrete_function()
        return in_graph

    def _microbatch(
        self,
        leaves: list[Any],
        found: list[Any],
        values: list[Any],
        shared: list[Any],
        is_used: list[bool],
    ) -> tuple[GradientSum, list[Any], list[Any]]:
        """Return the gradients of one microbatch: of weights, its inputs, and shared inputs.

        Args:
            leaves: inputs and, as far as they are used, gradients with respect to outputs; then
                those with respect to losses, scalars.
            found: the values of the variables that the first pass changed.
            values: of the weights.
            shared: inputs that all samples share and that a tape follows.
            is_used: which outputs and losses have a gradient.
        """
        count = len(self._call.batch.leaves)
        inputs = leaves[:count]
        of_rows = [inputs[i] for i in self._places]
        changed = self._first.form.changed
        write(zip(changed, found))
        with tf.GradientTape(watch_accessed_variables=False) as tape:
            variables = [raw(variable) for variable in self._variables]
            tape.watch([values, of_rows, shared, variables])
            weights = [p for p in zip(self._variables, values) if not is_in(p[0], changed)]
            targets = self._targets(leaves, [*self._kept, *weights], shared)
            targets = [tensor for tensor, yes in zip(targets, is_used) if yes]
        gradients = tape.gradient(
            targets, [values, of_rows, shared, variables], output_gradients=leaves[count:]
        )
        of_weights = [_either(*pair) for pair in zip(gradients[0], gradients[3])]
        # By functions that were traced before, and where the call itself writes to a weight.
        self._read_directly = [v for v, g in zip(self._variables, gradients[3]) if g is not None]
        one = tf.ones((), tf.float64)
        total = GradientSum.of(of_weights, self._variables, Weight(one, one), scale=False)
        return total, _dense(gradients[1], of_rows), _dense(gradients[2], shared)

    def _targets(self, leaves: list[Any], values: list[Any], shared: list[Any]) -> list[Any]:
        """Return outputs and losses of a microbatch that can have a gradient.

        Args:
            leaves: as `_microbatch` takes them.
            values: pairs of a variable and the value that it has.
            shared: inputs that all samples share and that a tape follows.
        """
        call = self._call
        rest = iter(shared)
        inputs = [next(rest) if is_in(t, self._shared) else t for t in call.arguments.shared]
        with NotingScope(values) as scope:
            outputs = call.run(leaves, inputs)
        tensors = leaves_of(outputs)
        tensors += [tensor for _, _, tensor in attached_to(tensors)]
        losses = call.added_losses(losses_of_scope(scope), outputs)
        tensors += call.shares(losses, self._first.form.is_sum, leaves)
        return [tensor for tensor in tensors if is_differentiable(tensor)]


def _dense(gradients: list[Any], tensors: list[Any]) -> list[Any]:
    """Return gradients as tensors, zeros where there is none."""
    return [
        tf.zeros_like(t) if g is None else tf.convert_to_tensor(g)
        for g, t in zip(gradients, tensors)
    ]


def _either(a: Any, b: Any) -> Any:
    """Return the sum of two gradients that may be None."""
    if a is None or b is None:
        return b if a is None else a
    return tf.convert_to_tensor(a) + tf.convert_to_tensor(b)
