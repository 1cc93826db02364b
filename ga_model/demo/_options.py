"""The options of the demonstration. Imports nothing slow."""

from __future__ import annotations

from dataclasses import dataclass

DATASETS = ("digits", "mnist")

# The largest relative difference that counts as equal: above rounding, and below the smallest
# mistake. Measured with the defaults of the command line, except as noted:
#
#   float32   1.5e-6 to 3.3e-5   every optimizer of Keras but Lion, whose signs flip: 1.9e-2
#             3.4e-6 to 1.1e-4   Adam, seeds 0 to 9 (the largest: `ga_model demo --seed 6`)
#   float64   0 to 4.4e-14       sgd, adam, rmsprop, muon, lion
#             5.4e-10            Adam at a learning rate of 0.01, so high that float32 gives 2.3e-1
#   mistakes  4.1e-3             a last batch of 28 samples that counts like one of 32
#             5.0e-2             a partial window carried into the next epoch
#             0.9 and more       small batches without accumulation
TOLERANCE = {"float32": 1e-3, "float64": 1e-8}


@dataclass(frozen=True)
class Settings:
    """Settings that all trainings share. `learning_rate` None is the optimizer's default."""

    dataset: str = "digits"
    batch_size: int = 128
    accumulation_steps: int = 4
    epochs: int = 5
    optimizer: str = "adam"
    learning_rate: float | None = None
    dtype: str = "float32"
    seed: int = 0
