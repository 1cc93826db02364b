"""Whether training by microbatches is that of the full batch: one window is tried both ways.

`trial` tries a step, by `windows` that run some samples at once and in parts from the same state,
and `judge` compares what comes out; `weighing` is what a microbatch may weigh, `verdict` what was
found. `calls` tries calls of layers.
"""
