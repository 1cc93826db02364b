"""Cases about what only PyTorch has.

Steps as its scripts have them, hooks, tensors that no variable holds, writes past PyTorch's count
of them, and `torch.optim`.
"""

import dataclasses

import keras
import losses
import numpy as np
import torch
from case import BUT_LOGS, DIFFERS, LOGGED, TRIED, Case, Refused, Warns, sgd, whole
from helpers import dense_data, dense_model
from keras import layers
from models import KeepsAverage


class Step(keras.Sequential):
    """A step of one's own, in parts."""

    def __init__(self, parts):
        super().__init__(parts)
        self.begin()

    def begin(self):
        """Make what else the step has."""

    def forward_loss(self, x, y):
        return torch.square(self(x, training=True) - y).mean()

    def clear(self):
        self.zero_grad()

    def take(self, loss):
        loss.backward()

    def update(self):
        weights = self.trainable_weights
        self.optimizer.apply([w.value.grad for w in weights], weights)

    def train_step(self, data):
        x, y = data[:2]
        self.clear()
        loss = self.forward_loss(x, y)
        self.take(loss)
        with torch.no_grad():
            self.update()
        return {"own": loss.detach(), **self.more(x, y)}

    def more(self, x, y):
        """Return more logs."""
        return {}


def model_of(base, *parts, first=layers.Dense, **methods):
    """Return a function that makes a small network of a class, with fresh layers inside."""
    base = type(base.__name__, (base,), methods) if methods else base

    def make():
        hidden = [first(5, activation="tanh"), *(part() for part in parts)]
        model = base([keras.Input((4,)), *hidden, layers.Dense(2)])
        model(torch.zeros(2, 4))  # modules of PyTorch are not built before
        return model

    return make


def case_of(make, expects=None, settings=("windows", "split"), **kwargs):
    return Case(make, expects=expects or {}, backends=("torch",), settings=settings, **kwargs)


def step(expects=None, base=Step, **kwargs):
    """Return a case of a step whose own methods are among the arguments."""
    fields = {field.name for field in dataclasses.fields(Case)}
    methods = {name: kwargs.pop(name) for name in {*kwargs} - fields}
    given = {"compile": sgd(None), "settings": ("windows", "both", "split"), **kwargs}
    return case_of(model_of(base, **methods), expects, **given)


def differs(what, **kwargs):
    return step({"across": Warns(f"(?s){TRIED}.*{what}.* differs")}, samples=72, **kwargs)


# How gradients are taken and applied.


def by_function(create_graph):
    def take(self, loss):
        weights = [v.value for v in self.trainable_weights]
        self.gradients = torch.autograd.grad(loss, weights, create_graph=create_graph)

    def update(self):
        self.optimizer.apply([g.detach() for g in self.gradients], self.trainable_weights)

    return {"clear": leaves, "take": take, "update": update}


def leaves(self):
    """Clear no gradients."""


def of_two_losses(self, loss):
    self.forward_loss(*map(torch.as_tensor, dense_data(4))).backward()
    loss.backward()


def in_parts(self, loss):
    """Take a gradient for something else first, and clear it."""
    (2.0 * loss).backward(retain_graph=True)
    self.zero_grad()
    loss.backward()


class Unused(Step):
    def begin(self):
        self.unused = layers.Dense(3)
        self.unused.build((None, 4))

    def update(self):
        used = [w for w in self.trainable_weights if w.value.grad is not None]
        assert len(used) == 4
        self.optimizer.apply([w.value.grad for w in used], used)


def checkpointed(is_reentrant):
    """Compute the activations again when the gradient is taken."""

    def forward_loss(self, x, y):
        outputs = torch.utils.checkpoint.checkpoint(
            lambda x: self(x, training=True), x.clone().requires_grad_(), use_reentrant=is_reentrant
        )
        return torch.square(outputs - y).mean()

    return forward_loss


def adds_by_data(self):
    """Write to gradients past PyTorch's count."""
    for v in self.trainable_weights:
        v.value.grad.data.add_(0.1 * v.value.data)
    Step.update(self)


# What is done with gradients and weights, also where it first changes something after some batches.


class ClampsLater(Step):
    num_batches = 0

    def update(self):
        self.num_batches = self.num_batches + 1
        if self.num_batches > 4:
            for v in self.trainable_weights:
                v.value.grad.data.clamp_(-0.001, 0.001)
        super().update()


def clips_later(self):
    """Clip weights that are not that large before the first update."""
    Step.update(self)
    for v in self.trainable_weights:
        v.value.data.clamp_(-2.0, 2.0)


class WritesLater(Step):
    def begin(self):
        self.target = self.add_weight(name="target", shape=(2,), trainable=False)

    def update(self):
        super().update()
        if int(self.optimizer.iterations) > 0:
            self.target.assign(self.trainable_weights[-1])


def root_later(self, x, y):
    """Is no mean any more where a target is negative."""
    loss = Step.forward_loss(self, x, y)
    return torch.sqrt(loss) if (y < 0).any() else loss


class RootLater(keras.Sequential):
    takes_root = False

    def compute_loss(self, *args, **kwargs):
        loss = super().compute_loss(*args, **kwargs)
        return torch.sqrt(loss) if self.takes_root else loss


class DividesRootLater(RootLater):
    """Divides by a tensor, too, which a trial of the first batch can not have seen."""

    def compute_loss(self, *args, **kwargs):
        loss = super().compute_loss(*args, **kwargs)
        return loss / torch.tensor(2.0) if self.takes_root else loss


class TakesRoots(keras.callbacks.Callback):
    def __init__(self, first=1):
        super().__init__()
        self.first = first

    def on_epoch_begin(self, epoch, logs=None):
        self.model.takes_root = epoch >= self.first


class ByOther(Step):
    """Applies an optimizer that is no attribute of the model."""

    number_of_own = 0  # of weights for which it is one

    def begin(self):
        elsewhere["optimizer"] = keras.optimizers.SGD(0.1)
        elsewhere["optimizer"].build(self.trainable_variables[self.number_of_own :])

    def update(self):
        weights = self.trainable_weights
        own, others = weights[: self.number_of_own], weights[self.number_of_own :]
        if own:
            self.optimizer.apply([v.value.grad for v in own], own)
        elsewhere["optimizer"].apply([v.value.grad for v in others], others)


elsewhere = {"optimizer": None}


def makes_its_own(self):
    self.own = torch.optim.SGD(self.parameters(), 0.1)
    self.own.step()


OF_GRADIENT, OF_WEIGHT = "gradient of .*(kernel|bias)", "(kernel|bias)"
CASES = {
    "autograd.grad": step(**by_function(False)),
    "gradients that could be differentiated": step(**by_function(True)),
    "apply_gradients": step(
        update=lambda self: self.optimizer.apply_gradients(
            [(v.value.grad, v) for v in self.trainable_weights]
        )
    ),
    "two losses": step(take=of_two_losses),
    "a gradient for something else": step(take=in_parts),
    "unused weights": step(base=Unused),
    "checkpoints": step(forward_loss=checkpointed(False)),
    "reentrant checkpoints": step(forward_loss=checkpointed(True)),
    "gradients by data": step(update=adds_by_data),
    "clamps gradients later": differs(OF_GRADIENT, base=ClampsLater),
    "optimizers of two names": differs(OF_GRADIENT, base=ByOther, number_of_own=1),
    "clips weights later": differs(OF_WEIGHT, update=clips_later, compile=sgd(None, 10.0)),
    "writes later": differs("target", base=WritesLater),
    "a root later": step(DIFFERS, forward_loss=root_later, data=losses.positive_at_first),
    "a root from the second epoch on": Case(
        lambda: RootLater(dense_model().layers),
        fit={"callbacks": [TakesRoots()], "epochs": 3},
        settings=("split", "windows"),
        expects={**DIFFERS, **whole("From now on each batch trains as a whole, which is exact")},
    ),
    "a root long before the next trial": Case(
        lambda: DividesRootLater(dense_model().layers),
        fit={"callbacks": [TakesRoots(2)], "epochs": 6},
        settings=("split",),
        expects={"within": Warns("Updates so far may differ")},
    ),
    "an optimizer elsewhere": step(
        {"across": Refused("if its optimizers are attributes of the model", is_late=True)},
        base=ByOther,
    ),
    "an optimizer of PyTorch": step(update=makes_its_own, settings=("split",)),
}


# A step that leaves its gradients to the next batch is told of, once; no other is.


def by_hand(self):
    for weight in self.parameters():
        weight.grad = None


def zeros_at_end(self):
    Step.update(self)
    for weight in self.parameters():
        weight.grad.zero_()


CLEARS = {
    "in place": {"clear": lambda self: self.zero_grad(set_to_none=False)},
    "by layer": {"clear": lambda self: [layer.zero_grad() for layer in self.layers]},
    "by hand": {"clear": by_hand},
    "at the end": {"clear": leaves, "update": lambda self: (Step.update(self), by_hand(self))},
    "in place at the end": {"clear": leaves, "update": zeros_at_end},
}
CASES["clears never"] = step(
    DIFFERS, clear=leaves, settings=("windows", "both", "windows that may be left out")
)
CASES |= {
    f"clears {how}": step(**methods, settings=("windows", "both"))
    for how, methods in CLEARS.items()
}


# Logs that are numbers of Python, NumPy or a tensor.


class LogsNumbers(Step):
    """A step whose loss is over some of the entries, which logs other numbers too."""

    def begin(self):
        self.trackers = [keras.metrics.Mean(name="tracked"), keras.metrics.Sum(name="total")]

    def forward_loss(self, x, y):
        self.errors, self.chosen = (self(x, training=True) - y) ** 2, (y > 0).to(y.dtype)
        self.updates = int(self.optimizer.iterations)
        return (self.chosen * self.errors).sum() / self.chosen.sum()

    def more(self, x, y):
        errors, chosen = self.errors, self.chosen
        for tracker, value in zip(self.trackers, (errors.mean(), errors.sum())):
            tracker.update_state(value)
        return {
            "other": (chosen * errors.abs().sqrt()).sum() / chosen.sum(),
            "mean": errors.mean().item(),
            "rate": float(self.optimizer.learning_rate),
            "samples": x.shape[0],
            "chosen": chosen.sum().to(torch.int32),
            "updates": self.updates,
            **{tracker.name: tracker.result() for tracker in self.trackers},
        }


class LogsOfBatches(LogsNumbers):
    def more(self, x, y):
        return {
            "worst": self.errors.max().detach(),
            "norm": torch.stack([w.value.grad.norm() for w in self.trainable_weights]).norm(),
            "most": int(100 * self.errors.max()),
        }


def logs_gradients(self, x, y):
    """Read gradients after the update, and set them to zero as scripts of PyTorch do."""
    gradients = [w.value.grad for w in self.trainable_weights]
    sums = [g.sum() for g in gradients if g is not None]
    logs = {"sum": sum(sums), "norm": torch.stack(sums).norm()}
    for gradient in gradients:
        gradient.zero_()
    return logs


class LogsCounts(Step):
    """Logs counts beside a loss that is zero where none of the samples is far off."""

    def forward_loss(self, x, y):
        self.errors = (self(x, training=True) - y) ** 2
        return torch.relu(self.errors - 0.8).mean()

    def more(self, x, y):
        errors = self.errors.detach().cpu().numpy()
        return {
            "item": self.errors.mean().item(),
            "active": (self.errors > 0.8).float().sum(),
            "numpy": errors.mean(),
            "array": np.asarray(errors.mean(axis=0)),
            "count": (errors > 0.8).sum(),
            "near": float((y > -50.0).float().mean()),
        }


def near_at_first(rows):
    """Of a batch no sample is far off, and two are after all that is tried was near."""
    x, y = dense_data(rows)
    x[16:20], y[16:20] = 0.001 * x[16:20], 0.001 * y[16:20]
    y[50:52] = -100.0
    return x, y


CASES |= {
    "logs of numbers": step(base=LogsNumbers, settings=("windows", "both", "split", "added up")),
    "logs of batches": step(
        {"across": Warns(r"the log '(norm|worst|most)' differs.*in all, 3 values", BUT_LOGS)},
        base=LogsOfBatches,
    ),
    "logs of gradients": step(
        {
            "across": Warns(
                f"(?s){LOGGED}.*the log 'norm' differs, however(?!.* more thing)", BUT_LOGS
            )
        },
        clear=leaves,
        more=logs_gradients,
    ),
    "logs of what is alike by chance": step(
        base=LogsCounts,
        data=near_at_first,
        samples=72,
        compile=sgd(None, 0.001),
        settings=("windows", "added up"),
    ),
}


# Optimizers of `torch.optim`, also in windows of several batches.

OPTIMIZERS = {
    "SGD": lambda parameters: torch.optim.SGD(parameters, 0.1, momentum=0.9),
    "AdamW": lambda parameters: torch.optim.AdamW(parameters, 0.01, weight_decay=0.1),
    "Adagrad": lambda parameters: torch.optim.Adagrad(parameters, 0.05),
}


class Own(Step):
    make_optimizer = staticmethod(OPTIMIZERS["AdamW"])

    def compile(self, *args, **kwargs):
        super().compile(*args, **kwargs)
        self.of_torch = self.make_optimizer(self.parameters())

    def clear(self):
        self.of_torch.zero_grad()

    def update(self):
        self.of_torch.step()


class Two(Own):
    """An optimizer for the kernels, and one of Keras's for the rest."""

    def compile(self):
        keras.Model.compile(self, keras.optimizers.Adam(0.01))
        kernels = [v.value for v in self.trainable_variables if v.name == "kernel"]
        self.of_torch = torch.optim.SGD(kernels, 0.1, nesterov=True, momentum=0.5)

    def clear(self):
        self.zero_grad()

    def update(self):
        super().update()
        biases = [v for v in self.trainable_variables if v.name == "bias"]
        self.optimizer.apply([v.value.grad for v in biases], biases)


class Schedules(Own):
    def compile(self):
        super().compile()
        self.schedule = torch.optim.lr_scheduler.ExponentialLR(self.of_torch, 0.5)

    def update(self):
        super().update()
        self.schedule.step()


def with_optimizer(*settings, base=Own, refused=None, **methods):
    expects = {"across": Refused(rf"{refused}(.|\n)*`microbatch_size`")} if refused else {}
    settings = "windows", "split", *settings
    return step(expects, base=base, compile=dict, settings=settings, **methods)


CASES |= {
    f"torch.optim, {name}": with_optimizer("both", "added up", make_optimizer=staticmethod(make))
    for name, make in OPTIMIZERS.items()
}
CASES |= {
    "torch.optim, beside one of Keras": with_optimizer(base=Two),
    "torch.optim, with a schedule": step(
        {"across": Warns(f"{TRIED}.*lr")}, base=Schedules, compile=dict
    ),
    "torch.optim, with a closure": with_optimizer(
        update=lambda self: self.of_torch.step(lambda: 0.0), refused="passes a closure to `step`"
    ),
    "torch.optim, of other parameters": with_optimizer(
        make_optimizer=staticmethod(
            lambda own: torch.optim.SGD([*own, torch.nn.Parameter(torch.zeros(3))], 0.1)
        ),
        refused="other parameters",
    ),
}


# Hooks on weights, layers and tensors, which see or change what goes through.


class Hooked(layers.Dense):
    def call(self, x):
        outputs = super().call(x)
        if outputs.requires_grad:
            outputs.register_hook(clip)
        return outputs


def clip(gradient):
    return gradient.clamp(-0.02, 0.01)


def centered(layer, inputs, outputs):
    return outputs - 0.5 * outputs.mean(0)


def halve(weight):
    weight.grad.mul_(0.5)


def centers_inputs(layer, inputs):
    return centered(layer, None, inputs[0])


def clips_gradients(layer, of_inputs, of_outputs):
    return tuple(clip(gradient) for gradient in of_inputs)


# Hook: what it is put on, and why a call with it runs whole.
HOOKS = {
    "clip": (lambda m: m.layers[0].kernel.value.register_hook(clip), None),
    "sums": (lambda m: m.layers[0].kernel.value.register_post_accumulate_grad_hook(halve), None),
    "linear": (lambda m: m.layers[0].kernel.value.register_hook(lambda g: g * 0.5), None),
    "outputs": (lambda m: m.layers[0].register_forward_hook(centered), "it has forward"),
    "inputs": (lambda m: m.layers[1].register_forward_pre_hook(centers_inputs), "it has forward"),
    "gradients": (
        lambda m: m.layers[1].register_full_backward_hook(clips_gradients),
        "it has backward",
    ),
    "tensors": (lambda m: None, "its tensors have"),
}


def hooked(name, base):
    hook, kind = HOOKS[name]
    expects = {} if name in ("sums", "linear") else DIFFERS

    def make():
        model = model_of(base, first=Hooked if name == "tensors" else layers.Dense)()
        hook(model)
        return model

    return case_of(make, {**expects, **(whole(f"{kind} hooks, which") if kind else {})})


BASES = {"Keras's step": keras.Sequential, "own step": Step}
CASES |= {
    f"hook of {name}, {step_of}": hooked(name, base)
    for step_of, base in BASES.items()
    for name in HOOKS
}


# State that is kept in no variable, or written past PyTorch's count of writes.


class Buffer(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("average", torch.zeros(5))

    def forward(self, x):
        average = self.average.clone()
        if x.device.type != "meta":
            self.average.mul_(0.5).add_(0.5 * x.detach().mean(0))
        return x - average.to(x.device)


class Replaces(layers.Layer):
    def __init__(self):
        super().__init__()
        self.average = torch.zeros(5)

    def call(self, x):
        average = self.average
        if x.device.type != "meta":
            self.average = 0.5 * average + 0.5 * x.detach().mean(0)
        return x - average.to(x.device)


class InPlace(Replaces):
    call = Buffer.forward


class ByData(layers.Layer):
    def build(self, shape):
        self.average = self.add_weight(shape=(5,), initializer="zeros", trainable=False)

    def call(self, x):
        average = self.average + 0.0
        if x.device.type != "meta":
            self.average.value.data.mul_(0.5).add_(0.5 * x.detach().mean(0))
        return x - average


class Fixed(layers.Layer):
    """Keeps tensors that nothing writes to, and the largest of its inputs, which nobody reads."""

    def __init__(self):
        super().__init__()
        self.factors = torch.linspace(0.5, 1.0, 5)
        self.order, self.mask = torch.arange(5), torch.ones(5, dtype=torch.bool)  # without a norm

    def call(self, x):
        self.largest = x.detach().amax(1)
        order, mask, factors = (t.to(x.device) for t in (self.order, self.mask, self.factors))
        return x[:, order] * mask * factors


KEEPS = {
    "a buffer": lambda: layers.TorchModuleWrapper(Buffer()),
    "a tensor": Replaces,
    "a tensor in place": InPlace,
    "a variable by data": ByData,
}
CASES |= {
    f"writes to {name}, {step_of}": case_of(
        model_of(base, part), DIFFERS | whole("cannot be split into microbatches")
    )
    for step_of, base in BASES.items()
    for name, part in KEEPS.items()
}
CASES["keeps tensors"] = case_of(model_of(keras.Sequential, Fixed), settings=("windows",))


# Calls that cannot be split run whole.


@dataclasses.dataclass
class Outputs:
    values: object


class GivesObjects(layers.Dense):
    def call(self, x):
        return Outputs(super().call(x))


class OfObjects(Step):
    def call(self, x, training=None):
        return self.layers[1](self.layers[0](x).values)

    def forward_loss(self, x, y):
        return torch.square(OfObjects.call(self, x) - y).mean()


class WithBuffers(layers.Dense):
    def build(self, shape):
        super().build(shape)
        self.register_buffer("kept", torch.ones(5))


class Drops(layers.Dense):
    """Leaves out the last of all samples, which is not in the first batch."""

    last = float(np.abs(dense_data(31)[0][-1]).sum())

    def is_last(self, x):
        return (x.abs().sum(1) - self.last).abs() < 1e-5

    def call(self, x):
        return super().call(x)[~self.is_last(x)]


class Trims(Drops):
    """Gives four values instead of five if the last of the samples is there."""

    def call(self, x):
        return layers.Dense.call(self, x)[:, : 4 if self.is_last(x).any() else 5]


class OfFour(Step):
    """Trains without its head on four values of each sample, of those that there are."""

    def forward_loss(self, x, y):
        z = self.layers[0](x)[:, :4]
        return torch.square(z).mean().sqrt() + 0.1 * torch.square(self.layers[1].kernel.value).sum()


class IsParticular(layers.Dense):
    def call(self, x):
        if len(x) in (3, 5):
            raise ValueError("no such number")
        return super().call(x)


class Fades(layers.Dense):
    """Counts its calls in Python, and gives less with each."""

    calls = 0

    def call(self, x):
        self.calls += 1
        return super().call(x) / (1.0 + 0.2 * self.calls)


class FadesByAnArray(layers.Dense):
    """Counts its calls in an array of NumPy, in place."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.calls = np.zeros(1)

    def call(self, x):
        self.calls += 1
        return super().call(x) / (1.0 + 0.2 * float(self.calls[0]))


class CountsAndCodes(Fades, KeepsAverage):
    """Is found after its first microbatch not to go by microbatches, and counts all the same."""


# Layer: why a call of it runs whole, and the step if it is another.
WHOLE = {
    GivesObjects: ("returns tensors in an object that cannot", OfObjects),
    Drops: ("an output has the shape", OfFour),
    Trims: ("its outputs have different shapes for different microbatches", OfFour),
    IsParticular: ("it cannot be run by itself", Step),
    WithBuffers: ("it has PyTorch buffers", Step),
    CountsAndCodes: ("it writes to", keras.Sequential),
}
CASES |= {
    f"runs whole, {first.__name__}": case_of(
        model_of(base, first=first),
        whole(f"takes the memory of the full batch.*{reason}"),
        settings=("split",),
    )
    for first, (reason, base) in WHOLE.items()
}
CASES |= {
    f"counts in Python, {first.__name__}": case_of(model_of(keras.Sequential, first=first), DIFFERS)
    for first in (Fades, FadesByAnArray)
}


# What changes between a call and its gradient.


class Scaled(layers.Dense):
    scale_shape = ()

    def build(self, shape):
        super().build(shape)
        kwargs = {"initializer": "ones", "trainable": False, "name": "scale"}
        self.scale = self.add_weight(shape=self.scale_shape, **kwargs)

    def call(self, x):
        return super().call(x * keras.ops.reshape(self.scale, (-1,))[0])


class ScaledByALargeTable(Scaled):
    scale_shape = (20_000,)


def assigns(self, x, y):
    loss = Step.forward_loss(self, x, y)
    scale = self.layers[0].scale
    scale.assign(scale + 0.5)
    return loss


def writes_to_inputs(self, x, y):
    x = x.clone()
    loss = Step.forward_loss(self, x, y)
    x.mul_(2.0)
    return loss


CASES |= {
    f"changes {name} before the gradient": case_of(
        model_of(Step, first=first, forward_loss=forward_loss),
        {"split": Refused(f"(?s)Received.*{name}.*was modified in between")} if refused else {},
        settings=("split",),
    )
    for name, first, forward_loss, refused in (
        ("a number", Scaled, assigns, False),
        ("scale", ScaledByALargeTable, assigns, True),
        ("input", layers.Dense, writes_to_inputs, True),
    )
}

CASES = {f"PyTorch: {name}": case for name, case in CASES.items()}
