"""`python -m sennit.ops.cpu.build` compiles the C++ library in place."""

from __future__ import annotations

from sennit.ops.cpu.library import build


def main() -> None:
    """Compile every variant and name the files."""
    for path in build():
        print(path)


if __name__ == "__main__":
    main()

__all__ = ["main"]
