"""Settings: environment, configure, and one clear sentence for every mistake."""

from __future__ import annotations

import dataclasses
import threading

import pytest

import fastgen
from fastgen import config

VARIABLES = (
    "FASTGEN_STRICT",
    "FASTGEN_TIER",
    "FASTGEN_HISTORY",
    "FASTGEN_PACKING",
    "FASTGEN_WEIGHTS",
    "FASTGEN_SPECULATE",
    "FASTGEN_PREFIX_CACHE",
    "FASTGEN_NATIVE",
)


@pytest.fixture
def environment(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    for variable in VARIABLES:
        monkeypatch.delenv(variable, raising=False)
    return monkeypatch


def test_defaults(environment: pytest.MonkeyPatch) -> None:
    assert config.from_environment() == config.Config(strict=False, tier="auto", history=32)


@pytest.mark.parametrize(
    ("variable", "text", "option", "value"),
    [
        ("FASTGEN_STRICT", "1", "strict", True),
        ("FASTGEN_STRICT", "True", "strict", True),
        ("FASTGEN_STRICT", "0", "strict", False),
        ("FASTGEN_STRICT", "", "strict", False),
        ("FASTGEN_TIER", "compat", "tier", "compat"),
        ("FASTGEN_TIER", "FAST", "tier", "fast"),
        ("FASTGEN_PACKING", "off", "packing", "off"),
        ("FASTGEN_WEIGHTS", "INT8", "weights", "int8"),
        ("FASTGEN_WEIGHTS", "bf16", "weights", "bf16"),
        ("FASTGEN_SPECULATE", "4", "speculate", 4),
        ("FASTGEN_SPECULATE", "Off", "speculate", "off"),
        ("FASTGEN_HISTORY", "7", "history", 7),
        ("FASTGEN_HISTORY", "0", "history", 0),
        ("FASTGEN_PREFIX_CACHE", "1048576", "prefix_cache", 2**20),
    ],
)
def test_environment(environment: pytest.MonkeyPatch, variable: str, text: str, option: str, value: object) -> None:
    environment.setenv(variable, text)
    assert getattr(config.reset(), option) == value
    assert config.current() == dataclasses.replace(config.Config(), **{option: value})


@pytest.mark.parametrize(
    ("variable", "text", "message"),
    [
        ("FASTGEN_STRICT", "maybe", "FASTGEN_STRICT must be 0 or 1, not 'maybe'."),
        ("FASTGEN_CUDA_GRAPHS", "all", "FASTGEN_CUDA_GRAPHS must be 0 or 1, not 'all'."),
        ("FASTGEN_NATIVE", "1", "FASTGEN_NATIVE must be 0, build or required, or not be set, not '1'."),
        ("FASTGEN_TIER", "faster", "FASTGEN_TIER must be one of auto, fast, compat, stock, not 'faster'."),
        ("FASTGEN_PACKING", "no", "FASTGEN_PACKING must be one of auto, always, off, not 'no'."),
        ("FASTGEN_WEIGHTS", "8", "FASTGEN_WEIGHTS must be one of float32, bf16, int8, not '8'."),
        ("FASTGEN_SPECULATE", "12", "FASTGEN_SPECULATE must be auto, off, or a whole number from 1 to 11, not 12."),
        ("FASTGEN_SPECULATE", "no", "FASTGEN_SPECULATE must be auto, off, or a whole number from 1 to 11, not 'no'."),
        (
            "FASTGEN_CACHE",
            "/tmp/here",
            "FASTGEN_CACHE must be one of auto, kv, x, h, k, v, not '/tmp/here'. "
            "(The folder for compiled libraries is FASTGEN_CACHE_DIR.)",
        ),
        ("FASTGEN_CACHE_THRESHOLD", "some", "FASTGEN_CACHE_THRESHOLD must be a number, not 'some'."),
        (
            "FASTGEN_CACHE_THRESHOLD",
            "-1",
            "FASTGEN_CACHE_THRESHOLD must be at least 0 and less than 1, not -1.0.",
        ),
        ("FASTGEN_HISTORY", "many", "FASTGEN_HISTORY must be a whole number, not 'many'."),
        ("FASTGEN_HISTORY", "-1", "FASTGEN_HISTORY must be 0 or more, not -1."),
    ],
)
def test_environment_mistakes(environment: pytest.MonkeyPatch, variable: str, text: str, message: str) -> None:
    environment.setenv(variable, text)
    with pytest.raises(ValueError) as error:
        config.from_environment()
    assert str(error.value) == message


@pytest.mark.parametrize(("text", "expected"), [("", True), (" ", True), ("1", True), ("0", False), ("off", False)])
def test_what_is_on_by_default_can_be_turned_off(environment: pytest.MonkeyPatch, text: str, expected: bool) -> None:
    environment.setenv("FASTGEN_CUDA_GRAPHS", text)
    environment.setenv("FASTGEN_STRICT", "")
    assert config.from_environment().cuda_graphs is expected and not config.from_environment().strict


def test_where_a_full_batch_pays() -> None:
    assert not config.refill_pays("cpu") and not config.refill_pays("cuda") and config.refill_pays("mps")
    with fastgen.configured(cuda_graphs=False):
        assert not config.refill_pays("cpu") and config.refill_pays("cuda")


def test_configure_changes_what_it_names_only() -> None:
    before = config.current()
    assert fastgen.configure(tier="compat") == dataclasses.replace(before, tier="compat")
    assert fastgen.configure(history=3) == dataclasses.replace(before, tier="compat", history=3)
    assert config.current().history == 3
    assert fastgen.configure() is config.current()


@pytest.mark.parametrize(
    ("options", "kind", "message"),
    [
        ({"strict": 1}, TypeError, "strict must be True or False, not 1."),
        ({"tier": "slow"}, ValueError, "tier must be one of auto, fast, compat, stock, not 'slow'."),
        ({"tier": None}, TypeError, "tier must be one of auto, fast, compat, stock, not None."),
        ({"packing": True}, TypeError, "packing must be one of auto, always, off, not True."),
        ({"speculate": True}, TypeError, "speculate must be auto, off, or a whole number, not True."),
        ({"speculate": 0}, ValueError, "speculate must be auto, off, or a whole number from 1 to 11, not 0."),
        ({"weights": 8}, TypeError, "weights must be one of float32, bf16, int8, not 8."),
        (
            {"weights": "int8", "packing": "off"},
            ValueError,
            "packing must be auto or always with weights='int8', not 'off'.",
        ),
        (
            {"weights": "bf16", "verify": 3},
            ValueError,
            "verify must be 0 with weights='bf16': its outputs may differ from the host's.",
        ),
        ({"cache": "e"}, ValueError, "cache must be one of auto, kv, x, h, k, v, not 'e'."),
        ({"cache_threshold": "0"}, TypeError, "cache_threshold must be a number, not '0'."),
        ({"cache_threshold": 1}, ValueError, "cache_threshold must be at least 0 and less than 1, not 1."),
        ({"cuda_graphs": "yes"}, TypeError, "cuda_graphs must be True or False, not 'yes'."),
        ({"history": "3"}, TypeError, "history must be a whole number, not '3'."),
        ({"history": True}, TypeError, "history must be a whole number, not True."),
        ({"history": -1}, ValueError, "history must be 0 or more, not -1."),
        ({"prefix_cache": "2GiB"}, TypeError, "prefix_cache must be a whole number, not '2GiB'."),
        ({"prefix_cache": -1}, ValueError, "prefix_cache must be 0 or more, not -1."),
        (
            {"beams": 4},
            TypeError,
            "there is no option 'beams': "
            "the options are strict, tier, history, packing, weights, speculate, replay, cache, cache_threshold, "
            "cuda_graphs, foreign_code, prefix_cache, verify.",
        ),
        (
            {"history": 5, "tier": "slow"},
            ValueError,
            "tier must be one of auto, fast, compat, stock, not 'slow'.",
        ),
    ],
)
def test_configure_mistakes_change_nothing(options: dict[str, object], kind: type[Exception], message: str) -> None:
    before = config.current()
    with pytest.raises(kind) as error:
        fastgen.configure(**options)
    assert str(error.value) == message
    assert config.current() is before


def test_a_config_is_frozen() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.current().strict = True  # type: ignore[misc]


def test_settings_of_a_block() -> None:
    before = config.current()
    seen: list[config.Config] = []
    with fastgen.configured(strict=True, tier="compat") as settings:
        assert settings == config.current() == dataclasses.replace(before, strict=True, tier="compat")
        with fastgen.configured(tier="stock"):
            assert config.current() == dataclasses.replace(before, strict=True, tier="stock")
        other = threading.Thread(target=lambda: seen.append(config.current()))
        other.start()
        other.join()
        fastgen.configure(history=7)  # for everybody
        assert config.current() == dataclasses.replace(before, strict=True, tier="compat", history=7)
    assert seen == [before]
    assert config.current() == dataclasses.replace(before, history=7)


def test_settings_that_an_open_block_rules_out() -> None:
    """An error where they are made, and not at each call in the block, which may be another thread's."""
    with fastgen.configured(tier="compat"), fastgen.configured(weights="int8"):
        before = config.current()
        for options in (dict(packing="off"), dict(verify=3)):
            with pytest.raises(ValueError, match=r"with weights='int8'.* A block of fastgen\.configured"):
                fastgen.configure(**options)
            assert config.current() == before
        with pytest.raises(ValueError, match="verify must be 0"), fastgen.configured(verify=3):
            pytest.fail("entered")
        assert fastgen.configure(history=5).history == 5 and config.current().weights == "int8"
    assert fastgen.configure(packing="off").packing == "off"
    with fastgen.configured(packing="auto"), fastgen.configured(weights="int8") as settings:  # by the block around it
        assert (settings.packing, settings.weights) == ("auto", "int8")
    assert config.everywhere("weights") == ["float32"]


@pytest.mark.parametrize("options", [dict(beams=4), dict(tier="faster"), dict(strict="yes")])
def test_mistakes_in_a_block(options: dict[str, object]) -> None:
    before = config.current()
    with pytest.raises((TypeError, ValueError), match=r"beams|tier|strict"), fastgen.configured(**options):
        pytest.fail("entered")
    assert config.current() == before
