"""The function that `fit` calls: one of several, chosen by the settings."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from ga_model.batch._window import fills_window


def switching(model: Any, make: Callable[[], Any]) -> Callable[[Any], Any]:
    """Return a train function that goes by what is set at each call.

    There is one function for every way to train that comes up. Of a window there are two, where
    this one is called once per batch: one for batches that are added up, and one for the batch that
    fills the window, traced when the first window is full.

    Args:
        model: an `AccumulatingModel`.
        make: function that makes the train function of the present way.
    """
    functions: dict[Any, Any] = {}

    def run(iterator: Any) -> Any:
        accumulation = model._accumulation
        settings = dataclasses.replace(accumulation.settings, accumulation_steps=1)
        is_measured = accumulation.measured_noise is not None
        is_last = accumulation.fills_window()
        way = (accumulation.accumulates(), is_last, accumulation.size, settings, is_measured)
        if way not in functions:
            functions[way] = make()
        with fills_window.set(is_last):
            logs = functions[way](iterator)
        if is_last is not None:
            accumulation.window.count_batch(is_last)
        return logs

    def train_function(iterator: Any) -> Any:
        try:
            if model._accumulation.is_automatic:
                return model._accumulation.automatic_size.run(model, run, iterator)
            return run(iterator)
        except (StopIteration, tf.errors.OutOfRangeError):
            raise  # the data is at its end, and nothing was added
        except BaseException as error:
            # The window may have some of the step's gradients, or its weight.
            model._accumulation.discard_window()
            if (message := _found_in_graph(error)) is not None:
                raise ValueError(message) from None
            raise

    return train_function


def _found_in_graph(error: BaseException) -> str | None:
    """Return what this package adds to an error that a graph raised at run time, or None.

    In such an error it stands in between what TensorFlow tells of the graph.
    """
    starts = "`microbatch_size` splits|To be split into microbatches"
    found = re.search(rf"assertion failed: \[((?:{starts})[^\]]*)\]([^|\n]*)", str(error))
    if found is None:
        return None
    numbers = [int(number) for number in re.findall(r"= \] \[(\d+)\]", found[2])]
    return found[1].replace(
        "different numbers of samples", f"{' and '.join(map(str, numbers))} samples"
    )
