"""Gradient accumulation itself, on any backend of Keras.

Nothing here imports a backend. `backend` is what the rest asks of one; `driver` takes a batch and
calls what `steps` has compiled by it.
"""
