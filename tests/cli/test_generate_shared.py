"""fastgen-generate on the trained model and real sentences: against fairseq-generate, and against transformers."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

pytest.importorskip("fairseq", reason="fastgen-generate needs fairseq")

import fairseq_kit

import fastgen
from fastgen.cli import generate_transformers


@pytest.fixture(scope="session")
def job(shared: Path) -> list[str]:
    return [
        str(shared / "data/ddtp-en-de/data-bin"), "--path", str(shared / "models/ddtp-en-de/checkpoint.pt"), "--cpu",
        "--num-workers", "0", "--max-tokens", "1000", "--no-progress-bar", "--max-len-b", "60",
    ]  # fmt: skip


SPM = ["--remove-bpe", "sentencepiece"]
MATRIX: dict[str, list[str]] = {
    "beam 1": ["--beam", "1", *SPM],
    "beam 4": ["--beam", "4", *SPM],
    "beam 8": ["--beam", "8", *SPM],
    "n-best 4": ["--beam", "4", "--nbest", "4", *SPM],
    "length penalty 0": ["--beam", "4", "--lenpen", "0"],
    "length penalty 0.6": ["--beam", "4", "--lenpen", "0.6"],
    "length penalty 2": ["--beam", "4", "--lenpen", "2"],
    "prefix": ["--beam", "4", "--prefix-size", "2", *SPM],
    "sampling": ["--sampling", "--sampling-topk", "10", "--seed", "11", "--beam", "4", "--nbest", "4", *SPM],
    "alignment": ["--beam", "4", "--print-alignment", *SPM],
    "reference scored": ["--score-reference", *SPM],
    "ensemble": ["--beam", "4", "--path", "{path}:{path}", *SPM],
    "sacrebleu": ["--beam", "4", "--scoring", "sacrebleu", *SPM],
}
FEW = ["--distributed-world-size", "40", "--distributed-rank", "7"]  # batches of one length or so, 25 sentences


def compare(job: list[str], flags: list[str]) -> None:
    flags = [flag.format(path=job[job.index("--path") + 1]) for flag in flags]
    stock = fairseq_kit.run_stock(*job, *flags)
    ours = fairseq_kit.run_fastgen(*job, *flags, "--workers", "0")
    assert fairseq_kit.differences(stock, ours) == []
    assert len(stock) > 20
    assert fastgen.status().calls or "--score-reference" in flags  # which needs no search


@pytest.mark.parametrize("flags", MATRIX.values(), ids=MATRIX.keys())
def test_the_lines_are_stocks(job: list[str], flags: list[str]) -> None:
    compare(job, [*flags, *FEW])


@pytest.mark.slow
@pytest.mark.skipif("FASTGEN_ALL_SENTENCES" not in os.environ, reason="20 minutes: set FASTGEN_ALL_SENTENCES to run it")
@pytest.mark.parametrize("flags", MATRIX.values(), ids=MATRIX.keys())
def test_all_sentences(job: list[str], flags: list[str]) -> None:
    compare(job, flags)


def test_the_same_weights_in_transformers_give_the_same_translations(
    job: list[str], shared: Path, tmp_path: Path
) -> None:
    tokenizers = pytest.importorskip("tokenizers")
    transformers = pytest.importorskip("transformers")
    folder = shared / "models/ddtp-en-de"
    words = json.loads((folder / "vocab.json").read_text("utf-8"))
    core = tokenizers.Tokenizer(tokenizers.models.WordLevel({word: i for i, word in enumerate(words)}, "<unk>"))
    core.pre_tokenizer = tokenizers.pre_tokenizers.CharDelimiterSplit(" ")
    core.post_processor = tokenizers.processors.TemplateProcessing(single="$A </s>", special_tokens=[("</s>", 2)])
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=core, bos_token="<s>", pad_token="<pad>", eos_token="</s>", unk_token="<unk>"
    )
    tokenizer.save_pretrained(tmp_path / "tokenizer")

    lines = fairseq_kit.run_fastgen(*job, "--beam", "5", "--lenpen", "1", "--workers", "0", *FEW)
    sources = [line.split("\t", 1)[1] for line in lines if line.startswith("S-")]
    wanted = [line.split("\t")[2] for line in lines if line.startswith("H-")]
    (tmp_path / "in.txt").write_text("".join(f"{line}\n" for line in sources), "utf-8")
    arguments = [folder / "hf", tmp_path / "in.txt", tmp_path / "out.txt", "--tokenizer", tmp_path / "tokenizer",
                 "--num-beams", "5", "--max-new-tokens", "120", "--workers", "0", "--quiet"]  # fmt: skip
    assert generate_transformers.main([str(argument) for argument in arguments]) == 0
    assert (tmp_path / "out.txt").read_text("utf-8").splitlines() == wanted
