"""What all tests share: the data beside the repository, and a clean slate for each test."""

from __future__ import annotations

import logging
import os
import sys
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

# Before torch is imported: tiny models lose time with more threads, and test processes share the cores.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# No test may depend on, or wait for, a download.
os.environ.setdefault("HF_HUB_OFFLINE", "1")

# Ray's nodes in tests share a machine with other tests: that one is slow to answer, or that others fill the memory, is
# no reason to give it up, and its workers are no less urgent.
os.environ.setdefault("RAY_BACKEND_LOG_LEVEL", "fatal")
os.environ.setdefault("RAY_health_check_timeout_ms", "60000")
os.environ.setdefault("RAY_memory_monitor_refresh_ms", "0")
os.environ.setdefault("RAY_worker_niceness", "0")

# What tests share; not tests/ itself, whose folders would pass for packages of their names.
sys.path.insert(0, str(Path(__file__).parent / "kit"))

import hypothesis
import pytest

import fastgen
from fastgen import config, report

ROOT = Path(__file__).resolve().parent.parent

hypothesis.settings.register_profile("repeatable", derandomize=True, deadline=None)
hypothesis.settings.load_profile("repeatable")


@pytest.fixture
def rounded_weights() -> Iterator[None]:
    """Weights can be rounded here; fastgen keeps nothing from before, and nothing for later."""
    pytest.importorskip("torch", reason="fastgen multiplies with torch")
    from fastgen.layers import quantized

    if (why := quantized.unavailable(quantized.multiply_rows)) is not None:
        pytest.skip(why)
    fastgen.release()
    yield
    fastgen.release()


@pytest.fixture
def own_threads() -> Iterator[None]:
    """Whisper's alignment of words is compiled by numba, whose threads are OpenMP's: it changes how many torch uses."""
    import torch

    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("drawn")
    group.addoption("--one-in", type=int, default=1, metavar="N", help="run about one in N of the tests, a case each")
    group.addoption("--slow-one-in", type=int, default=1, metavar="N", help="of those marked slow, one in N")
    group.addoption("--drawn-by", default="0", metavar="SEED", help="the seed that draws them")
    group.addoption(
        "--features", type=Path, metavar="FILE", help="run the tests of features, and note what came of them"
    )


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("--features"):
        from features import Recorder

        config.pluginmanager.register(Recorder(config.getoption("--features")))


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """With --one-in N or --slow-one-in N, leave out all but the drawn tests, and those marked `always`."""

    def is_drawn(item: pytest.Item) -> bool:
        if item.get_closest_marker("always"):
            return True
        slow = config.getoption("--slow-one-in") if item.get_closest_marker("slow") else 1
        part = config.getoption("--one-in")
        number = zlib.crc32(f"{config.getoption('--drawn-by')} {item.nodeid}".encode())
        return number % (part * slow) == 0

    drawn, others = [], []
    for item in items:
        (drawn if is_drawn(item) else others).append(item)
    if others:
        config.hook.pytest_deselected(items=others)
        items[:] = drawn


@pytest.fixture(autouse=True)
def clean_slate() -> Iterator[None]:
    """Settings from the environment, no calls on record; a test's own changes end with it."""
    config.reset()
    report.reset()
    yield
    fastgen.enable()
    config.reset()
    report.reset()
    logging.disable(logging.NOTSET)  # which some folders' tests, and benchmarks' runners, set to something else
    if (ray := sys.modules.get("ray")) is not None:
        ray.shutdown()  # or the next test would use that cluster, whatever it asks for


@pytest.fixture(scope="session")
def shared() -> Path:
    """The folder with real data and models: FASTGEN_SHARED, or `shared` beside the repository."""
    folder = Path(os.environ.get("FASTGEN_SHARED") or ROOT.parent / "shared")
    if not (folder / "data").is_dir():
        pytest.skip(f"needs the shared data: there is no {folder / 'data'} (set FASTGEN_SHARED)")
    return folder


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("gpu") is not None:
        import torch

        if not torch.cuda.is_available():
            pytest.skip("needs a CUDA device")


@pytest.fixture(params=["tape", "graph"])
def recording(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Every step is recorded and replayed, by a tape and as a CUDA graph does; nothing is known of calls before."""
    from emulated_graph import Graph

    from fastgen.replay import replayer, statistics, store
    from fastgen.replay.tape import Tape

    recording = {"tape": Tape, "graph": Graph}[request.param]
    monkeypatch.setitem(replayer.BACKENDS, "cpu", recording)
    fastgen.configure(replay="always")
    statistics.release()
    yield recording
    fastgen.configure(replay="off")
    statistics.release()
    store.release()
