"""The arguments of one call of the host's `_beam_search` or `_sample`, and what follows from them."""

from __future__ import annotations

import copy
import math
import sys
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from transformers.generation import logits_process, stopping_criteria

from fastgen import locks
from fastgen.optimizer.transformers import criteria, expansion, foreign_code, replaced_processors
from fastgen.optimizer.transformers.generate import tries
from fastgen.optimizer.transformers.model.facts import ModelFacts, facts_of
from fastgen.optimizer.transformers.versions import CACHE, decays_finite_scores
from fastgen.patching.foreign_code import Finding

# Processors that treat every row by itself, wherever it is in the batch, so that sentences may leave.
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
# Processors that only scale or cut off scores never change which is the largest.
_KEEP_THE_LARGEST = tuple(
    getattr(logits_process, name, None)
    for name in """TemperatureLogitsWarper TopPLogitsWarper TopKLogitsWarper MinPLogitsWarper
    EpsilonLogitsWarper EtaLogitsWarper LogitNormalization""".split()
)
# Processors that may make a log-probability larger than 0, or none of ours to know; see `scores_only_fall`.
_RAISE = tuple(
    getattr(logits_process, name, None)
    for name in "SequenceBiasLogitsProcessor ExponentialDecayLengthPenalty InfNanRemoveLogitsProcessor".split()
)
_FAR = 1e8  # less than the 1e9 that the host puts between finished hypotheses and what comes later
_LOW = 1e3  # no log-probability that counts is lower than -1e3
# Criteria that depend only on the last token and the length.
_BY_LAST_TOKEN = (stopping_criteria.EosTokenCriteria, stopping_criteria.MaxLengthCriteria)


@dataclass
class Request:
    """The arguments of `_beam_search` or, unless it `is_beam_search`, of `_sample`, under the host's names."""

    model: Any
    input_ids: Tensor  # int64 [B*M, P]
    logits_processor: Any
    stopping_criteria: Any
    generation_config: Any
    synced_gpus: bool
    model_kwargs: dict[str, Any]
    streamer: Any = None  # the user's
    is_beam_search: bool = True
    diverse: Callable[..., Any] | None = None  # our loop for diverse beam search, with the host's signature
    seeds: Sequence[int] | None = None  # a seed for each sentence, for samples drawn in a shared batch
    # The multimodal inputs before the host expanded them for the beams, as far as that was seen.
    unexpanded: Mapping[str, Any] = field(default_factory=dict)
    held: Any = None  # the HeldStreamer of a call with beams, see `streaming`
    users_cache: Any = None  # a cache that the user passed, with the beginning of the prompts: see `cache.users_cache`

    def __post_init__(self) -> None:
        self.logits_processor = replaced_processors.marked(self.logits_processor)
        self.stopping_criteria = replaced_processors.marked(self.stopping_criteria)
        # Greedy search and sampling ask the criteria alone when to end, and one of the user's may replace the host's.
        longest = None if self.is_beam_search else criteria.longest(self.stopping_criteria)
        if longest is not None and longest > self.generation_config.max_length:
            longer = copy.copy(self.generation_config)
            longer.max_length = longest
            self.generation_config = longer

    @property
    def beams(self) -> int:
        """The number of rows that share a prompt, M: beams or samples."""
        config = self.generation_config
        return int(config.num_beams if self.is_beam_search else config.num_return_sequences or 1)

    @locks.cached_property
    def all_inputs(self) -> tuple[str, ...]:
        """Names of all inputs of the model, in alphabetical order."""
        return tuple(sorted(name for name, value in self.model_kwargs.items() if not _is_absent(value)))

    @locks.cached_property
    def multimodal(self) -> tuple[str, ...]:
        """Names of the inputs that only some models take: images, grids of patches, clips."""
        return tuple(name for name in self.all_inputs if name not in expansion.BY_ROW)

    @locks.cached_property
    def arrangement(self) -> Hashable:
        """How images, clips and the like are spread over the sentences: see `expansion.arrangement`."""
        if not self.multimodal:
            return None
        return expansion.arrangement(self.input_ids[:: self.beams], self.unexpanded, self.model.config)

    @locks.cached_property
    def facts(self) -> ModelFacts:
        """Facts about the model, as it is when the call begins."""
        return facts_of(self.model)

    @property
    def foreign(self) -> list[Finding]:
        """Foreign code that a step would run, search rules apart."""
        return [finding for finding in self.facts.foreign if finding.name not in foreign_code.SEARCH_RULES]

    @property
    def users_rule(self) -> str | None:
        """The rule of the host's beam search that the user has replaced, in words; None if none."""
        return foreign_code.changed_rule(self.facts.foreign)

    @property
    def changed_rule(self) -> str | None:
        """The rule of beam search that differs for this model, so that the host's loop has to run; None if none."""
        return self.users_rule or self.facts.overridden_rule

    @property
    def batch(self) -> int:
        return self.input_ids.shape[0] // self.beams

    def run(self, stock: Callable[..., Any], cache: Any = None) -> Any:
        """Run `stock`, a loop of the host, over the request's cache or another."""
        kwargs = self.model_kwargs if cache is None else {**self.model_kwargs, CACHE: cache}
        return stock(
            self.model,
            self.input_ids,
            self.logits_processor,
            self.stopping_criteria,
            self.generation_config,
            self.synced_gpus,
            **({} if self.is_beam_search else {"streamer": self.streamer}),
            **kwargs,
        )

    @property
    def keeps_all_rows(self) -> bool:
        """Whether the output holds every row of every step. Our commands need only the scores of whole hypotheses, and
        say so in a private field of the configuration."""
        config = self.generation_config
        return bool(config.return_dict_in_generate) and not getattr(config, "_fastgen_sequence_scores_only", False)

    @property
    def wants_best_only(self) -> bool:
        """Whether the result depends only on which logit is the largest."""
        config, processors = self.generation_config, self.logits_processor
        is_plain = type(processors) is logits_process.LogitsProcessorList and not processors
        return not (self.is_beam_search or config.do_sample or config.return_dict_in_generate) and is_plain

    @property
    def may_evict(self) -> bool:
        """Whether sentences may leave the batch when they finish; to be asked before any has left."""
        # Samples of the whole batch come from one random stream.
        return not self.generation_config.do_sample and self.has_free_rows

    @property
    def has_free_rows(self) -> bool:
        """Whether no sentence's scores depend on other sentences, or are wanted after the sentence has finished."""
        return (
            not self.keeps_all_rows
            and not self.multimodal  # which of them belong to a sentence, only the model knows
            and all(_is_row_local(processor) for processor in self.logits_processor)
            # One source for each sentence; a processor that the caller made may have another number.
            and all(getattr(processor, "batch_size", self.batch) == self.batch for processor in self.logits_processor)
            and all(self._has_all_sentences(processor) for processor in self.logits_processor)
            and self.stops_by_last_token
            and self.users_cache is None  # which gets all rows in the end
            and not rotates_by_length(self)
            and not self._may_divide_by_nothing
            and not (self.is_beam_search and _may_outrank_finished(self.logits_processor, self.generation_config))
        )

    def _has_all_sentences(self, processor: Any) -> bool:
        """Whether a trie has sequences for each sentence of the batch; else the host raises an error."""
        trie = tries.trie_of(processor)
        return trie is None or trie.num_sentences in (None, self.input_ids.shape[0] // processor._num_beams)

    @property
    def scores_only_fall(self) -> bool:
        """Whether the sum of a hypothesis' log-probabilities cannot rise as the hypothesis grows."""
        known = {*_ROW_LOCAL, logits_process.PrefixConstrainedLogitsProcessor} - {*_RAISE}
        return all(type(processor) in known for processor in self.logits_processor)

    @property
    def _may_divide_by_nothing(self) -> bool:
        """Whether a row without any token left may be renormalised: the scores become NaN, which rank above all others,
        even above finished hypotheses. The host then returns other tokens than before."""
        processors = self.logits_processor
        if not any(type(processor) is logits_process.LogitNormalization for processor in processors):
            return False
        vocabulary = getattr(self.model.config.get_text_config(decoder=True), "vocab_size", 0)
        return sum(map(self._bans_at_most, processors)) >= vocabulary

    def _bans_at_most(self, processor: Any) -> int:
        """The most tokens that a processor may ban in one row."""
        if type(processor) is logits_process.NoRepeatNGramLogitsProcessor or _is_of_unilm(processor):
            return int(self.generation_config.max_length)
        if tries.trie_of(processor) is not None:
            return sys.maxsize
        if type(processor) is logits_process.EncoderNoRepeatNGramLogitsProcessor:
            return max(sum(map(len, ngrams.values())) for ngrams in processor.generated_ngrams)
        listed = ("suppress_tokens", "begin_suppress_tokens", "eos_token_id", "sequence_bias")
        return max(len(getattr(processor, name, ())) for name in listed)

    def rules_of_the_largest(self) -> list[Any]:
        """The processors that may change which score is the largest, of those that can be called at any time: they keep
        nothing between two calls."""
        kinds = {*_ROW_LOCAL, getattr(logits_process, "WhisperTimeStampLogitsProcessor", None)} - {*_KEEP_THE_LARGEST}
        return [processor for processor in self.logits_processor if type(processor) in kinds]

    def select(self, rows: Tensor) -> None:
        """Drop all rows but these, int64 `[rows']`, from processors that hold data for each row."""
        processors = []
        for processor in self.logits_processor:
            ignored = getattr(processor, "prompt_ignore_length", None)  # repetition penalty: left padding
            if isinstance(ignored, Tensor):
                processor = copy.copy(processor)  # the caller's processor is not changed
                processor.prompt_ignore_length = ignored.index_select(0, rows.to(ignored.device))
            elif type(processor) is logits_process.EncoderNoRepeatNGramLogitsProcessor:
                processor = copy.copy(processor)
                sentences = (rows[:: self.beams] // self.beams).tolist()
                processor.generated_ngrams = [processor.generated_ngrams[sentence] for sentence in sentences]
                processor.batch_size = len(sentences)
            elif (trie := tries.trie_of(processor)) is not None and trie.num_sentences is not None:
                processor, each = copy.copy(processor), processor._num_beams
                processor._prefix_allowed_tokens_fn = trie.select((rows[::each] // each).tolist())
            processors.append(processor)
        self.logits_processor = type(self.logits_processor)(processors)

    @property
    def stops_by_last_token(self) -> bool:
        is_stock = type(self.stopping_criteria) is stopping_criteria.StoppingCriteriaList
        return is_stock and all(type(criterion) in _BY_LAST_TOKEN for criterion in self.stopping_criteria)

    @property
    def calls_back(self) -> bool:
        """Whether code of the user's runs between two steps: a processor, a criterion or a streamer."""
        watchers = [*self.logits_processor, *self.stopping_criteria, self.logits_processor, self.stopping_criteria]
        if self.streamer is not None:
            watchers.append(self.streamer)
        return any(
            not type(watcher).__module__.startswith(("transformers.", "fastgen.models.", "fastgen.optimizer.streams"))
            or (tries.constrains(watcher) and tries.trie_of(watcher) is None)
            for watcher in watchers
        )

    @property
    def chooses_by_numbers(self) -> bool:
        """Whether the next tokens depend only on float32 scores, last tokens and lengths, and no code of the user's."""
        processors = [type(processor).__module__ for processor in self.logits_processor]
        is_stock = type(self.logits_processor) is logits_process.LogitsProcessorList
        return (
            self.stops_by_last_token
            and criteria.are_of(self.generation_config, self.stopping_criteria)
            and not self.generation_config.do_sample
            and is_stock
            and set(processors) <= {logits_process.__name__}
            and not tries.has_trie(self.logits_processor)
            and not self.calls_back
        )

    def stopper(self) -> Callable[..., Tensor]:
        """The host's stopping criteria as a function of candidates' tokens `[B, K]` -> bool `[B, K]`.

        Other arguments of the function: the hypotheses, their length without the candidate, the host's `scores`.
        Whole hypotheses are built only for criteria that depend on more than the last token.
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


def rotates_by_length(request: Request) -> bool:
    """Whether positions may be rotated as the longest row of the batch says, which may leave it."""
    embeds = request.model_kwargs.get("inputs_embeds")  # which the largest length does not count
    longest = request.generation_config.max_length + (embeds.shape[1] if isinstance(embeds, Tensor) else 0)
    return bool(longest >= request.facts.rotates_from)


def _is_absent(value: Any) -> bool:
    return value is None or (isinstance(value, dict) and not value)  # multimodal models, given only text


def _is_row_local(processor: Any) -> bool:
    return type(processor) in _ROW_LOCAL or _is_of_unilm(processor) or tries.trie_of(processor) is not None


def _is_of_unilm(processor: Any) -> bool:
    return type(processor).__module__ == "fastgen.models.unilm.processors"


def _may_outrank_finished(processors: Any, config: Any) -> bool:
    """Whether a score may rise so far that a hypothesis ranks above finished ones, which stand 1e9 above all that the
    host accepts no more. In older versions a decayed score becomes NaN where another processor has banned the end."""
    steps, bias, growth = config.max_length, 0.0, 0.0
    for processor in processors:
        if isinstance(processor, logits_process.SequenceBiasLogitsProcessor):
            bias += max([0.0, *map(float, processor.sequence_bias.values())])
        elif type(processor) is logits_process.ExponentialDecayLengthPenalty and processor.regulation_factor > 1:
            if len(processors) > 1 and not decays_finite_scores():
                return True
            growth = max(steps - processor.regulation_start, 0) * math.log(processor.regulation_factor)
    if growth > math.log(_FAR):
        return True
    # What all steps may add, and what the end may, which is added once, over the length to the power of the penalty.
    most = bias * steps + (_LOW + bias) * math.expm1(growth)
    return most > 0 and math.log(most) + math.log(steps) * max(0, -config.length_penalty) > math.log(_FAR)
