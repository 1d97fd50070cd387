"""Patches fairseq's SequenceGenerator, so that it generates over the beam tree."""

from __future__ import annotations

from types import ModuleType

from fastgen.optimizer.fairseq import checkpoints, seams
from fastgen.patching.patch_set import PatchSet, SeamMismatch, require_own, require_signature

TESTED = "0.12.3.1"  # the newest version of the host

_GENERATE = ("self", "sample", "prefix_tokens", "constraints", "bos_token")
# The methods of the ensemble that the host's search calls; our stand-in has each of them.
_ENSEMBLE = (
    "forward_decoder",
    "forward_encoder",
    "reorder_encoder_out",
    "reorder_incremental_state",
    "set_decoder_beam_size",
)


def install(patches: PatchSet, module: ModuleType) -> None:
    """Patch one of fairseq's modules, fairseq.sequence_generator or fairseq.checkpoint_utils.

    No other part of the package may be touched: it may still be half initialised.

    Raises SeamMismatch if this version's seams differ from those that the tree was written for.
    """
    _INSTALLERS[module.__name__](patches, module)


def _sequence_generator(patches: PatchSet, module: ModuleType) -> None:
    generator, ensemble = module.SequenceGenerator, module.EnsembleModel
    stock = patches.stock(generator, "_generate")
    require_signature(stock, _GENERATE)
    require_own(stock, "fairseq")
    for name in _ENSEMBLE:
        if not hasattr(ensemble, name):
            raise SeamMismatch(f"EnsembleModel has no {name}")
    seams.stock["_generate"] = stock
    patches.replace(generator, seams.STOCK_GENERATE, seams.renamed(stock, seams.STOCK_GENERATE))
    patches.replace(generator, "_generate", seams._generate)
    patches.replace(ensemble, "set_decoder_beam_size", seams.set_decoder_beam_size)


def _checkpoint_utils(patches: PatchSet, module: ModuleType) -> None:
    stock = patches.stock(module, "load_checkpoint_to_cpu")
    require_signature(stock, ("path", "arg_overrides", "load_on_all_ranks"))
    patches.replace(module, "load_checkpoint_to_cpu", checkpoints.loading(stock))


_INSTALLERS = {
    "fairseq.sequence_generator": _sequence_generator,
    "fairseq.checkpoint_utils": _checkpoint_utils,
}
