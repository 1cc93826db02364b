"""Where Keras runs on PyTorch: what runs microbatches, keeps sums, hears a step, makes updates.

Steps run eagerly, so all that TensorFlow's engine does in graphs is done in Python here: weights
are floats, conditions are `if`, and microbatches are a `for`. What a step averages over is heard
from the compiled loss; what it takes the gradient of, from the call that takes it.

A step of the user's own on a batch that is split, and a loss that does not add up, run on the full
batch, with the calls of layers by microbatches: `_torch_calls`, and `_torch_split_call`, where an
operation of PyTorch's autograd has the two passes of a call.

May import `_kept` and what stands below it that imports no TensorFlow.
"""
