"""The mixin that makes a Keras model accumulate gradients."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import keras
import tensorflow as tf

from ga_model import _messages, _step, _strategy, _validate, _workers
from ga_model._attributes import CompiledLossAttribute, RecordedAttribute, watch_attributes
from ga_model._auto import AutomaticSize
from ga_model._callbacks import closing_windows
from ga_model._context import ThreadValue
from ga_model._gradient_noise import GradientNoise
from ga_model._internals import layers_in
from ga_model._loss_reading import DoesNotAddUpError
from ga_model._recorder import computes_loss_as_keras, current_recording, optimizers_in
from ga_model._window import Counter, Window

_validate.check_backend(keras.backend.backend())

# What makes a layer a model: `keras.Model` has its `train_step` from there. Keras's own tests mix
# it with layers.
_Trainer = next(c for c in keras.Model.__mro__ if "train_step" in vars(c))

_in_step = ThreadValue()  # the model whose outermost `train_step` runs

if TYPE_CHECKING:  # what the mixin's `super()` finds
    from keras import Model as _Base
else:
    _Base = object


def _accumulated(train_step: Callable[..., Any]) -> Callable[..., Any]:
    """Make a `train_step` run by microbatches. The outermost one of a model does the work."""
    train_step = getattr(train_step, "python_function", train_step)  # of a `tf.function`

    @functools.wraps(train_step)
    def accumulated(self: Any, data: Any) -> Any:
        if _in_step.get() is self:  # in a step that calls that of its base
            return train_step(self, data)
        with _in_step.set(self):
            return self._run_step(functools.partial(train_step, self), data)

    return accumulated


class AccumulatingModel(_Base):
    """Mixin for Keras models: the updates of a big batch with the memory of a small one.

    Stand it left of the model class. Its settings are arguments of `compile`; everything else
    stays as it is. With `microbatch_size=rows` every batch of `fit` goes through the model that
    many rows at a time. With `accumulation_steps=K` K batches make one update. Either way the
    gradients of a *window* of microbatches are summed with the weights that the compiled loss gives
    them, and the optimizer is applied once to their mean. Weights and optimizer state are then
    those of plain Keras on the whole window: learning-rate schedules, weight decay, clipping,
    constraints and moving averages count updates. With both settings a window is K batches, each
    of them split.

    With `microbatch_size` logs and metrics are those of the whole batch, too. A `train_step` of
    your own then runs once, on the whole batch, and its calls of layers go by microbatches: exact
    for any loss and any order of updates, at the cost of one more forward pass. See `loss_over`.

    A window of several batches also ends with the epoch, before validation and before any
    callback's `on_epoch_end`, and takes what it has. `fit` begins with an empty window. In a loop
    over `train_on_batch` call `close_window` where an epoch ends.

    Not equal to the whole batch: BatchNormalization in training mode, which sees a microbatch at a
    time; dropout, which draws other masks. With `accumulation_steps`, losses that compare rows of
    several batches; and of a `train_step` with several optimizers all
    gradients are those at the window's starting weights, and what it does to gradients itself, such
    as clipping, it does to those of a batch. What is to happen once per update belongs into
    `on_update`.

    A third setting, `loss_over`, says whether the loss of a batch that is split is put together
    from those of its microbatches, or sees all rows at once.

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
    model.fit(x, y, batch_size=128)  # updates of 128 rows, 16 at a time
    ```
    """

    train_function: Any
    jit_compile: Any
    optimizer = RecordedAttribute("optimizer")
    _compile_loss = CompiledLossAttribute("_compile_loss")
    _loss_tracker = RecordedAttribute("_loss_tracker")
    _accumulation_steps = 1
    _microbatch_size: int | None = None
    _is_automatic = False  # whether the size is asked for as "auto"
    _automatic_size: AutomaticSize | None = None  # once it was, since `compile`
    _skip_nonfinite = False
    _loss_over = "auto"
    _has_read_loss = False  # of an eager model
    _has_read_writes = False  # of an eager model
    _adds_up = True  # whether the loss does over microbatches, as far as it was read
    _num_skipped: Counter | None = None  # once there is training that may skip
    _accumulation_window: Window | None = None
    _is_scheduled = False  # whether a callback of the present `fit` sets `accumulation_steps`
    _gradient_noise: GradientNoise | None = None  # once it was measured
    _accumulation_warnings: frozenset[str] = frozenset()  # those that this compile has seen

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        mro = cls.__mro__
        if _Trainer not in mro and any(
            base is not object and not issubclass(base, AccumulatingModel) for base in cls.__bases__
        ):
            raise TypeError(_messages.no_keras_model_message(cls.__name__))
        if _Trainer in mro and mro.index(_Trainer) < mro.index(AccumulatingModel):
            raise TypeError(_messages.wrong_side_message(cls.__name__))
        for name in ("accumulation_steps", "microbatch_size", "skip_nonfinite", "loss_over"):
            if not hasattr(value := inspect.getattr_static(cls, name), "__set__"):
                raise TypeError(_messages.class_attribute_message(cls.__name__, name, value))
        owner = next(c for c in mro if "train_step" in c.__dict__)
        if owner is cls or not issubclass(owner, AccumulatingModel):
            cls.train_step = _accumulated(owner.__dict__["train_step"])  # type: ignore[method-assign]
        # What the user says stands, also where the mixin stands left of it.
        for name in ("microbatch_weight", "on_update"):
            if owners := [c for c in mro if c is not AccumulatingModel and name in vars(c)]:
                setattr(cls, name, vars(owners[0])[name])

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        # Keras calls `__new__` of every base when it makes a functional model of a subclass.
        if not issubclass(cls, _Trainer) and not cls.__subclasses__():
            raise TypeError(_messages.no_keras_model_message(cls.__name__))
        return super().__new__(cls, *args, **kwargs)

    # What users call.

    @property
    def accumulation_steps(self) -> int:
        """Batches per window, an integer >= 1. A new value counts from the next window on.

        With 1 the model trains by Keras's own function, with more by another one. A `tf.function`
        of your own around `train_step` has the one of the two in it that it was traced with.
        """
        return self._accumulation_steps

    @accumulation_steps.setter
    def accumulation_steps(self, value: int) -> None:
        steps = _validate.check_accumulation_steps(value)
        _validate.check_single_accumulation(optimizers_in(vars(self)), steps)
        self._accumulation_steps = steps
        if self._accumulation_window is not None:
            self._accumulation_window.set_steps(steps)

    @property
    def has_updated(self) -> bool:
        """Whether no batch waits for an update: the last one made one, or there was none yet.

        For callbacks, to do after an update what is to be done once per update.
        """
        return self._accumulation_window is None or not self._accumulation_window.is_open()

    @property
    def microbatch_size(self) -> int | str | None:
        """Rows that go through the model at a time, an integer >= 1, or None for the whole batch.

        A new value counts from the next batch on, and is traced when it is first used. Set to
        "auto", it reads so until `fit` or `train_on_batch` has found the largest size that fits,
        before its next batch, and then it is that number.
        """
        is_unknown = self._is_automatic and self._microbatch_size is None
        return "auto" if is_unknown else self._microbatch_size

    @microbatch_size.setter
    def microbatch_size(self, value: int | str | None) -> None:
        self._set_microbatch_size(_validate.check_microbatch_size(value))

    def _asked_microbatch_size(self) -> Any:
        return "auto" if self._is_automatic else self._microbatch_size

    def _set_microbatch_size(self, size: Any) -> None:
        self._is_automatic = size == "auto"
        self._microbatch_size = None if self._is_automatic else size
        if self._is_automatic:
            self._automatic_size = self._automatic_size or AutomaticSize()
            self._automatic_size.restart()

    @property
    def skip_nonfinite(self) -> bool:
        """Whether a microbatch with NaN or Inf in any gradient is left out.

        It then changes no weight, no optimizer state, no metric, no running statistics and no
        random state of layers, and the window's mean is that of the other microbatches. Where the
        step runs on the whole batch (see `loss_over`), the batch is left out as one. A window of
        which nothing is left makes no update; a number that a `train_step` logs by itself is NaN
        for a batch of which nothing is left. Terms of the loss that average over different things
        are not exact, as in windows of several batches, and a warning names them. By default it is
        False, and as with plain Keras the weights become NaN.
        """
        return self._skip_nonfinite

    @skip_nonfinite.setter
    def skip_nonfinite(self, value: bool) -> None:
        skip = _validate.check_skip_nonfinite(value)
        _validate.check_single_finite_check(optimizers_in(vars(self)), skip)
        self._skip_nonfinite = skip

    @property
    def loss_over(self) -> str:
        """What the loss sees at a time with a `microbatch_size`: "auto", "microbatch" or "batch".

        With "microbatch" the step runs on each microbatch, and weighted gradients are added up:
        exact for losses that are means or sums over rows, with one forward and backward pass.

        With "batch" the step runs once, on the whole batch, and each outermost call of a layer or
        model in it goes by microbatches. So a loss may compare rows (contrastive, triplet) or
        divide over all of them (Dice), and a `train_step` may do whatever it does. Each microbatch
        of a call goes forward twice: first for the outputs, without a gradient; then, when the step
        takes gradients, with the gradient with respect to its outputs. Dropout draws the same
        numbers both times, and statistics move once. It costs the second forward pass, and the
        memory of what the step itself holds, such as outputs, for all rows. A call that cannot be
        split, because its outputs have no row for each row of its inputs or depend on other rows,
        runs on all rows, with one warning, and the calls inside of it are split. With several
        replicas the step sees the rows of one at a time, as it does in plain Keras.

        With "auto", the default, it is "microbatch" where Keras's own `train_step` and
        `compute_loss` have losses that are known to add up, or where `microbatch_weight` is
        overridden, and else "batch". Of a loss of your own the graph is read.
        """
        return self._loss_over

    @loss_over.setter
    def loss_over(self, value: str) -> None:
        loss_over = _validate.check_loss_over(value)
        self._loss_over = loss_over

    @property
    def num_skipped_microbatches(self) -> int:
        """Microbatches that `skip_nonfinite` has left out since `compile`."""
        return int(self._num_skipped or 0)

    def compile(
        self,
        *args: Any,
        accumulation_steps: int | None = None,
        microbatch_size: int | str | None = None,
        skip_nonfinite: bool | None = None,
        loss_over: str | None = None,
        **kwargs: Any,
    ) -> None:
        """Configure the model for training, as `keras.Model.compile` does.

        Args:
            *args: positional arguments of the model class's own `compile`.
            accumulation_steps: batches per window, an integer >= 1. None keeps the present value,
                which is 1 unless it was set.
            microbatch_size: rows per microbatch that each batch is split into, an integer >= 1; the
                last one of a batch has what is left. Or "auto": the largest size that fits in
                memory is found before the first batch, and halved where it does not fit any more.
                None keeps the present value; by default batches stay whole. To go back to that, set
                the attribute to None.
            skip_nonfinite: whether microbatches with NaN or Inf in a gradient are left out. None
                keeps the present value, which is False unless it was set.
            loss_over: "auto", "microbatch" or "batch": whether the loss of a batch that is split is
                put together from its microbatches, or sees the whole batch at the cost of a second
                forward pass. None keeps the present value, which is "auto" unless it was set.
            **kwargs: keyword arguments of the model class's own `compile`.

        Raises:
            TypeError, ValueError: a setting is no integer >= 1, or `skip_nonfinite` no bool.
            ValueError: an optimizer with `gradient_accumulation_steps` would accumulate as well, or
                `skip_nonfinite` would hide overflows from a LossScaleOptimizer.
            ValueError: `loss_over` is no choice.

        """
        if accumulation_steps is None:
            accumulation_steps = self._accumulation_steps
        if microbatch_size is None:
            microbatch_size = self._asked_microbatch_size()
        if skip_nonfinite is None:
            skip_nonfinite = self._skip_nonfinite
        if loss_over is None:
            loss_over = self._loss_over
        steps, size, skip, loss_over = _validate.check_settings(
            accumulation_steps,
            microbatch_size,
            skip_nonfinite,
            loss_over,
            optimizers_in([*args, *kwargs.values()]),
            self.dtype_policy.name == "mixed_float16" and kwargs.get("auto_scale_loss", True),
        )
        super().compile(*args, **kwargs)
        self._accumulation_steps = steps
        self._automatic_size = None
        self._set_microbatch_size(size)
        self._skip_nonfinite = skip
        self._loss_over = loss_over
        self._adds_up = True
        self._has_read_loss = False
        self._has_read_writes = False
        self._num_skipped = None
        self._accumulation_window = None
        self._gradient_noise = None
        self._accumulation_warnings = frozenset()

    def close_window(self) -> None:
        """Make the update of a partial window from the microbatches it has.

        `fit` does so at every epoch's end. Call it in a loop of your own over `train_on_batch` or
        `train_step`, where weights are read before a window is full. An empty window changes
        nothing.
        """
        if self._accumulation_window is not None:
            self._accumulation_window.close(self._measured_noise)
        if tf.executing_eagerly():
            self._warn_of_what_was_done()

    def microbatch_weight(self, x: Any, y: Any = None, sample_weight: Any = None) -> Any:
        """Return what a microbatch counts in its window's mean. Override it for a rule of your own.

        By default it returns None and the weight follows from the compiled loss: the number of loss
        values for a mean, the valid entries with a mask, the sum of the sample weights for
        `mean_with_sample_weight`; a loss that is a sum is summed. Of a `train_step` of your own,
        what its loss is divided by is read from its graph: samples, entries, a sum of a mask; a
        loss that cannot be added up is warned of. Override the method to say it yourself: then
        nothing is read, and nothing is warned of. With `microbatch_size` alone there is no need to;
        if you override it, microbatches are added up by it (see `loss_over`).

        Args:
            x, y, sample_weight: the microbatch, as `train_step` gets it. `x` is all of it where it
                is no tuple of up to three parts.

        Returns:
            A scalar tensor or number, the denominator of the microbatch's loss; or "sum" where the
            loss is a sum over rows; or None to go by the compiled loss.
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

    def fit(self, *args: Any, **kwargs: Any) -> Any:
        """Train as `keras.Model.fit` does. Each epoch closes its last window, full or not."""
        parameters = inspect.signature(super().fit).parameters
        takes_any = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
        if "callbacks" not in parameters and not takes_any:
            if self._accumulation_steps > 1:
                raise TypeError(_messages.own_fit_message(self.name))
            return super().fit(*args, **kwargs)
        kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
        positional = [name for name, p in parameters.items() if p.kind in kinds]
        position = positional.index("callbacks") if "callbacks" in positional else len(args)
        is_keras_own = getattr(super().fit, "__func__", None) is keras.Model.fit
        has_none = position >= len(args) and "callbacks" not in kwargs
        if has_none and self._is_plain() and not is_keras_own:
            return super().fit(*args, **kwargs)  # which may have callbacks where none are given
        given = args[position] if position < len(args) else kwargs.pop("callbacks", None)
        with closing_windows(self, given) as callbacks:
            if position < len(args):
                args = (*args[:position], callbacks, *args[position + 1 :])
            else:
                kwargs["callbacks"] = callbacks
            return super().fit(*args, **kwargs)

    @_accumulated
    def train_step(self, data: Any) -> Any:
        """Run the model class's own `train_step` on one batch, as a microbatch of the window."""
        train_step: Any = super().train_step
        is_keras_own = getattr(train_step, "__func__", None) is keras.Model.train_step
        if is_keras_own and self.trainable_weights and self.optimizer is None:
            raise RuntimeError(_messages.no_optimizer_message(self.name))
        return getattr(train_step, "python_function", train_step)(data)  # of a `tf.function`

    def _aggregate_additional_loss(self, loss: Any) -> Any:
        total = super()._aggregate_additional_loss(loss)
        if (recording := current_recording(self)) is not None:
            is_sum = len(loss.shape) > 0
            total = _strategy.exactly_scaled(total, is_sum)
            recording.note_additional(total, is_sum)
        return total

    def _maybe_symbolic_build(self, iterator: Any = None, data_batch: Any = None) -> None:
        if not self._is_plain():
            self._check_strategy()
        keras_builds = super()._maybe_symbolic_build
        _workers.build(keras_builds, self.distribute_strategy, iterator, data_batch)

    def _make_function(self, step_function: Any) -> Any:
        step = _workers.with_logs_that_reduce(step_function, self.distribute_strategy)
        return super()._make_function(step)

    def make_train_function(self, force: bool = False) -> Any:
        """Make the function that `fit` calls once per execution.

        There is one for every way to train that comes up, traced when it is used for the first
        time: Keras's own for plain training, and one for each combination of settings.
        Of all but the first XLA compiles parts only (see `_step`), so the outer function is made
        without.
        """
        if self.train_function is not None and not force:
            return self.train_function
        functions: dict[Any, Any] = {}

        def run(iterator: Any) -> Any:
            settings = (self._microbatch_size, self._is_automatic, self._skip_nonfinite)
            is_measured = self._measured_noise is not None
            way = (self._accumulates(), *settings, self._loss_over, is_measured)
            if way not in functions:
                functions[way] = self._make_function_of_keras()
            return functions[way](iterator)

        def train_function(iterator: Any) -> Any:
            try:
                if self._is_automatic and self._automatic_size is not None:
                    return self._automatic_size.run(self, run, iterator)
                return run(iterator)
            except (StopIteration, tf.errors.OutOfRangeError):
                raise  # the data is at its end, and nothing was added
            except BaseException as error:
                self._discard_window()  # it may have some of the step's gradients, or its weight
                if (message := _messages.found_in_graph(error)) is not None:
                    raise ValueError(message) from None
                raise

        self.train_function = train_function
        return train_function

    def _make_function_of_keras(self) -> Any:
        self._check_step()
        train_function, jit_compile = self.train_function, self.jit_compile
        if not self._is_plain():
            self.jit_compile = False
        try:
            super().make_train_function(force=True)
            return self.train_function
        finally:
            self.train_function, self.jit_compile = train_function, jit_compile

    # One batch.

    def _accumulates(self) -> bool:
        return self._accumulation_steps > 1 or not self.has_updated

    def _is_plain(self) -> bool:
        is_whole = self._microbatch_size is None and not self._is_automatic
        return is_whole and not self._accumulates() and not self._skip_nonfinite

    def _splits_calls(self) -> bool:
        """Return whether the step runs on full batches, and calls of layers by microbatches."""
        return self._microbatch_size is not None and self._takes_full_batch()

    def _takes_full_batch(self) -> bool:
        """Return whether the step of a batch that is split is to see all of it."""
        if self._loss_over != "auto":
            return self._loss_over == "batch"
        return not (self._adds_up and (computes_loss_as_keras(self) or self._has_rule()))

    def _must_add_up(self) -> bool:
        """Return whether the loss is to be read before it is computed by microbatches."""
        return self._loss_over == "auto" and not self._has_rule()

    @property
    def _on_update(self) -> Callable[[], Any] | None:
        """What the user does once per update, or None."""
        return None if type(self).on_update is AccumulatingModel.on_update else self.on_update

    def _has_rule(self) -> bool:
        """Return whether the user says what microbatches count."""
        return type(self).microbatch_weight is not AccumulatingModel.microbatch_weight

    def _run_step(self, train_step: Callable[[Any], Any], data: Any) -> Any:
        """Run `train_step` on the microbatches of a batch, and update if the window is full."""
        if self._is_plain():
            logs = train_step(data)
            _strategy.run_once_if(True, self._on_update)
            return logs
        self._check_strategy()
        window = None
        if self._accumulates():
            window = self._accumulation_window
            window = window or Window(self)
            self._accumulation_window = window
        watch_attributes(self)
        automatic = self._automatic_size if self._is_automatic else None
        run = _step.run if automatic is None else automatic.run_step
        try:
            return run(self, train_step, data, window)
        except DoesNotAddUpError:  # of a graph that was about to be made
            self._adds_up = False
            return run(self, train_step, data, window)

    def _is_to_read_writes(self) -> bool:
        """Return whether it is to be found out what a step writes to: eagerly, of the first one."""
        is_to_read = not (self._has_read_writes and tf.executing_eagerly())
        self._has_read_writes = self._has_read_writes or tf.executing_eagerly()
        return is_to_read

    def _count_skipped(self, number: Any) -> None:
        self._num_skipped = self._num_skipped or Counter()
        self._num_skipped.add(number)

    @property
    def _measured_noise(self) -> GradientNoise | None:
        """What measures the noise of gradients in the present `fit`, or None."""
        noise = self._gradient_noise
        return noise if noise is not None and noise.asked_by is not None else None

    def _discard_window(self) -> None:
        if self._accumulation_window is not None:
            self._accumulation_window.discard()

    # What is checked, and what is saved.

    def _check_step(self) -> None:
        if "train_step" in vars(self) and not self._is_plain():
            raise TypeError(_messages.instance_step_message(self.name))

    def _check_strategy(self) -> None:
        _strategy.check(self, optimizers_in(vars(self)))
        if self._is_automatic:
            _strategy.check_can_search(self.distribute_strategy)
        is_split = self._microbatch_size is not None or self._is_automatic
        if _strategy.num_replicas() > 1 and (is_split or self.jit_compile):
            layers = self._batch_normalization_layers()
            names = [layer.name for layer in layers if getattr(layer, "synchronized", False)]
            if names:
                raise ValueError(_messages.synchronized_message(names))

    def _warn_once(self, message: str) -> None:
        """Warn, unless the present `compile` has seen the same warning."""
        if message not in self._accumulation_warnings:
            self._accumulation_warnings |= {message}
            _validate.warn(message)

    def _warn_of_what_was_done(self) -> None:
        """Warn of what graphs have done so far, and could not tell."""
        if self.num_skipped_microbatches:
            self._warn_once(_messages.skipped_message(self.name))
        if self._accumulation_window is not None:
            for message in self._accumulation_window.messages(self.name):
                self._warn_once(message)

    def _batch_normalization_layers(self) -> list[Any]:
        """Return those that train."""
        return [
            layer
            for layer in layers_in(self)
            if isinstance(layer, keras.layers.BatchNormalization) and layer.trainable
        ]

    def get_compile_config(self) -> dict[str, Any]:
        """Return the model class's own compile configuration, with the settings."""
        config: dict[str, Any] = super().get_compile_config()
        if not config:
            return config
        settings = {
            "accumulation_steps": self._accumulation_steps,
            "microbatch_size": self._asked_microbatch_size(),
            "skip_nonfinite": self._skip_nonfinite,
            "loss_over": self._loss_over,
        }
        return {**config, **settings}

    def compile_from_config(self, config: dict[str, Any]) -> None:
        """Compile with a configuration that `get_compile_config` returned."""
        config = dict(config)
        steps = config.pop("accumulation_steps", self._accumulation_steps)
        size = config.pop("microbatch_size", self._asked_microbatch_size())
        skip = config.pop("skip_nonfinite", self._skip_nonfinite)
        loss_over = config.pop("loss_over", self._loss_over)
        is_keras_own = super().compile_from_config.__func__ is keras.Model.compile_from_config
        if not is_keras_own or type(self).compile is not AccumulatingModel.compile:
            super().compile_from_config(config)  # the user's own, or Keras's that asks for one
        else:
            config = keras.saving.deserialize_keras_object(config)
            self.compile(**config)
            if self.built:
                self.optimizer.build(self.trainable_variables)
        self.accumulation_steps = steps
        self.microbatch_size = size
        self.skip_nonfinite = skip
        self.loss_over = loss_over
