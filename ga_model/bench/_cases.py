"""The models of the benchmark: simple ones, and small versions of models that people train.

A step of the latter takes about 50 to 500 ms in plain Keras on two cores. KerasHub is imported only
for the models that need it.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from types import ModuleType
from typing import Any, NamedTuple

import keras
import numpy as np
from keras import layers, ops

from ga_model.base._types import Nest, Tensor
from ga_model.bench._names import NAMES


class Case(NamedTuple):
    """A model and its data."""

    make_model: Callable[[], keras.Model]  # returns a model that is not compiled
    make_optimizer: Callable[..., keras.optimizers.Optimizer]  # takes its keyword arguments
    make_data: Callable[[int], tuple[Nest, np.ndarray]]  # x and y of a number of samples
    rows: int  # samples per microbatch
    loss: str | keras.losses.Loss | Callable[[Tensor, Tensor], Tensor] = (
        "sparse_categorical_crossentropy"
    )


def random_data(
    *shape: int, below: int | None = None, targets: tuple[int, ...] = (), classes: int = 10
) -> Callable[[int], tuple[np.ndarray, np.ndarray]]:
    """Return a function that makes samples, floats or ids below a limit, with class targets."""

    def make(rows: int) -> tuple[np.ndarray, np.ndarray]:
        generator = np.random.default_rng(0)
        if below is None:
            x = generator.normal(size=(rows, *shape)).astype("float32")
        else:
            x = generator.integers(0, below, size=(rows, *shape)).astype("int32")
        return x, generator.integers(0, classes, size=(rows, *targets))

    return make


def _dense() -> keras.Model:
    """Make a model of 15 million parameters, where the optimizer takes much of the time."""
    hidden = [layers.Dense(2048, activation="relu") for _ in range(4)]
    return keras.Sequential([keras.Input((1024,)), *hidden, layers.Dense(10, "softmax")])


def _convolutional() -> keras.Model:
    def convolution(filters: int) -> keras.Layer:
        return layers.Conv2D(filters, 3, padding="same", activation="relu")

    first = [convolution(16), convolution(16), layers.MaxPooling2D()]
    second = [convolution(32), convolution(32), layers.GlobalAveragePooling2D()]
    head = layers.Dense(10, "softmax")
    return keras.Sequential([keras.Input((32, 32, 3)), *first, *second, head])


def _transformer() -> keras.Model:
    """Make one transformer block over 64 tokens, with a prediction for each token."""
    tokens = keras.Input((64,), dtype="int32")
    h = layers.Embedding(1000, 128)(tokens)
    normal = layers.LayerNormalization()(h)
    h = h + layers.MultiHeadAttention(4, 32)(normal, normal, use_causal_mask=True)
    normal = layers.LayerNormalization()(h)
    h = h + layers.Dense(128)(layers.Dense(512, activation="gelu")(normal))
    return keras.Model(tokens, layers.Dense(1000, "softmax")(layers.LayerNormalization()(h)))


def _embedding(vocabulary: int, width: int) -> keras.Model:
    """Make a model with an embedding whose gradient is sparse: a batch uses few of its rows."""
    ids = keras.Input((32,), dtype="int32")
    mean = layers.GlobalAveragePooling1D()(layers.Embedding(vocabulary, width)(ids))
    return keras.Model(ids, layers.Dense(10, "softmax")(layers.Dense(64, "relu")(mean)))


def _tiny() -> keras.Model:
    """Make a model so small that mostly the overhead around it is measured."""
    hidden = layers.Dense(16, "relu")
    return keras.Sequential([keras.Input((8,)), hidden, layers.Dense(10, "softmax")])


class Sizes(NamedTuple):
    """Sizes for `trained_cases`: layers, hidden states, and texts in tokens."""

    num_layers: int = 4
    width: int = 256
    length: int = 128
    vocabulary: int = 8000


def trained_cases(sizes: Sizes) -> tuple[Case, ...]:
    """Return small versions of models that people train, in the order of `TRAINED_NAMES`."""
    from_logits = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    side = 4 * max(sizes.width // 16, 2)
    length, vocabulary = sizes.length, sizes.vocabulary
    texts = random_data(length, below=vocabulary, targets=(length,), classes=vocabulary)
    pairs = random_data(2, max(length // 4, 1), below=vocabulary)
    adamw = functools.partial(keras.optimizers.AdamW, 1e-4)
    sentences = _as_tokens(random_data(length, below=vocabulary, classes=3), has_segments=True)
    bert = functools.partial(_text_model, "Bert", "TextClassifier", sizes, num_classes=3)
    gpt2 = functools.partial(_text_model, "GPT2", "CausalLM", sizes)
    return (
        Case(bert, adamw, sentences, 4, from_logits),
        Case(gpt2, adamw, _as_tokens(texts), 2, from_logits),
        Case(functools.partial(gpt2, lora_rank=4), adamw, _as_tokens(texts), 2, from_logits),
        Case(lambda: _vit(sizes, side), adamw, random_data(side, side, 3), 4, from_logits),
        Case(lambda: _resnet(sizes), keras.optimizers.Adam, random_data(32, 32, 3), 4),
        Case(lambda: _two_towers(sizes), keras.optimizers.Adam, pairs, 32, _contrastive),
    )


def _keras_hub() -> ModuleType:
    return importlib.import_module("keras_hub").models  # type: ignore[no-any-return]


def _text_model(
    kind: str, task: str, sizes: Sizes, lora_rank: int = 0, **arguments: Any
) -> keras.Model:
    """Make a text model of KerasHub, such as "GPT2" for the task "CausalLM"."""
    backbone = getattr(_keras_hub(), f"{kind}Backbone")(
        vocabulary_size=sizes.vocabulary,
        num_layers=sizes.num_layers,
        num_heads=max(sizes.width // 64, 1),
        hidden_dim=sizes.width,
        intermediate_dim=4 * sizes.width,
        max_sequence_length=sizes.length,
        dropout=0.1,
    )
    if lora_rank:
        backbone.enable_lora(rank=lora_rank)
    return getattr(_keras_hub(), f"{kind}{task}")(backbone, preprocessor=None, **arguments)


def _vit(sizes: Sizes, side: int) -> keras.Model:
    backbone = _keras_hub().ViTBackbone(
        image_shape=(side, side, 3),
        patch_size=(8, 8),
        num_layers=sizes.num_layers,
        num_heads=max(sizes.width // 32, 1),
        hidden_dim=sizes.width,
        mlp_dim=4 * sizes.width,
    )
    return _keras_hub().ViTImageClassifier(backbone, num_classes=10, preprocessor=None)


def _resnet(sizes: Sizes) -> keras.Model:
    """Make a network of residual blocks of three widths, with GroupNormalization."""

    def convolution(h: keras.KerasTensor, filters: int, strides: int = 1) -> keras.KerasTensor:
        h = layers.Conv2D(filters, 3, strides, padding="same", use_bias=False)(h)
        return layers.GroupNormalization(max(filters // 16, 1))(h)

    images = keras.Input((32, 32, 3))
    h = layers.Activation("relu")(convolution(images, sizes.width // 8))
    for stage in range(3):
        filters = sizes.width // 8 * 2**stage
        for block in range(max(sizes.num_layers // 2, 1)):
            strides = 2 if stage and not block else 1
            residual = layers.Activation("relu")(convolution(h, filters, strides))
            residual = convolution(residual, filters)
            if h.shape[-1] != filters:
                h = layers.Conv2D(filters, 1, strides)(h)
            h = layers.Activation("relu")(h + residual)
    h = layers.GlobalAveragePooling2D()(h)
    return keras.Model(images, layers.Dense(10, "softmax")(h))


def _two_towers(sizes: Sizes) -> keras.Model:
    """Make a model that embeds each text of a pair by its own network, as a unit vector."""

    def tower(ids: keras.KerasTensor) -> keras.KerasTensor:
        h = layers.Embedding(sizes.vocabulary, sizes.width)(ids)
        for _ in range(sizes.num_layers):
            h = h + layers.Dense(sizes.width)(layers.Dense(2 * sizes.width, "gelu")(h))
            h = layers.LayerNormalization()(h)
        return layers.UnitNormalization()(layers.GlobalAveragePooling1D()(h))

    pair = keras.Input((2, None), dtype="int32")
    return keras.Model(pair, ops.stack([tower(pair[:, 0]), tower(pair[:, 1])], axis=1))


def _contrastive(y_true: Tensor, pair: Tensor) -> Tensor:
    """Return each query's cross-entropy of finding its document among those of the batch."""
    scores = ops.matmul(pair[:, 0], ops.transpose(pair[:, 1])) / 0.07
    labels = ops.arange(ops.shape(scores)[0])
    return keras.losses.sparse_categorical_crossentropy(labels, scores, from_logits=True)


def _as_tokens(
    data: Callable[[int], tuple[np.ndarray, np.ndarray]], has_segments: bool = False
) -> Callable[[int], tuple[dict[str, np.ndarray], np.ndarray]]:
    """Convert the data of a function to the inputs of KerasHub's text models."""

    def make(rows: int) -> tuple[dict[str, np.ndarray], np.ndarray]:
        ids, targets = data(rows)
        x = {"token_ids": ids, "padding_mask": np.ones(ids.shape, "int32")}
        return x | ({"segment_ids": np.zeros(ids.shape, "int32")} if has_segments else {}), targets

    return make


_SENTENCES = random_data(64, below=1000, targets=(64,), classes=1000)
_SGD = keras.optimizers.SGD
_CASES = (
    Case(_dense, keras.optimizers.Adam, random_data(1024), 16),
    Case(_convolutional, keras.optimizers.Adam, random_data(32, 32, 3), 8),
    Case(_transformer, keras.optimizers.AdamW, _SENTENCES, 4),
    Case(lambda: _embedding(200_000, 32), _SGD, random_data(32, below=200_000), 64),
    Case(lambda: _embedding(1_000_000, 64), _SGD, random_data(32, below=1_000_000), 32),
    Case(_tiny, keras.optimizers.Adam, random_data(8), 8),
    *trained_cases(Sizes()),
)
CASES = dict(zip(NAMES, _CASES, strict=True))
