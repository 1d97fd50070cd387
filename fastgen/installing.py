"""What fastgen is called where packages are installed from: `fastgen` is another project's name there."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterable

DISTRIBUTION = "fastgen-torch"
# Another project that is imported as `fastgen` too; both write into one folder, and the later one wins.
_OTHER = re.compile(r"fastgen-([^-]+)\.dist-info", re.IGNORECASE)
_OURS = "fastgen-check"  # a command that the other project does not have: fastgen had that name before its release


def command(extra: str) -> str:
    """How to install fastgen with an extra, for a message: from a clone, since it has not been released yet."""
    return f"pip install -c constraints.txt -e '.[{extra}]' in a clone of fastgen"


def is_overwritten(package: object) -> bool:
    """Whether the package that is imported as `fastgen` is the other project's, although files of ours lie in it."""
    return not hasattr(package, "status")


def another(path: Iterable[str] | None = None) -> str | None:
    """What to do if the other project is installed too; None if it is not.

    By the names in the folders of `sys.path`: importlib.metadata would take longer than all else of `import fastgen`.
    """
    for folder in sys.path if path is None else path:
        if not isinstance(folder, str):  # Python passes it over, too
            continue
        try:
            names = os.listdir(folder or ".")
        except OSError:  # a zip file, or nothing
            continue
        for name in names:
            found = _OTHER.fullmatch(name)
            if found and not _is_ours(os.path.join(folder, name)):
                return (
                    f"Another project called fastgen (version {found[1]}) is installed beside {DISTRIBUTION}, and each "
                    f"overwrites files of the other: pip uninstall fastgen, then install {DISTRIBUTION} again."
                )
    return None


def _is_ours(folder: str) -> bool:
    try:
        with open(os.path.join(folder, "entry_points.txt"), encoding="utf-8") as file:
            return _OURS in file.read()
    except OSError:
        return False
