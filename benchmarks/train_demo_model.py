"""Train the small model that fastgen-demo decodes with, on data made up here, on a CPU in about 20 minutes.

    python benchmarks/train_demo_model.py                      # train, test, write fastgen/demo/model
    python benchmarks/train_demo_model.py --evaluate 1000      # only test the shipped model

The task is fastgen/demo/task.py: figures written out in words. Sentences with ``is_held_out`` are never
trained on. Short sentences come first, because their attention patterns are found soonest.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import random
import time
from collections.abc import Iterator
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import AutoTokenizer, BartConfig, BartForConditionalGeneration, GenerationConfig

from fastgen.demo import task

SHIPPED = Path(task.__file__).parent / "model"
BOS, PAD, EOS, UNK = range(4)
SPECIALS = ["<s>", "<pad>", "</s>", "<unk>"]
POSITIONS = 160


def build_tokenizer() -> Tokenizer:
    """Digits and punctuation one by one, otherwise whole words."""
    symbols = SPECIALS + task.vocabulary()
    tokenizer = Tokenizer(models.WordLevel({s: i for i, s in enumerate(symbols)}, unk_token="<unk>"))
    tokenizer.add_special_tokens(SPECIALS)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Whitespace(), pre_tokenizers.Digits(individual_digits=True)]
    )
    tokenizer.post_processor = processors.TemplateProcessing(
        single="$A </s>", pair="$A $B </s>", special_tokens=[("</s>", EOS)]
    )
    # Joins words with blanks, and takes back the blank before a comma.
    tokenizer.decoder = decoders.WordPiece(prefix="##", cleanup=True)
    return tokenizer


def build_model(vocab_size: int) -> BartForConditionalGeneration:
    width = 128
    config = BartConfig(
        vocab_size=vocab_size,
        d_model=width,
        encoder_layers=3,
        decoder_layers=2,
        encoder_attention_heads=4,
        decoder_attention_heads=4,
        encoder_ffn_dim=2 * width,
        decoder_ffn_dim=2 * width,
        max_position_embeddings=POSITIONS,
        activation_function="relu",
        dropout=0.0,
        bos_token_id=BOS,
        pad_token_id=PAD,
        eos_token_id=EOS,
        decoder_start_token_id=EOS,
        forced_eos_token_id=None,
    )
    model = BartForConditionalGeneration(config)
    # Learned positions that start as sinusoids: neighbours are told apart from the first step on.
    for part in (model.model.encoder, model.model.decoder):
        table = part.embed_positions.weight.data  # [positions, width]
        angle = torch.arange(table.shape[0])[:, None] * torch.exp(
            torch.arange(0, width, 2) * (-math.log(10000.0) / width)
        )
        table.copy_(torch.cat([angle.sin(), angle.cos()], dim=-1) * 0.1)
    return model


def batches(tokenizer: Tokenizer, growing: int, tokens: int, seed: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Batches of about ``tokens`` target tokens, of similar lengths.

    Over ``growing`` steps the longest sentence grows from 1 item to all.
    """
    rng = random.Random(seed)
    step = 0
    while True:
        longest = task.MAX_ITEMS
        if step < growing:
            longest = 1 + task.MAX_ITEMS * step // growing
        pairs = task.sentences(rng.getrandbits(32), held_out=False, max_items=longest)
        pool = []
        for source, target in itertools.islice(pairs, 2048):
            pool.append((tokenizer.encode(source).ids, tokenizer.encode(target).ids))
        pool.sort(key=lambda pair: len(pair[1]))
        groups: list[list[tuple[list[int], list[int]]]] = [[]]
        for pair in pool:
            if groups[-1] and (len(groups[-1]) + 1) * len(pair[1]) > tokens:
                groups.append([])
            groups[-1].append(pair)
        rng.shuffle(groups)
        for group in groups:
            yield padded([s for s, _ in group], PAD), padded([t for _, t in group], -100)
            step += 1


def padded(rows: list[list[int]], value: int) -> torch.Tensor:
    return torch.nn.utils.rnn.pad_sequence([torch.tensor(r) for r in rows], batch_first=True, padding_value=value)


def train(args: argparse.Namespace) -> None:
    torch.manual_seed(args.seed)
    tokenizer = build_tokenizer()
    if args.resume:
        model = BartForConditionalGeneration.from_pretrained(args.resume, dtype=torch.float32)
    else:
        model = build_model(tokenizer.get_vocab_size())
    model.train()
    print(f"{sum(p.numel() for p in model.parameters()):,} parameters", flush=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, betas=(0.9, 0.98), fused=True)
    warmup = max(1, args.steps // 20)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer,
        lambda step: min((step + 1) / warmup, 0.5 + 0.5 * math.cos(math.pi * step / args.steps)),
    )
    started, total, count = time.perf_counter(), 0.0, 0
    growing = 0 if args.resume else int(0.4 * args.steps)
    data = batches(tokenizer, growing, args.tokens, args.seed)
    for step, (source, target) in enumerate(itertools.islice(data, args.steps), 1):
        loss = model(input_ids=source, attention_mask=(source != PAD).long(), labels=target).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        total, count = total + loss.item(), count + 1
        if step % 100 == 0 or step == args.steps:
            seconds = time.perf_counter() - started
            print(f"step {step:5} of {args.steps}, loss {total / count:.4f}, {seconds:.0f} s", flush=True)
            total, count = 0.0, 0
        if step % 1000 == 0:
            save(model, tokenizer, args.output)
    save(model, tokenizer, args.output)
    evaluate(args.output, 1000)


def save(model: BartForConditionalGeneration, tokenizer: Tokenizer, folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    model.generation_config = GenerationConfig(
        bos_token_id=BOS, pad_token_id=PAD, eos_token_id=EOS, decoder_start_token_id=EOS, max_new_tokens=128
    )
    model.save_pretrained(folder)
    tokenizer.save(str(folder / "tokenizer.json"))
    # Written by hand: the class name that every supported transformers version understands.
    fields: dict[str, object] = {"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": POSITIONS}
    fields |= {"bos_token": "<s>", "pad_token": "<pad>", "eos_token": "</s>", "unk_token": "<unk>"}
    fields |= {"clean_up_tokenization_spaces": False}
    (folder / "tokenizer_config.json").write_text(json.dumps(fields, indent=2) + "\n")


def evaluate(folder: Path, sample: int, beams: int = 5, batch: int = 50) -> float:
    """Exact match on held-out sentences that the demo does not use (another seed), by plain transformers."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = BartForConditionalGeneration.from_pretrained(folder, dtype=torch.float32).eval()
    right = [0] * (task.MAX_ITEMS + 1)
    seen = [0] * (task.MAX_ITEMS + 1)
    pairs = list(itertools.islice(task.sentences(99, held_out=True), sample))
    pairs.sort(key=lambda pair: len(pair[1]))
    for start in range(0, sample, batch):
        chunk = pairs[start : start + batch]
        inputs = tokenizer([s for s, _ in chunk], return_tensors="pt", padding=True, return_token_type_ids=False)
        with torch.inference_mode():
            outputs = model.generate(**inputs, num_beams=beams)
        for (source, target), text in zip(
            chunk, tokenizer.batch_decode(outputs, skip_special_tokens=True), strict=True
        ):
            items = source.count(",") + 1
            seen[items] += 1
            right[items] += text == target
            if text != target and sum(seen) - sum(right) <= 5:
                print(f"wrong: {source}\n  said: {text}\n  true: {target}")
    share = sum(right) / sum(seen)
    print(f"exact match with {beams} beams: {sum(right)} of {sum(seen)} ({share:.2%})")
    print("by number of items: " + ", ".join(f"{i}: {right[i]}/{seen[i]}" for i in range(1, len(seen)) if seen[i]))
    return share


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=7000)
    parser.add_argument("--tokens", type=int, default=1500, help="target tokens in a batch")
    parser.add_argument("--lr", type=float, default=1.5e-3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--resume", type=Path, metavar="FOLDER", help="go on from the model saved there")
    parser.add_argument("--output", type=Path, default=SHIPPED)
    parser.add_argument("--evaluate", type=int, metavar="N", help="only test the model in --output on N sentences")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    if args.evaluate:
        evaluate(args.output, args.evaluate)
    else:
        train(args)


if __name__ == "__main__":
    main()
