"""How files of lines are read, whatever they are for."""

from __future__ import annotations

import bz2
import gzip
import itertools
import lzma
from pathlib import Path

import pytest

from fastgen.demo.job import read_inputs
from fastgen.pipeline import InputError
from fastgen.pipeline.growing_line import in_one_line
from fastgen.pipeline.transformers import metrics, records

# Of a Windows program; a carriage return and other signs that end a line for Python alone.
LINES = b"\xef\xbb\xbfone\r\nt\rw\xc2\x85o\xe2\x80\xa8\n\nlast"
TEXTS = ["one", "t\rw\x85o\u2028", "", "last"]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    (tmp_path / "lines").write_bytes(LINES)
    return tmp_path / "lines"


def test_lines_end_at_line_feeds_alone(path: Path) -> None:
    assert records.read_lines(path) == TEXTS
    assert [record.text for record in records.read(path, records.TEXT)] == TEXTS
    assert records.count_lines(path) == len(TEXTS)


def test_references_are_as_many_as_inputs(path: Path) -> None:
    assert metrics.read_references(path, records.count_lines(path)) == TEXTS


def test_the_demos_inputs_are_one_a_line(path: Path) -> None:
    assert read_inputs(path, None) == [text for text in TEXTS if text]


def test_a_trie_has_an_output_a_line(path: Path) -> None:
    pytest.importorskip("torch")
    from fastgen.decoding import trie_building

    assert list(trie_building.lines_of(path)) == [(number, text) for number, text in enumerate(TEXTS, 1) if text]


def test_what_cannot_be_read(path: Path) -> None:
    path.write_bytes(b"one\n\xff\n")
    with pytest.raises(InputError, match="lines, line 2: not UTF-8"):
        records.read_lines(path)
    with pytest.raises(InputError, match=r"Cannot read .*none: No such file"):
        records.read_lines(path.with_name("none"))


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (gzip.compress(b"one\n"), "compressed"),
        (bz2.compress(b"one\n"), "compressed"),
        (lzma.compress(b"one\n"), "compressed"),
        (b"\x28\xb5\x2f\xfd\x04\x00\x01\n\n\n", "compressed"),  # zstd
        ("one\ntwo\n".encode("utf-16"), "UTF-16"),
        (b"\xfe\xff" + "one\n".encode("utf-16-be"), "UTF-16"),
    ],
    ids=["gzip", "bzip2", "xz", "zstd", "UTF-16", "UTF-16 BE"],
)
def test_files_of_which_some_lines_would_pass_for_text_are_refused(path: Path, data: bytes, why: str) -> None:
    path.write_bytes(data)
    for read in (records.count_lines, records.read_lines):
        with pytest.raises(InputError, match=f"lines is {why}"):
            read(path)


def test_texts_that_begin_like_them_are_texts(path: Path) -> None:
    for text in (b"BZhang\n", b"PK\n", b"(x\n", b"\x04\n"):
        path.write_bytes(text)
        assert records.count_lines(path) == 1


def test_an_output_is_one_line() -> None:
    assert [in_one_line(text) for text in ("a\r\nb", "a\u2028b\n", "\n", "")] == ["a b", "a b", "", ""]


@pytest.mark.parametrize("text", ["a\r\nb\n\nc\rd\n", "\n\na", "a\r\r\n\n"])
def test_a_text_that_grows_stays_the_beginning_of_its_line(text: str) -> None:
    grown = [in_one_line(text[:end]) for end in range(len(text) + 1)]
    assert all(later.startswith(earlier) for earlier, later in itertools.pairwise(grown))
