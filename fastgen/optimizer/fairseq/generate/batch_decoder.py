"""Runs the model's steps for the sentences of several searches at once."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fastgen import report
from fastgen.cache.batch_tree import BatchTree
from fastgen.cache.row_pool import RowPool
from fastgen.cache.tree import BeamTree, additive_mask
from fastgen.layers.linear import LinearDispatcher
from fastgen.memory import arena
from fastgen.memory.buffers import Buffers
from fastgen.optimizer.fairseq.cache.slim import fixed_choice
from fastgen.optimizer.fairseq.foreign_code import layers_of
from fastgen.optimizer.fairseq.generate.joining import Part
from fastgen.optimizer.fairseq.generate.shortlist import is_shortened, unnormalised
from fastgen.optimizer.fairseq.model.decoder import over_the_tree
from fastgen.optimizer.fairseq.model.session import Session, Source
from fastgen.optimizer.fairseq.model.views import replaced, standing_in
from fastgen.optimizer.fairseq.request import Request


class BatchDecoder:
    """Decodes the sentences of several parts over one tree, each part at another position."""

    def __init__(self, request: Request, rows: int) -> None:
        """`rows`: number of sentences to allocate memory for at first."""
        assert request.source is not None
        inner, device = request.generator.model, request.source.device
        self.parts: list[Part] = []  # in the order of their rows
        self.steps = 0
        self._name, self._beams, self._device = request.model_name, request.beams, device
        buffers = Buffers(inner.single_model)
        self._tree = BatchTree(rows, request.beams, device, buffers)
        self._session = Session(self._tree, request.generator.pad, device)
        self._products = LinearDispatcher.configured()
        decoder = over_the_tree(inner.single_model.decoder, self._session, fixed_choice(device), self._products)
        self._positions = decoder.embed_positions
        if self._positions is not None:
            decoder = replaced(decoder, embed_positions=self._at_each_position)
        model = standing_in(inner.single_model, decoder=decoder)
        if is_shortened(request.generator):
            model = unnormalised(model)
        self._model = replaced(inner, models=[model], single_model=model)
        self._arena = arena.of(inner.single_model)
        self._self_attention = [layer.self_attn for layer in layers_of(decoder)]
        self._cross_attention = [layer.encoder_attn for layer in layers_of(decoder) if layer.encoder_attn is not None]
        self._seats = [(RowPool(rows, buffers), RowPool(rows, buffers)) for _ in self._cross_attention]
        self._capacity = 0  # source positions for which memory is allocated
        self._hidden = torch.empty(0, 0, dtype=torch.bool, device=device)  # [B, N], the sources' padding

    @torch.no_grad()
    def regroup(self, entering: list[Part]) -> None:
        """Reorder beams as the parts' searches ask, drop sentences that have left, and take in new parts' sentences."""
        beams, first = self._beams, 0
        rows = torch.arange(self._tree.batch * beams, device=self._device)
        stay = [rows[:0]]
        for part in self.parts:
            before = part.sentences
            if not part.ended:
                parents = part.step.parents
                assert parents is not None
                staying = first + parents[::beams] // beams
                rows.view(-1, beams)[staying] = parents.view(-1, beams) + first * beams
                stay.append(staying)
                part.sentences = len(staying)
            first += before
        if self.parts:
            self._tree.reorder(rows)
        for part in entering:
            part.width = len(part.step.encoder_out["encoder_out"][0])
        self.parts = [*(part for part in self.parts if not part.ended), *entering]
        staying = torch.cat(stay)
        if entering or len(staying) < first:
            self._products.look_again()  # the code that takes results, or brings samples, may have edited weights
            self._session.measure()
            self._tree.regroup(staying, [self._new_tree(part) for part in entering])
            for attention, layer in zip(self._self_attention, self._tree.layers, strict=True):
                attention.layer = layer
            if self._cross_attention:
                self._move_sources(staying, entering)

    def _new_tree(self, part: Part) -> BeamTree:
        """A tree for the part's sentences, which have no token yet."""
        tree = BeamTree(part.sentences, self._beams, 1)
        for attention in self._self_attention:
            attention.begin(tree, part.step.encoder_out["encoder_out"][0])
        tree.begin_decoding(device=self._device)
        return tree

    def _move_sources(self, stay: Tensor, entering: list[Part]) -> None:
        length = max(part.width for part in self.parts)
        hidden = [self._hidden.index_select(0, stay)] if len(stay) else []
        states = []
        for part in entering:
            outputs = part.step.encoder_out
            states.append(outputs["encoder_out"][0])  # [N, B, C]
            masks = [mask for mask in outputs["encoder_padding_mask"] if mask is not None]
            hidden.append(masks[0].bool() if masks else self._hidden.new_zeros(part.sentences, len(states[-1])))
        self._hidden = torch.cat([_with_columns(mask, length) for mask in hidden])
        bias, is_padded = None, bool(self._hidden.any())
        self._capacity = max(self._capacity, length)
        latent: tuple[Tensor, ...] | None = None  # of slim caches, shared by all layers
        for attention, seats in zip(self._cross_attention, self._seats, strict=True):
            reads_source = attention.slim is not None and attention.slim.kind == "x"
            stored = latent if reads_source else None
            if stored is None:
                old, new = attention.source, [attention.project(source, None) for source in states]
                stored = tuple(
                    each.regroup(old and old.stored[i], stay, None, [x.stored[i] for x in new], length, self._capacity)
                    for i, each in enumerate(seats[: attention.stores])
                )
                stored = tuple(held[:, :, :length] for held in stored)
            if reads_source:
                latent = stored
                attention.shared.release_shared()
            if bias is None and is_padded:
                bias = additive_mask(~self._hidden, stored[0].dtype)[:, None, None]
            attention.source = Source(stored, bias, attention.slim)
        self._session.sources = [attention.source for attention in self._cross_attention]

    @torch.no_grad()
    def step(self) -> None:
        """Do one step of the model for all parts, and one step of each part's search."""
        tokens = torch.cat([part.step.tokens[:, -1:] for part in self.parts])
        self._session.advance(tokens[:, 0])
        sources = [{"encoder_out": [tokens], "encoder_padding_mask": []}]  # the layers have the sources' keys already
        with self._arena:
            scores, weights = self._model.forward_decoder(tokens, sources, [{}], self.parts[0].step.temperature)
        self.steps += 1
        first = 0
        for part in self.parts:
            rows = slice(first, first + part.sentences * self._beams)
            part.proceed((scores[rows], None if weights is None else weights[rows, : part.width]))
            first = rows.stop

    def _at_each_position(self, tokens: Tensor, incremental_state: Any = None) -> Tensor:
        """The position embeddings of all rows, `[rows, 1, C]`, each at the position of its part."""
        each = [self._positions(part.step.tokens, incremental_state=incremental_state) for part in self.parts]
        return torch.cat(
            [one.expand(len(part.step.tokens), -1, -1) for one, part in zip(each, self.parts, strict=True)]
        )

    def record(self, sentences: int, seconds: float) -> None:
        self._session.measure()
        how = self.steps, seconds, self._session.cache_bytes, self._session.cache
        report.record(report.Call("fairseq", self._name, "compat", None, sentences, self._beams, *how))

    def close(self) -> None:
        """Free all keys and values."""
        self._tree.close()
        arena.settle()
        for seats in self._seats:
            for one in seats:
                one.clear()


def _with_columns(mask: Tensor, length: int) -> Tensor:
    """`mask` cut off, or filled up with True, to `length` columns."""
    return mask[:, :length] if mask.shape[1] >= length else F.pad(mask, (0, length - mask.shape[1]), value=True)
