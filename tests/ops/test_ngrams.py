"""The n-gram bans against brute force and against transformers' processors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import oracle
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from ngram_cases import check_repeated, check_source, laid_out, sizes, tokens_of
from references import reference
from torch import Tensor

CASES = settings(max_examples=1000, suppress_health_check=[HealthCheck.function_scoped_fixture])


@CASES
@given(case=sizes)
def test_repeated_ngrams(operators: Any, case: dict[str, Any]) -> None:
    check_repeated(operators, case)


@CASES
@given(case=sizes, beams=st.integers(1, 5), source_length=st.integers(0, 40))
def test_source_ngrams(operators: Any, case: dict[str, Any], beams: int, source_length: int) -> None:
    check_source(operators, case, beams, source_length)


@pytest.mark.parametrize("length", [0, 1, 2, 1023, 1024, 1025, 2047, 2048, 2049, 5000])
@pytest.mark.parametrize(("rows", "n"), [(1, 1), (3, 3), (512, 8), (2, 70), (2, 3000)])
def test_long_rows(operators: Any, rows: int, n: int, length: int) -> None:
    """Around the sizes of tiles, with prefixes that are longer than what a kernel keeps."""
    generator = torch.Generator().manual_seed(length)
    rows = rows if length < 2000 else min(rows, 16)
    tokens = torch.randint(0, 2 if n > 8 else 5, (rows, length + 3), generator=generator)
    if n > 8 and length > 2 * n:  # something must be found
        tokens[:, length - n : length] = tokens[:, 1 : n + 1]
    scores = torch.randn(rows, 300, generator=generator)
    expected = oracle.ban_repeated(tokens, scores, n, length)
    if n == 3 and length > 1000:
        assert expected.isinf().any()
    operators.ban_repeated_ngrams_(tokens, scores, n, length)
    assert torch.equal(scores, expected)


@pytest.mark.parametrize(("rows", "vocabulary"), [(512, 500), (4, 256_000)])
def test_large_batches(native: Any, rows: int, vocabulary: int) -> None:
    """Against the reference, as brute force takes too long."""
    generator = torch.Generator().manual_seed(rows)
    tokens = torch.randint(0, vocabulary, (rows, 5000), generator=generator)
    tokens[:, 2500:] = tokens[:, :2500]  # what comes next is banned once at least
    source = tokens[::4].flip(1)
    scores = torch.randn(rows, vocabulary, generator=generator)
    expected = scores.clone()
    for implementation, its in ((native, scores), (reference, expected)):
        implementation.ban_repeated_ngrams_(tokens, its, 3, 4997)
        implementation.ban_source_ngrams_(source, tokens, its, 1, 4997, 4)
    assert expected.isinf().any(-1).all()
    assert torch.equal(scores, expected)


def test_threads_change_nothing(native: Any, threads: Any) -> None:
    case = {"seed": 6, "rows": 512, "length": 300, "padding": 0, "n": 2, "kinds": 40, "vocabulary": 300}
    for number in (1, 2, 5):
        threads(number)
        check_repeated(native, case | {"dtype": torch.float32, "token_dtype": torch.int64, "layout": "dense"})


@pytest.mark.parametrize("n", [1, 2, 3, 5])
@pytest.mark.parametrize("length", [0, 1, 2, 3, 4, 5, 30])
def test_equal_to_transformers(operators: Any, n: int, length: int) -> None:
    processors = pytest.importorskip("transformers.generation.logits_process", reason="transformers is not installed")
    generator = torch.Generator().manual_seed(n * 100 + length)
    beams = 3
    tokens = torch.randint(0, 6, (4 * beams, length + 2), generator=generator)
    source = torch.randint(0, 6, (4, 25), generator=generator)
    scores = torch.randn(4 * beams, 6, generator=generator)
    stock = processors.NoRepeatNGramLogitsProcessor(n)(tokens[:, :length], scores.clone())
    ours = scores.clone()
    operators.ban_repeated_ngrams_(tokens, ours, n, length)
    assert torch.equal(ours, stock)
    stock = processors.EncoderNoRepeatNGramLogitsProcessor(n, source)(tokens[:, :length], scores.clone())
    ours = scores.clone()
    operators.ban_source_ngrams_(source, tokens, ours, n, length, beams)
    assert torch.equal(ours, stock)


def test_the_length_is_that_of_the_tokens_by_default(native: Any) -> None:
    tokens = torch.tensor([[1, 2, 3, 1, 2]])
    scores = torch.zeros(1, 5)
    native.ban_repeated_ngrams_(tokens, scores, 3)
    assert scores.tolist() == [[0, 0, 0, -oracle.INFINITY, 0]]
    scores = torch.zeros(1, 5)
    native.ban_source_ngrams_(torch.tensor([[1, 2, 4]]), tokens, scores, 3)
    assert scores.tolist() == [[0, 0, 0, 0, -oracle.INFINITY]]


def test_nothing_to_do(operators: Any) -> None:
    operators.ban_repeated_ngrams_(torch.zeros(0, 3, dtype=torch.int64), torch.zeros(0, 4), 1, 3)
    operators.ban_repeated_ngrams_(torch.zeros(2, 3, dtype=torch.int64), torch.zeros(2, 0), 1, 3)
    operators.ban_source_ngrams_(torch.zeros(1, 0).long(), torch.zeros(2, 3).long(), torch.zeros(2, 4), 1, 3, 2)


@pytest.mark.parametrize(
    ("source_type", "token_type"), [(torch.int64, torch.int32), (torch.int32, torch.int64), (torch.int32, torch.int32)]
)
def test_tokens_are_not_cut_off(operators: Any, source_type: torch.dtype, token_type: torch.dtype) -> None:
    """2^32 + 3 is another token than 3, whatever the types: it neither bans nor is found."""
    large = 2**32 + 3 if source_type == torch.int64 else -3
    source = torch.tensor([[1, large, large, 2, 1, 4]], dtype=source_type)
    scores = torch.zeros(2, 5)
    operators.ban_source_ngrams_(source, torch.tensor([[0, 1], [0, 3]], dtype=token_type), scores, 2, 2, 2)
    assert scores.isinf().nonzero().tolist() == [[0, 4]]


def bans(operators: Any, scores: Tensor) -> list[Callable[[], None]]:
    """Both operators on these `scores` `[2, V]`."""
    tokens = torch.tensor([[1, 2, 1], [3, 3, 3]])
    return [
        lambda: operators.ban_repeated_ngrams_(tokens, scores, 2, 3),
        lambda: operators.ban_source_ngrams_(tokens, tokens, scores, 2, 3, 1),
    ]


def test_autograd_sees_the_change(operators: Any) -> None:
    x = torch.ones(2, 5, requires_grad=True)
    for number in range(2):
        y = torch.ones(2, 5)
        product = x * y  # keeps y for the backward pass
        before = y._version
        bans(operators, y)[number]()
        assert y._version > before
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            product.sum().backward()


def test_scores_that_require_a_gradient(operators: Any) -> None:
    leaf = torch.zeros(2, 5, requires_grad=True)
    for scores in (leaf, leaf * 1):
        for ban in bans(operators, scores):
            with pytest.raises(RuntimeError, match=r"require a gradient .* under torch\.no_grad\(\)\.$"):
                ban()
            assert not scores.isinf().any()
            with torch.no_grad():
                ban()
            assert scores.isinf().any()
            with torch.no_grad():
                scores.zero_()


def test_expanded_scores(operators: Any) -> None:
    for scores in (torch.zeros(1, 5).expand(2, 5), torch.zeros(2, 1).expand(2, 5)):
        for ban in bans(operators, scores):
            with pytest.raises(ValueError, match=r"^scores must not be expanded"):
                ban()
        assert not scores.any()
    one = torch.zeros(5).expand(1, 5)  # one row is never beside another
    operators.ban_repeated_ngrams_(torch.tensor([[1, 1]]), one, 2, 2)
    assert one.isinf().sum() == 1


ROWS = torch.zeros(2, 3, dtype=torch.int64)
SCORES = torch.zeros(2, 4)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ((ROWS[0], SCORES, 2, 3), ValueError, r"tokens must be \[rows, length\], not of shape \[3\]\."),
        ((ROWS, SCORES[:1], 2, 3), ValueError, r"scores must be \[2, vocabulary\], not of shape \[1, 4\]\."),
        ((ROWS.float(), SCORES, 2, 3), TypeError, r"tokens must be int64 or int32, not .*float.*\."),
        (
            (ROWS, SCORES.double(), 2, 3),
            TypeError,
            r"scores must be float32, float16 or bfloat16, not .*double|float64",
        ),
        ((ROWS, SCORES, 0, 3), ValueError, r"ngram_size must be 1 or more, not 0\."),
        ((ROWS, SCORES, 2, 4), ValueError, r"length must be 0 to 3, not 4\."),
        ((ROWS, SCORES, 2, -1), ValueError, r"length must be 0 to 3, not -1\."),
    ],
)
def test_bad_arguments(operators: Any, arguments: tuple[Any, ...], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        operators.ban_repeated_ngrams_(*arguments)
    with pytest.raises(error, match=message):
        operators.ban_source_ngrams_(ROWS, *arguments, 1)


@pytest.mark.parametrize(
    ("source", "beams", "error", "message"),
    [
        (
            ROWS,
            2,
            ValueError,
            r"source must be \[rows / beams, length\], not of shape \[2, 3\] for 2 rows of 2 beams\.",
        ),
        (ROWS, 0, ValueError, r"beams must be 1 or more, not 0\."),
        (ROWS.float(), 1, TypeError, r"source must be int64 or int32, not .*float.*\."),
    ],
)
def test_bad_sources(operators: Any, source: Tensor, beams: int, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        operators.ban_source_ngrams_(source, ROWS, SCORES, 2, 3, beams)


@pytest.mark.gpu
@settings(max_examples=300)
@given(case=sizes)
def test_repeated_ngrams_on_cuda(case: dict[str, Any]) -> None:
    generator = torch.Generator().manual_seed(case["seed"])
    tokens = tokens_of(case, case["rows"], case["length"] + case["padding"], generator)
    scores = torch.randn(case["rows"], case["vocabulary"], generator=generator).to(case["dtype"])
    expected = oracle.ban_repeated(tokens, scores, case["n"], case["length"])
    actual = laid_out(scores, case["layout"]).cuda()
    torch.ops.fastgen.ban_repeated_ngrams_(tokens.cuda(), actual, case["n"], case["length"])
    assert torch.equal(actual.cpu(), expected)


@pytest.mark.gpu
@pytest.mark.parametrize("length", [0, 1, 2047, 2048, 2049, 5000])
@pytest.mark.parametrize("n", [1, 3, 70, 2100])
def test_long_rows_on_cuda(n: int, length: int) -> None:
    tokens = torch.randint(0, 3, (16, length + 3), generator=torch.Generator().manual_seed(length))
    source = tokens[::4].flip(1).contiguous()
    for operator, extra in (("ban_repeated_ngrams_", ()), ("ban_source_ngrams_", (4,))):
        first = () if not extra else (source,)
        scores = torch.randn(16, 300)
        actual = scores.cuda()
        getattr(reference, operator)(*first, tokens, scores, n, length, *extra)
        on_device = [tensor.cuda() for tensor in first]
        getattr(torch.ops.fastgen, operator)(*on_device, tokens.cuda(), actual, n, length, *extra)
        assert torch.equal(actual.cpu(), scores)
