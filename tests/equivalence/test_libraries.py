"""Models of the libraries that build on Keras: Keras Applications, KerasHub, KerasTuner.

All start from random weights.
"""

import itertools

import keras
import keras_hub
import keras_tuner
import numpy as np
import pytest
from helpers import TOLERANCE, dense_data, relative_difference, sequential
from training import train_pair

from ga_model import AccumulatingModel, accumulate

WAYS = [{"rows": 4, "steps": 3}, {"rows": 12, "size": 4}]


def images(rows, size=32):
    generator = np.random.default_rng(1)
    x = generator.normal(size=(rows, size, size, 3)).astype(keras.config.floatx())
    return x, generator.integers(0, 3, rows)


def tokens(rows):
    """Return ids and a padding mask of 1 to 8 valid tokens, in very unequal batches."""
    generator = np.random.default_rng(2)
    ids = generator.integers(1, 11, size=(rows, 8)).astype("int32")
    lengths = 1 + (np.arange(rows) // 4 * 3) % 8
    mask = np.arange(8) < lengths[:, None]
    return ids, mask.astype("int32")


def assert_equal_training(make, compile_args, data, way):
    model, reference, start = train_pair(make, compile_args, data, **way)
    moved = [not is_key_bias(variable) for variable in model.weights]
    trained = model.get_weights(), reference.get_weights(), start
    difference = relative_difference(*(itertools.compress(weights, moved) for weights in trained))
    assert difference <= TOLERANCE["float64"]
    for weight, expected, moves in zip(*trained[:2], moved, strict=True):
        assert moves or np.abs(weight - expected).max() <= 1e-14
    return model


def is_key_bias(variable):
    """Return whether a variable has a gradient of zero, but for rounding.

    The bias of attention's keys shifts all scores of a softmax alike. Adam would make full steps of
    the rounding, so that models with attention are trained with SGD here.
    """
    return "/key" in variable.path and variable.path.endswith("/bias")


# Keras Applications.


def mobile_net():
    base = keras.applications.MobileNet((32, 32, 3), 0.25, weights=None, include_top=False)
    base.trainable = False
    pool = keras.layers.GlobalAveragePooling2D()
    return sequential((32, 32, 3), base, pool, keras.layers.Dense(3))


def classification():
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    return {"optimizer": keras.optimizers.Adam(0.01), "loss": loss, "metrics": ["accuracy"]}


@pytest.mark.gate
@pytest.mark.parametrize("way", WAYS, ids=str)
def test_a_frozen_application_matches_the_whole_batch(way, float64):
    assert_equal_training(mobile_net, classification, images(34), way)


# KerasHub.

SIZES = {"num_layers": 1, "num_heads": 2, "hidden_dim": 8}
OF_TOKENS = {"vocabulary_size": 11, "max_sequence_length": 8, "intermediate_dim": 12, "dropout": 0}


def text_classifier():
    backbone = keras_hub.models.BertBackbone(**SIZES, **OF_TOKENS)
    return keras_hub.models.BertTextClassifier(backbone, num_classes=3, dropout=0.0)


def causal_language_model():
    backbone = keras_hub.models.GPT2Backbone(**SIZES, **OF_TOKENS)
    return keras_hub.models.GPT2CausalLM(backbone, preprocessor=None)


def image_classifier():
    of_images = {"mlp_dim": 12, "dropout_rate": 0.0, "attention_dropout": 0.0}
    backbone = keras_hub.models.ViTBackbone((8, 8, 3), 4, **SIZES, **of_images)
    return keras_hub.models.ViTImageClassifier(backbone, num_classes=3)


def text_classification(rows):
    ids, mask = tokens(rows)
    inputs = {"token_ids": ids, "padding_mask": mask, "segment_ids": np.zeros_like(ids)}
    return inputs, images(rows)[1]


def next_token(rows):
    ids, mask = tokens(rows)
    y = np.roll(ids, -1, axis=1)
    return {"token_ids": ids, "padding_mask": mask}, y, mask.astype("float64")


def sgd(reduction="sum_over_batch_size"):
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction=reduction)
    return {"optimizer": keras.optimizers.SGD(0.1, momentum=0.9), "loss": loss}


def sgd_of_tokens():
    return sgd("mean_with_sample_weight")


TASKS = {
    "text classifier": (text_classifier, sgd, text_classification),
    "image classifier": (image_classifier, sgd, lambda rows: images(rows, size=8)),
    "causal language model": (causal_language_model, sgd_of_tokens, next_token),
}


@pytest.mark.gate
@pytest.mark.parametrize("way", WAYS, ids=str)
@pytest.mark.parametrize("task", TASKS)
def test_a_task_model_of_keras_hub_matches_the_whole_batch(task, way, float64):
    make, compile_args, make_data = TASKS[task]
    model = assert_equal_training(make, compile_args, make_data(34), way)
    assert isinstance(model, keras_hub.models.Task)


# KerasTuner.


@pytest.mark.gate
@pytest.mark.filterwarnings(r"ignore:(currentThread|getName)\(\) is deprecated:DeprecationWarning")
def test_keras_tuner_searches_with_accumulating_models(tmp_path):
    x, y = dense_data(24)
    built = []

    def build(hyperparameters):
        model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(2)])
        model = accumulate(
            model, accumulation_steps=hyperparameters.Choice("accumulation_steps", [1, 2, 3])
        )
        model.compile("sgd", "mse")
        built.append(model)
        return model

    tuner = keras_tuner.GridSearch(
        build, objective="val_loss", directory=tmp_path, project_name="search", overwrite=True
    )
    tuner.search(x, y, epochs=1, batch_size=4, validation_data=(x, y), verbose=0)
    steps = {model.accumulation_steps: int(model.optimizer.iterations) for model in built}
    assert {steps[1], steps[2], steps[3]} >= {6, 3, 2}
    best = tuner.get_best_models()[0]
    assert isinstance(best, AccumulatingModel)
    assert best.accumulation_steps == tuner.get_best_hyperparameters()[0]["accumulation_steps"]
    assert np.isfinite(best.evaluate(x, y, verbose=0))
