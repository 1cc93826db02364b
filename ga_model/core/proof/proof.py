"""Find out of a step whether its training by microbatches is that of the full batch."""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np

from ga_model.core.backend import Backend
from ga_model.core.proof.runner import StepRunner, samples_for_trial
from ga_model.core.proof.trial import windows
from ga_model.core.proof.verdict import Judge, Verdict
from ga_model.core.proof.weighing import Weighing
from ga_model.hearing._attributes import watch_attributes
from ga_model.hearing._python_state import python_state

_SAMPLES = 11  # an odd number


def of_step(model: Any, backend: Backend, data: Any) -> tuple[Verdict, Exception | None]:
    """Try the step of a model on some samples, and leave the model as it was.

    Args:
        model: the model.
        backend: what it runs on.
        data: a batch.

    Returns:
        What is found, and the error if it cannot be tried.
    """
    state = python_state(model)
    watch_attributes(model)
    try:
        with warnings.catch_warnings(), np.errstate(all="ignore"):
            warnings.simplefilter("ignore")
            runner = StepRunner(model, backend, samples_for_trial(data, _SAMPLES))
            tried = list(windows(runner, _SAMPLES))
            if not any(window.rate for window in tried):
                raise ValueError("All gradients are zero, or not finite.")
            return Judge(runner, tried).verdict(), None
    except Exception as error:  # whatever code of the user's raises on other samples
        return Verdict(Weighing("samples")), error
    finally:
        state.put_back()
        backend.forget("trial")
