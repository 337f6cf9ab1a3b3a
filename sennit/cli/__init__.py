"""The command line: one module a command, each imported only when it is used."""

__all__: list[str] = []
