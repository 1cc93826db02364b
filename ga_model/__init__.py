"""Exact gradient accumulation for Keras 3 models on TensorFlow, PyTorch and JAX.

Train with the updates of a batch that does not fit in memory:

```python
from ga_model import accumulate

model = accumulate(model, microbatch_size=16)  # one added line
model.compile("adam", "mse")
model.fit(x, y, batch_size=128)  # updates of 128 samples, 16 in memory at a time
```

`AccumulatingModel` is the mixin for your own model classes, `GradientAccumulator` is for your own
training loops.

Names are imported lazily, so `python -m ga_model --help` answers at once.
"""

import importlib as _importlib
from importlib.metadata import version as _version
from typing import TYPE_CHECKING
from typing import Any as _Any

if TYPE_CHECKING:
    from ga_model._callbacks import AccumulationScheduler
    from ga_model._model import AccumulatingModel
    from ga_model._noise_scale import GradientNoiseScale
    from ga_model._wrap import accumulate
    from ga_model.backends.tensorflow.accumulator import GradientAccumulator
    from ga_model.check._compare import check_equivalence
    from ga_model.check._equivalence_report import EquivalenceReport

_MODULES = {
    "AccumulatingModel": "_model",
    "AccumulationScheduler": "_callbacks",
    "EquivalenceReport": "check._equivalence_report",
    "GradientAccumulator": "backends.{}.accumulator",
    "GradientNoiseScale": "_noise_scale",
    "accumulate": "_wrap",
    "check_equivalence": "check._compare",
}

__all__ = [
    "AccumulatingModel",
    "AccumulationScheduler",
    "EquivalenceReport",
    "GradientAccumulator",
    "GradientNoiseScale",
    "accumulate",
    "check_equivalence",
]
__version__ = _version("ga_model")


def __getattr__(name: str) -> _Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from keras import backend as _backend

    module = _MODULES[name].format(_backend.backend())
    value = getattr(_importlib.import_module(f"{__name__}.{module}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*__all__, "__version__"])
