"""GPT-2 conditioned on a latent as memory and as embedding, in the two ways of Optimus (arXiv 2004.04092, section 3).

Memory: from the latent z, `linear` makes one vector for each layer, which is both a key and a value of that layer.
Embedding: `linear_emb` makes one vector, which is added to the embedding of every token. Weights have the names of
Optimus's decoder and, except these two, of GPT-2.

Memory is at position 0 and tokens begin at position 1, as in Optimus. So memory gets a slot like a token's, before the
prompt and any padding, and cache, masks and positions are those of any GPT-2. When the prompt is read, each layer's
memory vector is put into the slot as key and value. The output at the slot is not used.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import GenerationConfig, GPT2LMHeadModel, LogitsProcessor, LogitsProcessorList
from transformers.generation.logits_process import (
    ForcedBOSTokenLogitsProcessor,
    NoRepeatNGramLogitsProcessor,
    SequenceBiasLogitsProcessor,
)
from transformers.modeling_outputs import CausalLMOutputWithCrossAttentions
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.gpt2.modeling_gpt2 import GPT2Attention, GPT2Model, eager_attention_forward

from fastgen.models.vae.configuration import Gpt2VaeConfig
from fastgen.optimizer.transformers.versions import CACHE, OLD_CACHE, takes_cache

_FINDS_EAGER = hasattr(ALL_ATTENTION_FUNCTIONS, "get_interface")  # 5.x; 4.57 finds all but eager attention
_SEEING = (ForcedBOSTokenLogitsProcessor, NoRepeatNGramLogitsProcessor, SequenceBiasLogitsProcessor)
_IGNORED = -100  # a label that counts for no loss
# Arguments of `generate` that hold something for each token, and nothing for the slot.
_PER_TOKEN = ("inputs_embeds", "cache", OLD_CACHE, "position_ids", "token_type_ids")


class WithoutSlot(LogitsProcessor):
    """Wraps a processor that depends on which tokens there are and in which order, to hide the slot from it."""

    def __init__(self, processor: LogitsProcessor) -> None:
        self.processor = processor

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """Process `scores`, `[rows, V]`, of tokens after `input_ids`, int64 `[rows, 1 + P]`, slot first."""
        output: Tensor = self.processor(input_ids[:, 1:], scores)
        return output


class LatentMemory(NamedTuple):
    """The memory vectors of all layers, in the forward pass that fills the slot."""

    is_slot: Tensor  # bool [B or 1, P, 1]
    vectors: Tensor  # [B, 1, L*d], one after another for the L layers


class Gpt2VaeAttention(GPT2Attention):
    """GPT-2's self-attention, with a memory vector as the key and the value of the slot."""

    @takes_cache
    def forward(
        self,
        hidden_states: Tensor,
        cache: Any = None,
        attention_mask: Tensor | None = None,
        cache_position: Tensor | None = None,
        output_attentions: bool | None = False,
        latent_memory: LatentMemory | None = None,
        **kwargs: Any,
    ) -> tuple[Tensor, Any]:
        """Attention of states `[B, P, d]`: the output, of the same shape, and the weights, if there are any."""
        query, key, value = self.c_attn(hidden_states).split(self.split_size, dim=2)
        if latent_memory is not None:
            own = latent_memory.vectors.narrow(2, self.layer_idx * self.embed_dim, self.embed_dim)
            key, value = (torch.where(latent_memory.is_slot, own, states) for states in (key, value))
        query, key, value = (x.unflatten(2, (-1, self.head_dim)).transpose(1, 2) for x in (query, key, value))
        if cache is not None:
            positions = () if cache_position is None else ({"cache_position": cache_position},)  # 4.57
            key, value = cache.update(key, value, self.layer_idx, *positions)

        implementation = self.config._attn_implementation
        if _FINDS_EAGER:
            attend = ALL_ATTENTION_FUNCTIONS.get_interface(implementation, eager_attention_forward)
        else:
            is_eager = implementation == "eager"
            attend = eager_attention_forward if is_eager else ALL_ATTENTION_FUNCTIONS[implementation]
        output, weights = attend(
            self,
            query,
            key,
            value,
            attention_mask,
            dropout=self.attn_dropout.p if self.training else 0.0,
            scaling=getattr(self, "scaling", None),  # 4.57 leaves it to the function
            **kwargs,
        )
        output = self.c_proj(output.flatten(2).contiguous())
        return self.resid_dropout(output), weights


class Gpt2VaeModel(GPT2Model):
    """GPT-2's transformer, conditioned on one latent for each row."""

    config_class = Gpt2VaeConfig

    def __init__(self, config: Gpt2VaeConfig) -> None:
        """Raises ValueError for options of GPT-2 that this model does not have."""
        for name in ("add_cross_attention", "reorder_and_upcast_attn"):
            if getattr(config, name, False):
                raise ValueError(f"{name}=True is an option of GPT-2 that its VAE does not have.")
        super().__init__(config)
        for index, block in enumerate(self.h):
            block.attn = Gpt2VaeAttention(config, layer_idx=index)
        if config.latent_as_memory:
            self.linear = nn.Linear(config.latent_size, config.n_layer * config.n_embd, bias=False)
        if config.latent_as_embedding:
            self.linear_emb = nn.Linear(config.latent_size, config.n_embd, bias=False)
        self.post_init()

    def check(self, latents: Tensor | None, rows: int) -> Tensor:
        """Return `latents` if they are `[rows, latent_size]`, else raise ValueError."""
        size = self.config.latent_size
        if latents is None:
            raise ValueError(f"latents are missing: one row of latent_size={size} numbers for each text.")
        if not isinstance(latents, Tensor):
            raise ValueError(f"latents are a {type(latents).__name__}, and not a tensor.")
        if latents.ndim != 2 or latents.shape[1] != size:
            raise ValueError(f"latents of shape {tuple(latents.shape)} are not rows of latent_size={size} numbers.")
        if latents.shape[0] != rows:
            raise ValueError(f"latents has {latents.shape[0]} rows for input_ids of {rows}.")
        return latents

    @takes_cache
    def forward(
        self,
        input_ids: Tensor | None = None,
        latents: Tensor | None = None,
        cache: Any = None,
        position_ids: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        **kwargs: Any,
    ) -> Any:
        """Do what GPT-2's `forward` does, for tokens int64 `[B, P]` and latents `[B, latent_size]`.

        With `latent_as_memory` the token at position 0, by default the first, is the latent's slot.

        Raises ValueError if the latents don't fit.
        """
        if inputs_embeds is None:
            inputs_embeds = self.wte(input_ids)
        latents = self.check(latents, inputs_embeds.shape[0]).to(inputs_embeds.dtype)
        seen = 0 if cache is None else cache.get_seq_length()
        length = inputs_embeds.shape[1]
        if position_ids is None:
            position_ids = torch.arange(length, device=inputs_embeds.device)[None] + seen
        if self.config.latent_as_memory and (length > 1 or _may_be_empty(cache, seen)):
            # 5.x numbers padding 0, too: a vector there is masked.
            kwargs["latent_memory"] = LatentMemory(position_ids[..., None] == 0, self.linear(latents)[:, None])
        if self.config.latent_as_embedding:
            inputs_embeds = inputs_embeds + self.linear_emb(latents)[:, None]
        return super().forward(inputs_embeds=inputs_embeds, position_ids=position_ids, **{CACHE: cache}, **kwargs)


def _may_be_empty(cache: Any, seen: int | Tensor) -> bool:
    """Whether the slot may have to be filled; steps of one token after others need not."""
    # Reading a number from a tensor would wait for the device, and a static cache has no other number.
    return seen == 0 if isinstance(seen, int) else cache.is_compileable


class Gpt2VaeLMHeadModel(GPT2LMHeadModel):
    """Generates texts from latents: `generate(latents=...)` returns `num_return_sequences` texts for each latent."""

    config_class = Gpt2VaeConfig

    def __init__(self, config: Gpt2VaeConfig) -> None:
        super(GPT2LMHeadModel, self).__init__(config)  # skips GPT2LMHeadModel's, which makes GPT-2's transformer
        self.transformer = Gpt2VaeModel(config)
        self.lm_head = nn.Linear(config.n_embd, config.vocab_size, bias=False)
        self.post_init()

    def gradient_checkpointing_enable(self, gradient_checkpointing_kwargs: dict[str, Any] | None = None) -> None:
        """Do what the host's method does, without `use_reentrant`, which goes through the shared latent once per layer.

        Raises ValueError for `use_reentrant=True`.
        """
        options = {"use_reentrant": False, **(gradient_checkpointing_kwargs or {})}
        if options["use_reentrant"]:
            raise ValueError("use_reentrant=True is not for layers that share a latent: leave it out.")
        super().gradient_checkpointing_enable(options)

    def sample_latents(self, count: int, generator: torch.Generator | None = None) -> Tensor:
        """Draw latents of the prior N(0, I), `[count, latent_size]`; the same numbers in any dtype of the model."""
        device = self.device if generator is None else generator.device
        latents = torch.randn(count, self.config.latent_size, generator=generator, device=device)
        return latents.to(self.device, self.dtype)

    def with_slot(
        self, input_ids: Tensor, attention_mask: Tensor | None = None, labels: Tensor | None = None
    ) -> dict[str, Tensor]:
        """The arguments of `forward` for tokens int64 `[B, P]`: these with the latent's slot first, `[B, 1 + P]`, and,
        if there is a mask, positions that don't count padding.

        Without `latent_as_memory` there is no slot.
        """
        given = {"input_ids": input_ids, "attention_mask": attention_mask, "labels": labels}
        inputs = {name: value for name, value in given.items() if value is not None}
        if not self.config.latent_as_memory:
            return inputs if attention_mask is None else {**inputs, "position_ids": _positions(attention_mask)}
        # The slot needs some token. The prompt's first token changes nothing for processors that penalise its tokens.
        inputs["input_ids"] = torch.cat([input_ids[:, :1], input_ids], dim=1)
        if attention_mask is not None:
            inputs["attention_mask"] = F.pad(attention_mask, (1, 0), value=1)
            inputs["position_ids"] = _positions(inputs["attention_mask"])
        if labels is not None:
            # The first token is not predicted from the slot.
            inputs["labels"] = F.pad(labels[:, 1:], (2, 0), value=_IGNORED)
        return inputs

    @takes_cache
    def forward(
        self,
        input_ids: Tensor | None = None,
        latents: Tensor | None = None,
        cache: Any = None,
        attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        position_ids: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        return_dict: bool | None = None,
        **kwargs: Any,
    ) -> Any:
        """Do what GPT-2's `forward` does, for tokens and labels int64 `[B, P]` of `with_slot`, and latents.

        `latents`: `[B, latent_size]`. Raises ValueError if they don't fit.
        """
        outputs = self.transformer(
            input_ids,
            latents=latents,
            **{CACHE: cache},
            attention_mask=attention_mask,
            token_type_ids=token_type_ids,
            position_ids=position_ids,
            inputs_embeds=inputs_embeds,
            use_cache=use_cache,
            return_dict=True,
            **kwargs,
        )
        kept = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
        logits = self.lm_head(outputs.last_hidden_state[:, kept])
        loss = None
        if labels is not None:
            loss = self.loss_function(logits, labels, vocab_size=self.config.vocab_size, **kwargs)
        result = CausalLMOutputWithCrossAttentions(
            loss=loss,
            logits=logits,
            **{CACHE: getattr(outputs, CACHE)},
            hidden_states=outputs.hidden_states,
            attentions=outputs.attentions,
        )
        return result.to_tuple() if return_dict is False else result

    def generate(
        self,
        inputs: Tensor | None = None,
        generation_config: GenerationConfig | None = None,
        *args: Any,
        latents: Tensor | None = None,
        **options: Any,
    ) -> Any:
        """Do what the host's `generate` does, for prompts int64 `[B, P]`, BOS if none, and latents `[B, latent_size]`.

        Sequences and lengths do not include the slot. Processors, criteria and streamers of the caller see it before
        the prompt, as a copy of the prompt's first token; hidden states and attentions include it, too.

        Raises ValueError if the latents don't fit, or for inputs that this decoder can't be given.
        """
        if inputs is not None and options.get("input_ids") is not None:
            raise ValueError("input_ids are given twice, by name and as the first argument.")
        prompt = options.pop("input_ids", inputs)
        for name in _PER_TOKEN:
            if options.get(name) is not None:
                raise ValueError(f"{name} cannot be given together with latents: pass input_ids and attention_mask.")
        if prompt is None:
            bos = self._option("bos_token_id", generation_config, options)
            prompt = self._begin(latents, getattr(self.config, "bos_token_id", None) if bos is None else bos)
        latents = self.transformer.check(latents, prompt.shape[0])
        if not self.config.latent_as_memory:
            return super().generate(prompt, generation_config, *args, latents=latents, **options)
        mask = options.pop("attention_mask", None)
        if mask is None:
            mask = self._padding(prompt, generation_config, options)
        self._count_slot(generation_config, options)
        if (allowed := options.get("prefix_allowed_tokens_fn")) is not None:
            options["prefix_allowed_tokens_fn"] = lambda row, tokens: allowed(row, tokens[1:])
        rows = self.with_slot(prompt, mask)
        del rows["position_ids"]  # the host makes them
        output = super().generate(None, generation_config, *args, latents=latents, **rows, **options)
        if isinstance(output, Tensor):
            return output[:, 1:]
        output.sequences = output.sequences[:, 1:]
        return output

    def _get_logits_processor(self, *args: Any, **kwargs: Any) -> LogitsProcessorList:
        processors = super()._get_logits_processor(*args, **kwargs)
        if not self.config.latent_as_memory:
            return processors
        users = [id(processor) for processor in kwargs.get("logits_processor") or ()]
        return LogitsProcessorList(
            WithoutSlot(processor) if isinstance(processor, _SEEING) and id(processor) not in users else processor
            for processor in processors
        )

    def _option(self, name: str, config: GenerationConfig | None, options: dict[str, Any]) -> Any:
        """An option of `generate`, as set by the caller or else by the model; None if neither sets it."""
        found = (options.get(name), getattr(config, name, None), getattr(self.generation_config, name, None))
        return next((value for value in found if value is not None), None)

    def _begin(self, latents: Tensor | None, bos: int | None) -> Tensor:
        """A prompt of one BOS token for each latent, int64 `[B, 1]`."""
        if bos is None:
            raise ValueError("bos_token_id is not set, and input_ids are missing: texts need something to begin with.")
        rows = 0 if latents is None else latents.shape[0]
        return torch.full((rows, 1), bos, dtype=torch.int64, device=self.device)

    def _padding(self, prompt: Tensor, config: GenerationConfig | None, options: dict[str, Any]) -> Tensor:
        """The mask that the host would infer: padding is masked unless the padding token is also an end token."""
        pad, eos = (self._option(name, config, options) for name in ("pad_token_id", "eos_token_id"))
        ends = eos if isinstance(eos, list | tuple) else [eos]
        return torch.ones_like(prompt) if pad is None or pad in ends else prompt.ne(pad).long()

    def _count_slot(self, config: GenerationConfig | None, options: dict[str, Any]) -> None:
        """Add the slot to the lengths that count the prompt, where they are set."""
        for kind in ("max", "min"):
            name, default = f"{kind}_length", getattr(GenerationConfig(), f"{kind}_length")
            length = self._option(name, config, options)
            is_set = options.get(name) is not None or length not in (None, default)
            if is_set and self._option(f"{kind}_new_tokens", config, options) is None:
                options[name] = length + 1


def _positions(mask: Tensor) -> Tensor:
    """Positions, int64 `[B, P]`: how many tokens come before each one; 0 for left padding."""
    return (mask.long().cumsum(-1) - 1).clamp(min=0)
