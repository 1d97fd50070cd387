"""Stock fairseq-generate in this process, a tiny random model with data, and the comparison of both sides' lines."""

from __future__ import annotations

import argparse
import contextlib
import io
import os
import random
import re
from pathlib import Path

import torch
from fairseq import tasks
from fairseq.data import Dictionary, indexed_dataset
from fairseq.dataclass.utils import convert_namespace_to_omegaconf
from fairseq.models import ARCH_CONFIG_REGISTRY
from fairseq_cli import generate as stock_cli
from omegaconf import OmegaConf

import fastgen
from fastgen.cli import generate

SENTENCES = 37
TOLERANCE = 1e-4
_LINE = re.compile(r"(?:[STHDPAI]-\d+|E-\d+_\d+)\t|Generate ")


def result_lines(text: str) -> list[str]:
    """Without log lines, whose times differ."""
    return [line for line in text.splitlines() if _LINE.match(line)]


def run_stock(*flags: object) -> list[str]:
    """The lines of fairseq-generate, which needs help to load a checkpoint at all."""
    arguments = [str(flag) for flag in flags]
    output = io.StringIO()
    with (
        fastgen.disabled(),
        generate._command_line(arguments),
        torch.serialization.safe_globals([argparse.Namespace]),
        contextlib.redirect_stdout(output),
    ):
        stock_cli.cli_main()
    return result_lines(output.getvalue())


def run_fastgen(*flags: object) -> list[str]:
    output = io.StringIO()
    with contextlib.redirect_stdout(output):
        code = generate.main([str(flag) for flag in flags])
    assert code == 0, output.getvalue()
    assert all(call.tier == "compat" for call in fastgen.status().calls)
    return result_lines(output.getvalue())


def differences(stock: list[str], ours: list[str]) -> list[str]:
    """Where the lines differ: text and order to the byte, numbers by more than TOLERANCE."""
    found = [] if len(stock) == len(ours) else [f"{len(stock)} lines and {len(ours)}"]
    for number, (a, b) in enumerate(zip(stock, ours, strict=False), 1):
        if not _same(a, b):
            found.append(f"line {number}: {a!r} and {b!r}")
    return found


def by_sentence(lines: list[str]) -> list[str]:
    """In the order of the sentences' numbers; the summary stays last."""
    return [*sorted(lines[:-1], key=lambda line: int(re.findall(r"\d+", line)[0])), lines[-1]]


def _same(a: str, b: str) -> bool:
    if a == b:
        return True
    fields, others = a.split("\t"), b.split("\t")
    if fields[0] != others[0] or len(fields) != len(others):
        return False
    if fields[0][0] in "HD":
        return fields[2:] == others[2:] and abs(float(fields[1]) - float(others[1])) <= TOLERANCE
    if fields[0][0] == "P" or (fields[0][0] == "A" and "," in fields[1]):
        numbers, more = (re.split("[ ,]", field[1]) for field in (fields, others))
        if len(numbers) != len(more):
            return False
        pairs = zip(numbers, more, strict=True)
        # Both are rounded to four digits, so a difference below the tolerance can be shown as just the tolerance.
        return all(abs(float(x) - float(y)) < TOLERANCE + 1e-9 for x, y in pairs)
    return False


def write_data(folder: Path, sentences: int, *, seed: int = 0) -> Path:
    """A data-bin of random subword sentences, English to German."""
    chance = random.Random(seed)
    dictionary = Dictionary()
    for i in range(60):
        dictionary.add_symbol(f"w{i}@@" if i % 3 == 0 else f"w{i}", n=100 - i)
    folder.mkdir(parents=True)
    for language in ("en", "de"):
        dictionary.save(str(folder / f"dict.{language}.txt"))
        prefix = folder / f"test.en-de.{language}"
        builder = indexed_dataset.make_builder(f"{prefix}.bin", impl="mmap", vocab_size=len(dictionary))
        for _ in range(sentences):
            ids = [chance.randrange(3, len(dictionary)) for _ in range(chance.randint(1, 12))]  # 3: unknown words too
            builder.add_item(torch.tensor([*ids, dictionary.eos()], dtype=torch.int32))
        builder.finalize(f"{prefix}.idx")
    return folder


def write_checkpoint(
    path: Path, data: Path, *, seed: int = 0, arch: str = "transformer", task: str = "translation"
) -> Path:
    """A random model, 16 wide, sharp enough to end its sentences."""
    torch.manual_seed(seed)
    args = argparse.Namespace(
        arch=arch,
        task=task,
        criterion="label_smoothed_cross_entropy",
        data=str(data),
        source_lang="en",
        target_lang="de",
        encoder_embed_dim=16,
        decoder_embed_dim=16,
        encoder_ffn_embed_dim=32,
        decoder_ffn_embed_dim=32,
        encoder_layers=2,
        decoder_layers=2,
        encoder_attention_heads=2,
        decoder_attention_heads=2,
        max_source_positions=64,
        max_target_positions=64,
        left_pad_source=True,
        left_pad_target=False,
    )
    ARCH_CONFIG_REGISTRY[arch](args)
    cfg = convert_namespace_to_omegaconf(args)
    model = tasks.setup_task(cfg.task).build_model(cfg.model)
    with torch.no_grad():
        model.decoder.output_projection.weight.mul_(4.0)
    history = {"criterion_name": "x", "optimizer_name": "x", "lr_scheduler_state": {}, "num_updates": 0, "best_loss": 0}
    state = {
        "args": None,
        "cfg": OmegaConf.to_container(cfg, resolve=True, enum_to_str=True),
        "model": model.state_dict(),
        "optimizer_history": [history],
        "extra_state": {},
    }
    torch.save(state, path)
    return path


def environment() -> dict[str, str]:
    """For a subprocess that imports what this process imports."""
    import sys

    return {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "OMP_NUM_THREADS": "1"}
