"""Decoding with OpenAI's `whisper` package over the beam tree."""

from __future__ import annotations

from types import ModuleType
from typing import Any

from fastgen._patching import PatchSet, require_signature

# What the host's `DecodingTask` and its decoders ask of their inference.
_INFERENCE = {
    "__init__": ("self", "model", "initial_token_length"),
    "logits": ("self", "tokens", "audio_features"),
    "rearrange_kv_cache": ("self", "source_indices"),
    "cleanup_caching": ("self",),
}


def install(patches: PatchSet, module: ModuleType) -> None:
    """Replace the class that runs the model, in `module`, which is whisper.decoding.

    Raises SeamMismatch if this version's differs from the one that ours was written for.
    """
    stock = module.PyTorchInference
    for name, parameters in _INFERENCE.items():
        require_signature(getattr(stock, name), parameters)

    def inference(model: Any, initial_token_length: int) -> Any:
        # The host is still being imported when this module is: its parts are loaded at the first call.
        from fastgen.optimizer.whisper.inference import TreeInference

        return TreeInference(model, stock(model, initial_token_length))

    patches.replace(module, "PyTorchInference", inference)
