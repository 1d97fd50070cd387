"""A command-line flag for every field of transformers' GenerationConfig, read from the class itself."""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Callable
from typing import Any

from fastgen.pipeline.errors import InputError

PREFIX = "generation."  # of the fields' names among the parsed arguments
_POSITIVE = ("num_beams", "num_return_sequences", "max_new_tokens")
_SAMPLING = "temperature top_k top_p min_p top_h typical_p epsilon_cutoff eta_cutoff".split()
_BEAMS = ("length_penalty", "early_stopping")
# Set by the command: it needs the sequences, and asks for scores itself.
_OURS = {"return_dict_in_generate", "output_scores", "transformers_version"}
_DOCUMENTED = re.compile(r"^\s+([a-z_]+):? ?\(([^,)\n]+)", re.MULTILINE)


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


def field_types() -> dict[str, str]:
    """Each public field and its type: "bool", "int", "float", "str", or "literal" for anything else.

    From the default value where there is one, else from the class's documentation of the field.
    """
    from transformers import GenerationConfig

    documented = {name: kind.strip(" `") for name, kind in _DOCUMENTED.findall(GenerationConfig.__doc__ or "")}
    defaults = {name: value for name, value in vars(GenerationConfig()).items() if not name.startswith("_")}
    if later := getattr(GenerationConfig, "_get_default_generation_params", None):  # 5.x fills them in last
        defaults |= {name: value for name, value in later().items() if value is not None}
    types: dict[str, str] = {}
    for name, value in defaults.items():
        if name in _OURS:
            continue
        # `early_stopping` is False by default, and may be "never": what the documentation says goes first.
        kind = documented.get(name) or type(value).__name__
        types[name] = kind if kind in _PARSERS else "literal"
    return types


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


def flag_of(field: str) -> str:
    return "--" + field.replace("_", "-")


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
            dest=PREFIX + name,
            type=parse,
            default=argparse.SUPPRESS,
            metavar={"bool": "BOOL", "int": "N", "float": "X", "str": "TEXT"}.get(kind, "JSON"),
            **optional,
        )


def given(args: argparse.Namespace) -> dict[str, Any]:
    """The fields that the user set; InputError for values that no model takes."""
    fields = {name[len(PREFIX) :]: value for name, value in vars(args).items() if name.startswith(PREFIX)}
    check(fields, flag_of)
    return fields


def check(fields: dict[str, Any], shown: Callable[[str], str]) -> None:
    """InputError for values that no model takes; `shown`: how the user wrote a field's name."""
    for name, value in fields.items():
        if name in _POSITIVE and isinstance(value, int) and value < 1:
            raise InputError(f"{shown(name)} must be at least 1, not {value}.")
        if name.endswith("_token_id") and value is not None and not token_ids(value):
            raise InputError(f"{shown(name)} takes the number of a token, or a list of them, not {value!r}.")


def without_effect(fields: dict[str, Any], config: Any) -> str | None:
    """A sentence on fields that say something about another search than the one asked for; None without such.

    Args:
        config: the model's GenerationConfig with these fields.
    """
    for names, needed, is_asked in (
        (_SAMPLING, flag_of("do_sample"), config.do_sample),
        (_BEAMS, f"{flag_of('num_beams')} of 2 or more", (config.num_beams or 1) > 1),
    ):
        idle = [flag_of(name) for name in names if fields.get(name) is not None]
        if idle and not is_asked:
            return f"{', '.join(idle)}: without effect, since the search is without {needed}."
    return None


def token_ids(value: Any) -> list[int]:
    """Of a field that holds one or several; none if it holds anything else."""
    ids = value if isinstance(value, list) else [value]
    return ids if all(type(i) is int for i in ids) else []
