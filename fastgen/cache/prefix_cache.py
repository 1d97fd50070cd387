"""Keeps what was computed for sequences of tokens, so that a later sequence with the same beginning need not.

A radix tree (Morrison 1968, https://doi.org/10.1145/321479.321481): each edge has some tokens, and the tensors of
these. What two sequences have in common is stored once. The bytes are bounded: the sequences that were used least
recently go first.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Hashable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from fastgen import locks
from fastgen.memory import arena

Tensors = tuple[Tensor, ...]  # with one slot for each token along the last dimension but one
# What a node takes besides the numbers in the tensors, as measured: for small models it is the larger part.
_BYTES_PER_TOKEN, _BYTES_PER_TENSOR, _BYTES_PER_NODE = 40, 448, 512


@dataclass(eq=False)
class _Node:
    tokens: tuple[Hashable, ...]  # on the edge from the parent to here
    tensors: Tensors
    parent: _Node | None
    children: dict[Hashable, _Node] = field(default_factory=dict)  # by the first token

    @property
    def nbytes(self) -> int:
        return _nbytes(self.tokens, self.tensors)


@dataclass(frozen=True)
class Found:
    """The longest beginning of a sequence that is stored: `length` tokens, whose tensors are in `parts`."""

    length: int
    parts: tuple[Tensors, ...]  # one after the other; the last may have more slots than are wanted


class PrefixCache:
    """Tensors of sequences by what they were computed with (`key`: a model, say) and by tokens; for any threads."""

    def __init__(self, limit: int = 0) -> None:
        """`limit`: the most bytes to keep."""
        self._limit = limit
        self._lock = locks.reentrant_lock()  # reentrant: a model may die, and be dropped, anywhere
        self._roots: dict[Hashable, _Node] = {}
        # Least recently used first. A node comes before its parent, so that the first one has no children.
        self._nodes: OrderedDict[_Node, None] = OrderedDict()
        self._nbytes = 0

    @property
    def nbytes(self) -> int:
        """The bytes that are kept now, the tokens included."""
        return self._nbytes

    @property
    def limit(self) -> int:
        return self._limit

    @limit.setter
    def limit(self, limit: int) -> None:
        with self._lock:
            self._limit = limit
            self._evict()

    def __len__(self) -> int:
        """The number of stored pieces."""
        return len(self._nodes)

    def find(self, key: Hashable, tokens: Sequence[Hashable]) -> Found:
        """The longest beginning of `tokens` that is stored under `key`; it counts as used now."""
        with self._lock:
            path, length = self._walk(key, tokens)
            self._touch(path)
            return Found(length, tuple(node.tensors for node in path))

    def insert(self, key: Hashable, tokens: Sequence[Hashable], tensors: Tensors) -> None:
        """Store a sequence, unless it takes more than the limit by itself.

        If memory runs out meanwhile, that error is raised and nothing is stored.

        Args:
            tensors: what was computed for all of `tokens`; of those that are not stored yet, copies are kept.
        """
        with self._lock:
            path, length = self._walk(key, tokens)
            self._touch(path)
            if length == len(tokens) or _nbytes(tokens, tensors) > self._limit:
                return
            rest = tuple(tensor[..., length:, :] for tensor in tensors)
            self._evict(_nbytes(tokens[length:], rest), path)  # before memory is taken: the call needs it, too
            known = sum(len(node.tokens) for node in path)
            copies = _copied(rest)  # all copies are made before anything is changed: memory may run out
            if known > length:  # the sequences part in the middle of an edge
                path[-1] = self._split(path[-1], len(path[-1].tokens) - (known - length))
            parent = path[-1] if path else self._roots.setdefault(key, _Node((), (), None))
            node = _Node(tuple(tokens[length:]), copies, parent)
            parent.children[node.tokens[0]] = node
            self._nodes[node] = None
            self._nbytes += node.nbytes
            self._touch([*path, node])
            self._evict()

    def drop(self, key: Hashable) -> None:
        """Forget all that is stored under `key`."""
        with self._lock:
            root = self._roots.pop(key, None)
            nodes = [] if root is None else list(root.children.values())
            while nodes:
                node = nodes.pop()
                nodes += node.children.values()
                self._forget(node)

    def clear(self) -> None:
        """Forget everything."""
        with self._lock:
            self._roots.clear()
            self._nodes.clear()
            self._nbytes = 0

    def _walk(self, key: Hashable, tokens: Sequence[Hashable]) -> tuple[list[_Node], int]:
        """The nodes on the way along `tokens`, and how many tokens that are; it may end within the last edge."""
        node, path, length = self._roots.get(key), list[_Node](), 0
        while node is not None and length < len(tokens):
            node = node.children.get(tokens[length])
            if node is None:
                break
            path.append(node)
            common = _common(node.tokens, tokens[length : length + len(node.tokens)])
            length += common
            if common < len(node.tokens):
                break
        return path, length

    def _split(self, node: _Node, at: int) -> _Node:
        """Divide a node's edge; returns the new node that ends after `at` of the tokens."""
        assert node.parent is not None
        # Copies, as a view would keep the memory of the whole.
        first, second = (_copied(tuple(x[..., part, :] for x in node.tensors)) for part in (slice(at), slice(at, None)))
        self._nbytes -= node.nbytes
        upper = _Node(node.tokens[:at], first, node.parent, {node.tokens[at]: node})
        node.parent.children[node.tokens[0]] = upper
        node.tokens, node.tensors, node.parent = node.tokens[at:], second, upper
        self._nodes[upper] = None
        self._nbytes += node.nbytes + upper.nbytes
        return upper

    def _touch(self, path: list[_Node]) -> None:
        for node in reversed(path):
            self._nodes.move_to_end(node)

    def _evict(self, coming: int = 0, stay: Collection[_Node] = ()) -> None:
        """Forget what was used least recently, until `coming` bytes more would fit or one is met that is to stay."""
        while self._nbytes + coming > self._limit and self._nodes:
            node = next(iter(self._nodes))
            if node in stay:
                break
            assert node.parent is not None and not node.children
            del node.parent.children[node.tokens[0]]
            self._forget(node)
        for key in [key for key, root in self._roots.items() if not root.children]:
            del self._roots[key]

    def _forget(self, node: _Node) -> None:
        del self._nodes[node]
        self._nbytes -= node.nbytes


def _nbytes(tokens: Sequence[Hashable], tensors: Tensors) -> int:
    """The bytes that a node of these tokens takes."""
    # A text of which no part serves is one token here, of many ids.
    count = sum(len(token) if isinstance(token, tuple) else 1 for token in tokens)
    numbers = sum(tensor.nbytes + _BYTES_PER_TENSOR for tensor in tensors)
    return numbers + count * _BYTES_PER_TOKEN + _BYTES_PER_NODE


def _copied(tensors: Tensors) -> Tensors:
    with arena.outside():  # they stay
        return tuple(tensor.detach().clone(memory_format=torch.contiguous_format) for tensor in tensors)


def _common(tokens: tuple[Hashable, ...], others: Sequence[Hashable]) -> int:
    """How many tokens two sequences have in common at the beginning."""
    others = tuple(others)
    if tokens == others:
        return len(tokens)
    low, high = 0, min(len(tokens), len(others))
    while low < high:  # the first `low` are the same, the first `high + 1` are not
        middle = (low + high + 1) // 2
        if tokens[low:middle] == others[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low
