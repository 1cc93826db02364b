"""The engine for PyTorch: it runs microbatches, keeps sums, records steps and makes updates.

Steps run eagerly, so Python does here what TensorFlow's engine does in graphs: weights are floats,
conditions are `if`, and microbatches are a `for` loop. What a step averages over is recorded from
the compiled loss; what it differentiates, from the call that takes the gradient.

A custom step on a split batch, and a loss that does not add up, run on the full batch, and their
calls of layers are split into microbatches: `_torch_calls`, and `_torch_split_call`, where one
operation of PyTorch's autograd has both passes of a call.

May import `_kept` and the rooms below it that do not import TensorFlow.
"""
