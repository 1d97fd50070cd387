"""Attention to a latent on CUDA devices, in Triton: keys and values are one tensor, and each part of it is read once.

After the decoding kernels of multi-head latent attention (DeepSeek-AI, "DeepSeek-V2", 2024, section 2.1): the key
projection is applied to the queries, as in `fastgen.cache.slim.latent`, and all heads and beams of a sentence are rows
over one latent. A tile of the latent is loaded once and serves both products, with an online softmax between them.
Tiles of rows over the same latent are launched side by side, so that all but the first find it in the L2 cache. Keys
are split among blocks and joined as in `fastgen.ops.triton_attention`.

Importing this needs Triton, which torch's wheels for CUDA bring along.
"""

# mypy: disable-error-code="assignment, no-untyped-def, untyped-decorator"

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from fastgen import phases
from fastgen.ops.triton_attention import join, next_weights, splits_for

__phase__ = phases.ATTENTION

TERMS = (1, 2)  # a query is the sum of so many half-precision numbers, the cheaper first
_WIDTH = 64  # columns of a chunk: divides the models' sizes, and wider ones take more registers
_WARPS = 8
_REGISTERS = 255  # per thread: shared memory holds one block, but the assembler would spill some to make room for two
_MOST_SUMS = 24 * 1024  # float32 sums of a block: with more, the registers of so many warps spill
_ANY_DEVICES_ROOM = 227 * 1024  # bytes of shared memory, those of the H100, where there is no device to ask


class Tile(NamedTuple):
    """The sizes of the tile that a block holds."""

    rows: int
    keys: int  # keys of a step
    stages: int  # with 3, the next step's keys are on their way while this one's are in use

    def bytes(self, columns: int, terms: int) -> int:
        """Bytes of shared memory: query and latent in half precision, and room for scores and weights in transit."""
        held = (terms * self.rows + (self.stages - 1) * self.keys) * columns
        return 2 * held + 4 * self.rows * self.keys + 1024


# The first tile that fits is taken: more rows read the latent less often from L2; steps that wait for keys cost more.
_TILES = (Tile(32, 64, 3), Tile(32, 32, 3), Tile(16, 64, 3), Tile(16, 32, 3), Tile(32, 32, 2), Tile(16, 32, 2))


@triton.jit
def _chunk(rows, first, SIZE: tl.constexpr, WIDTH: tl.constexpr, IS_WHOLE: tl.constexpr):
    """Load `WIDTH` columns from column `first` on of the rows that the pointers `rows` `[N]` point to: `[N, WIDTH]`."""
    column = first + tl.arange(0, WIDTH)
    if IS_WHOLE:
        return tl.load(rows[:, None] + column[None, :])
    else:
        return tl.load(rows[:, None] + column[None, :], mask=(column < SIZE)[None, :], other=0.0)


# Numbers that change from step to step, and say nothing of alignment, must not cause another compilation.
@triton.jit(do_not_specialize=["keys", "per_split", "beams", "bias_batch", "bias_head", "bias_beam"])
def _attend(
    query,
    latent,
    bias,
    output,
    maxima,
    sums,
    scale,
    keys,
    beams,
    heads,
    query_row,
    query_head,
    latent_batch,
    latent_slot,
    bias_batch,
    bias_head,
    bias_beam,
    bias_slot,
    per_split,
    SIZE: tl.constexpr,
    WIDTH: tl.constexpr,
    CHUNKS: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
    TERMS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    IS_SPLIT: tl.constexpr,
):
    """Attend to a part of the keys from one tile of rows: output `[B*M, 1, H, C]`, or `[B, parts, tiles*ROWS, C]`."""
    place, part = tl.program_id(0), tl.program_id(1)
    tiles = tl.cdiv(beams * heads, ROWS)
    sentence = (place // tiles).to(tl.int64)
    row = place % tiles * ROWS + tl.arange(0, ROWS)
    is_row = row < beams * heads
    # Beyond the last row, as beyond the last key, the last is read again: masks take registers that are needed.
    near = tl.minimum(row, beams * heads - 1)
    beam, head = near % beams, near // beams
    half = latent.dtype.element_ty

    IS_WHOLE: tl.constexpr = SIZE == WIDTH * CHUNKS
    queries = query + ((sentence * beams + beam) * query_row + head * query_head)
    # In units of its largest number a query neither overflows float16 nor loses digits to its smallest numbers.
    unit = tl.zeros([ROWS], tl.float32)
    for i in tl.static_range(CHUNKS):
        unit = tl.maximum(unit, tl.max(tl.abs(_chunk(queries, i * WIDTH, SIZE, WIDTH, IS_WHOLE)), 1))
    unit = tl.where(unit == 0, 1.0, unit)
    # In chunks, for a model's size need be no power of two, and the operands of short products fit the registers.
    high = ()
    low = ()
    mixed = ()
    for i in tl.static_range(CHUNKS):
        q = _chunk(queries, i * WIDTH, SIZE, WIDTH, IS_WHOLE) / unit[:, None]
        rounded = q.to(half)
        high += (rounded,)
        if TERMS == 2:
            low += ((q - rounded.to(tl.float32)).to(half),)
        mixed += (tl.zeros([ROWS, WIDTH], tl.float32),)

    highest = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    begin = part * per_split
    end = tl.minimum(begin + per_split, keys)
    for start in range(begin, end, KEYS):
        slot = start + tl.arange(0, KEYS)
        is_slot = slot < end
        far = tl.minimum(slot, end - 1).to(tl.int64)
        stored = latent + sentence * latent_batch + far * latent_slot
        chunks = ()
        for i in tl.static_range(CHUNKS):
            chunks += (_chunk(stored, i * WIDTH, SIZE, WIDTH, IS_WHOLE),)
        scores = tl.zeros([ROWS, KEYS], tl.float32)
        for i in tl.static_range(CHUNKS):
            scores = tl.dot(high[i], tl.trans(chunks[i]), scores)
            if TERMS == 2:
                scores = tl.dot(low[i], tl.trans(chunks[i]), scores)
        scores *= (unit * scale)[:, None]
        if HAS_BIAS:
            of_row = sentence * bias_batch + head * bias_head + beam * bias_beam
            scores += tl.load(bias + of_row[:, None] + far[None, :] * bias_slot).to(tl.float32)
        scores = tl.where(is_slot[None, :], scores, float("-inf"))
        highest, weights, rescale = next_weights(scores, highest)
        rounded_weights = weights.to(half)
        # The sum of the rounded weights, so that they add up to 1: what all keys have in common is then exact.
        total = total * rescale + tl.sum(rounded_weights.to(tl.float32), 1)
        mixed_now = ()
        for i in tl.static_range(CHUNKS):
            mixed_now += (tl.dot(rounded_weights, chunks[i], mixed[i] * rescale[:, None]),)
        mixed = mixed_now

    if IS_SPLIT:
        at = (sentence * tl.num_programs(1) + part) * (tiles * ROWS) + row
        tl.store(maxima + at, highest)
        tl.store(sums + at, total)
        total = tl.full([ROWS], 1.0, tl.float32)  # parts are divided by the sums once they are joined
    else:
        at = (sentence * beams + beam) * heads + head
    for i in tl.static_range(CHUNKS):
        column = i * WIDTH + tl.arange(0, WIDTH)
        is_output = is_row[:, None] & (column < SIZE)[None, :]
        tl.store(output + at[:, None] * SIZE + column[None, :], mixed[i] / total[:, None], mask=is_output)


def unsupported(query: Tensor, latent: Tensor) -> bool:
    """Whether this kernel cannot compute `latent_attention` of these tensors.

    It takes no float32 latents: tensor cores multiply no float32 at full precision, and without them torch is as fast.
    """
    return (
        query.dtype != torch.float32
        or latent.dtype not in (torch.float16, torch.bfloat16)
        or 0 in latent.shape
        or latent.shape[2] >= 2**31
        or _tile(query, latent, min(TERMS)) is None
    )


def latent_attention(
    query: Tensor, latent: Tensor, bias: Tensor | None, scale: float, splits: int | None = None, terms: int = 2
) -> Tensor:
    """Softmax attention of all heads and beams of a sentence to one latent, which is their keys and their values.

    Tensor cores multiply in half precision and sum in float32, as scores, maxima and sums are. Weights are rounded
    once, as in half-precision attention. For a query multiplied by the key projection, 1 term is as exact as keys
    rounded to half precision, except where the latent varies much in directions that the projection ignores: there the
    query's rounding errors count, and 2 terms (about float32) are needed.

    Args:
        query: float32 `[B*M, H, 1, C]`.
        latent: float16 or bfloat16 `[B, 1, K, C]`.
        bias: of a float dtype, broadcastable to `[B, H, M, K]`, is added to the scores; or None.
        scale: factor of the scores.
        splits: parts that the keys are read in, side by side; by default as many as fill the device.
        terms: how many half-precision numbers each number of the query is the sum of, 1 or 2.

    Returns: float32 `[B*M, 1, H, C]`, contiguous; NaN for a row whose scores are all -inf.
    """
    query, latent = (x if x.stride(3) == 1 else x.contiguous() for x in (query, latent))
    tile = _tile(query, latent, terms)
    if tile is None:
        raise ValueError(f"no tile of {latent.shape[3]} columns fits this device's shared memory")
    if splits is None:
        rows = query.shape[0] * query.shape[1] // latent.shape[0]
        splits = splits_for(query.device, latent.shape[0] * triton.cdiv(rows, tile.rows), latent.shape[2])
    with torch.cuda.device(query.device if query.device.type == "cuda" else -1):  # Triton launches on the current one
        return _launched(query, latent, bias, scale, splits, terms, tile)


def _launched(
    query: Tensor, latent: Tensor, bias: Tensor | None, scale: float, splits: int, terms: int, tile: Tile
) -> Tensor:
    (rows, heads), (batch, _, keys, size) = query.shape[:2], latent.shape
    beams = rows // batch
    tiles = triton.cdiv(beams * heads, tile.rows)
    per_split = triton.cdiv(triton.cdiv(keys, splits), tile.keys) * tile.keys
    splits = triton.cdiv(keys, per_split)
    like: Any = dict(dtype=torch.float32, device=query.device)
    output = torch.empty(rows, 1, heads, size, **like)
    maxima, sums, into = output, output, output
    if splits > 1:
        maxima, sums = torch.empty(2, batch, splits, tiles * tile.rows, **like)
        into = torch.empty(batch, splits, tiles * tile.rows, size, **like)
    strides: Any = (0, 0, 0, 0)
    if bias is not None:
        strides = bias.expand(batch, heads, beams, keys).stride()
    _attend[(batch * tiles, splits)](
        query,
        latent,
        query if bias is None else bias,
        into,
        maxima,
        sums,
        scale,
        keys,
        beams,
        heads,
        query.stride(0),
        query.stride(1),
        latent.stride(0),
        latent.stride(2),
        *strides,
        per_split,
        SIZE=size,
        WIDTH=_WIDTH,
        CHUNKS=triton.cdiv(size, _WIDTH),
        ROWS=tile.rows,
        KEYS=tile.keys,
        TERMS=terms,
        HAS_BIAS=bias is not None,
        IS_SPLIT=splits > 1,
        num_warps=_WARPS,
        num_stages=tile.stages,
        maxnreg=_REGISTERS,
    )
    if splits > 1:
        join(into, maxima, sums, output, 1)
    return output


def _tile(query: Tensor, latent: Tensor, terms: int) -> Tile | None:
    rows = query.shape[0] * query.shape[1] // latent.shape[0]
    return tile_for(rows, latent.shape[3], terms, _room(query.device))


def tile_for(rows: int, size: int, terms: int, room: int) -> Tile | None:
    """The best tile for a sentence's `rows` and a latent of this `size` that fits `room` bytes, or None."""
    columns = triton.cdiv(size, _WIDTH) * _WIDTH
    for tile in _TILES:
        needless = tile.rows > max(16, triton.next_power_of_2(rows))
        if not needless and tile.rows * columns <= _MOST_SUMS and tile.bytes(columns, terms) <= room:
            return tile
    return None


@functools.cache
def _room(device: torch.device) -> int:
    """Bytes of shared memory that a block may have."""
    if device.type != "cuda":
        return _ANY_DEVICES_ROOM
    return int(triton.runtime.driver.active.utils.get_device_properties(device.index)["max_shared_mem"])
