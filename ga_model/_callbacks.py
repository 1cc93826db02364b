"""Callbacks that close the window at the end of an epoch, and change its size during training."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import keras

from ga_model._settings import NAMES
from ga_model.base import _validate
from ga_model.base._internals import num_updates
from ga_model.base._internals_jax import sync_variables
from ga_model.base._types import Logs
from ga_model.core.models import optimizers_in


class CloseWindow(keras.callbacks.Callback):
    """Callback that starts `fit` with an empty window and closes the window at each epoch's end.

    `AccumulatingModel.fit` puts it before all other callbacks, so that validation, checkpoints and
    everything else that reads the weights at the end of an epoch sees the epoch's last update.
    After updates, it calls `on_update_end` of the callbacks in `listeners`.
    """

    def __init__(
        self, model: keras.Model, listeners: Sequence[keras.callbacks.Callback] = ()
    ) -> None:
        super().__init__()
        self._accumulating = model
        self._listeners = listeners
        self._num_updates = 0  # as last reported to listeners
        self.has_begun = False

    def on_train_begin(self, logs: Logs | None = None) -> None:
        self._accumulating._accumulation.discard_window()

    def on_epoch_begin(self, epoch: int, logs: Logs | None = None) -> None:
        # The first epoch may not be 0: `BackupAndRestore` resumes at a later one.
        backend = self._accumulating._accumulation.backend
        backend.begin_epoch(epoch, is_first=not self.has_begun)
        self.has_begun = True
        self._num_updates = count_updates(self._accumulating)

    def on_train_end(self, logs: Logs | None = None) -> None:
        self._accumulating._accumulation.backend.finish_fit()

    def on_test_begin(self, logs: Logs | None = None) -> None:
        self._accumulating.close_window()
        self.notify_listeners(logs)

    def on_epoch_end(self, epoch: int, logs: Logs | None = None) -> None:
        self._accumulating._accumulation.warn_of_no_effect()
        self._accumulating.close_window()
        self.notify_listeners(logs)

    def notify_listeners(self, logs: Logs | None) -> None:
        """Call `on_update_end` of the listeners if there was an update since the last call."""
        if self._listeners and (number := count_updates(self._accumulating)) != self._num_updates:
            self._num_updates = number
            for listener in self._listeners:
                listener.on_update_end(number, logs)


class _NotifyListeners(CloseWindow):
    """`CloseWindow` for listeners. If a callback defines this hook, Keras waits for each batch."""

    def on_train_batch_end(self, batch: int, logs: Logs | None = None) -> None:
        self.notify_listeners(logs)


def count_updates(model: keras.Model) -> int:
    """Return the number of updates so far; with several optimizers, the largest of theirs."""
    sync_variables(model)
    optimizers = model._accumulation.backend.optimizers()
    numbers = [num_updates(optimizer) for optimizer in optimizers]  # variables or arrays
    return max((int(n.numpy() if hasattr(n, "numpy") else n) for n in numbers), default=0)


def run_fit(
    model: keras.Model, fit: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Run the `fit` of the model's class with a callback that closes windows.

    Raises:
        TypeError: `fit` does not accept callbacks, or a setting of the model was passed to it.
    """
    parameters = inspect.signature(fit).parameters
    takes_any = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    if not takes_any and (names := [n for n in NAMES if n in kwargs and n not in parameters]):
        raise TypeError(
            f"`{names[0]}` is a setting of the model. Received: fit({names[0]}="
            f"{kwargs[names[0]]!r}). Pass it to `accumulate` or `compile`, or set the attribute of "
            "that name."
        )
    if "callbacks" not in parameters and not takes_any:
        if model.accumulation_steps > 1:
            raise TypeError(_own_fit_message(model.name))
        return fit(*args, **kwargs)
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    positional = [name for name, p in parameters.items() if p.kind in kinds]
    position = positional.index("callbacks") if "callbacks" in positional else len(args)
    is_keras_own = getattr(fit, "__func__", None) is keras.Model.fit
    has_no_callbacks = position >= len(args) and "callbacks" not in kwargs
    if has_no_callbacks and model._accumulation.is_plain() and not is_keras_own:
        return fit(*args, **kwargs)  # a custom `fit` may add its own callbacks if none are passed
    user_callbacks = args[position] if position < len(args) else kwargs.pop("callbacks", None)
    default = parameters["verbose"].default if "verbose" in parameters else 1
    verbose = {"verbose": default, **dict(zip(positional, args)), **kwargs}["verbose"]
    with closing_windows(model, user_callbacks, verbose not in (0, False)) as callbacks:
        if position < len(args):
            args = (*args[:position], callbacks, *args[position + 1 :])
        else:
            kwargs["callbacks"] = callbacks
        return fit(*args, **kwargs)


@contextlib.contextmanager
def closing_windows(
    model: keras.Model, callbacks: Any, is_verbose: bool
) -> Iterator[keras.callbacks.CallbackList | list[keras.callbacks.Callback]]:
    """Yield the `callbacks` argument of `fit`, of any type, with a `CloseWindow` in front.

    Afterwards, remove it from a `CallbackList`. If `fit` fails or is interrupted, discard the open
    window.

    Warns:
        UserWarning: `fit` ran no callbacks and left a window open.
    """
    is_list = isinstance(callbacks, keras.callbacks.CallbackList)
    listed = callbacks.callbacks if is_list else keras.tree.flatten(callbacks or [])
    listeners = [c for c in listed if callable(getattr(c, "on_update_end", None))]
    close_window = _NotifyListeners(model, listeners) if listeners else CloseWindow(model)
    if is_list:
        callbacks.callbacks.insert(0, close_window)
    else:
        callbacks = [close_window, *listed]
    model._accumulation.is_verbose = is_verbose
    model._accumulation.is_scheduled = any(isinstance(c, AccumulationScheduler) for c in listed)
    try:
        yield callbacks
        if not (close_window.has_begun or model.has_updated):
            model._warn_once(_open_window_message(model.name))
    except BaseException as error:  # KeyboardInterrupt, too
        model._accumulation.discard_window()
        model._accumulation.backend.explain(error)
        raise
    finally:
        model._accumulation.end_fit()
        if is_list:
            callbacks.callbacks.remove(close_window)


class AccumulationScheduler(keras.callbacks.Callback):
    """Change `accumulation_steps` during training, by epoch or by number of updates.

    Use it to increase the batch size during training. A new value takes effect with the next
    window, without retracing. The schedule counts the epochs of `fit`, or the updates of the
    optimizer so far, `optimizer.iterations` (with several optimizers, the largest), so training
    that is resumed from a backup or a saved model continues the schedule. By update, the count is
    read before every batch; with `steps_per_execution` above 1, before every execution.

    Args:
        schedule: a dict that maps an epoch (or a number of updates so far), counted from 0, to the
            `accumulation_steps` from there on, an integer >= 1; 0 must be a key. Or a function that
            takes the epoch (or number of updates) and returns that integer.
        by: "epoch" or "update".
        log: whether to add `accumulation_steps`, as of the end of the epoch, and `num_updates`, the
            updates of the optimizer so far, to the logs of every epoch, for the `History` and for
            callbacks that follow this one in the list, such as TensorBoard and CSVLogger.

    Raises:
        TypeError, ValueError: an argument is invalid. While training: the function does not return
            an integer >= 1, or the model is not an `AccumulatingModel`.

    Example:

    ```python
    model = accumulate(model)
    model.compile("adam", "mse")
    # 4 batches per update from the third epoch on, 8 from the fifth
    scheduler = AccumulationScheduler({0: 1, 2: 4, 4: 8}, log=True)
    model.fit(x, y, batch_size=32, epochs=6, callbacks=[scheduler])
    ```
    """

    def __init__(
        self,
        schedule: Mapping[int, int] | Callable[[int], int],
        *,
        by: str = "epoch",
        log: bool = False,
    ) -> None:
        super().__init__()
        self._schedule = schedule
        self._steps_at = _validate.check_schedule(schedule)
        # The largest value, as far as it is known: a function is not called yet.
        self._max_steps = max(schedule.values()) if isinstance(schedule, Mapping) else 1
        self._by_update = _validate.check_choice("by", by, ["epoch", "update"]) == "update"
        self._log = _validate.check_bool("log", log)
        self._num_updates: int | None = None  # at which the schedule was last read

    def __repr__(self) -> str:
        by = "update" if self._by_update else "epoch"
        return f"AccumulationScheduler({self._schedule!r}, by={by!r}, log={self._log})"

    def set_model(self, model: keras.Model) -> None:
        _validate.check_accumulates("AccumulationScheduler", model)
        _validate.check_single_accumulation(optimizers_in(vars(model)), self._max_steps)
        super().set_model(model)

    def on_epoch_begin(self, epoch: int, logs: Logs | None = None) -> None:
        self._num_updates = None
        if not self._by_update:
            self.model.accumulation_steps = self._steps_at(epoch)

    def on_train_batch_begin(self, batch: int, logs: Logs | None = None) -> None:
        if self._by_update and (number := count_updates(self.model)) != self._num_updates:
            self._num_updates = number
            self.model.accumulation_steps = self._steps_at(number)

    def on_epoch_end(self, epoch: int, logs: Logs | None = None) -> None:
        if self._log and logs is not None:
            logs["accumulation_steps"] = self.model.accumulation_steps
            logs["num_updates"] = count_updates(self.model)


def _own_fit_message(model: str) -> str:
    return (
        "A callback closes the window at the end of each epoch, so `fit` must accept `callbacks`. "
        f"Received: {model!r} with a custom `fit` that does not. "
        "Let it take `**kwargs` and pass them to `super().fit`, or set `accumulation_steps=1`."
    )


def _open_window_message(model: str) -> str:
    return (
        "A callback closes the window at the end of each epoch, but none was called. "
        f"Received: {model!r} with a custom `fit` that runs no callbacks and left a window open. "
        "Pass `callbacks` to `super().fit`, or call `close_window()` at the end of each epoch."
    )
