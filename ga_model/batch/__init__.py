"""One batch: its microbatches forward and backward, their sum, the update if the window is full.

May import `calls` and the rooms below it.
"""
