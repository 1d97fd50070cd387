"""Replaces attributes of a host, all or none, and puts back exactly what was there."""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any, Final, NamedTuple

from fastgen import locks


class _Missing:
    def __repr__(self) -> str:
        return "MISSING"


MISSING: Final = _Missing()


class SeamMismatch(Exception):
    """The host does not look the way the adapter expects."""


# While an attribute is set and noted; reentrant, as the garbage collector may end somebody's replacement anywhere.
_lock = locks.reentrant_lock()
_all: weakref.WeakSet[PatchSet] = weakref.WeakSet()


class ForeignSeam(SeamMismatch):
    """Somebody has replaced what the adapter would stand for, and fastgen would never call it."""


class _Covered(NamedTuple):
    """A replacement of ours that others had put theirs over when it was to be undone; theirs may call it."""

    owner: Any
    name: str
    original: Any  # raw, from before ours
    ours: Any
    theirs: Any


class PatchSet:
    """Replaced attributes, with the originals to put back.

    Used as a context manager it is a transaction: an exception inside the block undoes all replacements.
    """

    def __init__(self) -> None:
        self._lock = locks.reentrant_lock()
        self._saved: list[tuple[Any, str, Any, Any]] = []  # owner, name, raw original, ours
        self._covered: list[_Covered] = []  # undone but for what others have put over it
        self.fault = ""  # why the replacements were undone, if `give_up` was called
        with _lock:
            _all.add(self)

    def __len__(self) -> int:
        return len(self._saved)

    def replace(self, owner: Any, name: str, value: Any) -> None:
        """Set `owner.name` to `value`, remembering the raw attribute of `owner` itself.

        Where `revert` has left what others put over our replacement, and it is still there, all stays as it is: theirs
        calls ours, or does not, as before.
        """
        with self._lock, _lock:
            if self._cover_of(owner, name) is not None:
                return
            original = vars(owner).get(name, MISSING)
            self._saved.append((owner, name, original, value))  # first: an interrupt may come between the two
            setattr(owner, name, value)

    def stock(self, owner: Any, name: str) -> Any:
        """`owner.name` as it would be without our replacement, and without what others have put over that."""
        with self._lock, _lock:
            covered = self._cover_of(owner, name)
            if covered is None:
                return getattr(owner, name)
            if covered.original is MISSING:
                return getattr(super(owner, owner), name)
            bind = getattr(type(covered.original), "__get__", None)
            return bind(covered.original, None, owner) if bind and isinstance(owner, type) else covered.original

    def _cover_of(self, owner: Any, name: str) -> _Covered | None:
        """Our replacement of this attribute that others have covered, if theirs is still there.

        Where they have taken theirs away, and so brought ours back, ours goes, too.
        """
        found = None
        for each in [each for each in self._covered if each.owner is owner and each.name == name]:
            now = vars(owner).get(name, MISSING)
            if now is each.theirs:
                found = each  # the last one is the deepest
                continue
            self._covered = [other for other in self._covered if other is not each]
            if now is each.ours:
                _put_back(owner, name, each.original)
        return found

    def revert(self) -> tuple[str, ...]:
        """Undo every replacement, the latest first; return the names that other code has set since, which stay.

        An attribute that no longer holds our value belongs to whoever changed it: overwriting it would
        silently remove their patch.
        """
        foreign = []
        with self._lock, _lock:
            self.fault = ""
            while self._saved:  # which an interrupt leaves so that this can be done again
                owner, name, original, ours = self._saved[-1]
                found = vars(owner).get(name, MISSING)
                if found is ours:
                    _put_back(owner, name, original)
                elif found is not original:
                    self._covered.append(_Covered(owner, name, original, ours, found))
                    foreign.append(f"{getattr(owner, '__name__', owner)}.{name}")
                self._saved.pop()
            for each in self._covered:
                self._cover_of(each.owner, each.name)
        return tuple(foreign)

    def give_up(self, fault: str) -> None:
        """Undo every replacement because of a fault that was found only when the host was used."""
        with self._lock:
            self.revert()
            self.fault = fault

    def __enter__(self) -> PatchSet:
        self._lock.acquire()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        try:
            if kind is not None:
                self.revert()
        finally:
            self._lock.release()


def _put_back(owner: Any, name: str, original: Any) -> None:
    if original is MISSING:
        delattr(owner, name)
    else:
        setattr(owner, name, original)


def unpatched(owner: type) -> dict[str, Any]:
    """The attributes of a class as they would be without the replacements of any PatchSet."""
    with _lock:
        saved = [each for patches in _all for each in patches._saved]
        attributes = dict(vars(owner))
    replaced = {(name, id(ours)): original for place, name, original, ours in saved if place is owner}
    for name in {name for name, _ in replaced} & attributes.keys():
        while (key := (name, id(attributes[name]))) in replaced:  # one replacement upon another
            attributes[name] = replaced.pop(key)
    return {name: value for name, value in attributes.items() if value is not MISSING}


def require_own(function: Any, package: str) -> None:
    """Raise ForeignSeam if a function of the host's, which ours is to stand for, is code of somebody else."""
    from fastgen.patching.replaced_code import is_of  # brings torch with it, as the host does

    name, inner = getattr(function, "__qualname__", repr(function)), function
    while inner is not None:
        if not is_of(inner, package, "torch", "fastgen"):
            raise ForeignSeam(
                f"{name} has been replaced by code that is not {package}'s. Import fastgen before it is replaced: then "
                "the replacement wraps fastgen's"
            )
        inner = getattr(inner, "__wrapped__", None)


def require_signature(function: Callable[..., Any], parameters: Sequence[str]) -> None:
    """Raise SeamMismatch unless `function` takes exactly `parameters`, in this order."""
    name = getattr(function, "__qualname__", repr(function))
    try:
        found = list(inspect.signature(function).parameters)
    except (TypeError, ValueError) as error:
        raise SeamMismatch(f"{name} has no signature to check: {error}") from error
    expected = list(parameters)
    if found == expected:
        return
    missing = [parameter for parameter in expected if parameter not in found]
    extra = [parameter for parameter in found if parameter not in expected]
    differences = []
    if missing:
        differences.append(f"{', '.join(missing)} missing")
    if extra:
        differences.append(f"{', '.join(extra)} unexpected")
    if not differences:
        differences.append(f"the order is {', '.join(found)} instead of {', '.join(expected)}")
    raise SeamMismatch(f"{name} has other parameters than expected: {' and '.join(differences)}")
