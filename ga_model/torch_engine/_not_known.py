"""What reads PyTorch's graphs, or tries a step, may meet what it does not know.

That is no error of the user's: what is asked is answered as where nothing tells, so the step runs
in the way that is exact for any, or it is told that it may not be.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar, cast

from ga_model.backends.torch.memory import is_exhausted

Reader = TypeVar("Reader", bound=Callable[..., Any])


def is_to_raise(error: Exception) -> bool:
    """Return whether an error of a reader is no sign of something that it does not know."""
    return isinstance(error, Warning) or is_exhausted(error)


def otherwise(answer: Any) -> Callable[[Reader], Reader]:
    """Return a decorator that lets a function answer what it cannot read.

    Args:
        answer: what it returns then.
    """

    def decorate(read: Reader) -> Reader:
        @functools.wraps(read)
        def reading(*args: Any, **kwargs: Any) -> Any:
            try:
                return read(*args, **kwargs)
            except Exception as error:
                if is_to_raise(error):
                    raise
                return answer

        return cast(Reader, reading)

    return decorate
