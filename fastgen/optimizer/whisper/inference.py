"""The inference object that the host's decoding task calls in place of its own."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from whisper.model import Whisper

from fastgen import config
from fastgen.memory import arena, limits
from fastgen.optimizer import gate, together, verification
from fastgen.optimizer.whisper.blocks import has_blocks
from fastgen.optimizer.whisper.decoder import TreeDecoder, has_own_layout, step_together
from fastgen.optimizer.whisper.encoder import encode
from fastgen.patching import foreign_code, hosts
from fastgen.patching.foreign_code import HostCode
from fastgen.patching.replaced_code import are_of

# Linear layers are multiplied without being called, so hooks of torch's, such as those of pruning, do not run.
_CODE = HostCode(packages=("whisper", "fastgen"), runs_hooks=False)


class Step(NamedTuple):
    """What a decoding needs that is run together with others: a step for the last tokens, int64 `[rows, 1]`."""

    decoder: TreeDecoder
    last: Tensor


@limits.relief()
def answer(needs: Mapping[int, Step]) -> dict[int, Tensor]:
    """The logits of these steps, float32 `[rows, 1, V]` each, all of one model, by their numbers."""
    decoders = [step.decoder for step in needs.values()]
    with arena.of(decoders[0].model):
        logits = step_together(decoders, [step.last for step in needs.values()])
    return dict(zip(needs, logits, strict=True))


class TreeInference:
    """Runs the model for one decoding, of one or several segments; loop, filters and search rules are the host's.

    Rows are beams, or samples of a segment; the host passes one row of audio features for each segment.
    """

    def __init__(self, host: Any, stock: dict[str, Callable[..., Any]], replaced: str | None = None) -> None:
        """`host`: the host's object, with a cache of its own; `stock`: the methods of that object, for decodings that
        cannot run over the tree; `replaced`: which of the methods is another's."""
        self.model, self._host, self._stock, self._replaced = host.model, host, stock, replaced
        self.wanted: Sequence[int] | None = None  # positions of the prompt whose logits the host looks at; None: all
        self._begin()

    def _begin(self) -> None:
        self._decoder: TreeDecoder | None = None
        self._record: gate.Record | None = None  # set once the size is known, unless fastgen is disabled
        self._decision = gate.Decision(gate.STOCK, None)
        self._steps = 0
        self._cache_bytes: int | None = None

    @limits.relief()
    def logits(self, tokens: Tensor, audio_features: Tensor) -> Tensor:
        """Logits, float32 `[rows, length or 1, V]`, for `tokens`, int64 `[rows, length]`: all at first, then one."""
        if not self._steps:
            self._decide(tokens, audio_features)
        elif self._decoder is not None and not self._is_step(tokens):
            self._leave()
        self._steps += 1
        if self._decoder is None:
            logits: Tensor = together.outside(self._stock["logits"], tokens, audio_features)
            return logits
        if self._steps == 1:
            return together.outside(self._read, tokens)
        last = tokens[:, -1:]
        if together.is_inside():
            return together.need(Step(self._decoder, last))
        with arena.of(self.model):
            return self._decoder.step(last)

    def _read(self, tokens: Tensor) -> Tensor:
        assert self._decoder is not None
        with arena.of(self.model):
            return self._decoder.read(tokens, self.wanted)

    def _is_step(self, tokens: Tensor) -> bool:
        """Whether the host would read but the last token of each row, and the rows are as many as they were."""
        assert self._decoder is not None
        return tokens.shape[1] > self._host.initial_token_length and len(tokens) == self._decoder.rows

    def _leave(self) -> None:
        """Go on with the host's cache, which is given what the tree holds."""
        assert self._decoder is not None
        self._host.kv_cache, self._host.hooks = self.model.install_kv_cache_hooks()
        self._host.kv_cache.update(self._decoder.by_module())
        self._close()

    def _decide(self, tokens: Tensor, audio_features: Tensor) -> None:
        if not hosts.is_on():  # it was on when the host made this object
            return
        segments = len(audio_features)
        size = segments, max(len(tokens) // max(segments, 1), 1)
        record = gate.Record("whisper", type(self.model).__name__, *size)
        decision = gate.decide(lambda: self._reason(tokens, audio_features))
        if decision.tier != gate.STOCK:
            self._decoder = TreeDecoder(self.model, audio_features, *size, prompt_length=tokens.shape[1])
        self._record, self._decision = record, decision  # only for a call that has got here

    def _reason(self, tokens: Tensor, audio_features: Tensor) -> str | None:
        if self._replaced is not None:
            return f"PyTorchInference has another {self._replaced} than whisper's"
        if tokens.shape[1] > self._host.initial_token_length:
            return "the first tokens are more than the initial ones, of which whisper reads the last alone"
        return unsupported_reason(self.model, tokens, audio_features)

    @property
    def is_on_tree(self) -> bool:
        return self._decoder is not None

    def rearrange_kv_cache(self, source_indices: list[int]) -> None:
        """Reorder the rows: row i continues row `source_indices[i]`."""
        if source_indices == list(range(len(source_indices))):
            return
        if self._decoder is not None and not self._decoder.can_reorder(source_indices):
            self._leave()
        if self._decoder is None:
            self._stock["rearrange_kv_cache"](source_indices)
        else:
            self._decoder.reorder(source_indices)

    def cleanup_caching(self) -> None:
        """End the decoding, whether it has succeeded or not: free the caches and record the call."""
        self._stock["cleanup_caching"]()
        self._close()
        if self._record is not None:
            self._record.done(self._decision, self._steps, self._cache_bytes)
        self._begin()

    def _close(self) -> None:
        """Free what the tree holds, if there is one."""
        decoder, self._decoder = self._decoder, None
        if decoder is not None:
            verification.note_accelerated(self)
            self._cache_bytes = decoder.nbytes
            decoder.close()
            arena.settle()


def unsupported_reason(model: Any, tokens: Tensor, audio_features: Tensor) -> str | None:
    """Why this decoding has to be left to the host's own cache, in words for the user; None if it need not."""
    if reason := verification.reason_against(model):
        return reason
    if torch.is_grad_enabled():
        return "gradients are enabled"
    if torch.is_autocast_enabled(tokens.device.type):
        return "autocast rounds between the layers"
    if audio_features.ndim != 3 or not len(audio_features) or len(tokens) % len(audio_features):
        return f"audio features of shape {tuple(audio_features.shape)} are not one row for each segment"
    if 1 < len(audio_features) < len(tokens):
        return "whisper itself cannot decode several segments with several beams or samples each"
    if len(audio_features) == 1 and not torch.equal(tokens, tokens[:1].expand_as(tokens)):
        return "the rows of a segment begin with different tokens"
    return _unsupported_part(model, "decoder")


def encoded(model: Any, mel: Tensor) -> Tensor:
    """Spectrograms, `[B, bands, 2*N]`, encoded with weights in fewer bits; unchanged where that can't be done here."""
    dims = model.dims
    is_plain = mel.dtype == torch.float32 and mel.ndim == 3 and mel.shape[1:] == (dims.n_mels, 2 * dims.n_audio_ctx)
    is_busy = torch.is_grad_enabled() or torch.is_autocast_enabled(mel.device.type)
    if not is_plain or is_busy or config.current().tier == gate.STOCK or _unsupported_part(model, "encoder"):
        return mel
    return encode(model, mel)


def _unsupported_part(model: Any, name: str) -> str | None:
    """Why the host has to run this part of the model, or None."""
    part = getattr(model, name)
    if type(model) is not Whisper or not are_of({"whisper"}, part.modules()):
        return f"{type(model).__name__} is not whisper's own model"
    if (mode := foreign_code.active_mode()) is not None:
        return f"a mode of yours ({mode}) sees each operation"
    if (found := next(_CODE.find(part.named_modules(prefix=name)), None)) is not None:
        return f"{found}: it is left to the host"
    if any(map(foreign_code.is_quantised, part.modules())):
        return f"the {name} is quantised, or observed, over all rows of a product at once"
    if not (has_own_layout(part) if name == "decoder" else has_blocks(part.blocks, with_cross_attention=False)):
        return f"the {name} is not put together as whisper puts it together"
    return None
