"""Record an unchanged `train_step`.

While a step is recorded, attributes of the model return stand-ins: optimizers return gradients
instead of updating, the compiled loss records what its terms average over, metrics keep values that
wait for the full batch, and BatchNormalization layers record their moments. The weight of a
microbatch follows from the terms of the loss.

May import `base`. Knows nothing of TensorFlow or PyTorch.
"""
