"""Everything is declared in pyproject.toml.

This file is the place of the optional native operators: they need a compiler and the installed torch,
which no build requirement can express, so the package must always install without them.
"""

from setuptools import setup

setup()
