"""`microbatch_size="auto"`: the search for the largest size that fits, and the memory it predicts.

May import `tools`, `recording` and `base`.
"""
