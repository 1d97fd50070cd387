"""The record of calls, its counters and log, and what the user sees when printing the status."""

from __future__ import annotations

import logging
import subprocess
import sys
import threading
import warnings

import pytest

import fastgen
from fastgen import report
from fastgen.report import Call, HostStatus, Status


def call(tier: str = "fast", reason: str | None = None, model: str = "Tiny", **other: object) -> Call:
    values: dict[str, object] = {"steps": 7, "seconds": 0.5, "cache_bytes": 2048} | other
    return Call("transformers", model, tier, reason, batch=2, beams=4, **values)  # type: ignore[arg-type]


def test_the_ring_forgets_and_the_counters_do_not() -> None:
    fastgen.configure(history=3)
    made = [call(tier, steps=step) for step, tier in enumerate(("fast", "stock", "fast", "compat", "fast"))]
    for one in made:
        report.record(one)
    assert report.calls() == tuple(made[-3:])
    assert report.counters() == {"fast": 3, "compat": 1, "stock": 1}
    fastgen.configure(history=0)
    report.record(call())
    assert report.calls() == ()
    assert report.counters()["fast"] == 4
    report.reset()
    assert report.counters() == {"fast": 0, "compat": 0, "stock": 0}


def test_a_block_forgets_its_own_calls_alone() -> None:
    fastgen.configure(history=3)
    made = [call(steps=step) for step in range(3)]
    for one in made:
        report.record(one)
    with fastgen.configured(history=0):
        report.record(call())
        assert report.calls() == tuple(made)
    with fastgen.configured(history=1):
        report.record(call("compat"))
    assert report.calls() == (*made[1:], call("compat"))
    with fastgen.configured(history=5):
        for one in made:
            report.record(one)
        assert len(report.calls()) == 5
    report.record(call("stock"))
    assert report.calls() == (*made[1:], call("stock"))


def test_an_unknown_tier_is_refused() -> None:
    with pytest.raises(ValueError, match="tier must be one of fast, compat, stock, not 'auto'"):
        report.record(call("auto"))
    assert report.calls() == ()


def test_fallbacks_are_logged_once_per_model_and_reason(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="fastgen")
    for model in ("One", "Two", "One"):
        report.record(call("stock", "synced_gpus is set", model))
        report.record(call("fast", None, model))
    report.record(call("stock", "training mode", "One"))
    report.record(call("compat", "a custom processor", "One"))  # still ours: nothing to tell
    assert [(r.levelname, r.getMessage()) for r in caplog.records] == [
        ("INFO", "One runs stock: synced_gpus is set"),
        ("INFO", "Two runs stock: synced_gpus is set"),
        ("INFO", "One runs stock: training mode"),
    ]


def test_threads_lose_no_call() -> None:
    fastgen.configure(history=5)
    start = threading.Barrier(8)

    def work() -> None:
        start.wait()
        for _ in range(500):
            report.record(call())

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert report.counters()["fast"] == 4000
    assert len(report.calls()) == 5


def test_the_status_is_data_and_a_readable_table() -> None:
    reason = "output_attentions is set, and the attention weights of every beam are " + "very " * 20 + "long"
    calls = (
        call("fast", model="BartForConditionalGeneration", cache_bytes=3 * 2**20),
        call("stock", reason, "T5", steps=None, seconds=None, cache_bytes=None),
        call("compat", "a custom stopping criterion", "T5", cache_bytes=100),
    )
    hosts = (
        HostStatus("transformers", "5.23.0", "accelerated"),
        HostStatus("fairseq", None, "left alone", "SequenceGenerator._generate has other parameters"),
    )
    counters = {"fast": 1, "compat": 1, "stock": 1}
    lines = str(Status("1.2.3", True, hosts, counters, calls)).splitlines()
    assert lines[:6] == [
        "fastgen 1.2.3, enabled",
        "  transformers 5.23.0: accelerated",
        "  fairseq: left alone",
        "    SequenceGenerator._generate has other parameters",
        "operators: not used yet",
        "calls so far: 1 fast, 1 compat, 1 stock",
    ]
    table = lines[6:]
    assert table[0].split() == ["tier", "host", "model", "batch", "beams", "steps", "seconds", "cache"]
    rows = [line.split() for line in table[1:] if line.startswith("  ") and line[2] != " "]
    assert rows == [
        ["fast", "transformers", "BartForConditionalGeneration", *"2 4 7 0.500 3.0 MiB".split()],
        ["stock", "transformers", "T5", *"2 4 - - -".split()],
        ["compat", "transformers", "T5", *"2 4 7 0.500 100 B".split()],
    ]
    assert max(map(len, lines)) <= 100
    why = [line for line in table if line.startswith("      ")]
    assert len(why) == 3  # the long reason takes two lines, the short one its own
    assert " ".join(" ".join(why[:2]).split()) == f"why: {reason}"
    assert why[2].strip() == "why: a custom stopping criterion"


def test_the_status_of_this_process() -> None:
    report.record(call("compat"))
    status = fastgen.status()
    assert status.version == fastgen.__version__
    assert status.calls == (call("compat"),)
    assert status.counters == {"fast": 0, "compat": 1, "stock": 0}
    assert [host.name for host in status.hosts] == ["transformers", "fairseq", "whisper"]
    with fastgen.disabled():
        assert not fastgen.status().enabled
        assert str(fastgen.status()).startswith(f"fastgen {fastgen.__version__}, disabled")
    assert fastgen.status().enabled


def test_packed_weights_are_shown_with_their_memory() -> None:
    status = Status("1.2.3", True, (), {}, (), packed_weights=14, packed_bytes=3 * 2**20)
    assert "packed weights: 14, 3.0 MiB" in str(status).splitlines()
    assert "packed" not in str(Status("1.2.3", True, (), {}, ()))


def test_how_the_operators_run() -> None:
    how = {name: "native (cpu), plain torch (cuda: there is no CUDA toolkit)" for name in ("first", "second")}
    lines = str(Status("1.2.3", True, (), {}, (), operators=how)).splitlines()
    assert max(map(len, lines)) <= 100
    assert " ".join(line.strip() for line in lines[1:-1]) == (
        "operators: first native (cpu), plain torch (cuda: there is no CUDA toolkit), "
        "second native (cpu), plain torch (cuda: there is no CUDA toolkit)"
    )


def test_asking_for_the_status_loads_no_operators() -> None:
    code = "import fastgen, sys; print(fastgen.status()); assert 'torch' not in sys.modules"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "operators: not used yet" in run.stdout


def test_a_hosts_state_is_what_calls_did() -> None:
    assert report.state_of("transformers") == ("ready", "")
    report.record(call("compat"))
    with fastgen.configured(tier="stock"):  # as the user wishes
        report.record(call("stock", "tier='stock' is configured"))
    assert report.state_of("transformers") == ("accelerated", "")
    report.record(call("stock", "of this"))
    report.record(call("stock", "of that"))
    assert report.state_of("transformers") == (
        "partly accelerated",
        "2 of 3 calls were left to transformers, the last because of that",
    )
    assert report.state_of("fairseq") == ("ready", "")
    report.reset()
    report.record(call("stock", "of this"))
    assert report.state_of("transformers") == (
        "NOT accelerated",
        "all calls so far (1) were left to transformers, the last because of this",
    )


def test_a_reason_of_the_hosts_version_is_told_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(report, "_warned", set())
    with pytest.warns(
        RuntimeWarning, match="fastgen leaves transformers .* in calls like this one: its cache is new"
    ) as caught:
        for _ in range(3):
            report.record(call("stock", report.OfThisVersion("its cache is new")))
        report.record(call("stock", "of the call"))
    assert len(caught) == 1


@pytest.mark.parametrize("module", ["fastgen.replay.replayer", "transformers.generation.utils", "torch.nn"])
def test_a_warning_is_of_the_users_line(module: str) -> None:
    there: dict[str, object] = {"__name__": module, "report": report}
    exec("def run(): report.warn('slower than it could be')", there)
    with pytest.warns(RuntimeWarning, match="slower") as caught:
        line = sys._getframe().f_lineno + 1
        there["run"]()  # type: ignore[operator]
    assert [(one.filename, one.lineno) for one in caught] == [(__file__, line)]


def test_a_warning_that_the_user_makes_an_error_loses_nothing(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(report, "_warned", set())
    with warnings.catch_warnings(), caplog.at_level(logging.WARNING, "fastgen"):
        warnings.simplefilter("error")
        report.record(call("stock", report.OfThisVersion("its cache is new")))
    assert len(report.calls()) == 1 and "its cache is new. That works as without fastgen" in caplog.text
