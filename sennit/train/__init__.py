"""The training loop, optimizers, schedules and what a run records."""

__all__: list[str] = []
