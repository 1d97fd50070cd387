"""Tiny models of classes whose default configuration cannot simply be made small, and inputs of their own kinds."""

from __future__ import annotations

import importlib
import pkgutil

from tiny_models.registry import CONFIGURATIONS as CONFIGURATIONS
from tiny_models.registry import INPUTS as INPUTS

for _module in pkgutil.iter_modules(__path__):  # each registers what it knows
    importlib.import_module(f"{__name__}.{_module.name}")
