"""Small models behind OpenAI's endpoints, on a server in a thread, and what stock transformers makes of a request."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSeq2SeqLM,
    AutoTokenizer,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
    StoppingCriteria,
    StoppingCriteriaList,
)

import fastgen
from fastgen.cli import serve
from fastgen.demo.job import SHIPPED_MODEL
from fastgen.pipeline.transformers.hypotheses import hypotheses_of

# Written without spaces.
CHINESE = "天地玄黄宇宙洪荒日月盈昃辰宿列张寒来暑往秋收冬藏闰余成岁律吕调阳云腾致雨露结为霜金生丽水玉出昆冈"
_ENGLISH = "the cat sat on the mat, and the dogs didn't see it: they were asleep. naïve café déjà vu"
TEMPLATE = (
    "{% for message in messages %}{% if message.role == 'assistant' and loop.first %}"
    "{{ raise_exception('the first message is of the user') }}{% endif %}"
    "{{ message.role[0] }}{{ message.content }}{{ eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'a' }}{% endif %}"
)
LONGEST = 96  # positions of the models


def _save_gpt2(folder: Path) -> None:
    """Tokens of bytes: a character may be several; the end token is also the padding."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=320, special_tokens=["<end>"], initial_alphabet=pre_tokenizers.ByteLevel.alphabet()
    )
    tokenizer.train_from_iterator([_ENGLISH] * 3 + [CHINESE], trainer)
    wrapped = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<end>", pad_token="<end>")
    wrapped.chat_template = TEMPLATE
    wrapped.save_pretrained(folder)
    sizes = dict(n_embd=32, n_layer=2, n_head=4, n_positions=LONGEST, vocab_size=len(wrapped))
    ends = dict(bos_token_id=0, eos_token_id=0, pad_token_id=0)
    GPT2LMHeadModel(GPT2Config(**sizes, **ends, initializer_range=0.5)).save_pretrained(folder)


def _save_llama(folder: Path) -> None:
    """A token for each character, and a text begins with a special token."""
    special = ["<pad>", "<s>", "</s>"]
    vocabulary = {token: number for number, token in enumerate([*special, *dict.fromkeys("asu" + CHINESE)])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="天"))
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.Split("", "isolated"), decoders.Fuse()
    named = dict(bos_token="<s>", eos_token="</s>", pad_token="<pad>")
    wrapped = PreTrainedTokenizerFast(tokenizer_object=tokenizer, **named)
    wrapped.chat_template = "<s>" + TEMPLATE
    wrapped.save_pretrained(folder)
    sizes = dict(hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4)
    sizes |= dict(num_key_value_heads=2, max_position_embeddings=LONGEST, vocab_size=len(vocabulary))
    ends = dict(bos_token_id=1, eos_token_id=2, pad_token_id=0)
    LlamaForCausalLM(LlamaConfig(**sizes, **ends, initializer_range=0.5)).save_pretrained(folder)


class Served(NamedTuple):
    """A model, the service that has it, and where that listens."""

    model: Any
    tokenizer: Any
    service: Any
    url: str
    name: str

    def client(self, **options: Any) -> Any:
        import openai

        default = {"api_key": "any", "max_retries": 0, "timeout": 240}
        return openai.OpenAI(base_url=f"{self.url}/v1", **default | options)

    @property
    def is_seq2seq(self) -> bool:
        return bool(self.model.config.is_encoder_decoder)

    def tokens(self, text: str) -> list[int]:
        return list(self.tokenizer(text).input_ids)


def folder_of(kind: str, folder: Path) -> Path:
    """The folder with a model of this kind: "gpt2", "llama" or "bart", the shipped one."""
    torch.manual_seed(5)
    if kind == "bart":
        return SHIPPED_MODEL
    {"gpt2": _save_gpt2, "llama": _save_llama}[kind](folder)
    return folder


@contextlib.contextmanager
def served(kind: str, folder: Path, **limits: Any) -> Iterator[Served]:
    """A server of a model, in a thread."""
    from fastgen.serving.app import build
    from fastgen.serving.limits import Limits
    from fastgen.serving.service import Service

    place = folder_of(kind, folder)
    settings = serve.settings_of(serve.parser().parse_args([str(place)]), None).model
    service = Service(settings, Limits(**{"new_tokens": 40, "beams": 6, "rows": 48, "inputs": 8} | limits), 200)
    auto = AutoModelForSeq2SeqLM if kind == "bart" else AutoModelForCausalLM
    try:
        with listening(build(service, None)) as url:
            loaded = auto.from_pretrained(place).eval(), AutoTokenizer.from_pretrained(place)
            yield Served(*loaded, service, url, place.name)
    finally:
        service.engine.close()


@contextlib.contextmanager
def listening(app: Any) -> Iterator[str]:
    """Where uvicorn listens for this application."""
    import uvicorn

    server = uvicorn.Server(uvicorn.Config(app, port=0, lifespan="off", log_config=None))
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    end = time.monotonic() + 120
    while not server.started:
        assert thread.is_alive() and time.monotonic() < end
        time.sleep(0.01)
    try:
        yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join(120)


class Wanted(NamedTuple):
    """A hypothesis of stock transformers."""

    text: str
    tokens: list[int]  # new ones
    score: float | None


class _StopsAt(StoppingCriteria):
    """Ends a row when its text has a stop string; transformers' own rule fails with some tokenizers."""

    def __init__(self, at: Served, stop: str, begin: int) -> None:
        self._at, self._stop, self._begin = at, stop, begin

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        texts = self._at.tokenizer.batch_decode(input_ids[:, self._begin :], skip_special_tokens=True)
        return torch.tensor([self._stop in text for text in texts], device="cpu")


def wanted(at: Served, prompt: list[int], *, seed: int = 0, stop: str | None = None, **options: Any) -> list[Wanted]:
    """What stock `generate` makes of this input alone, best first."""
    from transformers import GenerationConfig

    own = {"pad_token_id": at.tokenizer.pad_token_id, "max_length": None, "do_sample": False, "num_beams": 1}
    config = GenerationConfig.from_dict({**at.model.generation_config.to_dict(), **own, **options})
    config.return_dict_in_generate = config.output_scores = True
    torch.manual_seed(seed)
    more: dict[str, Any] = {"tokenizer": at.tokenizer} if options.get("stop_strings") else {}
    if stop is not None:
        more["stopping_criteria"] = StoppingCriteriaList([_StopsAt(at, stop, 1 if at.is_seq2seq else len(prompt))])
    with fastgen.disabled(), torch.no_grad():
        output = at.model.generate(torch.tensor([prompt], device="cpu"), generation_config=config, **more)
    (found,) = hypotheses_of(at.model, config, output, len(prompt))
    rows = [row[1:] if at.is_seq2seq else row for row in found.tokens]
    texts = at.tokenizer.batch_decode(rows, skip_special_tokens=True)
    return [Wanted(*one) for one in zip(texts, rows, found.scores, strict=True)]


def count(at: Served, row: list[int], max_tokens: int) -> tuple[str, int]:
    """Why a hypothesis of stock transformers ends, and the tokens it has, of which an end token may be the padding."""
    if row and row[-1] == at.tokenizer.eos_token_id:
        return "stop", len(row)
    if len(row) == max_tokens:
        return "length", len(row)
    assert at.tokenizer.pad_token_id == at.tokenizer.eos_token_id
    return "stop", len(row) + 1
