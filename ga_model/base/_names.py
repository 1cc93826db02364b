"""Errors for wrong argument names that suggest the right ones. Imports no TensorFlow, no Keras."""

from __future__ import annotations

import difflib
import functools
import inspect
from collections.abc import Callable, Iterable, Mapping
from typing import Any, ParamSpec, TypeVar

# Other names of the settings: those of other packages, and likely mistakes.
_OTHER_NAMES = {
    "accumulation_steps": (
        "accum_freq accum_steps accumulate_grad_batches accumulate_steps accumulation_step "
        "every_k_schedule grad_accum grad_accum_steps grad_accumulation_steps "
        "gradient_accumulation gradient_accumulation_step gradient_accumulation_steps "
        "n_accumulate n_gradients num_accumulation_steps steps update_freq"
    ),
    "microbatch_size": (
        "device_train_microbatch_size micro_batch micro_batch_size microbatch "
        "microbatch_rows microbatches mini_batch_size minibatch_size "
        "per_device_train_batch_size sub_batch_size"
    ),
    "skip_nonfinite": "skip_inf skip_nan skip_nans skip_non_finite",
    "loss_over": "loss_on",
}
_OF_FIT = {"batch_size", "callbacks", "epochs", "shuffle", "steps_per_epoch", "validation_data"}
_RIGHT_NAMES = {name: right for right, names in _OTHER_NAMES.items() for name in names.split()}

_Function = TypeVar("_Function", bound=Callable[..., Any])
_Arguments = ParamSpec("_Arguments")


def suggests_argument_names(function: _Function) -> _Function:
    """Make a function reject wrong argument names and extra positional ones with the right name."""
    parameters = inspect.signature(function).parameters
    keywords = [name for name, p in parameters.items() if p.kind is p.KEYWORD_ONLY]
    num_positional = len(parameters) - len(keywords)
    name = function.__qualname__.removesuffix(".__init__")

    @functools.wraps(function)
    def checked(*args: Any, **kwargs: Any) -> Any:
        check_names(name, kwargs, parameters)
        if len(args) > num_positional:
            is_accumulator = "accumulation_steps" not in keywords
            message = _no_count_message if is_accumulator else _positional_message
            raise TypeError(message(name, args[num_positional], keywords))
        return function(*args, **kwargs)

    return checked  # type: ignore[return-value]


def with_signature_of(shown: Callable[..., Any]) -> Callable[[_Function], _Function]:
    """Give a method that forwards `*args` the signature of `shown`, plus its own keywords."""

    def decorated(function: _Function) -> _Function:
        own_parameters = inspect.signature(function).parameters.values()
        keywords = [p for p in own_parameters if p.kind is p.KEYWORD_ONLY]
        signature = inspect.signature(shown)
        parameters = [*signature.parameters.values(), *keywords]
        function.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
        return function

    return decorated


def typed_with_signature_of(
    shown: Callable[_Arguments, Any],
) -> Callable[[Callable[..., Any]], Callable[_Arguments, Any]]:
    """Do as `with_signature_of`, typed for checkers, for a method without keywords of its own."""
    return with_signature_of(shown)


def check_names(function: str, given: Mapping[str, object], known: Iterable[str]) -> None:
    """Raise TypeError if one of the keyword arguments given to a function is unknown."""
    known = list(known)
    for name, value in given.items():
        if name not in known:
            named = [argument for argument in known if argument not in ("self", "model")]
            raise TypeError(_unknown_message(function, name, value, named))


def check_names_for(
    name: str, function: Callable[..., Any], given: Mapping[str, object], others: Iterable[str]
) -> None:
    """Raise TypeError if a given name is neither an argument of a function nor in `others`."""
    parameters = inspect.signature(function).parameters
    if not any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
        check_names(name, given, [*parameters, *others])


def _unknown_message(function: str, name: str, value: object, known: list[str]) -> str:
    is_count = _RIGHT_NAMES.get(name, name) == "accumulation_steps"
    if not known or (is_count and "accumulation_steps" not in known):
        return _no_count_message(function, value, known, name)
    if name in _OF_FIT:
        hint = " `microbatch_size` is how many of its samples are in the model at a time."
        hint = hint if name == "batch_size" else ""
        return f"`{name}` belongs to `fit`. Received: {function}({name}={value!r}).{hint}"
    right = _RIGHT_NAMES.get(name)
    if right not in known:
        right = next(iter(difflib.get_close_matches(name, known, 1)), None)
    names = ", ".join(f"`{argument}`" for argument in known)
    way_out = f"Pass `{right}={value!r}`." if right else f"The arguments are {names}."
    return f"`{function}` has no argument `{name}`. Received: {name}={value!r}. {way_out}"


def _positional_message(function: str, value: object, keywords: list[str]) -> str:
    names = " or ".join(f"`{name}={value!r}`" for name in keywords[:2])
    return (
        f"`{function}` takes its settings as keyword arguments. Received: {value!r} by position. "
        f"Pass {names}."
    )


def _no_count_message(function: str, value: object, known: list[str], name: str = "") -> str:
    received = f"{name}={value!r}" if name else repr(value)
    interval = f"{value} `add`s" if isinstance(value, int) else "window"
    arguments = f" Its arguments are {known}." if known else ""
    return (
        f"`{function}` does not count microbatches: each window ends where you call "
        f"`apply(optimizer)`. Received: {received}. Remove the argument, and call "
        f"`apply(optimizer)` after every {interval}.{arguments}"
    )
