"""Mistakes for the CUDA kernels, one at a time, and inputs at which each of them shows."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import oracle
import torch
from emulated_cuda import Fault
from topk_cases import logits_of

_BARRIER = "if (!FAULT) __syncthreads();"


def _topk(what: str, old: str, new: str, is_only_watched: bool = False) -> Fault:
    return Fault("topk.cu", what, old, new, is_only_watched)


def _ngrams(what: str, old: str, new: str) -> Fault:
    return Fault("ngrams.cu", what, old, new)


FAULTS = (
    _topk(
        "sort: no barrier between rounds",
        "      __syncthreads();\n      for (int i = threadIdx.x; i < size",
        f"      {_BARRIER}\n      for (int i = threadIdx.x; i < size",
    ),
    _topk("sort: no barrier at the end", "  __syncthreads();\n}\n\n// The block's sum", f"  {_BARRIER}\n}}\n\n// The"),
    _topk(
        "reduce: no barrier between halves",
        "    __syncthreads();\n    if (threadIdx.x < half)",
        f"    {_BARRIER}\n    if (threadIdx.x < half)",
    ),
    _topk(
        "reduce: no barrier before the result",
        "  __syncthreads();\n  const Value result",
        f"  {_BARRIER}\n  const Value result",
    ),
    _topk(
        "reduce: no barrier after the result",
        "scratch[0];\n  __syncthreads();",
        f"scratch[0];\n  {_BARRIER}",
        is_only_watched=True,  # what comes next has a barrier before it counts
    ),
    _topk("reduce: starts with too few", "int half = kThreads / 2;", "int half = FAULT ? kThreads / 4 : kThreads / 2;"),
    _topk(
        "bans: no barrier after zeros",
        "    __syncthreads();\n    for (int64_t i = threadIdx.x; i < banned_width",
        f"    {_BARRIER}\n    for (int64_t i = threadIdx.x; i < banned_width",
    ),
    _topk(
        "bans: no barrier after the bits",
        "    __syncthreads();\n  }\n  maximum = kNone;",
        f"    {_BARRIER}\n  }}\n  maximum = kNone;",
    ),
    _topk("bans: no zeros", "      is_banned[i] = 0;", "      if (!FAULT) is_banned[i] = 0;"),
    _topk(
        "bans: of the segment before",
        "[row * banned_stride + i] - first;",
        "[row * banned_stride + i] - first + (FAULT ? 1 : 0);",
    ),
    _topk(
        "found: no barrier before it is read",
        "  __syncthreads();\n  Key* const best = keys",
        f"  {_BARRIER}\n  Key* const best = keys",
    ),
    _topk(
        "found: counted without atomic operations",
        "const int place = atomicAdd(&found, 1);",
        "const int place = FAULT ? found : atomicAdd(&found, 1);\n      if (FAULT) found = place + 1;",
        is_only_watched=True,  # no other thread runs between these lines here, as it may on a device
    ),
    _topk(
        "found: not zeroed",
        "    found = 0;",
        "    if (!FAULT) found = 0;",
        is_only_watched=True,  # candidates[garbage] could end the process
    ),
    _topk("one candidate too many", "if (place < kCandidates) {", "if (place < kCandidates + (FAULT ? 1 : 0)) {"),
    _topk("places left as they are", "      candidates[i] = 0;", "      if (!FAULT) candidates[i] = 0;"),
    _topk("a bound that is too high", "scratch[k - 1];", "scratch[FAULT && k > 1 ? k - 2 : k - 1];"),
    _topk(
        "segments: the last is left out",
        "(vocabulary + kSegment - 1) / kSegment;",
        "(vocabulary + (FAULT && vocabulary > kSegment ? 0 : kSegment - 1)) / kSegment;",
    ),
    _topk(
        "segments: they overlap by one",
        "const int64_t first = blockIdx.x * kSegment;",
        "const int64_t first = blockIdx.x * (kSegment - (FAULT ? 1 : 0));",
    ),
    _topk(
        "rows: the next one's first logit",
        "x[i] = token < vocabulary ?",
        "x[i] = token < vocabulary + (FAULT ? 1 : 0) ?",
    ),
    _topk(
        "ties: the last token first",
        "(0xffffffffu - static_cast<unsigned>(token));",
        "(FAULT ? static_cast<unsigned>(token) : 0xffffffffu - static_cast<unsigned>(token));",
    ),
    _topk("-0.0 before 0.0", "__float_as_uint(logit + 0.0f);", "__float_as_uint(FAULT ? logit : logit + 0.0f);"),
    _topk("many ties: one twice", "mine = key < last &&", "mine = key < last + (FAULT && last != ~0ull ? 1 : 0) &&"),
    _topk("a NaN is ranked", "if (isnan(x[i]) ||", "if ((isnan(x[i]) && !FAULT) ||"),
    _topk(
        "merge: one key too many", "i < taken ? all[next + i] : 0;", "i < taken + (FAULT ? 1 : 0) ? all[next + i] : 0;"
    ),
    _topk("merge: one too few is kept", "    kept = k;", "    kept = FAULT && k > 1 ? k - 1 : k;"),
    _topk(
        "merge: the first segment's sum twice",
        "sums[row * segments + i]) *",
        "sums[row * segments + (FAULT ? 0 : i)]) *",
    ),
    _ngrams(
        "no barrier before the next tile",
        "    __syncthreads(); // all are done with the tile before",
        f"    {_BARRIER}",
    ),
    _ngrams(
        "no barrier after the tile is read",
        "    __syncthreads();\n    for (int64_t i = threadIdx.x; i < count; i += kThreads) {\n      if (first",
        f"    {_BARRIER}\n    for (int64_t i = threadIdx.x; i < count; i += kThreads) {{\n      if (first",
    ),
    _ngrams(
        "a thread that never comes",
        "  for (int64_t first = 0; first < text_length;",
        "  if (FAULT && threadIdx.x == 7) return;\n  for (int64_t first = 0; first < text_length;",
    ),
    _ngrams("the first n-gram is left out", "if (first + i < prefix) {", "if (first + i < prefix + (FAULT ? 1 : 0)) {"),
    _ngrams("tiles: one token is skipped", "first += kTile)", "first += kTile + (FAULT ? 1 : 0))"),
    _ngrams(
        "tiles: reads before the first place", "place >= 0 ? tile[place]", "place >= (FAULT ? -1 : 0) ? tile[place]"
    ),
    _ngrams("prefix: reads beyond what is kept", "(back < kept ?", "(back < kept + (FAULT ? 1 : 0) ?"),
    _ngrams(
        "prefix: too little room",
        "std::min(ngram_size - 1, kPrefix)",
        "std::min(ngram_size - (FAULT ? 2 : 1), kPrefix)",
    ),
    _ngrams(
        "source: of another sentence",
        "row / beams * text_stride",
        "(FAULT ? row % (gridDim.x / beams) : row / beams) * text_stride",
    ),
)


def _logits(values: str, rows: int, vocabulary: int) -> torch.Tensor:
    return logits_of(values, rows, vocabulary, torch.Generator().manual_seed(7))


def _check_topk(operators: Any, logits: torch.Tensor, k: int, banned: torch.Tensor | None = None) -> None:
    oracle.assert_topk(operators.topk_log_softmax(logits, k, banned), logits, k, banned)


def _topk_checks(operators: Any) -> Iterator[Callable[[], None]]:
    zeros = torch.tensor([[-0.0, 0.0, -0.0, 0.0, -1.0]])
    special = torch.tensor([[1.0, math.nan, -math.inf, 2.0]])
    apart = torch.full((2, 303), 50.0)[:, :300]  # beside each row what would be its best
    apart.copy_(_logits("normal", 2, 300))
    bans = torch.tensor([[0, 1, 8190, 8191, 8192, 8193], [5, 5, -1, 8999, 9000, 8191]])
    best = _logits("normal", 1, 700).topk(30).indices
    yield lambda: _check_topk(operators, zeros, 4)
    yield lambda: _check_topk(operators, special, 3)
    yield lambda: _check_topk(operators, apart, 3)
    yield lambda: _check_topk(operators, _logits("normal", 1, 700), 9, best)
    yield lambda: _check_topk(operators, _logits("few", 2, 300), 128)
    yield lambda: _check_topk(operators, _logits("equal", 1, 3000), 3)  # more than there is room for
    yield lambda: _check_topk(operators, _logits("equal", 1, 2049), 3)
    yield lambda: _check_topk(operators, _logits("reversed", 2, 9000), 9, bans)
    yield lambda: _check_topk(operators, _logits("sorted", 2, 17_000), 9)
    # Merged in two rounds, of which the second brings nothing.
    yield lambda: _check_topk(operators, _logits("reversed", 1, 150_000), 128)


def _ngram_checks(operators: Any) -> Iterator[Callable[[], None]]:
    generator = torch.Generator().manual_seed(3)

    def check(kinds: int, length: int, n: int, beams: int) -> None:
        tokens = torch.randint(0, kinds, (2 * beams, length), generator=generator)
        source = torch.randint(0, kinds, (2, length), generator=generator)
        if n > 8:  # or nothing would be found
            tokens[:, length - n : length] = tokens[:, 1 : n + 1]
            source[:, -n:] = tokens[::beams, length - n :]
        scores = torch.randn(2 * beams, 4096, generator=generator)
        ours = scores.clone()
        operators.ban_repeated_ngrams_(tokens, ours, n, length)
        assert torch.equal(ours, oracle.ban_repeated(tokens, scores, n, length))
        ours = scores.clone()
        operators.ban_source_ngrams_(source, tokens, ours, n, length, beams)
        assert torch.equal(ours, oracle.ban_source(source, tokens, scores, n, length, beams))

    for kinds, length, n, beams in ((3, 40, 3, 2), (2, 9, 2, 1), (4000, 4200, 1, 1), (30, 4200, 3, 2), (2, 300, 70, 1)):
        yield lambda kinds=kinds, length=length, n=n, beams=beams: check(kinds, length, n, beams)  # type: ignore[misc]
    # Where one n-gram alone bans: the first of a row, and one that begins in the tile before.
    boundary = torch.arange(2060)
    boundary[-2:] = boundary[2046:2048]
    yield lambda: _check_one_ban(operators, torch.tensor([1, 2, 1]), 2, 2)
    yield lambda: _check_one_ban(operators, boundary, 3, 2048)


def _check_one_ban(operators: Any, tokens: torch.Tensor, n: int, banned: int) -> None:
    scores = torch.zeros(1, 4096)
    operators.ban_repeated_ngrams_(tokens[None], scores, n, len(tokens))
    assert scores.isinf().nonzero().tolist() == [[0, banned]]


def symptom(operators: Any, source: str) -> str:
    """What the first check of this source finds: an error's text, "another output", or "" if there is nothing."""
    for check in (_topk_checks if source == "topk.cu" else _ngram_checks)(operators):
        try:
            check()
        except AssertionError:
            return "another output"
        except RuntimeError as error:
            return str(error).partition("\n")[0]
    return ""
