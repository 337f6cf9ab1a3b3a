"""What a run's checkpoints hold, and which checkpoints a run may go on from."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sennit.errors import CheckpointError, ConfigError

if TYPE_CHECKING:
    from sennit import checkpoint
    from sennit.train.trainer import Trainer

logger = logging.getLogger(__name__)


def save_run(
    trainer: Trainer, run_dir: Path, group: Any, data_fingerprint: str, tokenizer: Any
) -> checkpoint.SavedCheckpoint:
    """Save the trainer's state as `checkpoints/step-N` of the run. Collective."""
    from sennit import checkpoint  # with what it stands on, a tenth of a small run's memory: not before it is needed

    meta = {
        "progress": trainer.progress(),
        "recipe": trainer.recipe.to_toml(),
        "data_fingerprint": data_fingerprint,
        "tokenizer_fingerprint": getattr(tokenizer, "fingerprint", ""),
        "vocab_size": trainer.config.vocab_size,
        "parameters": trainer.config.num_parameters,
    }
    return checkpoint.save(
        run_dir / "checkpoints", trainer.step, trainer.state(), meta=meta, keep=trainer.recipe.checkpoint.keep, group=group
    )


def resume_run(trainer: Trainer, run_dir: Path, group: Any, data_fingerprint: str) -> Path | None:
    """Load the checkpoint that `checkpoint.resume` asks for and return its path, or None for a fresh start.

    auto: the newest verified one of the run directory, if any. latest: the same, but required. none: never.
    A path: that checkpoint, or the newest of that run. Raises CheckpointError if it is damaged, missing or of another
    model, and ConfigError if the data or the batch changed so that the position in the data would be lost.
    """
    wanted = trainer.recipe.checkpoint.resume
    if wanted == "none":
        return None
    root = run_dir / "checkpoints"
    if wanted == "auto" and not root.is_dir():
        return None
    from sennit import checkpoint

    path: Path | None
    if wanted in ("auto", "latest"):
        found = checkpoint.open_latest(root, group=group)
        path = None if found is None else found.path
        if path is None and wanted == "latest":
            raise CheckpointError(
                f"checkpoint.resume is latest, but {root} holds no complete checkpoint. Train first, "
                f"or set checkpoint.resume to auto or to the path of a checkpoint."
            )
    else:
        path = checkpoint.resolve(Path(wanted), group)
    if path is None:
        return None
    meta = checkpoint.read_meta(path)
    check_same_data(trainer, meta, data_fingerprint, path)
    state = trainer.state()
    checkpoint.load(path, state, group=group)
    trainer.restore(meta["progress"], state["random"]["cpu"])
    return path


def check_same_data(trainer: Trainer, meta: dict[str, Any], data_fingerprint: str, path: Path) -> None:
    """Refuse to go on where the position in the data would mean something else; warn about a changed schedule."""
    from sennit.recipe import parse_recipe

    old, new = parse_recipe(meta["recipe"]), trainer.recipe
    problems = []
    for field in ("global_batch_size", "seq_len"):
        before, now = getattr(old.train, field), getattr(new.train, field)
        if before != now:
            problems.append(f"train.{field} was {before} and is now {now}")
    if old.run.seed != new.run.seed:
        problems.append(f"run.seed was {old.run.seed} and is now {new.run.seed}")
    if meta.get("data_fingerprint") != data_fingerprint:
        problems.append("data.source, data.tokenizer or the data files themselves have changed")
    if problems:
        raise ConfigError(
            f"The run cannot go on from {path}: {'; '.join(problems)}. The order of the data follows from these, so "
            f"restore them, or start a new run from its weights with --model.init_from {path} and another --run.dir."
        )
    if old.lr != new.lr or old.train.steps != new.train.steps:
        logger.warning(
            "the learning-rate schedule differs from the one in %s; from here on the new one holds, as a function of "
            "the step number",
            path,
        )


__all__ = ["check_same_data", "resume_run", "save_run"]
