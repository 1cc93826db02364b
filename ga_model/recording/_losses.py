"""What the losses of a recorded step average over, and the resulting weight of a microbatch."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import tensorflow as tf

from ga_model.base._context import graph_being_made
from ga_model.base._internals_activities import (
    adds_up_activities,
    is_sum_of_activities,
    noting_activities,
)
from ga_model.graphs._microbatch import num_rows
from ga_model.hearing import _messages, _weights
from ga_model.hearing._models import computes_loss_as_keras, unpack
from ga_model.hearing._position import Position
from ga_model.hearing._step_terms import StepTerms
from ga_model.reading._denominators import (
    DRAWN,
    OF_WEIGHTS,
    UNKNOWN,
    Denominator,
    Obstacle,
    StepLoss,
    by_kind,
)
from ga_model.reading._heard_gradients import HeardGradients
from ga_model.reading._loss_reading import (
    DoesNotAddUpError,
    check_adds_up,
    kind_of_scalar,
    why_mixed,
)
from ga_model.reading._numbers_in_code import Numbers
from ga_model.reading._place import place_of
from ga_model.recording._observed_loss import Readers, observed
from ga_model.recording._outputs import has_axis_of_samples
from ga_model.replicas import _strategy


class StepLosses(StepTerms):
    """The losses of one recorded step, as they become known while it runs.

    Args:
        model: the model that is recorded.
        data: the microbatch, as `train_step` gets it.
        position: where it stands in its window.
        is_trial: whether no update follows.

    Attributes:
        graph: that the step is drawn in, or None: eagerly.
        reads_step: whether it is read what the losses of the step itself are divided by.
        heard: what is known of the step's losses, and the gradients of its tapes if it is read.
        row_counts: numbers of samples that are to keep their ratio from microbatch to microbatch:
            an int64 vector for each optimizer whose losses average over several parts of a batch.
        lost: bool scalar tensors, each whether a term was made zero because it was divided by zero,
        told: operations that keep losses from being put together, of which was told,
        told_kinds: and kinds of denominators that do so together.
    """

    def __init__(self, model: Any, data: Any, position: Position, is_trial: bool) -> None:
        super().__init__(model, data, position)
        self.graph = graph_being_made()
        self._observed: Any = None
        self._compares_samples: bool | None = None
        self._activities: list[tuple[Any, Any, Any]] | None = None  # if they are noted
        self._numbers: list[Any] = []  # that compiled losses gave, or from which these follow
        self.row_counts: list[Any] = []
        self.lost: list[Any] = []
        self.told: list[Any] = []
        self.told_kinds: set[Any] = set()
        # Whether this may be one of several microbatches, and it is not proved that they add up.
        self._is_part = not (is_trial or position.is_update or position.must_add_up)
        self._reads_losses = self._is_part and not model._has_rule()
        self.reads_step = self._is_part and not computes_loss_as_keras(model)
        self.heard = HeardGradients(self.graph, data, model)

    def observed(self, compiled: Any, metrics: Any) -> Any:
        """Return a copy of the compiled loss that notes its terms here, always the same one.

        Args:
            compiled: the compiled loss.
            metrics: what notes the calls of metrics, where logs wait.
        """
        if self._observed is None:
            calls = metrics if self._position.defers_logs else None
            check = self._check_adds_up if self._position.must_add_up else None
            reads = self._reads_losses and self.graph is not None
            readers = Readers(
                self._read_number, self._note_values, self._note_reduced, self._look_at_weights
            )
            self._observed = observed(
                compiled,
                self.note_term,
                calls,
                check,
                readers if reads else None,
                self._position.is_first,
            )
        return self._observed

    def _check_adds_up(self, loss: Any, y_true: Any, y_pred: Any) -> None:
        """Raise DoesNotAddUpError if a compiled loss is not known to add up."""
        with self.reading():
            check_adds_up(loss, y_true, y_pred)
            if why_mixed(tf.nest.flatten(y_pred), self._model) is not None:
                raise DoesNotAddUpError
            shapes = [leaf.shape for leaf in tf.nest.flatten(y_pred)]
            if self._compares_samples is None and any(None in shape[1:] for shape in shapes):
                self._compares_samples = has_axis_of_samples(self._model, self._data)
            if self._compares_samples:
                raise DoesNotAddUpError

    @contextlib.contextmanager
    def reading(self) -> Iterator[None]:
        """Take a step that this block fails to read for one whose graph cannot be read."""
        try:
            yield
        except (DoesNotAddUpError, Warning):
            raise
        except Exception:  # of a graph that is not what it is taken for
            if not self._position.is_update:  # in which nothing is put together
                self.tell(_messages.unread_loss_message(self._model.name))

    def tell(self, message: str) -> None:
        """Warn of what is exact on the full batch only, or let the step run there.

        Raises:
            DoesNotAddUpError: the step can run on the full batch.
        """
        if self._position.can_be_whole and self.graph is not None:
            raise DoesNotAddUpError
        self._model._warn_once(message)

    def _note_values(self, values: Any, arguments: Any) -> None:
        """Take it as known that the values of a loss of Keras's own follow from one sample each."""
        arguments = tf.nest.flatten(arguments)
        if all(self.heard.read(a, of_values=True).obstacle is None for a in arguments):
            self.heard.note_samples(values)

    def _note_reduced(self, values: Any, number: Any, denominator: Denominator) -> None:
        """Take it as known what Keras has divided the values of a loss by, one of each sample."""
        if number.shape.rank == 0 and self.heard.read(values).is_by_sample:
            self.heard.note(number, denominator)

    def _look_at_weights(self, name: str, sample_weight: Any) -> None:
        """Warn of sample weights that follow from several samples."""
        obstacle = self.heard.read(sample_weight, of_values=True).obstacle
        if obstacle is not None:
            subject = f"the sample weights of the loss {name!r} of {self._model.name!r}"
            self._warn_of(subject, obstacle)

    def _read_number(self, name: str, values: Any, number: Any, assumed: str) -> Denominator | None:
        """Return what a compiled loss that gives one number for all samples is divided by.

        Args:
            name: of the loss.
            values: what its `call` gave, or None where its `__call__` is the user's own.
            number: what its `__call__` gave, mostly a scalar.
            assumed: the kind of denominator that it has in a step that runs eagerly.

        Returns:
            That, or None where it has a value for each sample, or is not known.

        Warns:
            UserWarning: it computes with several samples, or divides its terms by several things;
                or it is not what is assumed of a step that will run eagerly.
        """
        self._numbers.append(number if values is None else values)
        loss = self.heard.read(self._numbers[-1])
        if values is not None and loss.is_by_sample:
            return None
        if loss.denominators is not None:
            loss = self.heard.read(number)
        subject = f"the loss {name!r} of {self._model.name!r}"
        if loss.denominators is None:
            if loss.obstacle is not None:
                self._warn_of(subject, loss.obstacle)
            return None
        found = by_kind(loss.denominators)
        has_regularizers = found.pop(OF_WEIGHTS.kind, None) is not None
        kinds = [denominator.words() for denominator in found.values()]
        is_shifted = any(d.count is None or d.once is not None for d in found.values())
        if has_regularizers and is_shifted:
            kinds.append("nothing, as they are those of weights")
        if len(kinds) > 1:
            self.told_kinds |= set(found)
            self.tell(_messages.unlike_terms_message(subject, kinds))
        elif self._model.run_eagerly and set(found) - {assumed}:
            self.tell(_messages.eager_loss_message(subject, *kinds))
        if not found or _strategy.num_replicas() > 1:
            return None
        self.lost += [flag for denominator in found.values() for flag in denominator.lost]
        means = [denominator for denominator in found.values() if denominator.count is not None]
        return means[0] if means else next(iter(found.values()))

    def note_term(self, term: _weights.Term) -> None:
        """Note a term of the compiled loss.

        Raises:
            DoesNotAddUpError: it is a product, and has to add up.

        Warns:
            UserWarning: it is a product, and cannot be put together from microbatches.
        """
        if term.is_product and self._position.must_add_up:
            raise DoesNotAddUpError
        if term.is_product and self._reads_losses:
            self.tell(_messages.product_message(term.name, self._model.name))
        self._terms.append(term)
        self.lost += term.lost
        if self.reads_step:
            self.heard.note(term.raw, Denominator(term.kind, term.weight))

    @contextlib.contextmanager
    def listening(self) -> Iterator[None]:
        """Note in a block what activity regularizers give, where no graph tells and it is needed.

        Threads of replicas would take one another's regularizers for those of the layers.
        """
        if self.graph is not None or self._position.is_update or _strategy.num_replicas() > 1:
            yield
            return
        with noting_activities(self._model) as self._activities:
            yield

    def is_sum(self, loss: Any) -> bool:
        """Return whether a loss that a layer added is a sum over samples, as far as is known now.

        A scalar in a graph is read when all are known.
        """
        if len(loss.shape) > 0:
            return True
        if self._activities is None:
            return is_sum_of_activities(self._model, loss)
        for regularizer, output, value in self._activities:
            if value is loss:
                kind = self._model._accumulation.kind_of_activities
                return adds_up_activities(regularizer) or kind(regularizer, output) == "sum"
        return False

    def note_additional(self, value: Any, is_sum: bool) -> None:
        """Note a loss that a layer or a regularizer added to the total.

        A scalar is read, where the step is: nothing else tells that it is a sum over samples.
        """
        is_known = True
        if self.reads_step and not is_sum and tf.is_symbolic_tensor(value):
            found = self.heard.read(value).denominators
            kinds = None if found is None else {denominator.kind for denominator in found}
            is_sum = kinds == {"sum"}
            is_known = is_sum or (kinds is not None and kinds <= {"rows", OF_WEIGHTS.kind})
        self._additional.append((value, is_sum))
        if self.reads_step and is_known:
            self.heard.note(value, self._added_denominator(is_sum))

    def note_call(self, tensors: Any, losses: Sequence[Any], is_sum: Sequence[bool]) -> None:
        """Note what a call that went by microbatches gave: as `note_call` of the module."""
        if self._is_part:
            self.heard.note_samples(tensors)
            for loss, is_sum_ in zip(losses, is_sum):
                self.heard.note(loss, self._added_denominator(is_sum_))

    def _added_denominator(self, is_sum: bool) -> Denominator:
        """Return what a loss that a layer added is divided by."""
        return Denominator("sum") if is_sum else Denominator("rows", self.num_rows())

    def _warn_of(self, subject: str, obstacle: Obstacle) -> None:
        """Warn of a loss that cannot be put together from microbatches."""
        place = place_of(obstacle.op)
        self.told.append(obstacle.op)
        if obstacle.why == DRAWN:
            self.tell(_messages.fixed_seed_message(subject, place))
        else:
            self.tell(_messages.obstacle_message(subject, place, obstacle.why))

    def known_kinds(self) -> set[Any]:
        """Return the kinds of what compiled losses and those of layers are divided by."""
        known = {term.kind for term in self._terms}
        return known | {"sum" if is_sum else "rows" for _, is_sum in self._additional}

    def terms_of(
        self, losses: list[StepLoss] | None, is_first: Any
    ) -> tuple[_weights.LossTerms, Any]:
        """Return what the losses that an optimizer's gradients are of ask for.

        Args:
            losses: what they were read to be, or None where nothing is read.
            is_first: bool scalar tensor, whether the window has no microbatch yet.

        Returns:
            That, and the factor of the gradients that is left, or None.

        Warns:
            UserWarning: they are no means or sums over samples, or not of one kind.
        """
        is_told = self._model._has_rule() or (self.graph is None and self._terms)
        if losses is None or is_told:
            return self.terms(), None
        name = self._model.name
        mixing = [loss for loss in losses if loss.denominators is None]
        if mixing or not losses:
            if mixing and mixing[0].obstacle is not None:
                self._warn_of(f"`train_step` of {name!r}", mixing[0].obstacle)
            else:
                self.tell(_messages.unread_loss_message(name))
            return self.terms(), None
        found = by_kind(d for loss in losses for d in loss.denominators or ())
        self.lost += [flag for denominator in found.values() for flag in denominator.lost]
        known = self.known_kinds()
        has_regularizers = found.pop(OF_WEIGHTS.kind, None) is not None
        rows = found.get("rows")
        for part in filter(None, (rows, found.get("sum"))):
            if len(counts := part.counts()) > 1:
                self.row_counts.append(tf.stack([tf.cast(count, tf.int64) for count in counts]))
        if rows is not None and len(found) == 1 and not known:
            return _weights.of_weight(tf.cast(rows.count, tf.float64)), None
        if set(found) <= known:
            return self.terms(), None
        means = [d for d in found.values() if d.count is not None]
        if not means:
            if has_regularizers:
                self.tell(_messages.not_scaled_message(name))
            return _weights.of_weight(None), None
        if len(found) > 1:
            self.told_kinds |= set(found)
            kinds = [d.words() for d in found.values()]
            self.tell(_messages.unlike_terms_message(f"`train_step` of {name!r}", kinds))
        first = means[0]
        if has_regularizers and first.once is not None:  # which the rest of the divisor would scale
            kinds = [first.words(), "nothing, as they are those of weights"]
            self.tell(_messages.unlike_terms_message(f"`train_step` of {name!r}", kinds))
        is_safe = has_regularizers and first.is_safe
        return weight_and_factor(first, is_first, self.num_rows() if is_safe else None)

    def _is_sum_of_samples(self, index: int, value: Any, is_sum: Any) -> bool:
        if is_sum or not tf.is_symbolic_tensor(value):
            return bool(is_sum)
        if self._position.must_add_up:
            kind = kind_of_scalar(value)
            if kind is None or (kind == "sum" and self._model.run_eagerly):  # which reads it once
                raise DoesNotAddUpError
            return kind == "sum"
        if not self._reads_losses or self.reads_step:
            return False
        loss = self.heard.read(value)
        if loss.obstacle is not None and loss.obstacle.why != UNKNOWN:
            self._warn_of(f"a layer of {self._model.name!r}", loss.obstacle)
        return [d.kind for d in loss.denominators or ()] == ["sum"]

    def static_rows(self) -> int | None:
        """Return the samples of the microbatch where they are known without running the graph."""
        leaves = tf.nest.flatten(unpack(self._data)[0])
        shapes = [tuple(getattr(leaf, "shape", ())) for leaf in leaves]
        return next((shape[0] for shape in shapes if shape), None)

    def numbers(self) -> Numbers:
        """Return the constants in the user's code from which losses that are read follow.

        Where microbatches may have any number of samples, none of them is that number.
        """
        is_read = self.graph is not None and self._reads_losses
        return self.heard.numbers(self._numbers) if is_read and self.heard.known_rows() else {}

    def tell_of_number(self, value: float, place: str, rows: int, counts: bool) -> None:
        """Warn of a number in the user's code.

        Args:
            value: the number.
            place: where the code computes with it.
            rows: samples of the microbatch.
            counts: whether it is taken for that number though it does not follow from it.
        """
        message = _messages.constant_count_message if counts else _messages.computed_count_message
        self.tell(message(self._model.name, f"{value:g}", place, rows))

    def num_rows(self) -> Any:
        return num_rows(unpack(self._data)[0])


def weight_and_factor(
    denominator: Denominator, is_first: Any, rows: Any = None
) -> tuple[_weights.LossTerms, Any]:
    """Return the weight that a mean with a denominator asks for, and the factor that is left.

    Args:
        denominator: the denominator, which has a count.
        is_first: bool scalar tensor, whether the window has no microbatch yet.
        rows: samples of the microbatch, where one without weight counts as a very small one.

    Returns:
        That, and what the mean or its gradients are to be multiplied by, or None.
    """
    weight, factor = denominator.weight_and_factor(is_first, rows)
    return _weights.of_weight(weight)._replace(least=denominator.least), factor
