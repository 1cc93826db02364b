"""Measure the gradient noise scale while a model trains, and say what it means for the batch."""

from __future__ import annotations

from typing import Any

import keras

from ga_model.base import _validate
from ga_model.sums._noise import Averages, GradientNoise
from ga_model.sums._noise_scale_words import NoiseScale

_LOG = "gradient_noise_scale"


class GradientNoiseScale(keras.callbacks.Callback):
    """Measure the gradient noise scale of a model while it trains: whether a larger batch pays.

    The noise scale is tr(Sigma) / |G|^2, with Sigma the covariance of the gradients of single
    samples and G their mean. With batches of B samples and a noise scale of B_noise, training takes
    1 + B_noise / B times the fewest updates possible, and 1 + B / B_noise times the fewest samples.
    So far below the noise scale twice the batch halves the updates, and far above it doubles the
    samples for nothing.

    How much the gradients of a window's microbatches differ gives an unbiased estimate of both
    numbers, from gradients that are there anyway. They are averaged over updates in the training
    step, and read at the end of an epoch or when an attribute is read. Weights, updates and logs
    are those of training without it. It costs one more pass over the gradients for each microbatch
    and each update, and with several replicas one more exchange of gradients for each update.

    The logs of an epoch get `gradient_noise_scale`, for the `History`, and for callbacks behind
    this one in the list, such as TensorBoard and CSVLogger. Where a `train_step` applies several
    optimizers, each has a noise scale of its own, and the name of the model's attribute is added:
    `gradient_noise_scale_generator_optimizer`.

    What to bear in mind:

    * It is the paper's B_simple, which takes the Hessian for a multiple of the identity. It tells
      the order of magnitude, and the numbers of updates and samples are those with a learning rate
      that is chosen for each batch size.
    * It changes while a model trains, mostly it grows. Look at it over the epochs.
    * It counts what the loss averages over: samples, tokens, or the sum of sample weights. The
      estimate takes these for alike and drawn at random. Tokens of one text are neither, and what
      comes out holds for texts of about the length that they have.
    * Microbatches must be drawn at random: shuffle the data.
    * A window of one microbatch tells nothing and is left out, and so is an update that is skipped
      because gradients are not finite. Windows of few microbatches tell little.

    A callback that is passed to `fit` again goes on where it ended, with the same compiled model.
    BackupAndRestore does not keep what it has.

    Args:
        decay: how much of an average is kept at every update, at least 0 and below 1. The averages
            are those of about the last 1 / (1 - decay) updates, and unbiased from the first on.
        unit: what the words call what the loss averages over, such as "tokens".
        verbose: whether the words are printed where the training ends.

    Attributes:
        noise_scale: the noise scale, a float, in what the loss averages over. Infinite where the
            estimate of |G|^2 is not positive: the noise hides the gradient. NaN before the first
            window of two microbatches.
        trace_of_covariance: average of the estimates of tr(Sigma).
        squared_gradient_norm: average of the estimates of |G|^2.
        batch_size: average of the windows' weights, in what the loss averages over.
        noise_scales: dict from the name of an optimizer's attribute to what was measured for it,
            which has `noise_scale`, `averages` with the other three, and words. The attributes
            above are those of one optimizer.

    Raises:
        TypeError, ValueError: an argument is not what it should be. While training: the model is
            no `AccumulatingModel`, its settings allow one microbatch per window only, or its loss
            is a sum; or an attribute of one optimizer is read where there are several.
        RuntimeError: another one measures the same model.

    Example:

    ```python
    model = accumulate(model, microbatch_size=8)
    model.compile("adam", "mse")
    noise = GradientNoiseScale()
    history = model.fit(x, y, batch_size=32, epochs=2, callbacks=[noise]).history
    print(noise)  # what it means for windows of 32 samples
    print(noise.noise_scale, history["gradient_noise_scale"])
    ```

    References:
        McCandlish et al., "An Empirical Model of Large-Batch Training", arXiv 1812.06162. The
        estimates, and what they become for microbatches of unlike weights: `sums/_noise.py`.
    """

    def __init__(
        self, decay: float = 0.99, *, unit: str = "samples", verbose: bool = False
    ) -> None:
        super().__init__()
        self._decay = _validate.check_decay(decay)
        self._unit = _validate.check_text("unit", unit, "samples")
        self._verbose = _validate.check_bool("verbose", verbose)
        self._noise: GradientNoise | None = None
        self._noise_scales: dict[str, NoiseScale] = {}

    def set_model(self, model: Any) -> None:
        if not hasattr(model, "close_window"):
            raise TypeError(_no_microbatches_message(model.name))
        super().set_model(model)

    def on_train_begin(self, logs: Any = None) -> None:
        model = self.model
        is_split = model.microbatch_size is not None and not model._accumulation.takes_full_batch()
        if not (model.accumulation_steps > 1 or is_split or model._accumulation.is_scheduled):
            settings = model.microbatch_size, model.loss_over
            raise ValueError(_no_second_microbatch_message(model.name, *settings))
        noise = model._accumulation.noise
        if noise.asked_by not in (None, self):
            raise RuntimeError(_measured_twice_message(model.name))
        noise.start(self, self._decay)
        self._noise = noise

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        scales = self.noise_scales
        is_measured = any(scale.averages.num_windows for scale in scales.values())
        if not (is_measured or self.model._accumulation.is_scheduled):
            self.model._warn_once(_nothing_measured_message(self.model.name))
        if logs is None:
            return
        if len(scales) < 2:
            logs[_LOG] = next((s.noise_scale for s in scales.values()), float("nan"))
        else:
            logs.update({f"{_LOG}_{name}": s.noise_scale for name, s in scales.items()})

    def on_train_end(self, logs: Any = None) -> None:
        self._noise_scales = self.noise_scales
        if self._noise is not None:
            self._noise.stop()
        if self._verbose:
            print(self)

    @property
    def noise_scales(self) -> dict[str, NoiseScale]:
        if self._noise is not None and self._noise.last_asked_by is self:
            self._noise_scales = {
                _name_of(optimizer, self.model): NoiseScale(averages, self._decay, self._unit)
                for optimizer, averages in self._noise.averages()
            }
        return dict(self._noise_scales)

    @property
    def noise_scale(self) -> float:
        return self._only().noise_scale

    @property
    def trace_of_covariance(self) -> float:
        return self._only().averages.trace_of_covariance

    @property
    def squared_gradient_norm(self) -> float:
        return self._only().averages.squared_gradient_norm

    @property
    def batch_size(self) -> float:
        return self._only().averages.batch_size

    def __repr__(self) -> str:
        scales = {name: scale.noise_scale for name, scale in self.noise_scales.items()}
        found = ", ".join(f"{name}: {value:.3g} {self._unit}" for name, value in scales.items())
        return f"<GradientNoiseScale: {found or 'nothing measured'}>"

    def __str__(self) -> str:
        scales = self.noise_scales
        if len(scales) < 2:
            return str(self._only())
        return "\n".join(f"{name}: {scale}" for name, scale in scales.items())

    def _only(self) -> NoiseScale:
        """Return what was measured for the only optimizer, also if that is nothing yet."""
        scales = self.noise_scales
        if len(scales) > 1:
            raise ValueError(_several_noise_scales_message(list(scales)))
        nothing = NoiseScale(Averages.of_nothing(), self._decay, self._unit)
        return next(iter(scales.values()), nothing)


def _name_of(optimizer: Any, model: Any) -> str:
    """Return the name of the model's attribute that holds an optimizer, or else its own."""
    names = (name for name, value in vars(model).items() if value is optimizer)
    return next(names, str(optimizer.name))


def _no_microbatches_message(model: str) -> str:
    return (
        "`GradientNoiseScale` needs a model that accumulates gradients. "
        f"Received: {model!r}, which does not. Call `accumulate(model)` before `fit`."
    )


def _no_second_microbatch_message(model: str, microbatch_size: Any, loss_over: str) -> str:
    return (
        "`GradientNoiseScale` compares the gradients of at least two microbatches per window. "
        f"Received: {model!r} with accumulation_steps=1, microbatch_size={microbatch_size}, "
        f"loss_over={loss_over!r}. Set `accumulation_steps` above 1, or "
        "`loss_over='microbatch'` and a `microbatch_size` of at most half the batch."
    )


def _measured_twice_message(model: str) -> str:
    return (
        "Only one `GradientNoiseScale` can measure a model at a time. "
        f"Received: a second one for {model!r}. Keep one of them in `callbacks`."
    )


def _nothing_measured_message(model: str) -> str:
    return (
        "No gradient noise scale was measured: it needs windows of at least two microbatches. "
        f"Received: {model!r}, where no window had two with a weight and finite gradients. "
        "Set `microbatch_size` to at most half the batch, or `accumulation_steps` above 1."
    )


def _several_noise_scales_message(names: list[str]) -> str:
    return (
        "This attribute needs a single optimizer, because each optimizer has its own noise scale. "
        f"Received: {len(names)} optimizers. "
        f"Use `noise_scales[name]`, with one of {names}."
    )
