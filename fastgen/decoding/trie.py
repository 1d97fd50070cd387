"""A trie of token sequences in two arrays: which tokens may follow a prefix, for beam search over a closed set."""

from __future__ import annotations

import bisect
import io
import os
import zipfile
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fastgen.decoding import trie_building

_FORMAT = 1  # of saved files
# What numpy and zipfile raise for bytes that are no archive of arrays, or a damaged one.
_UNREADABLE: tuple[type[Exception], ...] = (
    ValueError,
    KeyError,
    TypeError,
    AttributeError,
    EOFError,
    OSError,
    OverflowError,
    RuntimeError,  # a damaged entry may pass for an encrypted one
    zipfile.BadZipFile,
)


class Trie:
    """The outputs that a search may choose from, as a `prefix_allowed_tokens_fn` of transformers.

    A sequence is what the decoder writes after its prompt, and it ends with the end token, which is added where it is
    missing. After the end of a sequence, and after tokens that begin no sequence, only the end token is allowed.

    The nodes are numbered breadth first, so that the children of a node are neighbours: each node takes 8 bytes, 4 for
    its token and 4 for its first child. Where fastgen runs the search, each beam carries its node.
    """

    # Whether nothing may follow an end token. transformers raises an error then; fairseq goes on with ended beams,
    # which would take the places of other sequences.
    ends_once = False

    def __init__(self, sequences: Iterable[Any], *, eos_token_id: int, prompt_length: int = 1) -> None:
        """Build a trie of some sequences, or of millions.

        Args:
            sequences: token ids of each: a list of ints, a 1-D tensor or array. Any iterable; each is read once.
                Duplicates count once. An empty sequence allows the end at once.
            eos_token_id: the end token.
            prompt_length: how many tokens of `input_ids` come before a sequence: 1 for an encoder-decoder, whose
                decoder begins with one token; for a decoder-only model see `after`.

        Raises:
            ValueError: there is no sequence; one holds something other than tokens, or the end token before its end.
        """
        collected = trie_building.Collected(eos_token_id)
        collected.add(sequences)
        self._set(*collected.arrays(), eos_token_id, 1, prompt_length)

    @classmethod
    def per_sentence(cls, sets: Iterable[Iterable[Any]], *, eos_token_id: int, prompt_length: int = 1) -> Trie:
        """Build a trie with other sequences for each sentence of the batch: `sets[i]` holds those of sentence `i`.

        Raises:
            ValueError: as `Trie`; also if a sentence has no sequence.
        """
        collected = trie_building.Collected(eos_token_id)
        for sequences in sets:
            collected.add(sequences)
        trie = cls.__new__(cls)
        trie._set(*collected.arrays(), eos_token_id, len(collected.sizes), prompt_length)
        trie._roots = np.arange(len(collected.sizes))
        return trie

    @classmethod
    def from_file(
        cls,
        path: str | os.PathLike[str],
        *,
        tokenizer: Any = None,
        eos_token_id: int | None = None,
        special_tokens: bool = True,
        prompt_length: int = 1,
    ) -> Trie:
        """Build a trie of the lines of a file in UTF-8; blank lines are left out.

        Args:
            path: a text a line, if there is a tokenizer; else token ids with spaces between them.
            tokenizer: of transformers; it reads each line as a target text.
            eos_token_id: by default the tokenizer's.
            special_tokens: let the tokenizer add its special tokens, as models with an encoder learn to write them.
                For decoder-only models, False.
            prompt_length: as in `Trie`.

        Raises:
            ValueError: a line, which is named, is not UTF-8, holds no token ids, or the end token before its end; or
                the file holds no sequence, or the end token is unknown.
        """
        end = getattr(tokenizer, "eos_token_id", None) if eos_token_id is None else eos_token_id
        if end is None:
            raise ValueError("The end token is unknown: give eos_token_id.")
        lines = trie_building.sequences_of(path, tokenizer, end, special_tokens)
        return cls(lines, eos_token_id=end, prompt_length=prompt_length)

    def _set(
        self, tokens: np.ndarray, first_child: np.ndarray, eos_token_id: int, roots: int, prompt_length: int
    ) -> None:
        _check_prompt_length(prompt_length)
        self._tokens = tokens  # int32 [nodes]: the token that leads to each; -1 for roots, which come first
        self._first_child = first_child  # int32 [nodes + 1]
        self.eos_token_id, self.prompt_length = int(eos_token_id), int(prompt_length)
        self._num_roots = roots
        self._roots: np.ndarray | None = None  # of each sentence; None: all begin at the first
        # Any end of a sequence stands for whatever is outside of the trie: it has no children either.
        self._end = int(np.argmax(first_child[1:] == first_child[:-1]))
        self.largest_token = int(tokens.max())
        self._on_device: dict[torch.device, tuple[Tensor, Tensor]] = {}

    def after(self, prompt_length: int) -> Trie:
        """This trie for prompts of another length; the two share their memory.

        A decoder-only model's prompt is as long as `input_ids`, padding included: `trie.after(input_ids.shape[1])`.
        Where the model is forced to begin with a certain token, as for a language, and the sequences leave it out, the
        prompt has 2 tokens. As long as there are fewer tokens than that, those that begin a sequence are allowed.
        """
        _check_prompt_length(prompt_length)
        return self._with(prompt_length=int(prompt_length))

    def select(self, sentences: Sequence[int]) -> Trie:
        """This trie for a batch of these sentences of the batch, in this order; the two share their memory."""
        if self._roots is None:
            return self
        return self._with(_roots=self._roots[np.asarray(sentences, dtype=np.int64)])

    def _with(self, **changes: Any) -> Trie:
        other = type(self).__new__(type(self))
        vars(other).update(vars(self), **changes)
        return other

    @property
    def num_sentences(self) -> int | None:
        """For how many sentences there are sequences; None if all sentences have the same."""
        return None if self._roots is None else len(self._roots)

    @property
    def longest(self) -> int:
        """How many tokens the longest sequence has, of any sentence's, end token included."""
        first, last, depth = 0, self._num_roots, -1  # of the nodes at this depth: roots have none
        while first < last:
            first, last, depth = int(self._first_child[first]), int(self._first_child[last]), depth + 1
        return depth

    @property
    def nbytes(self) -> int:
        """Bytes of the two arrays."""
        return self._tokens.nbytes + self._first_child.nbytes

    def __call__(self, batch_id: int, input_ids: Tensor) -> list[int]:
        """The tokens that may follow `input_ids`, int64 `[length]`, prompt included, in ascending order."""
        prefix = input_ids[self.prompt_length :].tolist()
        if self.ends_once and self.eos_token_id in prefix:
            return []
        return self.allowed(prefix, int(batch_id))

    def allowed(self, prefix: Iterable[int], sentence: int = 0) -> list[int]:
        """The tokens that may follow a prefix without prompt, in ascending order; never none.

        Raises:
            IndexError: there are no sequences for this sentence.
        """
        node = self._node(prefix, self._root(sentence))
        first, last = self._first_child[node], self._first_child[node + 1]
        found: list[int] = self._tokens[first:last].tolist()
        return found or [self.eos_token_id]

    def __contains__(self, sequence: Iterable[int]) -> bool:
        """Whether this is one of the sequences, of any sentence's; with or without the end token."""
        wanted = list(sequence)
        if wanted[-1:] != [self.eos_token_id]:
            wanted.append(self.eos_token_id)
        roots = [0] if self._roots is None else self._roots.tolist()
        return any(self._node(wanted, root, None) is not None for root in roots)

    def __len__(self) -> int:
        """The number of different sequences, of all sentences together."""
        if self._roots is None or len(self._roots) == self._num_roots:
            return int((self._first_child[1:] == self._first_child[:-1]).sum())
        return sum(1 for _ in self)

    def __iter__(self) -> Iterator[list[int]]:
        """The sequences, end token included, in the order of their tokens, sentence by sentence."""
        for root in [0] if self._roots is None else self._roots.tolist():
            open_nodes: list[tuple[int, list[int]]] = [(root, [])]
            while open_nodes:
                node, prefix = open_nodes.pop()
                first, last = int(self._first_child[node]), int(self._first_child[node + 1])
                if first == last:
                    yield prefix
                tokens = self._tokens[first:last].tolist()
                open_nodes += [(first + i, [*prefix, tokens[i]]) for i in reversed(range(len(tokens)))]

    def _root(self, sentence: int) -> int:
        if self._roots is None:
            return 0
        if not 0 <= sentence < len(self._roots):
            raise IndexError(
                f"the trie has sequences for {len(self._roots)} sentences, and none for sentence {sentence}"
            )
        return int(self._roots[sentence])

    def _node(self, prefix: Iterable[int], node: int, outside: Any = ...) -> Any:
        """The node that a prefix leads to, or `outside`, the end if none is given."""
        first_child, tokens = self._first_child, self._tokens
        for token in prefix:
            first, last = first_child[node], first_child[node + 1]
            node = bisect.bisect_left(tokens, token, first, last)
            if node == last or tokens[node] != token:
                return self._end if outside is ... else outside
        return node

    def arrays_on(self, device: torch.device) -> tuple[Tensor, Tensor, int]:
        """Tokens int32 `[nodes]`, first children int32 `[nodes + 1]`, and a node that stands for the end.

        On the CPU they are this object's own memory; on other devices they are copied once.
        """
        if device not in self._on_device:
            arrays = torch.from_numpy(self._tokens), torch.from_numpy(self._first_child)
            self._on_device[device] = arrays[0].to(device), arrays[1].to(device)
        return *self._on_device[device], self._end

    def roots_on(self, device: torch.device, sentences: int) -> Tensor:
        """The root of each sentence of a batch, int64 `[sentences]`."""
        if self._roots is None:
            return torch.zeros(sentences, dtype=torch.int64, device=device)
        return torch.from_numpy(self._roots[:sentences]).to(device, torch.int64)

    def __deepcopy__(self, memo: dict[int, Any]) -> Trie:
        return self  # nothing of it ever changes

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_on_device": {}}

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the trie to a file in numpy's format `.npz`, without pickle. Such a trie has all of its sentences."""
        if self._roots is not None and not np.array_equal(self._roots, np.arange(self._num_roots)):
            raise ValueError("This trie was made by select: save the one that it was made of.")
        facts = [_FORMAT, self.eos_token_id, self.prompt_length, self._num_roots, self._roots is not None]
        with open(path, "wb") as file:  # given a name, numpy would add a suffix
            np.savez(file, facts=np.array(facts), tokens=self._tokens, first_child=self._first_child)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Trie:
        """Read a trie that `save` has written.

        Raises:
            ValueError: the file is none, or it is damaged.
            OSError: the file cannot be read.
        """
        content = io.BytesIO(Path(path).read_bytes())
        try:
            _check_archive(content)
            with np.load(content, allow_pickle=False) as saved:
                facts, tokens, first_child = saved["facts"], saved["tokens"], saved["first_child"]
            if facts.dtype.kind not in "iu":
                raise TypeError
            version, end, prompt_length, roots, is_per_sentence = facts.tolist()
        except _UNREADABLE as error:
            raise ValueError(f"{os.fspath(path)} is no trie that fastgen has saved.") from error
        if version != _FORMAT:
            raise ValueError(f"{os.fspath(path)} was saved by another version of fastgen.")
        if not trie_building.are_sound(tokens, first_child, roots, end):
            raise ValueError(f"{os.fspath(path)} is damaged.")
        trie = cls.__new__(cls)
        trie._set(tokens, first_child, end, roots, prompt_length)
        trie._roots = np.arange(roots) if is_per_sentence else None
        return trie


def _check_prompt_length(prompt_length: int) -> None:
    if prompt_length < 0:
        raise ValueError(f"prompt_length={prompt_length} is below 0.")


def _check_archive(content: io.BytesIO) -> None:
    """Raise one of `_UNREADABLE` unless each entry is as `save` writes it, and has the bytes that it had then.

    numpy reads an array's shape first, and makes room for it, before the bytes are compared with their checksum.
    """
    with zipfile.ZipFile(content) as archive:
        is_stored = all(entry.compress_type == zipfile.ZIP_STORED for entry in archive.infolist())
        if not is_stored or archive.testzip() is not None:
            raise zipfile.BadZipFile
    content.seek(0)
