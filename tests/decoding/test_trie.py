"""`fastgen.Trie` against a trie of Python dictionaries, and its file format."""

from __future__ import annotations

import copy
import pickle
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fastgen import Trie
from fastgen.decoding.trie_rows import TrieRows

END = 2


def drawn(seed: int, count: int = 60, vocabulary: int = 7, longest: int = 6) -> list[list[int]]:
    """Sequences with duplicates, prefixes of each other and the empty one among them."""
    rng = random.Random(seed)
    tokens = [token for token in range(vocabulary) if token != END]
    found = [[rng.choice(tokens) for _ in range(rng.randrange(longest))] for _ in range(count)]
    return [*found, *found[:5], []]


class DictTrie:
    def __init__(self, sequences: list[list[int]]) -> None:
        self.root: dict[int, Any] = {}
        for sequence in sequences:
            node = self.root
            for token in [*sequence, END]:
                node = node.setdefault(token, {})

    def allowed(self, prefix: list[int]) -> list[int]:
        node: dict[int, Any] | None = self.root
        for token in prefix:
            node = None if node is None else node.get(token)
        return sorted(node) if node else [END]


def prefixes(seed: int, sequences: list[list[int]]) -> list[list[int]]:
    """Prefixes in the trie, its ends, and others."""
    rng = random.Random(seed)
    inside = [[*sequence, END][:cut] for sequence in sequences for cut in range(len(sequence) + 2)]
    outside = [[rng.randrange(9) for _ in range(rng.randrange(1, 8))] for _ in range(200)]
    return [*inside, *outside, [END, END], [10**9], []]


@pytest.mark.parametrize("seed", range(8))
def test_it_is_a_trie_of_dictionaries(seed: int) -> None:
    sequences = drawn(seed)
    trie, plain = Trie(sequences, eos_token_id=END), DictTrie(sequences)
    for prefix in prefixes(seed, sequences):
        assert trie.allowed(prefix) == plain.allowed(prefix), prefix
        assert trie(0, torch.tensor([9, *prefix])) == plain.allowed(prefix)
    known = {tuple(sequence) for sequence in sequences}
    assert len(trie) == len(known)
    assert list(trie) == sorted([*sequence, END] for sequence in known)
    for prefix in prefixes(seed, sequences):
        without = tuple(prefix[:-1] if prefix[-1:] == [END] else prefix)
        assert (prefix in trie) == (without in known), prefix


@pytest.mark.parametrize(
    "kind",
    [
        lambda sequences: iter(sequences),
        lambda sequences: (tuple(one) for one in sequences),
        lambda sequences: [torch.tensor(one, dtype=torch.int64) for one in sequences],
        lambda sequences: [np.array(one, dtype=np.int32) for one in sequences],
        lambda sequences: [[*one, END] for one in sequences],
        lambda sequences: random.Random(1).sample(sequences, len(sequences)),
    ],
)
def test_every_kind_of_sequences_makes_the_same_trie(kind: Any) -> None:
    sequences = drawn(1)
    assert list(Trie(kind(sequences), eos_token_id=END)) == list(Trie(sequences, eos_token_id=END))


def test_memory_is_eight_bytes_a_node() -> None:
    trie = Trie([[5], [5, 6], [7]], eos_token_id=END)
    nodes = 1 + 2 + 3 + 1  # the root; 5 and 7; an end and 6 below 5, an end below 7; an end below 6
    assert trie.nbytes == 4 * nodes + 4 * (nodes + 1)


def test_rows_of_a_tensor() -> None:
    assert list(Trie(torch.tensor([[5, 6], [5, 7]]), eos_token_id=END)) == [[5, 6, END], [5, 7, END]]


@pytest.mark.parametrize("prompt", [0, 1, 4])
def test_prompts(prompt: int) -> None:
    trie = Trie([[5, 6]], eos_token_id=END)
    later = trie.after(prompt)
    before = torch.full((prompt,), 9)
    assert later(0, torch.cat([before, torch.tensor([5])])) == [6]
    assert later(0, before[1:]) == [5]  # the prompt is not over
    assert (trie.prompt_length, later.prompt_length) == (1, prompt)
    assert later._tokens is trie._tokens


def test_sentences_of_their_own() -> None:
    sets = [drawn(3), [[4]], drawn(4, count=3)]
    trie = Trie.per_sentence(sets, eos_token_id=END)
    for sentence, sequences in enumerate(sets):
        plain = DictTrie(sequences)
        for prefix in prefixes(sentence, sequences):
            assert trie.allowed(prefix, sentence) == plain.allowed(prefix)
    chosen = trie.select([2, 1])
    assert chosen.allowed([], 1) == [4] and chosen.num_sentences == 2 and trie.num_sentences == 3
    assert len(trie) == sum(len({tuple(one) for one in sequences}) for sequences in sets)
    assert len(chosen) == len(list(chosen)) == 1 + len({tuple(one) for one in sets[2]})
    assert [4] in trie and [4, 4, 4, 4, 4, 4, 4] not in trie
    with pytest.raises(IndexError, match="for 2 sentences, and none for sentence 2"):
        chosen(2, torch.tensor([0]))


@pytest.mark.parametrize("beams", [1, 3])
@pytest.mark.parametrize("prompt", [0, 2, 3])
def test_rows_move_on_as_the_function_says(prompt: int, beams: int) -> None:
    """Through random continuations, inside the trie and outside, with rows that continue others and rows that leave."""
    sets = [drawn(seed, count=40) for seed in range(4)]
    trie = Trie.per_sentence(sets, eos_token_id=END, prompt_length=prompt)
    generator = torch.Generator().manual_seed(prompt)
    tokens = torch.randint(3, 6, (4 * beams, 2), generator=generator)
    rows, sentences = TrieRows(trie, tokens, beams), torch.arange(4)
    for step in range(6):
        children = rows.children()
        expected = [trie(int(sentences[row // beams]), one) for row, one in enumerate(tokens)]
        found = [children.tokens[children.rows == row].tolist() for row in range(len(tokens))]
        assert found == expected
        assert children.counts.tolist() == list(map(len, expected))
        some = torch.arange(0, len(tokens), beams)
        assert torch.equal(rows.children(some).tokens, children.tokens[torch.isin(children.rows, some)])
        assert torch.equal(rows.children(some).rows, children.rows[torch.isin(children.rows, some)])
        first = torch.arange(len(tokens)) // beams * beams
        parents = first + torch.randint(0, beams, first.shape, generator=generator)
        chosen = torch.tensor([random.Random(step).choice([*expected[row] * 3, 0, 5]) for row in parents.tolist()])
        tokens = torch.cat([tokens[parents], chosen[:, None]], dim=1)
        if step % 2:
            rows.advance(parents, chosen, children)
        else:
            rows.advance(parents, chosen)
        if step == 2:
            stay = torch.arange(beams, len(tokens))
            rows.select(stay)
            tokens, sentences = tokens[stay], sentences[1:]
        assert torch.equal(TrieRows(trie.select(sentences.tolist()), tokens, beams).nodes, rows.nodes)


@pytest.mark.parametrize("as_sentences", [False, True])
def test_save_and_load(tmp_path: Path, as_sentences: bool) -> None:
    sequences = drawn(5)
    if as_sentences:
        trie = Trie.per_sentence([sequences, [[3]]], eos_token_id=END, prompt_length=4)
    else:
        trie = Trie(sequences, eos_token_id=END, prompt_length=4)
    path = tmp_path / "saved.trie"
    trie.save(path)
    loaded = Trie.load(path)
    assert list(loaded) == list(trie)
    assert (loaded.eos_token_id, loaded.prompt_length, loaded.nbytes) == (END, 4, trie.nbytes)
    assert loaded.num_sentences == trie.num_sentences
    np.load(path, allow_pickle=False)["tokens"]


def test_a_part_of_the_sentences_is_not_saved(tmp_path: Path) -> None:
    trie = Trie.per_sentence([[[3]], [[4]]], eos_token_id=END)
    with pytest.raises(ValueError, match="made by select"):
        trie.select([1]).save(tmp_path / "part")


def test_copies() -> None:
    trie = Trie(drawn(6), eos_token_id=END)
    assert copy.deepcopy(trie) is trie
    assert list(pickle.loads(pickle.dumps(trie))) == list(trie)


def _facts(trie: Trie) -> dict[str, Any]:
    return dict(facts=np.array([1, END, 1, 1, 0]), tokens=trie._tokens.copy(), first_child=trie._first_child.copy())


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (dict(facts=np.array([9, END, 1, 1, 0])), "another version"),
        (dict(facts=np.array([1, END])), "no trie"),
        (dict(facts=np.array([1.0, END, 1.0, 1.0, 0.0])), "no trie"),
        (dict(tokens=np.array([{}], dtype=object)), "no trie"),
        (dict(tokens=np.zeros(4)), "is damaged"),
        (dict(first_child=lambda old: old + 1), "is damaged"),
        (dict(first_child=lambda old: old[::-1].copy()), "is damaged"),
        (dict(first_child=lambda old: old * 0), "is damaged"),
        (dict(tokens=lambda old: -old), "is damaged"),
        (dict(tokens=lambda old: np.where(old == END, 3, old)), "is damaged"),
        (dict(tokens=lambda old: np.where(old > 0, END, old)), "is damaged"),
    ],
)
def test_files_that_are_no_trie(tmp_path: Path, edit: dict[str, Any], message: str) -> None:
    facts = _facts(Trie([[5, 6], [5, 7], [8]], eos_token_id=END))
    for name, new in edit.items():
        changed = new(facts[name]) if callable(new) else new
        facts[name] = changed if changed.dtype in (object, float) else changed.astype(facts[name].dtype)
    path = tmp_path / "edited"
    with open(path, "wb") as file:
        np.savez(file, **facts)
    with pytest.raises(ValueError, match=message):
        Trie.load(path)


def test_damaged_files(tmp_path: Path) -> None:
    """Whatever the damage: a ValueError, or a trie that is sound."""
    path = tmp_path / "damaged"
    Trie(drawn(5), eos_token_id=END).save(path)
    whole, draw = path.read_bytes(), random.Random(1)
    for _ in range(300):
        content = bytearray(whole)
        for _ in range(draw.choice([1, 4, 40])):
            content[draw.randrange(len(content))] = draw.randrange(256)
        path.write_bytes(content[: draw.choice([len(content), draw.randrange(len(content))])])
        try:
            list(Trie.load(path))
        except ValueError as error:
            assert str(path) in str(error)


@pytest.mark.parametrize("flip", [1, 0x80, 0xFF])
def test_any_byte_may_be_damaged(tmp_path: Path, flip: int) -> None:
    """Among them the flag of an encrypted entry, other ways to compress one, and shapes that fill the memory."""
    path = tmp_path / "damaged"
    trie = Trie([[5, 6], [7]], eos_token_id=END)
    trie.save(path)
    whole = path.read_bytes()
    for place in range(len(whole)):
        content = bytearray(whole)
        content[place] ^= flip
        path.write_bytes(content)
        try:
            assert list(Trie.load(path)) == list(trie), place
        except ValueError as error:
            assert str(path) in str(error), place


def test_an_entry_that_passes_for_an_encrypted_one(tmp_path: Path) -> None:
    path = tmp_path / "flagged"
    Trie([[5, 6]], eos_token_id=END).save(path)
    content = bytearray(path.read_bytes())
    content[content.index(b"PK\x01\x02") + 8] |= 1
    path.write_bytes(content)
    with pytest.raises(ValueError, match="flagged is no trie that fastgen has saved"):
        Trie.load(path)


@pytest.mark.parametrize("content", [b"", b"PK", b"3 4\n", pickle.dumps([1])])
def test_other_files(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "other"
    path.write_bytes(content)
    with pytest.raises(ValueError, match="other is no trie that fastgen has saved"):
        Trie.load(path)
    with pytest.raises(FileNotFoundError):
        Trie.load(tmp_path / "none")


@pytest.mark.parametrize(
    ("sequences", "message"),
    [
        ([], "at least one sequence"),
        ([[3], [4, -1]], "Sequence 1 holds -1"),
        ([[3], [4, END, 5]], "Sequence 1 holds the end token, 2, before its end"),
        ([[3], "45"], "Sequence 1 is no list of token ids: '45'"),
        ([[3], b"45"], "Sequence 1 is no list"),
        ([[3], [4.5]], "Sequence 1 is no list"),
        ([[3], [2**31]], "Sequence 1 is no list"),
        ([[3], 4], "Sequence 1 is no list"),
        ([[3], None], "Sequence 1 is no list"),
        (torch.tensor([3, 4]), "Sequence 0 is no list"),
        ([[3], [10**5000]], "Sequence 1 is no list of token ids: too large a number"),
    ],
)
def test_what_is_no_sequence(sequences: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Trie(sequences, eos_token_id=END)


def test_other_refusals() -> None:
    with pytest.raises(ValueError, match="no sequence for sentence 1"):
        Trie.per_sentence([[[3]], []], eos_token_id=END)
    with pytest.raises(ValueError, match="at least one"):
        Trie.per_sentence([], eos_token_id=END)
    with pytest.raises(ValueError, match="prompt_length=-1"):
        Trie([[3]], eos_token_id=END, prompt_length=-1)
    with pytest.raises(ValueError, match="prompt_length=-2"):
        Trie([[3]], eos_token_id=END).after(-2)
    for end in (None, -1, True, "2", 2**31, 10**5000):
        with pytest.raises(ValueError, match=r"eos_token_id=.* is no token"):
            Trie([[3]], eos_token_id=end)  # type: ignore[arg-type]


class Tokenizer:
    """Of letters, with a language behind the end."""

    eos_token_id = END

    def __call__(self, text_target: list[str], add_special_tokens: bool, verbose: bool) -> Any:
        ids = [[ord(letter) for letter in text] + [END, 7] * add_special_tokens for text in text_target]
        return type("Encoding", (), {"input_ids": ids})


def test_from_a_file(tmp_path: Path) -> None:
    path = tmp_path / "outputs"
    path.write_text("5 6\n\n 5 7 \n5 6\n", "utf-8")
    assert list(Trie.from_file(path, eos_token_id=END)) == [[5, 6, END], [5, 7, END]]
    path.write_bytes(b" ab\r\n\n  \nc\n")
    expected = [[32, 97, 98, END], [99, END]]
    assert list(Trie.from_file(path, tokenizer=Tokenizer())) == expected
    assert list(Trie.from_file(path, tokenizer=Tokenizer(), special_tokens=False)) == expected
    with pytest.raises(ValueError, match="line 1: 'ab' is no token id"):
        Trie.from_file(path, eos_token_id=END)
    path.write_text("5\n-6\n", "utf-8")
    with pytest.raises(ValueError, match="line 2: '-6' is no token id"):
        Trie.from_file(path, eos_token_id=END)
    path.write_text(f"{2**31}\n", "utf-8")
    with pytest.raises(ValueError, match="line 1: '2147483648' is no token id"):
        Trie.from_file(path, eos_token_id=END)
    with pytest.raises(ValueError, match="give eos_token_id"):
        Trie.from_file(path)
    path.write_text("\n \n", "utf-8")
    with pytest.raises(ValueError, match="outputs holds no sequence"):
        Trie.from_file(path, eos_token_id=END)


def told(path: Path, content: bytes, **options: Any) -> str:
    path.write_bytes(content)
    with pytest.raises(ValueError) as caught:
        Trie.from_file(path, **options)
    return str(caught.value)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"5 6\n\n\xff\xfe\n", "line 3 is not UTF-8."),
        (b"5\n" * 5000 + b"\xed\xa0\x80", "line 5001 is not UTF-8."),
        (b"\n7\n5 2 6\n", "line 3 holds the end token, 2, before its end."),
        (b"5\n" + b"9" * 5000, f"line 2: '{'9' * 40}' is no token id."),
        ("5\n\u0665\n".encode(), "line 2: '\u0665' is no token id."),
    ],
    ids=["no UTF-8", "half of a pair", "end token", "long number", "other digits"],
)
def test_a_line_that_is_no_sequence_is_named(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "ids"
    assert told(path, content, eos_token_id=END) == f"{path}, line {message[5:]}"


@pytest.mark.parametrize(
    ("text", "special_tokens"),
    [("a\x02b", True), ("a\x02b", False), ("a\x02", True), ("\x02", True), ("\x02a", False)],
)
def test_a_text_that_holds_the_end_is_named(tmp_path: Path, text: str, special_tokens: bool) -> None:
    """What follows the end would be cut off: the outputs would not be those of the list."""
    path = tmp_path / "texts"
    found = told(path, f"\nc\n{text}\n".encode(), tokenizer=Tokenizer(), special_tokens=special_tokens)
    assert found == f"{path}, line 3: the tokenizer writes the end token, 2, before the text is over."


def test_what_is_no_mistake(tmp_path: Path) -> None:
    path = tmp_path / "outputs"
    path.write_bytes(b"\xef\xbb\xbf5 6 2\n" + b"0" * 5000 + b"7\n0000000000000002147483647")
    assert list(Trie.from_file(path, eos_token_id=END)) == [[5, 6, END], [7, END], [2**31 - 1, END]]
    path.write_bytes(b"a\x02\n")
    assert list(Trie.from_file(path, tokenizer=Tokenizer(), special_tokens=False)) == [[97, END]]


def test_the_longest() -> None:
    assert Trie([[]], eos_token_id=END).longest == 1
    assert Trie([[5], [6, 7, 8, END], []], eos_token_id=END).longest == 4
    assert Trie.per_sentence([[[5]], [[6, 7]], [[]]], eos_token_id=END).longest == 3
    for seed in range(4):
        sequences = drawn(seed)
        assert Trie(sequences, eos_token_id=END).longest == 1 + max(map(len, sequences))


def test_many_lines_for_a_tokenizer(tmp_path: Path) -> None:
    path = tmp_path / "outputs"
    path.write_text("".join(f"{number}\n" for number in range(9000)), "utf-8")
    assert len(Trie.from_file(path, tokenizer=Tokenizer())) == 9000


def test_a_large_trie() -> None:
    """Wide and deep at once, with tokens up to the largest."""
    generator = np.random.default_rng(1)
    rows = generator.integers(3, 2**31 - 1, (30_000, 3))
    rows[::2, 0] = 3
    trie = Trie(rows, eos_token_id=END)
    known = {tuple(row) for row in rows.tolist()}
    assert len(trie) == len(known)
    assert all(row in trie for row in rows[:500].tolist())
    assert trie.allowed([3]) == sorted({row[1] for row in known if row[0] == 3})
