"""The settings of an accumulating model, as properties that can be set between batches."""

from __future__ import annotations

import functools

import keras

from ga_model._engine import Backend
from ga_model._settings import Settings
from ga_model.base._internals import layers_in
from ga_model.core.driver import Driver


class ModelSettings:
    """Base of `AccumulatingModel` with the properties for its settings and its progress."""

    @functools.cached_property
    def _accumulation(self) -> Driver:
        return Driver(self, Settings(), Backend(self))

    @property
    def accumulation_steps(self) -> int:
        """Batches per window, an integer >= 1. A new value takes effect with the next window.

        Your own `tf.function` around `train_step` sees a new value only when it is retraced, and
        then raises an error for values above 1.
        """
        return self._accumulation.settings.accumulation_steps

    @accumulation_steps.setter
    def accumulation_steps(self, value: int) -> None:
        self._accumulation.change(accumulation_steps=value)

    @property
    def has_updated(self) -> bool:
        """Whether the last batch completed a window. Also True before the first batch.

        If it is True in a callback's `on_train_batch_end`, an update was made. A partial window
        makes its update at the end of the epoch: to act once per update, define `on_update_end`.
        """
        return not self._accumulation.has_open_window()

    @property
    def microbatch_size(self) -> int | str | None:
        """Samples that go through the model at a time, an integer >= 1, or None for the full batch.

        A new value takes effect with the next batch, and is traced once. If you set it to "auto",
        it reads "auto" until `fit` or `train_on_batch` has found the largest size that fits, before
        its next batch, and then reads that size.
        """
        size: int | str | None = self._accumulation.size
        return "auto" if size is None and self._accumulation.is_automatic else size

    @microbatch_size.setter
    def microbatch_size(self, value: int | str | None) -> None:
        self._accumulation.change(microbatch_size=value)

    @property
    def skip_nonfinite(self) -> bool:
        """Whether microbatches with NaN or Inf in a gradient are skipped. False by default.

        A skipped microbatch changes no weight, optimizer state, metric, running statistics or
        random state of layers; the window's mean is that of the other microbatches. If the step
        runs on the full batch (see `loss_over`), the whole batch is skipped. If all microbatches of
        a window are skipped, there is no update; if all of a batch are, values that a `train_step`
        logs itself are NaN. As in windows of several batches, loss terms with different
        denominators are not exact, and a warning names them. With False, NaN reaches the weights,
        as in plain Keras.
        """
        return self._accumulation.settings.skip_nonfinite

    @skip_nonfinite.setter
    def skip_nonfinite(self, value: bool) -> None:
        self._accumulation.change(skip_nonfinite=value)

    @property
    def loss_over(self) -> str:
        """How to compute the loss of a split batch. One of "auto", "microbatch" and "batch".

        With "microbatch", the step runs on each microbatch, and weighted gradients are added up.
        This is exact for losses that are means or sums over samples, and takes one forward and
        backward pass.

        With "batch", the step runs once, on the full batch, and each outermost call of a layer or
        model in it is split into microbatches. So a loss may compare samples (contrastive, triplet)
        or divide by sums over all of them (Dice), and a `train_step` may do anything. Each
        microbatch of a call runs forward twice: first without gradients, for the outputs; and again
        when the step computes gradients, to backpropagate those of the outputs. Dropout draws the
        same numbers both times, and running statistics are updated once. The cost is the second
        forward pass, and the memory of what the step itself holds for all samples, such as outputs.
        A call that cannot be split, because its outputs do not have one row per sample or depend on
        other samples, runs on all samples, with one warning; calls inside it are split. With
        several replicas the step sees the samples of one replica, as in plain Keras.

        "auto", the default, chooses "batch" for your own `train_step` or `compute_metrics`.
        Otherwise it chooses "microbatch" if the loss adds up, which is known for Keras's losses and
        tried for yours (see `verify`), or if you override `microbatch_weight`; else "batch".
        """
        return self._accumulation.settings.loss_over

    @loss_over.setter
    def loss_over(self, value: str) -> None:
        self._accumulation.change(loss_over=value)

    @property
    def verify(self) -> bool:
        """Whether your own code is tried before it trains. True by default.

        In the trial, your `train_step`, `compute_loss`, losses, layers and metrics run on samples
        of the first batch (half of a microbatch, but at least 7; of a model with more than 5
        million values, 7), at once and in parts, and the model is restored afterwards. If they do
        not train exactly, a warning names what differs. Models that consist of Keras's own classes
        are not tried. With False, your losses, and the gradients of your step, are assumed to be
        means over samples, and one warning says so. With `microbatch_size` and `loss_over="auto"`,
        your own step then always sees the full batch, which is exact.
        """
        return self._accumulation.settings.verify

    @verify.setter
    def verify(self, value: bool) -> None:
        self._accumulation.change(verify=value)

    @property
    def num_skipped_microbatches(self) -> int:
        """Number of microbatches that `skip_nonfinite` has skipped since `compile`."""
        counters = self._accumulation.counters
        return 0 if counters is None else int(counters.skipped)

    # For the package.

    def _warn_once(self, message: str) -> None:
        """Warn, unless the same warning was given since `compile`."""
        self._accumulation.warn_once(message)

    def _batch_normalization_layers(self) -> list[keras.layers.BatchNormalization]:
        """Return the trainable BatchNormalization layers."""
        return [
            layer
            for layer in layers_in(self)
            if isinstance(layer, keras.layers.BatchNormalization) and layer.trainable
        ]
