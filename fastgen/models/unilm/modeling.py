"""UniLM: one BERT that reads the source and writes the target, and predicts each next word at a `[MASK]`.

Dong et al. 2019, "Unified Language Model Pre-training for Natural Language Understanding and Generation"
(https://arxiv.org/abs/1905.03197), section 2.3, as microsoft/unilm decodes it (unilm-v1, s2s-ft). Source tokens attend
to the whole source; a target token attends to the source, earlier target tokens and itself. The next word is predicted
at a `[MASK]` one position further on, which attends to all tokens before it and itself; no token attends to it.

`rows` sentences or hypotheses, `Q` tokens read at once, `W` keys, `H` heads, `D` head size, `d` hidden size.
"""

from __future__ import annotations

import os
import warnings
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import Cache, DynamicCache, GenerationConfig, LogitsProcessorList
from transformers.generation.logits_process import NoRepeatNGramLogitsProcessor
from transformers.generation.utils import GenerationMixin
from transformers.modeling_outputs import CausalLMOutputWithPast
from transformers.models.bert.modeling_bert import (
    BertEmbeddings,
    BertIntermediate,
    BertLMHeadModel,
    BertOnlyMLMHead,
    BertOutput,
    BertPreTrainedModel,
    BertSelfOutput,
)

from fastgen import phases
from fastgen.models.unilm import checkpoints
from fastgen.models.unilm.configuration import UnilmConfig
from fastgen.models.unilm.processors import NoRepeatNGramExceptLogitsProcessor
from fastgen.optimizer.transformers.versions import CACHE, takes_cache

__phase__ = phases.BY_LINE

_IGNORED = "forbid_ignore_ids"


class UnilmSelfAttention(nn.Module):
    """Self-attention: new tokens attend to all tokens so far, and one `[MASK]` attends to these and itself."""

    def __init__(self, config: UnilmConfig, layer_idx: int) -> None:
        super().__init__()
        self.num_attention_heads = config.num_attention_heads
        self.attention_head_size = config.hidden_size // config.num_attention_heads
        self.scaling = self.attention_head_size**-0.5
        self.layer_idx = layer_idx
        self.query = nn.Linear(config.hidden_size, config.hidden_size)
        self.key = nn.Linear(config.hidden_size, config.hidden_size)
        self.value = nn.Linear(config.hidden_size, config.hidden_size)
        self.dropout = config.attention_probs_dropout_prob

    @takes_cache
    def forward(
        self, hidden_states: Tensor, attention_mask: Tensor | None = None, cache: Cache | None = None
    ) -> Tensor:
        """The output of attention before the output projection, `[rows, Q + 1, d]`.

        Args:
            hidden_states: `[rows, Q + 1, d]`, of the tokens and, last, of the `[MASK]`. Only keys and values of tokens
                go into the cache.
            attention_mask: bool `[rows, 1, Q or 1, W]`, which of the cached keys may be attended to; the last row also
                applies to the `[MASK]`, which attends to itself, too.
            cache: the cache; without a cache, W = Q.
        """
        query, key, value = (self._heads(linear(hidden_states)) for linear in (self.query, self.key, self.value))
        keys, values = key[:, :, :-1], value[:, :, :-1]
        if cache is not None:
            keys, values = cache.update(keys, values, self.layer_idx)
        dropout = self.dropout if self.training else 0.0
        tokens = F.scaled_dot_product_attention(query[:, :, :-1], keys, values, attention_mask, dropout)
        # The key of [MASK] is kept apart, so that the cached keys need not be copied.
        own_query, own_key, own_value = query[:, :, -1:] * self.scaling, key[:, :, -1:], value[:, :, -1:]
        scores = torch.matmul(own_query, keys.transpose(-1, -2))  # [rows, H, 1, W]
        if attention_mask is not None:
            scores = scores.masked_fill(~attention_mask[:, :, -1:], float("-inf"))
        own_score = (own_query * own_key).sum(-1, keepdim=True)  # [rows, H, 1, 1]
        at_least = torch.promote_types(query.dtype, torch.float32)
        weights = torch.softmax(torch.cat([scores, own_score], -1), -1, dtype=at_least).to(query.dtype)
        weights = F.dropout(weights, dropout)
        mask = torch.matmul(weights[..., :-1], values) + weights[..., -1:] * own_value
        return torch.cat([tokens, mask], 2).transpose(1, 2).flatten(2)

    def _heads(self, states: Tensor) -> Tensor:
        return states.unflatten(-1, (self.num_attention_heads, self.attention_head_size)).transpose(1, 2)


class UnilmAttention(nn.Module):
    """Self-attention, output projection and residual connection, named as in BERT's checkpoints."""

    def __init__(self, config: UnilmConfig, layer_idx: int) -> None:
        super().__init__()
        self.self = UnilmSelfAttention(config, layer_idx)
        self.output = BertSelfOutput(config)


class UnilmLayer(nn.Module):
    def __init__(self, config: UnilmConfig, layer_idx: int) -> None:
        super().__init__()
        self.is_last = layer_idx == config.num_hidden_layers - 1
        self.attention = UnilmAttention(config, layer_idx)
        self.intermediate = BertIntermediate(config)
        self.output = BertOutput(config)

    def forward(self, hidden_states: Tensor, attention_mask: Tensor | None, cache: Cache | None) -> Tensor:
        """`[rows, Q + 1, d]` -> the same shape; the last layer returns only the `[MASK]`'s state, `[rows, 1, d]`."""
        attended = self.attention.self(hidden_states, attention_mask, cache)
        if self.is_last:
            attended, hidden_states = attended[:, -1:], hidden_states[:, -1:]
        attended = self.attention.output(attended, hidden_states)
        output: Tensor = self.output(self.intermediate(attended), attended)
        return output


class UnilmEncoder(nn.Module):
    def __init__(self, config: UnilmConfig) -> None:
        super().__init__()
        self.layer = nn.ModuleList(UnilmLayer(config, index) for index in range(config.num_hidden_layers))


class UnilmPreTrainedModel(BertPreTrainedModel):
    config_class = UnilmConfig
    base_model_prefix = "bert"
    supports_gradient_checkpointing = False
    _supports_sdpa = True
    _supports_flash_attn = False
    _supports_flex_attn = False
    _supports_attention_backend = False
    _can_record_outputs = None


class UnilmModel(UnilmPreTrainedModel):
    """UniLM's embeddings and layers, without the head."""

    def __init__(self, config: UnilmConfig) -> None:
        config.check()
        super().__init__(config)
        self.embeddings = BertEmbeddings(config)
        self.encoder = UnilmEncoder(config)
        self.post_init()

    def get_input_embeddings(self) -> nn.Module:
        return self.embeddings.word_embeddings

    def set_input_embeddings(self, value: nn.Module) -> None:
        self.embeddings.word_embeddings = value

    @takes_cache
    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        cache: Cache | None = None,
    ) -> Tensor:
        """The last layer's state of a `[MASK]` after the tokens, `[rows, 1, d]`; see `UnilmForSeq2Seq.forward`."""
        rows, width = input_ids.shape
        length = 0 if cache is None else cache.get_seq_length()  # may be a tensor in a step
        is_empty = isinstance(length, int) and length == 0
        if width > 1 and isinstance(length, int) and not is_empty:
            raise ValueError("UniLM reads its source at once and its target token by token: the cache is not empty.")
        if position_ids is None:
            position_ids = _positions(input_ids, attention_mask, length)
        position_ids = position_ids.expand(rows, -1)
        # Padding, on either side, has no higher position than the last token.
        position_ids = torch.cat([position_ids, position_ids.amax(-1, keepdim=True) + 1], -1)
        token_ids = torch.cat([input_ids, input_ids.new_full((rows, 1), self.config.mask_token_id)], -1)
        segment_ids = torch.full_like(token_ids, self.config.target_type_id)
        if width > 1 or is_empty:
            segment_ids[:, :-1] = self.config.source_type_id
        if attention_mask is not None and attention_mask.ndim == 2:
            attention_mask = attention_mask[:, None, None].bool()
        states: Tensor = self.embeddings(
            input_ids=token_ids, token_type_ids=segment_ids, position_ids=position_ids
        )  # [rows, Q + 1, d]
        for layer in self.encoder.layer:
            states = layer(states, attention_mask, cache)
        return states


class UnilmForSeq2Seq(UnilmPreTrainedModel, GenerationMixin):
    """UniLM v1 and v1.2, and models fine-tuned from them by s2s-ft, for `generate`.

    To transformers it is a decoder-only model: `input_ids` are `[CLS] source [SEP]`, as BERT's tokenizers make them,
    padded on either side and with an `attention_mask`, and `generate` returns them followed by the target, up to
    `[SEP]`. The tokenizer's `token_type_ids` are ignored: source tokens and target tokens have fixed segments. The
    source is read once and as a whole, and keys and values are cached: `generate` does not work with `use_cache=False`,
    with static caches, or with a source in chunks.

    `generate(no_repeat_ngram_size=n, forbid_ignore_ids=[...])` is the published `--forbid_duplicate_ngrams
    --ngram_size n` with `--forbid_ignore_word`; the ids may be in the generation config too. Unlike with other
    decoder-only models of transformers, `no_repeat_ngram_size` looks at the target alone. `min_new_tokens` is the
    published `--min_len`, and `max_new_tokens` is `--max_tgt_length`, which counts `[SEP]`.

    The search is transformers', not the published one, which differs in this:

    - There a hypothesis is scored by its log-probability over ((5 + length) / 6)^length_penalty (Wu et al. 2016,
      https://arxiv.org/abs/1609.08144, section 7), 0 by default; here over length^length_penalty, 1.0 by default. Both
      count `[SEP]`; at 0 they are the same.
    - There a hypothesis takes one of the beams in the step in which it ends, any number of hypotheses may end, and the
      search goes on to the maximum length, or until all beams end in the same step. Here hypotheses that end leave all
      beams to others, the best `num_beams` ended ones are kept, and the search ends when none can get better, or by
      `early_stopping`.
    - There greedy search ignores the ban of n-grams and the minimum length.
    - There the score of a forbidden token is lowered by 10,000; here the token becomes impossible.

    Positions count a sentence's tokens without padding: source and target together must not be longer than
    `max_position_embeddings`, and `generate` warns if they may become longer. `generate` numbers positions by the
    attention mask, whatever `position_ids` it is given.
    """

    _tied_weights_keys = BertLMHeadModel._tied_weights_keys  # a list in 4.57, a dict in 5.x

    def __init__(self, config: UnilmConfig) -> None:
        super().__init__(config)
        self.bert = UnilmModel(config)
        self.cls = BertOnlyMLMHead(config)
        self.post_init()

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path: Any, *model_args: Any, **kwargs: Any) -> Any:
        """Load a model as the host does, or from a published `.bin` file or a folder with a `pytorch_model.bin`.

        For these, `config` is a `UnilmConfig` or the path of one (`bert_config.json` of v1), by default the
        `config.json` or `bert_config.json` beside the file; fields of the configuration, such as `source_type_id=4`,
        may be given by name, and so may `dtype`, float32 by default.

        Raises:
            ValueError: if weights are missing or unknown to the model.
            FileNotFoundError: if there is no configuration.
            TypeError: for arguments that are no fields of the configuration.
        """
        file = checkpoints.published_file(pretrained_model_name_or_path)
        if file is None or model_args or kwargs.get("state_dict") is not None:
            return super().from_pretrained(pretrained_model_name_or_path, *model_args, **kwargs)
        config, dtype = checkpoints.configuration(file, **kwargs)
        model = cls(config)
        published = torch.load(file, map_location="cpu", weights_only=True)
        weights = checkpoints.converted(published, config, checkpoints.untied_shapes(model), file)
        model.load_state_dict(weights, strict=False)  # all are there except the tied ones
        if os.path.exists(os.path.join(os.path.dirname(file), "generation_config.json")):
            model.generation_config = GenerationConfig.from_pretrained(os.path.dirname(file))
        return model.to(next(iter(weights.values())).dtype if dtype == "auto" else dtype).eval()

    def get_input_embeddings(self) -> nn.Module:
        return self.bert.get_input_embeddings()

    def set_input_embeddings(self, value: nn.Module) -> None:
        self.bert.set_input_embeddings(value)

    def get_output_embeddings(self) -> nn.Module:
        decoder: nn.Module = self.cls.predictions.decoder
        return decoder

    def set_output_embeddings(self, new_embeddings: nn.Linear) -> None:
        self.cls.predictions.decoder = new_embeddings
        self.cls.predictions.bias = new_embeddings.bias

    @takes_cache
    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        cache: Cache | None = None,
        token_type_ids: Tensor | None = None,
        use_cache: bool | None = None,
        return_dict: bool | None = None,
        **others: Any,
    ) -> Any:
        """Read a source, or a token of a target whose source is in the cache, and predict the next word.

        Args:
            input_ids: int64 `[rows, Q]`; the whole source if the cache is empty or there is none, else one token.
            attention_mask: `[rows, W]`, 0 where there is padding; or bool `[rows, 1, Q or 1, W]`, which is passed to
                the attention modules as it is.
            position_ids: int64 `[rows, Q]`; by default they follow from the mask.
            cache: the cache, to which the tokens' keys and values are appended.
            token_type_ids: ignored; BERT's tokenizers make them.

        Returns: `CausalLMOutputWithPast`; logits are `[rows, 1, V]`, whatever Q is.

        Raises:
            ValueError: if several tokens are to be read after others, or for inputs and outputs that UniLM lacks.
        """
        asked = (name for name, value in others.items() if value is not None and value is not False)
        if unknown := sorted(set(asked) - {"cache_position"}):  # 4.57 passes it to all models
            raise ValueError(f"UniLM has no {', '.join(unknown)}.")
        use_cache = self.config.use_cache if use_cache is None else use_cache
        if use_cache and cache is None:
            cache = DynamicCache(config=self.config)
        states = self.bert(input_ids, attention_mask, position_ids, cache)
        output = CausalLMOutputWithPast(logits=self.cls(states), **{CACHE: cache if use_cache else None})
        return output.to_tuple() if return_dict is False else output

    @takes_cache
    def prepare_inputs_for_generation(
        self,
        input_ids: Tensor,
        cache: Cache | None = None,
        attention_mask: Tensor | None = None,
        **kwargs: Any,
    ) -> dict[str, Any]:
        """Do what the host's method does, with positions that don't count padding, on the left or on the right.

        Raises:
            ValueError: without a cache, or with a cache of fixed length, for which the host makes a causal mask.
        """
        if cache is None or getattr(cache, "is_compileable", False):
            raise ValueError("UniLM needs a dynamic cache to generate: leave use_cache and cache_implementation alone.")
        inputs: dict[str, Any] = super().prepare_inputs_for_generation(
            input_ids, attention_mask=attention_mask, **{CACHE: cache}, **kwargs
        )
        if attention_mask is not None and attention_mask.ndim == 2:
            inputs["position_ids"] = _positions(inputs["input_ids"], attention_mask, 0)
        return inputs

    def _prepare_generation_config(
        self, generation_config: GenerationConfig | None, *args: Any, **kwargs: Any
    ) -> tuple[GenerationConfig, dict[str, Any]]:
        ignored = kwargs.pop(_IGNORED, None)
        config, model_kwargs = super()._prepare_generation_config(generation_config, *args, **kwargs)
        for source in (config, self.generation_config):
            ignored = getattr(source, _IGNORED, None) if ignored is None else ignored
        if ignored is not None:
            setattr(config, _IGNORED, self._checked(ignored))  # `config` is a copy for this call
        return config, model_kwargs

    def _checked(self, ignored: Any) -> list[int]:
        """`forbid_ignore_ids` as a list of tokens; raises ValueError if they are no tokens."""
        tokens = ignored.tolist() if isinstance(ignored, Tensor) else ignored
        if not isinstance(tokens, (list, tuple, set, frozenset)):
            raise ValueError(f"forbid_ignore_ids={tokens!r} is no list of tokens.")
        size = self.config.vocab_size
        if wrong := [token for token in tokens if not isinstance(token, int) or not 0 <= token < size]:
            raise ValueError(f"forbid_ignore_ids has {wrong[0]!r}, which is no token of {size}.")
        return list(tokens)

    def _validate_generated_length(self, generation_config: GenerationConfig, *args: Any, **kwargs: Any) -> None:
        super()._validate_generated_length(generation_config, *args, **kwargs)
        longest, positions = generation_config.max_length, self.config.max_position_embeddings
        if longest is not None and longest > positions:
            text = f"source and target may have {longest} tokens, and max_position_embeddings is {positions}: "
            warnings.warn(f"{text}what gets longer than that fails.", stacklevel=2)

    def _get_logits_processor(
        self, generation_config: GenerationConfig, input_ids_seq_length: int = 0, *args: Any, **kwargs: Any
    ) -> LogitsProcessorList:
        processors = super()._get_logits_processor(generation_config, input_ids_seq_length, *args, **kwargs)
        users = [id(processor) for processor in kwargs.get("logits_processor") or ()]
        ignored = getattr(generation_config, _IGNORED, None) or ()
        return LogitsProcessorList(
            NoRepeatNGramExceptLogitsProcessor(processor.ngram_size, input_ids_seq_length, ignored)
            if type(processor) is NoRepeatNGramLogitsProcessor and id(processor) not in users
            else processor
            for processor in processors
        )


def _positions(input_ids: Tensor, attention_mask: Tensor | None, length: int | Tensor) -> Tensor:
    """Positions, int64 `[rows or 1, Q]`: tokens of the sentence before each one; `length`: earlier ones, if no mask."""
    width = input_ids.shape[1]
    if attention_mask is None or attention_mask.ndim != 2:
        return torch.arange(width, device=input_ids.device)[None] + length
    positions = (attention_mask.long().cumsum(-1) - 1).clamp(min=0)[:, -width:]
    return positions.contiguous()  # the same strides in each step, so that steps can be replayed
