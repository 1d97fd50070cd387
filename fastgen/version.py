"""The version of fastgen, where setup and the rest of the package read it."""

__version__ = "0.3.0"
