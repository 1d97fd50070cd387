"""`fastgen.encode` against the model itself, padded, with the host's scaled_dot_product_attention: BERT-base's shape.

    python benchmarks/bench_encoder.py --shared ../shared

Texts have the lengths of real ones, in the order of their file, in batches as a script would make them. First all
outputs are compared, at all positions that are no padding; then both sides take turns.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

import measuring
import torch
import transformers
from tqdm import tqdm

import fastgen

TOLERANCE = 1e-4  # of the states, whose numbers are about 1


def _model() -> Any:
    torch.manual_seed(0)
    return transformers.BertModel(transformers.BertConfig()).eval()


def _batches(shared: Path, name: str, texts: int, batch: int) -> list[dict[str, torch.Tensor]]:
    import sentencepiece

    pieces = sentencepiece.SentencePieceProcessor(model_file=str(shared / "data/ddtp-en-de/spm.model"))
    lines = (shared / "data" / name).read_text("utf-8").splitlines()[:texts]
    lengths = [min(len(ids) + 2, 512) for ids in pieces.encode(lines)]
    generator = torch.Generator().manual_seed(0)
    batches = []
    for start in range(0, len(lengths), batch):
        some = torch.tensor(lengths[start : start + batch])
        mask = (torch.arange(int(some.max())) < some[:, None]).long()
        ids = torch.randint(1000, 30000, mask.shape, generator=generator)
        batches.append({"input_ids": ids * mask, "attention_mask": mask})
    return batches


def _read(model: Any, batches: list[dict[str, torch.Tensor]], side: str, bar: tqdm[Any]) -> list[torch.Tensor]:
    states = []
    for batch in batches:
        outputs = model(**batch) if side == "stock" else fastgen.encode(model, **batch)
        states.append(outputs.last_hidden_state[batch["attention_mask"].bool()])
        bar.update()
    return states


@torch.no_grad()
def _measure(model: Any, what: str, batches: list[dict[str, torch.Tensor]], rounds: int) -> dict[str, Any]:
    with tqdm(total=2 * len(batches) * (rounds + 1), desc=what, unit="batch") as bar:
        stock, ours = (_read(model, batches, side, bar) for side in measuring.SIDES)
        error = max(float((a - b).abs().max()) for a, b in zip(stock, ours, strict=True))
        seconds: list[dict[str, float]] = []
        others = []
        for number in range(rounds if error < TOLERANCE else 0):
            one = {}
            for side in measuring.SIDES[:: -1 if number % 2 else 1]:
                quiet, started = measuring.OtherProcesses(), time.perf_counter()
                _read(model, batches, side, bar)
                one[side] = time.perf_counter() - started
                others.append(quiet.cores())
            seconds.append(one)
    real = sum(int(batch["attention_mask"].sum()) for batch in batches)
    positions = sum(batch["input_ids"].numel() for batch in batches)
    return {
        "what": what,
        "tokens": real,
        "positions": positions,
        "largest_difference": error,
        "rounds": seconds,
        "other_processes": others,
        "ratio": measuring.ratios(seconds) if seconds else None,
    }


def main() -> int:
    parser = measuring.options(__doc__ or "", rounds=5)
    parser.add_argument("--shared", type=Path, required=True, metavar="DIR", help="the folder with `data`")
    args = parser.parse_args()
    measuring.begin(args)
    model = _model()
    results = [
        _measure(
            model, "256 sentences, batches of 32", _batches(args.shared, "ddtp-en-de/test.en", 256, 32), args.rounds
        ),
        _measure(model, "32 documents, batches of 8", _batches(args.shared, "docs.txt", 32, 8), args.rounds),
    ]
    measuring.write(args.output, "encoder", {**measuring.environment(transformers), "scenarios": results})
    rows = [("texts", "padding", "stock", "fastgen", "ratio", "min to max")]
    for result in results:
        if (ratio := result["ratio"]) is None:
            rows.append((result["what"], "", "", "", "differs", f"{result['largest_difference']:.1e}"))
            continue
        padding = f"{1 - result['tokens'] / result['positions']:.0%}"
        times = (f"{ratio[side]:.2f} s" for side in measuring.SIDES)
        rows.append(
            (result["what"], padding, *times, f"{ratio['ratio']:.2f}x", f"{ratio['min']:.2f} to {ratio['max']:.2f}")
        )
    print(f"{measuring.cpu_model()}, {args.threads} threads, float32, medians of {args.rounds} rounds")
    print(measuring.aligned(rows))
    others = [cores or 0.0 for result in results for cores in result["other_processes"]]
    measuring.say_if_disturbed(max(others, default=0.0), " in a round")
    return 0 if all(result["ratio"] for result in results) else 1


if __name__ == "__main__":
    sys.exit(main())
