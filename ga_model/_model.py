"""`AccumulatingModel`, the mixin that makes a Keras model accumulate gradients."""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Callable, MutableMapping
from typing import TYPE_CHECKING, Any

import keras

from ga_model._callbacks import run_fit
from ga_model._engine import Backend, Hooks
from ga_model._model_settings import ModelSettings
from ga_model._settings import NAMES, UNCHANGED, Settings, passed
from ga_model.base._method_patch import MethodPatch
from ga_model.base._names import check_names_for, typed_with_signature_of, with_signature_of
from ga_model.base._types import Nest, Scalar, Tensor
from ga_model.core.driver import Driver
from ga_model.core.models import optimizers_in

if TYPE_CHECKING:
    from typing_extensions import Self

    # What `super()` resolves to in the mixin.

    class _Base(Hooks, keras.Model): ...

else:
    _Base = Hooks


# The base of `keras.Model` that defines `train_step`. Keras's own tests mix it with layers that are
# not models.
_Trainer = next(c for c in keras.Model.__mro__ if "train_step" in vars(c))

_keeping_metrics = MethodPatch("reset_metrics", lambda _, reset: lambda: None)


def _accumulated(train_step: Callable[..., Any]) -> Callable[..., Any]:
    """Make a `train_step` accumulate, unless another one calls it, for example by `super()`."""
    train_step = getattr(train_step, "python_function", train_step)  # unwrap a `tf.function`

    @functools.wraps(train_step)
    def accumulated(self: AccumulatingModel, *args: Any) -> Any:
        return self._accumulation.run_step(functools.partial(train_step, self), *args)

    return accumulated


class AccumulatingModel(ModelSettings, _Base):
    """Mixin for Keras models: train with the updates of a full batch in the memory of a small one.

    List it first among the bases of your class, and pass its settings to `compile`; nothing else
    changes. `microbatch_size=N` splits each batch of `fit` into microbatches of N samples.
    `accumulation_steps=K` makes one update from K batches. Either way, the gradients of a *window*
    of microbatches are summed, each weighted by what its loss averages over, and the optimizer is
    applied once to their mean. Weights and optimizer state are then those of plain Keras on the
    full batch, and learning-rate schedules, weight decay, clipping, constraints and moving averages
    count updates. With both settings, a window is K batches, each of them split.

    With `microbatch_size`, logs and metrics are those of the full batch, too. A custom `train_step`
    runs once, on the full batch, and only its calls of layers are split into microbatches. This is
    exact for any loss and any order of updates, and costs one more forward pass. See `loss_over`.

    With `accumulation_steps`, a window also closes at the end of the epoch, full or not: before
    validation, and before any callback's `on_epoch_end`. `fit` starts with an empty window. In a
    loop over `train_on_batch`, call `close_window` at the end of each epoch.

    Two things differ from the full batch: BatchNormalization in training mode normalizes each
    microbatch separately (its running averages are those of the full batch), and dropout draws
    other masks. With `accumulation_steps`, also: a loss that compares samples sees one batch at a
    time; a `train_step` with several optimizers takes all gradients at the weights the window
    started with, and processes gradients, for example clips them, once per batch. Put code that
    must run once per update into `on_update`.

    Three more settings: `loss_over` chooses whether the loss of a split batch is added up from its
    microbatches or sees all samples at once. `skip_nonfinite=True` skips microbatches with NaN or
    Inf in a gradient, and `num_skipped_microbatches` counts them. `verify=False` skips the trial of
    your own code on the first batch.

    Under `tf.distribute.MirroredStrategy` and `MultiWorkerMirroredStrategy`, a window covers all
    replicas, which exchange gradients only at the update. `microbatch_size` counts the samples of
    one replica. Create and compile the model in the strategy's scope.

    With default settings, training is bit-identical to plain Keras.

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
    optimizer: keras.optimizers.Optimizer

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        mro, mixin = cls.__mro__, AccumulatingModel
        bases = [base for base in cls.__bases__ if base is not object]
        if _Trainer not in mro and not all(issubclass(base, mixin) for base in bases):
            raise TypeError(_no_keras_model_message(cls.__name__))
        if _Trainer in mro and mro.index(_Trainer) < mro.index(mixin):
            raise TypeError(_wrong_side_message(cls.__name__))
        for name in NAMES:
            if not hasattr(value := inspect.getattr_static(cls, name), "__set__"):
                raise TypeError(_class_attribute_message(cls.__name__, name, value))
        owner = next(c for c in mro if "train_step" in vars(c))
        if owner is cls or not issubclass(owner, mixin):
            wrapped = _accumulated(vars(owner)["train_step"])
            cls.train_step = wrapped  # type: ignore[method-assign]
        # A definition by the user takes precedence, even from a base listed after the mixin.
        for name in ("microbatch_weight", "on_update"):
            if owners := [c for c in mro if c is not mixin and name in vars(c)]:
                setattr(cls, name, vars(owners[0])[name])

    def __new__(cls, *args: Any, **kwargs: Any) -> Self:
        # Keras calls `__new__` of every base when it turns a subclass into a functional model.
        if not issubclass(cls, _Trainer) and not cls.__subclasses__():
            raise TypeError(_no_keras_model_message(cls.__name__))
        instance: Self = super().__new__(cls, *args, **kwargs)
        return instance

    # Called by users.

    @with_signature_of(keras.Model.compile)
    def compile(
        self,
        *args: Any,
        accumulation_steps: int | None = UNCHANGED,
        microbatch_size: int | str | None = UNCHANGED,
        skip_nonfinite: bool | None = UNCHANGED,
        loss_over: str | None = UNCHANGED,
        verify: bool | None = UNCHANGED,
        **kwargs: Any,
    ) -> None:
        """Configure the model for training, as `keras.Model.compile` does.

        A setting that is not passed keeps its value; None resets it to the default.

        Args:
            *args: positional arguments of the model class's own `compile`.
            accumulation_steps: batches per window, an integer >= 1. None is 1.
            microbatch_size: samples per microbatch, an integer >= 1; the last microbatch of a batch
                may be smaller. Or "auto": search for the largest size that fits in memory, to
                within a tenth, before the first batch, and halve it if it no longer fits. None
                does not split batches.
            skip_nonfinite: whether to skip microbatches with NaN or Inf in a gradient. None is
                False.
            loss_over: "auto", "microbatch" or "batch": whether the loss of a split batch is added
                up from its microbatches or sees the full batch, which costs a second forward pass.
                None is "auto".
            verify: whether to try your own steps, losses, layers and metrics on the first batch,
                at once and in microbatches, before they train. None is True.
            **kwargs: keyword arguments of the model class's own `compile`.

        Raises:
            TypeError, ValueError: a setting has the wrong type or value.
            ValueError: the optimizer has `gradient_accumulation_steps` and would accumulate as
                well, or `skip_nonfinite` would hide overflows from a LossScaleOptimizer.
            ValueError: `jit_compile=True` on the PyTorch backend.
        """
        changes = passed(locals())
        settings = dataclasses.replace(self._accumulation.settings, **changes)
        check_names_for("compile", super().compile, kwargs, NAMES)
        self._check_compile_arguments(kwargs)
        is_half = self.dtype_policy.name == "mixed_float16"
        adds_scaling = is_half and kwargs.get("auto_scale_loss", True)
        settings.check_with(optimizers_in([*args, *kwargs.values()]), adds_scaling)
        super().compile(*args, **kwargs)  # may set some of the settings itself
        settings = dataclasses.replace(self._accumulation.settings, **changes)
        self._accumulation = Driver(self, settings, Backend(self))

    def describe_accumulation(self, batch_size: int | None = None) -> str:
        """Return one line that describes what the settings do.

        Args:
            batch_size: samples per batch of `fit`. None describes batches of any size.

        Example:

        ```python
        model = accumulate(model, microbatch_size=16)
        print(model.describe_accumulation(batch_size=128))
        # 128 samples per batch in 8 microbatches of 16; 1 update per batch
        ```
        """
        return Settings.of(self).describe(batch_size)  # with the size that "auto" found

    def close_window(self) -> None:
        """Make the update of a partial window from the microbatches it has so far.

        `fit` calls this at the end of every epoch. In your own loop over `train_on_batch` or
        `train_step`, call it before you read weights. On an empty window it does nothing.
        """
        self._accumulation.close_window()

    def microbatch_weight(
        self, x: Nest, y: Nest = None, sample_weight: Nest = None
    ) -> Scalar | str | None:
        """Return the weight of a microbatch in its window's mean. Override it to set your own.

        By default it returns None, and the weight is the denominator of the compiled loss: the
        number of loss values for a mean, the number of valid entries with a mask, the sum of the
        sample weights for `mean_with_sample_weight`; losses that are sums are summed. For a custom
        `train_step`, a trial on some samples of the first batch finds the weight: the number of
        samples or entries, or the sum of a mask; it warns about a loss that cannot be added up. If
        you override this method, there is no trial and no warning. With `microbatch_size` alone you
        need not override it; if you do, and the `train_step` is Keras's, microbatches are added up
        with your weights (see `loss_over`).

        Args:
            x, y, sample_weight: the microbatch, as `train_step` receives it. If it is not a tuple
                of up to three parts, all of it is `x`.

        Returns:
            A scalar tensor or number, the denominator of the microbatch's loss; or "sum" if the
            loss is a sum over samples; or None to use the denominator of the compiled loss.
        """

    def on_update(self) -> None:
        """Called after each update. Override it to move a target network, for example.

        By default it does nothing. It runs after each update, inside the graph if there is one, and
        with any settings: after a batch, or after the last batch of a window. With several
        optimizers it runs once, after all of them. Write to variables here and not in `train_step`,
        which may run once per microbatch.

        Under a `tf.distribute` strategy it runs in cross-replica context, once for all replicas:
        `variable.assign(value)` writes to all copies.

        Example:

        ```python
        def on_update(self):
            for slow, fast in zip(self.target.weights, self.online.weights):
                slow.assign(0.99 * slow + 0.01 * fast)
        ```
        """

    # Called by Keras.

    @typed_with_signature_of(keras.Model.fit)
    def fit(self, *args: Any, **kwargs: Any) -> keras.callbacks.History:
        """Train as `keras.Model.fit` does. The last window of each epoch makes an update."""
        return run_fit(self, super().fit, args, kwargs)

    @typed_with_signature_of(keras.Model.train_on_batch)
    def train_on_batch(self, *args: Any, **kwargs: Any) -> Nest:
        """Train on one batch as `keras.Model.train_on_batch` does.

        Metrics are reset at the start of a window, and cover its batches so far.
        """
        with _keeping_metrics.of([self] if self._accumulation.has_open_window() else []):
            logs = super().train_on_batch(*args, **kwargs)
        self._accumulation.warn_after_training()
        return logs

    @_accumulated
    def train_step(self, *args: Any) -> Nest:
        """Run the model class's own `train_step` on one batch, as a microbatch of the window.

        Args:
            *args: the batch; on JAX, the values of all variables and the batch.
        """
        train_step: Callable[..., Any] = super().train_step
        is_keras_own = getattr(train_step, "__func__", None) is keras.Model.train_step
        if is_keras_own and self.trainable_weights and self.optimizer is None:
            raise RuntimeError(_no_optimizer_message(self.name))
        return getattr(train_step, "python_function", train_step)(*args)  # unwrap a `tf.function`

    def save_own_variables(self, store: MutableMapping[str, Tensor]) -> None:
        """Save as `keras.Model.save_own_variables` does, and warn if a window is open."""
        self._accumulation.warn_of_saving()
        super().save_own_variables(store)

    def get_compile_config(self) -> dict[str, Any]:
        """Return the compile configuration of the model class, plus the settings."""
        config: dict[str, Any] = super().get_compile_config()
        if not config:
            return config
        return {**config, **dataclasses.asdict(self._accumulation.settings)}

    def compile_from_config(self, config: dict[str, Any]) -> None:
        """Compile with a configuration that `get_compile_config` returned."""
        config = dict(config)
        settings = {name: config.pop(name) for name in NAMES if name in config}
        is_keras_own = super().compile_from_config.__func__ is keras.Model.compile_from_config
        if not is_keras_own or type(self).compile is not AccumulatingModel.compile:
            super().compile_from_config(config)  # the user's, or Keras's, which needs the user's
        else:
            config = keras.saving.deserialize_keras_object(config)
            self.compile(**config)
            if self.built:
                self.optimizer.build(self.trainable_variables)
        self._accumulation.change(**settings)

    # For the package.

    def _overrides_microbatch_weight(self) -> bool:
        """Return whether the user has overridden `microbatch_weight`."""
        return type(self).microbatch_weight is not AccumulatingModel.microbatch_weight


def _no_optimizer_message(model: str) -> str:
    return (
        "Keras's `train_step` needs an optimizer. "
        f"Received: {model!r}, compiled with optimizer=None. "
        "Pass an optimizer to `compile()`, or override `train_step` and use optimizers of your own."
    )


def _wrong_side_message(name: str) -> str:
    return (
        "`AccumulatingModel` must come before the Keras model class in the list of bases. "
        f"Received: class {name} with a Keras model class first. "
        f"Write `class {name}(AccumulatingModel, keras.Model)`."
    )


def _class_attribute_message(name: str, setting: str, value: object) -> str:
    return (
        f"`{setting}` is a setting of each model and cannot be a class attribute. "
        f"Received: class {name} with {setting}={value!r}. "
        f"Pass it to `compile()`, or set `self.{setting}` in `__init__`."
    )


def _no_keras_model_message(name: str) -> str:
    return (
        "`AccumulatingModel` is a mixin for Keras model classes. "
        f"Received: class {name}, which is not a subclass of `keras.Model`. "
        f"Write `class {name}(AccumulatingModel, keras.Model)`."
    )
