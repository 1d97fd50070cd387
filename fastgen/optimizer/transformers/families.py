"""Tables of what is known of the host's models, by `model_type` and by class name.

All entries have been compared with stock by the test suite. A model in none of the tables is tried on the first call,
and has none of the extras below.
"""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class Attention:
    """An attention class whose keys and values are plain projections of the input, so that it can have slim caches."""

    keys: str  # name of the layer that makes the keys, or all projections at once
    values: str
    is_rotary: bool = False  # keys are rotated by position, as Llama's are

    @property
    def is_fused(self) -> bool:
        """Whether one layer makes queries, keys and values (in cross-attention, keys and values)."""
        return self.keys == self.values


@dataclass(frozen=True)
class Family:
    """A `model_type` that the test suite compares with stock, in both tiers."""

    # Absolute positions come only from `position_ids`, or from a module that is told the number of earlier tokens, so
    # sentences at different positions may share a batch.
    shares_batches: bool = False
    chunks_prompts: bool = False  # chunks of a prompt give the logits of the whole prompt
    # A step may read several tokens of one sentence: positions count on from the number of earlier tokens.
    reads_several: bool = False
    encoder: str = ""  # the encoder's class, if right padding does not change other positions
    attention: dict[str, Attention] = field(default_factory=dict)  # by the names of classes


def _separate(name: str, keys: str = "k_proj", values: str = "v_proj", is_rotary: bool = False) -> dict[str, Attention]:
    return {name: Attention(keys, values, is_rotary)}


def _fused(name: str, layer: str, is_rotary: bool = False) -> dict[str, Attention]:
    return {name: Attention(layer, layer, is_rotary)}


def _seq2seq(name: str, attention: dict[str, Attention], shares_batches: bool = True) -> Family:
    return Family(shares_batches, reads_several=True, encoder=f"{name}Encoder", attention=attention)


def _t5(name: str) -> Family:
    return Family(True, reads_several=True, encoder=f"{name}Stack", attention=_separate(f"{name}Attention", "k", "v"))


def _decoder(attention: dict[str, Attention] | None = None, shares_batches: bool = True) -> Family:
    return Family(shares_batches, chunks_prompts=True, reads_several=True, attention=attention or {})


FAMILIES: dict[str, Family] = {
    "bart": _seq2seq("Bart", _separate("BartAttention")),
    "bert": Family(encoder="BertModel"),
    "bert-generation": Family(encoder="BertGenerationEncoder"),
    "blenderbot": _seq2seq("Blenderbot", _separate("BlenderbotAttention")),
    "fsmt": Family(),
    "gemma": _decoder(_separate("GemmaAttention", is_rotary=True)),
    "gemma2": _decoder(),
    "gpt2": _decoder(_fused("GPT2Attention", "c_attn")),
    "gpt_neox": _decoder(),
    "gpt_oss": _decoder(shares_batches=False),
    "led": Family(),
    "llama": _decoder(_separate("LlamaAttention", is_rotary=True)),
    "m2m_100": _seq2seq("M2M100", _separate("M2M100Attention")),
    "marian": _seq2seq("Marian", _separate("MarianAttention")),
    "mbart": _seq2seq("MBart", _separate("MBartAttention")),
    "mistral": _decoder(_separate("MistralAttention", is_rotary=True)),
    "mt5": _t5("MT5"),
    "olmo": Family(reads_several=True, attention=_separate("OlmoAttention", is_rotary=True)),
    "opt": _decoder(_separate("OPTAttention")),
    "pegasus": _seq2seq("Pegasus", _separate("PegasusAttention")),
    "phi3": _decoder(_fused("Phi3Attention", "qkv_proj", is_rotary=True)),
    "prophetnet": Family(),
    "qwen3": _decoder(),
    "speech_to_text": Family(attention=_separate("Speech2TextAttention")),
    "t5": _t5("T5"),
    "trocr": Family(),
    "umt5": _t5("UMT5"),
    "unilm": Family(),
    "whisper": Family(reads_several=True, attention=_separate("WhisperAttention")),
}
SHARE_BATCHES = frozenset(name for name, family in FAMILIES.items() if family.shares_batches)
READ_SEVERAL = frozenset(name for name, family in FAMILIES.items() if family.reads_several)
ATTENTIONS = {name: one for family in FAMILIES.values() for name, one in family.attention.items()}
ENCODERS = frozenset(family.encoder for family in FAMILIES.values() if family.encoder)
# For `fastgen.encode`: base models that are only encoders, and the heads.
BASE_ENCODERS = frozenset(
    """AlbertModel BertModel CamembertModel DistilBertModel ElectraModel MPNetModel RobertaModel
    XLMRobertaModel""".split()
)
ENCODER_HEADS = frozenset(
    "Model ForSequenceClassification ForTokenClassification ForQuestionAnswering ForMaskedLM".split()
)
# Attention modules that compute attention themselves, and are folded at the module's boundary: class -> the name of the
# mask parameter. They take an additive mask and cross-attend with `key_value_states`.
FOLDED_AT_THE_BOUNDARY = {"LEDDecoderAttention": "attention_mask", "TrOCRAttention": "attention_mask"}
