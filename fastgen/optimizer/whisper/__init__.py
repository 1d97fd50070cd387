"""Patches OpenAI's `whisper` package, so that it decodes over the beam tree."""

from __future__ import annotations

import contextlib
import contextvars
import functools
import importlib
import types
from collections.abc import Callable
from types import ModuleType
from typing import Any

from fastgen import config
from fastgen.optimizer import together
from fastgen.patching import hosts
from fastgen.patching.patch_set import ForeignSeam, PatchSet, require_own, require_signature

TESTED = "20250625"  # the newest version of the host

# The methods of an inference object that the host's `DecodingTask` and decoders call.
_METHODS = {
    "logits": ("self", "tokens", "audio_features"),
    "rearrange_kv_cache": ("self", "source_indices"),
    "cleanup_caching": ("self",),
}
_RULES = ("BeamSearchDecoder", "update"), ("ApplyTimestampRules", "apply")  # in `search`, under the same names
# The inference of the decoding that this thread, or task, runs; None if it is not ours.
_running: contextvars.ContextVar[Any] = contextvars.ContextVar("fastgen_whisper_inference", default=None)


def install(patches: PatchSet, module: ModuleType) -> None:
    """Patch `module`, which is whisper.decoding, so that each inference object runs the model over the tree.

    Raises SeamMismatch if this version's inference differs from the one that ours was written for.
    """
    inference = module.PyTorchInference
    begin = patches.stock(inference, "__init__")
    require_signature(begin, ("self", "model", "initial_token_length"))
    for name, parameters in _METHODS.items():
        require_signature(getattr(inference, name), parameters)
        require_own(getattr(inference, name), "whisper")
    methods = {name: getattr(inference, name) for name in _METHODS}
    patches.replace(inference, "__init__", _wrapped(inference, begin, methods))
    run, encode = (patches.stock(module.DecodingTask, name) for name in ("run", "_get_audio_features"))
    require_signature(run, ("self", "mel"))
    is_tested = importlib.import_module("whisper.version").__version__ == TESTED
    patches.replace(module.DecodingTask, "run", _prepared(module.DecodingTask, run, is_tested))
    require_signature(encode, ("self", "mel"))
    patches.replace(module.DecodingTask, "_get_audio_features", _encoding(module.DecodingTask, encode))
    if is_tested:  # other versions may have other rules
        for kind, name in _RULES:
            with contextlib.suppress(ForeignSeam):  # a rule of the user's is called
                require_own(getattr(getattr(module, kind), name), "whisper")
                patches.replace(getattr(module, kind), name, _on_tree(getattr(module, kind), name))


def _prepared(kind: type[Any], stock: Callable[..., Any], is_tested: bool) -> Callable[[Any, Any], Any]:
    """Wrap the host's `run`: it is compared with fastgen's where the user asks for that."""
    loop = kind._main_loop

    @functools.wraps(stock)
    def run(self: Any, mel: Any) -> Any:
        from fastgen.optimizer.whisper.inference import TreeInference

        found = getattr(self.inference.logits, "__self__", None)
        ours = found if isinstance(found, TreeInference) and type(self) is kind else None
        # Called by a function that others have put over this one, which stays, or a task that was made before.
        if not hosts.is_on():
            return stock(self, mel)
        if ours is not None and is_tested and _is_hosts(self, loop):
            ours.wanted = self.sot_index, len(self.initial_tokens) - 1  # all that the host's loop looks at
        if ours is not None and together.is_inside():
            mel = together.outside(self._get_audio_features, mel)  # the host's own `run` will leave these alone
        before = _running.set(ours)
        try:
            if not config.current().verify:
                return stock(self, mel)
            from fastgen.optimizer.whisper import verification

            return verification.run(stock, self, mel)
        finally:
            _running.reset(before)
            if ours is not None:
                ours.wanted = None

    return run


def _is_hosts(task: Any, loop: Callable[..., Any]) -> bool:
    """Whether the loop that this task runs is `loop`, which was there when fastgen was installed, and the host's."""
    from fastgen.patching.replaced_code import is_of

    return is_of(loop, "whisper") and type(task)._main_loop is loop and "_main_loop" not in vars(task)


def _encoding(kind: type[Any], stock: Callable[..., Any]) -> Callable[[Any, Any], Any]:
    """Wrap the host's `_get_audio_features`: fastgen encodes, where the user has chosen weights in fewer bits."""

    @functools.wraps(stock)
    def _get_audio_features(self: Any, mel: Any) -> Any:
        is_ours = type(self) is kind and not self.options.fp16 and hosts.is_on()
        if is_ours and config.current().weights != "float32":
            from fastgen.optimizer.whisper.inference import encoded

            mel = encoded(self.model, mel)  # the host leaves what is encoded alone
        return stock(self, mel)

    return _get_audio_features


def _on_tree(kind: type[Any], name: str) -> Callable[..., Any]:
    """Wrap a rule of the host's: decodings that run over the tree have ours, which does the same with less work."""
    stock: Callable[..., Any] = getattr(kind, name)

    @functools.wraps(stock)
    def rule(self: Any, *args: Any, **kwargs: Any) -> Any:
        ours = _running.get()
        if ours is None or not ours.is_on_tree or type(self) is not kind:
            return stock(self, *args, **kwargs)
        from fastgen.optimizer.whisper import search

        return together.outside(getattr(search, name), self, *args, **kwargs)

    return rule


def _wrapped(
    kind: type, stock: Callable[..., None], methods: dict[str, Callable[..., Any]]
) -> Callable[[Any, Any, int], None]:
    @functools.wraps(stock)
    def __init__(self: Any, model: Any, initial_token_length: int) -> None:
        stock(self, model, initial_token_length)
        if type(self) is not kind or not hosts.is_on():  # a subclass of the user's may do anything
            return
        # The host is still being imported when this module is: these are imported at the first call.
        from fastgen.optimizer.whisper.inference import TreeInference

        now = {name: getattr(kind, name) for name in methods}
        replaced = next((name for name in methods if now[name] is not methods[name]), None)
        ours = TreeInference(self, {name: types.MethodType(method, self) for name, method in now.items()}, replaced)
        for name in methods:  # on this object, so that a decoding that has begun ends as it began
            setattr(self, name, getattr(ours, name))

    return __init__
