"""The suites: tables and figures by name, each a list of tasks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from fastgen.bench.growth_suites import lightseq_fig5, lightseq_fig6, scale, wide
from fastgen.bench.image_suites import captions
from fastgen.bench.sections import RANDOM, SHOWN, Section, random_text, task_of
from fastgen.bench.tasks import Task

HOSTS = ("transformers", "ctranslate2", "ctranslate2-int8", "fastgen")
GREEDY = ("transformers", "transformers-static", "ctranslate2", "ctranslate2-int8", "fastgen")
OURS = ("transformers", "fastgen")
PEERS = ("transformers", "ctranslate2", "fastgen")
ROUNDED = ("transformers", "ctranslate2-int8", "fastgen", "fastgen-int8", "fastgen-bf16")
FAIRSEQ = ("fairseq", "fastgen-fairseq")
ALL = ("transformers", "fairseq", "ctranslate2", "ctranslate2-int8", "fastgen", "fastgen-fairseq")
SENTENCES = "English to German, 1,000 sentences, batches of 64, 5 beams"
DRAFTED = (*HOSTS, "fastgen-undrafted")
OPENVINO = ("openvino", "openvino-int8")
LLAMA = (*DRAFTED, "fastgen-int8", "llamacpp", "llamacpp-int8", *OPENVINO)
MODES = ("transformers", "fastgen", "fastgen-compat", "fastgen-tree", "fastgen-slim")


# ---------------------------------------------------------------------------------------------- peers
def peers(quick: bool) -> list[Section]:
    """Every peer side by side."""
    few = {"layers": 2} if quick else {}
    long = dict(batch=4, source=128, new=16, beams=4, **few) if quick else dict(batch=8, source=512, new=64, beams=4)
    short = dict(batch=32, source=25, new=12 if quick else 30, beams=4, **few)
    one = short | {"batch": 1}
    prompts = dict(batch=4, source=128, new=16, beams=4, **few) if quick else dict(batch=4, source=512, new=64, beams=4)
    greedy = [
        task_of("greedy-1", "transformer-base", "transformer-base", GREEDY, **one | {"beams": 1}),
        task_of("greedy-8", "transformer-base", "transformer-base", GREEDY, **short | {"batch": 8, "beams": 1}),
        task_of("greedy-gpt2", "GPT-2", "gpt2", GREEDY, batch=4, source=128, new=64),
    ]
    fairseq = [
        task_of("fairseq-wide", "Transformer as wide as BART-base", "transformer-wide", FAIRSEQ, **long),
        task_of("fairseq-base-32", "transformer-base", "transformer-base", FAIRSEQ, **short),
        task_of("fairseq-base-1", "transformer-base", "transformer-base", FAIRSEQ, **one),
        task_of("fairseq-gpt2", "language model of GPT-2's shape", "gpt2", FAIRSEQ, **prompts | {"source": 256}),
    ]
    sections = [
        Section(
            "Beam search",
            random_text(quick),
            [
                task_of("bart-base", "BART-base", "bart-base", HOSTS, **long),
                task_of("transformer-base-32", "transformer-base", "transformer-base", HOSTS, **short),
                task_of("transformer-base-1", "transformer-base", "transformer-base", HOSTS, **one),
                task_of("gpt2", "GPT-2", "gpt2", HOSTS, **prompts),
            ],
            [*SHOWN, "phases"],
        ),
        Section(
            "Greedy search",
            f"{random_text(quick)} The host's own best is here its static cache with compiled steps.",
            greedy[:1] if quick else greedy,
        ),
        Section("Trained models", "They end by themselves.", _trained(quick), [*SHOWN, "phases"]),
        Section(
            "fairseq",
            random_text(quick),
            fairseq[:2] if quick else fairseq,
            [*SHOWN, "phases"],
        ),
    ]
    modes, lists = MODES, (*OURS, "fastgen-lists", "fastgen-refill")
    if quick:
        return sections
    return [
        *sections,
        _one_sentence(),
        _of_1b(),
        Section(
            "What fastgen's options do",
            RANDOM,
            [
                task_of("modes-bart-base", "BART-base", "bart-base", MODES, **long),
                task_of("modes-transformer-base-1", "transformer-base", "transformer-base", modes, **one),
                Task("modes-ddtp", SENTENCES, "ddtp", lists, batch=64, new=120, beams=5),
            ],
        ),
    ]


def _one_sentence() -> Section:
    tasks = [Task("greedy-whisper", "Whisper-base, 11 s of speech", "whisper", DRAFTED, batch=1, new=120)]
    for source, new in ((512, 128), (64, 256)):
        tasks.append(task_of(f"greedy-smollm-{source}", "SmolLM2", "smollm", LLAMA, batch=1, source=source, new=new))
    return Section("Greedy search of one sentence", "Trained models. fastgen is there without drafts, too.", tasks)


def _of_1b() -> Section:
    sides, shape = ("transformers", "ctranslate2", "fastgen-undrafted"), dict(batch=1, source=128, new=64)
    text = (
        "Random weights, all numbers of float32, or rounded to bfloat16 as published models' are; computed in float32. "
        "No draft of random weights is right, so there are none."
    )
    tasks = [
        task_of("llama-1b", "Llama of 1B parameters", "llama-1b", sides, **shape),
        task_of("llama-1b-bf16", "Llama of 1B parameters, numbers of bfloat16", "llama-1b-bf16", sides, **shape),
    ]
    return Section("Greedy search with 1B parameters", text, tasks)


# ---------------------------------------------------------------------------------------------- int8
def int8(quick: bool) -> list[Section]:
    """Rounded weights: the peers' tasks on transformers, with CTranslate2's int8 beside fastgen's int8 and bf16."""

    def of(section: Section, title: str, show: list[str]) -> Section:
        tasks = [task for task in section.tasks if task.sides != FAIRSEQ and task.model != "smollm"]
        tasks = [replace(task, name=f"int8-{task.name}", sides=ROUNDED) for task in tasks]
        return replace(section, title=title, tasks=tasks, show=show)

    beam, greedy, trained = peers(quick)[:3]
    sections = [
        of(beam, "Beam search with rounded weights", SHOWN),
        of(greedy, "Greedy search with rounded weights", SHOWN),
        of(trained, "Trained models with rounded weights", [*SHOWN, "metrics"]),
    ]
    if not quick:
        sizes = [dict(batch=4, source=512, new=48, beams=4), dict(batch=1, source=512, new=128)]
        sizes.append(dict(batch=1, source=64, new=256))
        name = "int8-smollm-{batch}x{source}".format_map
        sides = (*ROUNDED, "openvino-int8")
        tasks = [task_of(name(each), "SmolLM2-135M", "smollm", sides, **each) for each in sizes]
        sections.append(
            Section("A language model with rounded weights", "Trained; its outputs are as long as is said.", tasks)
        )
    return sections


# ---------------------------------------------------------------------------------------------- longer
def longer(quick: bool) -> list[Section]:
    """Longer sources and outputs, diverse beam search, one recording of speech."""
    few = {"layers": 2} if quick else {}
    source = dict(batch=2, source=256, new=8, beams=5) if quick else dict(batch=8, source=1022, new=32, beams=5)
    output = dict(batch=2, source=16, new=48, beams=4) if quick else dict(batch=4, source=128, new=512, beams=4)
    groups: dict[str, Any] = dict(batch=2, source=64, new=8) if quick else dict(batch=8, source=512, new=64)
    groups |= dict(beams=8, options={"num_beam_groups": 4, "diversity_penalty": 0.5})
    tasks = [
        task_of("long-source", "BART-base", "bart-base", OURS, **source, **few),
        task_of("long-output", "GPT-2", "gpt2", OURS, **output, **few),
        task_of("diverse", "BART-base in 4 groups", "bart-base", OURS, **groups, **few),
    ]
    if not quick:
        clip = Task("whisper-1", "Whisper-base, 11 s of speech, 5 beams", "whisper", OURS, batch=1, new=120, beams=5)
        tasks.append(clip)
    text = (
        f"{random_text(quick)} Whisper is trained, and ends by itself. The host has no beams in groups since version "
        "5: there stock's side is fastgen's loop over the host's own cache."
    )
    return [Section("Longer sources and outputs, groups, one recording", text, tasks, [*SHOWN, "phases"])]


def _trained(quick: bool) -> list[Task]:
    demo = Task(
        "demo",
        f"figures to words (shipped with fastgen), {64 if quick else 320} inputs, batches of 64, 5 beams",
        "demo",
        HOSTS,
        batch=64,
        new=128,
        beams=5,
        limit=64 if quick else 320,
    )
    if quick:
        return [demo]
    beams: dict[str, Any] = dict(batch=4, source=512, new=48, beams=4)
    return [
        demo,
        Task("ddtp", SENTENCES, "ddtp", ALL, batch=64, new=120, beams=5),
        Task("whisper", "Whisper-base, 4 x 11 s of speech, 5 beams", "whisper", HOSTS, batch=4, new=120, beams=5),
        Task("smollm", "SmolLM2-135M, 4 x 512 -> 48, 4 beams", "smollm", (*HOSTS, *OPENVINO), **beams),
    ]


# ---------------------------------------------------------------------------------------------- FastSeq's tables
def fastseq_table1(quick: bool) -> list[Section]:
    """End to end, the models of the paper's table 1 (Yan et al., ACL 2021) and of its repository."""
    few = {"layers": 2} if quick else {}
    summary = dict(beams=4, options={"no_repeat_ngram_size": 3}, **few)
    summary |= dict(batch=2, source=64, new=12) if quick else dict(batch=4, source=512, new=64)
    plain = {name: value for name, value in summary.items() if name != "options"}
    translate = dict(batch=8 if quick else 32, source=25, new=12 if quick else 30, beams=4, **few)
    text = (
        f"{random_text(quick)} The paper's batches are for a GPU (V100, 16 GB), its documents of CNN/DailyMail and its "
        "weights are not at hand: here is what a processor does in minutes. Repeated 3-grams are banned, as there; not "
        "with fairseq, which ignores that option on a CPU."
    )
    return [
        Section(
            "transformers",
            text,
            [
                task_of("bart-large-hf", "BART-large", "bart-large", PEERS, **summary),
                task_of("distilbart-hf", "DistilBART-12-6", "distilbart-12-6", OURS, **summary),
                task_of("t5-base-hf", "T5-base", "t5-base", PEERS, **summary),
                task_of("gpt2-hf", "GPT-2", "gpt2", PEERS, **summary),
                task_of("prophetnet-hf", "ProphetNet-large", "prophetnet-large", OURS, **summary),
                task_of("unilm", "UniLM-base", "unilm-base", OURS, **summary),
            ],
        ),
        Section(
            "fairseq",
            text,
            [
                task_of("bart-large-fs", "BART-large", "bart-large", FAIRSEQ, **plain),
                task_of("wmt16-en-de-fs", "transformer-big (WMT16 En-De)", "transformer-big", FAIRSEQ, **translate),
                task_of("prophetnet-fs", "ProphetNet-large", "prophetnet-large", FAIRSEQ, **plain),
            ],
        ),
    ]


def fastseq_table2(quick: bool) -> list[Section]:
    """Each part of fastgen alone, and stacked, on lines of text: the paper's table 2."""
    sides = (
        "lines",
        "lines-pipeline",
        "lines-ngrams",
        "lines-cache",
        "lines-batch",
        "lines-2",
        "lines-3",
        "lines-4",
        "lines-5",
    )
    options = {"no_repeat_ngram_size": 3}
    demo: dict[str, Any] = dict(beams=5, new=128, batch=16, limit=64 if quick else 320, options=options)
    tasks = [
        Task("parts-demo", f"figures to words, {demo['limit']} lines in batches of 16, 5 beams", "demo", sides, **demo)
    ]
    if not quick:
        many: dict[str, Any] = dict(beams=5, new=120, batch=32, options=options)
        tasks.append(
            Task("parts-ddtp", "English to German, 1,000 lines in batches of 32, 5 beams", "ddtp", sides, **many)
        )
    text = "Trained models from text to text, repeated 3-grams banned. The pipeline's worker processes share the cores."
    return [Section("What each part brings", text, tasks, ["ratios", "seconds", "outputs"])]


def fastseq_table3(quick: bool) -> list[Section]:
    """Bans of repeated n-grams alone: the paper's table 3."""
    sides = ("ngrams-transformers", "ngrams-fairseq", "ngrams-fastgen")
    task = Task("ngrams", "128 rows, 140 tokens, 3-grams, vocabulary of 50,264", "ngrams", sides, 32, new=140, beams=4)
    text = (
        "One step's bans, on random tokens and scores; transformers copies the scores. Outputs are the banned tokens."
    )
    return [Section("Bans of repeated n-grams", text, [task], ["ratios", "seconds", "outputs"])]


def fastseq_table4(quick: bool) -> list[Section]:
    """Quality: the paper's table 4."""
    text = "Trained models on their test sets; every figure in percent. Where all tokens are the same, quality is."
    demo: dict[str, Any] = dict(batch=64, new=128, beams=5, limit=64 if quick else 320, rounds=1)
    tasks = [Task("quality-demo", "figures to words (shipped with fastgen), 5 beams", "demo", HOSTS, **demo)]
    if not quick:
        many: dict[str, Any] = dict(batch=64, new=120, beams=5, rounds=1)
        short: dict[str, Any] = dict(batch=64, new=40, beams=4, rounds=1)
        clip: dict[str, Any] = dict(batch=1, new=120, beams=5, limit=1, rounds=1)
        tasks += [
            Task("quality-ddtp", "English to German, 1,000 sentences, 5 beams", "ddtp", ALL, **many),
            Task("quality-g2p", "words to phonemes, 1,000 words, 4 beams", "g2p", HOSTS, **short),
            Task("quality-whisper", "Whisper-base, 11 s of speech, 5 beams", "whisper", OURS, **clip),
        ]
    return [Section("Quality", text, tasks, ["metrics", "outputs"])]


# ---------------------------------------------------------------------------------------------- slim caches
def slim_whisper(quick: bool) -> list[Section]:
    """Whisper's caches as keys and values, and as X and E."""
    sides = ("transformers", "fastgen-kv", "fastgen-slim")
    names = ("tiny",) if quick else ("tiny", "base", "small")
    few = {"layers": 2} if quick else {}
    tasks = [
        task_of(
            f"whisper-{name}-{batch}",
            f"Whisper-{name}, 30 s of noise",
            f"whisper-{name}",
            sides,
            **few,
            batch=batch,
            **sizes,
        )
        for name in names
        for batch in ((1,) if quick else (1, 4))
        for sizes in [dict(new=8 if quick else 32, beams=5)]
    ]
    text = (
        f"{random_text(quick)} Memory is the point: a slim cache keeps the layers' inputs, of which keys and values "
        "follow."
    )
    return [Section("Whisper with slim caches", text, tasks, ["memory", "ratios", "seconds", "outputs"])]


SUITES: dict[str, Callable[[bool], list[Section]]] = {
    "peers": peers,
    "longer": longer,
    "int8": int8,
    "captions": captions,
    "fastseq-table1": fastseq_table1,
    "fastseq-table2": fastseq_table2,
    "fastseq-table3": fastseq_table3,
    "fastseq-table4": fastseq_table4,
    "slim-whisper": slim_whisper,
    "lightseq-fig5": lightseq_fig5,
    "lightseq-fig6": lightseq_fig6,
    "scale": scale,
    "wide": wide,
}
