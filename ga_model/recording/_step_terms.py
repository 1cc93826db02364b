"""The terms of a recorded step's losses, and what its microbatch weighs with all of them."""

from __future__ import annotations

from typing import Any

from ga_model.base import _numbers
from ga_model.recording import _messages, _weights
from ga_model.recording._models import unpack


class StepTerms:
    """The terms of the losses of one recorded step, as they become known while it runs.

    Args:
        model: the model that is recorded.
        data: the microbatch, as `train_step` gets it.
        position: where it stands in its window: a tuple, of which `steps`, `num_microbatches` and
            `whole` are asked for here.
    """

    def __init__(self, model: Any, data: Any, position: Any) -> None:
        self._model = model
        self._data = data
        self._position = position
        self._terms: list[_weights.Term] = []
        self._additional: list[Any] = []  # losses of layers, and of weight regularizers
        self._known_terms: tuple[tuple[int, int], _weights.LossTerms] | None = None

    def terms(self) -> _weights.LossTerms:
        """Return what the terms of the loss so far ask for."""
        so_far = (len(self._terms), len(self._additional))
        if self._known_terms is None or self._known_terms[0] != so_far:
            self._known_terms = (so_far, self._combine())
        return self._known_terms[1]

    def _combine(self) -> _weights.LossTerms:
        # Keras adds the losses of layers first, and those of weight regularizers after them.
        regularizers = [v for v in self._model.trainable_weights if getattr(v, "regularizer", None)]
        first = max(0, len(self._additional) - len(regularizers))
        regularization = self._additional[first:]
        additional = [
            (value, self._is_sum_of_samples(index))
            for index, value in enumerate(self._additional[:first])
        ]
        weight = self._weight_of_rule()
        if weight is not None:
            return _weights.rule(weight, regularization)
        position = self._position
        # What the terms weigh in the full batch is of no use where a part of it may be left out.
        whole = None if self._model.skip_nonfinite else position.whole
        terms = _weights.combine(
            self._terms,
            additional,
            regularization,
            self.num_rows(),
            position.num_microbatches if whole is None else position.steps,
            whole,
        )
        if terms.mismatch:
            self._model._warn_once(_messages.one_weight_message(terms.exact, terms.mismatch))
        if not (regularization and self._terms) or terms.weight is None:
            return terms
        return terms._replace(weight=_numbers.not_zero(terms.weight, self.num_rows()))

    def _weight_of_rule(self) -> Any:
        """Return what a rule of the user's own says that the microbatch weighs, or None."""
        return self._model.microbatch_weight(*unpack(self._data))

    def _is_sum_of_samples(self, index: int) -> bool:
        """Return whether a loss that a layer added is a sum over samples, and no mean.

        Args:
            index: of the loss among those that layers added.
        """
        raise NotImplementedError

    def num_rows(self) -> Any:
        """Return the samples of the microbatch."""
        raise NotImplementedError
