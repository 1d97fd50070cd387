"""Patches OpenAI's `whisper` package, so that it decodes over the beam tree."""

from __future__ import annotations

import functools
import types
from collections.abc import Callable
from types import ModuleType
from typing import Any

from fastgen import config
from fastgen.patching.patch_set import PatchSet, require_signature

TESTED = "20250625"  # the newest version of the host

# The methods of an inference object that the host's `DecodingTask` and decoders call.
_METHODS = {
    "logits": ("self", "tokens", "audio_features"),
    "rearrange_kv_cache": ("self", "source_indices"),
    "cleanup_caching": ("self",),
}


def install(patches: PatchSet, module: ModuleType) -> None:
    """Patch `module`, which is whisper.decoding, so that each inference object runs the model over the tree.

    Raises SeamMismatch if this version's inference differs from the one that ours was written for.
    """
    inference = module.PyTorchInference
    require_signature(inference.__init__, ("self", "model", "initial_token_length"))
    for name, parameters in _METHODS.items():
        require_signature(getattr(inference, name), parameters)
    methods = {name: getattr(inference, name) for name in _METHODS}
    patches.replace(inference, "__init__", _wrapped(inference, inference.__init__, methods))
    require_signature(module.DecodingTask.run, ("self", "mel"))
    patches.replace(module.DecodingTask, "run", _verified(module.DecodingTask.run))


def _verified(stock: Callable[..., Any]) -> Callable[[Any, Any], Any]:
    """Wrap the host's `run`: it is compared with fastgen's where the user asks for that."""

    @functools.wraps(stock)
    def run(self: Any, mel: Any) -> Any:
        if not config.current().verify:
            return stock(self, mel)
        from fastgen.optimizer.whisper import verification

        return verification.run(stock, self, mel)

    return run


def _wrapped(
    kind: type, stock: Callable[..., None], methods: dict[str, Callable[..., Any]]
) -> Callable[[Any, Any, int], None]:
    @functools.wraps(stock)
    def __init__(self: Any, model: Any, initial_token_length: int) -> None:
        stock(self, model, initial_token_length)
        if type(self) is not kind:  # a subclass of the user's may do anything
            return
        # The host is still being imported when this module is: these are imported at the first call.
        from fastgen.optimizer.whisper.inference import TreeInference

        ours = TreeInference(model, {name: types.MethodType(method, self) for name, method in methods.items()})
        for name in methods:  # on this object, so that a decoding that has begun ends as it began
            setattr(self, name, getattr(ours, name))

    return __init__
