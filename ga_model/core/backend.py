"""What the core asks of the backend that Keras runs on."""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

from ga_model.base._call_again import PythonState
from ga_model.base._context import ThreadValue, is_unnoted
from ga_model.base._identity import unique
from ga_model.base._internals import mask_of, set_mask, value_in
from ga_model.base._method_patch import MethodPatch
from ga_model.core.backend_types import GROUPS, Applied, Function, GradientSums, Group, State
from ga_model.core.batch import Batch, unpack
from ga_model.core.models import optimizers_in, recording_of_thread
from ga_model.core.of_user import others_of_user
from ga_model.core.stand_ins import APPLY, SCALE_LOSS

if TYPE_CHECKING:
    from ga_model.core.call_types import IsolatedCall, Split, Traced
    from ga_model.core.proof.noted import Draws, Noted
    from ga_model.core.recorder import Recording
    from ga_model.core.window import Amount, Rows, Sums


class Backend(ABC):
    """Runs the functions of the core for one compiled model.

    These functions read and write variables of the model as any code of Keras's does. What a window
    has come to, they take as arguments and return: nests of tensors.

    Attributes:
        recorded_methods: what stands in for methods of optimizers while a step is recorded.
        methods_of_step: names of the model's methods that make its step, and what it logs.
        of_step: the groups of variables that a recorded step reads.
        noted_by: the class of `Noted` that runs code and notes what it divides by.
        num_devices: devices that share the samples of each microbatch evenly.
        num_processes: processes that make updates together, each of windows of its own samples.
        num_replicas: replicas that do, by which Keras divides the loss of each.
        traces: whether functions are traced before they run, and their sums are there before.
        nests: whether what was traced can be a part of another function.
        has_several_optimizers: whether a step may apply more than one.
        known_calls: what `LayerCall.analyze` finds of calls, and why a layer runs whole, by its id.
        present_batch: the batch that is trained, as it came, while it is, or None.
    """

    recorded_methods: tuple[MethodPatch, ...] = (SCALE_LOSS, *APPLY)
    methods_of_step: tuple[str, ...] = ("train_step", "compute_metrics", "get_metrics_result")
    of_step: tuple[Group, ...] = GROUPS
    noted_by: type[Noted]
    num_devices = 1
    num_processes = 1
    num_replicas = 1
    traces = True
    nests = True
    has_several_optimizers = True

    def __init__(self, model: Any) -> None:
        self._model = model
        self._is_running_step = ThreadValue(False)
        self.known_calls: dict[Any, Any] = {}
        self.present_batch: Any = None
        self._made: dict[Any, Callable[..., Any]] = {}  # what was compiled, by its name

    # What is compiled.

    def compiled(
        self,
        name: Any,
        function: Callable[..., Any],
        reads: Iterable[Group],
        updates: Iterable[Group] = (),
        consumes: bool = False,
        discards: bool = False,
    ) -> Any:
        """Return a function that runs another one compiled, if the model is.

        It may be called in other functions of the core. Nothing of it waits for the device. Where
        functions are traced, its method `shapes` takes a tuple of arguments, and returns the shapes
        of its result: code runs, and nothing is computed, written to or kept.

        Args:
            name: what was made by the same name before is returned again.
            function, reads, updates, consumes, discards: as `Function` has them.
        """
        if self.traces and name in self._made:
            return self._made[name]
        of_core = Function(function, tuple(reads), tuple(updates), consumes, discards)
        made = self._compiled(name, of_core)
        if self.traces:
            self._made[name] = made
        return made

    @abstractmethod
    def _compiled(self, name: Any, function: Function) -> Callable[..., Any]:
        """Return a new function for `compiled`."""

    def forget(self, kind: str) -> None:
        """Drop compiled functions whose name is a tuple with this first entry."""
        self._made = {name: made for name, made in self._made.items() if name[0] != kind}

    def key_of(self, arguments: tuple[Any, ...]) -> Any:
        """Return a key for the shapes and dtypes of arguments, and for what is trained."""
        raise NotImplementedError

    def zeros(self, name: Any, shapes: Sums) -> Sums:
        """Return zeros of shapes that a compiled function has told, which have this name.

        They are -0.0, to which numbers are added bit by bit.
        """
        raise NotImplementedError

    def number(self, value: float) -> Any:
        """Return a number as the arguments of compiled functions have it."""
        return value

    @abstractmethod
    def copied(self, nest: Any) -> Any:
        """Return a copy of a nest of tensors and None."""

    def as_traced(self, data: Any) -> Any:
        """Return a microbatch as functions are traced for it."""
        return data

    def traces_otherwise(self, error: Exception) -> bool | None:
        """Return whether functions are traced otherwise after an error, None if it is of others."""
        return None

    def placed(self, data: Any) -> Any:
        """Return a microbatch as it is traced, where it is to be computed."""
        return self.as_traced(data)

    # What is run.

    def values(self, group: Group) -> list[Any]:
        """Return the present values of a group of variables."""
        return [value_in(None, v) for v in getattr(self._model, f"{group}_variables")]

    @abstractmethod
    def run_step(self, data: Any) -> tuple[Any, list[Any]]:
        """Run the model's `train_step` within a function of the core.

        Returns:
            Its logs, and the non-trainable variables that it has written to.
        """

    @contextlib.contextmanager
    def recording_optimizers(self) -> Iterator[None]:
        """Return a context in which the model's optimizers give gradients to a recording."""
        optimizers = optimizers_in(vars(self._model))
        with contextlib.ExitStack() as stack:
            for method in self.recorded_methods:
                stack.enter_context(method.of(optimizers))
            yield

    def take(self, recording: Recording, applied: Applied, gradients: list[Any]) -> None:
        """Give a recording the gradients that a step applies, and make the update of a trial."""
        raise NotImplementedError

    def noting(
        self, function: Callable[..., Any], arguments: tuple[Any, ...], draws: Draws | None = None
    ) -> tuple[Any, Noted]:
        """Run a function within one of the core, and note what it divides by.

        Args:
            function: takes and returns nests of tensors, and may write to variables.
            arguments: of the function.
            draws: what random numbers are drawn by, or None: as always.

        Returns:
            What the function returns, and what was noted.
        """
        noted = self.noted_by(draws)
        return noted.run(function, arguments), noted

    def running_step(self) -> AbstractContextManager[None]:
        """Return a context in which a `train_step` runs as it is."""
        return self._is_running_step.set(True)

    def is_running_step(self) -> bool:
        """Return whether a `train_step` that runs here is run by the core."""
        return self._is_running_step.get() or recording_of_thread.get() is not None

    def run_plain(
        self, train_step: Callable[..., Any], after_update: Callable[[], None], *arguments: Any
    ) -> Any:
        """Run the model's `train_step` on Keras's arguments, and then `after_update`."""
        logs = train_step(*arguments)
        self.once(after_update)
        return logs

    def is_driven_by_python(self) -> bool:
        """Return whether a `train_step` that the user's code calls here may be accumulated."""
        return False

    def exchanged(
        self, applied: Sequence[Applied], sums: Sums | None, is_measured: bool, is_end: bool
    ) -> tuple[Sums | None, bool]:
        """Return the sums of the windows of all processes, which all call it equally often.

        Args:
            applied: the optimizers that the step applies, as far as is known.
            sums: of this process's own window, which are not to be used again, or None.
            is_measured: whether the noise of gradients is.
            is_end: whether this process has no batches left.

        Returns:
            The sums, or None if there are none; and whether no process has batches left.
        """
        return sums, is_end

    # Replicas, which each run the functions of the core.

    def batch(self, data: Any, size: int | None) -> Batch:
        """Return a batch, split into microbatches of so many samples per replica."""
        return Batch(data, size)

    def each(self, nest: Any) -> list[Any]:
        """Return a nest as each replica of this process has it."""
        return [nest]

    def on_one_replica(self) -> AbstractContextManager[None]:
        """Return a context in which functions run on one replica, which stands for all."""
        return contextlib.nullcontext()

    def samples_of(self, data: Any, of_all: bool = False) -> Any:
        """Return the samples of one replica.

        Args:
            data: the batch or microbatch.
            of_all: whether it is to be the same in all processes, which all call this.
        """
        return data

    @property
    def trains_alone(self) -> bool:
        """Whether there are no other processes or replicas."""
        return self.num_processes * self.num_replicas == 1

    def amounts_of_all(self, amounts: list[Amount]) -> list[Amount]:
        """Return the sums of logged numbers over all replicas, in a function of the core."""
        return amounts

    def sum_of_all(self, gradients: list[Any], total: Any) -> tuple[list[Any], Any]:
        """Return the sums over replicas of gradients, and of what these are to be divided by."""
        return gradients, total

    def once(self, function: Callable[[], Any]) -> None:
        """Run a function for all replicas, in a function of the core or outside."""
        function()

    def unnoted(self) -> AbstractContextManager[None]:
        """Return a context for computations of this package within a step, which are not noted."""
        return is_unnoted.set(True)

    def microbatch_weight(self, data: Any) -> Any:
        """Return what the model's own method says of a microbatch. It may call the model."""
        return self._model.microbatch_weight(*unpack(data))

    def apply(self, applied: Applied, gradients: list[Any]) -> None:
        """Apply an optimizer, as the step did, to gradients of its variables, tensors or None."""
        applied.again(gradients)

    def joined(self, rows: Sequence[Rows], unit: Any) -> Rows:
        """Return all rows of a window as one sparse gradient in a unit."""
        raise NotImplementedError

    def gradient_sums(self, totals: Sequence[Any] | None) -> GradientSums | None:
        """Return sums, begun with totals, that Keras's own backward pass adds to, or None."""
        return None

    @abstractmethod
    def keeping_state(self) -> AbstractContextManager[None]:
        """Return a context in which a failure leaves all variables as they were before."""

    def state(self) -> State:
        """Return a snapshot of the Python state that a step may write to."""
        return PythonState(self._model, others_of_user(self._model), has_arrays=True)

    def optimizers(self) -> list[Any]:
        """Return the optimizers that attributes of the model hold, or what passes for them."""
        return unique(optimizers_in(vars(self._model)))

    def outside_of_training(self) -> AbstractContextManager[None]:
        """Return a context in which functions run that no train function has called."""
        return contextlib.nullcontext()

    def build(self, data: Any) -> None:  # noqa: B027
        """Create the variables that the first step would create, where Keras does not."""

    @abstractmethod
    def check(self) -> None:
        """Raise ValueError if the model cannot be accumulated here."""

    # Around `fit`.

    def begin_epoch(self, epoch: int, is_first: bool) -> None:  # noqa: B027
        """Note that an epoch of `fit` begins, perhaps its first.

        Raises:
            RuntimeError: others that train the model together with this process begin another one.
        """

    def explain(self, error: BaseException) -> None:  # noqa: B027
        """Add to an error of `fit` what is known of its cause."""

    def finish_fit(self) -> None:  # noqa: B027
        """Note that `fit` has trained its last epoch."""

    def end_fit(self) -> None:  # noqa: B027
        """Note that `fit` has ended, perhaps by an error."""

    # Calls of layers, where `core.layer_calls` splits them.

    def is_at_hand(self, tensor: Any) -> bool:
        """Return whether a tensor may be used where the step runs now, and not elsewhere only."""
        return True

    def place(self) -> Any:
        """Return where the present code runs: a graph, perhaps that of a function or branch."""
        return None

    def why_whole(self, layer: Any) -> str | None:
        """Return why calls of a layer must not be split, nor tried, or None."""
        return None

    def is_in_step(self) -> bool:
        """Return whether the values of weights are what they are in the step."""
        return True

    @abstractmethod
    def run_isolated(self, call: IsolatedCall, derives: bool = False) -> Callable[..., Any]:
        """Return a function that runs a call on numbers while another function is traced.

        Args:
            call: what is run.
            derives: whether it is to return gradients of half the sum of the outputs' squares, with
                respect to the floats among the samples, and then among the fixed arrays.

        Returns:
            A function of the fixed arrays, all samples of a trial, and two places among these. It
            runs the call on the samples in between, and returns arrays.
        """

    @abstractmethod
    def by_microbatches(self, split: Split) -> tuple[list[Any], Traced]:
        """Run a function by microbatches, whose activations are computed again for gradients.

        Returns:
            What is carried behind the last one, and what all of them give.
        """

    def attached_to(self, output: Any) -> dict[str, Any]:
        """Return the tensors that Keras's losses read from an output, by name: its mask."""
        mask = mask_of(output)
        return {} if mask is None else {"mask": mask}

    def with_attached(self, output: Any, name: str, tensor: Any) -> Any:
        """Return an output with a tensor that `attached_to` has found."""
        set_mask(output, tensor)
        return output

    def has_hooks(self) -> bool:
        """Return whether code of users sees or changes what goes through layers of the model."""
        return False

    # Memory.

    @property
    @abstractmethod
    def is_on_cpu(self) -> bool:
        """Whether the model is, where allocations that fail may end the process."""

    def wait_for(self, nest: Any) -> None:  # noqa: B027
        """Wait until a nest of tensors is computed, where an allocation may fail after a call."""

    @abstractmethod
    def out_of_memory(self, error: Exception) -> Exception | None:
        """Return an error that says that memory is used up, without what it holds, or None."""

    @abstractmethod
    def trying(self, is_own: bool) -> AbstractContextManager[None]:
        """Return a context after which all of the model is as it was before.

        Args:
            is_own: whether a step of the user's runs in it, which may write to anything.

        Raises:
            ValueError: at its end, if weights were updated past what stands in for optimizers.
        """

    def has_updated(self) -> bool:
        """Return whether weights were written to since `keeping_state` was entered last, where a
        batch that runs out of memory is to be repeated."""
        return False
