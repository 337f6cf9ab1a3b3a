"""`python -m sennit` is the command line."""

from sennit.cli.main import main

__all__: list[str] = []

if __name__ == "__main__":
    main()
