"""The host's rules for choosing tokens, with one operation where the host has one for each beam.

Numbers and order are the host's: what decides is computed from the same numbers, by the same operation. On the CPU ties
are the host's, too.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


def update(self: Any, tokens: Tensor, logits: Tensor, sum_logprobs: Tensor) -> tuple[Tensor, bool]:
    """`BeamSearchDecoder.update` of the host.

    Args:
        tokens: so far, int64 `[B*M, length]`.
        logits: of this step, `[B*M, V]`.
        sum_logprobs: of each row, float32 `[B*M]`; becomes that of the rows returned.

    Returns: the tokens of the chosen rows, int64 `[B*M, length + 1]`, and whether all segments have finished.
    """
    beams: int = self.beam_size
    if len(tokens) % beams:
        raise ValueError(f"{tokens.shape}[0] % {beams} != 0")
    segments = len(tokens) // beams
    if self.finished_sequences is None:
        self.finished_sequences = [{} for _ in range(segments)]
    best = F.log_softmax(logits.float(), dim=-1).topk(beams + 1)
    sums = (sum_logprobs[:, None] + best.values).tolist()
    following, prefixes = best.indices.tolist(), tokens.tolist()
    chosen: list[tuple[int, ...]] = []
    sources: list[int] = []
    chosen_sums: list[float] = []
    for segment, finished in enumerate(self.finished_sequences):
        scores: dict[tuple[int, ...], float] = {}
        parents: dict[tuple[int, ...], int] = {}
        for row in range(segment * beams, (segment + 1) * beams):
            for token, score in zip(following[row], sums[row], strict=True):
                sequence = (*prefixes[row], token)  # equal ones, of equal beams, count once
                scores[sequence], parents[sequence] = score, row
        ended: list[tuple[int, ...]] = []
        saved = 0
        for sequence in sorted(scores, key=lambda one: scores[one], reverse=True):
            if sequence[-1] == self.eot:
                ended.append(sequence)
                continue
            chosen.append(sequence)
            sources.append(parents[sequence])
            chosen_sums.append(scores[sequence])
            saved += 1
            if saved == beams:
                break
        for sequence in ended[: max(self.max_candidates - len(finished), 0)]:
            finished[sequence] = scores[sequence]
    sum_logprobs[: len(chosen)] = sum_logprobs.new_tensor(chosen_sums)
    self.inference.rearrange_kv_cache(sources)
    is_complete = all(len(finished) >= self.max_candidates for finished in self.finished_sequences)
    return torch.tensor(chosen, device=tokens.device), is_complete


def apply(self: Any, logits: Tensor, tokens: Tensor) -> None:
    """`ApplyTimestampRules.apply` of the host: bans tokens in `logits` `[rows, V]`, after `tokens` `[rows, length]`."""
    begin, never = self.tokenizer.timestamp_begin, -torch.inf
    if self.tokenizer.no_timestamps is not None:
        logits[:, self.tokenizer.no_timestamps] = never
    for row, sampled in enumerate(tokens[:, self.sample_begin :].tolist()):
        is_time = [token >= begin for token in sampled[-2:]]
        ends_in_time, is_pair = is_time[-1:] == [True], len(sampled) < 2 or is_time[0]
        if ends_in_time:  # times come in pairs, except before the end
            if is_pair:
                logits[row, begin:] = never
            else:
                logits[row, : self.tokenizer.eot] = never
        last = next((token for token in reversed(sampled) if token >= begin), None)
        if last is not None:  # times don't decrease, and a segment takes some
            logits[row, begin : last + (not ends_in_time or is_pair)] = never
    if tokens.shape[1] == self.sample_begin:
        logits[:, :begin] = never
        if self.max_initial_timestamp_index is not None:
            logits[:, begin + self.max_initial_timestamp_index + 1 :] = never
    logprobs = F.log_softmax(logits.float(), dim=-1)
    # Row by row, as the host has it: the sum of several rows at once may be rounded otherwise.
    times = torch.stack([row.logsumexp(dim=-1) for row in logprobs[:, begin:]])
    for row in (times > logprobs[:, :begin].amax(1)).nonzero()[:, 0].tolist():
        logits[row, :begin] = never
