"""The C runtime, as cffi sees it. The only module that imports the extension."""

from __future__ import annotations

from typing import Any

from twobit.errors import RuntimeFailure

try:
    from twobit.runtime._twobit import ffi, lib  # type: ignore[import-not-found]
except ImportError as error:  # pragma: no cover - a broken installation
    raise RuntimeFailure(
        f"the compiled runtime of twobit cannot be loaded ({error})",
        "install twobit again: pip install --force-reinstall twobit",
    ) from error

__all__ = ["call", "cpu_level", "default_threads", "ffi", "lib"]


def call(function: Any, *args: Any) -> None:
    """Call a C function whose last two parameters are an error buffer and its size; raise what it reports."""
    buffer = ffi.new("char[512]")
    code = function(*args, buffer, 512)
    if code == lib.TB_EABORT:
        raise KeyboardInterrupt
    if code != lib.TB_OK:
        raise RuntimeFailure(ffi.string(buffer).decode("utf-8", "replace"))


def cpu_level() -> str:
    """Kernels in use: "generic", "avx2", ... RuntimeFailure if TWOBIT_CPU asks for some that are unavailable."""
    name = lib.tb_cpu_level()
    if name == ffi.NULL:
        raise RuntimeFailure(
            ffi.string(lib.tb_cpu_error()).decode(), "unset TWOBIT_CPU to use the best level of this processor"
        )
    return str(ffi.string(name).decode())


def default_threads() -> int:
    """Usable cores: what the affinity mask and the cgroup quota leave."""
    return int(lib.tb_cpu_threads())
