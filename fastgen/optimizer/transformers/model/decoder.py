"""Runs the model: reads the prompt at one row per sentence, then decodes step by step over the tree."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fastgen import phases
from fastgen.cache.slim.latent import kind_of
from fastgen.cache.tree import BeamTree
from fastgen.cache.wide_tree import MOST_STATIC_STEPS, WideTree
from fastgen.decoding.search import Search
from fastgen.memory import arena
from fastgen.memory.buffers import Buffers
from fastgen.optimizer.transformers import versions
from fastgen.optimizer.transformers.cache import recurrent
from fastgen.optimizer.transformers.cache.gathered import stock_cache
from fastgen.optimizer.transformers.cache.slim import LayerCaches
from fastgen.optimizer.transformers.cache.tree_cache import TreeCache, TreeEncoderDecoderCache, tree_cache
from fastgen.optimizer.transformers.expansion import copied
from fastgen.optimizer.transformers.model import wide
from fastgen.optimizer.transformers.model.base import Decoder, selected
from fastgen.optimizer.transformers.model.session import Session
from fastgen.optimizer.transformers.replay.guards import guards_of_steps
from fastgen.optimizer.transformers.replay.step_state import State
from fastgen.optimizer.transformers.request import Request
from fastgen.replay import store
from fastgen.replay.recorded_call import RecordedCall
from fastgen.replay.replayer import Replayer


class TreeDecoder(Decoder):
    """Runs a request's model over a beam tree.

    The model gets the usual inputs of beam search, tokens `[B*M, 1]` and the host's other inputs for them;
    only masks, encoder outputs and the cache have one row per sentence.
    """

    def __init__(
        self,
        request: Request,
        tree: BeamTree | None = None,
        replayer: Replayer | None = None,
        may_use_argmax_head: bool = False,
        layer_caches: Mapping[torch.nn.Module, LayerCaches] | None = None,
    ) -> None:
        """Make a decoder, to be closed by `close` however the call ends.

        `replayer`: replays the steps, if the tree is this call's alone; `may_use_argmax_head`: only the largest logit
        is used; `layer_caches`: the attention modules that have slim caches.
        """
        super().__init__(request, request.batch)
        max_steps = max(request.generation_config.max_length - request.input_ids.shape[1], 1)
        if tree is None:
            is_static = replayer is not None
            is_wide = not layer_caches and not (is_static and max_steps > MOST_STATIC_STEPS) and wide.is_wide(request)
            kind = WideTree if is_wide else BeamTree
            tree = kind(request.batch, self.beams, max_steps, Buffers(self.model), is_static)
        self.tree, self.replayer, self._device = tree, replayer, request.input_ids.device
        self.session, self._arena = Session(self.tree, request.facts, layer_caches), arena.of(self.model)
        self._calls_back = request.calls_back
        if self._calls_back or request.facts.is_interrupted:
            self.session.products.expect_edits()
        self.cache = tree_cache(self.session, request.model_kwargs[versions.CACHE])
        if replayer is not None:
            replayer.save = functools.partial(recurrent.saved, getattr(self.cache, "recurrent", ()))
        self.encoder_outputs: Any = None
        self.source_mask: Any = None
        self.peak_bytes = 0
        self.prepared_mask: tuple[Tensor, Tensor] | None = None
        # Later calls must not write to memory of a returned result; and untested models may not ignore more padding.
        is_free = not request.generation_config.return_dict_in_generate
        self._recorded: RecordedCall | None = None  # if it may share captured steps with other calls
        if replayer is not None and is_free and request.facts.is_tested:
            self._recorded = RecordedCall(self.model, replayer, self._device)
        self._whole: State | None = None  # the state before sentences left, if it is to be kept
        self._prompt_tokens = request.input_ids.shape[1]
        self._may_screen = may_use_argmax_head
        self._is_screened = False
        self._takes_plain_mask = request.facts.takes_plain_mask

    @property
    def buffers(self) -> Buffers:
        return self.tree.buffers

    @property
    def num_steps(self) -> int:
        return self.tree.steps

    @contextlib.contextmanager
    def reading(self, inputs: dict[str, Any]) -> Iterator[None]:
        if self._may_screen:
            self.session.products.track_output(self.model.get_output_embeddings())
        self.encoder_outputs = inputs.get("encoder_outputs")
        self._hand_source()
        self.session.slim.prompt_tokens = self._prompt_tokens
        with self.session.reading(self.model):
            yield

    def _hand_source(self) -> None:
        """Give the encoder output to slim caches that attend to it: there is no other copy."""
        if self.session.slim.is_needed and isinstance(self.encoder_outputs, dict):
            self.session.slim.source = self.encoder_outputs["last_hidden_state"]

    @phases.marked(phases.CACHE)
    def begin_decoding(self, inputs: dict[str, Any], outputs: Any) -> None:
        if self.prefixes is not None:
            self.prefixes.keep(self.tree)
        # A bias or a scale after the output layer could make another token the best.
        self._is_screened = self._may_screen and self.session.products.screen(outputs.logits)
        mask = inputs.get("decoder_attention_mask" if self.is_encoder_decoder else "attention_mask")
        self.source_mask = inputs.get("attention_mask") if self.is_encoder_decoder else None
        self.tree.begin_decoding(mask)
        if isinstance(self.cache, TreeCache):
            self.cache.begin_decoding()
        self.has_begun = True
        if self._recorded is not None:
            self._take_up()

    def _take_up(self) -> None:
        """Take over the captured steps of an earlier call, if there are some for these shapes."""
        assert self._recorded is not None
        self._widen_source()
        reused = self._recorded.reuse(self._state(), (self._is_screened, self._calls_back), self._own_source)
        if not self._recorded.may_share:
            return
        if reused is not None:
            reused.hand_to(self)
        self._hand_source()
        self._recorded.retain_buffers(self.tree)

    def _own_source(self) -> None:
        """Copy the encoder output and the mask, as later calls will write to this call's tensors."""
        self.encoder_outputs, self.source_mask = copied(self.encoder_outputs), copied(self.source_mask)

    def result_cache(self) -> Any:
        return stock_cache(self.cache, self.tree)

    def store_graph(self) -> None:
        if self._recorded is not None:
            state = self._whole or self._state()
            how = self._is_screened, self._calls_back
            self._recorded.store(self.tree, state, how, lambda: guards_of_steps(self.model))

    def _state(self) -> State:
        source = self.encoder_outputs, self.source_mask, self.prepared_mask
        return State(self.tree, self.session, self.cache, *source, self.search)

    @phases.marked(phases.CACHE)
    def _widen_source(self) -> None:
        """Pad the encoder output on the right, so that more calls can share captured steps."""
        outputs = self.encoder_outputs
        if not self._is_finished_here() or not isinstance(outputs, dict) or [*outputs] != ["last_hidden_state"]:
            return
        states: Tensor = outputs["last_hidden_state"]
        layers = self.cache.cross_attention_cache.layers
        length = self.source_mask.shape[1]
        if any(x.shape[-2] != length for x in (states, *self.cache.stored())):
            return
        if not (more := -length % store.SOURCE_STEP):
            return
        self.encoder_outputs = type(outputs)(last_hidden_state=F.pad(states, (0, 0, 0, more)))
        self.source_mask = F.pad(self.source_mask, (0, more))
        for layer in layers:
            layer.tensors = [F.pad(tensor, (0, 0, 0, more)) for tensor in layer.tensors]
        self._hand_source()

    def step_inputs(self, inputs: dict[str, Any]) -> dict[str, Any]:
        """Change the host's inputs, one row per beam, into inputs for the step that the tree has opened."""
        mask = wide.mask_for_model(self.tree)[:, None]  # bool [B, 1, M, used]
        if not self.is_encoder_decoder:
            return {**inputs, "attention_mask": mask}
        inputs = {**inputs, "decoder_attention_mask": mask, "encoder_outputs": self.encoder_outputs}
        if inputs.get("attention_mask") is not None:
            inputs["attention_mask"] = self._padding()
        return inputs

    def _is_finished_here(self) -> bool:
        """Whether we give the model a finished source mask in place of the user's, `[B, N]`."""
        is_plain = self.source_mask is not None and self.source_mask.ndim == 2
        return is_plain and versions.TAKES_SOURCE_MASK and not self._takes_plain_mask

    def _padding(self) -> Tensor:
        """The source mask as the model takes it; the same object until sentences leave or enter."""
        mask: Tensor = self.source_mask
        if not self._is_finished_here():
            return mask
        if self.prepared_mask is None or self.prepared_mask[0] is not mask:
            self.prepared_mask = (mask, mask[:, None, None].bool())  # [B, 1, 1, N]: used without a host sync
            self.session.set_source_mask(self.prepared_mask[1])
        return self.prepared_mask[1]

    @phases.marked(phases.PASS)
    def run(self, forward: Callable[..., Any], inputs: dict[str, Any]) -> Any:
        self.tree.advance()
        return self._replayed(forward, self.step_inputs(inputs), self.replayer)

    def _replayed(self, forward: Callable[..., Any], inputs: dict[str, Any], replayer: Replayer | None) -> Any:
        """Run the step that the tree has opened, replayed if it can be."""

        def step(inputs: dict[str, Any]) -> Any:
            with self.session.active():
                return forward(**inputs)

        # Autograd has to see the model, and a replay would not cast weights again for autocast.
        may_replay = not (torch.is_grad_enabled() or torch.is_autocast_enabled(self._device.type))
        with self._arena:
            if replayer is None or not may_replay:
                return step(inputs)
            return replayer(step, inputs, self.tree.epoch)

    @phases.marked(phases.CACHE)
    def reorder(self, parents: Tensor) -> None:
        self.cache.reorder_cache(parents)

    def leaving(self, search: Search) -> Tensor | None:
        if not self.tree.should_evict(search.num_finished()):
            return None
        leaving = search.finished_mask()
        if search.counts_late and not bool(leaving.any()):
            return None  # by now all have finished
        return leaving

    @phases.marked(phases.CACHE)
    def select(self, sentences: Tensor) -> None:
        self._measure()
        if self.replayer is not None:
            self._shrink(self.replayer)
        sentences = sentences.to(self.tree.positions().device)
        self.tree.select(sentences)
        self.cache.select(sentences)
        batch = self.encoder_outputs[0].shape[0] if self.encoder_outputs is not None else 0
        self.encoder_outputs = selected(self.encoder_outputs, sentences, batch)
        self.source_mask = selected(self.source_mask, sentences, batch)
        self._hand_source()

    def _shrink(self, replayer: Replayer) -> None:
        if self._whole is None and self._recorded is not None and self.tree.retained.is_on:
            whole = self._state()
            if self._recorded.has_room_for_two(self.tree, whole, self.search and self.search[1]):
                whole.retain_buffers()
                self._whole = whole
        replayer.shrink()

    def cache_bytes(self) -> int:
        self._measure()
        return self.peak_bytes

    def cache_kind(self) -> str:
        is_split = isinstance(self.cache, TreeEncoderDecoderCache)
        across = self.cache.cross_attention_cache.layers if is_split else ()
        return kind_of((layer.slim for layer in self.tree.layers), (layer.slim for layer in across))

    def close(self) -> None:
        if self.replayer is not None:
            self.replayer.close()
        if self._recorded is None or not self._recorded.is_stored:
            self._state().close()
        arena.settle()

    def _measure(self) -> None:
        size = self.tree.nbytes
        if isinstance(self.cache, TreeEncoderDecoderCache):
            size += self.cache.cross_bytes
        else:
            size += recurrent.nbytes(self.cache.recurrent)
        self.peak_bytes = max(self.peak_bytes, size)
