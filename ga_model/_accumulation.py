"""The state of one compiled model on TensorFlow, and how its next batch is trained."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

from ga_model._kept import Kept
from ga_model._settings import Settings
from ga_model.automatic._auto import AutomaticSize
from ga_model.base._identity import is_in
from ga_model.base._internals import (
    compiled_loss,
    has_metrics,
    layers_in,
    loss_tracker,
    metrics_exchange,
)
from ga_model.batch import _step
from ga_model.batch._proof import adds_up
from ga_model.batch._window import Counter, Window
from ga_model.graphs._microbatch import Batch
from ga_model.hearing._attributes import watch_attributes
from ga_model.hearing._models import computes_loss_as_keras, optimizers_in
from ga_model.reading._loss_reading import DoesNotAddUpError, kind_of_function
from ga_model.replicas import _strategy
from ga_model.replicas._optimizers import adds_up_rows, compiled
from ga_model.sums._gradient_noise import Estimate
from ga_model.sums._noise import GradientNoise
from ga_model.sums._places import has_columns


class Accumulation(Kept):
    """All that is kept for a model where Keras runs on TensorFlow.

    Args:
        model, settings: as `Kept` takes them.

    Attributes:
        noise: the noise of the gradients, as far as it was measured.
        adds_up: whether the loss does over microbatches, as far as it was read.
        is_proved: whether a step of the user's own is proved to add up, in the graph that is made.
        has_read_loss, has_read_step: whether those of an eager model were read.
    """

    automatic_size: AutomaticSize
    window: Window | None
    num_skipped: Counter | None

    def __init__(self, model: Any, settings: Settings) -> None:
        super().__init__(model, settings)
        self.automatic_size = AutomaticSize()
        self.noise = GradientNoise(Estimate)
        self.adds_up = True
        self.is_proved = False
        self.has_read_loss = self.has_read_step = False
        self._has_read_writes = False  # of an eager model
        self._most_rows: Any = None  # variable, of a batch that may be more than a microbatch
        self._kinds: dict[int, tuple[Any, str | None]] = {}  # of activity regularizers
        self._layers: list[Any] | None = None

    # What follows for the next batch.

    def splits_calls(self) -> bool:
        """Return whether the step runs on full batches, and calls of layers by microbatches."""
        return self.size is not None and self.takes_full_batch()

    def takes_full_batch(self) -> bool:
        """Return whether the step of a batch that is split is to see all of it."""
        if self.settings.loss_over != "auto":
            return self.settings.loss_over == "batch"
        is_known = computes_loss_as_keras(self._model) or self._model._has_rule()
        return not (self.adds_up and (is_known or self.is_proved))

    def must_add_up(self) -> bool:
        """Return whether the loss is to be read before it is computed by microbatches."""
        return self.settings.loss_over == "auto" and not self._model._has_rule()

    def _is_to_prove(self) -> bool:
        """Return whether a step is read that runs on full batches if it is not proved to add up."""
        return (
            self.settings.loss_over == "auto"
            and self.size is not None
            and self.adds_up
            and not (computes_loss_as_keras(self._model) or self._model._has_rule())
            and not (self.is_automatic or self.settings.skip_nonfinite or tf.executing_eagerly())
            and self.measured_noise is None
            and _strategy.num_replicas() == 1
        )

    def fills_window(self) -> bool | None:
        """Return whether the next batch fills its window, or None where the graph has to count."""
        model = self._model
        is_counted = model.run_eagerly or model.steps_per_execution != 1
        is_counted = is_counted or self._has_replicas()
        if is_counted or not self.accumulates():
            return None
        steps = self.settings.accumulation_steps
        return (steps if self.window is None else self.window.num_missing()) <= 1

    def layers_before(self) -> list[Any]:
        """Return the layers that the model had before its first batch.

        What a batch makes is there when TensorFlow draws its graph once more, where no variable may
        be made. So that both graphs are alike, it is none of these.
        """
        if self._layers is None:
            self._layers = list(layers_in(self._model))
        return self._layers

    def kind_of_activities(self, regularizer: Any, output: Any) -> str | None:
        """Return whether a regularizer gives a "sum" or a "mean" over samples, read once, or None.

        Args:
            regularizer: what a layer has as its `activity_regularizer`.
            output: what it is called with.
        """
        if id(regularizer) not in self._kinds:
            self._kinds[id(regularizer)] = regularizer, kind_of_function(regularizer, output)
        return self._kinds[id(regularizer)][1]

    def is_to_read_writes(self) -> bool:
        """Return whether it is to be found out what a step writes to: eagerly, of the first one."""
        is_to_read = not (self._has_read_writes and tf.executing_eagerly())
        self._has_read_writes = self._has_read_writes or tf.executing_eagerly()
        return is_to_read

    # One batch.

    def run_step(self, train_step: Callable[[Any], Any], data: Any) -> Any:
        """Run `train_step` on the microbatches of a batch, and update if the window is full."""
        model = self._model
        if self.is_plain():
            return self._run_plain(train_step, data)
        self.check_strategy()
        self.warn_of_accumulating_optimizers()
        window = None
        if self.accumulates():
            window = self.window = self.window or Window(model)
        watch_attributes(model)
        if window is None:
            self._make_most_rows()
            if self._splits_nothing(data):
                step = compiled(train_step) if model.jit_compile else train_step
                return self._run_plain(step, data)
        self.is_proved = self._is_to_prove() and adds_up(model, train_step, data)
        run = self.automatic_size.run_step if self.is_automatic else _step.run
        is_sparse = any(isinstance(leaf, tf.SparseTensor) for leaf in tf.nest.flatten(data))
        optimizers = optimizers_in(vars(model))
        with has_columns.set(is_sparse and not all(map(adds_up_rows, optimizers))):
            try:
                return run(model, train_step, data, window)
            except DoesNotAddUpError:  # of a graph that was about to be made
                self.adds_up = False
            return run(model, train_step, data, window)

    def _run_plain(self, train_step: Callable[[Any], Any], data: Any) -> Any:
        logs = train_step(data)
        _strategy.run_once_if(True, self._model._on_update)
        return logs

    def _splits_nothing(self, data: Any) -> bool:
        """Return whether a batch is one microbatch, as is known before its graph runs."""
        leaves = [leaf for leaf in tf.nest.flatten(data) if leaf is not None]
        if not all(isinstance(leaf, tf.Tensor) and leaf.shape.rank is not None for leaf in leaves):
            return False
        rows = {leaf.shape[0] for leaf in leaves if leaf.shape.rank}
        is_alone = _strategy.num_replicas() == 1 and not self.is_automatic
        is_heard = self.settings.skip_nonfinite or self.measured_noise is not None
        is_known = is_alone and not is_heard and len(rows) == 1 and None not in rows
        return bool(is_known and max(rows) <= self.size)

    def count_skipped(self, number: Any) -> None:
        """Count microbatches that were left out: an int64 scalar tensor of them."""
        self.num_skipped = self.num_skipped or Counter()
        self.num_skipped.add(number)

    def note_lost(self, is_lost: Any) -> None:
        """Note whether a microbatch had a term that was made zero: a bool scalar tensor."""
        self.num_lost = self.num_lost or Counter()
        self.num_lost.add(tf.cast(is_lost, tf.int64))

    def check_strategy(self) -> None:
        """Raise if the model cannot accumulate under its `tf.distribute` strategy."""
        model = self._model
        _strategy.check(model, optimizers_in(vars(model)))
        if self.is_automatic:
            _strategy.check_can_search(model.distribute_strategy)
        is_split = self.settings.microbatch_size is not None
        if _strategy.num_replicas() > 1 and (is_split or model.jit_compile):
            layers = model._batch_normalization_layers()
            names = [layer.name for layer in layers if getattr(layer, "synchronized", False)]
            if names:
                raise ValueError(_synchronized_message(names))
        if _strategy.num_replicas() > 1 and metrics_exchange() and not model.run_eagerly:
            self._check_metrics()

    def _check_metrics(self) -> None:
        """Raise if metrics are to be updated or put back where replicas cannot exchange."""
        known = [loss_tracker(self._model), *getattr(compiled_loss(self._model), "metrics", ())]
        others = [m for m in self._model.metrics if has_metrics(m) and not is_in(m, known)]
        names = [m.name for m in others if type(m) is not keras.metrics.Mean]  # which waits
        is_split = self.settings.microbatch_size is not None
        if self.settings.skip_nonfinite:
            raise ValueError(_metrics_message("skip_nonfinite=True", "skip_nonfinite=False"))
        if is_split and names and not self.splits_calls():
            received = f"a `microbatch_size` and the metrics {names}"
            raise ValueError(_metrics_message(received, 'loss_over="batch"'))
        if self._model.jit_compile and not is_split:
            raise ValueError(_metrics_message("jit_compile=True", "jit_compile=False"))

    # The window.

    def close_window(self) -> None:
        """Make the update of a partial window, and warn of what graphs have done so far."""
        if self.window is not None:
            self.window.close(self.measured_noise)
        if tf.executing_eagerly():
            self.warn_of_what_was_done()

    def note_rows(self, batch: Batch) -> None:
        """Note in the graph if a batch is more than a microbatch, if a warning may depend on it."""
        if batch.is_long and self._tells_of_size():
            self._make_most_rows()
            rows = tf.maximum(self._most_rows, batch.rows)
            self._most_rows.assign(rows)

    def _make_most_rows(self) -> None:
        """Make the variable of `note_rows`: a function that traced before could not make it."""
        if self._most_rows is None:
            self._most_rows = _strategy.make_variables(lambda: tf.zeros((), tf.int64))

    def _most_samples(self) -> int:
        return 0 if self._most_rows is None else int(self._most_rows.numpy())

    def _tells_of_size(self) -> bool:
        return super()._tells_of_size() and not self._has_replicas()

    def _has_replicas(self) -> bool:
        return self._model.distribute_strategy.num_replicas_in_sync > 1  # type: ignore[no-any-return]

    def end_fit(self) -> None:
        super().end_fit()
        self.noise.stop()


def _synchronized_message(layers: list[str]) -> str:
    return (
        "Synchronized BatchNormalization cannot exchange statistics inside a microbatch loop or "
        f"under XLA. Received: BatchNormalization layers with `synchronized=True`: {layers}. Set "
        "`synchronized=False`, or `microbatch_size=None` and `jit_compile=False`, and call "
        "`compile()` again."
    )


def _metrics_message(received: str, way_out: str) -> str:
    return (
        "With several replicas, Keras before 3.10 cannot update metrics inside a loop, a branch or "
        f"XLA. Received: {received}, with Keras {keras.__version__}. Install keras>=3.10, or set "
        f"`{way_out}`."
    )
