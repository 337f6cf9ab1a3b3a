"""Compiles the optional C++ operators when the package is built. Everything else is in pyproject.toml."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

from setuptools import Distribution, setup
from setuptools.command.build_py import build_py

ROOT = Path(__file__).resolve().parent


def compile_operators(folder: Path) -> None:
    """Build the library into `folder`; without a compiler the package works without it."""
    sys.path.insert(0, str(ROOT))
    path = ROOT / "sennit" / "ops" / "cpu" / "library.py"
    spec = importlib.util.spec_from_file_location("sennit_library", path)
    assert spec is not None and spec.loader is not None
    library = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(library)
    try:
        library.build(folder, ROOT / "csrc")
    except RuntimeError as error:
        print(f"sennit: the C++ operators were not built ({error}); PyTorch's are used instead", file=sys.stderr)


class BuildWithOperators(build_py):
    """build_py that compiles the library into the source tree (editable) or the build folder."""

    def run(self) -> None:
        super().run()
        inside = ROOT if self.editable_mode else Path(self.build_lib)
        compile_operators(inside / "sennit" / "ops" / "cpu" / "lib")


class PlatformDistribution(Distribution):
    """A wheel with compiled files is tied to its platform."""

    def has_ext_modules(self) -> bool:
        return True


setup(cmdclass={"build_py": BuildWithOperators}, distclass=PlatformDistribution)
