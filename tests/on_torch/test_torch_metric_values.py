"""Logs on PyTorch that are numbers of Python, NumPy or a tensor: exact, or told of."""

import warnings

import keras
import numpy as np
import pytest
from case import SETTINGS, plain, sgd, trained
from helpers import LIMIT, dense_data, dense_model, relative_difference, seeded
from torch_step import Step, case_of, model_of, torch

from ga_model import accumulate

UNLIKE = "A window of microbatches does not train as the full batch"


def compare(base, setting):
    """Return what differs in the logs, and what was said. Weights are equal."""
    case = case_of(model_of(base), compile=sgd(None))
    rows, settings, _ = SETTINGS[setting]
    start, expected = plain(case)
    found = trained(case, case.data(case.samples), rows, **settings)
    assert relative_difference(found.weights, expected.weights, start.weights) < 10 * LIMIT
    assert found.logs.keys() == expected.logs.keys()
    pairs = {name: (found.logs[name], known) for name, known in expected.logs.items()}
    differing = [n for n, pair in pairs.items() if not np.allclose(*pair, rtol=1e-5, atol=0)]
    return differing, list(found.warnings)


class LogsNumbers(Step):
    """A step whose loss is over some of the entries, which logs other numbers too."""

    def __init__(self, parts):
        super().__init__(parts)
        self.tracker = keras.metrics.Mean(name="tracked")
        self.total = keras.metrics.Sum(name="total")

    def forward_loss(self, x, y):
        self.errors = (self(x, training=True) - y) ** 2
        chosen = (y > 0).to(y.dtype)
        return (chosen * self.errors).sum() / chosen.sum()

    def train_step(self, data):
        x, y = data
        updates = int(self.optimizer.iterations)
        logs, errors, chosen = super().train_step(data), self.errors, (y > 0).to(y.dtype)
        self.tracker.update_state(errors.mean())
        self.total.update_state(errors.sum())
        return {
            **logs,
            "other": (chosen * errors.abs().sqrt()).sum() / chosen.sum(),
            "mean": errors.mean().item(),
            "rate": float(self.optimizer.learning_rate),
            "worst": errors.max().detach(),
            "norm": torch.stack([w.value.grad.norm() for w in self.trainable_weights]).norm(),
            "samples": x.shape[0],
            "chosen": chosen.sum().to(torch.int32),
            "most": int(100 * errors.max()),
            "updates": updates,
            "tracked": self.tracker.result(),
            "total": self.total.result(),
        }


def test_logs_that_are_no_means_over_samples_are_told_of():
    differing, (said,) = compare(LogsNumbers, "windows")
    assert set(differing) == {"norm", "worst", "most"}
    assert said.startswith(UNLIKE)
    assert any(f"the log {name!r} differs" in said for name in differing)
    assert "and 2 more things do" in said
    assert compare(LogsNumbers, "split") == ([], [])


class LogsTerms(LogsNumbers):
    """Its loss is the sum of two, which it logs after PyTorch took the gradient through them."""

    def forward_loss(self, x, y):
        z = self(x, training=True)
        self.one = torch.nn.functional.mse_loss(z, y)
        self.other = torch.nn.functional.smooth_l1_loss(z, y)
        return self.one + self.other

    def train_step(self, data):
        Step.train_step(self, data)
        self.tracker.update_state(self.other)
        return {"one": self.one, "tracked": self.tracker.result()}


@pytest.mark.parametrize("setting", ["windows", "added up"])
def test_terms_whose_gradients_were_taken_are_put_together(setting):
    assert compare(LogsTerms, setting) == ([], [])


class LogsGradients(Step):
    """It reads gradients after the update, and sets them to zero as scripts of PyTorch do."""

    def clear(self):
        pass

    def train_step(self, data):
        logs = super().train_step(data)
        gradients = [w.value.grad for w in self.trainable_weights]
        sums = [g.sum() for g in gradients if g is not None]
        logs = {**logs, "sum": sum(sums), "norm": torch.stack(sums).norm()}
        for gradient in gradients:
            gradient.zero_()
        return logs


def test_gradients_may_be_read_and_cleared_after_the_update():
    assert compare(LogsGradients, "split") == ([], [])
    differing, said = compare(LogsGradients, "windows")
    assert differing == ["norm"]
    assert ["the log 'norm' differs, however" in text for text in said] == [True]


class LogsCounts(Step):
    """Logs counts beside a loss that is zero where none of the samples is far off."""

    def forward_loss(self, x, y):
        self.errors = (self(x, training=True) - y) ** 2
        return torch.relu(self.errors - 0.8).mean()

    def train_step(self, data):
        _, y = data
        logs = super().train_step(data)
        far, errors = self.errors > 0.8, self.errors.detach().cpu().numpy()
        return {
            **logs,
            "item": logs["own"].item(),
            "active": far.float().sum(),
            "numpy": errors.mean(),
            "array": np.asarray(errors.mean(axis=0)),
            "count": (errors > 0.8).sum(),
            "near": float((y > -50.0).float().mean()),
        }


@pytest.mark.parametrize("setting", ["windows", "added up"])
def test_numbers_that_are_alike_by_chance_are_put_together(setting):
    x, y = dense_data(72)
    x[16:20], y[16:20] = 0.001 * x[16:20], 0.001 * y[16:20]  # of which none is far off
    y[50:52] = -100.0  # after all that is tried was near
    logs = []
    for rows, settings in (SETTINGS[setting][:2], (12, {})):
        model = seeded(lambda: LogsCounts(dense_model().layers))
        model = accumulate(model, **settings) if settings else model
        model.compile(keras.optimizers.SGD(0.001))
        seen = []
        callback = keras.callbacks.LambdaCallback(
            on_train_batch_end=lambda batch, logs, seen=seen: seen.append(dict(logs))
        )
        with warnings.catch_warnings():
            warnings.simplefilter("error", UserWarning)
            model.fit(x, y, batch_size=rows, shuffle=False, verbose=0, callbacks=[callback])
        logs.append(seen[12 // rows - 1 :: 12 // rows])
    for found, expected in zip(*logs, strict=True):
        assert list(found) == list(expected)
        for name, value in expected.items():
            np.testing.assert_allclose(found[name], value, rtol=1e-4, err_msg=name)
