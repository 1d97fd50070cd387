"""Speech to text: whisper, transformers, faster-whisper, OpenVINO and fastgen, on a clip, a long recording, many files.

    python benchmarks/bench_speech.py make spoken --texts ../shared/data/docs.txt     # needs espeak-ng
    python benchmarks/bench_speech.py run spoken --whisper DIR --clip ../shared/data/audio/jfk.npy
    python benchmarks/bench_speech.py memory spoken --hours 1 10

`make` has sentences spoken: one recording of about ten minutes, and 30 files. `run` needs Whisper-base as transformers
saves it, `pip install -c constraints.txt -e '.[transcribe]'` and, for its sides, `pip install faster-whisper`.
OpenVINO's sides need `pip install openvino-genai` and `--openvino DIR`, a folder with whisper-float32 and whisper-int8,
exported as docs/benchmarks.md says; without, they are left out. Each timing is in a process of its own, which has
transcribed 30 seconds before; sides take turns. All search with 5 beams,
and are told that the language is English; other options are each program's own. What fastgen finds in float32 without
cutting must be what its host finds, token for token; of transformers, texts and times of a pipeline are compared.

`memory` has `fastgen-transcribe` transcribe a sound of so many hours, the spoken files again and again, by a tiny
random Whisper, and shows how much memory that takes at most.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import random
import re
import resource
import subprocess
import sys
import tempfile
import threading
import time
import warnings
import wave
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from measuring import OtherProcesses, aligned, environment, options, quieten, write
from tqdm import tqdm

import fastgen
from fastgen.bench import data, speech
from fastgen.bench.quality import MEASURES
from fastgen.bench.runners import Missing
from fastgen.bench.runners.openvino import check, exported, properties
from fastgen.pipeline.transcription import audio
from fastgen.pipeline.transcription.load import of_transformers

BEAMS, BATCH, RATE = 5, 8, audio.RATE
# What fastgen.transcribe and faster-whisper are asked for, and the weights: by side.
OURS: dict[str, tuple[dict[str, Any], str]] = {
    "fastgen": ({"batch_size": 1}, "float32"),
    "fastgen, 8 at a time": ({"batch_size": BATCH}, "float32"),
    "fastgen, cut at silences": ({"batch_size": BATCH, "batched": True}, "float32"),
    "fastgen, int8": ({"batch_size": BATCH}, "int8"),
    "fastgen, int8, cut at silences": ({"batch_size": BATCH, "batched": True}, "int8"),
}
THEIRS: dict[str, tuple[bool, str]] = {
    "faster-whisper": (False, "float32"),
    "faster-whisper, batched": (True, "float32"),
    "faster-whisper, int8": (False, "int8"),
    "faster-whisper, int8, batched": (True, "int8"),
}
# A pipeline of transformers, and how many recordings at a time fastgen transcribes with it; 0: stock.
PIPELINES = {"transformers": 0, "fastgen on transformers": 1, "fastgen on transformers, 8 at a time": BATCH}
OPENVINO = {"openvino": False, "openvino, int8": True}  # whether weights are in 8 bits
SIDES = ("whisper", *OURS, *PIPELINES, *THEIRS, *OPENVINO)
STOCK = ("whisper", "transformers")
# The same tokens as those of the host.
SAME = {"fastgen": "whisper", "fastgen, 8 at a time": "whisper"}
SAME |= {side: "transformers" for side, size in PIPELINES.items() if size}
NOT_FOR_A_CLIP = {"fastgen, 8 at a time", "fastgen, cut at silences", "fastgen, int8, cut at silences"}
NOT_FOR_A_CLIP |= {"fastgen on transformers, 8 at a time"}
TASKS = {"clip": "11 s of speech", "long": "one recording", "files": "30 files"}


# ---------------------------------------------------------------------------------------------- the sounds
def sentences(texts: Path) -> list[str]:
    """Those of a text that have letters and little else, of 41 to 199 characters."""
    found = (one.strip() for one in re.split(r"(?<=[.!?])\s+", texts.read_text("utf-8")))
    return [one for one in found if 40 < len(one) < 200 and re.fullmatch(r"[A-Za-z ,.'-]+", one)]


def speak(text: str, path: Path, voice: str, speed: int) -> None:
    """Have espeak-ng speak a text into a WAV file; `speed`: in words a minute."""
    command = ["espeak-ng", "-v", voice, "-s", str(speed), "-w", str(path), "--stdin"]
    subprocess.run(command, input=text.encode(), check=True)


def make(folder: Path, texts: Path, seed: int) -> None:
    """Have espeak-ng speak sentences of a text into WAV files; what they say is beside them."""
    folder.mkdir(parents=True, exist_ok=True)
    plain = sentences(texts)
    chance = random.Random(seed)
    chance.shuffle(plain)
    left = iter(plain)
    for number in range(31):
        name, count = ("long", 80) if number == 30 else (f"file-{number:02}", chance.choice([1, 2, 2, 3, 4]))
        said = " ".join(next(left) for _ in range(count))
        voice = ("en-us", "en-gb", "en-us+f3", "en-us+m3")[number % 4]
        speak(said, folder / f"{name}.wav", voice, 150)
        (folder / f"{name}.txt").write_text(said)


def sounds(task: str, folder: Path, clip: Path) -> list[Any]:
    """Float32 `[samples]` of each recording."""
    if task == "clip":
        return [np.load(clip).astype(np.float32)]
    return [audio.read(path).samples for path in paths(task, folder)]


def paths(task: str, folder: Path) -> list[Path]:
    return sorted(folder.glob("long.wav" if task == "long" else "file-*.wav"))


def references(task: str, folder: Path) -> list[str]:
    if task == "clip":
        return [data.SPEECH]
    return [path.with_suffix(".txt").read_text() for path in paths(task, folder)]


# ---------------------------------------------------------------------------------------------- one timing
def transcriber(side: str, args: argparse.Namespace) -> Callable[[list[Any]], list[tuple[str, Any]]]:
    """A function that returns text and tokens of each recording."""
    if side in THEIRS:
        return faster_whisper(*THEIRS[side], args)
    if side in OPENVINO:
        return by_openvino(OPENVINO[side], args)
    if side in PIPELINES:
        return by_pipeline(PIPELINES[side], args)
    import whisper

    model, chosen = of_transformers(str(args.whisper)), {"beam_size": BEAMS, "language": "en", "fp16": False}

    def outcome(found: dict[str, Any]) -> tuple[str, Any]:
        return found["text"], [(segment["tokens"], segment["temperature"]) for segment in found["segments"]]

    if side == "whisper":
        fastgen.disable()
        return lambda samples: [outcome(whisper.transcribe(model, each, **chosen)) for each in samples]
    how, weights = OURS[side]
    fastgen.configure(strict=True, weights=weights)
    return lambda samples: [outcome(each) for each in fastgen.transcribe(model, samples, **how, **chosen)]


def by_pipeline(size: int, args: argparse.Namespace) -> Callable[[list[Any]], list[tuple[str, Any]]]:
    quieten()
    pipeline = speech.pipeline(args.whisper)
    options = {"language": "en", "task": "transcribe", "num_beams": BEAMS}
    chosen: dict[str, Any] = {"return_timestamps": True, "generate_kwargs": options}
    if size:
        fastgen.configure(strict=True)
    else:
        fastgen.disable()

    def transcribe(samples: list[Any]) -> list[tuple[str, Any]]:
        if size:
            found = fastgen.transcribe(pipeline, samples, batch_size=size, **chosen)
        else:
            found = [pipeline(each, **chosen) for each in samples]
        return [(one["text"], one["chunks"]) for one in found]

    return transcribe


def faster_whisper(is_batched: bool, weights: str, args: argparse.Namespace) -> Callable[[list[Any]], Any]:
    from ctranslate2.converters import TransformersConverter
    from faster_whisper import BatchedInferencePipeline, WhisperModel

    if not args.converted.exists():
        files = ["tokenizer.json", "preprocessor_config.json"]
        TransformersConverter(str(args.whisper), copy_files=files).convert(str(args.converted))
    model = WhisperModel(str(args.converted), device="cpu", compute_type=weights, cpu_threads=args.threads)
    more: dict[str, Any] = {"batch_size": BATCH} if is_batched else {}
    runner = BatchedInferencePipeline(model) if is_batched else model

    def transcribe(samples: list[Any]) -> list[tuple[str, Any]]:
        found = [runner.transcribe(each, beam_size=BEAMS, language="en", **more)[0] for each in samples]
        return [("".join(segment.text for segment in each), None) for each in found]

    return transcribe


def by_openvino(is_int8: bool, args: argparse.Namespace) -> Callable[[list[Any]], Any]:
    from openvino_genai import WhisperPipeline

    model = exported(args.openvino, "whisper", is_int8)
    pipeline = WhisperPipeline(str(model), "CPU", **properties(is_int8, args.threads))
    chosen = dict(language="<|en|>", task="transcribe", num_beams=BEAMS, return_timestamps=True)

    def transcribe(samples: list[Any]) -> list[tuple[str, Any]]:
        return [(pipeline.generate(each, **chosen).texts[0], None) for each in samples]

    return transcribe


def left_out(side: str, args: argparse.Namespace) -> str:
    """Why OpenVINO cannot take part; empty where the side can."""
    if side not in OPENVINO:
        return ""
    try:
        check(args.openvino)
        exported(args.openvino, "whisper", OPENVINO[side])
    except Missing as error:
        return str(error)
    return ""


def child(args: argparse.Namespace) -> None:
    """One timing, in this process: prints JSON."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(args.threads)
    samples = sounds(args.task, args.folder, args.clip)
    run = transcriber(args.side, args)
    with contextlib.redirect_stdout(sys.stderr):
        torch.manual_seed(0)
        run([each[: 30 * RATE // len(samples[:4])] for each in samples[:4]])
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        watch, started = OtherProcesses(), time.perf_counter()
        found = run(samples)
        seconds = time.perf_counter() - started
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    texts, tokens = zip(*found, strict=True)
    json.dump(
        {
            "seconds": seconds,
            "sound": sum(map(len, samples)) / RATE,
            "peak_bytes": memory * 1024,
            "peak_bytes_before": before * 1024,
            "other_processes": watch.cores(),
            "texts": texts,
            "tokens": tokens,
        },
        sys.stdout,
    )


# ---------------------------------------------------------------------------------------------- all of them
def timed(task: str, side: str, args: argparse.Namespace) -> dict[str, Any]:
    words = [sys.executable, __file__, "child", str(args.folder), "--whisper", str(args.whisper), "--task", task]
    words += ["--clip", str(args.clip), "--side", side, "--threads", str(args.threads)]
    words += ["--converted", str(args.converted), *(["--openvino", str(args.openvino)] if args.openvino else [])]
    done = subprocess.run(words, stdout=subprocess.PIPE, text=True)
    if done.returncode:
        raise SystemExit(f"{side} failed on {task}.")
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def measure(task: str, args: argparse.Namespace, bar: Any) -> dict[str, Any]:
    sides = [side for side in args.sides if task != "clip" or side not in NOT_FOR_A_CLIP]
    rounds: list[dict[str, Any]] = []
    first: dict[str, dict[str, Any]] = {}
    for number in range(args.rounds):
        one: dict[str, Any] = {}
        for side in sides if number % 2 == 0 else sides[::-1]:
            if side in STOCK and number >= args.whisper_rounds:
                continue
            found = timed(task, side, args)
            first.setdefault(side, found)
            one[side] = {name: found[name] for name in ("seconds", "other_processes", "peak_bytes")}
            bar.update()
        rounds.append(one)
    said = references(task, args.folder)
    result: dict[str, Any] = {"task": task, "sound": first[sides[0]]["sound"], "rounds": rounds, "sides": {}}
    for side in sides:
        found = first[side]
        about = {
            "word_error_rate": MEASURES["whisper"](found["texts"], said)["word error rate"],
            "peak_bytes": found["peak_bytes"],
        }
        if (host := first.get(SAME.get(side, ""))) is not None:
            about["same"] = sum(a == b for a, b in zip(found["tokens"], host["tokens"], strict=True))
            about["of"] = len(said)
        if side in OPENVINO and (host := first.get("transformers")) is not None:  # it returns text, and no tokens
            pairs = zip(found["texts"], host["texts"], strict=True)
            about["same_texts"] = sum(one.strip() == other.strip() for one, other in pairs)
        result["sides"][side] = about
    return result


# ---------------------------------------------------------------------------------------------- memory
def joined(folder: Path, hours: float, path: Path) -> None:
    """Write the spoken files, again and again, to a WAV file of so many hours."""
    spoken = [audio.read(one).samples for one in sorted(folder.glob("*.wav"))]
    with wave.open(str(path), "wb") as file:
        file.setparams((1, 2, RATE, 0, "NONE", ""))
        left = round(hours * 3600 * RATE)
        for samples in itertools.cycle(spoken):
            if left <= 0:
                break
            file.writeframes((samples[:left] * 32767).astype("<i2").tobytes())
            left -= len(samples)


def tiny(path: Path) -> None:
    """Save a random Whisper that finds 15 tokens in each window, and never an end or a time, as whisper saves one."""
    from whisper.model import ModelDimensions, Whisper

    torch.manual_seed(0)
    sizes = dict(n_mels=80, n_audio_ctx=1500, n_vocab=51865, n_text_ctx=32)
    for part in ("audio", "text"):
        sizes |= {f"n_{part}_state": 16, f"n_{part}_head": 2, f"n_{part}_layer": 1}
    model = Whisper(ModelDimensions(**sizes))
    with torch.no_grad():
        disliked = -torch.ones(16, device="cpu")
        model.decoder.ln.bias.copy_(-4 * disliked)
        model.decoder.token_embedding.weight[[50257, *range(50364, 51865)]] = disliked
    torch.save({"dims": vars(model.dims), "model_state_dict": model.state_dict()}, path)


def hours_of_sound(args: argparse.Namespace) -> None:
    """Transcribe a file by the command with a tiny model, in this process: prints JSON."""
    from fastgen.cli import transcribe

    folder = args.sound.parent
    tiny(folder / "tiny.pt")
    told = ["--language", "en", "--temperature_increment_on_fallback", "None", "--no_speech_threshold", "None"]
    told += [str(folder / "tiny.pt"), str(args.sound), "-o", str(folder / "out"), "-f", "json", "--overwrite"]
    most, started = Peak(), time.perf_counter()
    with most:
        if transcribe.main(told):
            raise SystemExit(1)
    seconds = time.perf_counter() - started
    whole = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    found = json.loads((folder / "out" / f"{args.sound.stem}.json").read_text())
    json.dump({"seconds": seconds, "segments": len(found["segments"]), "own": most.own, "whole": whole}, sys.stdout)


class Peak(threading.Thread):
    """Looks ten times a second at how much memory of its own this process has: files that it maps are not counted."""

    own = 0

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self._ended = threading.Event()

    def run(self) -> None:
        while not self._ended.wait(0.1):
            status = Path("/proc/self/status").read_text()
            kilobytes = re.search(r"RssAnon:\s+(\d+)", status)
            self.own = max(self.own, int(kilobytes.group(1)) * 1024 if kilobytes else 0)

    def __enter__(self) -> None:
        self.start()

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self.join()


def memory(args: argparse.Namespace) -> None:
    rows = [("hours of sound", "seconds", "segments", "own peak MB", "peak MB with mapped files")]
    with tempfile.TemporaryDirectory() as folder:
        for hours in args.hours:
            path = Path(folder, "long.wav")
            joined(args.folder, hours, path)
            words = [sys.executable, __file__, "hours", str(args.folder), "--sound", str(path)]
            done = subprocess.run(words, stdout=subprocess.PIPE, text=True, check=True)
            one = json.loads(done.stdout)
            sizes = (f"{one[name] / 1e6:.0f}" for name in ("own", "whole"))
            rows.append((f"{hours:g}", f"{one['seconds']:.0f}", str(one["segments"]), *sizes))
    print(aligned(rows))


# ---------------------------------------------------------------------------------------------- results
def median(task: dict[str, Any], side: str) -> float:
    return float(np.median([one[side]["seconds"] for one in task["rounds"] if side in one]))


def table(task: dict[str, Any]) -> str:
    names = ("seconds", "of sound a second", "words wrong", "peak MB", "texts as transformers'")
    rows = [(f"{TASKS[task['task']]}, {task['sound']:.0f} s", *names)]
    for side, about in task["sides"].items():
        seconds = median(task, side)
        rate, wrong = f"{task['sound'] / seconds:.1f}", f"{about['word_error_rate']:.1f}%"
        same = str(about.get("same_texts", ""))
        rows.append((side, f"{seconds:.2f}", rate, wrong, f"{about['peak_bytes'] / 1e6:.0f}", same))
    return aligned(rows)


def run(args: argparse.Namespace) -> int:
    import whisper

    for side, why in {side: why for side in args.sides if (why := left_out(side, args))}.items():
        print(f"{side} is left out: {why}.", file=sys.stderr)
        args.sides.remove(side)
    if not args.sides:
        return 2
    count = sum(args.rounds * len(args.sides) for _ in args.tasks)
    with tempfile.TemporaryDirectory() as folder, tqdm(total=count, leave=False) as bar:
        args.converted = Path(folder, "converted")
        found = [measure(task, args, bar) for task in args.tasks]
    print("\n\n".join(map(table, found)))
    document = {**environment(whisper, fastgen), "beams": BEAMS, "batch": BATCH, "tasks": found}
    with contextlib.suppress(ImportError):
        import ctranslate2
        import faster_whisper as host

        document["versions"] |= {"faster-whisper": host.__version__, "ctranslate2": ctranslate2.__version__}
    with contextlib.suppress(ImportError):
        import openvino_genai

        document["versions"]["openvino-genai"] = openvino_genai.__version__
    write(args.output, "speech", document)
    return int(any(about.get("same") != about.get("of") for task in found for about in task["sides"].values()))


def main() -> int:
    parser = options(__doc__ or "", rounds=3)
    actions = ("make", "run", "memory", "child", "hours")
    parser.add_argument("action", choices=actions, help="make the sounds; run and measure; memory of long sounds")
    parser.add_argument("folder", type=Path, metavar="DIR", help="where the spoken files are")
    parser.add_argument("--texts", type=Path, metavar="FILE", help="what is spoken, for make")
    parser.add_argument("--whisper", type=Path, metavar="DIR", help="Whisper-base as transformers saves it")
    parser.add_argument("--openvino", type=Path, metavar="DIR", help="holds whisper-float32 and whisper-int8")
    parser.add_argument("--clip", type=Path, metavar="FILE", help="11 s of speech at 16 kHz, as numpy saves it")
    parser.add_argument("--tasks", nargs="+", choices=TASKS, default=[*TASKS])
    parser.add_argument("--sides", nargs="+", choices=SIDES, default=[*SIDES])
    parser.add_argument(
        "--whisper-rounds", type=int, default=1, help="of the hosts themselves, the slowest; default: 1"
    )
    parser.add_argument("--hours", nargs="+", type=float, default=[1, 10], help="of sound, for memory; default: 1 10")
    parser.add_argument("--sound", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--task", help=argparse.SUPPRESS)
    parser.add_argument("--side", help=argparse.SUPPRESS)
    parser.add_argument("--converted", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.action == "make":
        make(args.folder, args.texts, seed=0)
    elif args.action in ("child", "hours", "memory"):
        {"child": child, "hours": hours_of_sound, "memory": memory}[args.action](args)
    else:
        return run(args)
    return 0


if __name__ == "__main__":
    sys.exit(main())
