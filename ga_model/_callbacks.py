"""Close the window where an epoch ends."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import keras

from ga_model import _strategy


class CloseWindow(keras.callbacks.Callback):
    """Starts `fit` with an empty window and leaves none open at an epoch's end.

    `AccumulatingModel.fit` puts it before all other callbacks, so that validation, checkpoints and
    whatever else looks at the weights at the end of an epoch sees the epoch's last update.
    """

    def __init__(self, model: Any) -> None:
        super().__init__()
        self._accumulating = model
        self._has_begun = False

    def on_train_begin(self, logs: Any = None) -> None:
        self._accumulating._discard_window()

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        if not self._has_begun:  # `BackupAndRestore` may have set the first epoch
            _strategy.check_same_epoch(self._accumulating.distribute_strategy, epoch)
        self._has_begun = True

    def on_test_begin(self, logs: Any = None) -> None:
        self._accumulating.close_window()

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self._accumulating.close_window()
        self._accumulating._warn_of_skipped()


@contextlib.contextmanager
def closing_windows(model: Any, callbacks: Any) -> Iterator[Any]:
    """Give the `callbacks` argument of `fit` with a `CloseWindow` in front.

    Where `fit` fails or is interrupted, the open window is forgotten.

    Args:
        model: an `AccumulatingModel`.
        callbacks: None, a callback, a list or tuple of them, or a `keras.callbacks.CallbackList`,
            which is left as it was in the end.
    """
    close_window = CloseWindow(model)
    is_list = isinstance(callbacks, keras.callbacks.CallbackList)
    if is_list:
        callbacks.callbacks.insert(0, close_window)
    elif isinstance(callbacks, (list, tuple)):
        callbacks = [close_window, *callbacks]
    else:
        callbacks = [close_window] if callbacks is None else [close_window, callbacks]
    try:
        yield callbacks
    except BaseException as error:  # KeyboardInterrupt, too, leaves nothing behind
        model._discard_window()
        _strategy.explain(error, model.distribute_strategy)
        raise
    finally:
        if is_list:
            callbacks.callbacks.remove(close_window)
