"""The interface between the core and the backend that Keras runs on."""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

import keras
import numpy as np

from ga_model.base._context import ThreadValue, is_package_code
from ga_model.base._identity import unique
from ga_model.base._internals import mask_of, set_mask, value_in
from ga_model.base._method_patch import MethodPatch
from ga_model.base._types import Gradient, Logs, Nest, Scalar, Tensor
from ga_model.core.backend_types import GROUPS, Applied, Function, GradientSums, Group, Name, State
from ga_model.core.batch import Batch, unpack
from ga_model.core.models import optimizers_in, recording_of_thread
from ga_model.core.stand_ins import APPLY, SCALE_LOSS
from ga_model.core.user_code import python_state_of

if TYPE_CHECKING:
    from ga_model.core.call_types import IsolatedCall, Split, Traced
    from ga_model.core.proof.noted import Draws, Noted
    from ga_model.core.recorder import Recording
    from ga_model.core.window import Amount, Rows, Sums


class Backend(ABC):
    """Runs the functions of the core for one compiled model.

    They read and write the model's variables like any Keras code. The sums of a window are their
    arguments and results: nests of tensors.

    Attributes:
        recorded_methods: patches for methods of optimizers while a step is recorded.
        methods_of_step: names of the model's methods that make up its step and its logs.
        step_groups: groups of variables that a recorded step reads.
        noted_class: `Noted` subclass that runs code and notes its divisors.
        num_devices: devices that share the samples of each microbatch evenly.
        num_processes: processes that update together, each with windows of its own samples.
        num_replicas: replicas that update together; Keras divides the loss of each by this.
        traces: whether functions are traced before they run, so that sums are allocated first.
        nests: whether a traced function may call another one.
        has_several_optimizers: whether a step may apply several optimizers.
        known_calls: results of `LayerCall.analyze`; by layer id, why its calls are not split.
        current_batch: the batch being trained, as `fit` passed it, or None.
    """

    recorded_methods: tuple[MethodPatch, ...] = (SCALE_LOSS, *APPLY)
    methods_of_step: tuple[str, ...] = ("train_step", "compute_metrics", "get_metrics_result")
    step_groups: tuple[Group, ...] = GROUPS
    noted_class: type[Noted]
    num_devices = 1
    num_processes = 1
    num_replicas = 1
    traces = True
    nests = True
    has_several_optimizers = True

    def __init__(self, model: keras.Model) -> None:
        self._model = model
        self._is_running_step = ThreadValue(False)
        self.known_calls: dict[Hashable, tuple[Any, ...]] = {}
        self.current_batch: Nest = None
        self._made: dict[Name, Callable[..., Any]] = {}  # compiled, by name

    # Compilation.

    def compiled(
        self,
        name: Name,
        function: Callable[..., Nest],
        reads: Iterable[Group],
        updates: Iterable[Group] = (),
        consumes: bool = False,
    ) -> Callable[..., Any]:
        """Return a function that runs `function`, compiled if the model is.

        Other functions of the core may call it. It never waits for the device. If functions are
        traced, its method `shapes` takes a tuple of arguments and returns the shapes of the result:
        it runs Python code, but computes and writes nothing.

        Args:
            name: key of the cache of compiled functions.
            function, reads, updates, consumes: see `Function`.
        """
        if self.traces and name in self._made:
            return self._made[name]
        made = self._compiled(name, Function(function, tuple(reads), tuple(updates), consumes))
        if self.traces:
            self._made[name] = made
        return made

    @abstractmethod
    def _compiled(self, name: Name, function: Function) -> Callable[..., Any]:
        """Compile a function for `compiled`."""

    def forget(self, kind: str) -> None:
        """Drop the compiled functions whose name is a tuple that starts with `kind`."""
        self._made = {name: made for name, made in self._made.items() if name[0] != kind}

    def key_of(self, arguments: tuple[Nest, ...]) -> Hashable:
        """Return a key of the shapes and dtypes of arguments, and of the trainable variables."""
        raise NotImplementedError

    def zeros(self, name: Name, shapes: Sums) -> Sums:
        """Return sums of -0.0, to which numbers add bit-exactly, of shapes that `shapes` gave."""
        raise NotImplementedError

    def number(self, value: float) -> Scalar:
        """Convert a number to the form in which compiled functions take it."""
        return value

    @abstractmethod
    def copied(self, nest: Nest) -> Nest:
        """Return a nest of arrays, tensors and None with copies of what losses may write to."""

    def as_traced(self, data: Nest) -> Nest:
        """Return a microbatch in the form for which functions are traced."""
        return data

    def retraces_after(self, error: Exception) -> bool | None:
        """Return whether to retrace differently after an error, or None if it is unrelated."""
        return None

    def on_device(self, data: Nest) -> Nest:
        """Return a microbatch as traced, on the devices that compute it."""
        return self.as_traced(data)

    # Running the step.

    def values(self, group: Group) -> list[Tensor]:
        """Return the current values of a group of variables."""
        return [value_in(None, v) for v in getattr(self._model, f"{group}_variables")]

    def read(self, variables: Iterable[keras.Variable]) -> Iterator[np.ndarray]:
        """Yield copies of the values of variables, outside of functions of the core."""
        return (keras.ops.convert_to_numpy(value_in(None, v)) for v in variables)

    def assign(self, values: Iterable[tuple[keras.Variable, np.ndarray]]) -> None:
        """Set values of variables one after the other, outside of functions of the core."""
        for variable, value in values:
            variable.assign(value)

    @abstractmethod
    def run_step(self, data: Nest) -> tuple[Logs, list[keras.Variable]]:
        """Run the model's `train_step` within a function of the core.

        Returns its logs, and the non-trainable variables that it wrote to.
        """

    @contextlib.contextmanager
    def recording_optimizers(self) -> Iterator[None]:
        """Make the model's optimizers pass their gradients to the recording."""
        optimizers = optimizers_in(vars(self._model))
        with contextlib.ExitStack() as stack:
            for method in self.recorded_methods:
                stack.enter_context(method.of(optimizers))
            yield

    def record_gradients(
        self, recording: Recording, applied: Applied, gradients: list[Gradient]
    ) -> None:
        """Pass the gradients that a step applies to a recording, and make the update of a trial."""
        raise NotImplementedError

    def noting(
        self, function: Callable[..., Nest], arguments: tuple[Nest, ...], draws: Draws | None = None
    ) -> tuple[Nest, Noted]:
        """Run a function within a function of the core, and return its result and its divisors.

        Args:
            function, arguments: take and return nests of tensors. It may write to variables.
            draws: source of the random numbers, or None for the usual ones.
        """
        noted = self.noted_class(draws)
        return noted.run(function, arguments), noted

    def running_step(self) -> AbstractContextManager[None]:
        """Return a context in which a `train_step` runs unchanged."""
        return self._is_running_step.set(True)

    def is_running_step(self) -> bool:
        """Return whether the core runs the current `train_step`."""
        return self._is_running_step.get() or recording_of_thread.get() is not None

    def run_plain(self, train_step: Callable[..., Logs], *arguments: Nest) -> Logs:
        """Run the model's `train_step` on the arguments of Keras, and then its `on_update`."""
        logs = train_step(*arguments)
        self.once(self._model.on_update)
        return logs

    def is_driven_by_python(self) -> bool:
        """Return whether a direct call of `train_step` by user code can be accumulated here."""
        return False

    def exchange_sums(
        self, applied: Sequence[Applied], sums: Sums | None, is_measured: bool, is_end: bool
    ) -> tuple[Sums | None, bool]:
        """Return the window's sums over all processes, which call this equally often.

        Args:
            applied: the optimizers that the step applies, as far as known.
            sums: sums of this process's window, consumed, or None.
            is_measured: whether gradient noise is measured.
            is_end: whether this process has no batches left.

        Returns:
            The sums, or None, and whether no process has batches left.
        """
        return sums, is_end

    # Replicas. Each runs the functions of the core.

    def batch(self, data: Nest, size: int | None) -> Batch:
        """Return a batch, split into microbatches of `size` samples per replica."""
        return Batch(data, size)

    def per_replica(self, nest: Nest) -> list[Nest]:
        """Return the values of a nest on each replica of this process."""
        return [nest]

    def on_one_replica(self) -> AbstractContextManager[None]:
        """Return a context in which functions run on one replica for all."""
        return contextlib.nullcontext()

    def samples_of(self, data: Nest, of_all: bool = False) -> Nest:
        """Return the samples of one replica.

        Args:
            data: the batch or microbatch.
            of_all: whether all processes need the same samples; then all call this.
        """
        return data

    @property
    def trains_alone(self) -> bool:
        """Whether there are no other processes or replicas."""
        return self.num_processes * self.num_replicas == 1

    def amounts_over_replicas(self, amounts: list[Amount]) -> list[Amount]:
        """Return the sums of logged numbers over all replicas, within a function of the core."""
        return amounts

    def gradients_over_replicas(
        self, gradients: list[Gradient], total: Scalar
    ) -> tuple[list[Gradient], Scalar]:
        """Return the sums of gradients over replicas, and their divisor."""
        return gradients, total

    def once(self, function: Callable[[], None]) -> None:
        """Run a function once for all replicas, within a function of the core or outside."""
        function()

    def unnoted(self) -> AbstractContextManager[None]:
        """Return a context for computations of this package within a step, which are not noted."""
        return is_package_code.set(True)

    def microbatch_weight(self, data: Nest) -> Scalar | str | None:
        """Call the model's `microbatch_weight` on a microbatch. It may call the model."""
        return self._model.microbatch_weight(*unpack(data))

    def apply(self, applied: Applied, gradients: list[Gradient]) -> None:
        """Apply an optimizer as the step did, to gradients of its variables: tensors or None."""
        applied.reapply(gradients)

    def joined(self, rows: Sequence[Rows], unit: Scalar, total: Scalar | None = None) -> Rows:
        """Return all rows of a window as one sparse gradient in a unit, or its mean by a total."""
        raise NotImplementedError

    def gradient_sums(self, totals: Sequence[Gradient] | None) -> GradientSums | None:
        """Return sums, starting from `totals`, that Keras's backward pass adds to, or None."""
        return None

    @abstractmethod
    def keeping_state(self) -> AbstractContextManager[None]:
        """Return a context that restores all variables if its block raises an error."""

    def state(self) -> State:
        """Return a snapshot of all that a step may write to."""
        return python_state_of(self._model)

    def optimizers(self) -> list[keras.optimizers.Optimizer]:
        """Return the optimizers in the model's attributes, or their equivalents."""
        return unique(optimizers_in(vars(self._model)))

    def outside_of_training(self) -> AbstractContextManager[None]:
        """Return a context for functions that run outside of a train function."""
        return contextlib.nullcontext()

    def build(self, data: Nest) -> None:  # noqa: B027
        """Create the variables that the first step would create, if Keras does not."""

    @abstractmethod
    def check(self) -> None:
        """Raise ValueError if this backend cannot accumulate the model."""

    # Hooks of `fit`.

    def begin_epoch(self, epoch: int, is_first: bool) -> None:  # noqa: B027
        """Prepare for an epoch of `fit`.

        Raises:
            RuntimeError: if the processes that train together begin different epochs.
        """

    def explain(self, error: BaseException) -> None:  # noqa: B027
        """Add what is known of the cause to an error of `fit`."""

    def finish_fit(self) -> None:  # noqa: B027
        """Clean up after the last epoch of `fit`."""

    def end_fit(self) -> None:  # noqa: B027
        """Clean up after `fit` has returned or raised."""

    # Layer calls that `core.layer_calls` splits.

    def is_available(self, tensor: Tensor) -> bool:
        """Return whether a tensor may be used by the running code, not only in an inner scope."""
        return True

    def current_graph(self) -> Any:
        """Return the graph of the running code, perhaps that of a function or branch."""
        return None

    def reason_not_to_split(self, layer: keras.Layer) -> str | None:
        """Return why calls of a layer must be neither split nor tried, or None."""
        return None

    def is_in_step(self) -> bool:
        """Return whether weights have the values that they have in the step."""
        return True

    @abstractmethod
    def run_isolated(
        self, call: IsolatedCall, with_gradients: bool = False
    ) -> Callable[[list[Tensor], list[Tensor], int, int], list[Tensor]]:
        """Return a function that runs a call on arrays while another function is traced.

        Args:
            call: the call.
            with_gradients: whether to return gradients of half the sum of the squared outputs, with
                respect to the floats among the samples, then among the fixed arrays.

        Returns:
            A function of the fixed arrays, all samples of a trial, and the begin and end of a range
            of them. It runs the call on that range, and returns arrays.
        """

    @abstractmethod
    def by_microbatches(self, split: Split) -> tuple[list[Tensor], Traced]:
        """Run a function by microbatches, recomputing activations for gradients.

        Returns:
            The final `carried` tensors, and the results of all microbatches.
        """

    def attached_to(self, output: Tensor) -> dict[str, Tensor]:
        """Return the tensors that Keras's losses read from an output, such as its mask, by name."""
        mask = mask_of(output)
        return {} if mask is None else {"mask": mask}

    def with_attached(self, output: Tensor, name: str, tensor: Tensor) -> Tensor:
        """Return an output with a tensor that `attached_to` found."""
        set_mask(output, tensor)
        return output

    def has_hooks(self) -> bool:
        """Return whether user code sees or changes what passes through the model's layers."""
        return False

    # Memory.

    @property
    @abstractmethod
    def is_on_cpu(self) -> bool:
        """Whether the model runs on a CPU, where a failed allocation may end the process."""

    def wait_for(self, nest: Nest) -> None:  # noqa: B027
        """Wait until a nest of tensors is computed, if allocations may fail after a call."""

    @abstractmethod
    def out_of_memory(self, error: Exception) -> Exception | None:
        """Return an out-of-memory error without references to tensors, or None for other errors."""

    @abstractmethod
    def restoring(self, is_own: bool) -> AbstractContextManager[None]:
        """Return a context that restores the model at its end. A custom step may write to anything.

        Raises:
            ValueError: at its end, if weights were updated without an optimizer that is recorded.
        """

    def has_updated(self) -> bool:
        """Return whether weights changed since `keeping_state` began, if batches are repeated."""
        return False
