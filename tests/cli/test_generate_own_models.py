"""fastgen-generate-transformers knows models of our own by their folder alone."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

WORDS = "[PAD] [UNK] [CLS] [SEP] [MASK] the a cat dog sat ran on mat ##s . , and red blue house".split()
TEXTS = ["the cats sat on the mat .", "a dog"]


@pytest.mark.slow
def test_unilm(tmp_path: Path) -> None:
    from transformers import BertTokenizer

    import fastgen
    from fastgen.models.unilm import UnilmConfig, UnilmForSeq2Seq

    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "vocab.txt").write_text("\n".join(WORDS))
    tokenizer = BertTokenizer.from_pretrained(folder, padding_side="left")
    torch.manual_seed(2)
    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
    ids = {"pad_token_id": 0, "bos_token_id": 2, "eos_token_id": 3, "mask_token_id": 4}
    model = UnilmForSeq2Seq(UnilmConfig(vocab_size=len(WORDS), max_position_embeddings=64, **sizes, **ids)).eval()
    with torch.no_grad():
        for weight in model.parameters():
            weight.normal_()
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    expected = []
    for text in TEXTS:
        inputs = dict(tokenizer(text, return_tensors="pt"))
        with fastgen.disabled():
            found = model.generate(**inputs, num_beams=2, max_new_tokens=6)
        expected.append(tokenizer.decode(found[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True))
    assert any(expected)

    (tmp_path / "in.txt").write_text("".join(f"{text}\n" for text in TEXTS))
    command = [sys.executable, "-m", "fastgen.cli.generate_transformers", folder, "in.txt", "out.txt"]
    options = ["--num-beams", "2", "--max-new-tokens", "6", "--workers", "0", "--quiet"]
    done = subprocess.run([*command, *options], cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "out.txt").read_text("utf-8").splitlines() == expected
