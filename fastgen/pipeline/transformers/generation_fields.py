"""The fields of transformers' GenerationConfig: reads types from the class, and refuses values that no model takes."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from fastgen.pipeline.errors import InputError

_POSITIVE = ("num_beams", "num_return_sequences", "max_new_tokens")
_SAMPLING = "temperature top_k top_p min_p top_h typical_p epsilon_cutoff eta_cutoff".split()
_BEAMS = ("length_penalty", "early_stopping")
# These are set by the command, which needs the sequences and decides about scores.
_OURS = {"return_dict_in_generate", "output_scores", "transformers_version"}
_DOCUMENTED = re.compile(r"^\s+([a-z_]+):? ?\(([^,)\n]+)", re.MULTILINE)
_KINDS = ("bool", "int", "float", "str")


def field_types() -> dict[str, str]:
    """Each public field and its type: "bool", "int", "float", "str", or "literal" for anything else.

    The type is that of the documentation, else that of the default value.
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
        # `early_stopping` is False by default, and may be "never": the documentation has priority.
        kind = documented.get(name) or type(value).__name__
        types[name] = kind if kind in _KINDS else "literal"
    return types


def flag_of(field: str) -> str:
    """The command-line flag of a field."""
    return "--" + field.replace("_", "-")


def check(fields: dict[str, Any], shown: Callable[[str], str]) -> None:
    """Raise InputError for values that no model takes; `shown`: returns a field's name as the user wrote it."""
    for name, value in fields.items():
        if name in _POSITIVE and isinstance(value, int) and value < 1:
            raise InputError(f"{shown(name)} must be at least 1, not {value}.")
        if name.endswith("_token_id") and value is not None and not token_ids(value):
            raise InputError(f"{shown(name)} takes the number of a token, or a list of them, not {value!r}.")


def without_effect(fields: dict[str, Any], config: Any) -> str | None:
    """A sentence on fields that have no effect in the search asked for; None if all have.

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
    """The token ids in a field that holds one id or several; an empty list if the field holds anything else."""
    ids = value if isinstance(value, list) else [value]
    return ids if all(type(i) is int for i in ids) else []
