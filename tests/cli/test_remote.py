"""fastgen-generate-transformers with files elsewhere: fsspec's file system in memory, and a server of HTTP."""

from __future__ import annotations

import importlib.util
import json
import re
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import web
from transformers_kit import FLAGS, MODEL, run

from fastgen.cli import generate_transformers
from fastgen.pipeline import remote
from fastgen.pipeline.errors import InputError

fsspec = pytest.importorskip("fsspec", reason="fsspec is not installed")


@pytest.fixture
def memory() -> Iterator[Any]:
    system = fsspec.filesystem("memory")
    yield system
    for name in system.ls("/", detail=False):
        system.rm(name, recursive=True)


@pytest.fixture(autouse=True)
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where copies lie during a run, in folders whose names begin with fastgen-: other packages have theirs there."""
    folder = tmp_path / "temporary"
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    return folder


def left_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.rglob("*") if path.is_file() and path.name.startswith(("in", "out")))


# ---------------------------------------------------------------------------------------------- whole runs
def test_a_run_elsewhere_writes_what_one_here_writes(
    source: Path, texts: list[str], tmp_path: Path, memory: Any, temporary: Path
) -> None:
    assert run(MODEL, source, tmp_path / "out.jsonl", *FLAGS) == 0
    memory.pipe("/corpus/in.txt", source.read_bytes())
    assert run(MODEL, "memory://corpus/in.txt", "memory://results/out.jsonl", *FLAGS) == 0
    assert memory.cat("/results/out.jsonl") == (tmp_path / "out.jsonl").read_bytes()
    assert memory.ls("/results", detail=False) == ["/results/out.jsonl"]  # no journal
    assert list(temporary.glob("fastgen-*")) == []


def test_a_name_with_a_number_sign_keeps_its_format(source: Path, texts: list[str], memory: Any) -> None:
    memory.pipe("/in #1.jsonl", b"".join(json.dumps({"text": text}).encode() + b"\n" for text in texts))
    assert run(MODEL, "memory://in #1.jsonl", "memory://out #1.jsonl", *FLAGS) == 0
    assert len(memory.cat("/out #1.jsonl").splitlines()) == len(texts)
    assert all(json.loads(line) for line in memory.cat("/out #1.jsonl").splitlines())


def test_an_input_of_a_web_server(source: Path, tmp_path: Path, temporary: Path) -> None:
    pytest.importorskip("aiohttp", reason="fsspec reads http with aiohttp")
    assert run(MODEL, source, tmp_path / "here.txt", *FLAGS) == 0
    with web.served(source.parent) as address:
        assert run(MODEL, f"{address}/in.txt", tmp_path / "there.txt", *FLAGS) == 0
        assert (tmp_path / "there.txt").read_bytes() == (tmp_path / "here.txt").read_bytes()
        # The output is here: the run can be gone on with, and knows its input again.
        assert run(MODEL, f"{address}/in.txt", tmp_path / "there.txt", *FLAGS, "--resume") == 0
    assert list(temporary.glob("fastgen-*")) == []


def test_messages_and_results_name_the_uri(
    memory: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str], temporary: Path
) -> None:
    memory.pipe("/in.jsonl", b'{"text": "1 2"}\n{"no text": 1}\n')
    assert run(MODEL, "memory://in.jsonl", "memory://out.jsonl", *FLAGS) == 1
    _, bad = map(json.loads, memory.cat("/out.jsonl").splitlines())
    assert bad["error"].startswith("memory://in.jsonl, line 2: not an object with the text")
    assert "memory://in.jsonl, line 2:" in capsys.readouterr().err
    memory.pipe("/in.txt", b"1\n\xff\n")
    assert run(MODEL, "memory://in.txt", tmp_path / "out.txt", *FLAGS) == 1
    said = capsys.readouterr().err
    assert "memory://in.txt, line 2: not UTF-8" in said and str(temporary) not in said
    memory.pipe("/empty.txt", b"")
    assert run(MODEL, "memory://empty.txt", tmp_path / "out.txt", *FLAGS) == 1
    assert "memory://empty.txt is empty" in capsys.readouterr().err
    assert list(temporary.glob("fastgen-*")) == []


def test_messages_of_runs_have_nothing_secret(
    source: Path, memory: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of runs that go on, and of those that write several lines for each input."""
    memory.pipe("/user:SESAME@in.txt", source.read_bytes())
    uri, out = "memory://user:SESAME@in.txt", tmp_path / "out.txt"
    assert run(MODEL, uri, out, *FLAGS) == 0
    memory.pipe("/user:SESAME@in.txt", b"other\n")
    assert run(MODEL, uri, out, *FLAGS, "--resume") == 1
    assert "and memory://in.txt has changed since" in capsys.readouterr().err
    several = ["--num-beams", "2", "--num-return-sequences", "2"]
    assert run(MODEL, uri, "memory://user:SESAME@out.txt", *FLAGS, *several) == 0
    said = capsys.readouterr().err
    assert "each input has 2 lines in memory://out.txt" in said and "SESAME" not in said


def test_parquet_elsewhere_is_refused_without_ray(
    source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(MODEL, "https://host/in.parquet?key=word", tmp_path / "out.txt", *FLAGS) == 1
    assert "Parquet is read and written with --ray alone" in capsys.readouterr().err


def test_what_is_there_is_replaced_only_if_asked(source: Path, memory: Any, capsys: pytest.CaptureFixture[str]) -> None:
    memory.pipe("/out.txt", b"mine")
    assert run(MODEL, source, "memory://out.txt", *FLAGS) == 1
    assert capsys.readouterr().err.endswith("memory://out.txt exists: --overwrite replaces it.\n")
    assert memory.cat("/out.txt") == b"mine"
    assert run(MODEL, source, "memory://out.txt", *FLAGS, "--overwrite") == 0
    assert memory.cat("/out.txt").count(b"\n") == source.read_bytes().count(b"\n")


def test_results_that_cannot_be_sent_are_kept_and_can_be_gone_on_with(
    source: Path,
    tmp_path: Path,
    memory: Any,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    temporary: Path,
) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise PermissionError(13, "Access denied")

    assert run(MODEL, source, tmp_path / "out.txt", *FLAGS) == 0
    with monkeypatch.context() as patch:
        patch.setattr(type(memory), "put_file", refuse)
        assert run(MODEL, source, "memory://out.txt", *FLAGS) == 1
    said = capsys.readouterr().err
    assert "Cannot write memory://out.txt: Access denied." in said and not memory.exists("/out.txt")
    (kept,) = re.findall(r"what was finished is in (\S+): go on with that file as OUTPUT, and --resume", said)
    assert Path(kept).is_relative_to(temporary)
    assert run(MODEL, source, kept, *FLAGS, "--resume") == 0
    assert "is complete: nothing to resume" in capsys.readouterr().err
    assert Path(kept).read_bytes() == (tmp_path / "out.txt").read_bytes()


@pytest.mark.parametrize(
    ("paths", "flags", "what"),
    [
        (("{here}", "memory://out.txt"), ["--resume"], "--resume needs an OUTPUT on this machine: memory://out.txt is"),
        (("memory://no/such.txt", "{out}"), [], "Cannot read memory://no/such.txt: there is no such file."),
        (("memory://folder", "{out}"), [], "memory://folder is no file"),
        (("memory://x.txt", "memory://x.txt"), ["--overwrite"], "memory://x.txt is the input"),
        (("{here}", "https://user:sesame@host/out.txt?key=sesame"), [], "https://host/out.txt can only be read"),
        (("nosuch://a/in.txt", "{out}"), [], "Cannot use nosuch://a/in.txt: Protocol not known: nosuch"),
        (("{here}", "{out}"), ["--references", "s3://a/b"], "s3://a/b is no file of this machine"),
        (("memory://in.parquet", "{out}"), [], "Parquet is read and written with --ray alone"),
    ],
)
def test_what_cannot_be_is_a_sentence(
    source: Path,
    memory: Any,
    capsys: pytest.CaptureFixture[str],
    temporary: Path,
    paths: tuple[str, str],
    flags: list[str],
    what: str,
) -> None:
    memory.pipe({"/folder/a.txt": b"1\n", "/x.txt": b"1\n"})
    names = [path.format(here=source, out=source.parent / "out.txt") for path in paths]
    assert run(MODEL, *names, *FLAGS, *flags) == 1
    said = capsys.readouterr().err
    assert what in said and "sesame" not in said and len(said.splitlines()) == 1
    assert memory.cat("/x.txt") == b"1\n" and not (source.parent / "out.txt").exists()
    assert left_in(temporary) == []


def test_a_package_that_is_missing_is_named(source: Path, capsys: pytest.CaptureFixture[str]) -> None:
    if importlib.util.find_spec("s3fs") is not None:
        pytest.skip("s3fs is installed")
    assert run(MODEL, "s3://bucket/in.txt", source.parent / "out.txt", *FLAGS) == 1
    said = capsys.readouterr().err
    assert "Cannot use s3://bucket/in.txt: " in said and "s3fs" in said and len(said.splitlines()) == 1


def test_a_page_that_is_not_there(source: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("aiohttp", reason="fsspec reads http with aiohttp")
    with web.served(source.parent) as address:
        assert run(MODEL, f"{address}/no.txt", source.parent / "out.txt", *FLAGS) == 1
        assert f"Cannot read {address}/no.txt: " in capsys.readouterr().err


@pytest.mark.parametrize("name", ["in.txt?X-Amz-Signature=SESAME", "a(in).txt?key='SESAME')", "in.txt?a=b&c=SESAME."])
def test_a_server_that_refuses_does_not_make_secrets_public(
    name: str, source: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("aiohttp", reason="fsspec reads http with aiohttp")
    with web.served(source.parent, status=403) as address:
        assert run(MODEL, f"{address}/{name}", source.parent / "out.txt", *FLAGS) == 1
    said = capsys.readouterr().err
    assert f"Cannot read {address}/{name.partition('?')[0]}: " in said and "403" in said and "SESAME" not in said
    assert f"{address}/{name.partition('?')[0]}" in said.partition("message=")[2], "aiohttp names the file, too"


@pytest.mark.parametrize(
    ("why", "wanted"),
    [
        ("cannot open 'https://user:word@host/a?key=word'", "cannot open 'https://host/a'"),
        ("(http://host/a#word), http://user:w@rd@host/b: no", "(http://host/a), http://host/b: no"),
        ('URL("s3://bucket/a?key=word")', 'URL("s3://bucket/a")'),
        ("s3://bucket/a,http://user:word@host/b", "s3://bucket/a,http://host/b"),
        ("no address", "no address"),
    ],
)
def test_reasons_are_without_secrets(why: str, wanted: str) -> None:
    with pytest.raises(InputError) as error, remote._refusing("Cannot"):
        raise ValueError(why)
    assert str(error.value) == f"Cannot: {wanted}."


# ---------------------------------------------------------------------------------------------- parts
@pytest.mark.parametrize(
    ("path", "shown"),
    [
        ("a/b?c.txt", "a/b?c.txt"),
        ("s3://bucket/in.txt", "s3://bucket/in.txt"),
        ("https://user:word@host/in.txt", "https://host/in.txt"),
        ("http://user:SEC@RETPW@host/x", "http://host/x"),
        ("http://host/a@b", "http://host/a@b"),
        ("https://host/in.txt?mail=a@b", "https://host/in.txt"),
        ("https://host/in.txt?X-Signature=abc#x", "https://host/in.txt"),
        ("HTTPS://host/in.txt#x", "HTTPS://host/in.txt"),
        ("s3://key:word@bucket/part #1.jsonl?versionId=abc", "s3://bucket/part #1.jsonl"),
        ("hf://datasets/user/repo@main/in.txt", "hf://datasets/user/repo@main/in.txt"),
    ],
)
def test_secrets_are_not_shown(path: str, shown: str) -> None:
    assert remote.shown(path) == shown


def test_a_file_of_this_machine_is_itself(tmp_path: Path) -> None:
    with remote.fetched(str(tmp_path / "in.txt")) as found:
        assert found == tmp_path / "in.txt"


def test_a_copy_is_removed_whatever_happens(memory: Any, temporary: Path) -> None:
    memory.pipe("/in.txt", b"1\n")
    with pytest.raises(ValueError, match="x"), remote.fetched("memory://in.txt") as found:
        assert found.read_bytes() == b"1\n" and found.name == "in.txt" and found.is_relative_to(temporary)
        assert found.parent.stat().st_mode & 0o777 == 0o700
        raise ValueError("x")
    assert list(temporary.glob("fastgen-*")) == []


def test_a_run_of_ray_is_asked_for_by_its_flag(tmp_path: Path) -> None:
    """Negative control: without one, these flags are refused, whatever the paths are."""
    settings = generate_transformers.parser().parse_args(["m", "memory://in", "memory://out", "--shards"])
    with pytest.raises(InputError, match="--shards needs --ray"):
        generate_transformers._refuse_rays(settings)  # type: ignore[arg-type]
