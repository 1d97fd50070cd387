"""Corpora cut into blocks: every line in one of them, and each read without the others."""

from __future__ import annotations

import dataclasses
import functools
import gzip
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("ray", reason="Ray is not installed: pip install -c constraints.txt -e '.[ray]'")

import fsspec
import pyarrow
import pyarrow.fs
import pyarrow.parquet
from hypothesis import given, settings
from hypothesis import strategies as st

from fastgen.distributed import blocks
from fastgen.distributed.parts import Parts
from fastgen.distributed.placement import Node, Placement, placement
from fastgen.pipeline.errors import InputError
from fastgen.pipeline.transformers import failures, records


def _read(path: Path | str, window: int, form: str | None = None, text_field: str = "text") -> list[records.Record]:
    files = blocks.sources(str(path), form)
    corpus = blocks.numbered(files, [blocks.cut(file, window) for file in files])
    assert [block.number for block in corpus] == list(range(len(corpus)))
    found = [list(blocks.read(block, text_field)) for block in reversed(corpus)]
    assert [len(one) for one in found] == [block.count for block in reversed(corpus)]
    return [record for part in reversed(found) for record in part]


@settings(max_examples=200, deadline=None)
@given(data=st.lists(st.sampled_from([b"a", b"bc\r", b"", b"\xff", b"\xc3\xa9"]), max_size=12), ends=st.booleans())
@pytest.mark.parametrize("window", (1, 3))
def test_blocks_hold_the_records_that_are_read_at_once(
    tmp_path_factory: pytest.TempPathFactory, data: list[bytes], ends: bool, window: int
) -> None:
    path = tmp_path_factory.mktemp("blocks") / "in.txt"
    path.write_bytes(b"\n".join(data) + b"\n" * (ends and bool(data)))
    assert _read(path, window) == list(records.read(path, records.TEXT))


def test_places_are_found_whatever_the_chunks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "in.txt"
    path.write_text("".join(f"{'x' * (i % 7)}{i}\n" for i in range(100)))
    for chunk in (1, 5, 64):
        monkeypatch.setattr(blocks, "_CHUNK", chunk)
        assert [record.text for record in _read(path, 8)] == path.read_text().split("\n")[:-1]


def test_files_of_a_folder_follow_each_other_and_are_named(tmp_path: Path) -> None:
    (tmp_path / "b.jsonl").write_text('{"id": 7, "text": "three"}\n')
    (tmp_path / "a.txt").write_text("one\ntwo\n")
    (tmp_path / "_ignored").write_text("x\n")
    found = _read(tmp_path, 1)
    assert [(one.file, one.line, one.index, one.text, one.name) for one in found] == [
        ("a.txt", 1, 0, "one", None),
        ("a.txt", 2, 1, "two", None),
        ("b.jsonl", 1, 2, "three", 7),
    ]


def test_parquet_is_read_across_row_groups(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    table = pyarrow.table({"id": [f"n{i}" for i in range(10)], "src": [*map(str, range(9)), None], "more": range(10)})
    pyarrow.parquet.write_table(table, tmp_path / "in.parquet", row_group_size=3)
    every = _read(tmp_path / "in.parquet", 100, text_field="src")
    for rows in (1, 2, 5):
        monkeypatch.setattr(blocks, "_ROWS", rows)
        for window in (1, 2, 4, 7):
            assert _read(tmp_path / "in.parquet", window, text_field="src") == every
    found = _read(tmp_path / "in.parquet", 4, text_field="src")
    assert [(one.name, one.text) for one in found[:9]] == [(f"n{i}", str(i)) for i in range(9)]
    assert found[9].error is not None and found[9].error.endswith("line 10: no text in the column 'src'.")
    with pytest.raises(InputError, match="has no column 'text'"):
        _read(tmp_path / "in.parquet", 4)


@pytest.mark.parametrize(
    "name, what",
    (
        ("none", "no such file"),
        ("empty", "has no files"),
        ("a.gz", "compressed"),
        ("packed.txt", "compressed"),
        ("wide.txt", "UTF-16"),
    ),
)
def test_what_cannot_be_read_is_a_sentence(tmp_path: Path, name: str, what: str) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "a.gz").write_bytes(b"x")
    (tmp_path / "packed.txt").write_bytes(gzip.compress(b"x\n"))
    (tmp_path / "wide.txt").write_bytes("x\n".encode("utf-16"))
    with pytest.raises(InputError, match=what):
        _read(tmp_path / name, 4)


def test_neither_messages_nor_results_have_what_is_secret_in_a_uri() -> None:
    memory = fsspec.filesystem("memory")
    for name in ("a.jsonl", "b.jsonl"):
        memory.pipe(f"/user:SESAME@corpus/{name}", b'{"text": "one"}\n{"no text": 1}\n')
    try:
        uri = "memory://user:SESAME@corpus"
        files = blocks.sources(uri, None)
        corpus = blocks.numbered(files, [blocks.cut(file, 4) for file in files])
        found = [record for block in corpus for record in blocks.read(block, "text")]
        assert [one.file for one in found] == ["a.jsonl", "a.jsonl", "b.jsonl", "b.jsonl"]
        assert [one.text for one in found] == ["one", "", "one", ""]
        assert str(found[3].error).startswith("memory://corpus/b.jsonl, line 2: ")
        parts = Parts(f"{uri}/out", records.JSONL)
        assert parts.begin({}, corpus, resume=False, overwrite=False) == {}
        done = [(record, [("", None)]) for record in found[:2]]
        parts.write(corpus[0], done, 0, failures.policy_of(None, records.JSONL))
        with pytest.raises(InputError, match=r"^memory://corpus/out has an earlier run's parts"):
            parts.begin({}, corpus, resume=False, overwrite=False)
        written = [memory.cat(name) for name in memory.find("/user:SESAME@corpus/out")]
        assert len(written) == 3 and not any(b"SESAME" in content for content in written)
        with pytest.raises(InputError, match=r"^Cannot read memory://none: there is no such file"):
            blocks.sources("memory://user:SESAME@none", None)
    finally:
        memory.rm("/user:SESAME@corpus", recursive=True)


BLOCK = blocks.Block(3, "/in.txt", "in.txt", records.TEXT, 40, 2, 1, 12, 0, None, "1f")


def test_a_part_counts_when_it_is_whole_and_marked_and_its_input_is_the_same(tmp_path: Path) -> None:
    parts = Parts(str(tmp_path / "out"), records.JSONL)
    begin = functools.partial(parts.begin, corpus=[BLOCK], overwrite=False)
    assert begin({"beams": 4}, resume=False) == {}
    record = records.Record(0, "in.txt", text="a")
    mark = parts.write(BLOCK, [(record, [("b", -1.0)])], 5, failures.policy_of(None, records.JSONL))
    assert begin({"beams": 4}, resume=True) == {3: mark} and (mark.count, mark.failed, mark.tokens) == (1, 0, 5)
    part = tmp_path / "out" / parts.name(3)
    assert parts.read(3, mark) == part.read_bytes()
    part.write_bytes(part.read_bytes()[:-1])
    with pytest.raises(InputError, match="is gone or has changed"):
        parts.read(3, mark)
    assert begin({"beams": 4}, resume=True) == {} and not part.exists()
    part.write_bytes(b"")
    with pytest.raises(InputError, match="begun with another beams"):
        begin({"beams": 5}, resume=True)
    with pytest.raises(InputError, match="earlier run's parts: --resume goes on with them, --overwrite replaces them"):
        begin({"beams": 4}, resume=False)
    assert part.exists()
    mine = part.with_name("mine.txt")
    mine.touch()
    assert begin({"beams": 5}, resume=False, overwrite=True) == {} and not part.exists() and mine.exists()


@pytest.mark.parametrize(
    "change",
    [dict(stamp="2f"), dict(first=13), dict(file="in.txt"), dict(name="a.txt"), dict(before=4), dict(number=4)],
    ids=str,
)
def test_parts_of_another_input_are_done_again(tmp_path: Path, change: dict[str, Any]) -> None:
    """Or they are none of the output's any more: the block is another one, or gone."""
    parts = Parts(str(tmp_path / "out"), records.JSONL)
    begin = functools.partial(parts.begin, {"beams": 4}, overwrite=False)
    assert begin([BLOCK], resume=False) == {}
    mark = parts.write(BLOCK, [(records.Record(0, "in.txt"), [("b", 0.0)])], 5, failures.policy_of(None, records.JSONL))
    assert begin([BLOCK], resume=True) == {3: mark}
    assert begin([dataclasses.replace(BLOCK, **change)], resume=True) == {}
    assert [path.name for path in (tmp_path / "out").rglob("*") if path.is_file()] == ["_settings.json"]


@pytest.mark.parametrize("overwrite", [False, True])
def test_a_folder_with_other_files_is_refused(tmp_path: Path, overwrite: bool) -> None:
    (tmp_path / "mine.txt").write_text("x")
    with pytest.raises(InputError, match="is not empty, and no run wrote it"):
        Parts(str(tmp_path), records.JSONL).begin({}, [], resume=False, overwrite=overwrite)
    assert (tmp_path / "mine.txt").exists()


@pytest.mark.parametrize("chunk", [1, 3, 1 << 22])
def test_a_block_has_another_stamp_when_its_lines_change(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, chunk: int
) -> None:
    monkeypatch.setattr(blocks, "_CHUNK", chunk)
    path = tmp_path / "in.txt"

    def stamps(text: str) -> list[str]:
        path.write_text(text)
        (file,) = blocks.sources(str(path), None)
        return [one.stamp for one in blocks.cut(file, 2)]

    before = stamps("a\nb\nc\nd\ne\n")
    assert len(before) == 3
    assert stamps("a\nb\nc\nd\ne") == before  # the same lines
    for text, same in (("a\nb\nc\nx\ne\n", [True, False, True]), ("a\nb\nc\nd\ne\nf\n", [True, True, False])):
        assert [one == other for one, other in zip(stamps(text), before, strict=True)] == same


@pytest.fixture
def memory() -> Iterator[Any]:
    """fsspec's file system in the memory of this process, empty."""
    fsspec = pytest.importorskip("fsspec", reason="fsspec is not installed")
    system = fsspec.filesystem("memory")
    yield system
    for name in system.ls("/", detail=False):
        system.rm(name, recursive=True)


def test_blocks_and_parts_where_fsspec_reads_and_writes(memory: Any, tmp_path: Path) -> None:
    """As on this machine."""
    lines = {"b.jsonl": b'{"id": 7, "text": "three"}\n', "a.txt": b"one\ntwo\n", "_ignored": b"x\n"}
    for name, content in lines.items():
        memory.pipe(f"/in/{name}", content)
        (tmp_path / name).write_bytes(content)
    assert [record.text for record in _read("memory://in", 1)] == ["one", "two", "three"]
    assert [record.name for record in _read("memory://in/b.jsonl", 1)] == [7]
    here, there = (
        blocks.numbered(files, [blocks.cut(file, 2) for file in files])
        for files in (blocks.sources(path, None) for path in (str(tmp_path), "memory://in"))
    )
    assert [(one.offset, one.count, one.stamp) for one in here] == [(one.offset, one.count, one.stamp) for one in there]
    parts = Parts("memory://out", records.JSONL)
    begin = functools.partial(parts.begin, {"beams": 4}, [BLOCK])
    assert begin(resume=False, overwrite=False) == {}
    record = records.Record(0, "in.txt", text="a")
    mark = parts.write(BLOCK, [(record, [("b", -1.0)])], 5, failures.policy_of(None, records.JSONL))
    assert begin(resume=True, overwrite=False) == {3: mark}
    assert parts.read(3, mark) == memory.cat(f"/out/{parts.name(3)}")
    with pytest.raises(InputError, match="--resume goes on with them"):
        begin(resume=False, overwrite=False)
    assert begin(resume=False, overwrite=True) == {} and not memory.exists(f"/out/{parts.name(3)}")


@pytest.mark.parametrize(
    "path, inside, found",
    (
        ("in/a.txt", "/work/in/a.txt", "/work/in/a.txt"),
        ("s3://bucket/in", "bucket/in/a.txt", "s3://bucket/in/a.txt"),
        ("s3://bucket/in?region=eu-west-1", "bucket/in/a.txt", "s3://bucket/in/a.txt?region=eu-west-1"),
        ("https://host/in", "https://host/in/a.txt", "https://host/in/a.txt"),
    ),
)
def test_a_file_has_the_options_of_the_uri_that_it_was_found_by(path: str, inside: str, found: str) -> None:
    """Workers open it by its own URI."""
    assert blocks._uri(path, inside) == found


def test_names_are_without_secrets(memory: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """They stand in messages, in results and in the marks of parts."""
    for name in ("a.txt", "b.jsonl"):
        memory.pipe(f"/in/{name}", b"one\n")
    system = pyarrow.fs.PyFileSystem(pyarrow.fs.FSSpecHandler(memory))
    monkeypatch.setattr(blocks, "opened", lambda path: (system, "/in"))
    uri = "memory://user:SESAME@in?key=SESAME"
    files = blocks.sources(uri, None)
    assert all(file.path.endswith("?key=SESAME") for file in files), "workers need it"
    corpus = blocks.numbered(files, [[blocks.Cut(0, 4, 1, "1f")]] * 2)
    assert [(one.name, one.file) for one in corpus] == [
        ("memory://in/a.txt", "a.txt"),
        ("memory://in/b.jsonl", "b.jsonl"),
    ]
    parts = Parts(uri, records.JSONL)
    with pytest.raises(InputError, match=r"^memory://in is not empty"):
        parts.begin({}, corpus, resume=False, overwrite=False)
    monkeypatch.setattr(blocks, "opened", lambda path: (system, "/none"))
    with pytest.raises(InputError, match=r"^Cannot read memory://in: there is no such file"):
        blocks.sources(uri, None)


def test_actors_are_placed_by_gpus_or_by_nodes() -> None:
    cpus, gpus = [Node(8, 0), Node(4, 0)], [Node(16, 2), Node(16, 1), Node(8, 0)]
    assert placement(None, None, None, cpus) == Placement(2, 2, 4.0, 0.0)
    assert placement(None, None, None, [Node(0, 0), *cpus]) == Placement(2, 2, 4.0, 0.0)
    assert placement("2", None, None, [Node(0, 0)]) == Placement(2, 2, 0.5, 0.0)
    assert placement(None, None, None, [Node(0, 0), *gpus]) == Placement(3, 3, 1.0, 1.0)
    assert placement("4", None, None, cpus) == Placement(4, 4, 2.0, 0.0)
    assert placement("1:6", 2.0, None, cpus) == Placement(1, 6, 2.0, 0.0)
    assert placement(None, None, None, gpus) == Placement(3, 3, 1.0, 1.0)
    assert placement(None, None, 0.5, gpus) == Placement(6, 6, 1.0, 0.5)
    assert placement(None, None, 0.0, gpus) == Placement(3, 3, 8.0, 0.0)
    for wrong in ("0", "3:2", "x", "-1", "1:"):
        with pytest.raises(InputError, match="--actors"):
            placement(wrong, None, None, cpus)
