"""The fairseq task of published checkpoints: translation with BERT's vocabulary."""

from __future__ import annotations

from fairseq.tasks import register_task
from fairseq.tasks.translation import TranslationConfig, TranslationTask

from fastgen.models.prophetnet.dictionary import BertDictionary


@register_task("translation_prophetnet", dataclass=TranslationConfig)
class TranslationProphetnetTask(TranslationTask):
    """fairseq's translation task with BERT's vocabulary in the `dict.*.txt` of both sides."""

    @classmethod
    def load_dictionary(cls, filename: str) -> BertDictionary:
        return BertDictionary.load(filename)
