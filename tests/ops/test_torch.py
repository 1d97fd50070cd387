"""The operators as torch's own tools see them: checks, compilation, capture, memory."""

from __future__ import annotations

import math
import os
import subprocess
import sys
from typing import Any

import oracle
import pytest
import torch

from fastgen import ops

TOKENS = torch.tensor([[1, 2, 3, 1, 2], [4, 4, 4, 4, 4]])
SOURCE = torch.tensor([[7, 1, 2, 0]])
SCORES = torch.linspace(-1, 1, 20).view(2, 10)
QUERY = torch.linspace(-1, 1, 120).view(6, 4, 1, 5)
KEY = torch.linspace(-1, 2, 210).view(3, 2, 7, 5)
BIAS = torch.linspace(-1, 2, 42).view(3, 1, 2, 7)
CALLS = {
    "ban_repeated_ngrams_": [(TOKENS, SCORES, 2, 5), (TOKENS.int(), SCORES.half(), 1, 3), (TOKENS, SCORES, 9, 0)],
    "ban_source_ngrams_": [(SOURCE, TOKENS, SCORES, 3, 5, 2), (SOURCE.int(), TOKENS, SCORES.bfloat16(), 1, 0, 2)],
    "beam_attention": [(QUERY, KEY, KEY[..., :3], None, 0.5), (QUERY, KEY.mT.contiguous().mT, KEY, BIAS, 0.5)],
    "fingerprint": [(SCORES,), (SCORES.half().t(),)],
    "multinomial": [(SCORES.abs(),), (torch.eye(3, 700),)],
    "packed_linear": [
        (KEY, ops.pack_weight(KEY[0, 0]), 7, None),
        (KEY[0, 0], torch.ones(1, 5, 64), 3, KEY[1, 1, :3, 0]),
    ],
    "path_attention": [
        (QUERY, KEY, KEY[..., :3], torch.arange(12).view(6, 2).int() % 7, None, 0.5, 2),
        (QUERY, KEY.mT.contiguous().mT, KEY, torch.tensor([[4, -1]] * 6).int(), BIAS[..., :5], 0.5, 3),
    ],
    "screened_linear": [
        (KEY, KEY[0, 0], *ops.screen_weight(KEY[0, 0]), None),
        (KEY[0, 0], KEY[0, 1], *ops.screen_weight(KEY[0, 1]), KEY[2, 0, :, 0]),
    ],
    "skinny_linear": [(KEY, [KEY[0, 0], KEY[1, 1]], None), (KEY[0, 0], [KEY[0, 1]], KEY[2, 0, :, 0])],
    "topk_log_softmax": [(SCORES, 3), (SCORES.bfloat16(), 10, torch.tensor([1, -1])), (SCORES, 1, TOKENS)],
}


@pytest.mark.native
@pytest.mark.parametrize(("name", "arguments"), [(name, call) for name, calls in CALLS.items() for call in calls])
def test_opcheck(name: str, arguments: tuple[Any, ...]) -> None:
    operator = getattr(torch.ops.fastgen, name).default
    torch.library.opcheck(operator, tuple(x.clone() if isinstance(x, torch.Tensor) else x for x in arguments))


def step(tokens: torch.Tensor, source: torch.Tensor, logits: torch.Tensor, length: int) -> tuple[torch.Tensor, ...]:
    log_probs = logits.log_softmax(-1)
    ops.ban_repeated_ngrams_(tokens, log_probs, 2, length)
    ops.ban_source_ngrams_(source, tokens, log_probs, 2, length, beams=2)
    return (log_probs + 1, *ops.topk_log_softmax(logits, 4, tokens))


@pytest.mark.native
def test_compiles_whole_and_not_at_every_length() -> None:
    from torch._dynamo.testing import CompileCounter

    counter = CompileCounter()
    compiled = torch.compile(step, fullgraph=True, backend=counter)
    tokens = torch.randint(0, 4, (4, 12), generator=torch.Generator().manual_seed(0))
    source = tokens[::2].clone()
    logits = torch.randn(4, 9, generator=torch.Generator().manual_seed(1))
    for length in range(2, 12):
        actual, expected = (function(tokens, source, logits, length) for function in (compiled, step))
        assert expected[0].isinf().any()
        assert all(torch.equal(a, b) for a, b in zip(actual, expected, strict=True))
    assert counter.frame_count <= 2  # the second time with a symbolic length


@pytest.mark.native
def test_a_length_that_comes_from_data() -> None:
    """Where compiled code may keep it in the graph, it is checked when that runs."""
    import torch._dynamo.config

    def ban(tokens: torch.Tensor, scores: torch.Tensor, length: torch.Tensor) -> torch.Tensor:
        scores = scores.clone()
        ops.ban_repeated_ngrams_(tokens, scores, 2, length.item())
        ops.ban_source_ngrams_(tokens[:1], tokens, scores, 2, length.item(), beams=2)
        return scores

    compiled = torch.compile(ban, fullgraph=True, backend="aot_eager")
    with torch._dynamo.config.patch(capture_scalar_outputs=True):
        for length in (0, 3, 5):
            arguments = (TOKENS, SCORES, torch.tensor(length))
            assert torch.equal(compiled(*arguments), ban(*arguments))
        assert ban(TOKENS, SCORES, torch.tensor(5)).isinf().any()
        with pytest.raises(Exception, match=r"length|u0"):
            compiled(TOKENS, SCORES, torch.tensor(6))


@pytest.mark.native
def test_compiled_scores_that_require_a_gradient() -> None:
    def ban(tokens: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        scores = scores * 2
        ops.ban_repeated_ngrams_(tokens, scores, 2)
        return scores

    with pytest.raises(Exception, match=r"under torch\.no_grad"):
        torch.compile(ban, fullgraph=True, backend="aot_eager")(TOKENS, SCORES.clone().requires_grad_())


@pytest.mark.native
def test_functionalisation_keeps_the_mutation() -> None:
    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    tokens = torch.tensor([[1, 2, 1], [3, 3, 3]])
    logits = torch.randn(2, 9, generator=torch.Generator().manual_seed(1))
    source = tokens[:1].clone()
    actual, expected = (function(tokens, source, logits, 3) for function in (compiled, step))
    assert expected[0].isinf().sum() == 2
    for a, b in zip(actual, expected, strict=True):
        assert torch.equal(a, b)


MEASURE = """
import sys, torch
from fastgen.memory.peak import PeakMemory
from fastgen import ops
torch.set_num_threads(2)
tokens = torch.randint(0, 50, (64, 200))
logits = torch.randn(64, 250_000)
banned = torch.randint(0, 250_000, (64, 20))

def topk(): ops.topk_log_softmax(logits, 16, banned)
def ngrams():
    ops.ban_repeated_ngrams_(tokens, logits, 3)
    ops.ban_source_ngrams_(tokens[::4], tokens, logits, 3, beams=4)
def log_softmax(): logits.log_softmax(-1)

for call in (topk, ngrams, log_softmax):
    tokens.clone(), call(), call()
    with PeakMemory(torch.device("cpu")) as memory:
        call()
    print(memory.bytes)
"""


def test_memory(native: Any) -> None:
    """Neither needs anything of the size of the logits, 64 MB; log_softmax shows that this would be seen."""
    environment = os.environ | {"FASTGEN_NATIVE": "required"}
    run = subprocess.run([sys.executable, "-c", MEASURE], env=environment, capture_output=True, text=True, check=True)
    if "None" in run.stdout:
        pytest.skip("peak memory can't be measured here")
    topk, ngrams, log_softmax = map(int, run.stdout.split())
    assert log_softmax > 60e6
    assert topk < 2e6 and ngrams < 2e6


@pytest.mark.gpu
def test_cuda_graph() -> None:
    tokens = torch.randint(0, 4, (8, 12)).cuda()
    source = tokens[::2].contiguous()
    logits = torch.randn(8, 50_000).cuda()
    banned = tokens.clone()

    def work(scores: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ops.ban_repeated_ngrams_(tokens, scores, 2, 12)
        ops.ban_source_ngrams_(source, tokens, scores, 3, 12, 2)
        return ops.topk_log_softmax(logits, 8, banned)

    scores = logits.clone()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        work(scores.clone())
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outputs = work(scores)
    for _ in range(3):
        tokens.copy_(torch.randint(0, 4, (8, 12)))
        source.copy_(tokens[::2])
        logits.copy_(torch.randn(8, 50_000))
        scores.copy_(logits)
        graph.replay()
        torch.cuda.synchronize()
        oracle.assert_topk(tuple(output.cpu() for output in outputs), logits.cpu(), 8, banned.cpu())
        expected = oracle.ban_repeated(tokens.cpu(), logits.cpu(), 2, 12)
        expected = oracle.ban_source(source.cpu(), tokens.cpu(), expected, 3, 12, 2)
        assert torch.equal(scores.cpu(), expected)
        assert math.isinf(float(scores.min()))
