"""GPT-2 conditioned on a latent as memory and as embedding, in the two ways of Optimus (arXiv 2004.04092, section 3).

Memory: of the latent z, `linear` makes one vector for each layer, and that is both a key and a value of this layer.
Embedding: `linear_emb` makes one vector, which is added to every token's embedding at every step. Weights have the
names of Optimus's decoder and, but for these two, of GPT-2.

Memory is position 0 and the tokens' positions begin at 1, as in Optimus. So it is given a slot like a token's, in front
of the prompt and of its padding, and cache, masks and positions are those of any GPT-2: what is put into the slot in a
layer are its key and value, once, as the prompt is read. Nobody looks at what the slot itself becomes.
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

_FINDS_EAGER = hasattr(ALL_ATTENTION_FUNCTIONS, "get_interface")  # 5.x; 4.57 has the others alone
_SEEING = (ForcedBOSTokenLogitsProcessor, NoRepeatNGramLogitsProcessor, SequenceBiasLogitsProcessor)
_IGNORED = -100  # a label that counts for no loss
# What `generate` could be given of each token. The slot is none of them.
_PER_TOKEN = ("inputs_embeds", "cache", OLD_CACHE, "position_ids", "token_type_ids")


class WithoutSlot(LogitsProcessor):
    """A processor that looks at which tokens are there, and in which order."""

    def __init__(self, processor: LogitsProcessor) -> None:
        self.processor = processor

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """Scores `[rows, V]` of what may follow int64 `input_ids` `[rows, 1 + P]`, of which the first is the slot."""
        output: Tensor = self.processor(input_ids[:, 1:], scores)
        return output


class LatentMemory(NamedTuple):
    """What layers attend to besides tokens, in the forward pass that fills the slot."""

    is_slot: Tensor  # bool [B or 1, P, 1]
    vectors: Tensor  # [B, 1, L*d], each layer's in turn


class Gpt2VaeAttention(GPT2Attention):
    """GPT-2's self-attention, with the latent's vector as the key and the value of the slot."""

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
        """Of states `[B, P, d]` those of the attention's output, and the weights as far as there are any."""
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
        """Raises ValueError for options of GPT-2 that this decoder does not have."""
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
        """`latents` if they are `[rows, latent_size]`, else ValueError."""
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
        """What GPT-2's returns, for tokens int64 `[B, P]` and latents `[B, latent_size]`.

        With `latent_as_memory` the token at position 0, the first if nothing else is said, is the latent's slot.

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
            # 5.x numbers padding 0 too: nobody sees what is put there.
            kwargs["latent_memory"] = LatentMemory(position_ids[..., None] == 0, self.linear(latents)[:, None])
        if self.config.latent_as_embedding:
            inputs_embeds = inputs_embeds + self.linear_emb(latents)[:, None]
        return super().forward(inputs_embeds=inputs_embeds, position_ids=position_ids, **{CACHE: cache}, **kwargs)


def _may_be_empty(cache: Any, seen: int | Tensor) -> bool:
    """Whether the slot may have to be filled: steps of one token need not look for it."""
    # A number in a tensor is not to be waited for, and a static cache has no other.
    return seen == 0 if isinstance(seen, int) else cache.is_compileable


class Gpt2VaeLMHeadModel(GPT2LMHeadModel):
    """Texts from latents: `generate(latents=...)`, as many of each as `num_return_sequences` says."""

    config_class = Gpt2VaeConfig

    def __init__(self, config: Gpt2VaeConfig) -> None:
        super(GPT2LMHeadModel, self).__init__(config)  # whose transformer would be GPT-2's
        self.transformer = Gpt2VaeModel(config)
        self.lm_head = nn.Linear(config.n_embd, config.vocab_size, bias=False)
        self.post_init()

    def gradient_checkpointing_enable(self, gradient_checkpointing_kwargs: dict[str, Any] | None = None) -> None:
        """The host's, without `use_reentrant`, which goes through what layers share, as the latent, once for each.

        Raises ValueError for `use_reentrant=True`.
        """
        options = {"use_reentrant": False, **(gradient_checkpointing_kwargs or {})}
        if options["use_reentrant"]:
            raise ValueError("use_reentrant=True is not for layers that share a latent: leave it out.")
        super().gradient_checkpointing_enable(options)

    def sample_latents(self, count: int, generator: torch.Generator | None = None) -> Tensor:
        """Latents of the prior N(0, I), `[count, latent_size]`; the same in any dtype of the model."""
        device = self.device if generator is None else generator.device
        latents = torch.randn(count, self.config.latent_size, generator=generator, device=device)
        return latents.to(self.device, self.dtype)

    def with_slot(
        self, input_ids: Tensor, attention_mask: Tensor | None = None, labels: Tensor | None = None
    ) -> dict[str, Tensor]:
        """What `forward` takes for tokens int64 `[B, P]`: what is given, `[B, 1 + P]`, with the latent's slot first,
        and positions that don't count padding, if there is a mask.

        Without `latent_as_memory` there is no slot.
        """
        given = {"input_ids": input_ids, "attention_mask": attention_mask, "labels": labels}
        inputs = {name: value for name, value in given.items() if value is not None}
        if not self.config.latent_as_memory:
            return inputs if attention_mask is None else {**inputs, "position_ids": _positions(attention_mask)}
        # Some token has to be there. Processors that look at the prompt have seen this one: it is penalised already.
        inputs["input_ids"] = torch.cat([input_ids[:, :1], input_ids], dim=1)
        if attention_mask is not None:
            inputs["attention_mask"] = F.pad(attention_mask, (1, 0), value=1)
            inputs["position_ids"] = _positions(inputs["attention_mask"])
        if labels is not None:
            # The slot says nothing about the first token.
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
        """What GPT-2's returns, for tokens and labels int64 `[B, P]`, of `with_slot`, and latents `[B, latent_size]`.

        Raises ValueError if the latents don't fit.
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
        """The host's `generate`, for prompts int64 `[B, P]`, BOS unless given, and latents `[B, latent_size]`.

        Returns what the host returns, and counts tokens as it does: the slot is in no sequence and in no length.
        Processors, criteria and streamers of the caller's own see it in front of the prompt, as its first token again;
        hidden states and attentions have it too.

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
        """An option of `generate` as the caller or else the model has set it, None if neither has."""
        found = (options.get(name), getattr(config, name, None), getattr(self.generation_config, name, None))
        return next((value for value in found if value is not None), None)

    def _begin(self, latents: Tensor | None, bos: int | None) -> Tensor:
        """A prompt for each latent, int64 `[B, 1]`."""
        if bos is None:
            raise ValueError("bos_token_id is not set, and input_ids are missing: texts need something to begin with.")
        rows = 0 if latents is None else latents.shape[0]
        return torch.full((rows, 1), bos, dtype=torch.int64, device=self.device)

    def _padding(self, prompt: Tensor, config: GenerationConfig | None, options: dict[str, Any]) -> Tensor:
        """The mask that the host would infer: padding is hidden unless its token may also end a text."""
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
    """int64 `[B, P]`: how many tokens come before each; 0 for padding in front."""
    return (mask.long().cumsum(-1) - 1).clamp(min=0)
