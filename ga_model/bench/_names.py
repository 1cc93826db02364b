"""The names of the benchmark's models. Imports nothing."""

# Of these all but the last two answer no single question: what a large table costs, and the work
# around a model.
NAMES = ("dense", "convolutional", "transformer", "embedding", "large embedding", "tiny")
USUAL_NAMES = NAMES[:4]
