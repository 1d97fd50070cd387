"""The operators as torch sees them: schemas, the reference for every device, and shapes for tracing.

The reference is registered under CompositeExplicitAutograd; a native kernel registers under its own device's key,
which comes first.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from fastgen.ops import reference
from fastgen.ops.checks import (
    check_attention,
    check_fingerprint,
    check_ngrams,
    check_packed,
    check_probabilities,
    check_screened,
    check_skinny,
    check_source,
    check_topk,
)

# The length is symbolic: it grows at every step, and a compiled step must not be compiled again each time.
SCHEMAS = {
    "ban_repeated_ngrams_": "(Tensor tokens, Tensor(a!) scores, int ngram_size, SymInt length) -> ()",
    "ban_source_ngrams_": (
        "(Tensor source, Tensor tokens, Tensor(a!) scores, int ngram_size, SymInt length, int beams) -> ()"
    ),
    "topk_log_softmax": (
        "(Tensor logits, int k, Tensor? banned=None) -> (Tensor log_probs, Tensor tokens, Tensor log_sum_exp)"
    ),
    "beam_attention": "(Tensor query, Tensor key, Tensor value, Tensor? bias, float scale) -> Tensor",
    "fingerprint": "(Tensor tensor) -> Tensor",
    "multinomial": "(Tensor probabilities, Generator? generator=None) -> Tensor",
    "packed_linear": "(Tensor rows, Tensor packed, SymInt width, Tensor? bias) -> Tensor",
    "screened_linear": (
        "(Tensor rows, Tensor weight, Tensor codes, Tensor scales, Tensor errors, Tensor? bias) -> Tensor"
    ),
    "skinny_linear": "(Tensor rows, Tensor[] weights, Tensor? bias) -> Tensor",
}

_SEEDED = {"multinomial"}

_library = torch.library.Library("fastgen", "DEF")
for _name, _schema in SCHEMAS.items():
    _random = (torch.Tag.nondeterministic_seeded,) if _name in _SEEDED else ()
    _library.define(_name + _schema, tags=(torch.Tag.pt2_compliant_tag, *_random))
    _library.impl(_name, getattr(reference, _name), "CompositeExplicitAutograd")


@torch.library.register_fake("fastgen::ban_repeated_ngrams_", lib=_library)
def _ban_repeated_ngrams_(tokens: Tensor, scores: Tensor, ngram_size: int, length: int) -> None:
    check_ngrams(tokens, scores, ngram_size, length)


@torch.library.register_fake("fastgen::ban_source_ngrams_", lib=_library)
def _ban_source_ngrams_(
    source: Tensor, tokens: Tensor, scores: Tensor, ngram_size: int, length: int, beams: int
) -> None:
    check_ngrams(tokens, scores, ngram_size, length)
    check_source(source, tokens, beams)


@torch.library.register_fake("fastgen::topk_log_softmax", lib=_library)
def _topk_log_softmax(logits: Tensor, k: int, banned: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
    check_topk(logits, k, banned)
    rows = logits.shape[0]
    return (
        logits.new_empty(rows, k, dtype=torch.float32),
        logits.new_empty(rows, k, dtype=torch.int64),
        logits.new_empty(rows, dtype=torch.float32),
    )


@torch.library.register_fake("fastgen::beam_attention", lib=_library)
def _beam_attention(query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None, scale: float) -> Tensor:
    check_attention(query, key, value, bias)
    return query.new_empty(query.shape[0], 1, query.shape[1], value.shape[3])


@torch.library.register_fake("fastgen::fingerprint", lib=_library)
def _fingerprint(tensor: Tensor) -> Tensor:
    check_fingerprint(tensor)
    return tensor.new_empty((), dtype=torch.int64)


@torch.library.register_fake("fastgen::skinny_linear", lib=_library)
def _skinny_linear(rows: Tensor, weights: Sequence[Tensor], bias: Tensor | None) -> Tensor:
    check_skinny(rows, weights, bias)
    return rows.new_empty(*rows.shape[:-1], sum(weight.shape[0] for weight in weights))


@torch.library.register_fake("fastgen::screened_linear", lib=_library)
def _screened_linear(
    rows: Tensor, weight: Tensor, codes: Tensor, scales: Tensor, errors: Tensor, bias: Tensor | None
) -> Tensor:
    check_screened(rows, weight, codes, scales, errors, bias)
    return rows.new_empty(*rows.shape[:-1], weight.shape[0])


@torch.library.register_fake("fastgen::multinomial", lib=_library)
def _multinomial(probabilities: Tensor, generator: torch.Generator | None = None) -> Tensor:
    check_probabilities(probabilities)
    return probabilities.new_empty(probabilities.shape[0], dtype=torch.int64)


@torch.library.register_fake("fastgen::packed_linear", lib=_library)
def _packed_linear(rows: Tensor, packed: Tensor, width: int, bias: Tensor | None) -> Tensor:
    check_packed(rows, packed, width, bias)
    return rows.new_empty(*rows.shape[:-1], width)
