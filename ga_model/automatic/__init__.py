"""`microbatch_size="auto"`: the search for the largest size that fits, batches that are repeated.

`_search`, `_budget` and `_messages` serve every backend, the rest is for TensorFlow. May import
`batch` and what stands below it.
"""
