"""Bans of repeated n-grams alone, in the middle of a search: stock's ways, and fastgen's operator.

The shape is that of the paper's table 3 (Yan et al., ACL 2021): 32 sentences of 4 beams, 140 tokens, BART's
vocabulary.
"""

from __future__ import annotations

from typing import Any

from fastgen import installing
from fastgen.bench.runners import Missing

_VOCABULARY, _WORDS = 50264, 500  # few words, so that n-grams do repeat


class Runner:
    def __init__(self, order: dict[str, Any]) -> None:
        import torch

        self._torch = torch
        torch.manual_seed(0)
        self._on_gpu = order["device"] != "cpu"
        task, self._n = order["task"], order["options"].get("n", 3)
        rows, beams, length = task["batch"] * task["beams"], task["beams"], task["new"]
        self._tokens = torch.randint(5, _WORDS, (rows, length), device=order["device"])
        self._tokens[::3, -2:] = self._tokens[::3, :2]
        self._scores = torch.randn(rows, _VOCABULARY, device=order["device"])
        self._ban = getattr(self, f"_{order['options']['which']}")(rows // beams, beams)

    def _transformers(self, batch: int, beams: int) -> Any:
        from transformers import NoRepeatNGramLogitsProcessor

        processor = NoRepeatNGramLogitsProcessor(self._n)
        return lambda: processor(self._tokens, self._scores)  # on a copy of the scores

    def _fairseq(self, batch: int, beams: int) -> Any:
        try:
            from fairseq.ngram_repeat_block import NGramRepeatBlock
        except ImportError:
            raise Missing(f"fairseq is not installed: {installing.command('fairseq')}") from None
        block = NGramRepeatBlock(self._n, use_extension=self._on_gpu)
        step = self._tokens.shape[1] - 1
        return lambda: block(self._tokens, self._scores, batch, beams, step)

    def _fastgen(self, batch: int, beams: int) -> Any:
        from fastgen import ops

        def ban() -> Any:
            ops.ban_repeated_ngrams_(self._tokens, self._scores, self._n)
            return self._scores

        return ban

    def versions(self) -> dict[str, str]:
        return {"torch": self._torch.__version__}

    def generate(self) -> Any:
        with self._torch.no_grad():
            scores = self._ban()
        if self._on_gpu:
            self._torch.cuda.synchronize()
        return scores

    def outputs(self, generated: Any) -> dict[str, Any]:
        banned = [row.isinf().nonzero().flatten().tolist() for row in generated]
        return {"rows": banned, "tokens": banned}
