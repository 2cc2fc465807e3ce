"""Typed and bounded reading of config.json; nothing but ConfigError escapes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from twobit.errors import ConfigError

MAX_LAYERS = 1024
MAX_HIDDEN = 1 << 17
MAX_INTERMEDIATE = 1 << 20
MAX_VOCAB = 1 << 22
MAX_HEADS = 1024
MAX_HEAD_DIM = 1024
MAX_CONTEXT = 1 << 27


class Keys:
    """Typed, bounded access to one JSON object; every failure is a ConfigError that names file and key."""

    def __init__(self, values: Mapping[str, Any], file: str, where: str = "") -> None:
        self.values, self.file, self.where = values, file, where

    def error(self, key: str, problem: str, hint: str | None = None) -> ConfigError:
        return ConfigError(f"{self.file}: {self.where}{key}: {problem}", hint)

    def raw(self, key: str) -> Any:
        return self.values.get(key)

    def _required(self, key: str) -> Any:
        value = self.values.get(key)
        if value is None:
            problem = "is null" if key in self.values else "is missing"
            raise self.error(key, problem, "download the model's own config.json again, or add the key")
        return value

    def integer(self, key: str, low: int, high: int) -> int:
        value = self._required(key)
        if not isinstance(value, int) or isinstance(value, bool):
            raise self.error(key, f"must be a whole number, is {show(value)}", "correct the value")
        if not low <= value <= high:
            raise self.error(key, f"must lie in {low}..{high}, is {show(value)}", "correct the value")
        return value

    def optional_integer(self, key: str, low: int, high: int) -> int | None:
        return None if self.raw(key) is None else self.integer(key, low, high)

    def number(self, key: str, low: float, high: float, *, above: bool = False) -> float:
        """A finite number in low..high; with `above`, greater than low."""
        value = self._required(key)
        if not isinstance(value, int | float) or isinstance(value, bool):
            raise self.error(key, f"must be a number, is {show(value)}", "correct the value")
        # NaN fails both comparisons; whole numbers too large for a float are compared exactly
        if not low <= value <= high or (above and not value > low):
            bounds = f"greater than {low:g} and at most {high:g}" if above else f"in {low:g}..{high:g}"
            raise self.error(key, f"must be {bounds}, is {show(value)}", "correct the value")
        return float(value)

    def optional_number(self, key: str, low: float, high: float, *, above: bool = False) -> float | None:
        return None if self.raw(key) is None else self.number(key, low, high, above=above)

    def flag(self, key: str) -> bool:
        value = self._required(key)
        if not isinstance(value, bool):
            raise self.error(key, f"must be true or false, is {show(value)}", "correct the value")
        return value

    def text(self, key: str) -> str:
        value = self._required(key)
        if not isinstance(value, str):
            raise self.error(key, f"must be a text, is {show(value)}", "correct the value")
        return value

    def group(self, key: str) -> Keys:
        value = self._required(key)
        if not isinstance(value, dict):
            raise self.error(key, f"must be an object, is {show(value)}", "correct the value")
        return Keys(value, self.file, f"{self.where}{key}.")


def show(value: Any) -> str:
    """A short form of any JSON value for an error line."""
    if isinstance(value, list | dict):
        return "a list" if isinstance(value, list) else "an object"
    if isinstance(value, int) and not isinstance(value, bool) and value.bit_length() > 128:
        return "a huge number"
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
