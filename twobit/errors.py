"""What can go wrong, by cause. Each error is one line that names the thing, and a hint that says what to do next."""

from __future__ import annotations


class TwobitError(Exception):
    """An expected failure. `str(error)` is the line to show; `hint` says what to do next."""

    def __init__(self, message: str, hint: str | None = None) -> None:
        super().__init__(message)
        self.hint = hint


class UsageError(TwobitError):
    """The command was asked for something that makes no sense (exit code 2)."""


def impossible(name: str, value: object, must: str) -> UsageError:
    """The error about a value of an option: what it `must` be is the next step."""
    return UsageError(f"{name} {shown(value)} is not possible: it must be {must}")


def shown(value: object) -> str:
    """`value` in a message: what is empty or blank would not be seen without quotes."""
    text = str(value)
    return text if text.strip() else repr(text)


class ConfigError(TwobitError):
    """config.json is missing, malformed, inconsistent or of a family that is not supported."""


class CheckpointError(TwobitError):
    """The source checkpoint is incomplete, damaged or not what its config says."""


class CalibrationError(TwobitError):
    """The calibration text cannot be used."""


class FormatError(TwobitError):
    """A twobit model is incomplete, damaged, of another version or of another build."""


class TokenizerError(TwobitError):
    """The tokenizer or the chat template is missing, unsupported or refuses its input."""


class TemplateStopped(TokenizerError):
    """The chat template was ended from outside, by the clock or the system: on another day it might have answered."""


class RuntimeFailure(TwobitError):
    """The C runtime stopped: out of memory, context exhausted, a value that is not finite."""


class HubError(TwobitError):
    """The Hub refuses, or cannot be reached. status: of its answer, None without one; passing: trying again may help,
    after `wait` seconds where the Hub says so."""

    def __init__(self, message: str, hint: str | None = None, status: int | None = None) -> None:
        super().__init__(message, hint)
        self.status = status
        self.passing = False
        self.wait: float | None = None
