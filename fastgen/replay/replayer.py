"""A decode step that is captured once and replayed: on a GPU as one CUDA graph, on a CPU without the model's Python.

Operations on memory are captured, not the Python around them. So a step may be replayed for as long as all that it
reads keeps its address: state is changed in place (the static tree), and inputs are copied to the addresses that the
captured step reads.

That is no proof: a number that the step computes in Python would be baked in. So the first replay runs beside the
model's own step, at another position than the captured one, and only a replay with the same output that leaves the
same memory is trusted.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from fastgen import locks, report
from fastgen.layers import attention_kernels
from fastgen.memory import cuda_graph, limits
from fastgen.replay.tape import Drawing, Noting, Tape

_capturing = locks.lock()  # torch's dispatch modes have flags for the whole process
NO_MEMORY = "there was no memory to capture its steps"  # which may pass
_PATIENCE = 4  # so many times more steps run uncaptured before each further capture of a call


class GraphBackend(Protocol):
    """Records what a function without arguments does to a device's memory, and does it again."""

    has_run: bool  # whether capturing computes the result
    written: list[Tensor]  # tensors that the function writes to and has not made; empty if unknown
    draws: bool  # whether the function draws random numbers, or may

    def capture(self, function: Callable[[], Any], device: torch.device) -> Any:
        """Record `function` and return what it returns, with no valid numbers unless it `has_run`."""

    def replay(self) -> Any:
        """Do the recorded work again and return the result, which may overwrite the last one."""


class CudaGraph:
    """A backend that records a function as a CUDA graph with a memory pool of its own."""

    has_run = False
    draws = True  # as it runs: the graph itself draws none

    def __init__(self) -> None:
        self.written: list[Tensor] = []
        self._graph = torch.cuda.CUDAGraph()

    def capture(self, function: Callable[[], Any], device: torch.device) -> Any:
        self._result = cuda_graph.capture(self._graph, function, device)
        return self._result

    def replay(self) -> Any:
        self._graph.replay()
        return self._result


# The backend that records a step, by type of device.
BACKENDS: dict[str, type[GraphBackend]] = {"cuda": CudaGraph, "cpu": Tape}


@dataclass
class Counts:
    """How many steps were captured and replayed, and how long capturing took."""

    captures: int = 0
    replays: int = 0
    seconds: float = 0.0  # that capturing took
    uncaptured: str = ""  # why a part of the steps, such as the search, is not captured beside the model's

    def add(self, other: Counts) -> None:
        self.uncaptured = other.uncaptured or self.uncaptured
        self.captures += other.captures
        self.replays += other.replays
        self.seconds += other.seconds

    def __str__(self) -> str:
        but = f", but not the search's: {self.uncaptured}" if self.uncaptured else ""
        return f"{self.captures} captured in {self.seconds:.2f} s, {self.replays} steps replayed{but}"


class Replayer:
    """Runs the steps of one call: of like steps the first runs uncaptured, the second is captured, all others replayed.

    Each time a buffer moves, as when sentences are evicted, more like steps must run before one is captured again. If
    it `retains_buffers`, steps captured before are kept, by epoch.
    """

    retains_buffers = False
    # Copies what a step changes by what it was, such as recurrent states, and returns what puts it back.
    save: Callable[[], Callable[[], None]] | None = None

    def __init__(self, device: torch.device, counts: Counts | None = None) -> None:
        self._recording, self._device = BACKENDS[device.type], device
        self.counts = Counts() if counts is None else counts
        self._steps, self._patience = 0, 1  # like steps that have run uncaptured, and how many must
        self.failure: str | None = None  # why steps are not captured after all
        self._last: tuple[Hashable, list[Any]] | None = None  # key and inputs of the last uncaptured step
        self._captured: dict[Hashable, Captured] = {}  # by epoch
        self._others: list[Replayer] = []
        self._whole: dict[Hashable, Captured] | None = None  # steps captured before sentences left, if kept

    def __call__(self, step: Callable[[Any], Any], inputs: Any, epoch: Hashable) -> Any:
        """Return `step(inputs)`, replayed if it can be; on CUDA the next replay overwrites what this one returns.

        Args:
            step: whatever it reads besides the inputs keeps its address until `epoch` changes. If a capture fails
                half-way, what `save` has copied is put back, and the step is run again from the beginning.
            inputs: containers of tensors and anything else.
        """
        leaves, spec = pytree.tree_flatten(inputs)
        key = (epoch, spec, tuple(map(_kind, leaves)))
        captured = self._captured.get(epoch)
        is_taken = captured is not None and captured.takes(key, leaves)
        if captured is not None and is_taken and captured.is_verified:
            self.counts.replays += 1
            return captured.replay(leaves)
        # What a step chooses as it runs, such as a kernel of attention, is chosen for a graph.
        is_for_graphs = not self._recording.has_run and self.failure is None
        with attention_kernels.for_graphs() if is_for_graphs else contextlib.nullcontext():
            if captured is None or not is_taken:
                return self._captured_anew(step, inputs, epoch, key, leaves, spec)
            result = self._verified(captured, step, inputs, leaves)
            captured.is_verified = True
            return result

    def _captured_anew(
        self, step: Callable[[Any], Any], inputs: Any, epoch: Hashable, key: Hashable, leaves: list[Any], spec: Any
    ) -> Any:
        """Return `step(inputs)`, captured if steps like this one have run before."""
        last, self._last = self._last, None
        self._captured = {each: its for each, its in self._captured.items() if self.retains_buffers and each != epoch}
        if self.failure:
            return step(inputs)
        self._steps = 0 if last is None or last[0] != key else self._steps
        if last is None or self._steps < self._patience:
            self._last = key, leaves
            self._steps += 1
            return self._alone(step, inputs)
        self._steps, self._patience = 0, self._patience * _PATIENCE
        start = time.perf_counter()
        captured, recording, put_back = Captured(key, last[1], leaves), self._recording(), None
        try:
            if recording.has_run and self.save is not None:
                put_back = self.save()
            with _capturing, contextlib.nullcontext() if recording.has_run else Noting() as noting:
                result = captured.capture(recording, lambda own: step(pytree.tree_unflatten(own, spec)), self._device)
        except RuntimeError as error:  # an operation that cannot be captured, such as waiting for the device
            first = (str(error).splitlines() or ["RuntimeError"])[0][:150]
            self.failure = NO_MEMORY if limits.is_out_of_memory(error) else f"its steps cannot be captured ({first})"
            if put_back is not None:
                put_back()
            return step(inputs)
        finally:
            self.counts.seconds += time.perf_counter() - start
        self._captured[epoch] = captured
        self.counts.captures += 1
        if recording.has_run:
            return result
        assert noting is not None
        captured.written = noting.written
        # Capturing has computed nothing, not even what the step stores for later steps. So the step is replayed here
        # already, and at the next step, which is at another position, once more beside the model's own.
        return self._verified(captured, step, inputs, leaves)

    def _verified(self, captured: Captured, step: Callable[[Any], Any], inputs: Any, leaves: list[Any]) -> Any:
        """Return `step(inputs)` and compare a replay with it: if they differ, no step is replayed any more."""
        result, difference = captured.verify(lambda: step(inputs), leaves, self._device)
        if difference is not None:
            self.close()
            self.retains_buffers = False
            if difference == NO_MEMORY:
                self.failure = NO_MEMORY
                return result
            self.failure = f"a captured step differs from the model's own step ({difference})"
            report.warn(f"fastgen replays no steps of this model: {self.failure}")
        return result

    def _alone(self, step: Callable[[Any], Any], inputs: Any) -> Any:
        if self._recording.has_run:
            return step(inputs)
        # A CUDA capture that fails may leave the device's generator and allocator in disorder: don't begin one in vain.
        with _capturing, Noting() as noting:
            result = step(inputs)
        if noting.waits:
            self.failure = f"its steps cannot be captured ({noting.waits} waits for a value)"
        return result

    def is_current(self) -> bool:
        """Whether the captured steps are, as far as this looks, those of the model as it is now."""
        return True

    @property
    def waits_for_nothing(self) -> bool:
        """Whether code between steps should not wait for values of the device either."""
        return not self._recording.has_run

    def another(self) -> Replayer:
        """A replayer for another part of the call's steps, which shares this one's counts."""
        other = Replayer(self._device, self.counts)
        other.retains_buffers = self.retains_buffers
        self._others.append(other)
        return other

    @property
    def uncaptured(self) -> str | None:
        """Why steps of `another` replayer are not captured; None if they are, or if memory was short."""
        return next((each.failure for each in self._others if each.failure not in (None, NO_MEMORY)), None)

    @property
    def captured(self) -> dict[Hashable, Captured]:
        """Captured steps by epoch, for the replayer of a later call to `resume`."""
        return self._captured if self._whole is None else self._whole

    def has_captured(self, epoch: Hashable) -> bool:
        return epoch in self.captured

    def resume(self, captured: dict[Hashable, Captured]) -> None:
        """Take over steps that another call has captured, to replay those that fit this call's steps."""
        self._captured = dict(captured)

    def shrink(self) -> None:
        """Forget the captured steps, as sentences leave; if buffers are retained, steps captured before the first
        eviction are kept for other calls."""
        if self.retains_buffers and self._whole is None:
            self._whole = self._captured
        self._last, self._captured = None, {}

    def restore_first_buffers(self) -> None:
        """Return to the steps that were captured before sentences left, and forget all others."""
        self._last, self._whole, self._captured = None, None, self.captured

    def drop_retained(self) -> None:
        """Keep no steps of earlier epochs any longer."""
        self.retains_buffers, self._whole = False, None

    def close(self) -> None:
        """Forget everything captured."""
        self._last, self._whole, self._captured = None, None, {}


def run_watching_draws(function: Callable[[], Any]) -> tuple[Any, bool]:
    """What `function` returns, and whether it has drawn random numbers, in this thread."""
    with _capturing, Drawing() as drawing:
        result = function()
    return result, drawing.draws


class Captured:
    """A captured step, with copies of those inputs whose address changes from step to step."""

    is_verified = False

    def __init__(self, key: Hashable, before: list[Any], leaves: list[Any]) -> None:
        """`before`: the previous step's inputs, still alive, so that an input at the same address in `leaves` is the
        same memory."""
        self._key = key
        self._inputs = [
            leaf.clone() if isinstance(leaf, Tensor) and leaf.data_ptr() != last.data_ptr() else leaf
            for last, leaf in zip(before, leaves, strict=True)
        ]
        self._moves = [mine is not leaf for mine, leaf in zip(self._inputs, leaves, strict=True)]
        self.written: list[Tensor] = []  # tensors that the step writes to, besides its results

    def capture(self, recording: GraphBackend, step: Callable[[list[Any]], Any], device: torch.device) -> Any:
        self._recording = recording
        result = recording.capture(lambda: step(self._inputs), device)
        self.written = recording.written
        return result

    def verify(self, step: Callable[[], Any], leaves: list[Any], device: torch.device) -> tuple[Any, str | None]:
        """Return what `step` returns for these inputs, and how a replay differs from it; None if it does not.

        Memory and torch's random stream are left as `step` has left them. The proof takes twice the memory that the
        step writes to; without it, nothing is proven: NO_MEMORY.
        """
        written = [_whole(tensor) for tensor in self.written]
        try:
            before = [tensor.clone() for tensor in written]
        except (RuntimeError, MemoryError) as error:
            if not limits.is_out_of_memory(error):
                raise
            return step(), NO_MEMORY
        # Not in vain: other threads draw from the same stream, and would draw the same numbers again.
        random = _random_state(device) if self._recording.draws else None
        # The replay comes first: what a captured step stores for later ones may be there only once it was replayed.
        failure, replayed, after = None, [], []
        try:
            replayed = pytree.tree_leaves(self.replay(leaves))
            # Copies, as `step` may overwrite them.
            replayed = [leaf.clone() if isinstance(leaf, Tensor) else leaf for leaf in replayed]
            after = [tensor.clone() for tensor in written]
        except (
            RuntimeError,
            MemoryError,
            TypeError,
            ValueError,
            IndexError,
        ) as error:  # `step` says whether the inputs are at fault
            replayed, after = [], []
            first = (str(error).splitlines() or [""])[0][:150]
            failure = NO_MEMORY if limits.is_out_of_memory(error) else f"it fails: {first}"
        for tensor, its in zip(written, before, strict=True):
            tensor.copy_(its)
        if random is not None:
            _set_random_state(device, random)
        result = step()
        if failure is not None:
            return result, failure
        expected = pytree.tree_leaves(result)
        return result, _difference("its output", expected, replayed) or _difference("what it writes", written, after)

    def takes(self, key: Hashable, leaves: list[Any]) -> bool:
        """Whether a replay does the step for these inputs."""
        return key == self._key and all(
            moves or not isinstance(leaf, Tensor) or leaf.data_ptr() == mine.data_ptr()
            for moves, mine, leaf in zip(self._moves, self._inputs, leaves, strict=True)
        )

    def replay(self, leaves: list[Any]) -> Any:
        for moves, mine, leaf in zip(self._moves, self._inputs, leaves, strict=True):
            if moves:
                mine.copy_(leaf)
        return self._recording.replay()


# The largest difference allowed, in units of rounding of the largest number: operators and numbers are the same, but
# memory may be aligned otherwise.
_ULPS = 8


def _difference(what: str, expected: list[Any], found: list[Any]) -> str | None:
    """How the lists `expected` and `found` differ; None if they are the same but for rounding."""
    if len(expected) != len(found):
        return f"{what} has other parts"
    for mine, theirs in zip(expected, found, strict=True):
        if not isinstance(mine, Tensor):
            continue  # the same objects, unless they are numbers, and those are baked in
        if mine.shape != theirs.shape or mine.dtype != theirs.dtype:
            return f"{what} has another shape"
        if not mine.numel() or torch.equal(mine, theirs):
            continue
        if not mine.is_floating_point():
            return f"{what} has other numbers"
        finite = torch.isfinite(mine)
        if not torch.equal(finite, torch.isfinite(theirs)):
            return f"{what} has other numbers that are not finite"
        if not finite.any():
            continue
        error, largest = (mine[finite] - theirs[finite]).abs().max(), mine[finite].abs().max()
        if error > _ULPS * torch.finfo(mine.dtype).eps * largest:
            return f"{what} by {float(error / largest.clamp(min=1e-30)):.1e} of the largest"
    return None


def _whole(tensor: Tensor) -> Tensor:
    """The whole storage of a tensor, as a flat tensor."""
    return tensor.detach().as_strided((tensor.untyped_storage().nbytes() // tensor.itemsize,), (1,), 0)


def _random_state(device: torch.device) -> list[Tensor]:
    return [torch.get_rng_state(), *([torch.cuda.get_rng_state(device)] if device.type == "cuda" else [])]


def _set_random_state(device: torch.device, states: list[Tensor]) -> None:
    torch.set_rng_state(states[0])
    if device.type == "cuda":
        torch.cuda.set_rng_state(states[1], device)


def _kind(leaf: Any) -> Hashable:
    """What must be equal of an input for a replay to be right, whatever numbers a tensor holds."""
    if isinstance(leaf, Tensor):
        return leaf.shape, leaf.stride(), leaf.dtype, leaf.device
    if isinstance(leaf, (bool, int, float, str, type(None))):
        return type(leaf), leaf
    return id(leaf)
