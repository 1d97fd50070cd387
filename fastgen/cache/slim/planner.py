"""Chooses a call's cache: predicts bytes and seconds of each kind, and takes the fastest that fits in memory.

Only work that differs between caches is predicted: attention, the key and value projections, and those that slim caches
need in their place. The rates come from timings on the device, a few milliseconds once.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from fastgen import locks
from fastgen.cache.slim.latent import Choice, InputCache, Projections, Slim, word_for
from fastgen.cache.tree import FIRST_STEPS
from fastgen.layers import packed_weights
from fastgen.layers.attention import beam_attention
from fastgen.memory import arena, limits
from fastgen.report import size

_SLACK = 1.25  # so many times the stored bytes have to be free, for growing copies and activations
_MARGIN = 1.1  # a slim cache has to be so many times faster: a model's first call with one tries each layer
_ALWAYS_FITS = 2**25  # bytes; for less, asking how much is free takes longer than it is worth
_ON_A_PATH = 1.7  # slots for each generated token that stay when a tree is pruned (benchmarks/bench_cache.py)
_WARM_UP, _TRIALS = 1, 3
_PASSING_BYTES = 2**24  # bytes of weights that one timing reads


@dataclass(frozen=True)
class Geometry:
    """The sizes of a decoder's layers, which decide how much a cache stores for each position."""

    self_attn_layers: int  # self-attention layers that can have a slim cache
    cross_attn_layers: int  # cross-attention layers that can have a slim cache
    heads: int
    key_heads: int
    size: int  # of a head
    width: int  # of the layer's input
    source_width: int  # of the encoder's output
    is_rotary: bool = False  # then no layer can store its input alone


@dataclass(frozen=True)
class Call:
    """The sizes of a call, as known before it begins."""

    batch: int
    beams: int
    prompt: int  # tokens of the decoder's prompt
    source: int  # positions of the encoder output
    steps: int  # tokens to come, at most
    itemsize: int  # bytes of a number


@dataclass(frozen=True)
class Rates:
    """How fast a device does the work that differs between caches."""

    few_rows: float  # multiplications and additions a second in attention of a few rows per head
    many_rows: float  # the same with as many rows as a slim cache's one head has
    products: float  # the same in projections of many rows
    moved: float  # the same in projections that a slim cache applies to the query, and to the weighted sum
    bandwidth: float  # bytes of keys a second that attention of one row reads
    moved_bandwidth: float  # bytes of weights a second in those projections, with few rows
    overhead: float  # seconds that a slim layer's attention takes whatever its sizes


@dataclass(frozen=True)
class Cost:
    """The predicted cost of one choice."""

    choice: Choice
    kind: str
    bytes: int
    seconds: float

    def __str__(self) -> str:
        return f"{self.kind} {size(self.bytes)} and {self.seconds:.2g} s"


@dataclass(frozen=True)
class Plan:
    """The cache that a call takes, and the other caches that it could have taken."""

    cost: Cost
    others: tuple[Cost, ...] = ()
    free: int | None = None  # free bytes, if they decided

    @property
    def choice(self) -> Choice:
        return self.cost.choice

    def __str__(self) -> str:
        why = "" if self.free is None else f" (of memory, {size(self.free)} are free)"
        return "predicted: " + "; ".join([f"{self.cost}{why}", *map(str, self.others)])


def plan(geometry: Geometry, call: Call, rates: Rates, free: int | None, wanted: Choice | None = None) -> Plan:
    """Take keys and values, or a clearly faster cache, if they fit into `free` bytes (None: unknown); else the fastest
    that fits or, if none does, the smallest.

    Considers only caches that are exact in any layer; keys alone or values alone are taken where they are `wanted`.
    """
    own = ("kv", "x") if geometry.self_attn_layers and not geometry.is_rotary else ("kv",)
    source = ("kv", "e") if geometry.cross_attn_layers and call.source else ("kv",)
    choices = [Choice(o, s) for o in own for s in source]
    if wanted is not None and wanted not in choices:
        choices.append(wanted)
    costs = [predict(geometry, call, rates, choice) for choice in choices]
    if wanted is not None:
        (cost,) = (cost for cost in costs if cost.choice == wanted)
        return Plan(cost, tuple(other for other in costs if other is not cost))
    (plain,) = (cost for cost in costs if cost.choice == Choice())
    fitting = [cost for cost in costs if free is None or cost.bytes * _SLACK <= free]
    if plain in fitting:
        faster = [cost for cost in fitting if cost.seconds * _MARGIN <= plain.seconds]
        best = min(faster, key=lambda cost: cost.seconds, default=plain)
    else:
        best = min(fitting, key=lambda cost: cost.seconds, default=min(costs, key=lambda cost: cost.bytes))
    return Plan(best, tuple(cost for cost in costs if cost is not best), None if plain in fitting else free)


def predict(geometry: Geometry, call: Call, rates: Rates, choice: Choice) -> Cost:
    """Predict the bytes and seconds of this choice."""
    own, own_seconds = _of_own(geometry, call, rates, choice.self_attn)
    source, source_seconds = _of_source(geometry, call, rates, choice.cross_attn) if call.source else (0, 0.0)
    kinds = {choice.self_attn} | ({choice.cross_attn} if call.source else set())
    return Cost(choice, word_for(kinds), own + source, own_seconds + source_seconds)


def _of_own(geometry: Geometry, call: Call, rates: Rates, kind: str) -> tuple[int, float]:
    kept = min(call.steps, FIRST_STEPS) * call.beams
    slots = call.prompt + max(kept, int(min(call.beams, _ON_A_PATH) * call.steps))
    stored = _stored(geometry, geometry.width, kind) * slots * call.batch * geometry.self_attn_layers
    seen = call.prompt + min(call.beams, _ON_A_PATH) * call.steps / 2  # slots that a step reads, on average
    step = _attention(geometry, call, rates, call.beams, seen, geometry.width, kind)
    projected = _projection(geometry, call, rates, call.batch * call.beams, geometry.width)
    step += {"kv": 1, "x": 0}.get(kind, 0.5) * projected
    return stored * call.itemsize, call.steps * geometry.self_attn_layers * step


def _of_source(geometry: Geometry, call: Call, rates: Rates, kind: str) -> tuple[int, float]:
    positions = call.source * call.batch
    layers = geometry.cross_attn_layers
    width = geometry.source_width
    stored = positions * _stored(geometry, width, kind) * (1 if kind in ("e", "h") else layers)
    step = _attention(geometry, call, rates, call.beams, call.source, width, kind)
    if kind == "e" and call.prompt < geometry.size:
        first = _attention(geometry, call, rates, call.prompt, call.source, width, kind)
    else:
        first = _projection(geometry, call, rates, positions, width)
    return stored * call.itemsize, layers * (call.steps * step + first)


def _stored(geometry: Geometry, width: int, kind: str) -> int:
    """How many numbers one layer stores for one position."""
    projected = geometry.key_heads * geometry.size
    return {"kv": 2 * projected, "h": projected, "k": projected, "v": projected}.get(kind, width)


def _projection(geometry: Geometry, call: Call, rates: Rates, rows: int, width: int) -> float:
    """Seconds that the key and value projections of one layer take for `rows` rows."""
    numbers = 2 * geometry.key_heads * geometry.size * width
    return max(2 * rows * numbers / rates.products, numbers * call.itemsize / rates.bandwidth)


def _attention(
    geometry: Geometry, call: Call, rates: Rates, rows: int, positions: float, width: int, kind: str
) -> float:
    """Seconds of one layer's attention, from `rows` queries of each sentence to `positions` positions."""
    read = call.batch * positions * _stored(geometry, width, kind) * call.itemsize / rates.bandwidth
    absorbed = {"kv": 0, "k": 1, "v": 1}.get(kind, 2)  # how many of keys and values are as wide as what is stored
    size = absorbed * _stored(geometry, width, kind) + (2 - absorbed) * geometry.size
    operations = 2 * call.batch * rows * geometry.heads * positions * size
    if kind == "kv":
        return max(operations / rates.few_rows, read)
    numbers = (absorbed * geometry.key_heads) * geometry.size * width
    moved = max(
        2 * call.batch * rows * geometry.heads // geometry.key_heads * numbers / rates.moved,
        numbers * call.itemsize / rates.moved_bandwidth,
    )
    return max(operations / rates.many_rows, read) + moved + rates.overhead


def plan_on(device: torch.device, dtype: torch.dtype, geometry: Geometry, call: Call, wanted: str) -> Plan:
    """The plan for a call on this device; `wanted`: the user's setting, "auto" or a kind of cache such as "x"."""
    choice = None if wanted == "auto" else asked_for(wanted)
    if choice is not None:
        own = choice.self_attn if geometry.self_attn_layers else "kv"
        choice = Choice(own, choice.cross_attn if geometry.cross_attn_layers and call.source else "kv")
    elif torch.are_deterministic_algorithms_enabled():  # a timing decides, and each cache rounds in its own way
        choice = Choice()
    rates = _rates_of(device, dtype)
    is_small = predict(geometry, call, rates, Choice()).bytes < _ALWAYS_FITS
    return plan(geometry, call, rates, None if is_small else _free(device), choice)


def asked_for(wanted: str) -> Choice:
    """The choice that a user's setting `wanted` stands for: "kv", "x", "h", "k" or "v"."""
    return Choice("k" if wanted == "h" else wanted, "e" if wanted == "x" else wanted)


def _free(device: torch.device) -> int | None:
    """Bytes of the device's memory that a call may still take; None if unknown."""
    if device.type != "cuda":
        return limits.free()
    idle = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return torch.cuda.mem_get_info(device)[0] + idle


_lock = locks.reentrant_lock()
_rates: dict[tuple[str, torch.dtype, int], Rates] = {}


def _rates_of(device: torch.device, dtype: torch.dtype) -> Rates:
    """The device's rates, timed once for each device, dtype and number of threads."""
    key = str(device), dtype, torch.get_num_threads()
    with _lock:
        if key not in _rates:
            with arena.outside():
                _rates[key] = _timed(device, dtype)
        return _rates[key]


@torch.no_grad()
def _timed(device: torch.device, dtype: torch.dtype) -> Rates:
    batch, heads, size, keys = 4, 8, 64, 384
    width = heads * size

    def rate(rows: int, heads: int, key_heads: int, size: int, positions: int) -> tuple[float, float]:
        """Operations and bytes a second."""
        query = _drawn(batch * rows, heads, 1, size, device=device, dtype=dtype)
        keys = _drawn(batch, key_heads, positions, size, device=device, dtype=dtype)
        values = keys.clone()
        plain = functools.partial(beam_attention, query, keys, values, None, 0.1)
        seconds = _seconds(plain if key_heads == heads else lambda: _as_slim(query, keys), device)
        return 4 * batch * rows * heads * positions * size / seconds, 2 * keys.nbytes / seconds

    few, many = rate(5, heads, heads, size, keys)[0], rate(5, heads, 1, width, keys)[0]
    bandwidth = rate(1, heads, heads, size, 4 * keys)[1]
    rows, weight = (_drawn(*shape, device=device, dtype=dtype) for shape in ((1024, width), (2 * width, width)))
    products = [functools.partial(F.linear, rows, weight)]
    if dtype == torch.float32 and device.type == "cpu" and packed_weights.unavailable() is None:
        products.append(functools.partial(packed_weights.multiply, rows, packed_weights.pack(weight), None))
    product = min(_seconds(each, device) for each in products)
    # Layer after layer, as in a model: together their weights exceed the processor's cache.
    numbers = 2 * heads * size * width
    slim = [_slim_layer(heads, size, width, device, dtype) for _ in range(_PASSING_BYTES // (numbers * dtype.itemsize))]
    overhead = _moving([_slim_layer(2, 2, 4, device, dtype)] * len(slim), 1, device, dtype)
    few_moved, many_moved = (max(_moving(slim, rows, device, dtype) - overhead, 1e-9) for rows in (4, 256))
    return Rates(
        few_rows=few,
        many_rows=many,
        products=2 * len(rows) * weight.numel() / product,
        moved=2 * 256 * numbers / many_moved,
        bandwidth=bandwidth,
        moved_bandwidth=numbers * dtype.itemsize / few_moved,
        overhead=overhead,
    )


def _slim_layer(heads: int, size: int, width: int, device: torch.device, dtype: torch.dtype) -> Slim:
    return InputCache(Projections(*(_drawn(heads, size, width, device=device, dtype=dtype) for _ in range(2))))


def _moving(layers: list[Slim], rows: int, device: torch.device, dtype: torch.dtype) -> float:
    """Seconds of one layer's attention from `rows` rows to one position: nearly all of it goes to the projections."""
    heads, size, width = layers[0].projections.key.shape
    query = _drawn(rows, heads, 1, size, device=device, dtype=dtype)
    stored = (_drawn(1, 1, 1, width, device=device, dtype=dtype),)

    def all_layers() -> Tensor:
        return [layer.attend(query, stored, None, 0.1) for layer in layers][-1]

    return _seconds(all_layers, device) / len(layers)


def _as_slim(query: Tensor, stored: Tensor) -> Tensor:
    stored = stored.float()
    return beam_attention(query.float(), stored, stored, None, 0.1)


def _drawn(*shape: int, device: torch.device, dtype: torch.dtype) -> Tensor:
    # Not `randn`: the user's random stream stays as it is; nor zeros, which may have no memory allocated.
    return torch.full(shape, 0.5, device=device, dtype=dtype)


def _seconds(call: Callable[[], Tensor], device: torch.device) -> float:
    times = []
    for trial in range(_WARM_UP + _TRIALS):
        start = time.perf_counter()
        call()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        if trial >= _WARM_UP:
            times.append(time.perf_counter() - start)
    return min(times)  # disturbances only add time
