"""Close the window where an epoch ends."""

from __future__ import annotations

from typing import Any

import keras


class CloseWindow(keras.callbacks.Callback):
    """Starts `fit` with an empty window and leaves none open at an epoch's end.

    `AccumulatingModel.fit` puts it before all other callbacks, so that validation, checkpoints and
    whatever else looks at the weights at the end of an epoch sees the epoch's last update.
    """

    def __init__(self, model: Any) -> None:
        super().__init__()
        self._accumulating = model

    def on_train_begin(self, logs: Any = None) -> None:
        self._accumulating._discard_window()

    def on_test_begin(self, logs: Any = None) -> None:
        self._accumulating.close_window()

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self._accumulating.close_window()


def with_first(callback: keras.callbacks.Callback, callbacks: Any) -> Any:
    """Return the `callbacks` argument of `fit` with `callback` in front.

    Args:
        callbacks: None, a callback, a list or tuple of them, or a `keras.callbacks.CallbackList`.
    """
    if isinstance(callbacks, keras.callbacks.CallbackList):
        callbacks.callbacks[:] = [
            callback,
            *(c for c in callbacks.callbacks if not isinstance(c, type(callback))),
        ]
        return callbacks
    if callbacks is None:
        return [callback]
    return [callback, *(callbacks if isinstance(callbacks, (list, tuple)) else [callbacks])]
