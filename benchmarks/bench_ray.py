"""`fastgen-generate-transformers` on a file of real lines: as it is, and with `--ray` from 1, 2 and 4 actors.

    python benchmarks/bench_ray.py --shared ../shared --output benchmarks/results

The whole command is timed, with all that starts before the first line. English to German, with the trained model and
the sentences of `--shared`, which are cut into pieces beforehand. Every output is compared with the command's own. One
actor and the command take turns. More actors have the same cores: they show that the work is divided, not that it is
done sooner.

With `--failures` nodes are killed at three random moments of a run, and in another the command itself, twice, which is
resumed each time: on a cluster of a head without CPUs and two nodes of one CPU, all of them processes of this machine.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import measuring
import ray
import ray_failures
import transformers

FLAGS = ["--num-beams", "5", "--max-new-tokens", "120", "--batch-size", "64", "--no-scores", "--quiet"]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shared", type=Path, required=True, help="folder with data/ and models/")
    parser.add_argument("--lines", type=int, default=20_000)
    parser.add_argument("--rounds", type=int, default=2, help="of the command and of one actor (default: %(default)s)")
    parser.add_argument("--actors", type=int, nargs="*", default=[2, 4], help="more actors, once each")
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1, help="of the command, and of all actors")
    parser.add_argument("--failures", action="store_true", help="kill nodes, and the command, besides")
    parser.add_argument("--output", type=Path, help="folder for the JSON")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        model, source = _model(args.shared, folder), _lines(args.shared, args.lines, folder)
        found: dict[str, list[float]] = {}
        for turn in range(args.rounds):
            for name in ("plain", "ray-1") if turn % 2 == 0 else ("ray-1", "plain"):
                found.setdefault(name, []).append(_run(name, args.threads, model, source, folder))
        for actors in args.actors:
            found[f"ray-{actors}"] = [_run(f"ray-{actors}", args.threads, model, source, folder)]
        ratios = [theirs / ours for theirs, ours in zip(found["ray-1"], found["plain"], strict=True)]
        result = {
            **measuring.environment(ray, transformers),
            "threads": args.threads,
            "what": f"{args.lines} lines, English to German, 5 beams, batches of 64, whole commands",
            "outputs": "all files equal the command's own, byte for byte",
            "seconds": found,
            "lines_per_second": {name: args.lines / statistics.median(times) for name, times in found.items()},
            "one_actor_to_the_command": {"median": statistics.median(ratios), "rounds": ratios},
        }
        name = "ray" if args.threads == os.cpu_count() else f"ray-threads-{args.threads}"
        name = "ray-failures" if args.failures else name
        _write(args.output, name, result)
        if args.failures:  # which may end the run
            result["failures"] = _failures(statistics.median(found["plain"]), model, source, folder)
            _write(args.output, name, result)
        print(json.dumps(result, indent=1))
    return 0


def _write(folder: Path | None, name: str, result: dict[str, Any]) -> None:
    if folder:
        measuring.write(folder, name, result)


def _failures(seconds: float, model: Path, source: Path, folder: Path) -> dict[str, Any]:
    """What died when. Each output is compared with that of one process."""
    found = {}
    for name in ("nodes", "driver"):
        output = folder / f"{name}.jsonl"
        parts = output.with_name(f"{output.name}.parts")
        command = [*_command(model, source, output), "--ray", "--actors", "2", "--cpus-per-actor", "1"]
        with _cluster() as cluster:
            if name == "nodes":
                found[name] = ray_failures.nodes_die(command, cluster, parts, seconds)
            else:
                found[name] = ray_failures.drivers_die(command, parts, seconds)
        _same(output, folder)
        print(f"{name}: {found[name]}", file=sys.stderr, flush=True)
    return found


@contextlib.contextmanager
def _cluster() -> Iterator[Any]:
    from ray.cluster_utils import Cluster

    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0})
    for _ in range(2):
        cluster.add_node(num_cpus=1)
    os.environ["RAY_ADDRESS"] = cluster.address
    try:
        yield cluster
    finally:
        del os.environ["RAY_ADDRESS"]
        cluster.shutdown()


def _model(shared: Path, folder: Path) -> Path:
    """The model with a tokenizer for lines that are in pieces already."""
    from tokenizers import Tokenizer, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    source = shared / "models" / "ddtp-en-de"
    shutil.copytree(source / "hf", folder / "model")
    names = json.loads((source / "vocab.json").read_text("utf-8"))
    tokenizer = Tokenizer(models.WordLevel({name: number for number, name in enumerate(names)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.post_processor = processors.TemplateProcessing(single="$A </s>", special_tokens=[("</s>", 2)])
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="</s>", pad_token="<pad>", unk_token="<unk>")
    fast.save_pretrained(folder / "model")
    return folder / "model"


def _lines(shared: Path, count: int, folder: Path) -> Path:
    import sentencepiece

    pieces = sentencepiece.SentencePieceProcessor(model_file=str(shared / "data" / "ddtp-en-de" / "spm.model"))
    with open(shared / "data" / "ddtp-en-de" / "train.en", encoding="utf-8") as file:
        lines = [line.strip() for line in file][:count]
    (folder / "in.txt").write_text("".join(" ".join(pieces.encode(line, out_type=str)) + "\n" for line in lines))
    return folder / "in.txt"


def _run(name: str, threads: int, model: Path, source: Path, folder: Path) -> float:
    """The seconds of one command, whose output is compared with the first one's."""
    output = folder / f"{name}.jsonl"
    for left in folder.glob(f"{name}.jsonl*"):
        left.unlink()
    command = _command(model, source, output)
    if name != "plain":
        actors = int(name.removeprefix("ray-"))
        cpus = threads / actors
        command += ["--ray", "--actors", str(actors), "--cpus-per-actor", str(cpus)]
    started = time.perf_counter()
    environment = os.environ | {"OMP_NUM_THREADS": str(threads)}  # Ray sets it for its actors
    done = subprocess.run(command, stderr=subprocess.PIPE, text=True, check=False, env=environment)
    seconds = time.perf_counter() - started
    if done.returncode not in (0, 1):  # 1: lines of nothing but spaces are records that fail, with both
        raise SystemExit(f"{name}: {done.stderr}")
    _same(output, folder)
    print(f"{name}: {seconds:.1f} s", file=sys.stderr, flush=True)
    return seconds


def _command(model: Path, source: Path, output: Path) -> list[str]:
    return [sys.executable, "-m", "fastgen.cli.generate_transformers", str(model), str(source), str(output), *FLAGS]


def _same(output: Path, folder: Path) -> None:
    if output.read_bytes() != (folder / "plain.jsonl").read_bytes():
        raise SystemExit(f"{output.stem} writes something else")


if __name__ == "__main__":
    sys.exit(main())
