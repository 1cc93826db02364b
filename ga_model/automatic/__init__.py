"""`microbatch_size="auto"`: the search for the largest size that fits, batches that are repeated.

May import `batch` and what stands below it.
"""
