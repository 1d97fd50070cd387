"""Slim caches: the bytes they take beside the paper's tables, and their speed beside the plan's predictions.

    python benchmarks/bench_slim.py            # all parts, some minutes
    python benchmarks/bench_slim.py --quick    # under a minute: all of the bytes, four shapes
    python benchmarks/bench_slim.py --gpu      # on a CUDA device: cross-attention of Whisper-large alone
    TRITON_INTERPRET=1 python benchmarks/bench_slim.py --gpu --rehearse  # the same, tiny, on a CPU

Bytes are those that fastgen's own caches allocate for these shapes, their tensors being on torch's meta device, where
they take none: one sentence, float32, the paper's 448 tokens and 1,500 source positions. Beams descend from random
parents; "pruned" drops what no beam descends from, as fastgen does. The formula that stands for stock transformers is
checked against a run of a tiny model. Every shape is run with each cache, in turns, after the outputs agree.
The part on a GPU times one layer's attention to the source, for which there is a kernel that reads E once.
"""

from __future__ import annotations

import argparse
import functools
import importlib.util
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
import transformers
from measuring import OtherProcesses, aligned, begin, environment, options, quieten, say_if_disturbed, write
from tqdm import tqdm

import fastgen
from fastgen.cache.slim import latent, planner
from fastgen.cache.slim.latent import Choice, InputCache, Projections
from fastgen.cache.tree import BeamTree
from fastgen.cache.tree_layer import TreeLayer
from fastgen.layers import attention, attention_kernels
from fastgen.ops.attention import fold_beams, unfold_beams
from fastgen.optimizer.transformers.versions import CACHE

NUMBER = 4  # bytes
CHOICES = {"kv": Choice(), "e+kv": Choice("kv", "e"), "x+kv": Choice("x", "kv"), "x+e": Choice("x", "e")}


# ---------------------------------------------------------------------------------------------- bytes
@dataclass(frozen=True)
class Model:
    """What of a model decides about its caches."""

    name: str
    layers: int
    width: int  # of the layers' input
    projected: int  # of all heads' keys, and of their values
    source: int  # positions; 0: a decoder alone
    own: str  # which cache its self-attention has, in the paper's tables
    claim: float  # of the paper: how many times smaller,
    of: str = "stock"  # all that the host stores, or keys and values of self-attention
    tokens: int = 448


WHISPERS = [
    Model(f"Whisper-{name}", layers, width, width, 1500, "x", 8.7)
    for name, layers, width in (
        ("tiny", 4, 384),
        ("base", 6, 512),
        ("small", 12, 768),
        ("medium", 24, 1024),
        ("large", 32, 1280),
    )
]
OTHERS = [
    Model("T5-3B", 24, 1024, 32 * 128, 512, "x", 8, "kv of its own"),
    Model("T5-11B", 24, 1024, 128 * 128, 512, "x", 32, "kv of its own"),
    Model("CodeGemma-7B", 28, 3072, 16 * 256, 0, "k", 2),
    Model("Phi-3-mini", 32, 3072, 32 * 96, 0, "k", 2),
]


def stock_bytes(model: Model, beams: int) -> int:
    return NUMBER * beams * model.layers * 2 * model.projected * (model.tokens + model.source)


def own_bytes(model: Model, beams: int, slim: bool, prunes: bool) -> int:
    """What the tree allocates for one sentence, in the end."""
    torch.manual_seed(0)
    tree = BeamTree(1, beams, model.tokens)
    if not prunes:
        tree.capacity = model.tokens * beams
    width = model.width if slim and model.own == "x" else model.projected
    stored = 1 if slim else 2
    for _ in range(model.layers):
        layer = TreeLayer(tree)
        layer.prefill(*(torch.empty(1, 1, 0, width, device="meta") for _ in range(stored)))
        tree.layers.append(layer)
    tree.begin_decoding(device=torch.device("cpu"))
    for _ in range(model.tokens):
        tree.advance()
        for layer in tree.layers:
            layer.append(*(torch.empty(beams, 1, 1, width, device="meta") for _ in range(stored)))
        tree.reorder(torch.randint(beams, (beams,)))
    return tree.nbytes


def measure_bytes(model: Model) -> dict[str, Any]:
    across = NUMBER * model.layers * 2 * model.projected * model.source
    encoded = NUMBER * model.width * model.source
    found: dict[str, Any] = {"model": model.name, "claim": model.claim, "of": model.of, "e": encoded}
    for beams, prunes in ((1, False), (5, False), (5, True)):
        key = f"{beams} beams{', pruned' if prunes else ''}"
        kv, slim = (own_bytes(model, beams, slim, prunes) for slim in (False, True))
        found[key] = {
            "stock": stock_bytes(model, beams),
            "kv": kv + across,
            "kv of its own": kv,
            "slim without e": slim,
            "slim": slim + encoded,
        }
    return found


def table_of_bytes(found: list[dict[str, Any]]) -> str:
    rows: list[tuple[str, ...]] = [
        ("one sentence", "stock", "slim", "without E", "paper", "with E", "5 beams", "tree of K, V", "slim", "pruned")
    ]
    for one in found:
        alone, five, pruned = one["1 beams"], one["5 beams"], one["5 beams, pruned"]
        stock = five["stock"]
        rows.append(
            (
                one["model"],
                _mb(alone["stock"]),
                _mb(alone["slim without e"]),
                f"{alone[one['of']] / alone['slim without e']:.1f}x",
                f"{one['claim']:g}x",
                f"{alone['stock'] / alone['slim']:.1f}x",
                _mb(stock),
                f"{stock / five['kv']:.1f}x",
                f"{stock / five['slim']:.1f}x",
                f"{stock / pruned['slim']:.1f}x",
            )
        )
    return aligned(rows)


def _mb(count: float) -> str:
    return f"{count / 1e6:,.1f} MB"


def check_stock_formula() -> None:
    """On a small Whisper: what the host's cache holds after some steps."""
    config = transformers.WhisperConfig(
        vocab_size=64,
        d_model=64,
        encoder_layers=1,
        decoder_layers=2,
        encoder_attention_heads=2,
        decoder_attention_heads=2,
        decoder_ffn_dim=64,
        max_source_positions=1500,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        decoder_start_token_id=1,
        begin_suppress_tokens=None,
    )
    model = transformers.WhisperForConditionalGeneration(config).eval()
    encoded = transformers.modeling_outputs.BaseModelOutput(last_hidden_state=torch.randn(1, 1500, 64))
    with fastgen.disabled(), torch.no_grad():
        result = transformers.GenerationMixin.generate(
            model,
            encoder_outputs=encoded,
            decoder_input_ids=torch.ones(1, 1, dtype=torch.long),
            num_beams=5,
            min_new_tokens=20,
            max_new_tokens=20,
            return_dict_in_generate=True,
        )
    cache = getattr(result, CACHE)
    caches = cache.self_attention_cache, cache.cross_attention_cache
    held = sum(x.nbytes for cache in caches for layer in cache.layers for x in (layer.keys, layer.values))
    expected = stock_bytes(Model("", 2, 64, 64, 1500, "x", 0, tokens=20), 5)  # the last token is never read
    if held != expected:
        sys.exit(f"stock's cache holds {held} bytes, and not the {expected} of the formula")


# ---------------------------------------------------------------------------------------------- speed
@dataclass(frozen=True)
class Shape:
    width: int
    layers: int
    batch: int
    beams: int
    source: int
    new: int

    def __str__(self) -> str:
        return f"{self.layers} x {self.width}, {self.batch} x {self.source} -> {self.new}, {self.beams} beams"


QUICK = [
    Shape(512, 2, 4, 5, 1500, 4),
    Shape(512, 2, 4, 5, 1500, 48),
    Shape(512, 2, 8, 4, 64, 32),
    Shape(768, 2, 4, 4, 512, 8),
]
SHAPES = [
    *QUICK,
    Shape(512, 2, 1, 4, 25, 30),
    Shape(512, 2, 1, 1, 1500, 8),
    Shape(512, 2, 1, 5, 1500, 24),
    Shape(512, 2, 1, 5, 1500, 96),
    Shape(512, 2, 16, 4, 128, 4),
    Shape(512, 2, 16, 4, 128, 64),
    Shape(768, 2, 1, 4, 512, 4),
    Shape(768, 2, 1, 4, 512, 64),
    Shape(768, 2, 8, 4, 512, 64),
    Shape(768, 2, 8, 1, 512, 16),
    Shape(1024, 2, 4, 4, 1022, 4),
    Shape(1024, 2, 4, 4, 1022, 32),
    Shape(1024, 2, 2, 5, 256, 128),
    Shape(1280, 2, 1, 5, 1500, 16),
    Shape(1280, 2, 2, 5, 1500, 64),
    Shape(384, 4, 8, 5, 1500, 10),
]


@contextmanager
def caches(name: str) -> Iterator[None]:
    """This choice for every call, whatever the plan; "stock": the host alone."""
    if name == "stock":
        with fastgen.disabled():
            yield
        return
    asked_for = planner.asked_for
    planner.asked_for = lambda wanted: CHOICES[name]  # type: ignore[assignment]
    try:
        with fastgen.configured(cache="kv" if name == "kv" else "x"):
            yield
    finally:
        planner.asked_for = asked_for


def bart(shape: Shape) -> Any:
    torch.manual_seed(0)
    config = transformers.BartConfig(
        vocab_size=2000,
        d_model=shape.width,
        encoder_layers=1,
        decoder_layers=shape.layers,
        encoder_attention_heads=shape.width // 64,
        decoder_attention_heads=shape.width // 64,
        encoder_ffn_dim=64,
        decoder_ffn_dim=4 * shape.width,
        max_position_embeddings=2048,
        init_std=0.05,
    )
    return transformers.BartForConditionalGeneration(config).eval()


def measure_speed(shape: Shape, rounds: int) -> dict[str, Any]:
    """Seconds of decoding, the encoder's output given."""
    model = bart(shape)
    states = torch.randn(shape.batch, shape.source, shape.width)

    def generate() -> torch.Tensor:
        encoded = transformers.modeling_outputs.BaseModelOutput(last_hidden_state=states.clone())
        mask = torch.ones(shape.batch, shape.source, dtype=torch.long)
        lengths = {"min_new_tokens": shape.new, "max_new_tokens": shape.new}
        search = {"num_beams": shape.beams, "do_sample": False}
        with torch.no_grad():
            return model.generate(encoder_outputs=encoded, attention_mask=mask, **lengths, **search)

    sides = ["stock", *CHOICES]
    expected, bytes_of, predicted = None, {}, {}
    for name in sides:
        with caches(name):
            output = generate()
            expected = output if expected is None else expected
            if not torch.equal(output, expected):
                sys.exit(f"{shape}: the output with {name} is not stock's")
            generate()  # a later call takes up what an earlier one has kept
            if name != "stock":
                call = fastgen.status().calls[-1]
                if call.cache != name:
                    sys.exit(f"{shape}: {call.cache} was stored, not {name}")
                bytes_of[name] = call.cache_bytes
    geometry = planner.Geometry(
        shape.layers, shape.layers, shape.width // 64, shape.width // 64, 64, shape.width, shape.width
    )
    call = planner.Call(shape.batch, shape.beams, 1, shape.source, shape.new, NUMBER)
    plan = planner.plan_on(torch.device("cpu"), torch.float32, geometry, call, "auto")
    for cost in (plan.cost, *plan.others):
        predicted[cost.kind] = {"bytes": cost.bytes, "seconds": cost.seconds}
    times: dict[str, list[float]] = {name: [] for name in sides}
    for number in range(rounds):
        for name in sides if number % 2 == 0 else sides[::-1]:
            with caches(name):
                start = time.perf_counter()
                generate()
                times[name].append(time.perf_counter() - start)
    seconds = {name: statistics.median(each) for name, each in times.items()}
    spread = {name: max(each) / min(each) for name, each in times.items()}
    fastest = min(CHOICES, key=lambda name: seconds[name])
    return {
        "shape": vars(shape),
        "what": str(shape),
        "seconds": seconds,
        "spread": spread,
        "rounds": times,
        "bytes": bytes_of,
        "predicted": predicted,
        "picked": plan.cost.kind,
        "fastest": fastest,
        "behind": seconds[plan.cost.kind] / seconds[fastest],
    }


def table_of_speed(found: list[dict[str, Any]]) -> str:
    rows: list[tuple[str, ...]] = [
        ("shape", "stock ms", "kv ms", "e+kv", "x+kv", "x+e", "picked", "fastest", "behind", "bytes predicted / taken")
    ]
    for one in found:
        seconds = one["seconds"]
        rows.append(
            (
                one["what"],
                f"{1e3 * seconds['stock']:.0f}",
                f"{1e3 * seconds['kv']:.0f}",
                *(f"{seconds['kv'] / seconds[name]:.2f}x" for name in CHOICES if name != "kv"),
                one["picked"],
                one["fastest"],
                f"{one['behind']:.2f}",
                f"{one['predicted'][one['picked']]['bytes'] / one['bytes'][one['picked']]:.2f}",
            )
        )
    return aligned(rows)


# ---------------------------------------------------------------------------------------------- on a GPU
@dataclass(frozen=True)
class Attended:
    """The sizes of one layer's attention to the source, and where it is computed."""

    device: str
    batch: int
    beams: int
    heads: int
    positions: int
    size: int = 64


WHISPER_LARGE = Attended("cuda", 64, 5, 20, 1500)
TINY = Attended("cpu", 2, 3, 2, 70)


@torch.inference_mode()
def measure_on_a_gpu(dtype: torch.dtype, of: Attended) -> dict[str, Any]:
    """Milliseconds and errors of one layer's attention to the source, projections of E's queries and sums included."""
    from fastgen.ops import triton_latent

    batch, beams, heads, positions, size = of.batch, of.beams, of.heads, of.positions, of.size
    width, scale = heads * size, size**-0.5
    torch.manual_seed(0)

    def drawn(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, device=of.device, dtype=dtype)

    cache = InputCache(Projections(*(drawn(heads, size, width) * width**-0.5 for _ in range(2))))
    stored, query = (drawn(batch, 1, positions, width),), drawn(batch * beams, heads, 1, size)
    keys, values = (x.contiguous() for x in cache.keys_and_values(stored))
    repeated = [x.repeat_interleave(beams, 0) for x in (keys, values)]

    def through(attend: Callable[..., torch.Tensor]) -> Callable[[], torch.Tensor]:
        """The whole of E's attention, with this between the projections."""

        def whole() -> torch.Tensor:
            absorbed = latent._by_heads(query[:, :, 0].float(), cache.projections.key.float())[:, :, None]
            return cache._projected_back(attend(absorbed, stored[0], None, scale), dtype)

        return whole

    sides: dict[str, Callable[[], torch.Tensor]] = {
        "keys and values for each beam": lambda: F.scaled_dot_product_attention(
            query, *repeated, scale=scale
        ).transpose(1, 2),
        "tree of keys and values": lambda: attention.beam_attention(query, keys, values, None, scale),
        "E copied to float32": through(latent._attended),
        "E by two products": through(_two_products),
        **{
            f"E read once, {terms} term{'s' * (terms > 1)}": through(
                functools.partial(triton_latent.latent_attention, terms=terms)
            )
            for terms in triton_latent.TERMS
        },
        "E, as fastgen chooses": lambda: cache.attend(query, stored, None, scale),
    }
    its = cache.projections
    doubled = Projections(its.key.double(), its.value.double()).keys_and_values(stored[0][:1, 0].double())
    exact = attention._plain(query[:beams].double(), *doubled, None, scale)  # of the first sentence
    found: dict[str, Any] = {"dtype": str(dtype), "batch": batch, "beams": beams, "sides": {}}
    for name, side in sides.items():
        try:
            error = float((side()[:beams] - exact).abs().max())
            found["sides"][name] = {"milliseconds": attention_kernels._milliseconds(lambda _, s=side: s(), query)}
            found["sides"][name]["error"] = error
        except (RuntimeError, TypeError) as failure:  # a product that this torch lacks, shared memory
            found["sides"][name] = {"failure": f"{type(failure).__name__}: {failure}"[:200]}
    return found


def _two_products(query: torch.Tensor, latent: torch.Tensor, bias: None, scale: float) -> torch.Tensor:
    """What a kernel has to beat: E is read twice, in half precision, by torch's own batched products."""
    rows = fold_beams(query, len(latent), 1)[:, 0].flatten(1, 2) * scale  # [B, H*M, C]
    scores = torch.bmm(rows.to(latent.dtype), latent[:, 0].mT, out_dtype=torch.float32)
    sums = torch.bmm(scores.softmax(-1).to(latent.dtype), latent[:, 0], out_dtype=torch.float32)
    return unfold_beams(sums.unflatten(1, (1, query.shape[1], -1)))


def table_of_a_gpu(found: dict[str, Any]) -> str:
    rows: list[tuple[str, ...]] = [(f"{found['dtype']}, {found['batch']} x {found['beams']}", "ms", "largest error")]
    for name, one in found["sides"].items():
        cells = (f"{one['milliseconds']:.3f}", f"{one['error']:.1e}") if "failure" not in one else ("-", "fails")
        rows.append((name, *cells))
    return aligned(rows)


def on_a_gpu() -> list[dict[str, Any]]:
    if not torch.cuda.is_available():
        print("Skipped: attention to E in half precision needs a CUDA device.")
        return []
    found = [measure_on_a_gpu(dtype, WHISPER_LARGE) for dtype in (torch.float16, torch.bfloat16)]
    print(torch.cuda.get_device_name(), *map(table_of_a_gpu, found), sep="\n")
    return found


def rehearsed() -> int:
    """The same on the CPU: 0 if every kernel of ours runs and is as exact as torch's own attention."""
    if importlib.util.find_spec("triton") is None:
        print("Skipped: Triton is not installed.")
        return 0
    if os.environ.get("TRITON_INTERPRET") != "1":
        sys.exit("--rehearse needs TRITON_INTERPRET=1: without a CUDA device Triton's kernels run in the interpreter")
    attention_kernels._WARM_UP, attention_kernels._TRIALS = 0, 1  # nobody wants to know
    found = measure_on_a_gpu(torch.float16, TINY)  # the interpreter multiplies no bfloat16
    print(table_of_a_gpu(found))
    allowed = 4 * found["sides"]["tree of keys and values"]["error"]
    ours = [side for name, side in found["sides"].items() if name.startswith("E read") or name.startswith("E, as")]
    return int(any(side.get("error", torch.inf) > allowed for side in ours))


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    parser = options("Slim caches: bytes beside the paper's tables, speed beside the plan's predictions.", rounds=5)
    parser.add_argument("--quick", action="store_true", help="four shapes, two rounds")
    parser.add_argument("--gpu", action="store_true", help="the part that needs a CUDA device, and no other")
    parser.add_argument("--rehearse", action="store_true", help="with --gpu: tiny, on the CPU, in Triton's interpreter")
    args = parser.parse_args(argv)
    if args.rounds < 1 or args.threads < 1:
        parser.error("--rounds and --threads must be 1 or more")
    return args


def main() -> int:
    args = parse()
    begin(args)
    quieten()
    if args.gpu:
        if args.rehearse:
            return rehearsed()
        if found := on_a_gpu():
            write(args.output, "slim-gpu", {**environment(transformers, fastgen), "gpu": found})
        return 0
    check_stock_formula()
    found = [measure_bytes(model) for model in [*WHISPERS, *OTHERS]]
    print(table_of_bytes(found))
    others, shapes = OtherProcesses(), QUICK if args.quick else SHAPES
    speed = [
        measure_speed(shape, 2 if args.quick else args.rounds) for shape in tqdm(shapes, unit="shape", leave=False)
    ]
    print(table_of_speed(speed))
    right = sum(one["picked"] == one["fastest"] for one in speed)
    close = sum(one["behind"] <= 1.03 for one in speed)
    print(f"The plan picked the fastest cache for {right} of {len(speed)} shapes, one within 3% of it for {close}.")
    cores = others.cores()
    say_if_disturbed(cores)
    document = {**environment(transformers, fastgen), "quick": args.quick, "other_processes": cores}
    write(args.output, "slim", {**document, "bytes": found, "speed": speed, "gpu": on_a_gpu()})
    return 0


if __name__ == "__main__":
    sys.exit(main())
