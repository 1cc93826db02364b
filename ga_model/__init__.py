"""Exact gradient accumulation for Keras 3 models on TensorFlow.

Train with the updates of a batch that does not fit in memory:

```python
from ga_model import accumulate

model = accumulate(model, microbatch_size=16)  # one added line
model.compile("adam", "mse")
model.fit(x, y, batch_size=128)  # updates of 128 rows, 16 in memory at a time
```

`AccumulatingModel` is the same as a mixin for model classes, `GradientAccumulator` the part for
training loops of your own.
"""

from importlib.metadata import version as _version

from ga_model._accumulator import GradientAccumulator
from ga_model._callbacks import AccumulationScheduler
from ga_model._model import AccumulatingModel
from ga_model._noise_scale import GradientNoiseScale
from ga_model._wrap import accumulate
from ga_model.check._check import check_equivalence

__all__ = [
    "AccumulatingModel",
    "AccumulationScheduler",
    "GradientAccumulator",
    "GradientNoiseScale",
    "accumulate",
    "check_equivalence",
]
__version__ = _version("ga_model")
