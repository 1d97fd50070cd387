"""Finds code on a model of transformers that is not the host's, and decides what follows from it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

from torch import nn
from transformers.generation.utils import GenerationMixin
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS, AttentionInterface

from fastgen import config
from fastgen.optimizer.transformers import versions
from fastgen.patching import foreign_code
from fastgen.patching.foreign_code import Finding, HostCode, identities
from fastgen.patching.patch_set import unpatched
from fastgen.patching.replaced_code import is_of

# Helper methods of the host whose rules our loop follows. If one is replaced, the host's loop runs, in the compat tier,
# and calls the replacement as it does without us.
SEARCH_RULES = frozenset(
    """_get_top_k_continuations _get_running_beams_for_next_iteration _update_finished_beams _check_early_stop_heuristic
    _beam_search_has_unfinished_sequences _has_unfinished_sequences _gather_beams _flatten_beam_dim
    _unflatten_beam_dim""".split()
)
_ROW_LOCAL: dict[str, Callable[[Any], bool]] = {
    # These add a low-rank product to a linear layer, or scale the output: tests/peft compares them with stock.
    **dict.fromkeys(
        """peft.tuners.lora.layer.Linear peft.tuners.lora.layer.Embedding peft.tuners.lora.dora.DoraLinearLayer
        peft.tuners.ia3.layer.Linear peft.tuners.adalora.layer.SVDLinear""".split(),
        lambda layer: True,
    ),
    # Weights that are quantised, and activations that are not: tests/quantised compares them with stock.
    "optimum.quanto.nn.qlinear.QLinear": lambda layer: layer.activation_qtype is None,
    "optimum.quanto.tensor.weights.qbytes.WeightQBytesTensor": lambda weight: weight.activation_qtype is None,
    "optimum.quanto.tensor.weights.qbits.WeightQBitsTensor": lambda weight: True,
    "torchao.quantization.Int8Tensor": lambda weight: weight.act_quant_kwargs is None,
    "torchao.quantization.Float8Tensor": lambda weight: weight.act_quant_kwargs is None,
}
_CODE = HostCode(
    packages=("transformers", "fastgen", "timm"),  # timm: vision towers, which the host wraps and steps do not run
    utilities=(
        "transformers.generation",
        "transformers.integrations",
        "transformers.modeling_utils",
        "transformers.utils",
    ),
    in_steps=SEARCH_RULES
    | frozenset(
        """prepare_inputs_for_generation _update_model_kwargs_for_generation _prefill _get_initial_cache_position
        get_output_embeddings get_encoder get_decoder get_compiled_call _valid_auto_compile_criteria
        _optimize_model_for_decode""".split()
    ),
    row_local=_ROW_LOCAL,
    class_attributes=unpatched,
)


def of_modules(modules: Iterable[tuple[str, nn.Module]]) -> list[Finding]:
    """The foreign code in these modules, given with their paths in the model."""
    return list(_CODE.find(modules))


def reason_against(findings: list[Finding]) -> str | None:
    """Why these findings, none of them a search rule, leave a call to the host; None if the user wants a trial."""
    if not findings or config.current().foreign_code == "trial":
        return None
    return f'{findings[0]}: it is left to the host unless foreign_code="trial" is configured'


def changed_rule(findings: list[Finding]) -> str | None:
    """The first search rule that is not the host's own code, in words; None if all are."""
    return next((f"the model has its own {finding.name}" for finding in findings if finding.name in SEARCH_RULES), None)


def overridden_rule(model: Any) -> str | None:
    """The first search rule that the model's class, though the host's, overrides, in words; None if none."""
    for name in sorted(SEARCH_RULES):
        function = getattr(type(model), name, None)
        if function is not None and not _is_mixins(function):
            return f"the model has its own {name}"
    return None


def _is_mixins(function: Any) -> bool:
    return bool(getattr(function, "__globals__", {}).get("__name__") == GenerationMixin.__module__)


def replaced_attention(modules: Iterable[nn.Module]) -> Iterator[Finding]:
    """Attention and mask functions of these modules that are not the host's, though registered under known names."""
    seam = unpatched(AttentionInterface).get(versions.ATTENTION_SEAM)
    if seam is not None and not is_of(seam, "transformers"):
        what = f"looks attention up by a {versions.ATTENTION_SEAM} that is not the host's own"
        yield Finding("", what, code=identities(seam))
    names = {getattr(getattr(module, "config", None), "_attn_implementation", None) for module in modules}
    for name in sorted(name for name in names if isinstance(name, str)):
        function = dict(ALL_ATTENTION_FUNCTIONS).get(name)
        is_stock = function is sdpa_attention_forward if name == "sdpa" else is_of(function, "transformers")
        if function is not None and not (is_stock and is_of(function, "transformers")):
            what = f"calls the attention function {name!r}, which is not the host's own"
            yield Finding("", what, code=identities(function))
        mask = dict(ALL_MASK_ATTENTION_FUNCTIONS).get(name)
        if mask is not None and not is_of(mask, "transformers"):
            what = f"calls the function for masks {name!r}, which is not the host's own"
            yield Finding("", what, code=identities(mask))


def ambient_reason() -> str | None:
    """Why a call is left to the host whatever the model, because of an active torch mode; None if it is not."""
    mode = foreign_code.active_mode()
    return None if mode is None else f"a mode of yours ({mode}) sees each operation"
