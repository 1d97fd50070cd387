"""Beam search of Hugging Face transformers and fairseq, faster and with the same output: `import fastgen`."""

from __future__ import annotations

import contextlib
import importlib
import sys
import threading
from collections.abc import Iterator, Mapping
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

from fastgen import config, installing, report
from fastgen._import_hook import cancel, when_imported
from fastgen._patching import PatchSet, SeamMismatch
from fastgen.config import Config
from fastgen.pipeline.offline import generate, generate_samples
from fastgen.report import Call, FallbackError, HostStatus, Status

__version__ = "0.1.0"
__all__ = [
    "Call",
    "Config",
    "FallbackError",
    "HostStatus",
    "Status",
    "configure",
    "configured",
    "disable",
    "disabled",
    "enable",
    "encode",
    "generate",
    "generate_samples",
    "inspect",
    "release",
    "status",
]

_COMPILED = "fastgen.optimizer.transformers.compiled"
_RECORDINGS = "fastgen.decoding.recordings"
_JUDGED = [f"fastgen.optimizer.{host}" for host in ("transformers.planning", "fairseq.slim")]

# Guards the switch and every host's patches. Never held while a module is imported: another thread
# may hold that module's import lock and wait for this one.
_lock = threading.RLock()


class _Leaf:
    """One module of a host that the adapter patches as soon as it is imported."""

    def __init__(self, host: _Host, name: str) -> None:
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
        if self is self.host.leaf:
            report.warn_of_version(self.host.name, f"alone: {self.mismatch}")
        elif not self._warned:
            self._warned = True
            text = f"fastgen leaves {self.name} of {self.host.name} {self.host.version()} alone: {self.mismatch}"
            report.warn(text, loses_nothing=False)


class _Host:
    """One library that fastgen accelerates once it is imported."""

    def __init__(self, name: str, adapter: str, leaf: str, repairs: tuple[str, ...] = ()) -> None:
        self.name, self.adapter = name, adapter
        self.leaf = _Leaf(self, leaf)  # carries the acceleration
        self.leaves = (self.leaf, *(_Leaf(self, name) for name in repairs))  # the rest: bugs mended on the way

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


class _Switch:
    """On when the user wants fastgen and no `disabled()` block is open, in whatever thread."""

    wanted = False
    paused = 0

    @property
    def on(self) -> bool:
        return self.wanted and not self.paused


_switch = _Switch()
_hosts = (
    _Host("transformers", "fastgen.optimizer.transformers", "transformers.generation.utils"),
    _Host("fairseq", "fastgen.optimizer.fairseq", "fairseq.sequence_generator", repairs=("fairseq.checkpoint_utils",)),
    _Host("whisper", "fastgen.optimizer.whisper", "whisper.decoding"),
)


def _follow() -> None:
    for host in _hosts:
        host.follow()


def enable() -> None:
    """Accelerate the hosts that are imported, and those that will be."""
    with _lock:
        _switch.wanted = True
    _follow()


def disable() -> None:
    """Put back every attribute of every host as it was."""
    with _lock:
        _switch.wanted = False
    _follow()
    release()


@contextlib.contextmanager
def disabled() -> Iterator[None]:
    """The stock hosts inside the block, for all threads; blocks nest and may overlap across threads."""
    with _lock:
        _switch.paused += 1
    try:
        _follow()
        yield
    finally:
        with _lock:
            _switch.paused -= 1
        _follow()


def configure(**options: Any) -> Config:
    """Change settings.

    strict (bool), tier ("auto", "fast", "compat", "stock"), history (int), packing ("auto", "always", "off"),
    cache ("auto", "kv", "x", "h", "k", "v"), cache_threshold (float), replay ("auto", "always", "off"), compile (bool),
    cuda_graphs (bool), foreign_code ("stock", "trial"), verify (int).
    """
    return config.configure(**options)


def configured(**options: Any) -> contextlib.AbstractContextManager[config.Config]:
    """Inside the block the settings are these for the calls of this thread, or asyncio task, alone: see `configure`."""
    return config.configured(**options)


def status() -> Status:
    """What is accelerated, and what the last beam searches did and why. Print it."""
    with _lock:
        hosts = tuple(host.status() for host in _hosts)
        on = _switch.on
    packing = sys.modules.get("fastgen.packing")  # loaded by the first beam search, as are the buffers
    kept = [sys.modules.get(name) for name in ("fastgen.buffers", "fastgen.arena")]
    compiled = sys.modules.get(_COMPILED)
    replays = sys.modules.get("fastgen.decoding.replays")
    verification = sys.modules.get("fastgen.verification")
    return Status(
        __version__,
        on,
        hosts,
        report.counters(),
        report.calls(),
        packed_weights=packing.count() if packing else 0,
        packed_bytes=packing.nbytes() if packing else 0,
        buffer_bytes=sum(module.nbytes() for module in kept if module),
        compiled=compiled.steps() if compiled else {},
        operators=report.operators(),
        encoders=report.encoders(),
        replayed=replays.replayed() if replays else {},
        verified=verification.summary() if verification else "",
    )


def inspect(model: Any, inputs: Mapping[str, Any]) -> Any:
    """How exact each layer's attention would be with each kind of slim cache: a table, to be printed.

    Tried on what `model.generate(**inputs)` would read and write, for a few sentences; errors are against
    float64 and relative to the largest number of the attention's output. Raises ValueError, with the reason, for
    models that have no slim caches. In fairseq `model` is a `SequenceGenerator`, which has its models, and `inputs` a
    sample, with its `net_input`.
    """
    # Either brings its host with it.
    if isinstance(model, getattr(sys.modules.get("fairseq.sequence_generator"), "SequenceGenerator", ())):
        from fastgen.optimizer.fairseq import inspecting

        return inspecting.inspect(model, inputs)
    if isinstance(model, getattr(sys.modules.get("fairseq.models"), "BaseFairseqModel", ())):
        raise ValueError("A model of fairseq is inspected by its SequenceGenerator: inspect(generator, sample).")
    from fastgen.optimizer.transformers import inspecting as transformers_inspecting

    return transformers_inspecting.inspect(model, inputs)


def encode(model: Any, **inputs: Any) -> Any:
    """`model(**inputs)` of a transformers encoder, with or without a head, that computes (almost) no padding.

    Texts of like length are read together, each group as long as its longest text, where that pays by an estimate.
    BERT, RoBERTa, XLM-RoBERTa, CamemBERT, DistilBERT, ELECTRA, ALBERT and MPNet, alone or with a head for masked words,
    or for classes of texts, tokens or spans; others, and inputs that cannot be divided, are read as they are, with the
    reason in the log.

    Args:
        model: in evaluation mode; call under `torch.no_grad()`.
        inputs: `input_ids` int64 `[B, N]`, padded on the right, and `attention_mask` `[B, N]`; `token_type_ids` and
            `position_ids` `[B, N]`, if any.

    Returns: the model's own output. States and logits of padding are zeros (of spans the least numbers there are),
        where the model has numbers that mean nothing; all others are the same but for rounding.

    Raises:
        FallbackError: in strict mode, instead of reading a batch as it is.
    """
    if not _switch.on:
        return model(**inputs)
    from fastgen.optimizer.transformers import encoder  # brings its host with it

    return encoder.run(model, inputs)


def release() -> None:
    """Free what fastgen keeps between calls: packed weights, buffers, memory of steps, recordings, compiled code."""
    for name in ("fastgen.packing", "fastgen.buffers", "fastgen.arena", _COMPILED, _RECORDINGS, *_JUDGED):
        if module := sys.modules.get(name):
            module.release()


if (_another := installing.another()) is not None:
    report.warn(_another)
if not config.flag("FASTGEN_DISABLE"):
    enable()
