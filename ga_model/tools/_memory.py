"""Measure the memory that this process uses, and that is left for it."""

from __future__ import annotations

import contextlib
import ctypes
import sys
from collections.abc import Callable
from pathlib import Path

import psutil

# By cgroup version (controller): the root folder, the files with limit and usage, and the field of
# `memory.stat` with the cached files.
_GROUPS = {
    "0": ("/sys/fs/cgroup", "memory.max", "memory.current", "inactive_file"),
    "memory": (
        "/sys/fs/cgroup/memory",
        "memory.limit_in_bytes",
        "memory.usage_in_bytes",
        "total_inactive_file",
    ),
}

# Bytes of the address space to leave free: each thread's heap takes 64 MiB before it is used.
_RESERVED = 2 * 64 * 1024**2

_M_MMAP_THRESHOLD = -3  # of `malloc.h`


def reset_peak_memory() -> None:
    """Reset the peak of this process's memory to its current use, if the platform can."""
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")


def peak_memory() -> int:
    """Return the peak of this process's resident memory in bytes."""
    # On Linux `ru_maxrss` starts at the parent's, because exec keeps it; `VmHWM` does not.
    return _in_status("VmHWM", _peak_of_usage)


def _in_status(name: str, otherwise: Callable[[], int]) -> int:
    """Return a number of bytes in the status of this process, where Linux has one."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith(f"{name}:"):
                return int(line.split()[1]) * 1024
    return otherwise()


def _peak_of_usage() -> int:
    if sys.platform != "win32":
        import resource

        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return peak if sys.platform == "darwin" else peak * 1024  # bytes on macOS, KiB elsewhere
    return int(psutil.Process().memory_info().peak_wset)


def give_back_freed_memory() -> None:
    """Make the C library return large blocks to the system when they are freed, if it can.

    Otherwise it keeps some freed memory, which differs from run to run, and the peak includes it.
    """
    with contextlib.suppress(AttributeError, OSError, TypeError):
        ctypes.CDLL(None).mallopt(_M_MMAP_THRESHOLD, 1024 * 1024)


def memory_in_use() -> int:
    """Return the bytes that count against a limit: of the address space, if that is limited."""
    memory = psutil.Process().memory_info()
    return int(memory.rss if address_limit() is None else memory.vms)


def peak_in_use() -> int:
    """Return the peak of `memory_in_use`. That of the address space is since the process began."""
    return peak_memory() if address_limit() is None else _in_status("VmPeak", memory_in_use)


def address_limit() -> int | None:
    """Return the limit of the address space in bytes, as set by `ulimit -v`, or None."""
    if sys.platform == "win32":
        return None
    import resource

    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    return None if limit == resource.RLIM_INFINITY else limit


def held_memory() -> int:
    """Return the bytes of freed memory that the C library still holds, or 0 if unknown."""
    try:
        mallinfo = ctypes.CDLL(None).mallinfo2  # glibc only
    except (AttributeError, OSError, TypeError):
        return 0
    mallinfo.restype = _Mallinfo
    return int(mallinfo().fordblks)


class _Mallinfo(ctypes.Structure):
    _names = ("arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks")
    _fields_ = [(name, ctypes.c_size_t) for name in (*_names, "fordblks", "keepcost")]


def available_memory() -> int:
    """Return the bytes that this process may still take, within the limit of its container."""
    left = [int(psutil.virtual_memory().available)]
    if (limit := address_limit()) is not None:
        left.append(limit - memory_in_use() - _RESERVED)
    try:
        lines = Path("/proc/self/cgroup").read_text().splitlines()
    except OSError:
        lines = []
    for number, controllers, path in (line.split(":", 2) for line in lines):
        root, *names = _GROUPS.get(controllers or number, (None,))
        if root is not None:
            # In a container, the path may be that on the host, and the root the container's group.
            left += _left_of_groups(Path(root), path.strip("/").split("/"), *names)
    return max(0, min(left))


def _left_of_groups(root: Path, parts: list[str], limit: str, used: str, files: str) -> list[int]:
    """Return the bytes left in each group on a path. Cached files count as free."""
    left = []
    for depth in range(len(parts) + 1):
        folder = root.joinpath(*parts[:depth])
        with contextlib.suppress(OSError, ValueError):  # "max" means no limit
            maximum, current = (int((folder / name).read_text()) for name in (limit, used))
            pairs = [line.split() for line in (folder / "memory.stat").read_text().splitlines()]
            left.append(maximum - current + int(dict(pairs).get(files, 0)))
    return left
