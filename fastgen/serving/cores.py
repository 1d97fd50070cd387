"""How many cores this process may use, which containers limit without hiding the others, and whether they suffice."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

GROUPS = Path("/sys/fs/cgroup")
MEMBERSHIP = Path("/proc/self/cgroup")


def available() -> float:
    """Cores that this process may use: those that it may run on, and no more than its control groups' time."""
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min([float(allowed), *limits()])


def limits(groups: Path = GROUPS, membership: Path = MEMBERSHIP) -> Iterator[float]:
    """The limit of each control group that this process is in, in cores, by version 2 or 1 of the interface.

    The path of a group is that of the machine; within a container the group itself may be mounted as the root.
    """
    for line in _text(membership).splitlines():
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if not controllers:
            mounts = [groups, groups / "unified"]
        elif "cpu" in controllers.split(","):
            mounts = [groups / "cpu", groups / controllers]
        else:
            continue
        for mount in dict.fromkeys(mounts):
            for folder in dict.fromkeys([*_upwards(mount, path), mount]):
                yield from _limit(folder)


def oversubscribed(replicas: int, threads: int, cores: float | None = None) -> str | None:
    """What to say if so many replicas of so many threads are more than the cores that there are; None if not."""
    cores = available() if cores is None else cores
    if replicas * threads <= max(1.0, cores):
        return None
    many = f"{replicas} replicas of {threads} threads" if replicas > 1 else f"{threads} threads"
    return (
        f"{many} share {cores:g} {'core' if cores == 1 else 'cores'}, and wait for one another: "
        "give --replicas or --threads a smaller number."
    )


def _upwards(mount: Path, path: str) -> Iterator[Path]:
    """The folder of a group below a mount, and those above it."""
    folder = mount / path.strip("/")
    while folder != mount and mount in folder.parents:
        yield folder
        folder = folder.parent


def _limit(folder: Path) -> Iterator[float]:
    quota, _, period = _text(folder / "cpu.max").strip().partition(" ")  # "max 100000", or "150000 100000"
    if not quota:
        quota, period = _text(folder / "cpu.cfs_quota_us").strip(), _text(folder / "cpu.cfs_period_us").strip()
    if quota.isdecimal() and period.isdecimal() and int(quota) and int(period):  # -1 or "max": no limit
        yield int(quota) / int(period)


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""
