"""Everything is declared in pyproject.toml; here is what it can't express, the optional native operators.

Their sources, csrc/, are copied into the package, where they are compiled at the first use. Where torch is
installed while this runs (`pip install --no-build-isolation`) and a compiler is there, they are compiled now.
The installation never fails for want of either, and FASTGEN_NATIVE=0 leaves the compilers alone.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import shutil
import sys
from pathlib import Path
from types import ModuleType

from setuptools import Distribution, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_py import build_py

HERE = Path(__file__).resolve().parent


def builder() -> ModuleType | None:
    """fastgen/ops/builder.py, by its path: importing the package would load the operators."""
    if os.environ.get("FASTGEN_NATIVE", "").strip() == "0":
        return None
    try:
        if importlib.util.find_spec("torch") is None:
            return None
        spec = importlib.util.spec_from_file_location("fastgen_builder", HERE / "fastgen/ops/builder.py")
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[spec.name] = module
        spec.loader.exec_module(module)
        return module
    except Exception as error:  # whatever a torch may raise that is there but can't be used
        print(f"fastgen: no native operators ahead of time: {error}", file=sys.stderr)
        return None


BUILDER = builder()


class BuildPython(build_py):
    """Adds the C++ sources, and the libraries where they can be compiled."""

    def run(self) -> None:
        super().run()
        package = HERE / "fastgen" if self.editable_mode else Path(self.build_lib) / "fastgen"
        if not self.editable_mode:  # a checkout finds them beside the package
            shutil.copytree(HERE / "csrc", package / "_csrc", dirs_exist_ok=True)
        if BUILDER is not None:
            for library in BUILDER.LIBRARIES:
                self._compile(BUILDER, library, package / "_native")

    def _compile(self, builder: ModuleType, library: str, folder: Path) -> None:
        target = None
        try:
            how = builder.recipe(library)
            target = folder / f"{library}-{builder.source_key(library)}{builder.SUFFIX}"
            builder.build(how, target)
            if library == "cuda":
                target.with_suffix(".arch").write_text(" ".join(builder.cuda_architectures()))
        except builder.Unavailable as reason:
            print(f"fastgen: no {library} operators ahead of time: {reason}", file=sys.stderr)
        except Exception as error:  # an installation must not fail for want of them
            later = "" if os.name == "nt" else "; they will be compiled at the first use"
            print(f"fastgen: {error}\nfastgen: installing without{later}")
            with contextlib.suppress(OSError):
                if log := getattr(error, "log", None):
                    print(log.read_text(errors="replace"), file=sys.stderr)
                if target is not None:
                    for left in folder.glob(f"{target.stem}*"):  # the other library may have succeeded
                        left.unlink()


class BinaryDistribution(Distribution):
    """A wheel for this platform, if it may hold libraries."""

    def has_ext_modules(self) -> bool:
        return BUILDER is not None


class Wheel(bdist_wheel):
    """For every Python: no library uses Python's ABI."""

    def get_tag(self) -> tuple[str, str, str]:
        return "py3", "none", super().get_tag()[2]


setup(cmdclass={"build_py": BuildPython, "bdist_wheel": Wheel}, distclass=BinaryDistribution)
