"""Try whether training by microbatches equals training on the full batch.

`trial` tries a step: `windows` run some samples at once and in parts, from the same state, and
`judge` compares the results. `weighing` lists possible weights of a microbatch, `verdict` is the
result. `calls` tries calls of layers.
"""
