"""Command-line flags of a model and of its generation: one for every field of transformers' GenerationConfig."""

from __future__ import annotations

import argparse
import dataclasses
import json
from collections.abc import Callable
from typing import Any, TypeVar

from fastgen.pipeline.transformers.generation_fields import check, field_types, flag_of
from fastgen.pipeline.transformers.settings import ModelSettings

Settings = TypeVar("Settings", bound=ModelSettings)

_PREFIX = "generation."  # of the fields' names among the parsed arguments


def _boolean(text: str) -> bool:
    if text.lower() in ("true", "1", "yes"):
        return True
    if text.lower() in ("false", "0", "no"):
        return False
    raise argparse.ArgumentTypeError(f"{text!r} is neither true nor false")


def _whole(text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number") from None


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number") from None


def _literal(text: str) -> Any:
    """JSON (numbers, lists, true, null), or a word: for fields of several types."""
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        if text.lstrip()[:1] in ("[", "{", '"'):  # no word begins so
            what = f"{text!r} is not JSON: {error.msg} at character {error.pos + 1}"
            raise argparse.ArgumentTypeError(what) from None
        return text


def _list_or_text(text: str) -> Any:
    """A list in JSON, or the text itself, which may be any: "[END]"."""
    try:
        found = json.loads(text)
    except json.JSONDecodeError:
        return text
    return found if isinstance(found, list) else text


_PARSERS: dict[str, Callable[[str], Any]] = {"bool": _boolean, "int": _whole, "float": _number, "str": str}


def add_model_flags(parser: argparse.ArgumentParser) -> None:
    """How the model and its tokenizer are used."""
    parser.add_argument("--tokenizer", metavar="NAME", help="default: the model's")
    parser.add_argument("--task-prefix", default="", metavar="TEXT", help="put before each input, as T5 needs")
    parser.add_argument("--source-lang", metavar="LANG", help="as the tokenizer calls it: en, en_XX, eng_Latn, ...")
    parser.add_argument("--target-lang", metavar="LANG", help="the same, of the output")
    parser.add_argument(
        "--dtype",
        choices=("auto", "float32", "float16", "bfloat16"),
        default="auto",
        help="auto: as the model was saved (default)",
    )
    parser.add_argument("--device", metavar="DEVICE", help="cpu, cuda, cuda:1, ... (default: cuda if there is one)")


def add_flags(parser: argparse.ArgumentParser) -> None:
    """The flags; those not given are absent from the parsed arguments."""
    group = parser.add_argument_group(
        "generation", "Every field of transformers' GenerationConfig; the model's own generation config is the default."
    )
    for name, kind in field_types().items():
        parse = _list_or_text if name == "stop_strings" else _PARSERS.get(kind, _literal)
        optional: dict[str, Any] = {"nargs": "?", "const": True} if kind == "bool" else {}
        group.add_argument(
            flag_of(name),
            dest=_PREFIX + name,
            type=parse,
            default=argparse.SUPPRESS,
            metavar={"bool": "BOOL", "int": "N", "float": "X", "str": "TEXT"}.get(kind, "JSON"),
            **optional,
        )


def given(args: argparse.Namespace) -> dict[str, Any]:
    """The fields that the user set; InputError for values that no model takes."""
    fields = {name[len(_PREFIX) :]: value for name, value in vars(args).items() if name.startswith(_PREFIX)}
    check(fields, flag_of)
    return fields


def settings_of(args: argparse.Namespace, kind: type[Settings], **more: Any) -> Settings:
    """What these arguments say, as settings of this class, some of them given by `more`."""
    names = {field.name for field in dataclasses.fields(kind)} - more.keys()
    found: dict[str, Any] = {name: getattr(args, name) for name in names & vars(args).keys()}
    return kind(**{"generation": given(args), **found, **more})
