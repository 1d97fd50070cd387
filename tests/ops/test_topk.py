"""topk_log_softmax against brute force."""

from __future__ import annotations

import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import oracle
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from references import reference
from topk_cases import bans_of, cases, laid_out, logits_of
from torch import Tensor

CAPABILITY = "FASTGEN_TEST_CAPABILITY"
EXAMPLES = 300 if CAPABILITY in os.environ else 1000
CASES = settings(max_examples=EXAMPLES, suppress_health_check=[HealthCheck.function_scoped_fixture])


@CASES
@given(case=cases)
def test_topk(operators: Any, case: dict[str, Any]) -> None:
    generator = torch.Generator().manual_seed(case["seed"])
    k = min(case["k"], case["vocabulary"])
    logits = logits_of(case["values"], case["rows"], case["vocabulary"], generator).to(case["dtype"])
    banned = bans_of(case["banned"], logits, k, generator)
    outputs = operators.topk_log_softmax(laid_out(logits, case["layout"]), k, banned)
    oracle.assert_topk(outputs, logits, k, banned)


@pytest.mark.parametrize(
    ("rows", "vocabulary", "k"),
    [
        *[(1, 2, 1), (1, 2, 2), (3, 256_000, 8), (2, 50_257, 16), (1, 250_000, 130), (1, 70_000, 70_000)],
        *[(512, 300, 4), (20, 32_128, 801), (3, 151_936, 2001)],  # the last two: of 400 and of 1,000 beams
    ],
)
@pytest.mark.parametrize("values", ["normal", "few"])
def test_sizes(operators: Any, values: str, rows: int, vocabulary: int, k: int) -> None:
    logits = logits_of(values, rows, vocabulary, torch.Generator().manual_seed(k))
    oracle.assert_topk(operators.topk_log_softmax(logits, k), logits, k)


@pytest.mark.parametrize(("rows", "vocabulary", "k"), [(512, 32_000, 16), (64, 256_000, 9)])
@pytest.mark.parametrize("values", ["normal", "few", "special"])
def test_large_batches(native: Any, values: str, rows: int, vocabulary: int, k: int) -> None:
    generator = torch.Generator().manual_seed(rows)
    logits = logits_of(values, rows, vocabulary, generator)
    banned = bans_of("rows", logits, k, generator)
    for actual, expected in zip(
        native.topk_log_softmax(logits, k, banned), reference.topk_log_softmax(logits, k, banned), strict=True
    ):
        torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5, equal_nan=True)


@pytest.mark.parametrize("banned", [None, "shared", "rows", "best"])
@pytest.mark.parametrize("values", ["normal", "few", "sorted", "special", "infinite"])
@pytest.mark.parametrize("rows", [1, 2])
def test_rows_are_shared_by_threads(native: Any, threads: Any, rows: int, values: str, banned: str | None) -> None:
    generator = torch.Generator().manual_seed(rows)
    logits = logits_of(values, rows, 140_001, generator)
    bans = bans_of(banned, logits, 9, generator)
    expected = reference.topk_log_softmax(logits, 9, bans)
    for number in (2, 3, 5):
        threads(number)
        log_probs, tokens, log_sum_exp = native.topk_log_softmax(logits, 9, bans)
        assert torch.equal(tokens, expected[1])
        torch.testing.assert_close(log_probs, expected[0], equal_nan=True)
        torch.testing.assert_close(log_sum_exp, expected[2], equal_nan=True)


def test_rows_of_negative_infinity_and_of_nan(operators: Any) -> None:
    nan, inf = math.nan, math.inf
    logits = torch.tensor(
        [[-inf, -inf, -inf], [nan, 2.0, -inf], [nan, nan, nan], [-inf, 3.0, -inf], [inf, 1.0, inf], [-0.0, 0.0, -0.0]]
    )
    log_probs, tokens, log_sum_exp = operators.topk_log_softmax(logits, 2)
    assert tokens.tolist() == [[0, 1], [1, 0], [0, 1], [1, 0], [0, 2], [0, 1]]
    assert log_sum_exp.tolist()[::3] == [-inf, 3.0] and log_sum_exp[4] == inf
    assert log_sum_exp[1:3].isnan().all()
    assert log_probs[:3].isnan().all()
    assert log_probs[3].tolist() == [0.0, -inf]
    assert log_probs[4].isnan().all()  # inf - inf, as in log_softmax
    assert log_probs[5].tolist() == pytest.approx([-math.log(3)] * 2)


@pytest.mark.parametrize("size", [1e17, -1e17, 3e38])
def test_large_logits_keep_their_distance(operators: Any, size: float) -> None:
    """Beside them the logarithm of the sum is lost in the log-sum-exp, but not in the log-probabilities."""
    logits = torch.tensor([[size, -3.3e38, size]])
    log_probs, tokens, log_sum_exp = operators.topk_log_softmax(logits, 2)
    assert tokens.tolist() == [[0, 2]] and log_sum_exp.tolist() == [logits[0, 0]]
    assert log_probs[0].tolist() == pytest.approx([-math.log(2)] * 2)
    torch.testing.assert_close(log_probs, logits.log_softmax(-1)[:, [0, 2]])


def test_banned_tokens_count_in_the_sum_only(operators: Any) -> None:
    logits = torch.tensor([[1.0, 4.0, 2.0, 3.0]])
    log_probs, tokens, log_sum_exp = operators.topk_log_softmax(logits, 3, torch.tensor([-1, 1, 3, 1, 77]))
    assert tokens.tolist() == [[2, 0, 1]]
    expected = logits.log_softmax(-1)[0]
    torch.testing.assert_close(log_sum_exp, logits.logsumexp(-1))
    torch.testing.assert_close(log_probs[0], torch.stack([expected[2], expected[0], torch.tensor(-math.inf)]))


def test_the_exponential_is_accurate(native: Any) -> None:
    """log(e^0 + e^x) - 0 shows e^x where it is not lost beside 1; the bulk's sum shows all of its range."""
    x = torch.linspace(-86.5, 0, 100_000)
    for first in range(0, len(x) - 4000, 4000):  # each slice beside a maximum of its own
        row = x[None, first : first + 4000]
        exact = row.double().logsumexp(-1)
        error = (native.topk_log_softmax(row, 1)[2].double() - exact).abs()
        assert float(error / exact.abs().clamp(min=1)) < 2e-7


def test_nothing_to_do(operators: Any) -> None:
    log_probs, tokens, log_sum_exp = operators.topk_log_softmax(torch.zeros(0, 5), 3)
    assert log_probs.shape == tokens.shape == (0, 3) and log_sum_exp.shape == (0,)
    empty = torch.zeros(0, dtype=torch.int64)
    oracle.assert_topk(operators.topk_log_softmax(torch.ones(2, 5), 3, empty), torch.ones(2, 5), 3)


LOGITS = torch.zeros(2, 4)


@pytest.mark.parametrize(
    ("logits", "k", "banned", "error", "message"),
    [
        (LOGITS[0], 1, None, ValueError, r"logits must be \[rows, vocabulary\], not of shape \[4\]\."),
        (LOGITS.double(), 1, None, TypeError, r"logits must be float32, float16 or bfloat16, not .*\."),
        (LOGITS, 0, None, ValueError, r"k must be 1 to 4, not 0\."),
        (LOGITS, 5, None, ValueError, r"k must be 1 to 4, not 5\."),
        (LOGITS[:, :0], 1, None, ValueError, r"k must be 1 to 0, not 1\."),
        (LOGITS, 1, torch.zeros(3, 2).long(), ValueError, r"banned must be \[width\] or \[2, width\], not of"),
        (LOGITS, 1, torch.zeros(3), TypeError, r"banned must be int64, not .*float.*\."),
    ],
)
def test_bad_arguments(
    operators: Any, logits: Tensor, k: int, banned: Tensor | None, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        operators.topk_log_softmax(logits, k, banned)


@pytest.mark.native
@pytest.mark.skipif(CAPABILITY not in os.environ, reason="runs inside test_other_instruction_sets")
def test_the_capability_is_the_one_asked_for() -> None:
    assert torch.backends.cpu.get_cpu_capability() == os.environ[CAPABILITY].upper()


@pytest.mark.skipif(CAPABILITY in os.environ, reason="would start itself")
@pytest.mark.parametrize("capability", ["avx2", "default"])
def test_other_instruction_sets(native: Any, capability: str) -> None:
    """The same tests, and those of attention, once more with what torch would use on an older processor."""
    own = torch.backends.cpu.get_cpu_capability()
    if own not in ("AVX512", "AVX2") or own == capability.upper():
        pytest.skip(f"this processor's capability is {own}")
    here = Path(__file__)
    files = [
        str(here),
        *(str(here.with_name(f"test_{name}.py")) for name in ("attention", "path_attention", "products")),
    ]
    command = [sys.executable, "-m", "pytest", "-n", "0", "-q", "-m", "native", *files]
    environment = os.environ | {"ATEN_CPU_CAPABILITY": capability, CAPABILITY: capability, "FASTGEN_NATIVE": "required"}
    run = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert run.returncode == 0, run.stdout + run.stderr
    assert " passed" in run.stdout


@pytest.mark.gpu
@settings(max_examples=300)
@given(case=cases)
def test_topk_on_cuda(case: dict[str, Any]) -> None:
    generator = torch.Generator().manual_seed(case["seed"])
    k = min(case["k"], case["vocabulary"])
    logits = logits_of(case["values"], case["rows"], case["vocabulary"], generator).to(case["dtype"])
    banned = bans_of(case["banned"], logits, k, generator)
    bans = None if banned is None else banned.cuda()
    outputs = torch.ops.fastgen.topk_log_softmax(laid_out(logits.cuda(), case["layout"]), k, bans)
    oracle.assert_topk(tuple(output.cpu() for output in outputs), logits, k, banned)


@pytest.mark.gpu
@pytest.mark.parametrize("vocabulary", [32_000, 50_257, 256_000, 1_000_000])
@pytest.mark.parametrize("k", [1, 16, 128, 129])
def test_sizes_on_cuda(vocabulary: int, k: int) -> None:
    for values in ("normal", "few", "equal"):
        logits = logits_of(values, 7, vocabulary, torch.Generator().manual_seed(k))
        expected = reference.topk_log_softmax(logits, k)
        actual = torch.ops.fastgen.topk_log_softmax(logits.cuda(), k)
        assert torch.equal(actual[1].cpu(), expected[1])
        torch.testing.assert_close(actual[0].cpu(), expected[0])
        torch.testing.assert_close(actual[2].cpu(), expected[2])
