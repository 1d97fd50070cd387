"""The whole idea of fastgen in one file of plain torch: beam search over one tree of keys and values per sentence.

The model is GPT-2's, with the weights of Hugging Face's. What is left out: padding, other models, other options, and
everything that makes the same idea fast (fastgen's operators, packed weights, captured steps, memory that is reused).

Shapes: `B` sentences, `M` beams, `P` tokens of a prompt, `S` slots in use, `H` heads, `D` size of a head, `V` tokens of
the vocabulary.

    python docs/nano.py      # beam search by this file and by the host, compared
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


# ------------------------------------------------------------------------------------------------ the tree
class Tree:
    """Keys and values of all sentences. Each token that some beam wrote has one slot; beams share the slots.

    A host keeps `B * M` rows and copies all of them whenever beams are chosen. Here a slot never moves, and what is
    chosen is the ancestry alone: which slots each beam sees.
    """

    def __init__(self, layers: int, beams: int, prompt: Tensor) -> None:
        """`prompt`: int64 `[B, P]`. Its slots are seen by every beam."""
        batch, length = prompt.shape
        self.beams, self.length = beams, length  # tokens on the path of a beam
        self.keys: list[Tensor | None] = [None] * layers  # [B, H, S, D]
        self.values: list[Tensor | None] = [None] * layers
        self.ancestry = torch.ones(batch, beams, length, dtype=torch.bool)  # [B, M, S]
        self.prompt_length = length

    def open_step(self) -> None:
        """Make room for one token of each beam: `M` more slots, of which each beam sees its own."""
        own = torch.eye(self.beams, dtype=torch.bool).expand(len(self.ancestry), -1, -1)
        self.ancestry = torch.cat([self.ancestry, own], dim=2)
        self.length += 1

    def append(self, layer: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Store what a layer has for the new slots, `[B, H, P or M, D]`; returns all slots' keys and values."""
        old_key, old_value = self.keys[layer], self.values[layer]
        self.keys[layer] = key if old_key is None else torch.cat([old_key, key], dim=2)
        self.values[layer] = value if old_value is None else torch.cat([old_value, value], dim=2)
        keys, values = self.keys[layer], self.values[layer]
        assert keys is not None and values is not None
        return keys, values

    def mask(self) -> Tensor:
        """What attention adds to the scores of the beams' queries, `[B, 1, M, S]`: 0 for ancestors, else -inf."""
        return torch.zeros(self.ancestry.shape).masked_fill(~self.ancestry, -torch.inf)[:, None]

    def reorder(self, parents: Tensor) -> None:
        """Beam `m` of a sentence goes on from beam `parents[b, m]`, int64 `[B, M]`. No key moves."""
        self.ancestry = self.ancestry.gather(1, parents[..., None].expand_as(self.ancestry))

    def prune(self) -> None:
        """Drop the slots that no beam sees any more. Beams soon have most ancestors in common: few slots stay."""
        is_seen = self.ancestry.any(1)  # [B, S]
        most = int(is_seen.sum(1).max())  # sentences with fewer keep some that nobody sees
        slots = is_seen.sort(dim=1, descending=True, stable=True).indices[:, :most]
        self.ancestry = self.ancestry.gather(2, slots[:, None].expand(-1, self.beams, -1))
        for stored in (self.keys, self.values):
            for layer, tensor in enumerate(stored):
                if tensor is not None:
                    stored[layer] = torch.take_along_dim(tensor, slots[:, None, :, None], dim=2)

    def select(self, sentences: Tensor) -> None:
        """Drop all sentences but these, int64 `[B']`: the others have finished."""
        self.ancestry = self.ancestry[sentences]
        for stored in (self.keys, self.values):
            stored[:] = [None if tensor is None else tensor[sentences] for tensor in stored]


def attend(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
    """Attention of a sentence's queries to its slots, `[B, H, Q, D]`.

    Of a step the queries are the beams', of the prompt the tokens'. Either way keys and values are read once for all
    of them: FastSeq's equations 3 and 4 (Yan et al. 2021, https://arxiv.org/abs/2106.04718), with a mask.
    """
    scores = query @ key.transpose(2, 3) * query.shape[-1] ** -0.5
    return (scores if mask is None else scores + mask).softmax(-1) @ value


# ------------------------------------------------------------------------------------------------ the model
@dataclass
class Model:
    """GPT-2 as functions of its weights."""

    weights: dict[str, Tensor]
    layers: int
    heads: int

    @classmethod
    def of_host(cls, model: Any) -> Model:
        """From a `GPT2LMHeadModel`, whose weights it shares."""
        return cls(model.state_dict(), model.config.n_layer, model.config.n_head)

    def read(self, prompt: Tensor, tree: Tree) -> Tensor:
        """Logits behind the prompt, `[B, V]`. Each prompt is read once, not once for each beam."""
        length = prompt.shape[1]
        causal = torch.full((length, length), -torch.inf).triu(1)
        return self._run(prompt, torch.arange(length), tree, causal)[:, -1]

    def step(self, tokens: Tensor, tree: Tree) -> Tensor:
        """Logits behind one more token of each beam, int64 `[B, M]` -> `[B, M, V]`: beams stand as if they were
        positions of one text, and the ancestry tells them apart."""
        tree.open_step()
        return self._run(tokens, torch.tensor(tree.length - 1), tree, tree.mask())

    def _run(self, tokens: Tensor, positions: Tensor, tree: Tree, mask: Tensor) -> Tensor:
        states = self.weights["transformer.wte.weight"][tokens] + self.weights["transformer.wpe.weight"][positions]
        for layer in range(self.layers):
            at = f"transformer.h.{layer}."
            states = states + self._attention(layer, self._norm(f"{at}ln_1", states), tree, mask)
            inner = F.gelu(self._linear(f"{at}mlp.c_fc", self._norm(f"{at}ln_2", states)), approximate="tanh")
            states = states + self._linear(f"{at}mlp.c_proj", inner)
        return self._norm("transformer.ln_f", states) @ self.weights["lm_head.weight"].t()

    def _attention(self, layer: int, states: Tensor, tree: Tree, mask: Tensor) -> Tensor:
        at = f"transformer.h.{layer}.attn."
        projected = self._linear(f"{at}c_attn", states).chunk(3, dim=-1)
        query, key, value = (each.unflatten(-1, (self.heads, -1)).transpose(1, 2) for each in projected)
        output = attend(query, *tree.append(layer, key, value), mask)
        return self._linear(f"{at}c_proj", output.transpose(1, 2).flatten(2))

    def _linear(self, name: str, states: Tensor) -> Tensor:
        return states @ self.weights[f"{name}.weight"] + self.weights[f"{name}.bias"]

    def _norm(self, name: str, states: Tensor) -> Tensor:
        weight, bias = self.weights[f"{name}.weight"], self.weights[f"{name}.bias"]
        return F.layer_norm(states, weight.shape, weight, bias)


# ------------------------------------------------------------------------------------------------ the search
@dataclass
class Sentence:
    """What is known of one sentence besides its live beams."""

    number: int
    finished: list[tuple[float, list[int]]] = field(default_factory=list)  # the best M: score, and tokens

    def finish(self, score: float, tokens: list[int], beams: int) -> None:
        """A hypothesis has ended; the best `beams` of all are kept."""
        self.finished = sorted([*self.finished, (score, tokens)], key=lambda each: -each[0])[:beams]

    def is_done(self, best_live: float, beams: int) -> bool:
        """Whether no live beam can beat the worst of the finished ones."""
        return len(self.finished) == beams and best_live <= self.finished[-1][0]


@torch.no_grad()
def beam_search(model: Model, prompt: Tensor, beams: int, max_new_tokens: int, eos: int) -> list[list[int]]:
    """The best hypothesis of each sentence, prompt included, by the rules of transformers (`early_stopping=False`).

    Args:
        prompt: int64 `[B, P]`, without padding.
    """
    tree = Tree(model.layers, beams, prompt)
    sentences = [Sentence(number) for number in range(len(prompt))]
    tokens = prompt[:, None].expand(-1, beams, -1)  # [B, M, P], the live hypotheses
    sums = torch.full((len(prompt), beams), -1e9)  # [B, M], of log-probabilities
    sums[:, 0] = 0.0  # at first all beams are the same: only one may be chosen from
    logits = model.read(prompt, tree)[:, None].expand(-1, beams, -1)  # [B, M, V]
    results: list[list[int]] = [[]] * len(prompt)
    for new in range(1, max_new_tokens + 1):
        # Twice as many candidates as beams: M of them go on even if every beam ends.
        totals = (sums[..., None] + logits.log_softmax(-1)).flatten(1)  # [B, M * V]
        scores, places = totals.topk(2 * beams)
        parents, chosen = places // logits.shape[-1], places % logits.shape[-1]  # [B, 2M]
        ends = chosen == eos if new < max_new_tokens else torch.ones_like(chosen, dtype=torch.bool)
        for row, sentence in enumerate(sentences):
            for i in range(beams):  # beyond the best M, candidates only keep the beam full
                if ends[row, i]:
                    path = [*tokens[row, parents[row, i]].tolist(), int(chosen[row, i])]
                    sentence.finish(float(scores[row, i]) / new, path, beams)
        sums, best = scores.masked_fill(ends, -torch.inf).topk(beams)  # of those that go on
        parents, chosen = parents.gather(1, best), chosen.gather(1, best)
        tokens = torch.cat([tokens.gather(1, parents[..., None].expand_as(tokens)), chosen[..., None]], dim=2)
        tree.reorder(parents)
        # Sentences that are done leave: the others' steps become cheaper.
        is_last = new == max_new_tokens
        done = [is_last or s.is_done(float(sums[row, 0]) / new, beams) for row, s in enumerate(sentences)]
        for sentence, is_done in zip(sentences, done, strict=True):
            if is_done:
                results[sentence.number] = sentence.finished[0][1]
        stay = torch.tensor([row for row, is_done in enumerate(done) if not is_done], dtype=torch.int64)
        if not len(stay):
            break
        if len(stay) < len(sentences):
            tree.select(stay)
            sentences = [sentences[row] for row in stay.tolist()]
            tokens, sums, chosen = tokens[stay], sums[stay], chosen[stay]
        if tree.ancestry.shape[2] > 2 * tree.length:
            tree.prune()
        logits = model.step(chosen, tree)
    return results


def main() -> None:
    """A random model decoded by this file and by the host."""
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    config = GPT2Config(vocab_size=61, n_embd=32, n_layer=3, n_head=4, n_positions=96, initializer_range=0.3)
    host = GPT2LMHeadModel(config).eval()
    prompt = torch.randint(4, 61, (3, 7))
    ours = beam_search(Model.of_host(host), prompt, beams=4, max_new_tokens=40, eos=3)
    options = dict(num_beams=4, max_new_tokens=40, eos_token_id=3, pad_token_id=0, do_sample=False)
    theirs = host.generate(prompt, attention_mask=torch.ones_like(prompt), **options)
    for mine, row in zip(ours, theirs.tolist(), strict=True):
        print("the same" if mine == row[: len(mine)] else "different", mine)


if __name__ == "__main__":
    main()
