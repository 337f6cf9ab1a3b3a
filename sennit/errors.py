"""Errors a user can meet. Each message says what is wrong, where, and what to do about it."""

from __future__ import annotations


class SennitError(Exception):
    """Base of every error that is reported as one paragraph instead of a stack trace."""

    exit_code = 2


class ConfigError(SennitError, ValueError):
    """A recipe, an override or a layout that cannot run."""


class DataError(SennitError):
    """A data file, tokenizer or corpus that cannot be used."""


class CheckpointError(SennitError):
    """A checkpoint or exported model that is missing, damaged or of another model."""


class DeviceError(SennitError):
    """A device, dtype or backend that is unknown or absent."""


class ScheduleError(ConfigError):
    """A pipeline schedule that cannot run; the message names rank, position and operation."""


__all__ = ["CheckpointError", "ConfigError", "DataError", "DeviceError", "ScheduleError", "SennitError"]
