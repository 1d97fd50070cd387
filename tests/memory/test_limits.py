"""How much memory is free, in a container too."""

from __future__ import annotations

from pathlib import Path

import pytest

from fastgen.memory import limits

V1 = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
V2 = ("memory.max", "memory.current", "inactive_file")


def group_of(folder: Path, version: tuple[str, str, str], limit: str, used: int, files: int | None) -> None:
    (folder / version[0]).write_text(f"{limit}\n")
    (folder / version[1]).write_text(f"{used}\n")
    if files is not None:
        (folder / "memory.stat").write_text(f"anon 5\nactive_file 7\n{version[2]} {files}\nfile 9\n")


@pytest.mark.parametrize(
    "limit, used, files, free",
    [
        ("1000", 300, 0, 700),
        ("1000", 900, 600, 700),  # most of it is what was read from files
        ("1000", 900, None, 100),
        ("max", 900, 600, None),
    ],
)
@pytest.mark.parametrize("version", [V1, V2], ids=["v1", "v2"])
def test_a_container(
    version: tuple[str, str, str],
    limit: str,
    used: int,
    files: int | None,
    free: int | None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    machine = limits.free()
    group_of(tmp_path, version, limit, used, files)
    monkeypatch.setattr(limits, "_CONTAINER", [(tmp_path, *version[:2])])
    if free is not None:
        assert limits.free() == free
    elif machine is not None:
        assert limits.free() != 100


def test_files_are_counted_only_where_it_matters(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    group_of(tmp_path, V2, str(2**62), 0, 100)
    monkeypatch.setattr(limits, "_CONTAINER", [(tmp_path, *V2[:2])])
    machine, asked = limits.free(), []
    monkeypatch.setattr(limits, "_given_back", asked.append)
    if machine is not None and machine < 2**62:
        assert limits.free() is not None and not asked
