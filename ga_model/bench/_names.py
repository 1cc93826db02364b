"""The names of the benchmark's models. Imports nothing."""

# What a large table costs, and the work around a model, are single questions.
USUAL_NAMES = ("dense", "convolutional", "transformer", "embedding")
# Of the kinds that people train.
TRAINED_NAMES = ("bert", "gpt2", "gpt2-lora", "vit", "resnet", "two-tower")
NAMES = (*USUAL_NAMES, "large embedding", "tiny", *TRAINED_NAMES)
# Those that are made by KerasHub.
KERAS_HUB_NAMES = TRAINED_NAMES[:4]
