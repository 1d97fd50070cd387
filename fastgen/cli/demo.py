"""fastgen-demo: one beam search job by stock transformers and by fastgen, in turn, compared.

Without arguments a small trained model (demo_model/) writes figures out in words, offline. With
``--model NAME_OR_PATH --input FILE`` the job is the user's own.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import sys
import textwrap
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import fastgen
from fastgen.cli import demo_task
from fastgen.cli.exits import Parser, exit_code, positive_number
from fastgen.cli.peak_memory import PeakMemory
from fastgen.cli.transformers.hypotheses import without_tail
from fastgen.pipeline.errors import DIFFERENT, DONE, UNUSABLE, InputError

NAME = "fastgen-demo"
SHIPPED_MODEL = Path(__file__).parent / "demo_model"
SHIPPED_INPUTS = 320
SEED = 7  # the training script tests with another seed
SIDES = ("stock", "fastgen")
WARM_UP_TOKENS = 8


@dataclass(frozen=True)
class Job:
    """What to decode, and the right answers if they are known."""

    name: str
    model: Any
    tokenizer: Any
    sources: list[str]
    answers: list[str] | None
    beams: int
    batch_size: int
    max_new_tokens: int
    max_source: int | None  # longer inputs are cut

    @property
    def causal(self) -> bool:
        return not self.model.config.is_encoder_decoder

    def batches(self) -> list[dict[str, Any]]:
        """Token ids and masks, in the order of the input."""
        cut = {} if self.max_source is None else {"truncation": True, "max_length": self.max_source}
        encoded = []
        for start in range(0, len(self.sources), self.batch_size):
            texts = self.sources[start : start + self.batch_size]
            batch = self.tokenizer(texts, return_tensors="pt", padding=True, **cut)
            wanted = {name: batch[name].to(self.model.device) for name in ("input_ids", "attention_mask")}
            encoded.append(wanted)
        return encoded

    def generate(self, batch: dict[str, Any], max_new_tokens: int | None = None) -> Any:
        """What the user's script does; the same on both sides."""
        return self.model.generate(
            **batch,
            num_beams=self.beams,
            max_new_tokens=max_new_tokens or self.max_new_tokens,
            do_sample=False,
            num_return_sequences=1,
        )

    def new_tokens(self, batch: dict[str, Any], output: Any) -> list[list[int]]:
        """Each row's generated tokens, without the prompt and without padding at the end."""
        rows = output[:, batch["input_ids"].shape[1] :] if self.causal else output
        pad = self.tokenizer.pad_token_id
        return [without_tail(row, pad) for row in rows.tolist()]


@dataclass
class Side:
    """What one side did."""

    tokens: list[list[int]] = field(default_factory=list)
    seconds: float = 0.0
    peak_bytes: int | None = None
    texts: list[str] = field(default_factory=list)


@dataclass
class Result:
    job: Job
    sides: dict[str, Side]
    tiers: Counter[tuple[str, str | None]]  # (tier, reason) of every beam search on fastgen's side

    @property
    def identical(self) -> int:
        pairs = zip(self.sides["stock"].tokens, self.sides["fastgen"].tokens, strict=True)
        return sum(stock == ours for stock, ours in pairs)

    @property
    def speed_up(self) -> float:
        return self.sides["stock"].seconds / self.sides["fastgen"].seconds


def compare(job: Job, *, progress: bool = True) -> Result:
    """Warm up, time both sides batch by batch in alternating order, then measure memory on one batch."""
    from tqdm import tqdm  # type: ignore[import-untyped]

    batches = job.batches()
    result = Result(job, {name: Side() for name in SIDES}, Counter())
    for name in SIDES:
        with _running(name):
            job.generate(batches[0], min(WARM_UP_TOKENS, job.max_new_tokens))
    bar = tqdm(total=2 * len(job.sources), unit="inputs", disable=not progress, leave=True)
    with bar:
        for number, batch in enumerate(batches):
            for name in SIDES if number % 2 == 0 else SIDES[::-1]:
                bar.set_description(f"{name:>7}")
                _decode(job, batch, name, result)
                bar.update(len(batch["input_ids"]))
    longest = max(range(len(job.sources)), key=lambda i: len(result.sides["stock"].tokens[i]))
    for name in SIDES:
        with _running(name), PeakMemory(job.model.device) as memory:
            job.generate(batches[longest // job.batch_size])
        result.sides[name].peak_bytes = memory.bytes
    for side in result.sides.values():
        side.texts = job.tokenizer.batch_decode(side.tokens, skip_special_tokens=True)
    return result


def _decode(job: Job, batch: dict[str, Any], name: str, result: Result) -> None:
    side = result.sides[name]
    with _running(name):
        before = sum(fastgen.status().counters.values())
        _synchronize(job.model.device)
        started = time.perf_counter()
        output = job.generate(batch)
        _synchronize(job.model.device)
        side.seconds += time.perf_counter() - started
        after = fastgen.status()
    if new := sum(after.counters.values()) - before:
        result.tiers.update((call.tier, call.reason) for call in after.calls[-new:])
    side.tokens += job.new_tokens(batch, output)


def _running(name: str) -> contextlib.AbstractContextManager[None]:
    return fastgen.disabled() if name == "stock" else contextlib.nullcontext()


def _synchronize(device: Any) -> None:
    if device.type == "cuda":
        import torch

        torch.cuda.synchronize(device)


# Loading.


def read_inputs(path: Path, limit: int | None) -> list[str]:
    """The file's lines that are not blank."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise InputError(f"Cannot read the input file {path}: {error.strerror or error}.") from None
    except UnicodeDecodeError:
        raise InputError(f"The input file {path} is not UTF-8 text.") from None
    texts = [line for line in lines if line.strip()][:limit]
    if not texts:
        raise InputError(f"The input file {path} holds no text: write one input a line.")
    return texts


def load(name: str, device: str) -> tuple[Any, Any]:
    """Model (float32, as its config says seq2seq or causal) and tokenizer."""
    import torch

    from fastgen.cli.transformers import load, tokenizing

    load.check_path(name, "--model")
    with load.asking_the_hub([name], lambda text: print(f"{NAME}: {text}", file=sys.stderr)):
        config = load.load_config(name)
        tokenizer = tokenizing.load_tokenizer(tokenizing.TokenizerSpec(name))
    if why := tokenizing.why_unfit(tokenizer, config):
        raise InputError(f"Cannot use the model {name!r}: it {why}.")
    model = load.load_model(name, config, "float32", torch.device(device))
    if not config.is_encoder_decoder:
        tokenizer.padding_side = "left"
    if tokenizer.pad_token_id is None:
        if tokenizer.eos_token is None:
            raise InputError(f"The tokenizer of {name!r} has neither a padding nor an end token.")
        tokenizer.pad_token = tokenizer.eos_token
    return model, tokenizer


def build_job(args: argparse.Namespace) -> Job:
    if args.model and not args.input:
        raise InputError("--model needs --input FILE, a text file with one input a line.")
    answers = None
    if args.input:
        sources = read_inputs(args.input, args.limit)
    else:
        pairs = list(itertools.islice(demo_task.sentences(SEED, held_out=True), args.limit or SHIPPED_INPUTS))
        sources, answers = [s for s, _ in pairs], [t for _, t in pairs]
    name = args.model or str(SHIPPED_MODEL)
    model, tokenizer = load(name, args.device)
    max_new, max_source = _lengths(model, tokenizer, args.max_new_tokens)
    return Job(
        name=args.model or "the shipped demo model (figures to words)",
        model=model,
        tokenizer=tokenizer,
        sources=sources,
        answers=answers,
        beams=args.beams,
        batch_size=args.batch_size,
        max_new_tokens=max_new,
        max_source=max_source,
    )


def _lengths(model: Any, tokenizer: Any, max_new: int) -> tuple[int, int | None]:
    """New tokens and source tokens that the model has positions for; None: no limit known."""
    positions = getattr(model.config, "max_position_embeddings", None) or sys.maxsize
    if model.config.is_encoder_decoder:
        max_new, max_source = min(max_new, positions - 1), positions
    else:
        max_new = min(max_new, positions // 2)
        max_source = positions - max_new
    max_source = min(max_source, tokenizer.model_max_length)
    return max_new, None if max_source > 10**9 else max_source


# Showing.


def header(job: Job) -> str:
    import torch
    import transformers

    shape = f"{job.beams} beams, batches of {job.batch_size}, at most {job.max_new_tokens} new tokens"
    size = sum(parameter.numel() for parameter in job.model.parameters()) / 1e6
    return "\n".join(
        (
            f"model    {job.name}: {type(job.model).__name__}, {size:.1f}M parameters, float32",
            f"job      {len(job.sources)} inputs, {shape}",
            f"machine  {job.model.device.type}, {torch.get_num_threads()} CPU threads",
            f"versions torch {torch.__version__}, transformers {transformers.__version__}, "
            f"fastgen {fastgen.__version__}",
        )
    )


def samples(result: Result, count: int) -> str:
    """A few inputs and what fastgen's side made of them."""
    job, texts = result.job, result.sides["fastgen"].texts
    lines = ["", "Some outputs:"]
    for i in range(0, len(texts), max(1, -(-len(texts) // count))):
        mark = "" if job.answers is None else " [right]" if texts[i] == job.answers[i] else " [wrong]"
        lines += textwrap.wrap(job.sources[i], 100, initial_indent="  ", subsequent_indent="    ", max_lines=3)
        lines += textwrap.wrap(
            f"{texts[i]}{mark}", 100, initial_indent="    -> ", subsequent_indent="       ", max_lines=6
        )
    return "\n".join(lines)


def table(result: Result) -> str:
    """Stock beside fastgen, with the ratios."""
    stock, ours = (result.sides[name] for name in SIDES)
    total, answers = len(result.job.sources), result.job.answers
    rows: list[tuple[str, str, str, str]] = [("", "stock", "fastgen", "")]
    rows.append(("time *", _seconds(stock), _seconds(ours), _times(result.speed_up, "faster")))
    rows.append(("inputs per second", f"{total / stock.seconds:.1f}", f"{total / ours.seconds:.1f}", ""))
    notes = ["* Of generate(), over all batches, which the two sides took in turn."]
    if stock.peak_bytes and ours.peak_bytes:
        ratio = _times(stock.peak_bytes / ours.peak_bytes, "less")
        rows.append(("peak memory **", _mebibytes(stock.peak_bytes), _mebibytes(ours.peak_bytes), ratio))
        notes.append(f"** {PeakMemory.meaning(result.job.model.device)}")
    else:
        notes.append(PeakMemory.meaning(result.job.model.device))
    if answers is not None:
        right = [f"{accuracy(side.texts, answers):.1%}" for side in (stock, ours)]
        rows.append(("exact match", right[0], right[1], "with the known answers"))
    rows.append(("identical outputs", "", f"{result.identical} of {total}", ""))
    widths = [max(len(row[column]) for row in rows) for column in range(4)]
    lines = [""]
    for row in rows:
        cells = (row[0].ljust(widths[0]), row[1].rjust(widths[1]), row[2].rjust(widths[2]), row[3])
        lines.append("  " + "   ".join(cells).rstrip())
    lines.insert(2, "  " + "-" * (sum(widths[:3]) + 6))
    for note in notes:
        lines += textwrap.wrap(note, 100, initial_indent="  ", subsequent_indent="     ")
    return "\n".join(lines)


def _seconds(side: Side) -> str:
    return f"{side.seconds:.2f} s"


def _mebibytes(count: int) -> str:
    return f"{count / 2**20:.1f} MiB"


def _times(ratio: float, word: str) -> str:
    opposite = {"faster": "slower", "less": "more"}
    return f"{ratio:.2f}x {word}" if ratio >= 1 else f"{1 / ratio:.2f}x {opposite[word]}"


def accuracy(texts: list[str], answers: list[str]) -> float:
    return sum(text == answer for text, answer in zip(texts, answers, strict=True)) / len(answers)


def what_ran(result: Result) -> str:
    """Which of fastgen's beam searches were accelerated, and why others were not."""
    if result.tiers:
        lines = ["", f"Beam searches on fastgen's side ({sum(result.tiers.values())}):"]
        what = {
            "fast": "fast: fastgen's own loop",
            "compat": "compat: transformers' loop over fastgen's cache",
            "stock": "stock: transformers alone",
        }
        for (tier, reason), count in result.tiers.most_common():
            lines.append(f"  {count} x {what[tier]}" + (f" ({reason})" if reason else ""))
        return "\n".join(lines)
    host = next((h for h in fastgen.status().hosts if h.name == "transformers"), None)
    if host is not None and host.state in ("disabled", "left alone", "not imported"):
        why = f" ({host.detail})" if host.detail else ""
        return f"\nNothing was accelerated: transformers is {host.state}{why}."
    if result.job.beams == 1:
        return "\nNothing was accelerated: with --beams 1 there is no beam search."
    return "\nNothing was accelerated: this model's generate() never reached its beam search."


def verdict(result: Result) -> str:
    total, same = len(result.job.sources), result.identical
    if same == total:
        if all(tier == "stock" for tier, _ in result.tiers):
            return f"\nAll {total} outputs are identical; both sides ran stock code."
        return f"\nAll {total} outputs are identical; fastgen was {_times(result.speed_up, 'faster')}."
    stock, ours = (result.sides[name] for name in SIDES)
    first = next(i for i in range(total) if stock.tokens[i] != ours.tokens[i])
    return (
        f"\n{total - same} of {total} outputs differ. The first, input {first + 1}:\n"
        f"  input    {result.job.sources[first]}\n"
        f"  stock    {stock.texts[first]}\n"
        f"  fastgen  {ours.texts[first]}"
    )


# The command.


def parser() -> argparse.ArgumentParser:
    result = Parser(
        prog=NAME,
        description="Decode with stock transformers and with fastgen, and compare outputs, time and memory.",
        epilog="Exit code: 0 if all outputs are identical, 1 if some differ, 2 if the input is unusable.",
    )
    result.add_argument("--model", metavar="NAME_OR_PATH", help="your seq2seq or causal model (default: a shipped one)")
    result.add_argument("--input", type=Path, metavar="FILE", help="your inputs, one a line")
    result.add_argument(
        "--beams", type=positive_number, default=5, metavar="N", help="beams of the search (default: %(default)s)"
    )
    result.add_argument(
        "--batch-size",
        type=positive_number,
        default=64,
        metavar="N",
        help="inputs that decode together (default: %(default)s)",
    )
    result.add_argument(
        "--max-new-tokens",
        type=positive_number,
        default=128,
        metavar="N",
        help="of each output, at most (default: %(default)s)",
    )
    result.add_argument("--limit", type=positive_number, metavar="N", help="decode only the first N inputs")
    result.add_argument("--threads", type=positive_number, metavar="N", help="CPU threads (default: torch's)")
    result.add_argument(
        "--device", choices=("cpu", "cuda"), default="cpu", help="where to decode (default: %(default)s)"
    )
    result.add_argument(
        "--samples", type=positive_number, default=4, metavar="N", help="outputs to show (default: %(default)s)"
    )
    result.add_argument("--quiet", action="store_true", help="no progress bar")
    return result


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    return parser().parse_args(argv)


@contextlib.contextmanager
def _settings(threads: int | None) -> Iterator[None]:
    """Threads as asked, no chatter from transformers; put back afterwards."""
    import torch
    from transformers.utils import logging

    old_threads, old_verbosity = torch.get_num_threads(), logging.get_verbosity()
    old_bars = logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    if threads:
        torch.set_num_threads(threads)
    try:
        with torch.no_grad():
            yield
    finally:
        torch.set_num_threads(old_threads)
        logging.set_verbosity(old_verbosity)
        if old_bars:
            logging.enable_progress_bar()


def run(args: argparse.Namespace) -> int:
    if args.input:
        read_inputs(args.input, args.limit)  # before the slow imports
    with _settings(args.threads):
        job = build_job(args)
        print(header(job), flush=True)
        result = compare(job, progress=not args.quiet)
        print(samples(result, args.samples))
        print(table(result))
        print(what_ran(result))
        print(verdict(result))
        return DONE if result.identical == len(job.sources) else DIFFERENT


def main(argv: Sequence[str] | None = None) -> int:
    """The command; returns its exit code: 0 if all outputs are identical, 1 if some differ, 2 for bad input."""
    return exit_code(NAME, lambda: run(parse(argv)), input_error=UNUSABLE)


if __name__ == "__main__":
    sys.exit(main())
