"""Whether training by microbatches is that of the full batch: one window is tried both ways.

`trial` runs some samples at once and in parts, from the same state, and compares what comes out;
`weighing` is what a microbatch may weigh, and `verdict` what was found.
"""
