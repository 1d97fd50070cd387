"""A trie of a million sequences: seconds to build, save and load it, bytes, and look-ups, beside one of Python dicts.

    python benchmarks/bench_trie.py

A look-up asks which tokens may follow a prefix of 4. "Alone" is one prefix after another, as stock transformers asks;
"rows" is what fastgen's search does, for all rows at once: each node moves on by 4 tokens, and its children are listed.
Tokens follow Zipf's law, so that sequences share prefixes as texts do. All answers are compared.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from measuring import OtherProcesses, aligned, begin, environment, options, say_if_disturbed, write

from fastgen import Trie
from fastgen.bench.allowed import dictionaries
from fastgen.decoding.trie_rows import TrieRows

END, VOCABULARY, LONGEST, PREFIX = 2, 32_000, 10, 4


def drawn(count: int, seed: int = 1) -> list[list[int]]:
    generator = np.random.default_rng(seed)
    lengths = generator.integers(PREFIX, LONGEST + 1, count)
    tokens = generator.zipf(1.3, (count, LONGEST)) % (VOCABULARY - 3) + 3
    return [row[:length] for row, length in zip(tokens.tolist(), lengths.tolist(), strict=True)]


def resident() -> int:
    """Bytes of memory that this process holds."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


def timed(function: Callable[[], Any]) -> tuple[float, Any]:
    start = time.perf_counter()
    found = function()
    return time.perf_counter() - start, found


def measure(args: Any) -> dict[str, Any]:
    sequences = drawn(args.sequences)
    rng = np.random.default_rng(2)
    prefixes = [sequences[number][:PREFIX] for number in rng.integers(0, len(sequences), args.look_ups)]
    builds = [timed(lambda: Trie(iter(sequences), eos_token_id=END)) for _ in range(args.rounds)]
    trie: Trie = builds[-1][1]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trie"
        saving, _ = timed(lambda: trie.save(path))
        loading, loaded = timed(lambda: Trie.load(path))
    assert len(loaded) == len(trie)
    before = resident()
    of_dicts, root = timed(lambda: dictionaries(sequences, END))
    dict_bytes = resident() - before

    def in_dicts() -> list[list[int]]:
        found = []
        for prefix in prefixes:
            node = root
            for token in prefix:
                node = node[token]
            found.append(list(node))
        return found

    def alone() -> list[list[int]]:
        return [trie.allowed(prefix) for prefix in prefixes]

    full = torch.tensor([[0, *prefix] for prefix in prefixes])

    def rows() -> Any:
        return TrieRows(trie, full, 1).children()

    assert [sorted(found) for found in in_dicts()] == alone()
    found = rows()
    assert found.tokens.tolist() == [token for tokens in alone() for token in tokens]
    rounds = [{f.__name__: timed(f)[0] for f in (in_dicts, alone, rows)} for _ in range(args.rounds)]
    return {
        "sequences": args.sequences,
        "different": len(trie),
        "tokens": sum(map(len, sequences)),
        "nodes": len(trie._tokens),
        "look_ups": args.look_ups,
        "seconds": {
            "build": statistics.median(seconds for seconds, _ in builds),
            "save": saving,
            "load": loading,
            "build_dicts": of_dicts,
            **{name: statistics.median(one[name] for one in rounds) for name in rounds[0]},
        },
        "bytes": {"trie": trie.nbytes, "dicts": dict_bytes},
        "rounds": rounds,
    }


def main() -> int:
    parser = options(__doc__ or "", rounds=3)
    parser.add_argument("--sequences", type=int, default=1_000_000, help="default: %(default)s")
    parser.add_argument("--look-ups", type=int, default=100_000, help="default: %(default)s")
    args = parser.parse_args()
    begin(args)
    others = OtherProcesses()
    result = {**environment(np), **measure(args), "other_processes": (cores := others.cores())}
    print(f"written to {write(args.output, 'trie', result)}")
    seconds = result["seconds"]
    print(
        aligned(
            [
                ("", "fastgen.Trie", "dicts"),
                ("build, s", f"{seconds['build']:.2f}", f"{seconds['build_dicts']:.2f}"),
                ("MB", *(f"{result['bytes'][one] / 1e6:.0f}" for one in ("trie", "dicts"))),
                ("look-ups alone, s", f"{seconds['alone']:.3f}", f"{seconds['in_dicts']:.3f}"),
                ("look-ups in rows, s", f"{seconds['rows']:.3f}", ""),
                ("load, s", f"{seconds['load']:.2f}", ""),
            ]
        )
    )
    say_if_disturbed(cores)
    return 0


if __name__ == "__main__":
    sys.exit(main())
