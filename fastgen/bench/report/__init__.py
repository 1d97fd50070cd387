"""The report of a run: one HTML page, and a table for the terminal."""

from fastgen.bench.report.image import png
from fastgen.bench.report.page import render, write
from fastgen.bench.report.summary import table

__all__ = ["png", "render", "table", "write"]
