"""One call whose steps are captured: it reuses captured steps of earlier calls, and stores them for later ones."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any, TypeVar

import torch
from torch import nn

from fastgen.cache.tree import BeamTree
from fastgen.replay import store
from fastgen.replay.guards import ModelGuards
from fastgen.replay.replayer import Replayer

AnyState = TypeVar("AnyState", bound=store.State)


class RecordedCall:
    """Takes captured steps out of the store while a call runs, and puts the call's own steps there at the end."""

    def __init__(self, owner: nn.Module, replayer: Replayer, device: torch.device) -> None:
        """`owner`: the model that keeps captured steps, on this device."""
        self._owner, self._replayer, self._device = owner, replayer, device
        self._key: Hashable = None  # of the captured steps, if they may be shared with other calls
        self.is_stored = False  # the store now owns the state that the steps read and write

    def reuse(self, state: AnyState, how: Hashable, prepare: Callable[[], None] = lambda: None) -> AnyState | None:
        """Take over the captured steps and the state of an earlier call that fits; `state` is then closed.

        Args:
            state: as it is before the first step.
            how: what a call must have in common besides shapes and surroundings.
            prepare: called if there are none, as later calls will write to this call's state.

        Returns: the state of those steps, filled with what `state` held; None if there are none.
        """
        self._key = self._key_of(state, how)
        if self._key is None:
            return None
        reused = store.reuse_graph(self._owner, self._key, state, self._replayer)
        if reused is None:
            prepare()
        return reused

    @property
    def may_share(self) -> bool:
        """Whether captured steps may be shared with other calls."""
        return self._key is not None

    def retain_buffers(self, tree: BeamTree) -> None:
        """Keep the buffers that the tree outgrows from now on: later calls can replay the steps captured on them."""
        store.retain_buffers(tree, self._replayer, self._device)

    def store(self, tree: BeamTree, state: Any, how: Hashable, guards: Callable[[], ModelGuards]) -> None:
        """Keep the captured steps of a call that has succeeded, for later calls.

        Args:
            tree: the tree of `state`.
            guards: makes guards of all that the model's steps read, called if the model has none yet.
        """
        if not tree.retained.is_on or not self._replayer.captured or not self._replayer.is_current():
            return
        state.restore_first_buffers()
        if self._key_of(state, how) == self._key:
            self.is_stored = True
            store.put(self._owner, self._key, store.recorded(state, tree, self._replayer), guards, self._device)

    def has_room_for_two(self, tree: BeamTree, state: Any, search: Any) -> bool:
        """Whether steps captured before sentences leave fit in memory beside later ones; if not, none are kept."""
        if store.may_keep(state.nbytes(), self._device):
            return True
        store.drop_retained(tree, self._replayer, search)
        return False

    def _key_of(self, state: Any, how: Hashable) -> Hashable:
        shape, surroundings = state.shape(), store.surroundings(self._device)
        return None if shape is None or surroundings is None else (shape, surroundings, how)
