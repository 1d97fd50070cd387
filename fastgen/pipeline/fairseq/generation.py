"""Generates hypotheses for samples, and returns them as plain lists."""

from __future__ import annotations

import base64
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

import torch
from fairseq import utils

from fastgen.pipeline.batching import run_with_backoff
from fastgen.pipeline.errors import InputError
from fastgen.pipeline.fairseq import allowed_outputs, lines
from fastgen.pipeline.fairseq.batches import Batches
from fastgen.pipeline.fairseq.load import Loaded


@dataclass(frozen=True)
class Done:
    """Facts about a batch that the writer needs besides the lines."""

    number: int
    sentences: int
    tokens: int
    seconds: float
    has_target: bool
    random_state: str | None  # after the batch, if tokens are sampled: a resumed run goes on from it


class Generation:
    """Generates samples, in smaller parts where memory runs out."""

    def __init__(
        self, loaded: Loaded, batches: Batches, warn: Callable[[str], None], random_state: str | None = None
    ) -> None:
        """`random_state`: from an earlier run, set before the first batch, when the iterator has drawn its numbers."""
        self._loaded, self._batches, self._warn = loaded, batches, warn
        self._random_state = random_state

    def __call__(self, number: int, sample: Any, positions: list[int] | None) -> tuple[lines.Batch, Done] | None:
        """Generate one sample; `positions`: of the sample's sentences in the dataset, in any order, None if unknown."""
        if "net_input" not in sample:  # an empty batch, which fills up a shard
            return None
        if self._random_state is not None:
            set_random_state(self._random_state)
            self._random_state = None
        self.check(sample)
        started = time.perf_counter()
        hypotheses = self._hypotheses(sample, positions)
        return self.generated(number, sample, hypotheses, time.perf_counter() - started)

    def generated(
        self, number: int, sample: Any, hypotheses: list[list[Any]], seconds: float
    ) -> tuple[lines.Batch, Done]:
        """The result for a sample that has been generated; InputError if a sentence has no hypothesis."""
        self._check_found(sample, hypotheses)
        done = Done(
            number,
            sample["nsentences"] if "nsentences" in sample else sample["id"].numel(),
            _count_tokens(hypotheses),
            seconds,
            sample["target"] is not None,
            random_state() if self._loaded.cfg.generation.sampling else None,
        )
        return self.plain(sample, hypotheses), done

    def check(self, sample: Any) -> None:
        """Raise InputError for flags that need more than sources, if the data lack it, which only a batch shows."""
        generation, subset = self._loaded.cfg.generation, self._loaded.cfg.dataset.gen_subset
        if sample.get("target") is None:
            for flag, given in (
                ("--prefix-size", generation.prefix_size > 0),
                ("--score-reference", generation.score_reference),
            ):
                if given:
                    raise InputError(f"{flag} needs targets, and the subset {subset} has none.")
        if generation.constraints and sample.get("constraints") is None:
            raise InputError(f"--constraints needs constraints in the data, and the subset {subset} has none.")

    def _check_found(self, sample: Any, hypotheses: list[list[Any]]) -> None:
        """Raise InputError for a sentence without a hypothesis, at which stock raises an IndexError.

        A search among allowed outputs stops at its last step, whether or not an output has come to its end.
        """
        without = [name for name, found in zip(sample["id"].tolist(), hypotheses, strict=False) if not found]
        if not without:
            return
        what = f"Line {without[0] + 1} of the subset {self._loaded.cfg.dataset.gen_subset} (S-{without[0]})"
        if allowed_outputs.trie_of(self._loaded.generator) is None:
            raise InputError(f"{what} has no hypothesis: the search has found none.")
        raise InputError(
            f"{what} has no hypothesis, as none of --allowed-outputs came to its end within the tokens that "
            "--max-len-a and --max-len-b allow for it: raise --max-len-b."
        )

    def _hypotheses(self, sample: Any, positions: list[int] | None) -> list[Any]:
        """The hypotheses of each sentence of `sample`, best first."""
        if positions is None:
            return self.infer(sample)

        def run(part: Sequence[int]) -> list[tuple[int, Any]]:
            """Ids and hypotheses, in the order of the collater, which sorts by length."""
            chosen = sample if len(part) == len(positions) else self._batches.collate(part)
            if "net_input" not in chosen:  # some datasets have sentences that can't be used
                return []
            started = time.perf_counter()
            found = self.infer(chosen)
            work = _count_tokens(found) + chosen.get("ntokens", 0)
            self._batches.succeeded(part, work / (time.perf_counter() - started))
            return list(zip(chosen["id"].tolist(), found, strict=True))

        def out_of_memory(part: Sequence[int]) -> None:
            self._batches.failed(part)
            self._warn(f"out of memory with {len(part)} sentences in a batch: going on with halves")

        by_id: dict[int, list[Any]] = {}  # an id may come twice
        for name, found in run_with_backoff(positions, run, out_of_memory):
            by_id.setdefault(name, []).append(found)
        return [by_id[name].pop(0) for name in sample["id"].tolist()]

    def infer(self, sample: Any) -> list[Any]:
        """Run the task's inference step, as fairseq-generate does."""
        loaded = self._loaded
        if loaded.device.type == "cuda":
            sample = utils.move_to_cuda(sample)
        prefix = None
        if loaded.cfg.generation.prefix_size > 0:
            prefix = sample["target"][:, : loaded.cfg.generation.prefix_size]
        return loaded.task.inference_step(
            loaded.generator,
            loaded.models,
            sample,
            prefix_tokens=prefix,
            constraints=sample.get("constraints"),
        )

    def plain(self, sample: Any, hypotheses: list[list[Any]]) -> lines.Batch:
        """The `nbest` hypotheses and all that is printed with them, without tensors."""
        loaded, targets = self._loaded, sample["target"]
        ids = sample["id"].tolist()
        source_texts = target_texts = None
        if loaded.form.align_dict is not None:
            dataset = loaded.task.dataset(loaded.cfg.dataset.gen_subset)
            source_texts = [dataset.src.get_original_text(i) for i in ids]
            if targets is not None:
                target_texts = [dataset.tgt.get_original_text(i) for i in ids]
        sources = sample["net_input"].get("src_tokens") if loaded.form.source is not None else None
        best = [found[: loaded.cfg.generation.nbest] for found in hypotheses]
        return lines.Batch(
            ids,
            None if sources is None else sources.tolist(),
            None if targets is None else targets.tolist(),
            source_texts,
            target_texts,
            _plain_hypotheses(best, history=loaded.form.history),
        )


def _plain_hypotheses(hypotheses: list[list[Any]], *, history: bool) -> list[list[lines.Hypothesis]]:
    """Turn tensors into lists, with one transfer from the device per kind of number, not one per hypothesis."""
    flat = [hypothesis for best in hypotheses for hypothesis in best]
    if not flat:
        return [[] for _ in hypotheses]
    tokens = _lists([h["tokens"] for h in flat])
    # In base 2, divided in the precision of the tensors, as stock does.
    scores = (torch.stack([torch.as_tensor(h["score"], device=None) for h in flat]) / math.log(2)).tolist()
    positional = _lists([h["positional_scores"] for h in flat], divisor=math.log(2))
    plain = iter(
        [
            lines.Hypothesis(
                tokens[k],
                scores[k],
                positional[k],
                _alignment(h["alignment"]),
                h.get("steps"),
                [step["tokens"].tolist() for step in h["history"]] if history else [],
            )
            for k, h in enumerate(flat)
        ]
    )
    return [list(islice(plain, len(best))) for best in hypotheses]


def _alignment(found: Any) -> list[Any]:
    """Pairs of words, weights, or for each word of the target the source word's place."""
    if found is None:
        return []
    return found.tolist() if torch.is_tensor(found) else list(found)


def _count_tokens(hypotheses: list[list[Any]]) -> int:
    """Tokens of the best hypotheses."""
    return sum(len(best[0]["tokens"]) for best in hypotheses if best)


def _lists(tensors: list[torch.Tensor], divisor: float | None = None) -> list[list[Any]]:
    together = torch.cat([tensor.reshape(-1) for tensor in tensors])
    numbers = iter((together if divisor is None else together / divisor).tolist())
    return [list(islice(numbers, tensor.numel())) for tensor in tensors]


def random_state() -> str:
    """torch's random state as text, for the CPU and the GPU in use."""
    states = [torch.get_rng_state()]
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        states.append(torch.cuda.get_rng_state())
    return ",".join(base64.b64encode(state.numpy().tobytes()).decode("ascii") for state in states)


def set_random_state(text: str) -> None:
    """Set the random state that `random_state` returned."""
    states = [torch.frombuffer(bytearray(base64.b64decode(part)), dtype=torch.uint8) for part in text.split(",")]
    torch.set_rng_state(states[0])
    if len(states) > 1 and torch.cuda.is_available():
        torch.cuda.set_rng_state(states[1])
