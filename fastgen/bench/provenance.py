"""What made a result, for those who check it: the command, and the commit of fastgen."""

from __future__ import annotations

import re
import shlex
import subprocess
from collections.abc import Iterable
from pathlib import Path

_ROOT = Path(__file__).resolve().parents[2]


def command(words: Iterable[str]) -> str:
    """The words of a command as a shell takes them, without the folders that files are in: others will read it."""
    return shlex.join(re.sub(r"(^|=)[^=]*/", r"\1", word) for word in words)


def commit(root: Path = _ROOT) -> str | None:
    """The commit of fastgen's checkout, with "-dirty" where files differ from it; None where fastgen is installed."""
    if not (root / ".git").exists():  # a repository of the user's may lie around an installed package
        return None
    words = ["git", "-C", str(root), "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"]
    try:
        return subprocess.run(words, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):  # no git, or the repository is another user's
        return None
