"""Captured steps between which code of the user's runs, which may change the model at any time."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any

import torch
from torch import nn

from fastgen.patching import replaced_code
from fastgen.replay import store
from fastgen.replay.guards import ModelGuards
from fastgen.replay.replayer import Replayer


class GuardedReplayer(Replayer):
    """A replayer that looks at the model before each step, since the user's code may have changed it after the last.

    A captured step reads each tensor where it lies. So whatever was written there, by whatever means, a replay sees,
    provided that the step multiplies by no copies of weights: see `LinearDispatcher.expect_edits`. Anything else that
    has changed (other tensors, modules, attributes, configs, code, hooks, settings of torch) ends the captured steps:
    steps run as the model now is, and are captured anew.
    """

    def __init__(self, device: torch.device, look: Callable[[], ModelGuards | None]) -> None:
        """`look`: makes guards of all that the steps read; returns None if steps may not be replayed."""
        super().__init__(device)
        self._look = look
        self._surroundings, self._guards = _surroundings(device), look()

    @property
    def may_replay(self) -> bool:
        """Whether steps may be replayed at all: all that they read can be looked at."""
        return self._guards is not None and self._surroundings is not None

    def is_current(self) -> bool:
        is_same = self._surroundings == _surroundings(self._device)
        return self.may_replay and is_same and self._guards is not None and self._guards.is_same_memory()

    def __call__(self, step: Callable[[Any], Any], inputs: Any, epoch: Hashable) -> Any:
        if self.may_replay and not self.is_current():
            self.close()
            self._surroundings, self._guards = _surroundings(self._device), self._look()
        return super().__call__(step, inputs, epoch) if self.may_replay else step(inputs)


def _surroundings(device: torch.device) -> Hashable:
    """What a step depends on besides the model; None where steps may not be replayed."""
    if nn.modules.module._has_any_global_hook() or replaced_code.replaced_function() is not None:
        return None
    return store.surroundings(device)
