"""Which phase of a generation a Python frame belongs to: by marks in fastgen's own code, by rules for the hosts'.

A sample is a stack of frames, and is decided from the innermost outwards. The first rule that fits says what is being
done; what is around it says for whom: all within the encoder is the encoder's, and what the decoder does in its first
pass is prefill. Where attention is computed in the same function as its projections, the source line decides.
"""

from __future__ import annotations

import functools
import inspect
import linecache
import re
from collections.abc import Hashable, Iterable
from types import CodeType, FrameType
from typing import Any, NamedTuple

from fastgen.phases import (
    ATTENTION,
    BY_LINE,
    CACHE,
    CHOICE,
    ENCODER,
    LOOP,
    OTHER,
    PASS,
    PREFILL,
    REST,
    TEXT,
    FirstPass,
    mark_of,
)

_MODULE = "module"  # a call of another module: what the line that calls it says is not what is done in there
_STEPS = (None, REST, ATTENTION, CACHE)  # what prefill consists of


class Rule(NamedTuple):
    """For frames of functions whose path and name match."""

    path: str  # regular expression, from any folder on to the end
    name: str  # regular expression, all of it
    fits: str  # one of PHASES, PASS, LOOP or _MODULE
    line: str = ""  # regular expression: one that is found in the line that is being executed
    first: FirstPass | None = None


# Scores, weights, and sums, not their projections.
_ATTENDING = (
    r"^(?!.*_proj\().*(matmul|bmm|einsum|softmax|scaled_dot_product|masked_fill| @ "
    r"|\battn_(weights|probs|scores|mask)|\bscores\b|position_bias_masked|\battn = attn\b)"
)
_BUFFERS = r"prev_(key|value)|saved_state|input_buffer"
_STORING = rf"torch\.cat\(|{_BUFFERS}"
_DECODING = r"(batch_)?decode|_decode|convert_.*|clean_up_tokenization|string|remove_bpe|post_process(_prediction)?"


def _is_first(variables: dict[str, Any]) -> bool:
    """transformers before its `_prefill`."""
    if "is_prefill" in variables:
        return bool(variables["is_prefill"])
    length = variables.get("cur_len")
    return length is not None and length == variables.get("decoder_prompt_len")


def _is_fairseqs_first(variables: dict[str, Any]) -> bool:
    """All that read a forced prefix are: one token each in the host's loop."""
    prefix, step = variables.get("prefix_tokens"), variables.get("step")
    return step is not None and step <= (0 if prefix is None else prefix.shape[1])


_T, _F = "transformers/", "fairseq/"
_TRANSFORMERS = [
    Rule(f"{_T}cache_utils.py", ".*", CACHE),
    Rule(f"{_T}(integrations/.*|modeling_flash_attention_utils.py)", ".*attention_forward", ATTENTION),
    Rule(f"{_T}models/.*", "eager_attention_forward", ATTENTION),
    Rule(f"{_T}generation/utils.py", r"_prepare_\w*encoder\w*_kwargs_for_generation", ENCODER),
    Rule(f"{_T}generation/utils.py", "_expand_inputs_for_generation", CACHE),  # the source, once for each beam
    Rule(f"{_T}.*", "_?reorder_cache|_temporary_reorder_cache", CACHE),
    Rule(f"{_T}generation/utils.py", "_prefill(_chunking)?", PREFILL),
    Rule(f"{_T}generation/utils.py", "_beam_search|_sample|_assisted_decoding", LOOP, first=_is_first),
    Rule(f"{_T}(tokenization_.*|models/.*/tokenization_.*)", _DECODING, TEXT),
]
_FAIRSEQ = [
    Rule(f"{_F}.*", "reorder_(encoder_out|incremental_state.*)|_reorder_buffer", CACHE),
    Rule(f"{_F}modules/multihead_attention.py", "_append_prev_key_padding_mask|_[gs]et_input_buffer", CACHE),
    Rule(f"{_F}.*", "get_normalized_probs.*", CHOICE),
    Rule(f"{_F}sequence_generator.py", "forward_encoder", ENCODER),
    Rule(f"{_F}sequence_generator.py", "forward_decoder", PASS),
    Rule(f"{_F}sequence_generator.py", "_generate", LOOP, first=_is_fairseqs_first),
    Rule(f"{_F}(data/.*|utils.py)", _DECODING, TEXT),
]
# Of classes of attention, by their lines.
_BY_LINE = [
    Rule(f"{_F}modules/multihead_attention.py", ".*", CACHE, _STORING),
    Rule(f"({_F}modules/.*|{_T}models/.*)", ".*", ATTENTION, _ATTENDING),
]
# Of fastgen's own that are marked so.
_MARKED_BY_LINE = [Rule("", "", CACHE, _BUFFERS), Rule("", "", ATTENTION, _ATTENDING)]
RULES = [Rule("torch/nn/modules/module.py", "_call_impl", _MODULE), *_TRANSFORMERS, *_FAIRSEQ]


class Table:
    """The rules, and what of a model they need to know."""

    def __init__(self, passes: Iterable[type], encoders: Iterable[Any] = ()) -> None:
        """`passes`: classes whose `forward` is a pass of the decoder; `encoders`: modules, for a decoder may be of the
        same class."""
        self._encoders = {id(encoder) for encoder in encoders}
        self._passes = {code for each in passes if (code := _code_of(each)) is not None}
        self._reading = {code for each in encoders if (code := _code_of(type(each))) is not None}
        self._rules: dict[CodeType, tuple[Rule, ...]] = {}
        self._lines: dict[Hashable, bool] = {}

    def phase(self, frame: FrameType | None, end: FrameType | None = None) -> str:
        """What is being done in this frame, which is the innermost, or those around it up to `end`."""
        found, is_within, is_in_pass = None, False, False
        while frame is not None and frame is not end:
            code = frame.f_code
            if code not in self._rules:
                self._rules[code] = tuple(self._rules_for(code, frame.f_globals))
            for rule in self._rules[code]:
                if rule.line and (is_within or not self._is_at(frame, rule.line)):
                    continue
                if rule.fits == ENCODER:
                    if self._is_encoders(frame):
                        return ENCODER
                    continue
                if rule.fits == PREFILL and found in _STEPS:
                    return PREFILL
                if rule.fits == _MODULE:
                    is_within = True
                elif rule.fits == LOOP:
                    if rule.first is not None and is_in_pass and found in _STEPS and rule.first(frame.f_locals):
                        return PREFILL
                    found = found or CHOICE
                elif rule.fits == PASS:
                    found, is_in_pass = found or REST, True
                else:
                    found = found or rule.fits
                break
            frame = frame.f_back
        return found or OTHER

    def _rules_for(self, code: CodeType, variables: dict[str, Any]) -> Iterable[Rule]:
        """Those that fit the code's path and name, and what the code is marked as; `variables`: the module's."""
        if code in self._reading:
            yield Rule("", "", ENCODER)
        path, name = code.co_filename.replace("\\", "/"), code.co_name
        # Before Python 3.11 a function does not know its class.
        is_of_attention = re.search("attention|attn", getattr(code, "co_qualname", "attn"), re.I) is not None
        for rule in (*RULES, *(_BY_LINE if is_of_attention else ())):
            if _is_of(path, rule.path) and re.fullmatch(rule.name, name):
                has_first = rule.first is not _is_first or not _prefills()
                yield rule if has_first else rule._replace(first=None)
        mark = mark_of(code, variables)
        if mark is not None and mark.phase != BY_LINE:
            yield Rule("", "", mark.phase, first=mark.first)
        elif mark is not None and is_of_attention:
            yield from _MARKED_BY_LINE
        if code in self._passes:
            yield Rule("", "", PASS)

    def _is_encoders(self, frame: FrameType) -> bool:
        return frame.f_code not in self._reading or id(frame.f_locals.get("self")) in self._encoders

    def _is_at(self, frame: FrameType, line: str) -> bool:
        key = frame.f_code, frame.f_lineno, line
        if key not in self._lines:
            source = linecache.getline(frame.f_code.co_filename, frame.f_lineno)
            self._lines[key] = re.search(line, source) is not None
        return self._lines[key]


def _is_of(path: str, pattern: str) -> bool:
    return re.search(rf"(^|/){pattern}$", path) is not None


def _code_of(owner: type) -> CodeType | None:
    return getattr(inspect.unwrap(getattr(owner, "forward", None) or owner), "__code__", None)


@functools.cache
def _prefills() -> bool:
    from transformers.generation.utils import GenerationMixin

    return hasattr(GenerationMixin, "_prefill")
