"""Half precision: the range of windows is that of the full batch."""

import keras
import numpy as np
from conftest import set_dtype
from helpers import dense_data, dense_model, num_updates, seeded

from ga_model import accumulate


def test_a_light_first_microbatch_does_not_push_the_others_out_of_range():
    set_dtype("mixed_float16")
    weights = np.where(np.arange(64) % 32 < 4, 1 / 1024, 1.0)  # the first of 8 microbatches
    for settings, rows in (({}, 32), ({"accumulation_steps": 8}, 4)):
        model = accumulate(seeded(dense_model), **settings)
        optimizer = keras.optimizers.LossScaleOptimizer(
            keras.optimizers.SGD(0.1), initial_scale=2.0**12, dynamic_growth_steps=1000
        )
        model.compile(optimizer, keras.losses.MeanSquaredError("mean_with_sample_weight"))
        arguments = {"batch_size": rows, "epochs": 4, "shuffle": False, "verbose": 0}
        model.fit(*dense_data(64), sample_weight=weights, **arguments)
        assert (num_updates(optimizer), float(optimizer.dynamic_scale)) == (8, 2.0**12)
