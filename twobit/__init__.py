"""Bit-sliced language models: 2 bits draft, 2 bits + residual verify, one lossless answer."""

from __future__ import annotations


def __getattr__(name: str) -> str:
    if name == "__version__":  # looked up when asked for, so that importing twobit stays quick
        from importlib.metadata import PackageNotFoundError, version

        try:
            return version("twobit")
        except PackageNotFoundError:
            return "0+unknown"
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
