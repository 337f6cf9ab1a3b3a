"""Own C++ operators for the CPU."""


def register_all() -> None:
    """Register the providers."""
