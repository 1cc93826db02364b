"""The settings of a model as its attributes, and what its training has come to."""

from __future__ import annotations

import functools
from typing import Any

import keras

from ga_model._engine import Accumulation
from ga_model._settings import Settings
from ga_model.base._internals import layers_in


class ModelSettings:
    """What an `AccumulatingModel` answers of its accumulation."""

    @functools.cached_property
    def _accumulation(self) -> Accumulation:
        return Accumulation(self, Settings())

    @property
    def accumulation_steps(self) -> int:
        """Batches per window, an integer >= 1. A new value counts from the next window on.

        With 1 the model trains by Keras's own function, with more by another one. A `tf.function`
        of your own around `train_step` has the one of the two in it that it was traced with.
        """
        return self._accumulation.settings.accumulation_steps

    @accumulation_steps.setter
    def accumulation_steps(self, value: int) -> None:
        self._accumulation.change(accumulation_steps=value)

    @property
    def has_updated(self) -> bool:
        """Whether no batch waits for an update, as the last one made one or there was none yet.

        For callbacks, to do after an update what is to be done once per update.
        """
        return not self._accumulation.has_open_window()

    @property
    def microbatch_size(self) -> int | str | None:
        """Samples that go through the model at a time, an integer >= 1, or None for the full batch.

        A new value counts from the next batch on, and is traced when it is first used. Set to
        "auto", it reads so until `fit` or `train_on_batch` has found the largest size that fits,
        before its next batch, and then it is that number.
        """
        size: int | str | None = self._accumulation.size
        return "auto" if size is None and self._accumulation.is_automatic else size

    @microbatch_size.setter
    def microbatch_size(self, value: int | str | None) -> None:
        self._accumulation.change(microbatch_size=value)

    @property
    def skip_nonfinite(self) -> bool:
        """Whether a microbatch with NaN or Inf in any gradient is left out.

        It then changes no weight, no optimizer state, no metric, no running statistics and no
        random state of layers, and the window's mean is that of the other microbatches. Where the
        step runs on the full batch (see `loss_over`), the batch is left out as one. A window of
        which nothing is left makes no update; a number that a `train_step` logs by itself is NaN
        for a batch of which nothing is left. Terms of the loss that average over different things
        are not exact, as in windows of several batches, and a warning names them. By default it is
        False, and as with plain Keras the weights become NaN.
        """
        return self._accumulation.settings.skip_nonfinite

    @skip_nonfinite.setter
    def skip_nonfinite(self, value: bool) -> None:
        self._accumulation.change(skip_nonfinite=value)

    @property
    def loss_over(self) -> str:
        """What the loss sees at a time with a `microbatch_size`: "auto", "microbatch" or "batch".

        With "microbatch" the step runs on each microbatch, and weighted gradients are added up:
        exact for losses that are means or sums over samples, with one forward and backward pass.

        With "batch" the step runs once, on the full batch, and each outermost call of a layer or
        model in it goes by microbatches. So a loss may compare samples (contrastive, triplet) or
        divide over all of them (Dice), and a `train_step` may do whatever it does. Each microbatch
        of a call goes forward twice: first for the outputs, without a gradient; then, when the step
        takes gradients, with the gradient with respect to its outputs. Dropout draws the same
        numbers both times, and statistics move once. It costs the second forward pass, and the
        memory of what the step itself holds, such as outputs, for all samples. A call that cannot
        be split, because its outputs have no row for each sample or depend on other
        samples, runs on all samples, with one warning, and the calls inside of it are split. With
        several replicas the step sees the samples of one at a time, as it does in plain Keras.

        With "auto", the default, it is "microbatch" where Keras's own `train_step` and
        `compute_loss` have losses that are known to add up, or where `microbatch_weight` is
        overridden and the step neither clips gradients nor computes with what it has updated; and
        else "batch". Of a loss of your own the graph is read.
        """
        return self._accumulation.settings.loss_over

    @loss_over.setter
    def loss_over(self, value: str) -> None:
        self._accumulation.change(loss_over=value)

    @property
    def num_skipped_microbatches(self) -> int:
        """Microbatches that `skip_nonfinite` has left out since `compile`."""
        return int(self._accumulation.num_skipped or 0)

    # What the package asks.

    def _warn_once(self, message: str) -> None:
        """Warn, unless the present `compile` has seen the same warning."""
        self._accumulation.warn_once(message)

    def _batch_normalization_layers(self) -> list[Any]:
        """Return those that train."""
        return [
            layer
            for layer in layers_in(self)
            if isinstance(layer, keras.layers.BatchNormalization) and layer.trainable
        ]
