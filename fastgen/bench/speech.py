"""Whisper-base as a speech pipeline of transformers, with the settings that the published checkpoint has."""

from __future__ import annotations

from pathlib import Path
from typing import Any

# Whisper's tokens, by their names in the generation settings: the text's end, its languages (the first two), tasks.
_END, _START, _TRANSLATE, _TRANSCRIBE, _BEFORE, _NO_TIMES = 50257, 50258, 50358, 50359, 50361, 50363
_ALIGNING = [[3, 1], [4, 2], [4, 3], [4, 7], [5, 1], [5, 2], [5, 4], [5, 6]]  # heads, by layer


def pipeline(folder: str | Path) -> Any:
    """A speech pipeline of the model in `folder`, on the CPU.

    Settings that the folder's generation_config.json lacks are those of `openai/whisper-base`, the list of suppressed
    tokens apart.
    """
    import transformers

    model = transformers.WhisperForConditionalGeneration.from_pretrained(folder).eval()
    tokenizer = transformers.WhisperTokenizer.from_pretrained(folder)
    languages = tokenizer.convert_ids_to_tokens([*range(_START + 1, _TRANSLATE)])
    settings = dict(
        is_multilingual=True,
        lang_to_id={name: _START + 1 + number for number, name in enumerate(languages)},
        task_to_id={"translate": _TRANSLATE, "transcribe": _TRANSCRIBE},
        no_timestamps_token_id=_NO_TIMES,
        prev_sot_token_id=_BEFORE,
        alignment_heads=_ALIGNING,
        begin_suppress_tokens=[220, _END],
        max_initial_timestamp_index=50,
        return_timestamps=False,
        max_length=448,
    )
    for name, value in settings.items():
        if getattr(model.generation_config, name, None) is None:
            setattr(model.generation_config, name, value)
    model.generation_config._from_model_config = False  # else who loads what is saved of it makes them anew, without
    return transformers.pipeline(
        "automatic-speech-recognition",
        model=model,
        tokenizer=tokenizer,
        feature_extractor=transformers.WhisperFeatureExtractor.from_pretrained(folder),
        device="cpu",
    )
