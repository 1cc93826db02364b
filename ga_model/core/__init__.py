"""Backend-independent gradient accumulation.

Nothing here imports a backend: `backend` defines what one must provide. `driver` trains a batch
with the functions that `steps` and `updates` compile.
"""
