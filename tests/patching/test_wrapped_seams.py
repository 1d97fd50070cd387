"""Functions of others that wrap ours, as those of another library that was imported later: the switch goes beneath."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest

pytest.importorskip("torch", reason="the hosts need torch")

import fastgen
from fastgen import report
from fastgen.patching.patch_set import PatchSet


class Seam(NamedTuple):
    host: str
    owner: Any
    name: str
    call: Callable[[], object]


def _of_transformers(name: str) -> Seam:
    pytest.importorskip("transformers")
    import zoo
    from transformers import GenerationMixin

    beams = 1 if name == "_sample" else 3
    model, inputs = zoo.load("llama"), zoo.inputs_for("llama")
    options = dict(num_beams=beams, max_new_tokens=5, do_sample=False)
    return Seam("transformers", GenerationMixin, name, lambda: model.generate(**inputs, **options))


def _of_fairseq(name: str) -> Seam:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        pytest.importorskip("fairseq", exc_type=ImportError)
    import fairseq_models
    from fairseq.sequence_generator import SequenceGenerator

    return Seam(
        "fairseq", SequenceGenerator, name, lambda: fairseq_models.generate("post-norm", fairseq_models.batch())
    )


def _of_whisper(name: str) -> Seam:
    whisper = pytest.importorskip("whisper")
    import whisper_kit

    model = whisper_kit.tiny()
    call = lambda: whisper_kit.decode(model, whisper_kit.SOUND[:1], beam_size=2)  # noqa: E731
    return Seam("whisper", whisper.decoding.PyTorchInference, name, call)


SEAMS = [
    pytest.param(_of_transformers, "_beam_search", id="transformers-beams"),
    pytest.param(_of_transformers, "_sample", id="transformers-sample"),
    pytest.param(_of_transformers, "generate", id="transformers-generate"),
    pytest.param(_of_fairseq, "_generate", id="fairseq"),
    pytest.param(_of_whisper, "__init__", id="whisper"),
]


def hosts_called(seam: Seam) -> list[str]:
    """The hosts of the calls that fastgen has recorded while the seam's call ran."""
    report.reset()
    seam.call()
    return [call.host for call in report.calls()]


def state_of(seam: Seam) -> str:
    return next(host.state for host in fastgen.status().hosts if host.name == seam.host)


@pytest.mark.parametrize("make, name", SEAMS)
def test_the_switch_goes_beneath(make: Callable[[str], Seam], name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Off means off beneath a wrapper, on means on again, and only the first time somebody is told of the wrapper."""
    seam = make(name)
    with fastgen.disabled():
        stock = vars(seam.owner)[name]
    ours, wrapped = vars(seam.owner)[name], []

    def theirs(*args: Any, **options: Any) -> Any:  # it keeps neither the signature nor `__wrapped__`
        wrapped.append(name)
        return ours(*args, **options)

    assert hosts_called(seam) == [seam.host]
    with monkeypatch.context() as others:
        others.setattr(seam.owner, name, theirs)
        assert hosts_called(seam) == [seam.host] and wrapped
        told = f"{name} as it is: something else has replaced it since"
        with pytest.warns(RuntimeWarning, match=told), fastgen.disabled():
            assert hosts_called(seam) == []
        with warnings.catch_warnings():
            warnings.simplefilter("error", RuntimeWarning)
            for _ in range(2):
                assert vars(seam.owner)[name] is theirs and hosts_called(seam) == [seam.host]
                assert state_of(seam) == "accelerated"
                with fastgen.disabled():
                    assert vars(seam.owner)[name] is theirs and hosts_called(seam) == []
    assert vars(seam.owner)[name] is ours and hosts_called(seam) == [seam.host]
    with fastgen.disabled():
        assert vars(seam.owner)[name] is stock and hosts_called(seam) == []
    assert vars(seam.owner)[name] is not stock and hosts_called(seam) == [seam.host]


# ---------------------------------------------------------------------------------------------- the patches alone
class Base:
    def inherited(self) -> str:
        return "base"


class Host(Base):
    def method(self) -> str:
        return "stock"

    @staticmethod
    def static() -> str:
        return "stock"


def ours(*_: Any) -> str:
    return "ours"


@pytest.mark.parametrize("name", ["method", "static", "inherited"])
@pytest.mark.parametrize("left_while_off", [True, False])
def test_a_wrapper_that_comes_and_goes(name: str, left_while_off: bool) -> None:
    before, patches = dict(vars(Host)), PatchSet()
    stock = getattr(Host, name)
    patches.replace(Host, name, ours)
    wrapper = staticmethod(lambda *_: "theirs")
    setattr(Host, name, wrapper)
    assert patches.revert() == (f"Host.{name}",)
    assert vars(Host)[name] is wrapper and patches.stock(Host, name) is stock
    if not left_while_off:
        patches.replace(Host, name, len)
        assert vars(Host)[name] is wrapper and patches.revert() == (), "what is covered stays"
        assert patches.stock(Host, name) is stock
    setattr(Host, name, ours)  # as whoever takes a wrapper away puts back what was there
    if left_while_off:
        assert patches.stock(Host, name) is stock
    else:
        patches.revert()
    assert dict(vars(Host)) == before and list(vars(Host)) == list(before)
    patches.replace(Host, name, len)
    assert vars(Host)[name] is len and patches.revert() == ()
    assert dict(vars(Host)) == before


def test_another_wrapper_in_the_place_of_a_known_one() -> None:
    """It stands for the host's function now, as one that was there from the beginning does."""
    stock, patches = Host.method, PatchSet()
    patches.replace(Host, "method", ours)
    try:
        Host.method = lambda self: "theirs"  # type: ignore[method-assign]
        patches.revert()
        Host.method = other = lambda self: "other"  # type: ignore[method-assign, misc, assignment]
        assert patches.stock(Host, "method") is other
        patches.replace(Host, "method", len)
        assert patches.revert() == () and vars(Host)["method"] is other
    finally:
        Host.method = stock  # type: ignore[method-assign]
