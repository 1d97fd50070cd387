"""A zoo of code that users put on, in and around a model, and what can be observed of it afterwards.

Each case is a function that changes a user's own copy of a model. What it puts there changes the states a little, so
that a search which passes it by finds other tokens, and notes what it sees, so that a search which calls it with other
rows, or another number of times, is found out.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import sys
import types
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import zoo
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize
from transformers import GenerationMixin
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS, AttentionInterface

import fastgen
from fastgen import report
from fastgen.optimizer.transformers.versions import CACHE

SEED, ROWS = 123, 3
SEARCHES: dict[str, dict[str, Any]] = {
    "greedy": dict(do_sample=False),
    "samples": dict(do_sample=True, num_return_sequences=ROWS),
    "beams": dict(num_beams=ROWS),
}
PARTS = {
    "llama": dict(
        base="model",
        layer="model.layers.{}",
        attention="model.layers.{}.self_attn",
        mlp="model.layers.{}.mlp",
        linear="model.layers.{}.mlp.up_proj",
        norm="model.norm",
        embedding="model.embed_tokens",
    ),
    "gpt2": dict(
        base="transformer",
        layer="transformer.h.{}",
        attention="transformer.h.{}.attn",
        mlp="transformer.h.{}.mlp",
        linear="transformer.h.{}.mlp.c_fc",
        norm="transformer.ln_f",
        embedding="transformer.wte",
    ),
    "bart": dict(
        base="model",
        layer="model.decoder.layers.{}",
        attention="model.decoder.layers.{}.self_attn",
        mlp="model.decoder.layers.{}.fc2",
        linear="model.decoder.layers.{}.fc1",
        norm="model.decoder.layers.{}.final_layer_norm",
        embedding="model.decoder.embed_tokens",
        encoder="model.encoder",
        encoder_mlp="model.encoder.layers.{}.fc2",
    ),
    "t5": dict(
        base="decoder",
        layer="decoder.block.{}",
        attention="decoder.block.{}.layer.0.SelfAttention",
        mlp="decoder.block.{}.layer.2.DenseReluDense",
        linear="decoder.block.{}.layer.2.DenseReluDense.wi",
        norm="decoder.final_layer_norm",
        embedding="decoder.embed_tokens",
        encoder="encoder",
        encoder_mlp="encoder.block.{}.layer.1.DenseReluDense",
    ),
}


class User:
    """A user with a model of their own, what their code has seen, and what takes it back."""

    def __init__(self, family: str) -> None:
        self.family = family
        self.model = copy.deepcopy(zoo.load(family))
        self.rows = 0  # of the call to come: sentences x beams
        self.log: list[Any] = []  # what their code has seen, in this order
        self.touched: list[str] = []  # the modules that they have put something on
        self.undo = contextlib.ExitStack()
        self.patch = pytest.MonkeyPatch()
        self.undo.callback(self.patch.undo)

    def path(self, part: str, layer: int = 0) -> str:
        path = PARTS[self.family].get(part, part).format(layer)
        self.touched.append(path)
        return path

    def part(self, part: str, layer: int = 0) -> Any:
        return self.model.get_submodule(self.path(part, layer))

    def replace(self, part: str, build: Callable[[Any], Any], layer: int = 0) -> Any:
        """Put what `build` makes of a part into its place."""
        module = build(self.part(part, layer))
        parent, _, name = self.touched[-1].rpartition(".")
        setattr(self.model.get_submodule(parent), name, module)
        return module

    def become(self, name: str, part: str | None = None, **methods: Any) -> None:
        """Make the model, or a part of it, one of a class that is derived from its own."""
        module = self.model if part is None else self.part(part)
        module.__class__ = type(name, (type(module),), {"__module__": __name__, **methods})

    def see(self, what: str, value: Any) -> None:
        self.log.append((what, tuple(value.shape) if isinstance(value, Tensor) else value))

    def wrapper(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """A function that calls another, notes the shape of what that returns, and changes it a little."""

        @functools.wraps(function)
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            output = function(*args, **kwargs)
            self.see(function.__name__, states_of(output))
            return changed(output)

        return wrapped

    def hook(self, change: Callable[[Any], Any] | None = None) -> Callable[..., Any]:
        """A hook that notes the shape of what a module returns, and changes it."""

        def forward_hook(module: Any, inputs: Any, output: Any) -> Any:
            self.see(type(module).__name__, states_of(output))
            return None if change is None else change(output)

        return forward_hook


def states_of(output: Any) -> Any:
    if isinstance(output, (tuple, list)):
        return output[0]
    for name in ("logits", "last_hidden_state"):
        if name in (output if isinstance(output, dict) else ()):
            return output[name]
    return output


def with_states(output: Any, states: Tensor) -> Any:
    if isinstance(output, (tuple, list)):
        return (states, *output[1:])
    if isinstance(output, dict):
        output["logits" if "logits" in output else "last_hidden_state"] = states
        return output
    return states


def changed(output: Any) -> Any:
    """An output with states a little larger at even places."""
    states = states_of(output)
    factor = 1 + 0.1 * (torch.arange(states.shape[-1]) % 2)
    return with_states(output, states * factor.to(states.dtype))


# ---------------------------------------------------------------------------------------------- the cases
@dataclass(frozen=True)
class Case:
    build: Callable[[User], None]
    families: tuple[str, ...]
    expected: str  # "stock", "accelerated", or "exact": either of the two
    names: tuple[str, ...]  # one of these, or of the modules that were touched, is in the reason
    searches: tuple[str, ...]

    def some_searches(self, number: int, place: int) -> tuple[str, ...]:
        """What to run of case `number` on its model at `place`: all that is on four models, else some, in turn."""
        if place == 0 and (len(self.families) == 4 or len(self.searches) == 1):
            return self.searches
        searches = self.searches[(number + place) % len(self.searches) :] + self.searches
        return searches[:1] if place else searches[:2]


CASES: dict[str, Case] = {}


def case(
    *names: str, on: str = "llama bart", expected: str = "stock", searches: str = "greedy samples beams"
) -> Callable[[Callable[[User], None]], Callable[[User], None]]:
    def register(build: Callable[[User], None]) -> Callable[[User], None]:
        CASES[build.__name__] = Case(build, tuple(on.split()), expected, names, tuple(searches.split()))
        return build

    return register


every = functools.partial(case, on="llama gpt2 bart t5")


# Hooks.
@every()
def collects_states(user: User) -> None:
    user.part("layer", 1).register_forward_hook(user.hook())


@every()
def adds_a_vector_to_each_row(user: User) -> None:
    mlp = user.part("mlp")
    vectors = torch.randn(3 * ROWS, 1, user.model.get_input_embeddings().weight.shape[1])

    def steer(output: Tensor) -> Tensor:
        assert output.shape[0] == user.rows, f"{output.shape[0]} rows instead of {user.rows}"
        return output + vectors[: user.rows]

    mlp.register_forward_hook(user.hook(steer))


@case(on="llama gpt2")
def patches_activations(user: User) -> None:
    """The prompt's last state becomes one that was seen elsewhere."""
    source = torch.randn(3 * ROWS, user.model.get_input_embeddings().weight.shape[1])

    def put(output: Any) -> Any:
        states = states_of(output).clone()
        if states.shape[1] > 1:
            states[:, -1] = source[: states.shape[0]]
        return with_states(output, states)

    user.part("layer").register_forward_hook(user.hook(put))


@every()
def pre_hook_with_keywords(user: User) -> None:
    def before(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        user.see("keywords", sorted(name for name, value in kwargs.items() if value is not None))
        if args:
            return (args[0] * 1.1, *args[1:]), kwargs
        return args, {**kwargs, "hidden_states": kwargs["hidden_states"] * 1.1}

    user.part("attention").register_forward_pre_hook(before, with_kwargs=True)


@case("Llama", "Bart", "hook", on="llama bart")
def hooks_on_the_model(user: User) -> None:
    def before(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        user.see("inputs", kwargs["decoder_input_ids" if user.family == "bart" else "input_ids"])

    user.model.register_forward_pre_hook(before, with_kwargs=True)
    user.model.register_forward_hook(user.hook(changed))


@case()
def hook_on_the_head(user: User) -> None:
    user.part("lm_head").register_forward_hook(user.hook(changed))


@case("embed", on="llama bart")
def hook_on_the_embeddings(user: User) -> None:
    user.part("embedding").register_forward_hook(user.hook(changed))


@case()
def hook_that_always_runs(user: User) -> None:
    user.part("mlp").register_forward_hook(user.hook(changed), always_call=True)


@case(expected="exact")
def hook_on_the_way_back(user: User) -> None:
    user.part("mlp").register_full_backward_hook(lambda module, before, after: None)


@case("hook")
def hook_on_all_modules(user: User) -> None:
    handle = nn.modules.module.register_module_forward_hook(user.hook())
    user.undo.callback(handle.remove)


@case("hook", on="llama")
def hook_before_all_modules(user: User) -> None:
    handle = nn.modules.module.register_module_forward_pre_hook(
        lambda module, inputs: user.see(type(module).__name__, [tuple(value.shape) for value in inputs])
    )
    user.undo.callback(handle.remove)


# The encoder alone: it is read as without fastgen; what follows may be accelerated.
@case(on="bart t5", expected="exact")
def hooks_on_the_encoder(user: User) -> None:
    user.part("encoder").register_forward_hook(user.hook(changed))
    user.part("encoder_mlp").register_forward_hook(user.hook(changed))


@case(on="bart t5", expected="exact")
def forward_in_the_encoder(user: User) -> None:
    mlp = user.part("encoder_mlp")
    mlp.forward = user.wrapper(mlp.forward)


@case(on="bart t5", expected="exact")
def counter_in_the_encoder(user: User) -> None:
    user.replace("encoder_mlp", Counting)


# Forwards of instances.
@every()
def forward_on_the_attention(user: User) -> None:
    attention = user.part("attention")
    attention.forward = user.wrapper(attention.forward)


@case(on="llama")
def attention_of_their_own(user: User) -> None:
    attention = user.part("attention", 1)
    module = sys.modules[type(attention).__module__]

    def forward(self: Any, hidden_states: Tensor, position_embeddings: Any, attention_mask: Any, **others: Any) -> Any:
        rows, length, _ = hidden_states.shape
        states = [
            each(hidden_states).view(rows, length, -1, self.head_dim).transpose(1, 2)
            for each in (self.q_proj, self.k_proj, self.v_proj)
        ]
        query, key = module.apply_rotary_pos_emb(states[0], states[1], *position_embeddings)
        key, value = others[CACHE].update(key, states[2], self.layer_idx)
        key, value = (module.repeat_kv(each, self.num_key_value_groups) for each in (key, value))
        scores = query @ key.transpose(2, 3) * self.scaling
        future = torch.ones(length, key.shape[2]).triu(1 + key.shape[2] - length).bool()
        weights = scores.masked_fill(future, -1e9).softmax(-1)
        user.see("attention", weights)
        return self.o_proj((weights @ value).transpose(1, 2).reshape(rows, length, -1)), None

    attention.forward = types.MethodType(forward, attention)


@every()
def forward_on_the_mlp(user: User) -> None:
    mlp = user.part("mlp", 1)
    mlp.forward = user.wrapper(mlp.forward)


@case("forward")
def forward_on_the_model(user: User) -> None:
    user.model.forward = user.wrapper(user.model.forward)


# What is replaced for all: classes, functions of modules, attention functions.
@every("LlamaMLP", "GPT2MLP", "T5DenseActDense", "Linear")
def forward_of_a_class(user: User) -> None:
    kind = type(user.part("mlp"))
    user.patch.setattr(kind, "forward", user.wrapper(kind.forward))


@case("LlamaMLP", "__call__", on="llama")
def call_of_a_class(user: User) -> None:
    kind = type(user.part("mlp"))
    user.patch.setattr(kind, "__call__", user.wrapper(kind.__call__), raising=False)


@case("LlamaForCausalLM", "BartForConditionalGeneration", "forward")
def forward_of_the_models_class(user: User) -> None:
    kind = type(user.model)
    user.patch.setattr(kind, "forward", user.wrapper(kind.forward))


@case("Linear")
def forward_of_torchs_class(user: User) -> None:
    user.patch.setattr(nn.Linear, "forward", user.wrapper(nn.Linear.forward))


@case("Module", "__call__", on="llama")
def call_of_every_module(user: User) -> None:
    call = nn.Module.__call__

    def noted(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        user.log.append(type(self).__name__)
        return call(self, *args, **kwargs)

    user.patch.setattr(nn.Module, "__call__", noted)


@case("compute_bias", "T5Attention", on="t5")
def method_of_a_class(user: User) -> None:
    kind = type(user.part("attention"))
    user.patch.setattr(kind, "compute_bias", user.wrapper(kind.compute_bias))


@case(on="t5")
def method_of_an_instance(user: User) -> None:
    attention = user.part("attention")
    attention.compute_bias = user.wrapper(attention.compute_bias)


@case(on="llama t5")
def activation_of_their_own(user: User) -> None:
    """An attribute that was one of the host's modules becomes a function."""
    mlp = user.part("mlp")
    name = "act_fn" if user.family == "llama" else "act"
    stock = getattr(mlp, name)
    delattr(mlp, name)
    setattr(mlp, name, lambda states: user.hook(changed)(stock, (), stock(states)))


@case("apply_rotary_pos_emb", on="llama")
def function_of_a_module(user: User) -> None:
    module = sys.modules[type(user.model).__module__]
    stock = module.apply_rotary_pos_emb

    def rotate(query: Tensor, key: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        user.see("rotated", query)
        query, key = stock(query, key, *args, **kwargs)
        return query * 1.1, key

    user.patch.setattr(module, "apply_rotary_pos_emb", functools.wraps(stock)(rotate))


@every("eager_attention_forward")
def eager_function_of_a_module(user: User) -> None:
    module = sys.modules[type(user.model).__module__]
    user.model.set_attn_implementation("eager")
    user.patch.setattr(module, "eager_attention_forward", user.wrapper(module.eager_attention_forward))


@case("sdpa")
def registered_sdpa(user: User) -> None:
    stock = ALL_ATTENTION_FUNCTIONS["sdpa"]
    user.patch.setitem(AttentionInterface._global_mapping, "sdpa", user.wrapper(stock))


@case("sdpa", on="llama")
def sdpa_set_by_item(user: User) -> None:
    stock = ALL_ATTENTION_FUNCTIONS["sdpa"]
    user.patch.setitem(ALL_ATTENTION_FUNCTIONS._local_mapping, "sdpa", user.wrapper(stock))


@case("mine")
def attention_of_a_new_name(user: User) -> None:
    user.patch.setitem(AttentionInterface._global_mapping, "mine", user.wrapper(ALL_ATTENTION_FUNCTIONS["sdpa"]))
    mask = ALL_MASK_ATTENTION_FUNCTIONS["sdpa"]
    user.patch.setitem(type(ALL_MASK_ATTENTION_FUNCTIONS)._global_mapping, "mine", mask)
    user.model.set_attn_implementation("mine")


@case(on="llama bart", expected="exact")
def function_of_torchs(user: User) -> None:
    stock = nn.functional.scaled_dot_product_attention

    def attend(query: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        user.see("query", query)
        return stock(query * 1.1, *args, **kwargs)

    user.patch.setattr(nn.functional, "scaled_dot_product_attention", attend)


# Modules of their own.
class LowRank(nn.Module):
    """A layer with an adapter beside it, written by hand."""

    def __init__(self, base: nn.Module, inputs: int, outputs: int) -> None:
        super().__init__()
        self.base = base
        self.down, self.up = nn.Linear(inputs, 2, bias=False), nn.Linear(2, outputs, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.up(self.down(x))


class Counting(nn.Module):
    """Count calls in a buffer and in an attribute."""

    def __init__(self, base: nn.Module) -> None:
        super().__init__()
        self.base, self.rows_seen = base, []
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        output = self.base(*args, **kwargs)
        self.calls += 1
        self.rows_seen.append(states_of(output).shape[0])
        return self.answer(output)

    def answer(self, output: Any) -> Any:
        return changed(output)


class Fading(Counting):
    """Answer otherwise from call to call, and from the tenth on only: a trial of a few steps sees nothing of it."""

    def answer(self, output: Any) -> Any:
        return output * (1 + 0.2 * max(0, int(self.calls) - 10))


class Drawing(Counting):
    """Draw numbers at every call, whatever the mode."""

    def answer(self, output: Any) -> Any:
        return output + 0.1 * torch.randn_like(output)


class Summing(Counting):
    """Keep the mean of what it has seen in a buffer, which is replaced by another, and give it back."""

    def __init__(self, base: nn.Module) -> None:
        super().__init__(base)
        self.register_buffer("mean", torch.zeros(()))

    def answer(self, output: Any) -> Any:
        self.mean = 0.9 * self.mean + 0.1 * output.mean()
        return output + self.mean


class Named(nn.Module):
    """Do nothing but call what it is put around."""

    def __init__(self, base: nn.Module) -> None:
        super().__init__()
        self.base = base

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.base(*args, **kwargs)


def _sizes(linear: Any) -> tuple[int, int]:
    weight = linear.weight.shape
    return (weight[1], weight[0]) if isinstance(linear, nn.Linear) else (weight[0], weight[1])


@every()
def adapters_written_by_hand(user: User) -> None:
    for layer in range(2):
        user.replace("linear", lambda linear: LowRank(linear, *_sizes(linear)).requires_grad_(False), layer)


@case(on="llama")
def adapter_beside_the_head(user: User) -> None:
    user.replace("lm_head", lambda head: LowRank(head, *_sizes(head)).requires_grad_(False))


@every()
def counting_module(user: User) -> None:
    user.replace("mlp", Counting)


@case()
def fading_module(user: User) -> None:
    user.replace("mlp", Fading)


@case()
def drawing_module(user: User) -> None:
    user.replace("mlp", Drawing)


@case()
def summing_module(user: User) -> None:
    user.replace("mlp", Summing)


@case()
def wrapping_module(user: User) -> None:
    user.replace("mlp", Named, 1)


@every()
def subclass_of_a_linear_layer(user: User) -> None:
    def forward(self: Any, x: Tensor) -> Tensor:
        user.see("linear", x)
        return changed(super(type(self), self).forward(x))

    user.become("OwnLinear", "linear", forward=forward)


@case(on="llama t5 gpt2")
def subclass_of_a_norm(user: User) -> None:
    def forward(self: Any, x: Tensor) -> Tensor:
        self.seen = (*getattr(self, "seen", ()), x.shape[0])
        return changed(super(type(self), self).forward(x))

    user.become("OwnNorm", "norm", forward=forward)


@case(on="llama", expected="exact")
def subclass_of_a_layer_that_sees_attributes(user: User) -> None:
    """A part that answers otherwise when it is asked for one of its weights."""

    def __getattr__(self: Any, name: str) -> Any:
        value = super(type(self), self).__getattr__(name)
        return value * 1.1 if name == "weight" else value

    user.become("Asking", "linear", __getattr__=__getattr__)


# Models of their own.
@case("Stepping", "forward", on="llama gpt2 bart")
def state_between_steps(user: User) -> None:
    """The step goes from one method to another in an attribute, and counts late."""

    def prepare_inputs_for_generation(self: Any, input_ids: Tensor, *args: Any, **kwargs: Any) -> Any:
        self.step = input_ids.shape[1]
        return super(type(self), self).prepare_inputs_for_generation(input_ids, *args, **kwargs)

    @functools.wraps(type(user.model).forward)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        output = super(type(self), self).forward(*args, **kwargs)
        if self.step > (10 if self.config.is_encoder_decoder else 17):
            output.logits[..., 10] += 50.0
        return output

    user.become("Stepping", step=0, prepare_inputs_for_generation=prepare_inputs_for_generation, forward=forward)


@case(expected="exact", on="llama bart t5")
def inputs_prepared_with_state(user: User) -> None:
    def prepare_inputs_for_generation(self: Any, input_ids: Tensor, *args: Any, **kwargs: Any) -> Any:
        self.lengths = (*self.lengths, tuple(input_ids.shape))
        return super(type(self), self).prepare_inputs_for_generation(input_ids, *args, **kwargs)

    user.become("Preparing", lengths=(), prepare_inputs_for_generation=prepare_inputs_for_generation)


@case(expected="exact", on="llama bart")
def inputs_prepared_by_the_instance(user: User) -> None:
    stock = user.model.prepare_inputs_for_generation

    @functools.wraps(stock)
    def prepare(input_ids: Tensor, *args: Any, **kwargs: Any) -> Any:
        user.see("input_ids", input_ids)
        inputs = stock(input_ids, *args, **kwargs)
        if user.family == "llama" and inputs.get("position_ids") is not None:
            inputs["position_ids"] = inputs["position_ids"] + 2
        return inputs

    user.model.prepare_inputs_for_generation = prepare


@case(expected="exact", on="llama bart")
def inputs_updated_with_state(user: User) -> None:
    def _update_model_kwargs_for_generation(self: Any, outputs: Any, *args: Any, **kwargs: Any) -> Any:
        self.updates = getattr(self, "updates", 0) + 1
        self.peaks = (*getattr(self, "peaks", ()), tuple(outputs.logits.shape))
        return super(type(self), self)._update_model_kwargs_for_generation(outputs, *args, **kwargs)

    user.become("Updating", _update_model_kwargs_for_generation=_update_model_kwargs_for_generation)


@case(expected="exact", on="llama", searches="beams")
def search_rules_of_their_own(user: User) -> None:
    def _get_running_beams_for_next_iteration(self: Any, topk_log_probs: Tensor, *args: Any, **kwargs: Any) -> Any:
        self.rounds = getattr(self, "rounds", 0) + 1
        found = super(type(self), self)._get_running_beams_for_next_iteration(topk_log_probs, *args, **kwargs)
        user.see("running", found[0])
        return found

    user.become("Ruling", _get_running_beams_for_next_iteration=_get_running_beams_for_next_iteration)


@case(expected="exact", on="llama", searches="beams")
def search_rules_of_the_instance(user: User) -> None:
    stock = user.model._check_early_stop_heuristic

    def check(*args: Any, **kwargs: Any) -> Any:
        found = stock(*args, **kwargs)
        user.see("early", bool(found.any()))
        return found

    user.model._check_early_stop_heuristic = check


@every(expected="accelerated")
def subclass_with_another_method(user: User) -> None:
    user.become("Told", tell=lambda self: "mine", answers=42)


@every(expected="accelerated")
def harmless_attributes(user: User) -> None:
    user.model.my_note, user.model.my_table = "x", {"a": [1, 2]}
    user.part("mlp").my_note = 3
    user.part("layer").register_buffer("my_buffer", torch.ones(2))


@case(expected="accelerated", on="llama bart")
def nothing_at_all(user: User) -> None:
    """A hook that has been taken off, and a forward that has been deleted."""
    user.part("mlp").register_forward_hook(user.hook(changed)).remove()
    attention = user.part("attention")
    attention.forward = user.wrapper(attention.forward)
    del attention.forward


# Weights that are more than numbers.
class Growing(nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        return changed(weight)


class Scaled(Tensor):
    """A tensor that changes what is computed with it."""

    @classmethod
    def __torch_function__(cls, function: Any, kinds: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is nn.functional.linear:
            with torch._C.DisableTorchFunctionSubclass():
                return changed(function(*args, **(kwargs or {})))
        return super().__torch_function__(function, kinds, args, kwargs)


@case(on="llama gpt2 t5")
def parametrised_weight(user: User) -> None:
    parametrize.register_parametrization(user.part("linear"), "weight", Growing())


@case(expected="exact")
def weight_norm(user: User) -> None:
    linear = parametrizations.weight_norm(user.part("linear"))
    linear.parametrizations.weight.original0.data *= 1.1


@case(expected="exact", on="llama")
def weight_norm_by_a_hook(user: User) -> None:
    linear = nn.utils.weight_norm(user.part("linear").requires_grad_(True))
    linear.weight_g.data *= 1.1


@case(expected="exact", on="llama")
def spectral_norm(user: User) -> None:
    parametrizations.spectral_norm(user.part("linear"))


@case(on="llama bart")
def weight_of_a_subclass(user: User) -> None:
    linear = user.part("linear")
    linear.weight = nn.Parameter(linear.weight.detach().as_subclass(Scaled), requires_grad=False)


# Modules that have been compiled, and wrappers.
@case(on="llama bart")
def traced_module(user: User) -> None:
    width = user.model.get_input_embeddings().weight.shape[1]
    part = "mlp" if user.family == "llama" else "linear"
    user.replace(part, lambda module: torch.jit.trace(module, torch.randn(3, 1, width)))


@case(on="llama")
def symbolically_traced_module(user: User) -> None:
    user.replace("mlp", torch.fx.symbolic_trace)


@case("compile", "Optimized", on="llama", searches="beams")
def compiled_mlp(user: User) -> None:
    user.undo.callback(torch.compiler.reset)
    mlp = user.replace("mlp", lambda mlp: torch.compile(mlp, backend="eager", dynamic=True))
    mlp(torch.randn(3, 1, user.model.config.hidden_size))  # the compiler's first run changes torch's own classes


@functools.cache
def _first_compilation() -> None:
    """The compiler's first run changes torch's own classes."""
    torch.compile(nn.Linear(2, 2), backend="eager")(torch.ones(1, 2))


def _without_compiling(user: User) -> None:
    """What is compiled runs as it is written: compiling a whole model takes half a minute."""
    user.undo.callback(torch.compiler.set_stance, "default")
    _first_compilation()
    torch.compiler.set_stance("force_eager")


@case("compile", on="llama")
def mlp_compiled_in_place(user: User) -> None:
    _without_compiling(user)
    user.part("mlp").compile(backend="eager")


@case(on="llama", expected="exact")
def compiled_model_around(user: User) -> None:
    """Its `generate` is the inner model's: nothing is compiled."""
    user.model = torch.compile(user.model, backend="eager")


@case("compile", "forward", on="llama bart")
def compiled_forward(user: User) -> None:
    _without_compiling(user)
    user.model.forward = torch.compile(user.model.forward, backend="eager")


@case("compile", on="llama bart")
def model_compiled_in_place(user: User) -> None:
    _without_compiling(user)
    user.model.compile(backend="eager")


@case(on="llama", expected="accelerated")
def model_out_of_a_wrapper(user: User) -> None:
    user.model = nn.DataParallel(user.model).module


@case(on="llama")
def wrapper_within(user: User) -> None:
    user.replace("mlp", nn.DataParallel)


@case(on="gpt2 bart", expected="exact")
def dropout_at_generation(user: User) -> None:
    """The model is in evaluation mode, all of its dropout in training mode."""
    for module in user.model.modules():
        if isinstance(module, nn.Dropout):
            module.train()
    if user.family == "bart":
        user.model.config.dropout = 0.1
        for layer in user.model.model.decoder.layers:
            layer.train()


# accelerate's hooks, which are forwards of instances.
def _noting(user: User) -> Any:
    hooks = pytest.importorskip("accelerate.hooks", reason="accelerate is not installed")

    class Noting(hooks.ModelHook):
        def pre_forward(self, module: Any, *args: Any, **kwargs: Any) -> Any:
            user.see("before", type(module).__name__)
            return args, kwargs

        def post_forward(self, module: Any, output: Any) -> Any:
            user.see("after", states_of(output))
            return changed(output)

    return hooks, Noting()


@case()
def hook_of_accelerates(user: User) -> None:
    hooks, hook = _noting(user)
    hooks.add_hook_to_module(user.part("mlp"), hook)


@case("hook", "forward")
def hook_of_accelerates_on_the_model(user: User) -> None:
    hooks, hook = _noting(user)
    hooks.add_hook_to_module(user.model, hook)


@case("forward", "hook", "_hf_hook", "offload", on="llama")
def offloaded_by_accelerate(user: User) -> None:
    accelerate = pytest.importorskip("accelerate", reason="accelerate is not installed")
    accelerate.cpu_offload(user.model, execution_device=torch.device("cpu"))


# ---------------------------------------------------------------------------------------------- a run of a case
@dataclass
class Seen:
    """All that can be observed of a few calls."""

    outputs: list[Any]
    log: list[Any]
    state: dict[str, Any]
    stream: Tensor
    calls: tuple[report.Call, ...]
    touched: list[str]


PLAIN = (bool, int, float, str, bytes, type(None), torch.dtype, torch.device, torch.Size)


def state_of(model: Any) -> dict[str, Any]:
    """What modules hold beside their parameters: buffers, attributes, hooks, modes and configurations."""
    state: dict[str, Any] = {}
    for path, module in model.named_modules():
        state[path, "class"] = type(module).__qualname__
        state[path, "attributes"] = sorted(map(str, vars(module)))
        for name, value in vars(module).items():
            if _is_plain(value) and name != "_torchdynamo_wrapper_id":  # an id, another one for each model
                state[path, name] = copy.deepcopy(value)
            elif name in ("_buffers", "_parameters"):
                state.update({(path, name, key): _copied(tensor) for key, tensor in value.items()})
            elif "hooks" in name:
                state[path, name] = len(value)
    for name in ("config", "generation_config"):
        state["", name] = getattr(model, name).to_dict()
    return state


def _is_plain(value: Any) -> bool:
    if isinstance(value, (list, tuple)):
        return all(map(_is_plain, value))
    return isinstance(value, PLAIN)


def _copied(tensor: Tensor | None) -> Any:
    if tensor is None or tensor.is_meta:
        return tensor if tensor is None else "meta"
    return tensor.detach().as_subclass(Tensor).clone()


def namespaces(model: Any) -> dict[tuple[str, str], int]:
    """What the classes and the modelling modules of a model hold, by identity, and what both are built on."""
    kinds = {kind for module in model.modules() for kind in type(module).__mro__}
    kinds |= {GenerationMixin, AttentionInterface, nn.Linear, Tensor}
    spaces = {kind.__qualname__: vars(kind) for kind in kinds if kind is not object}
    for name in {kind.__module__ for kind in kinds} | {"torch", "torch.nn.functional"}:
        if name.startswith(("transformers", "torch")) and name in sys.modules:
            spaces[name] = vars(sys.modules[name])
    return {
        (space, name): id(value)
        for space, found in spaces.items()
        for name, value in dict(found).items()
        # Of torch's compiler, of copy.deepcopy and of the module `warnings`, which is each free to remember.
        if not name.startswith(("__builtins_dict", "__compiled_fn", "__import_", "__resume_at"))
        and name not in ("__slotnames__", "__warningregistry__")
    }


def options_of(search: str) -> dict[str, Any]:
    return {"max_new_tokens": 12, **SEARCHES[search]}


def arguments(family: str, search: str) -> list[dict[str, Any]]:
    """Two calls: of one sentence with all that can be returned, and of three with padding, returning tokens alone."""
    details = dict(return_dict_in_generate=True, output_scores=True, max_new_tokens=6)
    return [
        {**zoo.inputs_for(family, batch=1), **options_of(search), **details},
        {**zoo.inputs_for(family, batch=3), **options_of(search)},
    ]


def observe(build: Callable[[User], None], family: str, search: str, is_accelerated: bool, **settings: Any) -> Seen:
    """Build a case on a fresh copy of a model, let it generate, and look at what is there afterwards."""
    user = User(family)
    rows = 1 if search == "greedy" else ROWS
    with contextlib.nullcontext() if is_accelerated else fastgen.disabled(), user.undo:
        torch.manual_seed(SEED)
        build(user)
        fastgen.configure(**settings)
        before = namespaces(user.model)
        report.reset()
        torch.manual_seed(SEED)
        outputs = []
        for options in arguments(family, search):
            user.rows = options["input_ids"].shape[0] * rows
            outputs.append(zoo.generate(user.model, options))
        stream = torch.get_rng_state()
        after = namespaces(user.model)
        left = {key for key in before.keys() | after.keys() if before.get(key) != after.get(key)}
        assert not left, f"left behind in classes and modules: {left}"
        return Seen(outputs, user.log, state_of(user.model), stream, report.calls(), user.touched)
