"""The state that a call's steps read and write, besides the model and the inputs of each step."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass

from fastgen.cache.slim.latent import identity_of
from fastgen.cache.wide_tree import WideTree
from fastgen.decoding.fairseq_beam_search import FairseqBeamSearch
from fastgen.layers.linear import LinearDispatcher
from fastgen.optimizer.fairseq.model.session import Session
from fastgen.optimizer.fairseq.replay.steps import ReplayedSteps


@dataclass
class State:
    """The state that captured steps read and write; a later call of the same shapes fills it anew."""

    session: Session  # the tree, and cross-attention's keys and values
    replayed: ReplayedSteps  # the model's views
    products: LinearDispatcher
    search: tuple[Hashable, FairseqBeamSearch] | None = None  # our loop's search, with a key of what it can be used for

    def fill(self, other: State) -> None:
        """Begin anew, in place, with the encoder output of `other`, a state of the same `shape`."""
        tree = self.session.tree
        tree.reset_from(other.session.tree)
        tree.max_steps = other.session.tree.max_steps
        self.session.cache_bytes = 0
        for mine, theirs in zip(self.session.stored(), other.session.stored(), strict=True):
            mine.copy_(theirs)

    def restore_first_buffers(self) -> None:
        """Return to the buffers that the state had before it grew or sentences left."""
        self.session.restore_first_buffers()
        if self.search is not None:
            self.search[1].restore_first_buffers()

    def shape(self) -> Hashable:
        """A key that must be equal for two states if one is to be filled from the other."""
        tree = self.session.tree
        depth = tree.max_steps if isinstance(tree, WideTree) else None  # paths have a place for each step
        return (
            (type(tree), depth, tree.batch, tree.beams, tree.capacity, tree.prompt_length),
            tuple((identity_of(source.slim), source.bias is None) for source in self.session.sources),
            tuple((x.shape, x.dtype, x.device, x.is_inference()) for x in self.session.stored()),
        )

    def nbytes(self) -> int:
        return self.session.retained_bytes + (0 if self.search is None else self.search[1].state.nbytes)

    def close(self) -> None:
        """Free all keys and values."""
        self.session.tree.close()
        self.session.sources.clear()
