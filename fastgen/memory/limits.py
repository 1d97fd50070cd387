"""Says how much memory is free and how much may be kept between calls, and frees memory when it runs out."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator
from pathlib import Path

from fastgen.memory.release import release

_SHARE = 4  # one kind of kept memory takes at most one part in so many of the memory that would be free without it


def may_keep(size: int, taken: int) -> bool:
    """Whether `size` bytes more may be kept, of a kind that takes `taken` already."""
    available = free()
    return available is None or (taken + size) * _SHARE <= taken + available


def is_out_of_memory(error: BaseException) -> bool:
    """Whether `error` says that memory ran out, on the CPU or on a GPU."""
    return _is_out_of_memory(error) or (
        # As when a graph's capture is ended because memory ran out in it: then its end fails, too.
        error.__context__ is not None and isinstance(error, RuntimeError) and is_out_of_memory(error.__context__)
    )


def _is_out_of_memory(error: BaseException) -> bool:
    if isinstance(error, MemoryError):
        return True
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(error, torch.OutOfMemoryError):
        return True
    text = str(error)
    # Allocators without an exception class of their own: the CPU's, cuBLAS's and cuDNN's workspaces.
    return isinstance(error, RuntimeError) and any(
        phrase in text
        for phrase in ("out of memory", "not enough memory", "can't allocate memory", "STATUS_ALLOC_FAILED")
    )


@contextlib.contextmanager
def relief() -> Iterator[None]:
    """If memory runs out inside the block, free what is kept between calls, so that a second try finds more room."""
    try:
        yield
    except Exception as error:
        if is_out_of_memory(error):
            release()
        raise


def _control_groups() -> list[tuple[Path, str, str]]:
    """Folder and file names of this process's memory limits: its control group and the groups around it, v1 and v2."""
    root = Path("/sys/fs/cgroup")
    groups = [(root / "memory", "memory.limit_in_bytes", "memory.usage_in_bytes")]
    with contextlib.suppress(OSError):
        for line in Path("/proc/self/cgroup").read_text().splitlines():
            _, kinds, path = line.split(":", 2)
            place = Path(path.lstrip("/"))
            for part in (place, *place.parents):
                if not kinds:
                    groups.append((root / part, "memory.max", "memory.current"))
                elif kinds == "memory":
                    groups.append((root / "memory" / part, "memory.limit_in_bytes", "memory.usage_in_bytes"))
    return groups


_CONTAINER = _control_groups()


def _given_back(group: Path) -> int:
    """Bytes that a control group gives back when memory runs short: pages of files that were read, as a model is."""
    with contextlib.suppress(OSError, ValueError):
        counts = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
        return int(counts.get("total_inactive_file", counts.get("inactive_file", 0)))
    return 0


def free() -> int | None:
    """Bytes of memory that the machine and the container still have free; None if unknown."""
    found: list[int] = []
    with contextlib.suppress(OSError, ValueError, IndexError):
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                found.append(int(line.split()[1]) * 1024)
    for group, limit, current in _CONTAINER:
        with contextlib.suppress(OSError, ValueError):
            left = int((group / limit).read_text()) - int((group / current).read_text())
            if not found or left < min(found):  # else it does not matter, and is not worth the time
                left += _given_back(group)
            found.append(left)
    if not found and sys.platform != "win32":
        with contextlib.suppress(OSError, ValueError):
            found.append(os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
    return min(found, default=None)
