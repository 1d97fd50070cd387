"""Patches: all or nothing, undone exactly, and nobody else's work overwritten."""

from __future__ import annotations

import copy
import functools
import threading
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest

from fastgen.patching.patch_set import MISSING, PatchSet, SeamMismatch, require_own, require_signature, unpatched
from fastgen.patching.redirection import redirected


class Base:
    def inherited(self) -> str:
        return "base"


class Host(Base):
    value = 1

    def method(self) -> str:
        return "stock"

    @staticmethod
    def static() -> str:
        return "stock"

    @classmethod
    def of_class(cls) -> str:
        return "stock"

    @property
    def prop(self) -> str:
        return "stock"


def raw(owner: Any) -> list[tuple[str, int]]:
    """Names in order with the identity of the raw values."""
    return [(name, id(value)) for name, value in vars(owner).items()]


def ours(*_: Any) -> str:
    return "ours"


NAMES = ("value", "method", "static", "of_class", "prop", "inherited", "new")


def test_every_kind_of_attribute_comes_back_bit_for_bit() -> None:
    module = ModuleType("module")
    module.function = ours  # type: ignore[attr-defined]
    before = raw(Host), raw(Base), raw(module)
    patches = PatchSet()
    for name in NAMES:
        patches.replace(Host, name, ours)
    patches.replace(module, "function", len)
    patches.replace(module, "added", len)
    assert len(patches) == len(NAMES) + 2
    assert Host().inherited() == "ours"
    assert vars(Host)["static"] is ours
    assert vars(module)["added"] is len
    assert patches.revert() == ()
    assert (raw(Host), raw(Base), raw(module)) == before
    assert Host.static() == Host.of_class() == Host().prop == Host().method() == "stock"


def test_layers_on_one_attribute_are_undone_in_reverse() -> None:
    before = raw(Host)
    patches = PatchSet()
    patches.replace(Host, "method", ours)
    patches.replace(Host, "method", len)
    patches.replace(Host, "new", ours)
    patches.replace(Host, "new", len)
    patches.revert()
    assert raw(Host) == before


def test_attributes_without_any_replacement() -> None:
    """In whichever order sets are looked at; what others have set is theirs and stays."""
    before, sets = dict(vars(Host)), [PatchSet(), PatchSet(), PatchSet()]
    assert unpatched(Host) == before
    sets[0].replace(Host, "method", ours)
    for patches in sets[1:]:
        patches.replace(Host, "method", functools.partial(vars(Host)["method"]))
    sets[1].replace(Host, "static", staticmethod(ours))
    sets[2].replace(Host, "new", ours)
    assert unpatched(Host) == before and list(unpatched(Host)) == list(before)
    with pytest.MonkeyPatch.context() as users:
        users.setattr(Host, "method", len)
        assert unpatched(Host) == {**before, "method": len}
    for patches in reversed(sets):
        patches.revert()
        assert unpatched(Host) == before
    assert dict(vars(Host)) == before


def test_attributes_while_another_thread_replaces_them() -> None:
    before, stops = dict(vars(Host)), threading.Event()

    def replace() -> None:
        while not stops.is_set():
            patches = PatchSet()
            patches.replace(Host, "method", ours)
            patches.revert()

    thread = threading.Thread(target=replace)
    thread.start()
    try:
        assert all(unpatched(Host) == before for _ in range(20_000))
    finally:
        stops.set()
        thread.join()


def test_revert_twice_does_nothing_more() -> None:
    patches = PatchSet()
    patches.replace(Host, "new", ours)
    patches.revert()
    Host.new = "the user's"  # type: ignore[attr-defined]
    try:
        assert patches.revert() == ()
        assert vars(Host)["new"] == "the user's"
    finally:
        del Host.new  # type: ignore[attr-defined]


def test_what_others_set_since_is_left_and_named() -> None:
    before = raw(Host)
    stock = vars(Host)["method"]
    patches = PatchSet()
    patches.replace(Host, "method", ours)
    patches.replace(Host, "value", 2)
    Host.method = theirs = lambda self: "theirs"  # type: ignore[method-assign, misc, assignment]
    try:
        assert patches.revert() == ("Host.method",)
        assert vars(Host)["method"] is theirs
        assert Host.value == 1
    finally:
        Host.method = stock  # type: ignore[method-assign]
    assert raw(Host) == before


@pytest.mark.parametrize("error", [SeamMismatch("no such seam"), KeyboardInterrupt()])
def test_an_error_while_installing_leaves_nothing(error: BaseException) -> None:
    before = raw(Host)
    patches = PatchSet()
    with pytest.raises(type(error)), patches:
        patches.replace(Host, "method", ours)
        patches.replace(Host, "new", ours)
        raise error
    assert raw(Host) == before
    assert len(patches) == 0


def test_an_owner_that_refuses_leaves_nothing() -> None:
    before = raw(Host)
    with pytest.raises(TypeError), PatchSet() as patches:
        patches.replace(Host, "method", ours)
        patches.replace(int, "bit_length", ours)
    assert raw(Host) == before


def test_a_block_that_succeeds_stays() -> None:
    patches = PatchSet()
    with patches:
        patches.replace(Host, "method", ours)
    try:
        assert Host().method() == "ours"
    finally:
        patches.revert()
    assert Host().method() == "stock"


def test_another_thread_waits_for_a_whole_installation() -> None:
    patches = PatchSet()
    reverted: list[tuple[str, ...]] = []
    other = threading.Thread(target=lambda: reverted.append(patches.revert()))
    before = raw(Host)
    with patches:
        patches.replace(Host, "method", ours)
        other.start()
        other.join(0.1)
        assert other.is_alive()
        patches.replace(Host, "value", 2)
    other.join(10)
    assert reverted == [()]
    assert raw(Host) == before


def test_missing_says_what_it_is() -> None:
    assert repr(MISSING) == "MISSING"


def seam(self: Any, input_ids: Any, *, scorer: Any = None, **kwargs: Any) -> None: ...


@functools.wraps(seam)
def decorated(*args: Any, **kwargs: Any) -> None: ...


@pytest.mark.parametrize("function", [seam, decorated])
def test_the_right_signature_passes(function: Callable[..., Any]) -> None:
    require_signature(function, ["self", "input_ids", "scorer", "kwargs"])


@pytest.mark.parametrize(
    ("expected", "message"),
    [
        (["self", "input_ids", "kwargs"], "scorer unexpected"),
        (["self", "input_ids", "scorer", "cache", "kwargs"], "cache missing"),
        (["self", "ids", "scorer", "kwargs"], "ids missing and input_ids unexpected"),
        (
            ["input_ids", "self", "scorer", "kwargs"],
            "the order is self, input_ids, scorer, kwargs instead of input_ids, self, scorer, kwargs",
        ),
    ],
)
def test_a_wrong_signature_is_named(expected: list[str], message: str) -> None:
    with pytest.raises(SeamMismatch) as error:
        require_signature(seam, expected)
    assert str(error.value) == f"seam has other parameters than expected: {message}"


def test_code_of_somebody_else_is_a_mismatch() -> None:
    require_own(copy.deepcopy, "copy")

    @functools.wraps(copy.deepcopy)
    def wrapper(*args: Any) -> Any:
        return copy.deepcopy(*args)

    with pytest.raises(SeamMismatch, match=r"^deepcopy has been replaced by code that is not copy's\. Import"):
        require_own(wrapper, "copy")


@pytest.mark.parametrize("fault", ["missing", "wrapper", "body"])
def test_a_redirection_that_fails_leaves_nothing(fault: str) -> None:
    def broken(function: Any) -> Any:
        raise KeyboardInterrupt

    wrappers: dict[tuple[Any, str], Any] = {(Host, "method"): lambda function: ours}
    if fault != "body":
        wrappers[Host, "nothing" if fault == "missing" else "static"] = broken
    before = raw(Host)
    with pytest.raises((AttributeError, KeyboardInterrupt)), redirected(wrappers):
        raise KeyboardInterrupt
    assert raw(Host) == before
    with redirected({(Host, "method"): lambda function: ours}):
        with redirected({(Host, "method"): broken}):  # it is wrapped already
            assert Host.method is ours
        assert Host.method is ours
    assert raw(Host) == before


def test_no_signature_is_a_mismatch_too() -> None:
    with pytest.raises(SeamMismatch, match="has no signature to check"):
        require_signature(type, ["name"])


def test_given_up_for_what_was_found_later() -> None:
    before, patches = raw(Host), PatchSet()
    patches.replace(Host, "method", ours)
    assert not patches.fault
    patches.give_up("it has no name")
    assert patches.fault == "it has no name" and raw(Host) == before
    patches.revert()  # as before the next try
    assert not patches.fault
