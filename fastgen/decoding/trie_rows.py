"""The node of a trie at which each row of a batch is, and the tokens that may follow there."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from fastgen import phases
from fastgen.decoding.trie import Trie

__phase__ = phases.CHOICE

_AT_ONCE = 2**22  # scores that are masked together: the numbers of their tokens take a multiple of their memory


@dataclass(frozen=True)
class Following:
    """The tokens that may follow some rows: `E` of them, sorted by row and, within a row, by token."""

    rows: Tensor  # int64 [E]
    tokens: Tensor  # int64 [E]
    counts: Tensor  # int64: how many there are of each row that was asked for


@dataclass(frozen=True)
class Children(Following):
    """Those that follow in a trie."""

    nodes: Tensor  # int64 [E]: where each token leads


class TrieRows:
    """The nodes of all rows, moved on token by token."""

    def __init__(self, trie: Trie, input_ids: Tensor, beams: int) -> None:
        """`input_ids`: int64 `[B*M, length]`, the rows so far; `beams`: M, the rows of each sentence."""
        self._tokens, self._first_child, self._end = trie.arrays_on(input_ids.device)
        self._prompt_length = trie.prompt_length
        self._roots = trie.roots_on(input_ids.device, input_ids.shape[0] // beams).repeat_interleave(beams)
        self.nodes = self._roots  # int64 [B*M]
        self.length = min(self._prompt_length, input_ids.shape[1])
        for tokens in input_ids[:, self.length :].unbind(1):
            self.advance(None, tokens)
        self.length = input_ids.shape[1]

    def children(self, rows: Tensor | None = None) -> Children:
        """What may follow these rows, int64 `[n]` in ascending order, or all."""
        nodes = self.nodes if rows is None else self.nodes.index_select(0, rows)
        first = self._first_child.index_select(0, nodes).long()
        counts = self._first_child.index_select(0, nodes + 1).long() - first
        first.masked_fill_(counts == 0, self._end)  # after the end, the end alone
        counts.clamp_(min=1)
        before = counts.cumsum(0) - counts
        place = torch.repeat_interleave(counts)  # [E]
        found = torch.arange(len(place), device=place.device) + (first - before).index_select(0, place)
        return Children(
            place if rows is None else rows.index_select(0, place),
            self._tokens.index_select(0, found).long(),
            counts,
            found,
        )

    def mask(self, scores: Tensor) -> Tensor:
        """What is to be added to scores `[B*M, V]`: 0 where a token may follow, else -inf."""
        mask = torch.full_like(scores, -float("inf"))
        size = max(1, _AT_ONCE // scores.shape[1])
        for some in torch.arange(len(scores), device=scores.device).split(size):
            children = self.children(some)
            mask[children.rows, children.tokens] = 0
        return mask

    def advance(self, parents: Tensor | None, tokens: Tensor, children: Following | None = None) -> None:
        """Each row continues another, int64 `[B*M]` (None: itself), with a token, int64 `[B*M]`.

        `children`: what may follow the parents, if it is known.
        """
        self.length += 1
        if parents is not None:
            self._roots = self._roots.index_select(0, parents)
        if self.length <= self._prompt_length:
            self.nodes = self._roots
            return
        if not isinstance(children, Children) or parents is None:
            self._descend(self.nodes if parents is None else self.nodes.index_select(0, parents), tokens)
            return
        # Rows and tokens as one number: those of the children are sorted.
        width = int(torch.maximum(tokens.max(), children.tokens.max())) + 1
        keys, wanted = children.rows * width + children.tokens, parents * width + tokens
        place = torch.searchsorted(keys, wanted).clamp_(max=len(keys) - 1)
        is_child = keys.index_select(0, place) == wanted
        self.nodes = children.nodes.index_select(0, place).masked_fill_(~is_child, self._end)

    def _descend(self, nodes: Tensor, tokens: Tensor) -> None:
        """Go from these nodes to their children by these tokens: a binary search of all rows at once."""
        first = self._first_child.index_select(0, nodes).long()
        last = self._first_child.index_select(0, nodes + 1).long()
        stop = last
        for _ in range(int((last - first).max()).bit_length()):
            middle = (first + last) // 2  # below `last` while there are any left
            found = self._tokens.index_select(0, middle.clamp(max=len(self._tokens) - 1))
            is_open = first < last
            is_below = (found < tokens) & is_open
            first, last = torch.where(is_below, middle + 1, first), torch.where(is_open & ~is_below, middle, last)
        found = self._tokens.index_select(0, first.clamp(max=len(self._tokens) - 1))
        self.nodes = torch.where((first < stop) & (found == tokens), first, self._end)

    def select(self, rows: Tensor) -> None:
        """Drop all rows but these, int64 `[rows']`."""
        self.nodes, self._roots = self.nodes.index_select(0, rows), self._roots.index_select(0, rows)
