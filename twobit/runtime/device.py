"""Accelerators: which one a run uses, and a model's place on it. The GPU drafts, the CPU verifies: docs/hybrid.md."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from twobit.errors import RuntimeFailure
from twobit.runtime import placement
from twobit.runtime.lib import ffi, lib

if TYPE_CHECKING:
    from twobit.runtime.model import Model

PTX = Path(__file__).with_name("kernels.ptx")
"""The kernels for CUDA where NVRTC is missing; scripts/gpu_kernels.py makes it."""
GPU_NODES = ("/dev/dri", "/dev/nvidiactl", "/dev/kfd", "/dev/dxg")
"""Without any of these a Linux has no GPU: then no driver has to be loaded to find out."""
PASS_TOKENS = (2048, 1024, 512, 256)
"""Tokens of a prompt that a pass may take: as many as leave most of the memory to weights."""


class DeviceMissing(RuntimeFailure):
    """There is no such device in this machine: nothing to warn of where none was asked for by name."""


@dataclass(frozen=True)
class Placed:
    """A model on a device. residual_layers: their residual is there too; residual_head: the head's as well; vram: bytes
    allocated for the weights; pass_tokens: most tokens of a pass."""

    device: Device
    residual_layers: int
    residual_head: bool
    vram: int
    pass_tokens: int


class Device:
    """kind: "cuda", "opencl" (a GPU where there is one, else any device), "opencl-gpu" (a GPU with memory of its own)
    or "plain" (the kernels on the CPU, for tests). RuntimeFailure where it is not there or not usable."""

    def __init__(self, kind: str) -> None:
        buffer, absent = ffi.new("char[512]"), ffi.new("int32_t *")
        folder = _cache_folder()
        ptx = PTX.read_bytes() if kind == "cuda" and PTX.exists() else None
        pointer = lib.tb_gpu_open(
            kind.encode(),
            ffi.NULL if folder is None else os.fsencode(folder),
            ffi.NULL if ptx is None else ptx,
            absent,
            buffer,
            512,
        )
        if pointer == ffi.NULL:
            line = ffi.string(buffer).decode("utf-8", "replace")
            raise (DeviceMissing if absent[0] else RuntimeFailure)(line, "--device cpu runs without it")
        self.kind = kind.removesuffix("-gpu")
        self.c_gpu: Any = ffi.gc(pointer, lib.tb_gpu_free)
        self.name = ffi.string(lib.tb_gpu_name(pointer)).decode("utf-8", "replace").strip()
        self.memory = int(lib.tb_gpu_memory(pointer))

    @property
    def used(self) -> int:
        """Bytes allocated on the device."""
        return int(lib.tb_gpu_used(self.c_gpu))


def find(name: str) -> tuple[Device | None, str]:
    """The device that `--device name` means, None for the CPU, and a line of why not where "auto" met one that is not
    usable, else "". By name a device that is missing is a RuntimeFailure."""
    if name == "cpu":
        return None, ""
    if name != "auto":
        return Device(name), ""
    trouble = ""
    if sys.platform == "linux" and not any(Path(node).exists() for node in GPU_NODES):
        return None, ""
    for kind in ("cuda", "opencl-gpu"):
        try:
            return Device(kind), ""
        except DeviceMissing:
            continue
        except RuntimeFailure as error:
            trouble = trouble or str(error)
    return None, trouble


def place(
    model: Model, device: Device, context: int, *, vram: int | None = None, residual_layers: int | None = None
) -> Placed:
    """Put `model` on `device`, for sessions of `context` positions, in `vram` bytes (None: all it has) less
    a margin. residual_layers: None for as many as fit; fewer where the device turns out to have less. RuntimeFailure
    where not even the 2-bit part fits, or so many layers do not."""
    arch = model.architecture
    sizes = placement.Sizes.of(arch, model.packed.manifest.tensors)
    most = device.memory if vram is None else min(vram, device.memory)
    for pass_tokens in PASS_TOKENS:
        session = int(lib.tb_model_session_bytes(model.c_model, context, pass_tokens))
        if session <= most // 6:
            break
    placed = placement.place(
        arch,
        sizes,
        most,
        context=context,
        work=session - placement.cache_bytes(arch, context),
        margin=min(placement.MARGIN, most // 16),
        residual_layers=residual_layers,
    )
    if not placed.hybrid:
        raise RuntimeFailure(
            f"{device.name}: {most / 1e6:.0f} MB are {placed.missing / 1e6:.1f} MB too few for the 2-bit part, "
            f"its cache of {context} tokens and what a pass works in",
            "a smaller --ctx takes less; --device cpu needs none",
        )
    lib.tb_gpu_limit(device.c_gpu, most)
    layers = placed.residual_layers + int(placed.residual_head)
    buffer = ffi.new("char[512]")
    while code := lib.tb_model_place(model.c_model, device.c_gpu, layers, pass_tokens, buffer, 512):
        if code != lib.TB_ENOMEM or layers == 0 or residual_layers is not None:
            raise RuntimeFailure(
                ffi.string(buffer).decode("utf-8", "replace"), "lower --vram or --gpu-residual-layers, or --device cpu"
            )
        layers = layers * 3 // 4  # others use the device too
    model.placed = Placed(device, min(layers, len(arch.layers)), layers > len(arch.layers), device.used, pass_tokens)
    return model.placed


def _cache_folder() -> Path | None:
    """Where compiled kernels are kept; None where that cannot be."""
    try:
        folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "twobit"
        folder.mkdir(parents=True, exist_ok=True)
    except (OSError, RuntimeError):
        return None
    return folder
