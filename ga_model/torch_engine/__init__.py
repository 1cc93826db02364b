"""Where Keras runs on PyTorch: what runs microbatches, keeps sums, hears a step, makes updates.

Steps run eagerly, so all that TensorFlow's engine does in graphs is done in Python here: weights
are floats, conditions are `if`, and microbatches are a `for`. What a step averages over is heard
from the compiled loss; what it takes the gradient of, from the call that takes it.

May import `_kept` and what stands below it that imports no TensorFlow.
"""
