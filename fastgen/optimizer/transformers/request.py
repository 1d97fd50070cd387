"""One call of the host's `_beam_search` or `_sample`: what it asks for, and why it may have to stay with the host."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers.cache_utils import DynamicCache, EncoderDecoderCache
from transformers.generation import logits_process, stopping_criteria

from fastgen.optimizer import verification
from fastgen.optimizer.transformers import foreign_code
from fastgen.optimizer.transformers.cache.tree_cache import unsupported_cache
from fastgen.optimizer.transformers.model import streams
from fastgen.optimizer.transformers.model.modules import of_steps_by_name, unfoldable_attention
from fastgen.optimizer.transformers.versions import CACHE, FINDS_EAGER
from fastgen.patching.foreign_code import Finding
from fastgen.report import OfThisVersion

_KNOWN_KWARGS = frozenset(
    f"""attention_mask cache_position decoder_attention_mask decoder_position_ids encoder_outputs global_attention_mask
    inputs_embeds labels latents logits_to_keep {CACHE} position_ids token_type_ids use_cache
    return_dict""".split()  # of labels, which a batch may hold, the host gives its model nothing
)
# Multimodal models with positions in three dimensions put those first, and latents need not be of a text.
_BEGIN_WITH_ROWS = ("decoder_position_ids", "latents", "position_ids")
_ATTENTION = (None, "eager", "sdpa") if FINDS_EAGER else (None, "sdpa")
_LAYER_TYPES = ("full_attention", "sliding_attention")
# Processors that treat every row by itself, whatever its place in the batch: sentences may leave.
_ROW_LOCAL = tuple(
    getattr(logits_process, name, None)
    for name in """MinLengthLogitsProcessor MinNewTokensLengthLogitsProcessor TemperatureLogitsWarper
    RepetitionPenaltyLogitsProcessor TopPLogitsWarper TopKLogitsWarper MinPLogitsWarper TypicalLogitsWarper
    EpsilonLogitsWarper EtaLogitsWarper NoRepeatNGramLogitsProcessor SequenceBiasLogitsProcessor
    NoBadWordsLogitsProcessor ForcedBOSTokenLogitsProcessor ForcedEOSTokenLogitsProcessor
    InfNanRemoveLogitsProcessor ExponentialDecayLengthPenalty LogitNormalization
    SuppressTokensAtBeginLogitsProcessor SuppressTokensLogitsProcessor
    EncoderNoRepeatNGramLogitsProcessor""".split()
)
# Criteria decided by the last token and the length alone.
_BY_LAST_TOKEN = (stopping_criteria.EosTokenCriteria, stopping_criteria.MaxLengthCriteria)


@dataclass
class Request:
    """The arguments of `_beam_search` or, if it `is_search` not, of `_sample`, under the host's names."""

    model: Any
    input_ids: Tensor  # int64 [B*M, P]
    logits_processor: Any
    stopping_criteria: Any
    generation_config: Any
    synced_gpus: bool
    model_kwargs: dict[str, Any]
    streamer: Any = None  # of `_sample`
    is_search: bool = True
    diverse: Callable[..., Any] | None = None  # a loop like the host's, for beams in groups; else the host's own
    seeds: Sequence[int] | None = None  # of each sentence, for samples drawn in a batch with others

    @property
    def beams(self) -> int:
        """M: rows that share a prompt, be they beams or samples."""
        config = self.generation_config
        return int(config.num_beams if self.is_search else config.num_return_sequences or 1)

    @functools.cached_property
    def _findings(self) -> list[Finding]:
        return foreign_code.of_decoder(self.model)

    @property
    def foreign(self) -> list[Finding]:
        """Code that is not the host's own, on what a step runs."""
        return [finding for finding in self._findings if finding.name not in foreign_code.SEARCH_RULES]

    @property
    def users_rule(self) -> str | None:
        """Which of the host's rules of beam search the user has replaced; None if none."""
        return foreign_code.changed_rule(self._findings)

    @property
    def changed_rule(self) -> str | None:
        """Which of the host's rules of beam search this model has another of: the host's own loop has to follow it."""
        return self.users_rule or foreign_code.overridden_rule(self.model)

    @property
    def batch(self) -> int:
        return self.input_ids.shape[0] // self.beams

    def run(self, stock: Callable[..., Any], cache: Any = None) -> Any:
        """The host's own loop, over the request's cache or over another."""
        kwargs = self.model_kwargs if cache is None else {**self.model_kwargs, CACHE: cache}
        return stock(
            self.model,
            self.input_ids,
            self.logits_processor,
            self.stopping_criteria,
            self.generation_config,
            self.synced_gpus,
            **({} if self.is_search else {"streamer": self.streamer}),
            **kwargs,
        )

    @property
    def keeps_all_rows(self) -> bool:
        """Whether what is returned holds every row of every step. Our commands, which need no more than the scores of
        whole hypotheses, say so in a private field of the configuration."""
        config = self.generation_config
        return bool(config.return_dict_in_generate) and not getattr(config, "_fastgen_sequence_scores_only", False)

    @property
    def wants_best_only(self) -> bool:
        """Whether nothing depends on more of the logits than which is the largest."""
        config, processors = self.generation_config, self.logits_processor
        is_plain = type(processors) is logits_process.LogitsProcessorList and not processors
        return not (self.is_search or config.do_sample or config.return_dict_in_generate) and is_plain

    @property
    def may_evict(self) -> bool:
        """Whether sentences may leave the batch as they finish; ask before any has left."""
        # Samples: one random stream for the whole batch.
        return not self.generation_config.do_sample and self.has_free_rows

    @property
    def has_free_rows(self) -> bool:
        """Whether no sentence's scores depend on others, or are wanted after it has finished."""
        return (
            not self.keeps_all_rows
            and all(_is_row_local(processor) for processor in self.logits_processor)
            # A source for each sentence; a caller's own processor may hold others.
            and all(getattr(processor, "batch_size", self.batch) == self.batch for processor in self.logits_processor)
            and self.stops_by_last_token
            and not self._may_divide_by_nothing
        )

    @property
    def _may_divide_by_nothing(self) -> bool:
        """Whether a row may be renormalised that has no token left: its scores become NaN, which win over all others,
        even over those of hypotheses that have finished. So the host returns other tokens than before."""
        processors = self.logits_processor
        if not any(type(processor) is logits_process.LogitNormalization for processor in processors):
            return False
        vocabulary = getattr(self.model.config.get_text_config(decoder=True), "vocab_size", 0)
        return sum(map(self._bans_at_most, processors)) >= vocabulary

    def _bans_at_most(self, processor: Any) -> int:
        """Tokens of one row."""
        if type(processor) is logits_process.NoRepeatNGramLogitsProcessor or _is_of_unilm(processor):
            return int(self.generation_config.max_length)
        if type(processor) is logits_process.EncoderNoRepeatNGramLogitsProcessor:
            return max(sum(map(len, ngrams.values())) for ngrams in processor.generated_ngrams)
        listed = ("suppress_tokens", "begin_suppress_tokens", "eos_token_id", "sequence_bias")
        return max(len(getattr(processor, name, ())) for name in listed)

    def keep(self, rows: Tensor) -> None:
        """Drop all rows but these, int64 `[rows']`, from the processors that hold something for each row."""
        processors = []
        for processor in self.logits_processor:
            ignored = getattr(processor, "prompt_ignore_length", None)  # repetition penalty: left padding
            if isinstance(ignored, Tensor):
                processor = copy.copy(processor)  # the caller's own stays as it is
                processor.prompt_ignore_length = ignored.index_select(0, rows.to(ignored.device))
            elif type(processor) is logits_process.EncoderNoRepeatNGramLogitsProcessor:
                processor = copy.copy(processor)
                sentences = (rows[:: self.beams] // self.beams).tolist()
                processor.generated_ngrams = [processor.generated_ngrams[sentence] for sentence in sentences]
                processor.batch_size = len(sentences)
            processors.append(processor)
        self.logits_processor = type(self.logits_processor)(processors)

    @property
    def stops_by_last_token(self) -> bool:
        return all(type(criterion) in _BY_LAST_TOKEN for criterion in self.stopping_criteria)

    @property
    def calls_back(self) -> bool:
        """Whether code of the user's runs between two steps: a processor, a criterion or a streamer."""
        watchers = [*self.logits_processor, *self.stopping_criteria, self.logits_processor, self.stopping_criteria]
        if self.streamer is not None:
            watchers.append(self.streamer)
        return any(
            not type(watcher).__module__.startswith(("transformers.", "fastgen.models."))
            or type(watcher) is logits_process.PrefixConstrainedLogitsProcessor
            for watcher in watchers
        )

    @property
    def chooses_by_numbers(self) -> bool:
        """Whether the next tokens follow from float32 scores, last tokens and lengths alone."""
        processors = [type(processor).__module__ for processor in self.logits_processor]
        is_stock = type(self.logits_processor) is logits_process.LogitsProcessorList
        return (
            self.stops_by_last_token
            and not self.generation_config.do_sample
            and is_stock
            and set(processors) <= {logits_process.__name__}
        )

    def stopper(self) -> Callable[..., Tensor]:
        """The host's stopping criteria as a function of candidates' tokens `[B, K]` -> bool `[B, K]`.

        Its other arguments: the hypotheses, their length without the candidate, the host's `scores`.
        Whole hypotheses are built only for criteria that look at more than the last token.
        """
        criteria = self.stopping_criteria

        def by_last_token(tokens: Tensor, hypotheses: Callable[[], Tensor], length: int, scores: Any) -> Tensor:
            stopped = torch.zeros_like(tokens, dtype=torch.bool)
            for criterion in criteria:
                if type(criterion) is stopping_criteria.MaxLengthCriteria:
                    if length + 1 >= criterion.max_length:
                        stopped = torch.ones_like(stopped)
                else:
                    stopped = stopped | torch.isin(tokens, criterion.eos_token_id.to(tokens.device))
            return stopped

        def by_hypothesis(tokens: Tensor, hypotheses: Callable[[], Tensor], length: int, scores: Any) -> Tensor:
            stopped: Tensor = criteria(hypotheses(), scores)
            return stopped.view(tokens.shape)

        return by_last_token if self.stops_by_last_token else by_hypothesis


def _is_row_local(processor: Any) -> bool:
    return type(processor) in _ROW_LOCAL or _is_of_unilm(processor)


def _is_of_unilm(processor: Any) -> bool:
    return type(processor).__module__ == "fastgen.models.unilm.processors"


def unsupported_reason(request: Request, *, shares: bool = False) -> str | None:
    """Why this request has to run on the host's own cache, in words for the user; None if it need not.

    `shares`: its rows share a batch with other requests'.
    """
    model, config, kwargs = request.model, request.generation_config, request.model_kwargs
    if not isinstance(request.model, nn.Module):
        return f"{type(model).__name__} is no torch.nn.Module"
    if reason := foreign_code.ambient_reason():
        return reason
    if request.is_search and request.beams < 2:
        return f"num_beams={request.beams} is no beam search"
    if not request.is_search and request.beams == 1 and request.input_ids.device.type != "cpu" and not shares:
        return "one sample of a prompt has nothing to share"  # on the CPU there are faster products to gain from
    if request.synced_gpus:
        return "synced_gpus keeps several processes in step"
    if reason := unsupported_configuration(model, config):
        return reason
    if config.prefill_chunk_size is not None and (model.config.is_encoder_decoder or "inputs_embeds" in kwargs):
        return "prefill_chunk_size is for decoder-only models that are given tokens"
    long_rope_from = getattr(model.config, "original_max_position_embeddings", None)
    if long_rope_from is not None and config.max_length > long_rope_from:
        return f"from {long_rope_from} tokens on the model may drop its cache and begin anew"
    if not kwargs.get("use_cache") or kwargs.get(CACHE) is None:
        if (name := _unknown_cache(kwargs)) is not None:
            return OfThisVersion(f"its cache is called {name}, and not {CACHE}")
        return "no cache of the standard kind is used"
    if unknown := sorted(name for name in kwargs if name not in _KNOWN_KWARGS and not _is_absent(kwargs[name])):
        return f"the model takes further inputs ({', '.join(unknown)})"
    cache = kwargs[CACHE]
    is_users = getattr(cache, "_is_user_defined", False)
    if not is_users and (reason := unsupported_cache(cache)):
        return reason
    if is_users or cache.get_seq_length():
        return f"the user passed {CACHE}"
    if request.input_ids.ndim != 2 or request.input_ids.shape[0] % request.beams:
        return f"input_ids of shape {tuple(request.input_ids.shape)} are not rows of beams"
    if not request.is_search and not _repeats(request.beams, [request.input_ids, *_tensors(kwargs)]):
        return "rows that should share a prompt differ"
    for name in _BEGIN_WITH_ROWS:
        value = kwargs.get(name)
        if isinstance(value, Tensor) and value.shape[:1] != request.input_ids.shape[:1]:
            return f"{name} of shape {tuple(value.shape)} does not begin with the rows of the batch"
    outputs = kwargs.get("encoder_outputs")
    if outputs is not None and outputs[0].shape[:1] != request.input_ids.shape[:1]:
        return f"there are {outputs[0].shape[0]} rows of the source for {request.input_ids.shape[0]} of the prompt"
    if reason := foreign_code.reason_against(request.foreign):
        return reason
    if reason := unsupported_model(model):
        return reason
    prompt_mask = kwargs.get("decoder_attention_mask")
    if prompt_mask is not None and streams.sees_padding(model) and not bool(prompt_mask.bool().all()):
        return "its steps attend to the padding of a prompt"
    source_mask = kwargs.get("attention_mask") if isinstance(cache, EncoderDecoderCache) else None
    if source_mask is not None and not bool(source_mask.bool().flatten(1).any(1).all()):
        return "a source is empty, and how that is attended to depends on the host's attention function"
    return None


def _unknown_cache(kwargs: dict[str, Any]) -> str | None:
    """The name that the host gives a cache of its own kinds, made for this call, if it is none that we know."""
    if not kwargs.get("use_cache"):
        return None
    names = (name for name, value in kwargs.items() if type(value) in (DynamicCache, EncoderDecoderCache))
    # Mamba's has another name before 5.24, and encoders have caches of their own.
    return next((name for name in names if "encoder" not in name and name != "cache_params"), None)


def unsupported_configuration(model: Any, config: Any) -> str | None:
    """Why no call of this model with this generation configuration can decode over the tree; None if some can."""
    if reason := verification.reason_against(model):
        return reason
    if model.training or torch.is_grad_enabled():
        return "the model is in training mode" if model.training else "gradients are enabled"
    for option in ("output_attentions", "output_hidden_states"):
        if getattr(config, option, False) or getattr(model.config, option, False):
            return f"{option} asks for tensors of the host's own layout"
    if config.low_memory or config.is_assistant:
        return "low_memory and assisted decoding are left to the host"
    if config.cache_implementation not in (None, "dynamic"):
        return f"cache_implementation={config.cache_implementation!r} was asked for"
    if len(set(getattr(model, "hf_device_map", None) or {})) > 1:
        return "the model is spread over several devices"
    return None


def _is_absent(value: Any) -> bool:
    return value is None or (isinstance(value, dict) and not value)  # multimodal models asked about text alone


def _tensors(kwargs: dict[str, Any]) -> list[Tensor]:
    """What the host expands to rows: tensors, and those of the encoder's output."""
    outputs = kwargs.get("encoder_outputs") or {}
    values = [*kwargs.values(), *(outputs.values() if isinstance(outputs, dict) else outputs)]
    return [value for value in values if isinstance(value, Tensor)]


def _repeats(times: int, tensors: list[Tensor]) -> bool:
    """Whether each row is there so many times in turn. `generate` sees to it, but `_sample` may be called without."""
    rows = tensors[0].shape[0]
    return times == 1 or all(
        bool((tensor.unflatten(0, (-1, times)) == tensor[::times, None]).all())
        for tensor in tensors
        if tensor.ndim and tensor.shape[0] == rows
    )


def unsupported_model(model: Any) -> str | None:
    """Why this model cannot decode over the tree, whatever the request; None if it can."""
    if hasattr(model, "_reorder_cache"):
        return "the model reorders its cache itself"
    parts = dict(of_steps_by_name(model))
    if training := next((path for path, module in parts.items() if _is_training(module)), None):
        return f"{training} is in training mode"
    numbers = {part.layer_idx for part in parts.values() if isinstance(getattr(part, "layer_idx", None), int)}
    if numbers and 0 not in numbers:  # which is asked for how long the cache is
        return "its first layer has been cut out, and the others keep their numbers"
    if reason := streams.unsupported_model(model):
        return reason
    if name := unfoldable_attention(model):
        return f"{name} computes attention itself instead of calling an attention function"
    if reason := unsupported_modules(model):
        return reason
    for module in model.modules():
        config = getattr(module, "config", None)
        types = getattr(config, "layer_types", None) or ()
        if unknown := sorted(set(types) - set(_LAYER_TYPES)):
            return f"it has layers of type {', '.join(unknown)}"
        if getattr(config, "attention_chunk_size", None) is not None:
            return "it attends in chunks"
    return None


def _is_training(module: nn.Module) -> bool:
    """Whether a module of the host's or torch's may compute something else than in evaluation."""
    if not module.training:
        return False
    if isinstance(module, nn.modules.dropout._DropoutNd):
        return module.p > 0
    kinds = (nn.modules.batchnorm._NormBase, nn.RReLU)
    return type(module).__module__.startswith(("transformers.", "fastgen.")) or isinstance(module, kinds)


def unsupported_modules(model: Any, attention: tuple[str | None, ...] = _ATTENTION) -> str | None:
    """Why rows of this model, an encoder too, may depend on others or on their padding; None if they don't.

    `attention`: implementations that are known.
    """
    for module in model.modules():
        if type(module).__module__.startswith("torch.ao.nn.quantized.dynamic"):
            return "dynamically quantised layers scale a row by the others of its batch"
        implementation = getattr(getattr(module, "config", None), "_attn_implementation", None)
        if implementation not in attention:
            return f"attention implementation {implementation!r} has not been proven"
    return None
