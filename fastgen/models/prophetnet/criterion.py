"""The loss that published checkpoints were trained with; fairseq needs the name to load them.

No `from __future__ import annotations` here: fairseq reads the types of options from annotations.
"""

import math
from dataclasses import dataclass, field
from typing import Any

import torch
from fairseq.criterions import FairseqCriterion, register_criterion
from fairseq.dataclass import FairseqDataclass
from fairseq.logging import metrics


@dataclass
class NgramLanguageLossConfig(FairseqDataclass):
    label_smoothing: float = field(default=0.0, metadata={"help": "share of the target that goes to all tokens alike"})
    disable_ngram_loss: bool = field(default=False, metadata={"help": "of the next token alone"})


@register_criterion("ngram_language_loss", dataclass=NgramLanguageLossConfig)
class NgramLanguageLoss(FairseqCriterion):
    """Cross-entropy of all predicting streams, with label smoothing: equation 4 of the paper with equal weights."""

    def __init__(self, task: Any, label_smoothing: float, disable_ngram_loss: bool) -> None:
        super().__init__(task)
        self.eps, self.disable_ngram_loss = label_smoothing, disable_ngram_loss

    def forward(self, model: Any, sample: dict[str, Any], reduce: bool = True) -> tuple[Any, int, dict[str, Any]]:
        """The loss summed over tokens and streams, the number of summands, and the values to log."""
        logits, extra = model(**sample["net_input"])
        target = sample["target"]  # int64 [B, T]
        streams = [logits]
        if not self.disable_ngram_loss:
            streams += map(model.decoder.output_layer, extra["ngram_features"])
        loss, count = logits.new_zeros((), dtype=torch.float32), 0
        for number, each in enumerate(streams):
            wanted = target.ne(self.padding_idx)
            if "target_idx" in sample:  # pretraining: positions in a span, whose earlier tokens are not predicted
                wanted &= sample["target_idx"] >= number
            log_probs = each[wanted].log_softmax(-1, dtype=torch.float32)
            right = log_probs.gather(1, target[wanted][:, None]).sum()
            loss = loss - (1 - self.eps) * right - self.eps * log_probs.mean(1).sum()
            count += int(wanted.sum())
        logged = {"loss": loss.data, "sample_size": count}
        return loss, count, {**logged, "ntokens": sample["ntokens"], "nsentences": len(target)}

    @staticmethod
    def reduce_metrics(logging_outputs: list[dict[str, Any]]) -> None:
        """Log the mean of the loss, in bits."""
        loss, count = (sum(each[name] for each in logging_outputs) for name in ("loss", "sample_size"))
        metrics.log_scalar("loss", loss / count / math.log(2), count, round=3)

    @staticmethod
    def logging_outputs_can_be_summed() -> bool:
        return True
