"""Keeps what was computed for sequences of tokens, so that a later sequence with the same beginning need not.

A radix tree (Morrison 1968, https://doi.org/10.1145/321479.321481): each edge has some tokens, and the tensors of
these. What two sequences have in common is stored once. The bytes are bounded: the sequences that were used least
recently go first.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field

from torch import Tensor

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
        tensors = sum(tensor.nbytes + _BYTES_PER_TENSOR for tensor in self.tensors)
        return tensors + len(self.tokens) * _BYTES_PER_TOKEN + _BYTES_PER_NODE


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
        self._lock = threading.RLock()  # reentrant: a model may die, and be dropped, anywhere
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

    def insert(self, key: Hashable, tokens: Sequence[Hashable], make: Callable[[int], Tensors]) -> None:
        """Store a sequence.

        Args:
            make: is called with the number of tokens at the beginning that are stored already, and returns the
                tensors of the others, which nobody else may write to.
        """
        with self._lock:
            path, length = self._walk(key, tokens)
            if length < len(tokens):
                known = sum(len(node.tokens) for node in path)
                if known > length:  # the sequences part in the middle of an edge
                    path[-1] = self._split(path[-1], len(path[-1].tokens) - (known - length))
                parent = path[-1] if path else self._roots.setdefault(key, _Node((), (), None))
                node = _Node(tuple(tokens[length:]), make(length), parent)
                parent.children[node.tokens[0]] = node
                self._nodes[node] = None
                self._nbytes += node.nbytes
                path.append(node)
            self._touch(path)
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
        self._nbytes -= node.nbytes
        # Copies, as a view would keep the memory of the whole.
        first = tuple(tensor[..., :at, :].clone() for tensor in node.tensors)
        upper = _Node(node.tokens[:at], first, node.parent, {node.tokens[at]: node})
        node.parent.children[node.tokens[0]] = upper
        node.tensors = tuple(tensor[..., at:, :].clone() for tensor in node.tensors)
        node.tokens, node.parent = node.tokens[at:], upper
        self._nodes[upper] = None
        self._nbytes += node.nbytes + upper.nbytes
        return upper

    def _touch(self, path: list[_Node]) -> None:
        for node in reversed(path):
            self._nodes.move_to_end(node)

    def _evict(self) -> None:
        while self._nbytes > self._limit:
            node = next(iter(self._nodes))
            assert node.parent is not None and not node.children
            del node.parent.children[node.tokens[0]]
            self._forget(node)
        for key in [key for key, root in self._roots.items() if not root.children]:
            del self._roots[key]

    def _forget(self, node: _Node) -> None:
        del self._nodes[node]
        self._nbytes -= node.nbytes


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
