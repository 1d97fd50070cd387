"""Which phase of a generation a Python frame belongs to: one table for the hosts and for fastgen.

A sample is a stack of frames, and is decided from the innermost outwards. The first rule that fits says what is being
done; what is around it says for whom: all within the encoder is the encoder's, and what the decoder does in its first
pass is prefill. Where attention is computed in the same function as its projections, the source line decides.
"""

from __future__ import annotations

import functools
import inspect
import linecache
import re
from collections.abc import Callable, Hashable, Iterable
from types import CodeType, FrameType
from typing import Any, NamedTuple

ENCODER, PREFILL, ATTENTION, CACHE = "encoder", "prefill", "attention", "cache upkeep"
REST, CHOICE, TEXT, OTHER = "rest of the decoder", "next-token choice", "post-processing", "other"
_PASS, _LOOP = "pass", "loop"  # a forward pass of the decoder, and what calls one after the other: if nothing else fits
_MODULE = "module"  # a call of another module: what the line that calls it says is not what is done in there
_STEPS = (None, REST, ATTENTION, CACHE)  # what prefill consists of

FirstPass = Callable[[dict[str, Any]], bool]  # of a loop's local variables: whether its pass is the first


class Rule(NamedTuple):
    """For frames of functions whose path and name match."""

    path: str  # regular expression, from any folder on to the end
    name: str  # regular expression, all of it
    fits: str  # one of PHASES, or what stands above
    line: str = ""  # regular expression: one that is found in the line that is being executed
    first: FirstPass | None = None


# Scores, weights, and sums, not their projections.
_ATTENDING = (
    r"^(?!.*_proj\().*(matmul|bmm|einsum|softmax|scaled_dot_product|masked_fill| @ "
    r"|\battn_(weights|probs|scores|mask)|\bscores\b|position_bias_masked|\battn = attn\b)"
)
_STORING = r"torch\.cat\(|prev_(key|value)|saved_state|input_buffer"
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


def _is_fasts_first(variables: dict[str, Any]) -> bool:
    prefix, search = variables.get("prefix"), variables.get("chosen")
    return search is not None and search.step <= (0 if prefix is None else prefix.shape[1])


_T, _F, _O = "transformers/", "fairseq/", "fastgen/"
_OT, _OF = "fastgen/optimizer/transformers/", "fastgen/optimizer/fairseq/"
_MODELS = rf"({_T}models/.*|{_O}models/.*)"
_TRANSFORMERS = [
    Rule(f"{_T}cache_utils.py", ".*", CACHE),
    Rule(f"{_T}(integrations/.*|modeling_flash_attention_utils.py)", ".*attention_forward", ATTENTION),
    Rule(_MODELS, "eager_attention_forward", ATTENTION),
    Rule(f"{_T}generation/utils.py", r"_prepare_\w*encoder\w*_kwargs_for_generation", ENCODER),
    Rule(f"{_T}generation/utils.py", "_expand_inputs_for_generation", CACHE),  # the source, once for each beam
    Rule(f"{_T}.*", "_?reorder_cache|_temporary_reorder_cache", CACHE),
    Rule(f"{_T}generation/utils.py", "_prefill(_chunking)?", PREFILL),
    Rule(f"{_T}generation/utils.py", "_beam_search|_sample|_assisted_decoding", _LOOP, first=_is_first),
    Rule(f"{_T}(tokenization_.*|models/.*/tokenization_.*)", _DECODING, TEXT),
]
_FAIRSEQ = [
    Rule(f"{_F}.*", "reorder_(encoder_out|incremental_state.*)|_reorder_buffer", CACHE),
    Rule(f"{_F}modules/multihead_attention.py", "_append_prev_key_padding_mask|_[gs]et_input_buffer", CACHE),
    Rule(f"{_F}.*", "get_normalized_probs.*", CHOICE),
    Rule(f"{_F}sequence_generator.py", "forward_encoder", ENCODER),
    Rule(f"{_F}sequence_generator.py", "forward_decoder", _PASS),
    Rule(f"{_F}sequence_generator.py", "_generate", _LOOP, first=_is_fairseqs_first),
    Rule(f"{_F}(data/.*|utils.py)", _DECODING, TEXT),
]
_FASTGEN = [
    Rule(f"{_O}bench/data.py", "text|<lambda>", TEXT),
    Rule("<a recorded step>", ".*", _PASS),
    Rule(f"{_O}cache/(tree|tree_layer|batch_tree|row_pool|retained).py", ".*", CACHE),
    Rule(f"{_O}(layers/attention.*|cache/slim/latent|ops/(attention|triton_.*)).py", ".*", ATTENTION),
    Rule(f"{_O}decoding/.*_search.py", ".*", CHOICE),
    Rule(f"{_OT}model/session.py", "attend", ATTENTION),
    Rule(f"{_OT}cache/tree_cache.py", ".*", CACHE),
    Rule(f"{_OT}model/decoder.py", "begin_decoding|keep|reorder|shared|selected|_unexpanded|_widen_source", CACHE),
    Rule(f"{_OT}model/decoder.py", "run", _PASS),
    Rule(f"{_OT}versions.py", "prefill", PREFILL),
    Rule(f"{_OT}model/encoder.py", ".*", ENCODER),
    Rule(f"{_OT}generate/(beam_search|diverse_beam_search|processors|argmax_head).py", ".*", _LOOP),
    Rule(f"{_OF}model/decoder.py", "forward_encoder", ENCODER),
    Rule(f"{_OF}model/decoder.py", "_read_prompt|log_probs", PREFILL),
    Rule(f"{_OF}model/decoder.py", "reorder_.*", CACHE),
    Rule(f"{_OF}model/session.py", ".*", CACHE),
    Rule(f"{_OF}model/decoder.py", "forward_decoder", _PASS),
    Rule(f"{_OF}generate/shortlist.py", ".*", CHOICE),
    Rule(f"{_OF}generate/beam_search.py", "generate", _LOOP, first=_is_fasts_first),
]
# Of classes of attention, by their lines.
_BY_LINE = [
    Rule(f"({_F}modules/multihead_attention.py|{_O}models/prophetnet/attention.py)", ".*", CACHE, _STORING),
    Rule(f"({_F}modules/.*|{_MODELS}|{_OF}model/attention.py|{_O}.*/model/streams.py)", ".*", ATTENTION, _ATTENDING),
]
RULES = [Rule("torch/nn/modules/module.py", "_call_impl", _MODULE), *_TRANSFORMERS, *_FAIRSEQ, *_FASTGEN]


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
                self._rules[code] = tuple(self._rules_for(code))
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
                elif rule.fits == _LOOP:
                    if rule.first is not None and is_in_pass and found in _STEPS and rule.first(frame.f_locals):
                        return PREFILL
                    found = found or CHOICE
                elif rule.fits == _PASS:
                    found, is_in_pass = found or REST, True
                else:
                    found = found or rule.fits
                break
            frame = frame.f_back
        return found or OTHER

    def _rules_for(self, code: CodeType) -> Iterable[Rule]:
        """Those that fit its path and name."""
        if code in self._reading:
            yield Rule("", "", ENCODER)
        path, name = code.co_filename.replace("\\", "/"), code.co_name
        # Before Python 3.11 a function does not know its class.
        by_line = _BY_LINE if re.search("attention|attn", getattr(code, "co_qualname", "attn"), re.I) else []
        for rule in (*RULES, *by_line):
            if _is_of(path, rule.path) and re.fullmatch(rule.name, name):
                has_first = rule.first is not _is_first or not _prefills()
                yield rule if has_first else rule._replace(first=None)
        if code in self._passes:
            yield Rule("", "", _PASS)

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
