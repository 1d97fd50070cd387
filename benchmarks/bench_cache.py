"""Cache size and attention cost of beam search as functions of T, the tokens generated so far.

    python benchmarks/bench_cache.py                                # a random model
    python benchmarks/bench_cache.py --shared DIR --smollm DIR      # and SmolLM2-135M, trained

Slots are counted for one sentence: each holds one key and one value per layer and head. "stock" copies the prompt and
all tokens for each beam; "greedy" is one beam; "in use" is what each beam's query meets in attention, "ancestors" those
slots of it that some beam descends from (no exact cache can hold fewer), "allocated" the memory taken. A step is timed
with pruning and without.
"""

from __future__ import annotations

import argparse
import copy
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import transformers
from measuring import OtherProcesses, aligned, begin, environment, options, quieten, say_if_disturbed, write
from tqdm import tqdm

import fastgen
from fastgen.cache.tree import BeamTree

MARKS = (32, 64, 128, 192, 256, 320, 384, 448, 512)


def random_llama(_: argparse.Namespace) -> tuple[Any, torch.Tensor]:
    config = transformers.LlamaConfig(
        vocab_size=32000,
        hidden_size=576,
        intermediate_size=1536,
        num_hidden_layers=12,
        num_attention_heads=9,
        num_key_value_heads=3,
        max_position_embeddings=2048,
        pad_token_id=0,
    )
    return transformers.LlamaForCausalLM(config).eval(), torch.randint(10, 31990, (1, 64))


def smollm(args: argparse.Namespace) -> tuple[Any, torch.Tensor]:
    model = transformers.AutoModelForCausalLM.from_pretrained(args.smollm, dtype=torch.float32)
    tokenizer = transformers.AutoTokenizer.from_pretrained(args.smollm)
    documents = (args.shared / "data/docs.txt").read_text("utf-8").splitlines()
    rows = [tokenizer(text).input_ids[:64] for text in documents[:: len(documents) // args.sentences][: args.sentences]]
    return model.eval(), torch.tensor(rows)


MODELS: dict[str, Callable[[argparse.Namespace], tuple[Any, torch.Tensor]]] = {"random": random_llama, "smollm": smollm}


class Watch:
    """What each step finds in the tree, and how long it takes."""

    def __init__(self) -> None:
        self.steps: list[dict[str, float]] = []
        self._last = time.perf_counter()

    def look(self, tree: BeamTree) -> None:
        now = time.perf_counter()
        self.steps.append(
            {
                "in use": tree.used,
                "ancestors": tree.prompt_length + tree._ancestors().shape[1],
                "allocated": tree.prompt_length + tree.capacity,
                "bytes": tree.nbytes,
                "ms": 1e3 * (now - self._last),
            }
        )
        self._last = time.perf_counter()


@contextmanager
def watched(prunes: bool) -> Iterator[Watch]:
    watch, advance, ancestors = Watch(), BeamTree.advance, BeamTree._ancestors

    def looking(tree: BeamTree) -> None:
        watch.look(tree)  # so a step is timed from one opening of slots to the next
        if not prunes:  # all slots are somebody's
            tree._ancestors = lambda: torch.arange(tree.generated).expand(tree.batch, -1)  # type: ignore[method-assign]
        advance(tree)
        vars(tree).pop("_ancestors", None)

    BeamTree.advance = looking  # type: ignore[method-assign]
    try:
        yield watch
    finally:
        BeamTree.advance, BeamTree._ancestors = advance, ancestors  # type: ignore[method-assign]


def generate(model: Any, prompt: torch.Tensor, beams: int, new: int, prunes: bool) -> tuple[torch.Tensor, Watch]:
    """One sentence, `[1, P]` -> tokens; the end is banned, so that it has `new` tokens."""
    options = {"num_beams": beams, "max_new_tokens": new, "min_new_tokens": new, "do_sample": False}
    with watched(prunes) as watch:
        return model.generate(prompt, attention_mask=torch.ones_like(prompt), pad_token_id=0, **options), watch


def measure(name: str, args: argparse.Namespace) -> dict[str, Any]:
    torch.manual_seed(0)
    model, prompts = MODELS[name](args)
    others, runs, by_rounding = OtherProcesses(), [], list[int]()
    for number, prompt in enumerate(tqdm(prompts[:, None], unit="sentence", leave=False)):
        sides = {}
        for prunes in (True, False) if number % 2 == 0 else (False, True):
            sides[prunes] = generate(model, prompt, args.beams, args.new_tokens, prunes)
        if not torch.equal(sides[True][0], sides[False][0]):
            # After hundreds of tokens a float32 score has a spacing of 1e-4, and rounding may decide: not in float64.
            exact = copy.deepcopy(model).double()
            both = [generate(exact, prompt, args.beams, args.new_tokens, prunes)[0] for prunes in (True, False)]
            if not torch.equal(*both):
                sys.exit(f"{name}, sentence {number}: pruning changed the tokens")
            by_rounding.append(number)
        runs.append({"pruned": sides[True][1].steps, "unpruned": sides[False][1].steps})
    return {
        "model": name,
        **environment(transformers, fastgen),
        "beams": args.beams,
        "prompt_tokens": prompts.shape[1],
        "other_processes": others.cores(),
        "differ_by_rounding": by_rounding,  # sentences whose tokens are the same in float64 only
        "marks": marks(runs, prompts.shape[1], args),
        "runs": runs,
    }


def marks(runs: list[dict[str, Any]], prompt: int, args: argparse.Namespace) -> list[dict[str, float]]:
    """Medians over the sentences, at some lengths; times of the 32 steps before."""
    rows = []
    for length in (mark for mark in MARKS if mark <= args.new_tokens):
        step = min(length, args.new_tokens - 1) - 1  # the first token comes from the prompt's own forward pass

        def median(side: str, what: str, step: int = step) -> float:
            return statistics.median(run[side][step][what] for run in runs)

        def milliseconds(side: str, step: int = step) -> float:
            return statistics.median(one["ms"] for run in runs for one in run[side][max(1, step - 31) : step + 1])

        greedy = prompt + length
        rows.append(
            {
                "T": length,
                "greedy": greedy,
                "stock": args.beams * greedy,
                "unpruned": prompt + args.beams * length,
                **{what: median("pruned", what) for what in ("in use", "ancestors", "allocated")},
                "allocated_by_greedy": median("pruned", "allocated") / greedy,
                "ms_pruned": milliseconds("pruned"),
                "ms_unpruned": milliseconds("unpruned"),
            }
        )
    return rows


def table(result: dict[str, Any]) -> str:
    names = ("T", "greedy", "stock", "unpruned", "in use", "ancestors", "allocated")
    rows = [(*names, "/ greedy", "ms pruned", "ms unpruned")]
    for mark in result["marks"]:
        counts = tuple(f"{mark[name]:.0f}" for name in names)
        times = (f"{mark['ms_pruned']:.1f}", f"{mark['ms_unpruned']:.1f}")
        rows.append((*counts, f"{mark['allocated_by_greedy']:.2f}x", *times))
    return aligned(rows)


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    parser = options("Cache size and attention cost of beam search as functions of the tokens generated.")
    parser.add_argument("--beams", type=int, default=4, help="default: %(default)s")
    parser.add_argument("--new-tokens", type=int, default=512, help="default: %(default)s")
    parser.add_argument("--sentences", type=int, default=3, help="of trained models; default: %(default)s")
    parser.add_argument("--shared", type=Path, metavar="DIR", help="holds data/: for SmolLM2's prompts")
    parser.add_argument("--smollm", type=Path, metavar="DIR", help="SmolLM2-135M as transformers saves it")
    args = parser.parse_args(argv)
    if args.beams < 2 or args.new_tokens < MARKS[0] or args.sentences < 1 or args.threads < 1:
        parser.error(f"--beams must be 2 or more, --new-tokens {MARKS[0]} or more, --sentences and --threads 1 or more")
    if (args.shared is None) != (args.smollm is None):
        parser.error("SmolLM2 needs both --shared DIR and --smollm DIR")
    return args


def main() -> int:
    args = parse()
    begin(args)
    quieten()
    for name in MODELS if args.smollm else ("random",):
        result = measure(name, args)
        write(args.output, f"cache-{name}", result, indent=None)
        print(f"{name}, {args.beams} beams, prompt of {result['prompt_tokens']} tokens; slots of one sentence")
        print(table(result))
        say_if_disturbed(result["other_processes"])
    return 0


if __name__ == "__main__":
    sys.exit(main())
