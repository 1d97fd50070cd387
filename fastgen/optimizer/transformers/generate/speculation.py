"""Speculative decoding of one sentence in greedy search and sampling: weights in 8 bits draft, float32 decides.

The host's own loop runs. Where it calls the model with one token, a round begins: steps with weights in 8 bits draft
the next tokens, and one step in float32, with the token and the drafts as rows, gives the model's outputs after each.
As long as the host chooses what was drafted, its further calls are answered from these; another token begins the next
round, whose keys and values take the place of those that no token is left of. So every output that the host sees is the
model's own in float32, after the tokens that the host has chosen by its own rules.
"""

from __future__ import annotations

import copy
import threading
import time
import weakref
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fastgen import config, phases, report
from fastgen.cache.path_tree import AT_ONCE, PathTree
from fastgen.decoding.search import Search
from fastgen.decoding.speculation import CHECK, DRAFT, PLAIN, SpeculationPolicy
from fastgen.layers import quantized
from fastgen.layers.linear import LinearDispatcher
from fastgen.memory import arena
from fastgen.memory.buffers import Buffers
from fastgen.memory.release import keeper
from fastgen.optimizer.transformers import versions
from fastgen.optimizer.transformers.model.decoder import TreeDecoder
from fastgen.optimizer.transformers.model.session import Session
from fastgen.optimizer.transformers.replay.guards import guards_of_steps
from fastgen.optimizer.transformers.request import Request
from fastgen.replay import store
from fastgen.replay.replayer import Captured, Replayer

__phase__ = phases.LOOP

_DRAFTS = 4  # of a round, where the user has not said how many
_MIN_STEPS = 32  # for fewer tokens a call captures steps for too little
# Positions that depend on how long the whole sequence is, rows of one step have different ones.
_ROPE_BY_LENGTH = {"dynamic", "longrope"}
_KEY = "speculation"  # of recordings

_lock = threading.Lock()
_policies: weakref.WeakKeyDictionary[Any, dict[Hashable, SpeculationPolicy]] = weakref.WeakKeyDictionary()


def policy_for(request: Request) -> SpeculationPolicy | None:
    """What decides when this call drafts; None if it never does. To be asked if the call's steps may be replayed."""
    settings = config.current()
    speculate = settings.speculate
    model, steps = request.model, request.generation_config.max_length - request.input_ids.shape[1]
    if speculate == "off" or settings.weights != "float32" or settings.packing == "off":
        return None
    if request.is_beam_search or request.input_ids.shape[0] != 1 or model.config.is_encoder_decoder:
        return None
    if not request.facts.is_tested or request.facts.folding or not _is_float32(request):
        return None
    if quantized.unavailable(quantized.multiply_rows) is not None or _rope_types(model) & _ROPE_BY_LENGTH:
        return None
    if any(getattr(layer, "sliding_window", None) for layer in request.model_kwargs[versions.CACHE].layers):
        return None  # which keys a window leaves out depends on the position, and rows of one step have several
    if speculate == "auto" and (steps < _MIN_STEPS or torch.are_deterministic_algorithms_enabled()):
        return None
    is_forced = speculate != "auto"
    drafts = int(speculate) if is_forced else _DRAFTS
    with _lock:
        policies = _policies.setdefault(model, {})
        key = (drafts, is_forced, torch.get_num_threads())
        policy = policies.setdefault(key, SpeculationPolicy(drafts, is_forced))
    if policy.may_try():
        return policy
    quantized.drop_unchosen(model.modules())
    store.drop_some(model, lambda key: isinstance(key, tuple) and key[0] == _KEY)
    return None


def _is_float32(request: Request) -> bool:
    return request.model.dtype == torch.float32 and request.input_ids.device.type == "cpu"


def _rope_types(model: Any) -> set[Any]:
    """The kinds of the model's rotary embeddings: of all layers alike, or by type of layer."""
    text = model.config.get_text_config()
    rope = getattr(text, "rope_parameters", None) or getattr(text, "rope_scaling", None) or {}
    found = [rope, *rope.values()] if isinstance(rope, dict) else []
    return {each.get("rope_type") or each.get("type") for each in found if isinstance(each, dict)}


@dataclass
class SpeculativeState:
    """The state that captured steps read and write, kept for later calls."""

    tree: PathTree
    session: Session
    cache: Any
    products: LinearDispatcher  # in float32
    in_8_bits: LinearDispatcher

    def nbytes(self) -> int:
        return self.tree.nbytes

    def close(self) -> None:
        self.tree.close()


class SpeculativeDecoder(TreeDecoder):
    """Runs the model of a request with one row: see the module."""

    def __init__(
        self, request: Request, replayer: Replayer, may_use_argmax_head: bool, policy: SpeculationPolicy
    ) -> None:
        prompt = request.input_ids.shape[1]
        self._steps = request.generation_config.max_length - prompt
        tree = PathTree(prompt, self._steps, max(AT_ONCE, policy.room), Buffers(request.model))
        super().__init__(request, tree, replayer, may_use_argmax_head)
        self._recorded = None  # what is kept for later calls is kept here
        self._policy, self._path = policy, tree
        self._float = self.session.products
        self._int8 = self._float.beside("int8")
        self._replayers = {kind: replayer.another() for kind in (PLAIN, DRAFT, CHECK)}
        self._count = 0  # tokens beyond the prompt that the host has chosen, the last of which is to be read
        self._ahead: list[tuple[int, Any]] = []  # drafts, and the model's outputs after each
        self._accepted: int | None = None  # drafts of this round, so far
        self._first_position = 0  # of the first token beyond the prompt
        self._may_store = not request.generation_config.return_dict_in_generate
        self._is_stored = False

    def begin_decoding(self, inputs: dict[str, Any], logits: Tensor) -> None:
        super().begin_decoding(inputs, logits)
        if self._may_store and (key := self._key()) is not None:
            self._reuse(key)

    def _key(self) -> Hashable:
        surroundings = store.surroundings(self._device)
        tensors = [tensor for layer in self._path.layers for tensor in layer.stored()]
        layers = tuple((x.shape, x.dtype, x.is_inference()) for x in tensors)
        return surroundings and (_KEY, self._policy.drafts, layers, surroundings, self._is_screened)

    def _reuse(self, key: Hashable) -> None:
        """Take over the captured steps of an earlier call, and the buffers that they read and write."""
        recording = store.take(self.model, key)
        if recording is None:
            return
        kept: SpeculativeState = recording.state
        if not (kept.products.are_current(self._float) and kept.in_8_bits.are_current(self._float)):
            kept.close()
            return
        kept.tree.become(self._path)
        self._path.close()
        self.tree, self._path, self.session, self.cache = kept.tree, kept.tree, kept.session, kept.cache
        self._float, self._int8 = kept.products, kept.in_8_bits
        for kind, replayer in self._replayers.items():
            replayer.resume({key[1]: its for key, its in recording.captured.items() if key[0] == kind})

    def store_graph(self) -> None:
        if not self._may_store or (key := self._key()) is None:
            return
        epoch = self._path.epoch
        captured: dict[Any, Captured] = {
            (kind, epoch): one.captured[epoch] for kind, one in self._replayers.items() if one.has_captured(epoch)
        }
        if captured:
            state = SpeculativeState(self._path, self.session, self.cache, self._float, self._int8)
            self.session.products = self._float
            recording = store.StoredGraph(state, captured)
            store.put(self.model, key, recording, lambda: guards_of_steps(self.model), self._device)
            self._is_stored = True

    def ended(self, search: Search | None) -> None:
        self._path.settle(self._count)

    def close(self) -> None:
        self._end_round()
        assert self.replayer is not None
        self.replayer.failure = self._replayers[PLAIN].failure
        self._policy.note_call(self._count, self._replayers[DRAFT].failure or self._replayers[CHECK].failure)
        for replayer in self._replayers.values():
            replayer.close()
        if self._is_stored:
            arena.settle()
        else:
            super().close()

    @phases.marked(phases.PASS)
    def run(self, forward: Callable[..., Any], inputs: dict[str, Any]) -> Any:
        """The model's outputs for the host's inputs of one step."""
        token = int(inputs["input_ids"])
        if self._ahead and self._ahead[0][0] == token and self._is_at_its_position(inputs):
            assert self._accepted is not None
            self._accepted += 1
            self._count += 1
            self._path.steps = self._count
            return self._ahead.pop(0)[1]
        self._end_round()
        drafts = self._policy.drafts if self._policy.wants_drafts() and self._may_draft(inputs) else 0
        tokens = [token]
        for _ in range(drafts):
            outputs = self._step(DRAFT, forward, inputs, tokens[-1:], self._count + len(tokens) - 1)
            tokens.append(int(outputs.logits[0, -1].argmax()))
        outputs = self._step(CHECK if drafts else PLAIN, forward, inputs, tokens, self._count)
        self._count += 1
        if not drafts:
            return outputs
        self._accepted, self._first_position = 0, int(inputs["position_ids"]) - self._count + 1
        logits = outputs.logits.clone()  # a replayed step writes the next ones to the same memory
        each = [copy.copy(outputs) for _ in tokens]
        for row, one in enumerate(each):
            one.logits = logits[row : row + 1]
        self._ahead = list(zip(tokens[1:], each[1:], strict=True))
        return each[0]

    def _is_at_its_position(self, inputs: dict[str, Any]) -> bool:
        """Whether the host's next token has the position that the draft had."""
        return int(inputs["position_ids"]) == self._first_position + self._count

    def _end_round(self) -> None:
        if self._accepted is not None:
            self._policy.note_round(self._accepted)
        self._ahead, self._accepted = [], None

    def _may_draft(self, inputs: dict[str, Any]) -> bool:
        """Whether there is room for drafts, and rows may have different positions: the host gives each row its own."""
        # The last token is chosen and not read; and positions beyond the last may not exist.
        if self._count + self._policy.drafts >= self._steps - 1:
            return False
        positions = inputs.get("position_ids")
        tensors = [name for name, value in inputs.items() if isinstance(value, Tensor)]
        return (
            isinstance(positions, Tensor)
            and positions.shape == (1, 1)
            and not {*tensors} - {"input_ids", "position_ids", "attention_mask"}
        )

    def _step(
        self, kind: str, forward: Callable[..., Any], inputs: dict[str, Any], tokens: list[int], count: int
    ) -> Any:
        start = time.perf_counter()
        tree, replayer = self._path, self._replayers[kind]
        tree.open(count, len(tokens))
        inputs = {**inputs, "attention_mask": tree.ancestry()[:, None]}
        if kind != PLAIN:
            rows = torch.arange(count - self._count, count - self._count + len(tokens))[:, None]
            inputs |= {"input_ids": torch.tensor(tokens)[:, None], "position_ids": inputs["position_ids"] + rows}
        self.session.products = self._int8 if kind == DRAFT else self._float
        before = replayer.counts.replays
        outputs = self._replayed(forward, inputs, replayer)
        self._policy.note_step(kind, time.perf_counter() - start, replayer.counts.replays > before)
        return outputs


@report.provides("speculated")
def summary() -> dict[str, str]:
    """What became of drafts, by class of the model."""
    with _lock:
        policies = [(type(model).__name__, policy) for model, found in _policies.items() for policy in found.values()]
    found: dict[str, str] = {}
    for name, policy in policies:
        if policy.rounds:
            found[name] = "; ".join(filter(None, (found.get(name), str(policy))))
    return found


@keeper
def release() -> None:
    """Forget what drafts of each model have cost."""
    with _lock:
        _policies.clear()
