"""The commands, a module each."""

import sys

import fastgen
from fastgen import installing

if installing.is_overwritten(fastgen):
    sys.exit(installing.another() or "The package that is imported as fastgen is another project's.")
