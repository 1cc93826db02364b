"""Measure the gradient noise scale during training, and say what it means for the batch size."""

from __future__ import annotations

from typing import NamedTuple

import keras

from ga_model.base import _validate
from ga_model.base._types import Logs
from ga_model.core.noise import Averages, GradientNoise

_LOG = "gradient_noise_scale"
_FEW_UPDATES = 10
_LEAST, _MOST = 0.01, 10**9  # the noise scales that the text prints as numbers


class NoiseScale(NamedTuple):
    """The measurement for one optimizer. Its `str` explains the result.

    Attributes:
        averages: the smoothed estimates.
        decay: the share of an average that each update keeps.
        unit: the name of what the loss averages over, for the text.
    """

    averages: Averages
    decay: float
    unit: str

    @property
    def noise_scale(self) -> float:
        """The noise scale: infinite if noise hides the gradient, NaN before the first window."""
        trace, norm, _, number = self.averages
        if not number:
            return float("nan")
        return max(trace, 0.0) / norm if norm > 0.0 else float("inf")

    def __str__(self) -> str:
        _, norm, batch_size, number = self.averages
        if not number:
            return "No window has had two microbatches yet, so nothing is known about the noise."
        unit, noise_scale = self.unit, self.noise_scale
        updates = min(number, round(1 / (1 - self.decay)))
        of = f"mean of about the last {updates:,} updates" if updates > 1 else "of one update"
        if norm <= 0.0:
            chance = " With so few updates, this may be chance." if updates < _FEW_UPDATES else ""
            return (
                "The noise hides the gradient: the estimate of its squared norm is not positive "
                f"({norm:.2g}, {of}).{chance} A window has {_count(batch_size)} {unit}, far "
                "fewer than the noise scale, or the training has converged. To measure it, average "
                "over more updates with a larger `decay`, or use larger windows."
            )
        if noise_scale < _LEAST:
            return (
                f"The gradient has no measurable noise ({of}): a smaller batch than "
                f"{_count(batch_size)} {unit} makes the same updates."
            )
        half, now, twice = (  # updates and samples, in multiples of the fewest (equation 2.11)
            (1.0 + noise_scale / size, 1.0 + size / noise_scale)
            for size in (batch_size / 2, batch_size, batch_size * 2)
        )
        return (
            f"The gradient noise scale is about {_number(noise_scale, 2)} {unit} ({of}). "
            f"A window has {_count(batch_size)}: it needs {_number(now[0])} times the fewest "
            f"updates possible and {_number(now[1])} times the fewest {unit}. Twice the window "
            f"would take {_change(twice[0], now[0])} updates and {_change(twice[1], now[1])} "
            f"{unit}; half of it {_change(half[0], now[0])} updates and "
            f"{_change(half[1], now[1])} {unit}, each with a learning rate that fits. "
            + _verdict(batch_size, noise_scale)
        )


class GradientNoiseScale(keras.callbacks.Callback):
    """Measure the gradient noise scale during training, to see whether a larger batch pays.

    The noise scale is tr(Sigma) / |G|^2, where Sigma is the covariance of the per-sample gradients
    and G their mean. With batches of B samples and a noise scale of B_noise, training takes
    1 + B_noise / B times the fewest updates possible, and 1 + B / B_noise times the fewest samples.
    So doubling a batch far below the noise scale halves the updates; doubling one far above it only
    doubles the samples.

    The differences between the gradients of a window's microbatches give unbiased estimates of both
    numbers, from gradients that are computed anyway. The training step averages them over updates;
    they are read at the end of an epoch, or when you read an attribute. Weights, updates and other
    logs do not change. The cost is one more pass over the gradients per microbatch and per update,
    and with several replicas one more exchange of gradients per update.

    The logs of an epoch get `gradient_noise_scale`, for the `History` and for callbacks that follow
    this one in the list, such as TensorBoard and CSVLogger. If a `train_step` applies several
    optimizers, each has its own noise scale, and the name of the model's attribute is appended:
    `gradient_noise_scale_generator_optimizer`.

    Notes:

    * It is B_simple of the paper, which assumes that the Hessian is a multiple of the identity.
      Read it as an order of magnitude. The numbers of updates and samples assume a learning rate
      chosen for each batch size.
    * It changes during training; usually it grows. Follow it over the epochs.
    * Its unit is what the loss averages over: samples, tokens, or the sum of sample weights. The
      estimate assumes that these are drawn independently. Tokens of one text are not, so the result
      holds for texts of about the same length.
    * Microbatches must be random samples: shuffle the data.
    * Windows of one microbatch are ignored, and so are updates that are skipped because gradients
      are not finite. Windows of few microbatches give noisy estimates.

    If you pass the callback to `fit` again, with the same compiled model, it continues its
    averages. BackupAndRestore does not save them.

    Args:
        decay: the share of an average that each update keeps, >= 0 and < 1. The averages cover
            about the last 1 / (1 - decay) updates, and are unbiased from the first update on.
        unit: the name of what the loss averages over, such as "tokens", for the printed text.
        verbose: whether to print the text at the end of training.

    Attributes:
        noise_scale: the noise scale, a float, in units of what the loss averages over. Infinite if
            the estimate of |G|^2 is not positive: the noise hides the gradient. NaN before the
            first window of two microbatches.
        trace_of_covariance: average of the estimates of tr(Sigma).
        squared_gradient_norm: average of the estimates of |G|^2.
        batch_size: average of the windows' weights, in units of what the loss averages over.
        noise_scales: dict that maps the name of each optimizer's attribute to its measurement, with
            `noise_scale`, `averages` (the other three) and the printed text. Use it if there are
            several optimizers; the attributes above need a single one.

    Raises:
        TypeError, ValueError: an argument is invalid. During training: the model is not an
            `AccumulatingModel`, its settings allow only one microbatch per window, or its loss is a
            sum. Or an attribute for a single optimizer is read and there are several.
        RuntimeError: another callback already measures the model.

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
        estimates for microbatches of different weights: `ga_model/core/noise.py`.
    """

    def __init__(
        self, decay: float = 0.99, *, unit: str = "samples", verbose: bool = False
    ) -> None:
        super().__init__()
        self._decay = _validate.check_decay(decay)
        self._unit = _validate.check_type("unit", unit, str, "a string", "Pass 'samples'.")
        self._verbose = _validate.check_bool("verbose", verbose)
        self._noise: GradientNoise | None = None
        self._noise_scales: dict[str, NoiseScale] = {}

    def set_model(self, model: keras.Model) -> None:
        _validate.check_accumulates("GradientNoiseScale", model)
        super().set_model(model)

    def on_train_begin(self, logs: Logs | None = None) -> None:
        model = self.model
        is_split = model.microbatch_size is not None and not model._accumulation.takes_full_batch()
        if not (model.accumulation_steps > 1 or is_split or model._accumulation.is_scheduled):
            raise ValueError(
                "`GradientNoiseScale` compares the gradients of at least two microbatches per "
                f"window. Received: {model.name!r} with accumulation_steps=1, "
                f"microbatch_size={model.microbatch_size}, loss_over={model.loss_over!r}. Set "
                "`accumulation_steps` above 1, or `loss_over='microbatch'` and a `microbatch_size` "
                "of at most half the batch."
            )
        noise = model._accumulation.noise
        if noise.asked_by not in (None, self):
            raise RuntimeError(
                "Only one `GradientNoiseScale` can measure a model at a time. "
                f"Received: a second one for {model.name!r}. Keep one of them in `callbacks`."
            )
        noise.start(self, self._decay)
        self._noise = noise

    def on_epoch_end(self, epoch: int, logs: Logs | None = None) -> None:
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

    def on_train_end(self, logs: Logs | None = None) -> None:
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
        """Return the measurement for the only optimizer, empty before the first window."""
        scales = self.noise_scales
        if len(scales) > 1:
            raise ValueError(
                "This attribute needs a single optimizer, because each optimizer has its own noise "
                f"scale. Received: {len(scales)} optimizers. "
                f"Use `noise_scales[name]`, with one of {list(scales)}."
            )
        empty = NoiseScale(Averages(), self._decay, self._unit)
        return next(iter(scales.values()), empty)


def _name_of(optimizer: keras.optimizers.Optimizer, model: keras.Model) -> str:
    """Return the name of the model's attribute that holds an optimizer, or the optimizer's name."""
    names = (name for name, value in vars(model).items() if value is optimizer)
    return next(names, str(optimizer.name))


def _verdict(batch_size: float, noise_scale: float) -> str:
    """Return a sentence on which change of the batch saves a larger share than it costs.

    Doubling the batch saves noise_scale / 2 / (batch_size + noise_scale) of the updates, and costs
    batch_size / (batch_size + noise_scale) more samples. Halving it swaps the two.
    """
    if batch_size < noise_scale / 2:
        return "A larger batch pays."
    if batch_size > noise_scale * 2:
        return "A smaller batch pays: this one uses many samples to save few updates."
    return "The batch is about right: a larger or smaller one costs more than it saves."


def _count(value: float) -> str:
    """Format a mean number of samples, without decimals from 100 on."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _number(value: float, digits: int = 3) -> str:
    """Format a number with `digits` significant digits, never in scientific notation."""
    if value > _MOST:
        return f"more than {_MOST:,}"
    if value >= 10 ** (digits - 1):
        return f"{float(f'{value:.{digits}g}'):,.0f}"
    return f"{value:.{digits}g}"


def _change(new: float, old: float) -> str:
    percent = round(100 * (new / old - 1))
    return f"{abs(percent)} % {'fewer' if percent < 0 else 'more'}"


def _nothing_measured_message(model: str) -> str:
    return (
        "No gradient noise scale was measured: it needs windows of at least two microbatches. "
        f"Received: {model!r}, where no window had two with a weight and finite gradients. "
        "Set `microbatch_size` to at most half the batch, or `accumulation_steps` above 1."
    )
