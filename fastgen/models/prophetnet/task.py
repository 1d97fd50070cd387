"""The task that published checkpoints name: translation with BERT's vocabulary."""

from __future__ import annotations

from fairseq.tasks import register_task
from fairseq.tasks.translation import TranslationConfig, TranslationTask

from fastgen.models.prophetnet.dictionary import BertDictionary


@register_task("translation_prophetnet", dataclass=TranslationConfig)
class TranslationProphetnetTask(TranslationTask):
    """Sequence to sequence; both sides' `dict.*.txt` hold BERT's vocabulary."""

    @classmethod
    def load_dictionary(cls, filename: str) -> BertDictionary:
        return BertDictionary.load(filename)
