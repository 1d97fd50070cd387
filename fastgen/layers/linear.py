"""The products of linear layers: with few rows, the decode step on a CPU is its matrix products.

A handful of rows is a matter of reading the weights, which our own operator does from where they are. With more, a
decode multiplies by packed copies. Either only where a timing of the shape says that it pays; and projections that
share an input are one product. The arithmetic is float32 in another order.
"""

from __future__ import annotations

import contextlib
import functools
import math
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import _disable_current_modes

from fastgen import config, locks
from fastgen.layers import checked_products, packed_weights, precision, quantized
from fastgen.layers.input_fusion import FusionGroup, unfusable
from fastgen.layers.product_plan import ProductPlan, bias_of
from fastgen.layers.quantized import Way
from fastgen.layers.timing import Product, is_faster
from fastgen.memory import arena, limits
from fastgen.ops import native_operator

Forward = Callable[[nn.Module, Tensor], Tensor]
Override = Callable[[Tensor, Callable[[], Tensor]], Tensor]  # of rows, and what their product would be

_SKINNY_ROWS = 12  # up to here weights may be read in place: with more, packed products win (bench_products.py)
_FEW_ROWS = 32  # one timing of packed products up to here, another from here on
_MIN_ELEMENTS, _MIN_PRODUCTS = 2**16, 2**20  # below both, calling costs as much as multiplying
_TRIAL_ROWS = 512  # at most, in a timing

# (out, in, rows up to which it holds, threads, "" or what is timed against our own operator) -> whether that operator,
# packing, 16 bits or screening pay
_verdicts: dict[tuple[int, int, int | None, int, str], bool] = {}
_lock = locks.reentrant_lock()


class LinearDispatcher:
    """The products of one call: an object for one thread, packed copies are everyone's.

    `mode`: "auto" leaves stock's product where a timing says so, "always" nowhere, "off" everywhere. `weights`:
    "float32", or "int8" or "bf16" for products with weights in fewer bits, which are others than stock's. `is_users`:
    the user has chosen them, so that outputs may be others.
    """

    def __init__(self, mode: str, weights: str = "float32", is_users: bool = True) -> None:
        self.count = 0  # of those that stock did not do
        self._mode = mode
        self._ways, self._is_users = quantized.WAYS.get(weights), is_users
        self._plans: dict[tuple[int, int], ProductPlan | None] = {}  # by id of a layer and number of rows
        self._siblings = FusionGroup()
        self._families: dict[int, tuple[nn.Module, ...]] = {}  # siblings that need no copies, by id of the first
        self._rows = 0  # of the last product
        self._checked: set[int] = set()  # ids of layers whose copies are up to date
        self._off = mode == "off"
        self._watched: nn.Module | None = None
        self._seen: Tensor | None = None  # the last product of the watched layer,
        self._remembers = False  # while it is to be remembered
        self._is_screened = False  # the watched layer
        self._overrides: dict[nn.Module, Override] = {}
        self._apart: set[nn.Module] = set()  # share no product: it would be for nothing
        self._keeps = True  # what it has made of weights, from product to product

    @classmethod
    def configured(cls) -> LinearDispatcher:
        """As the settings in force here say."""
        settings = config.current()
        return cls(settings.packing, settings.weights)

    def beside(self, weights: str) -> LinearDispatcher:
        """Another of the same call, with `weights` of its own: what one finds up to date, the other takes to be so.

        Overrides and screening are not taken over.
        """
        other = LinearDispatcher(self._mode, weights, is_users=False)
        other._checked, other._keeps = self._checked, self._keeps
        return other

    def __call__(self, layer: nn.Module, rows: Tensor, stock: Forward, transposed: bool = False) -> Tensor:
        """`stock(layer, rows)` or the same product in another way.

        Args:
            layer: has `weight`, `[out, in]` or, if `transposed`, `[in, out]`, and perhaps `bias` `[out]`.
            rows: `[..., in]`.
        """
        if self._overrides and (instead := self._overrides.get(layer)) is not None:
            return instead(rows, lambda: self._product(layer, rows, stock, transposed))
        output = self._product(layer, rows, stock, transposed)
        if self._remembers and layer is self._watched:
            self._seen = output
        return output

    def override(self, layer: nn.Module, instead: Override) -> None:
        """From now on this function's result stands for the layer's products."""
        if layer in self._overrides:
            raise ValueError("a layer's products are put to two uses")
        self._overrides[layer] = instead
        self.exclude_from_fusion(layer)

    def exclude_from_fusion(self, layer: nn.Module) -> None:
        """From now on the layer may not be multiplied by whenever its siblings are."""
        self._apart.add(layer)

    def expect_edits(self) -> None:
        """From now on weights may be edited, or be others, whenever somebody else's code runs: between two steps, say.

        So each product reads its weight then and there: by our own operator for few rows, by stock's, or, where so many
        rows are multiplied that packed copies save more than a reading costs, to see whether the copy is up to date.
        """
        self._keeps = False
        self.look_again()

    def look_again(self) -> None:
        """Weights may have been edited since the last product: find out before the next one."""
        self._plans.clear()
        self._checked.clear()
        self._siblings = FusionGroup()

    def track_output(self, layer: nn.Module | None) -> None:
        """Remember what this layer's next product is, for `screen`."""
        self._watched, self._remembers, self._is_screened = layer, True, False

    def screen(self, wanted: Tensor) -> bool:
        """Whether `wanted` is the last product of the layer watched, and nothing else: if so, of its further products
        only the largest output of each row is wanted, and the others may be -inf."""
        seen, self._seen, self._remembers = self._seen, None, False
        self._is_screened = seen is not None and seen.shape == wanted.shape and bool(torch.equal(seen, wanted))
        self._plans = {key: plan for key, plan in self._plans.items() if key[0] != id(self._watched)}
        return self._is_screened

    def _product(self, layer: nn.Module, rows: Tensor, stock: Forward, transposed: bool) -> Tensor:
        if self._off or rows.dim() < 2 or torch.compiler.is_dynamo_compiling():
            return stock(layer, rows)
        if (output := self._siblings.take(layer, rows)) is not None:
            self.count += 1
            return output
        number = math.prod(rows.shape[:-1])
        if not number:
            return stock(layer, rows)
        if not self._keeps:
            return self._read_anew(layer, rows, number, stock, transposed)
        key = (id(layer), number)
        if key not in self._plans:
            self._plans[key] = self._plan(layer, rows, number, transposed)
        plan = self._plans[key]
        if plan is not None and plan.is_joint and layer in unfusable:
            plan = self._plans[key] = self._plan(layer, rows, number, transposed)
        if plan is None:
            return stock(layer, rows)
        self.count += 1
        if siblings := self._siblings.turn_to(rows):
            self._join(siblings)
        self._rows = number
        output = plan.product(rows, plan.weights, plan.bias)
        if plan.is_joint:
            return self._siblings.split(plan.layers, output)
        if not transposed and not self._screens(layer) and layer not in self._apart:
            self._siblings.note(layer)
        return output

    def _read_anew(self, layer: Any, rows: Tensor, number: int, stock: Forward, transposed: bool) -> Tensor:
        """The product with the weight as it is now, and none of a sibling's with it."""
        if not _is_plain(layer, rows):
            return stock(layer, rows)
        skinny = None if transposed or number > _SKINNY_ROWS else _skinny()
        if skinny is not None and self._pays(layer, rows, False, _SKINNY_ROWS, skinny, lambda weight: [weight]):
            self.count += 1
            output: Tensor = skinny(rows, [layer.weight], layer.bias)
            return output
        kind = checked_products.rows_of_a_kind(number)
        way = checked_products.multiply, functools.partial(checked_products.prepare, transposed=transposed)
        if packed_weights.is_native() and self._pays(layer, rows, transposed, kind, *way, what="checked"):
            self._drop_outdated(layer)
            if (weights := checked_products.weights_of(layer, transposed)) is not None:
                self.count += 1
                return checked_products.multiply(rows, weights, layer.bias)
        return stock(layer, rows)

    def _screens(self, layer: nn.Module) -> bool:
        return self._is_screened and layer is self._watched

    def _join(self, siblings: list[nn.Module]) -> None:
        """Have layers share a product that have just shared an input."""
        plans = [self._plans.get((id(layer), self._rows)) for layer in siblings]
        products = {None if plan is None else plan.product for plan in plans}
        if len(products) > 1:
            return
        if not products.isdisjoint(quantized.ONE_AT_A_TIME):
            return
        if all(plan is not None and plan.takes_lists for plan in plans):
            self._families[id(siblings[0])] = tuple(siblings)
        elif products != {packed_weights.multiply} or not packed_weights.join(siblings):
            return
        joined = set(map(id, siblings))
        self._plans = {key: plan for key, plan in self._plans.items() if key[0] not in joined}

    def _plan(self, layer: nn.Module, rows: Tensor, number: int, transposed: bool) -> ProductPlan | None:
        if not _is_plain(layer, rows):
            if (weight := layer._parameters.get("weight")) is not None and weight.dtype != torch.float32:
                self._drop_outdated(layer)  # copies of what it was before `half`, say
            return None
        if self._ways is not None:
            way = self._ways[0 if number <= _SKINNY_ROWS else 1]
            is_exact = way.product is quantized.multiply_bfloat16 and not transposed
            is_exact = is_exact and packed_weights.dtype_of_halves(layer) is not None  # 16 bits that lose nothing
            if not is_exact and (plan := self._rounded_plan(way, layer, rows, number, transposed)):
                return plan
        skinny = None if transposed or number > _SKINNY_ROWS else _skinny()
        if skinny is not None and self._screens(layer) and (plan := self._screened_plan(layer, rows, skinny)):
            return plan
        if skinny is not None and self._pays(layer, rows, False, _SKINNY_ROWS, skinny, lambda weight: [weight]):
            layers = self._family(layer, rows)
            return ProductPlan(skinny, self._weights(layers, rows, skinny), bias_of(layers), layers)
        return self._packed_plan(layer, rows, number, transposed)

    def _family(self, layer: nn.Module, rows: Tensor) -> tuple[Any, ...]:
        family = self._families.get(id(layer), (layer,))
        return (layer,) if rows.is_inference() or not unfusable.isdisjoint(family) else family

    def _screened_plan(self, layer: nn.Module, rows: Tensor, skinny: Product) -> ProductPlan | None:
        from fastgen import ops

        weight: Tensor = layer.weight  # type: ignore[assignment]

        def screened(rows: Tensor, screening: Any, bias: Tensor | None) -> Tensor:
            output: Tensor = torch.ops.fastgen.screened_linear.default(rows, weight, *screening, bias)
            return output

        over = _in_float32(skinny)
        if not self._pays(layer, rows, False, _SKINNY_ROWS, screened, ops.screen_weight, over, "screening"):
            return None
        self._drop_outdated(layer)
        screening = packed_weights.screening_of(layer)
        return None if screening is None else ProductPlan(screened, screening, bias_of((layer,)), (layer,))

    def _rounded_plan(
        self, way: Way, layer: nn.Module, rows: Tensor, number: int, transposed: bool
    ) -> ProductPlan | None:
        """With the weight in fewer bits, where that is faster and near enough."""
        limit = _SKINNY_ROWS if number <= _SKINNY_ROWS else _FEW_ROWS if number <= _FEW_ROWS else None
        if quantized.unavailable(way.product) is not None:
            return None
        skinny = None if transposed or number > _SKINNY_ROWS else _skinny()
        over = None if skinny is None else _in_float32(skinny)
        if not self._pays(layer, rows, transposed, limit, way.product, way.prepare, over, way.name):
            return None
        layers = self._family(layer, rows) if way.several and not transposed else (layer,)
        weights = self._rounded_weights(way, layers, rows, transposed)
        if weights is None and len(layers) > 1:
            layers = (layer,)
            weights = self._rounded_weights(way, layers, rows, transposed)
        return None if weights is None else ProductPlan(way.product, weights, bias_of(layers), layers)

    def _rounded_weights(self, way: Way, layers: tuple[Any, ...], rows: Tensor, transposed: bool) -> list[Any] | None:
        """Each weight in fewer bits; None if a product would be too far off, or memory is short."""
        weights: list[Any] = []
        for layer in layers:
            self._drop_outdated(layer)
            copy = packed_weights.rounded_of(layer, way.name, way.round, transposed, way.bits)
            if copy is None:
                return None
            is_near = quantized.is_near(layer, copy, way.product, rows[..., :_TRIAL_ROWS, :], transposed)
            if self._is_users:
                quantized.note_chosen(copy)
            if not is_near:
                return None
            weights.append(copy)
        return weights

    def _weights(self, layers: tuple[Any, ...], rows: Tensor, skinny: Product) -> list[Tensor]:
        """The weights for `skinny_linear`: in 16 bits, half as much to read, where that is exact and pays."""
        weights: list[Tensor] = []
        for layer in layers:
            self._drop_outdated(layer)
            exact, half = packed_weights.dtype_of_halves(layer), None
            if exact is not None and self._halves_pay(layer, rows, skinny, exact):
                half = packed_weights.half_of(layer, exact)
            weights.append(layer.weight if half is None else half)
        return weights

    def _halves_pay(self, layer: Any, rows: Tensor, skinny: Product, dtype: torch.dtype) -> bool:
        over = _in_float32(skinny)
        return self._pays(layer, rows, False, _SKINNY_ROWS, skinny, lambda weight: [weight.to(dtype)], over, str(dtype))

    def _drop_outdated(self, layer: nn.Module) -> None:
        if id(layer) not in self._checked:
            packed_weights.drop_outdated(layer)
            self._checked.add(id(layer))

    def are_current(self, later: LinearDispatcher) -> bool:
        """Whether it multiplies by the layers' weights as they are. `later`: has looked at some of them."""
        plans = [plan for plan in self._plans.values() if plan is not None]
        for plan in plans:
            for layer in plan.layers:
                later._drop_outdated(layer)
        return all(plan.is_current() for plan in plans)

    def _packed_plan(self, layer: nn.Module, rows: Tensor, number: int, transposed: bool) -> ProductPlan | None:
        if packed_weights.unavailable() is not None:
            return None
        self._drop_outdated(layer)
        limit = _FEW_ROWS if number <= _FEW_ROWS else None
        if not self._pays(layer, rows, transposed, limit, packed_weights.multiply, packed_weights.pack):
            return None
        joint = None if rows.is_inference() else packed_weights.joint(layer)
        if joint is not None and self._apart.isdisjoint(joint.layers):
            return ProductPlan(packed_weights.multiply, joint.copy, bias_of(joint.layers), joint.layers)
        copy = packed_weights.copy_of(layer, transposed)
        return None if copy is None else ProductPlan(packed_weights.multiply, copy, bias_of((layer,)), (layer,))

    def _pays(
        self,
        layer: Any,
        rows: Tensor,
        transposed: bool,
        limit: int | None,
        product: Product,
        prepare: Callable[[Tensor], Any],
        over: Product | None = None,
        what: str = "",
    ) -> bool:
        """Whether `product`, of what `prepare` makes of a weight `[out, in]`, beats `over`, or else stock's.

        `what`: tells it from others that are timed against `over`.
        """
        if self._mode == "always":
            return True
        weight = layer.weight.detach()
        # A timing decides, so two runs may round differently: not where the user has forbidden that.
        is_small = weight.numel() < _MIN_ELEMENTS and weight.numel() * math.prod(rows.shape[:-1]) < _MIN_PRODUCTS
        if is_small or torch.are_deterministic_algorithms_enabled():
            return False
        weight = weight.t() if transposed else weight
        key = (*_key(weight, limit), what)
        if key not in _verdicts:
            if (available := limits.free()) is not None and 4 * weight.nbytes > available:
                return False  # for now: a trial takes two copies
            try:
                with arena.outside(), _disable_current_modes():  # a mode that records a step is not to see the trial
                    pays = is_faster(product, prepare, weight, rows.flatten(0, -2)[:_TRIAL_ROWS], layer.bias, over)
            except (RuntimeError, MemoryError):  # no memory for the trial
                pays = False
            with _lock:
                _verdicts[key] = pays
        return _verdicts[key]


_skinny = functools.partial(native_operator, "skinny_linear")


def _in_float32(skinny: Product) -> Product:
    """`skinny_linear` with one weight as it is."""
    return lambda rows, weight, bias: skinny(rows, [weight], bias)


def _key(weight: Tensor, limit: int | None) -> tuple[int, int, int | None, int]:
    """The key of the verdict on a weight, `[out, in]`, with up to `limit` rows."""
    return weight.shape[0], weight.shape[1], limit, torch.get_num_threads()


def _is_plain(layer: nn.Module, rows: Tensor) -> bool:
    weight, bias = layer._parameters.get("weight"), layer._parameters.get("bias")
    return (
        type(weight) is nn.Parameter  # quantised and distributed weights are subclasses
        and (weight.dtype, weight.layout) == (rows.dtype, rows.layout) == (torch.float32, torch.strided)
        and weight.device.type == rows.device.type == "cpu"
        and weight.is_contiguous()
        and not weight.is_inference()  # whoever works so has left torch's own signs of an edit behind
        and (bias is None or (type(bias) is nn.Parameter and bias.dtype == torch.float32))
        and not torch.is_grad_enabled()
        and not torch.is_autocast_enabled("cpu")
        and not precision.may_be_rounded_on_cpu()
    )


_thread = threading.local()


@contextlib.contextmanager
def using(products: LinearDispatcher) -> Iterator[None]:
    """Inside the block, `multiply` leaves this thread's products to `products`."""
    outer: LinearDispatcher | None = getattr(_thread, "products", None)
    _thread.products = products
    try:
        yield
    finally:
        _thread.products = outer


def multiply(layer: nn.Module, rows: Tensor, stock: Forward, transposed: bool = False) -> Tensor:
    """`stock(layer, rows)`, in another way where this thread is `using` one."""
    products: LinearDispatcher | None = getattr(_thread, "products", None)
    return stock(layer, rows) if products is None else products(layer, rows, stock, transposed)
