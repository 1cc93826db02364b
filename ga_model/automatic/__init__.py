"""`microbatch_size="auto"`: the search for the largest size that fits, and retried batches.

`_search`, `_budget` and `_messages` are for every backend, the rest is for TensorFlow. May import
`batch` and the rooms below it.
"""
