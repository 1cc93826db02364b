"""Models of the kinds that people train, with random weights and of few layers.

Plain Keras's step of each takes about 50 to 500 ms on two cores. Those of KerasHub are made when
they are asked for, as the package does not need it.
"""

from __future__ import annotations

import functools
from typing import Any

import keras
import numpy as np
from keras import layers, ops

from ga_model.bench._case import Case, random_ids, random_numbers


def trained_cases(
    num_layers: int = 4, width: int = 256, length: int = 128, vocabulary: int = 8000
) -> tuple[Case, ...]:
    """Return the cases, in the order of their names.

    Args:
        num_layers: of each model, or of each of its parts.
        width: of its hidden states.
        length: tokens of a sample.
        vocabulary: number of tokens there are.
    """
    sizes = (num_layers, width, length, vocabulary)
    adam = functools.partial(keras.optimizers.AdamW, 1e-4)
    from_logits = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    side, heads = 4 * max(width // 16, 2), max(width // 32, 1)

    def tokens(targets: tuple[int, ...], classes: int, has_segments: bool) -> Any:
        ids = random_ids(vocabulary, length, targets, classes)
        return functools.partial(_tokens, ids, has_segments)

    next_tokens = tokens((length,), vocabulary, False)
    return (
        Case(functools.partial(_bert, *sizes), adam, tokens((), 3, True), 4, from_logits),
        Case(functools.partial(_gpt2, *sizes, False), adam, next_tokens, 2, from_logits),
        Case(functools.partial(_gpt2, *sizes, True), adam, next_tokens, 2, from_logits),
        Case(
            functools.partial(_vit, num_layers, width, heads, side),
            adam,
            random_numbers(side, side, 3),
            4,
            from_logits,
        ),
        Case(
            functools.partial(_resnet, max(num_layers // 2, 1), width // 8),
            keras.optimizers.Adam,
            random_numbers(32, 32, 3),
            4,
        ),
        Case(
            functools.partial(_two_towers, num_layers, width, vocabulary),
            keras.optimizers.Adam,
            functools.partial(_pairs, length, vocabulary),
            32,
            _contrastive_loss,
        ),
    )


def _keras_hub() -> Any:
    import keras_hub  # type: ignore[import-untyped]

    return keras_hub.models


def _transformer(num_layers: int, width: int, length: int, vocabulary: int) -> dict[str, Any]:
    return {
        "vocabulary_size": vocabulary,
        "num_layers": num_layers,
        "num_heads": max(width // 64, 1),
        "hidden_dim": width,
        "intermediate_dim": 4 * width,
        "max_sequence_length": length,
        "dropout": 0.1,
    }


def _bert(*sizes: int) -> Any:
    models = _keras_hub()
    backbone = models.BertBackbone(**_transformer(*sizes))
    return models.BertTextClassifier(backbone, num_classes=3, preprocessor=None)


def _gpt2(num_layers: int, width: int, length: int, vocabulary: int, has_lora: bool) -> Any:
    models = _keras_hub()
    backbone = models.GPT2Backbone(**_transformer(num_layers, width, length, vocabulary))
    if has_lora:
        backbone.enable_lora(rank=4)
    return models.GPT2CausalLM(backbone, preprocessor=None)


def _vit(num_layers: int, width: int, heads: int, side: int) -> Any:
    models = _keras_hub()
    backbone = models.ViTBackbone(
        image_shape=(side, side, 3),
        patch_size=(8, 8),
        num_layers=num_layers,
        num_heads=heads,
        hidden_dim=width,
        mlp_dim=4 * width,
    )
    return models.ViTImageClassifier(backbone, num_classes=10, preprocessor=None)


def _resnet(blocks: int, filters: int) -> Any:
    """Residual blocks of three sizes, normalized by GroupNormalization."""

    def convolution(h: Any, filters: int, strides: int = 1) -> Any:
        h = layers.Conv2D(filters, 3, strides, padding="same", use_bias=False)(h)
        return layers.GroupNormalization(max(filters // 16, 1))(h)

    images = keras.Input((32, 32, 3))
    h = layers.Activation("relu")(convolution(images, filters))
    for stage in range(3):
        for block in range(blocks):
            number, strides = filters * 2**stage, 2 if stage and not block else 1
            residual = layers.Activation("relu")(convolution(h, number, strides))
            residual = convolution(residual, number)
            if h.shape[-1] != number:
                h = layers.Conv2D(number, 1, strides)(h)
            h = layers.Activation("relu")(h + residual)
    h = layers.GlobalAveragePooling2D()(h)
    return keras.Model(images, layers.Dense(10, "softmax")(h))


def _two_towers(num_layers: int, width: int, vocabulary: int) -> Any:
    """Embeddings of queries and of documents, two unit vectors for each pair."""

    def tower(name: str) -> tuple[Any, Any]:
        ids = keras.Input((None,), dtype="int32", name=name)
        h = layers.Embedding(vocabulary, width)(ids)
        for _ in range(num_layers):
            h = h + layers.Dense(width)(layers.Dense(2 * width, "gelu")(h))
            h = layers.LayerNormalization()(h)
        return ids, layers.UnitNormalization()(layers.GlobalAveragePooling1D()(h))

    query_ids, queries = tower("queries")
    document_ids, documents = tower("documents")
    pair = ops.stack([queries, documents], axis=1)
    return keras.Model({"queries": query_ids, "documents": document_ids}, pair)


def _contrastive_loss(y_true: Any, pair: Any) -> Any:
    """Return how ill each query tells its document from the others of the batch."""
    scores = ops.matmul(pair[:, 0], ops.transpose(pair[:, 1])) / 0.07
    own = ops.arange(ops.shape(scores)[0])
    return keras.losses.sparse_categorical_crossentropy(own, scores, from_logits=True)


def _tokens(make: Any, has_segments: bool, rows: int) -> tuple[Any, Any]:
    """Return what the models of KerasHub take that get text."""
    ids, targets = make(rows)
    x = {"token_ids": ids, "padding_mask": np.ones(ids.shape, "int32")}
    if has_segments:
        x["segment_ids"] = np.zeros(ids.shape, "int32")
    return x, targets


def _pairs(length: int, vocabulary: int, rows: int) -> tuple[Any, Any]:
    generator = np.random.default_rng(0)
    queries = generator.integers(0, vocabulary, (rows, max(length // 8, 1))).astype("int32")
    documents = generator.integers(0, vocabulary, (rows, max(length // 4, 1))).astype("int32")
    return {"queries": queries, "documents": documents}, np.zeros(rows, "int32")


TRAINED = trained_cases()
