"""The mixin that makes a Keras model accumulate gradients."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import keras

from ga_model._callbacks import run_fit
from ga_model._engine import Accumulation, Hooks
from ga_model._model_settings import ModelSettings
from ga_model._settings import NAMES, UNCHANGED, passed
from ga_model._subclasses import Trainer, accumulated, prepare
from ga_model.base import _messages
from ga_model.base._names import check_names_for, showing, showing_only
from ga_model.hearing._attributes import CompiledLossAttribute, RecordedAttribute
from ga_model.hearing._models import optimizers_in

if TYPE_CHECKING:
    from typing_extensions import Self

    # What the mixin's `super()` finds.

    class _Base(Hooks, keras.Model): ...

else:
    _Base = Hooks


class AccumulatingModel(ModelSettings, _Base):
    """Mixin for Keras models: the updates of a full batch with the memory of a small one.

    Stand it left of the model class. Its settings are arguments of `compile`; everything else
    stays as it is. With `microbatch_size=N` every batch of `fit` goes through the model N
    samples at a time. With `accumulation_steps=K` K batches make one update. Either way the
    gradients of a *window* of microbatches are summed with the weights that the compiled loss gives
    them, and the optimizer is applied once to their mean. Weights and optimizer state are then
    those of plain Keras on the whole window: learning-rate schedules, weight decay, clipping,
    constraints and moving averages count updates. With both settings a window is K batches, each
    of them split.

    With `microbatch_size` logs and metrics are those of the full batch, too. A `train_step` of
    your own then runs once, on the full batch, and its calls of layers go by microbatches: exact
    for any loss and any order of updates, at the cost of one more forward pass. See `loss_over`.

    A window of several batches also ends with the epoch, before validation and before any
    callback's `on_epoch_end`, and takes what it has. `fit` begins with an empty window. In a loop
    over `train_on_batch` call `close_window` where an epoch ends.

    Not equal to the full batch: BatchNormalization in training mode, which sees a microbatch at a
    time, though its running averages are those of the full batch; dropout, which draws other masks.
    With `accumulation_steps`, losses that compare samples of several batches; and of a `train_step`
    with several optimizers all gradients are those at the window's starting weights, and what it
    does to gradients itself, such as clipping, it does to those of a batch. What is to happen once
    per update belongs into `on_update`.

    A third setting, `loss_over`, says whether the loss of a batch that is split is put together
    from those of its microbatches, or sees all samples at once.

    A fourth, `skip_nonfinite=True`, leaves out microbatches with NaN or Inf in a gradient;
    `num_skipped_microbatches` counts them.

    Under `tf.distribute.MirroredStrategy` and `MultiWorkerMirroredStrategy` the window is that of
    all replicas, which exchange gradients at the update only. `microbatch_size` is what one replica
    takes at a time. Make and compile the model in the strategy's scope.

    With none of the settings training is plain Keras.

    Example:

    ```python
    class Net(AccumulatingModel, keras.Model):
        def __init__(self):
            super().__init__()
            self.dense = keras.layers.Dense(1)

        def call(self, inputs):
            return self.dense(inputs)

    model = Net()
    model.compile("adam", "mse", microbatch_size=16)
    model.fit(x, y, batch_size=128)  # updates of 128 samples, 16 at a time
    ```
    """

    train_function: Any
    optimizer = RecordedAttribute("optimizer")
    _compile_loss = CompiledLossAttribute("_compile_loss")
    _loss_tracker = RecordedAttribute("_loss_tracker")

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        prepare(cls, AccumulatingModel)

    def __new__(cls, *args: Any, **kwargs: Any) -> Self:
        # Keras calls `__new__` of every base when it makes a functional model of a subclass.
        if not issubclass(cls, Trainer) and not cls.__subclasses__():
            raise TypeError(_messages.no_keras_model_message(cls.__name__))
        made: Self = super().__new__(cls, *args, **kwargs)
        return made

    # What users call.

    @showing(keras.Model.compile)
    def compile(
        self,
        *args: Any,
        accumulation_steps: int | None = UNCHANGED,
        microbatch_size: int | str | None = UNCHANGED,
        skip_nonfinite: bool | None = UNCHANGED,
        loss_over: str | None = UNCHANGED,
        **kwargs: Any,
    ) -> None:
        """Configure the model for training, as `keras.Model.compile` does.

        Settings that are not passed stay as they are; None switches a setting off.

        Args:
            *args: positional arguments of the model class's own `compile`.
            accumulation_steps: batches per window, an integer >= 1. None is 1.
            microbatch_size: samples per microbatch that each batch is split into, an integer >= 1;
                the last one of a batch has what is left. Or "auto": the largest size that fits in
                memory is found before the first batch, and halved where it does not fit any more.
                None leaves batches whole.
            skip_nonfinite: whether microbatches with NaN or Inf in a gradient are left out. None is
                False.
            loss_over: "auto", "microbatch" or "batch": whether the loss of a batch that is split is
                put together from its microbatches, or sees the full batch at the cost of a second
                forward pass. None is "auto".
            **kwargs: keyword arguments of the model class's own `compile`.

        Raises:
            TypeError, ValueError: a setting is no integer >= 1, or `skip_nonfinite` no bool.
            ValueError: an optimizer with `gradient_accumulation_steps` would accumulate as well, or
                `skip_nonfinite` would hide overflows from a LossScaleOptimizer.
            ValueError: `loss_over` is no choice.

        """
        given = passed(
            accumulation_steps=accumulation_steps,
            microbatch_size=microbatch_size,
            skip_nonfinite=skip_nonfinite,
            loss_over=loss_over,
        )
        settings = dataclasses.replace(self._accumulation.settings, **given)
        check_names_for("compile", super().compile, kwargs, NAMES)
        is_half = self.dtype_policy.name == "mixed_float16"
        adds_scaling = is_half and kwargs.get("auto_scale_loss", True)
        settings.check_with(optimizers_in([*args, *kwargs.values()]), adds_scaling)
        super().compile(*args, **kwargs)  # which may set some itself
        settings = dataclasses.replace(self._accumulation.settings, **given)
        self._accumulation = Accumulation(self, settings)

    def describe_accumulation(self, batch_size: int | None = None) -> str:
        """Return one line that says what the settings do.

        Args:
            batch_size: samples per batch of `fit`, or None.

        Example:

        ```python
        model = accumulate(model, microbatch_size=16)
        print(model.describe_accumulation(batch_size=128))
        # 128 samples per batch in 8 microbatches of 16; 1 update per batch
        ```
        """
        size = self.microbatch_size  # one that was found, too
        settings = dataclasses.replace(self._accumulation.settings, microbatch_size=size)
        return settings.describe(batch_size)

    def close_window(self) -> None:
        """Make the update of a partial window from the microbatches it has.

        `fit` does so at every epoch's end. Call it in a loop of your own over `train_on_batch` or
        `train_step`, where weights are read before a window is full. An empty window changes
        nothing.
        """
        self._accumulation.close_window()

    def microbatch_weight(self, x: Any, y: Any = None, sample_weight: Any = None) -> Any:
        """Return what a microbatch counts in its window's mean. Override it for a rule of your own.

        By default it returns None and the weight follows from the compiled loss: the number of loss
        values for a mean, the valid entries with a mask, the sum of the sample weights for
        `mean_with_sample_weight`; a loss that is a sum is summed. Of a `train_step` of your own,
        what its loss is divided by is read from its graph: samples, entries, a sum of a mask; a
        loss that cannot be added up is warned of. Override the method to say it yourself: then the
        loss is not read, and not warned of. (What the step does to gradients, and in which order it
        updates, still is.) With `microbatch_size` alone there is no need to; if you override it,
        microbatches are added up by it (see `loss_over`).

        Args:
            x, y, sample_weight: the microbatch, as `train_step` gets it. `x` is all of it where it
                is no tuple of up to three parts.

        Returns:
            A scalar tensor or number, the denominator of the microbatch's loss; or "sum" where the
            loss is a sum over samples; or None to go by the compiled loss.
        """

    def on_update(self) -> None:
        """Do what is to happen once per update, such as moving a target network. Override it.

        By default it does nothing. It runs after each update, in the graph, whatever the settings
        are, and without any: after a batch, or after the last batch of a window. With several
        optimizers it runs once, after all of them. A `train_step` that runs once per microbatch
        would write to variables once per microbatch.

        Under a `tf.distribute` strategy it runs in cross-replica context, once for all replicas:
        `variable.assign(value)` writes to all copies.

        Example:

        ```python
        def on_update(self):
            for slow, fast in zip(self.target.weights, self.online.weights):
                slow.assign(0.99 * slow + 0.01 * fast)
        ```
        """

    # What Keras calls.

    @showing_only(keras.Model.fit)
    def fit(self, *args: Any, **kwargs: Any) -> Any:
        """Train as `keras.Model.fit` does. Each epoch closes its last window, full or not."""
        return run_fit(self, super().fit, args, kwargs)

    @showing_only(keras.Model.train_on_batch)
    def train_on_batch(self, *args: Any, **kwargs: Any) -> Any:
        """Train on one batch as `keras.Model.train_on_batch` does."""
        logs = super().train_on_batch(*args, **kwargs)
        self._accumulation.warn_of_what_was_done()
        return logs

    @accumulated
    def train_step(self, data: Any) -> Any:
        """Run the model class's own `train_step` on one batch, as a microbatch of the window."""
        train_step: Any = super().train_step
        is_keras_own = getattr(train_step, "__func__", None) is keras.Model.train_step
        if is_keras_own and self.trainable_weights and self.optimizer is None:
            raise RuntimeError(_no_optimizer_message(self.name))
        return getattr(train_step, "python_function", train_step)(data)  # of a `tf.function`

    def get_compile_config(self) -> dict[str, Any]:
        """Return the model class's own compile configuration, with the settings."""
        config: dict[str, Any] = super().get_compile_config()
        if not config:
            return config
        return {**config, **self._accumulation.settings.config()}

    def compile_from_config(self, config: dict[str, Any]) -> None:
        """Compile with a configuration that `get_compile_config` returned."""
        config = dict(config)
        settings = {name: config.pop(name) for name in NAMES if name in config}
        is_keras_own = super().compile_from_config.__func__ is keras.Model.compile_from_config
        if not is_keras_own or type(self).compile is not AccumulatingModel.compile:
            super().compile_from_config(config)  # the user's own, or Keras's that asks for one
        else:
            config = keras.saving.deserialize_keras_object(config)
            self.compile(**config)
            if self.built:
                self.optimizer.build(self.trainable_variables)
        self._accumulation.change(**settings)

    # What the package asks.

    @property
    def _on_update(self) -> Callable[[], Any] | None:
        """What the user does once per update, or None."""
        return None if type(self).on_update is AccumulatingModel.on_update else self.on_update

    def _has_rule(self) -> bool:
        """Return whether the user says what microbatches count."""
        return type(self).microbatch_weight is not AccumulatingModel.microbatch_weight


def _no_optimizer_message(model: str) -> str:
    return (
        "Keras's `train_step` needs an optimizer. "
        f"Received: {model!r}, compiled with optimizer=None. "
        "Pass an optimizer to `compile()`, or override `train_step` and use optimizers of your own."
    )
