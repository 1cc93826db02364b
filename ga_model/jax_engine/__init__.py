"""The engine for JAX: programs that add a microbatch, report a batch, and update.

On JAX a step is a function: it takes the values of all variables and returns new ones. So nothing
is written to while it is traced, and Python does here what TensorFlow's engine does in graphs: it
cuts batches, counts them, and calls compiled programs (`_programs`), one after the other. The
model's own `train_step` is traced in the first of them, with stand-ins, as on the other backends.
What a window has so far is a tree of arrays that the programs take and return (`_window`).

A custom step on a split batch, and a loss that does not add up, run on the full batch, and their
calls of layers go by microbatches: `_jax_calls`. Whether a function treats samples one by one is
read from its jaxpr: `_rows_apart`.

May import `_kept` and the rooms below it that do not import TensorFlow.
"""
