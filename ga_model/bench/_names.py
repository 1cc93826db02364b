"""The names of the benchmark's models. Imports nothing."""

USUAL_NAMES = ("dense", "convolutional", "transformer", "embedding")
TRAINED_NAMES = ("bert", "gpt2", "gpt2-lora", "vit", "resnet", "two-tower")
NAMES = (*USUAL_NAMES, "large embedding", "tiny", *TRAINED_NAMES)
KERAS_HUB_NAMES = TRAINED_NAMES[:4]  # made by KerasHub
