"""Tiny UniLMs, and a plain decoder to judge them by: hypotheses one at a time, from scratch, under the mask in full.

The decoder shares no code with the model: it computes from weights under their published names.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel
from transformers.generation.utils import GenerationMixin
from transformers.modeling_outputs import CausalLMOutputWithPast

import fastgen
from fastgen.models.unilm import UnilmConfig, UnilmForSeq2Seq
from fastgen.optimizer.transformers.versions import CACHE

PAD, CLS, SEP, MASK = 0, 2, 3, 4
VOCABULARY = 53
NextLogits = Callable[[Sequence[int], Sequence[int]], Tensor]  # source, target so far -> [V]


def config(**fields: Any) -> UnilmConfig:
    sizes = {"hidden_size": 20, "num_hidden_layers": 3, "num_attention_heads": 4, "intermediate_size": 28}
    ids = {"pad_token_id": PAD, "bos_token_id": CLS, "eos_token_id": SEP, "mask_token_id": MASK}
    segments = {"source_type_id": 4, "target_type_id": 5}
    size = {"vocab_size": VOCABULARY, "max_position_embeddings": 40}
    return UnilmConfig(**{**sizes, **ids, **segments, **size, **fields})


def model(seed: int = 5, end: float = 0.0, **fields: Any) -> UnilmForSeq2Seq:
    """Random, biases and norms too, and the same on each version; `end` is added to the logit of `[SEP]`."""
    made = UnilmForSeq2Seq(config(**fields)).eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, weight in sorted(made.named_parameters()):
            weight.copy_(torch.randn(weight.shape, generator=generator) * 0.35 + name.endswith("LayerNorm.weight"))
        made.cls.predictions.bias[SEP] += end
    return made


def sources(*lengths: int, seed: int = 1) -> list[list[int]]:
    """`[CLS] words [SEP]` of these lengths in all; 1 is `[CLS]` alone."""
    generator = torch.Generator().manual_seed(seed)
    return [
        [CLS, *torch.randint(5, VOCABULARY, (max(length - 2, 0),), generator=generator).tolist(), SEP][:length]
        for length in lengths
    ]


def padded(rows: Sequence[Sequence[int]], side: str = "left") -> dict[str, Tensor]:
    width = max(map(len, rows))
    fill = [[PAD] * (width - len(row)) for row in rows]
    pairs = [(f, list(row)) if side == "left" else (list(row), f) for f, row in zip(fill, rows, strict=True)]
    ids = torch.tensor([a + b for a, b in pairs])
    return {"input_ids": ids, "attention_mask": (ids != PAD).long()}


def generate(model: Any, inputs: dict[str, Any], **options: Any) -> Any:
    with fastgen.disabled():
        return model.generate(**inputs, return_dict_in_generate=True, output_scores=True, **options)


class Reference:
    """Next words of a source and the target so far, in float32."""

    def __init__(self, weights: dict[str, Tensor], config: UnilmConfig) -> None:
        self.weights, self.config = weights, config

    def __call__(self, source: Sequence[int], target: Sequence[int]) -> Tensor:
        c = self.config
        tokens = torch.tensor([*source, *target, c.mask_token_id])
        place = torch.arange(len(tokens))
        is_source = place < len(source)
        states = self._of("bert.embeddings.word_embeddings.weight")[tokens]
        states = states + self._of("bert.embeddings.position_embeddings.weight")[place]
        segments = torch.where(is_source, c.source_type_id, c.target_type_id)
        states = states + self._of("bert.embeddings.token_type_embeddings.weight")[segments]
        states = self._norm("bert.embeddings.LayerNorm", states)
        # The source is seen by all; the rest by what is not before it. The [MASK], being last, is seen by itself.
        is_seen = is_source[None] | (place[None] <= place[:, None])
        for index in range(c.num_hidden_layers):
            name = f"bert.encoder.layer.{index}"
            attended = self._attention(f"{name}.attention.self", states, is_seen)
            attended = self._linear(f"{name}.attention.output.dense", attended)
            states = self._norm(f"{name}.attention.output.LayerNorm", attended + states)
            inner = F.gelu(self._linear(f"{name}.intermediate.dense", states))
            states = self._norm(f"{name}.output.LayerNorm", self._linear(f"{name}.output.dense", inner) + states)
        name = "cls.predictions.transform"
        last = self._norm(f"{name}.LayerNorm", F.gelu(self._linear(f"{name}.dense", states[-1])))
        return last @ self._of("bert.embeddings.word_embeddings.weight").T + self._of("cls.predictions.bias")

    def _attention(self, name: str, states: Tensor, is_seen: Tensor) -> Tensor:
        heads = self.config.num_attention_heads
        query, key, value = (
            self._linear(f"{name}.{part}", states).unflatten(1, (heads, -1)) for part in ("query", "key", "value")
        )
        scores = torch.einsum("qhd,khd->hqk", query, key) / query.shape[-1] ** 0.5
        weights = scores.masked_fill(~is_seen, -torch.inf).softmax(-1)
        return torch.einsum("hqk,khd->qhd", weights, value).flatten(1)

    def _linear(self, name: str, states: Tensor) -> Tensor:
        return states @ self._of(f"{name}.weight").T + self._of(f"{name}.bias")

    def _norm(self, name: str, states: Tensor) -> Tensor:
        centred = states - states.mean(-1, keepdim=True)
        variance = centred.square().mean(-1, keepdim=True)
        return centred / (variance + self.config.layer_norm_eps).sqrt() * self._of(f"{name}.weight") + self._of(
            f"{name}.bias"
        )

    def _of(self, name: str) -> Tensor:
        return self.weights[name]


def reference(model: UnilmForSeq2Seq) -> Reference:
    return Reference({name: weight.clone() for name, weight in model.state_dict().items()}, model.config)


def cached(model: UnilmForSeq2Seq) -> NextLogits:
    """The model's next words: the source at once, then the target token by token over the cache."""

    @torch.no_grad()
    def next_logits(source: Sequence[int], target: Sequence[int]) -> Tensor:
        output = model(torch.tensor([source]), use_cache=True)
        for token in target:
            output = model(torch.tensor([[token]]), **{CACHE: getattr(output, CACHE)})
        return output.logits[0, -1]

    return next_logits


class ByReference(PreTrainedModel, GenerationMixin):
    """Something for the host's own search to ask, which reads everything again for each word."""

    config_class = PretrainedConfig
    main_input_name = "input_ids"

    def __init__(self, next_logits: NextLogits, prompt_length: int, vocab_size: int) -> None:
        super().__init__(PretrainedConfig(pad_token_id=PAD, bos_token_id=CLS, eos_token_id=SEP))
        self.config.vocab_size = vocab_size
        self.next_logits, self.prompt_length = next_logits, prompt_length
        self.weight = nn.Parameter(torch.zeros(1))

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None, **_: Any) -> CausalLMOutputWithPast:
        P = self.prompt_length
        if attention_mask is None:  # the host may drop one without padding
            attention_mask = torch.ones_like(input_ids)
        rows = [
            self.next_logits(ids[:P][mask[:P] == 1].tolist(), ids[P:].tolist())
            for ids, mask in zip(input_ids, attention_mask, strict=True)
        ]
        return CausalLMOutputWithPast(logits=torch.stack(rows)[:, None])


def generate_by_reference(model: UnilmForSeq2Seq, inputs: dict[str, Tensor], **options: Any) -> Any:
    judge = ByReference(reference(model), inputs["input_ids"].shape[1], model.config.vocab_size)
    return generate(judge, inputs, use_cache=False, **options)


def banned_words(target: Sequence[int], size: int, ignored: Iterable[int] = ()) -> set[int]:
    """What the published decoder forbids to follow `target`: its rule, word by word."""
    ignored = set(ignored)
    tail = list(target[len(target) - size + 1 :])
    if len(target) < size or ignored & set(tail):
        return set()
    starts = range(len(target) - size + 1)
    repeated = {target[i + size - 1] for i in starts if list(target[i : i + size - 1]) == tail}
    return repeated - ignored


def published_search(
    next_logits: NextLogits,
    source: Sequence[int],
    beams: int,
    max_target: int,
    length_penalty: float = 0.0,
    min_length: int = 0,
    ngram_size: int = 0,
    ignored: Iterable[int] = (),
) -> list[list[int]]:
    """The published beam search for one sentence: the best hypothesis, and then those of the last step, best first."""
    lost = -10_000.0
    frames: list[list[tuple[float, list[int]]]] = []
    beam: list[tuple[float, list[int]]] = [(0.0, [])]
    for step in range(1, max_target + 1):
        candidates = []
        for score, target in beam:
            scores = next_logits(source, target).log_softmax(-1)
            if ngram_size and (words := banned_words(target, ngram_size, ignored)):
                scores[sorted(words)] += lost
            if step <= min_length:
                scores[SEP] = lost
            has_ended = target[-1:] == [SEP]
            for value, word in zip(*scores.topk(beams), strict=True):
                candidates.append((score + value.item() + lost * has_ended, [*target, int(word)]))
        beam = sorted(candidates, key=lambda candidate: -candidate[0])[:beams]
        frames.append(beam)
        if all(target[-1] == SEP for _, target in beam):
            break
    ended = [h for frame in frames for h in frame if h[1][-1] == SEP or frame is frames[-1]]
    best = max(ended, key=lambda h: h[0] / ((5 + len(h[1])) / 6) ** length_penalty)
    return [best[1], *(target for _, target in beam)]
