"""The CUDA kernels on a CPU: the sources of csrc/cuda, their threads in turn, against brute force."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import cuda_faults
import emulated_cuda
import oracle
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from ngram_cases import check_repeated, check_source, sizes
from references import reference
from topk_cases import bans_of, cases, logits_of
from topk_cases import laid_out as with_layout

VARIANT = os.environ.get("FASTGEN_TEST_EMULATION", "emulated")
CASES = settings(
    max_examples=15 if VARIANT == "sanitized" else 60, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
SOURCES = ("topk.cu", "ngrams.cu")
not_sanitized = pytest.mark.skipif(VARIANT == "sanitized", reason="the sanitizers are another process's")


@pytest.fixture(autouse=True)
def filled_memory() -> Iterator[None]:
    """What is allocated is full of NaN: an output that no thread writes shows."""
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(before)


@pytest.fixture(params=list(emulated_cuda.ORDERS))
def emulated(request: pytest.FixtureRequest) -> Iterator[Any]:
    """The operators, with threads and blocks in each of the orders."""
    library = emulated_cuda.load(VARIANT)
    library.set(request.param, seed=17)
    before = library.counts()[0]
    yield library
    library.set()
    assert library.counts()[0] > before, "no kernel was launched"


# ---------------------------------------------------------------------------------------------- the operators
@CASES
@given(case=cases)
def test_topk(emulated: Any, case: dict[str, Any]) -> None:
    generator = torch.Generator().manual_seed(case["seed"])
    k = min(case["k"], case["vocabulary"])
    logits = logits_of(case["values"], case["rows"], case["vocabulary"], generator).to(case["dtype"])
    banned = bans_of(case["banned"], logits, k, generator)
    outputs = emulated.topk_log_softmax(with_layout(logits, case["layout"]), k, banned)
    oracle.assert_topk(outputs, logits, k, banned)


@pytest.mark.parametrize(
    ("rows", "vocabulary", "k"),
    [(1, 2, 1), (3, 2, 2), (2, 50_257, 16), (2, 16_385, 128), (1, 256_000, 8), (1, 256_000, 128), (20, 300, 4)],
)
@pytest.mark.parametrize("values", ["normal", "few", "equal", "infinite"])
def test_sizes(emulated: Any, values: str, rows: int, vocabulary: int, k: int) -> None:
    logits = logits_of(values, rows, vocabulary, torch.Generator().manual_seed(k))
    oracle.assert_topk(emulated.topk_log_softmax(logits, k), logits, k)


@CASES
@given(case=sizes)
def test_repeated_ngrams(emulated: Any, case: dict[str, Any]) -> None:
    check_repeated(emulated, case)


@CASES
@given(case=sizes, beams=st.integers(1, 5), source_length=st.integers(0, 40))
def test_source_ngrams(emulated: Any, case: dict[str, Any], beams: int, source_length: int) -> None:
    check_source(emulated, case, beams, source_length)


@pytest.mark.parametrize("length", [1, 2047, 2048, 2049, 5000])
@pytest.mark.parametrize("n", [1, 3, 70, 2100])
def test_long_rows(emulated: Any, n: int, length: int) -> None:
    """Around the sizes of tiles, with prefixes that are longer than what the kernel keeps."""
    tokens = torch.randint(0, 3, (2, length + 3), generator=torch.Generator().manual_seed(length))
    if n > 8 and length > 2 * n:  # something must be found
        tokens[:, length - n : length] = tokens[:, 1 : n + 1]
    scores = torch.zeros(2, 300)
    expected = oracle.ban_repeated(tokens, scores, n, length)
    emulated.ban_repeated_ngrams_(tokens, scores, n, length)
    assert torch.equal(scores, expected)
    emulated.ban_source_ngrams_(tokens, tokens, scores, 1, length, 1)
    assert torch.equal(scores, oracle.ban_source(tokens, tokens, expected, 1, length, 1))


@not_sanitized
def test_many_rows(emulated: Any) -> None:
    """As many as a grid can have, of which some are run; with one more, torch's own operators take them all."""
    logits = torch.randn(65_535, 3, generator=torch.Generator().manual_seed(0))
    rows = [*range(0, 65_535, 4096), 65_534]
    emulated.set(step=4096)
    outputs = emulated.topk_log_softmax(logits, 2)
    oracle.assert_topk(tuple(output[rows] for output in outputs), logits[rows], 2)
    before = emulated.counts()[0]
    more = torch.cat([logits, logits[:1]])
    for actual, expected in zip(emulated.topk_log_softmax(more, 2), reference.topk_log_softmax(more, 2), strict=True):
        torch.testing.assert_close(actual, expected)
    assert emulated.counts()[0] == before
    tokens = torch.randint(0, 4, (70_000, 6), generator=torch.Generator().manual_seed(1))  # no limit of this kernel's
    scores = torch.zeros(70_000, 4)
    rows = [*range(0, 70_000, 4096), 69_999]
    emulated.ban_repeated_ngrams_(tokens, scores, 2, 6)
    assert torch.equal(scores[rows], oracle.ban_repeated(tokens[rows], torch.zeros(len(rows), 4), 2, 6))


def test_the_order_of_threads_changes_nothing() -> None:
    """Not a bit, in rows of several segments with ties."""
    library = emulated_cuda.load(VARIANT)
    logits = logits_of("few", 3, 20_000, torch.Generator().manual_seed(5))
    found = []
    for order, seed in (("forward", 0), ("reversed", 0), ("random", 1), ("random", 2)):
        library.set(order, seed)
        found.append(library.topk_log_softmax(logits, 50))
    library.set()
    for other in found[1:]:
        assert all(torch.equal(one, two) for one, two in zip(found[0], other, strict=True))


# ---------------------------------------------------------------------------------------------- what is caught
@not_sanitized
def test_seeded_faults() -> None:
    """The watch on shared memory or the outputs show each of them, and without the watch some order of threads does."""
    library = emulated_cuda.load("faulty", cuda_faults.FAULTS)
    assert not any(cuda_faults.symptom(library, source) for source in SOURCES)
    missed = []
    for number, fault in enumerate(cuda_faults.FAULTS, 1):
        for checks in (True, False):
            seen = ""
            for order in [] if fault.is_only_watched and not checks else emulated_cuda.ORDERS:
                if not seen:
                    library.set(order, seed=number, fault=number, checks=checks)
                    seen = cuda_faults.symptom(library, fault.source)
            print(f"{fault.source}, {fault.what}, {'watched' if checks else 'unwatched'}: {seen or 'not seen'}")
            missed += [] if seen or (fault.is_only_watched and not checks) else [(fault.what, checks)]
    library.set()
    assert not missed, missed


@not_sanitized
def test_coverage(tmp_path: Path) -> None:
    """Of the lines of the sources that hold code, host half and kernels, by the checks of the seeded faults."""
    if shutil.which("gcov") is None:
        pytest.skip("there is no gcov")
    library = emulated_cuda.load(VARIANT)
    library.set()
    assert not any(cuda_faults.symptom(library, source) for source in SOURCES)
    logits = torch.randn(2, 300)
    for banned in (None, torch.tensor([3, -1, 300])):  # beyond the kernel's k
        oracle.assert_topk(library.topk_log_softmax(logits, 200, banned), logits, 200, banned)
    assert library.topk_log_softmax(torch.zeros(0, 5), 3, None)[0].shape == (0, 3)
    for n in (2, 5):  # also one that is longer than the rows
        library.ban_repeated_ngrams_(torch.zeros(2, 3).int(), torch.zeros(2, 4), n, 3)
    library.dump_coverage(tmp_path)
    for source in SOURCES:
        lines = library.covered(tmp_path, source)
        missed = [number for number, count in lines.items() if count == 0]
        print(f"{source}: {len(lines) - len(missed)} of {len(lines)} lines; not run: {missed or 'none'}")
        assert len(lines) > 50 and len(missed) < 0.05 * len(lines), missed


@pytest.fixture
def sanitizers() -> dict[str, str]:
    """The environment of a process in which the sanitizers' libraries come first: Python isn't built with them."""
    emulated_cuda.build("sanitized", "fastgen_sanitized")
    compiler = emulated_cuda.builder._find_compiler()
    runtimes = [
        subprocess.run([*compiler, f"-print-file-name={name}"], capture_output=True, text=True).stdout.strip()
        for name in ("libasan.so", "libubsan.so")
    ]
    if not all(Path(name).is_absolute() for name in runtimes):
        pytest.skip("the sanitizers' libraries are not installed")
    options = "detect_leaks=0:abort_on_error=1"  # what Python never frees is no leak of ours
    return os.environ | {
        "FASTGEN_TEST_EMULATION": "sanitized",
        "LD_PRELOAD": " ".join(runtimes),
        "ASAN_OPTIONS": options,
        "PYTHONPATH": os.pathsep.join([str(Path(emulated_cuda.__file__).parent), *filter(None, sys.path)]),
    }


@pytest.mark.slow
@not_sanitized
def test_sanitizers(sanitizers: dict[str, str]) -> None:
    """The same tests under the address and undefined-behaviour sanitizers, fewer cases in one order."""
    command = [sys.executable, "-m", "pytest", "-n", "0", "-q", "-p", "no:cacheprovider", __file__, "-k", "forward"]
    run = subprocess.run(command, env=sanitizers, capture_output=True, text=True)
    assert run.returncode == 0, run.stdout + run.stderr
    assert " passed" in run.stdout


@pytest.mark.slow
@not_sanitized
@pytest.mark.parametrize(
    ("name", "count", "extra", "report"),
    [("coordinates", 8, 0, "heap-buffer-overflow"), ("beside", 32, 64, "use-after-poison")],
)
def test_what_sanitizers_end(sanitizers: dict[str, str], name: str, count: int, extra: int, report: str) -> None:
    """Writing beyond a tensor, and beyond a shared variable."""
    code = (
        "import emulated_cuda, fastgen.ops, torch\n"
        "emulated_cuda.load('sanitized')\n"
        f"torch.ops.fastgen_probes.probe({name!r}, (1, 1, 1), (32, 1, 1), {count}, {extra})\n"
    )
    run = subprocess.run([sys.executable, "-c", code], env=sanitizers, capture_output=True, text=True)
    assert run.returncode != 0 and f"AddressSanitizer: {report}" in run.stderr, run.stderr


# ---------------------------------------------------------------------------------------------- the emulator
def probe(
    name: str, block: tuple[int, ...], count: int, extra: int = 0, grid: tuple[int, ...] = (1, 1, 1)
) -> list[int]:
    emulated_cuda.load("emulated")
    return torch.ops.fastgen_probes.probe(name, grid, block, count, extra).tolist()


@not_sanitized
def test_orders() -> None:
    library = emulated_cuda.load("emulated")
    found = {}
    for order in emulated_cuda.ORDERS:
        library.set(order, seed=3)
        found[order] = probe("coordinates", (4, 3, 2), 1 + 24 * 30, grid=(5, 3, 2))[1:]
    library.set()
    assert found["forward"] == list(range(720)) == found["reversed"][::-1] == sorted(found["random"])
    assert found["random"] not in (found["forward"], found["reversed"])


@not_sanitized
def test_what_kernels_may_do() -> None:
    assert probe("reverse", (64, 1, 1), 64, extra=-1) == list(range(63, -1, -1))
    assert probe("counting", (64, 1, 1), 4) == [64, 2**32 - 1, 63, 1]
    assert probe("beside", (64, 1, 1), 64, extra=63) == [1] * 64
    rows = torch.tensor(probe("shuffles", (64, 1, 1), 6 * 64)).view(6, 2, 32)
    lanes = torch.arange(32)
    own = torch.arange(64).view(2, 32) * 10
    within = lanes % 16
    assert torch.equal(rows[0], own[:, 3:4].expand(2, 32)) and torch.equal(rows[1], own[:, lanes ^ 5])
    assert torch.equal(rows[2], own[:, torch.where(within < 2, lanes, lanes - 2)])
    assert torch.equal(rows[3], own[:, torch.where(within > 13, lanes, lanes + 2)])
    votes = [sum(1 << lane for lane in range(32) if (first + lane) % 3 == 0) for first in (0, 32)]
    assert rows[4, :, 0].tolist() == votes and rows[5, :, 0].tolist() == [1, 2]
    assert probe("warp_sum", (32, 1, 1), 32, extra=2) == [sum(range(32))] * 32


@not_sanitized
@pytest.mark.parametrize(
    ("name", "extra", "message"),
    [
        ("reverse", 5, r"kernel reverse, block \(0, 0, 0\): thread 5 never comes to the __syncthreads\(\) of line"),
        ("diverging", 0, r"thread 1 never comes to .* where thread 0 waits: it waits at line"),
        ("without_barrier", 0, r"thread 1: a race: it reads what another thread writes \(values\)"),
        ("beside", 64, r"thread 0: it uses shared memory beyond the end of a variable"),
        ("beside", -1, r"thread 0: it uses shared memory beyond the end of a variable"),
        ("unwritten", 0, r"thread 0: it reads shared memory that nobody has written \(values\)"),
        ("too_much", 0, r"more than 48 KiB of shared memory"),
        ("counting", 49153, r"invalid configuration: more than 48 KiB of shared memory"),
        ("warp_sum", 1, r"a race: it reads what another thread writes \(values\)"),
        ("lonely", 0, r"thread 0 waits for lanes of its warp that never come"),
        ("outside", 0, r"thread 0: a shuffle asks for a lane that is not in the mask"),
    ],
)
def test_what_kernels_may_not_do(name: str, extra: int, message: str) -> None:
    with pytest.raises(RuntimeError, match=message):
        probe(name, (32, 1, 1), 64, extra)
    assert probe("reverse", (64, 1, 1), 64, extra=-1)[0] == 63  # the next kernel runs as ever


@not_sanitized
def test_without_the_watch() -> None:
    """Where accesses are not followed, the guards and what memory is filled with remain."""
    library = emulated_cuda.load("emulated")
    library.set(checks=False)
    for place in (-1, 64):
        with pytest.raises(RuntimeError, match="a thread wrote beside the shared variable values"):
            probe("beside", (32, 1, 1), 32, place)
    assert set(probe("unwritten", (32, 1, 1), 32)) == {-0x3434343434343435}
    library.set("forward", checks=False)
    forward = probe("without_barrier", (32, 1, 1), 32)
    library.set("reversed", checks=False)
    assert probe("without_barrier", (32, 1, 1), 32) != forward
    library.set()


@not_sanitized
@pytest.mark.parametrize(
    ("grid", "block"),
    [((1, 65_536, 1), (1, 1, 1)), ((1, 1, 65_536), (1, 1, 1)), ((0, 1, 1), (1, 1, 1)), ((1, 1, 1), (1025, 1, 1)),
     ((1, 1, 1), (32, 33, 1)), ((1, 1, 1), (1, 1, 65)), ((1, 1, 1), (0, 1, 1))],
)  # fmt: skip
def test_launches_that_a_device_refuses(grid: tuple[int, ...], block: tuple[int, ...]) -> None:
    with pytest.raises(RuntimeError, match="kernel coordinates: invalid configuration"):
        probe("coordinates", block, 8, grid=grid)
