"""The hosts that fastgen accelerates: which adapter changes which module, and the switch for all hosts."""

from __future__ import annotations

import contextlib
import importlib
import sys
from collections.abc import Iterator
from importlib.machinery import ModuleSpec
from types import ModuleType

from fastgen import locks, report
from fastgen.patching import redirection
from fastgen.patching.import_hook import cancel, when_imported
from fastgen.patching.patch_set import ForeignSeam, PatchSet, SeamMismatch
from fastgen.report import HostStatus

# Guards the switch and every host's patches. Never held while a module is imported: another thread
# may hold that module's import lock and wait for this one.
_lock = locks.reentrant_lock()


class Leaf:
    """One module of a host that the adapter patches as soon as it is imported."""

    def __init__(self, host: Host, name: str) -> None:
        self.host, self.name = host, name
        self.mismatch = ""
        self.patched: ModuleSpec | None = None  # new at every import, reloads included
        self._patches = PatchSet()
        self._warned = False

    def follow(self) -> None:
        """Bring the module in line with the switch, now and when it is imported."""
        if _switch.on:
            when_imported(self.name, self._arrived)
        with _lock:
            if _switch.on:
                return
            cancel(self.name, self._arrived)
            self.patched = None
            foreign = self._patches.revert()
        if foreign:
            names = ", ".join(foreign)
            text = f"fastgen leaves {names} as it is: something else has replaced it since."
            report.warn(text, loses_nothing=False)

    def _arrived(self, module: ModuleType) -> None:
        try:
            adapter = importlib.import_module(self.host.adapter)
        except (ImportError, AttributeError) as error:  # names that this version of the host lacks
            self._leave_alone(error)
            return
        try:
            with _lock:
                if not _switch.on or (self.patched is not None and self.patched is module.__spec__):
                    return
                self._patches.revert()
                self.patched = None
                with self._patches:
                    adapter.install(self._patches, module)
                self.patched = module.__spec__
                self.mismatch = ""
        except (SeamMismatch, ImportError, AttributeError) as error:
            self._leave_alone(error)

    @property
    def fault(self) -> str:
        """Why the module is left alone; empty if it is not."""
        return self.mismatch or self._patches.fault

    def _leave_alone(self, error: Exception) -> None:
        self.mismatch = str(error) or type(error).__name__
        if isinstance(error, ForeignSeam) or self is not self.host.leaf:
            if not self._warned:
                self._warned = True
                text = f"fastgen leaves {self.name} of {self.host.name} {self.host.version()} alone: {self.mismatch}"
                report.warn(text, loses_nothing=False)
        else:
            report.warn_of_version(self.host.name, f"alone: {self.mismatch}")


class Host:
    """One library that fastgen accelerates once it is imported."""

    def __init__(self, name: str, adapter: str, leaf: str, others: tuple[str, ...] = ()) -> None:
        self.name, self.adapter = name, adapter
        self.leaf = Leaf(self, leaf)  # carries the acceleration
        self.leaves = (self.leaf, *(Leaf(self, name) for name in others))  # the host decodes as well without these

    def follow(self) -> None:
        for leaf in self.leaves:
            leaf.follow()

    def version(self) -> str | None:
        return getattr(sys.modules.get(self.name), "__version__", None)

    def status(self) -> HostStatus:
        version = self.version()
        detail = "; ".join(leaf.fault for leaf in self.leaves if leaf.fault) if _switch.on else ""
        if self.leaf.patched is not None and not self.leaf.fault:
            state, why = report.state_of(self.name)
            return HostStatus(self.name, version, state, "; ".join(filter(None, (why, detail))))
        if self.leaf.name not in sys.modules:
            return HostStatus(self.name, version, "not imported")
        if detail:
            return HostStatus(self.name, version, "left alone", detail)
        return HostStatus(self.name, version, "disabled")


class Switch:
    """The switch for all hosts: on when the user wants fastgen and no thread has a `disabled()` block open."""

    wanted = False
    paused = 0

    @property
    def on(self) -> bool:
        return self.wanted and not self.paused


_switch = Switch()
_hosts = (
    Host(
        "transformers",
        "fastgen.optimizer.transformers",
        "transformers.generation.utils",
        others=("transformers.models.whisper.generation_whisper",),
    ),
    Host("fairseq", "fastgen.optimizer.fairseq", "fairseq.sequence_generator", others=("fairseq.checkpoint_utils",)),
    Host("whisper", "fastgen.optimizer.whisper", "whisper.decoding"),
)


def _follow() -> None:
    for host in _hosts:
        host.follow()
    if not _switch.on:
        redirection.put_back()


def enable() -> None:
    """Accelerate all hosts, those already imported and those imported later."""
    with _lock:
        _switch.wanted = True
    _follow()


def disable() -> None:
    """Put back every attribute of every host as it was."""
    with _lock:
        _switch.wanted = False
    _follow()


@contextlib.contextmanager
def disabled() -> Iterator[None]:
    """Restore the stock hosts inside the block, for all threads; blocks nest and may overlap across threads."""
    with _lock:
        _switch.paused += 1
    try:
        _follow()
        yield
    finally:
        with _lock:
            _switch.paused -= 1
        _follow()


def is_on() -> bool:
    """Whether fastgen is enabled, and no `disabled()` block is open."""
    return _switch.on


def statuses() -> tuple[bool, tuple[HostStatus, ...]]:
    """Whether fastgen is on, and the status of each host."""
    with _lock:
        return _switch.on, tuple(host.status() for host in _hosts)
