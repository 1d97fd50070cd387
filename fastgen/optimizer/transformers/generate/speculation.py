"""Speculative decoding of one sentence in greedy search and sampling: cheap drafts, and float32 decides.

The host's own loop runs. Where it calls the model with one token, a round begins: steps with weights in 8 bits draft
the next tokens, or they are looked up in the text so far. One step in float32, which reads the token and the drafts as
one sequence, gives the model's outputs after each. As long as the host chooses what was drafted, its further calls are
answered from these; another token begins the next round, whose keys and values take the place of those that no token is
left of. So every output that the host sees is the model's own in float32, after the tokens that the host has chosen by
its own rules.
"""

from __future__ import annotations

import copy
import math
import time
import weakref
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers.generation.logits_process import LogitsProcessorList

from fastgen import config, locks, phases, report
from fastgen.cache.path_tree import AT_ONCE, PathTree
from fastgen.decoding.prompt_lookup import PromptLookup
from fastgen.decoding.search import Search
from fastgen.decoding.speculation import CHECK, DRAFT, LOOK_UP, PLAIN, SpeculationPolicy
from fastgen.layers import quantized
from fastgen.layers.linear import LinearDispatcher
from fastgen.memory import arena
from fastgen.memory.buffers import Buffers
from fastgen.memory.release import keeper
from fastgen.optimizer.transformers.criteria import positions
from fastgen.optimizer.transformers.families import READ_SEVERAL
from fastgen.optimizer.transformers.generate.processors import Processing
from fastgen.optimizer.transformers.model.decoder import TreeDecoder
from fastgen.optimizer.transformers.replay.guards import guards_of_steps
from fastgen.optimizer.transformers.replay.step_state import State
from fastgen.optimizer.transformers.request import Request
from fastgen.replay import store
from fastgen.replay.replayer import Captured, Replayer

__phase__ = phases.LOOP

_DRAFTS = 4  # of a round, where the user has not said how many
_MIN_STEPS = 32  # for fewer tokens a call captures steps for too little
_KEY = "speculation"  # of recordings

_lock = locks.reentrant_lock()
_policies: weakref.WeakKeyDictionary[Any, dict[Hashable, SpeculationPolicy]] = weakref.WeakKeyDictionary()


def policy_for(request: Request) -> SpeculationPolicy | None:
    """What decides when this call drafts; None if it never does. To be asked if the call's steps may be replayed."""
    settings = config.current()
    speculate = settings.speculate
    model, steps = request.model, request.generation_config.max_length - request.input_ids.shape[1]
    if speculate == "off" or settings.weights != "float32" or settings.packing == "off":
        return None
    if request.is_beam_search or request.input_ids.shape[0] != 1 or model.config.model_type not in READ_SEVERAL:
        return None
    if not request.facts.is_tested or request.facts.folding or not _is_float32(request):
        return None
    # Where rotations depend on how long the sequence is, rows of one step have different ones.
    if quantized.unavailable(quantized.multiply_rows) is not None or request.facts.rotates_from < math.inf:
        return None
    if speculate == "auto" and (steps < _MIN_STEPS or torch.are_deterministic_algorithms_enabled()):
        return None
    is_forced = speculate != "auto"
    drafts = int(speculate) if is_forced else _DRAFTS
    with _lock:
        policies = _policies.setdefault(model, {})
        key = (drafts, is_forced, torch.get_num_threads())
        policy = policies.setdefault(key, SpeculationPolicy(drafts, is_forced))
    if policy.may_try(steps):
        return policy
    if policy.is_hopeless:
        quantized.drop_unchosen(model.modules())
        store.drop_some(model, lambda key: isinstance(key, tuple) and key[0] == _KEY)
    return None


def _is_float32(request: Request) -> bool:
    devices = {request.model.device.type, request.input_ids.device.type}
    return request.model.dtype == torch.float32 and devices == {"cpu"}


class _Limits(NamedTuple):
    """What a model's tokens and positions can be."""

    vocabulary: int
    positions: float  # how many there are, by its config; perhaps more
    paddings: frozenset[int | None]  # tokens that it may not count


def _limits_of(request: Request) -> _Limits:
    config = request.model.config.get_text_config(decoder=True)
    # Modules know the padding token that the model was made with; its config may have been given another since.
    return _Limits(config.vocab_size, positions(request.model), request.facts.paddings | {config.pad_token_id})


@dataclass(frozen=True)
class Products:
    """The linear layers' products, by the kind of step."""

    float32: LinearDispatcher
    int8: LinearDispatcher

    def are_current(self, now: LinearDispatcher) -> bool:
        """Whether the model's weights are those that were copied."""
        return self.float32.are_current(now) and self.int8.are_current(now)


@dataclass
class SpeculativeRecording(store.StoredGraph):
    """Captured steps of all kinds, by kind and epoch."""

    products: Products


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
        self._products = Products(self.session.products, self.session.products.beside("int8"))
        self._replayers = {kind: replayer.another() for kind in (PLAIN, DRAFT, CHECK)}
        prefix = "decoder_" if self.is_encoder_decoder else ""
        self._tokens_name, self._positions_name = f"{prefix}input_ids", f"{prefix}position_ids"
        self._limits = _limits_of(request)
        self._rules = LogitsProcessorList(request.rules_of_the_largest())
        self._processing = Processing(Buffers(request.model))
        # The prompt and the tokens that the host has chosen, with room for drafts behind.
        self._text = self._with_room(request.input_ids.to(torch.int64))
        self._lookup = PromptLookup(request.input_ids[0].tolist())
        self._count = 0  # tokens beyond the prompt that the host has chosen, the last of which is to be read
        self._ahead: list[tuple[int, Any]] = []  # drafts, and the model's outputs after each
        self._accepted: int | None = None  # drafts of this round, so far
        self._is_looked_up = False  # this round's drafts took no steps
        self._first_position: int | None = None  # of the first token beyond the prompt, if the host numbers tokens
        self._may_store = not request.generation_config.return_dict_in_generate
        self._is_stored = False

    def begin_decoding(self, inputs: dict[str, Any], outputs: Any) -> None:
        super().begin_decoding(inputs, outputs)
        if not self._may_store:
            return
        self._widen_source()
        if (key := self._key()) is None or not self._reuse(key):
            self._own_source()
        self._hand_source()

    def _key(self) -> Hashable:
        surroundings, source = store.surroundings(self._device), self._state().shape_of_tensors()
        return surroundings and source and (_KEY, self._policy.drafts, source, surroundings, self._is_screened)

    def _reuse(self, key: Hashable) -> bool:
        """Take over the captured steps of an earlier call, and the buffers that they read and write, if there are."""
        recording = store.take(self.model, key)
        if recording is None:
            return False
        assert isinstance(recording, SpeculativeRecording)
        kept: State = recording.state
        products = recording.products
        if not products.are_current(self.session.products):
            kept.close()
            return False
        mine = self._state()
        kept.fill(mine)
        mine.close()
        kept.hand_to(self)
        assert isinstance(self.tree, PathTree)
        self._path, self._products = self.tree, products
        for kind, replayer in self._replayers.items():
            replayer.resume({key[1]: its for key, its in recording.captured.items() if key[0] == kind})
        return True

    def store_graph(self) -> None:
        if not self._may_store or (key := self._key()) is None:
            return
        epoch = self._path.epoch
        captured: dict[Any, Captured] = {
            (kind, epoch): one.captured[epoch] for kind, one in self._replayers.items() if one.has_captured(epoch)
        }
        if captured:
            self.session.products = self._products.float32
            recording = SpeculativeRecording(self._state(), captured, self._products)
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
        token = int(inputs[self._tokens_name])
        if len(self._lookup.tokens) + self._policy.drafts >= self._text.shape[1]:
            self._text = self._with_room(self._text)
        self._text[0, len(self._lookup.tokens)] = token
        self._lookup.append(token)
        if self._ahead and self._ahead[0][0] == token and self._is_at_its_position(inputs):
            assert self._accepted is not None
            self._accepted += 1
            self._count += 1
            self._path.steps = self._count
            return self._ahead.pop(0)[1]
        self._end_round()
        drafts = self._drafts(forward, inputs, token)
        tokens = [token, *drafts]
        outputs = self._step(CHECK if drafts else PLAIN, forward, inputs, tokens, self._count)
        if drafts and bool(outputs.logits[0, 0, 0].isnan()):
            # Rows of a step read the slots of all, and a weight of 0 leaves NaN as it is: perhaps a draft's alone.
            self._path.clear_from(self._count)
            drafts, outputs = [], self._step(PLAIN, forward, inputs, [token], self._count)
        self._count += 1
        if not drafts:
            return outputs
        self._accepted = 0
        position = self._position(inputs)
        self._first_position = None if position is None else position - self._count + 1
        logits = outputs.logits.clone()  # a replayed step writes the next ones to the same memory
        each = [copy.copy(outputs) for _ in tokens]
        for row, one in enumerate(each):
            one.logits = logits[:, row : row + 1]
        self._ahead = list(zip(drafts, each[1:], strict=True))
        # Some models do not count padding: tokens after it are not where they would be.
        padding = next((place for place, one in enumerate(tokens) if one in self._limits.paddings), len(tokens))
        del self._ahead[padding:]
        return each[0]

    def _with_room(self, text: Tensor) -> Tensor:
        """The text, int64 `[1, L]`, with room for as much again: the longest that is allowed may be any number."""
        return F.pad(text, (0, text.shape[1] + AT_ONCE + self._policy.drafts))

    def _drafts(self, forward: Callable[..., Any], inputs: dict[str, Any], token: int) -> list[int]:
        """The drafts of a round that begins with `token`; none if no round does."""
        if not self._may_draft(inputs):
            return []
        found = self._lookup.next(self._policy.drafts)
        # A prompt may hold numbers that stand for something else than a token.
        kind = self._policy.choose(bool(found) and all(0 <= one < self._limits.vocabulary for one in found))
        self._is_looked_up = kind == LOOK_UP
        if kind != DRAFT:
            return found if self._is_looked_up else []
        drafts: list[int] = []

        def best(outputs: Any) -> int:
            return self._best(outputs.logits[:, -1], drafts)

        for place in range(self._policy.drafts):
            before = [drafts[-1] if drafts else token]
            drafts.append(self._step(DRAFT, forward, inputs, before, self._count + place, best))
        return drafts

    def _best(self, logits: Tensor, drafts: list[int]) -> int:
        """The best token after these drafts, by the host's rules, as far as they can be asked before their time."""
        if self._rules:
            length = len(self._lookup.tokens)
            if drafts:
                self._text[0, length + len(drafts) - 1] = drafts[-1]
            logits = self._processing.apply(self._rules, self._text[:, : length + len(drafts)], logits, ours=True)
        return int(logits[0].argmax())

    def _position(self, inputs: dict[str, Any]) -> int | None:
        """The position that the host gives the next token; None if the model counts by itself."""
        positions = inputs.get(self._positions_name)
        return int(positions) if isinstance(positions, Tensor) else None

    def _is_at_its_position(self, inputs: dict[str, Any]) -> bool:
        """Whether the host's next token has the position that the draft had."""
        first = self._first_position
        return self._position(inputs) == (None if first is None else first + self._count)

    def _end_round(self) -> None:
        if self._accepted is not None:
            self._policy.note_round(self._accepted, self._is_looked_up)
        self._ahead, self._accepted = [], None

    def _may_draft(self, inputs: dict[str, Any]) -> bool:
        """Whether there is room for drafts, and the model will know where each is."""
        position, drafts = self._position(inputs), self._policy.drafts
        last = (self._path.prompt_length + self._count if position is None else position) + drafts
        # The last token is chosen and not read; and positions beyond the last may not exist.
        if self._count + drafts >= self._steps - 1 or last >= self._limits.positions:
            return False
        tensors = {name: value for name, value in inputs.items() if isinstance(value, Tensor)}
        positions = tensors.pop(self._positions_name, None)
        is_told = self.is_encoder_decoder if positions is None else positions.shape == (1, 1)
        return is_told and not {*tensors} - {self._tokens_name, "attention_mask", "decoder_attention_mask"}

    def _step(
        self,
        kind: str,
        forward: Callable[..., Any],
        inputs: dict[str, Any],
        tokens: list[int],
        count: int,
        finish: Callable[[Any], Any] = lambda outputs: outputs,
    ) -> Any:
        """What `finish` makes of the model's outputs after these tokens, which follow `count` beyond the prompt."""
        start = time.perf_counter()
        replayer = self._replayers[kind]
        self._path.open(count, len(tokens))
        inputs = self.step_inputs(inputs)
        if kind != PLAIN:
            inputs[self._tokens_name] = torch.tensor([tokens], device=self._device)
            if (first := self._position(inputs)) is not None:
                first += count - self._count
                inputs[self._positions_name] = torch.arange(first, first + len(tokens), device=self._device)[None]
            if "logits_to_keep" in inputs:
                inputs["logits_to_keep"] = len(tokens)
        self.session.products = self._products.int8 if kind == DRAFT else self._products.float32
        before = replayer.counts.replays
        found = finish(self._replayed(forward, inputs, replayer))
        self._policy.note_step(kind, time.perf_counter() - start, replayer.counts.replays > before)
        return found


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
