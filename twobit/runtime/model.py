"""A packed model as the C runtime takes it: planes stay where they are mapped, C gets pointers and sizes."""

from __future__ import annotations

import weakref
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from twobit.architecture import Architecture, Layer
from twobit.errors import RuntimeFailure
from twobit.format.manifest import TensorEntry
from twobit.format.reader import PackedModel, open_model
from twobit.runtime.lib import cpu_level, ffi, lib

if TYPE_CHECKING:
    from twobit.runtime.device import Placed

_ACTIVATIONS = {"silu": "TB_ACT_SILU", "gelu_tanh": "TB_ACT_GELU_TANH", "gelu": "TB_ACT_GELU"}


class Model:
    """An opened twobit model, ready for sessions. Weights are mapped read-only, never copied."""

    def __init__(self, packed: PackedModel, architecture: Architecture | None = None) -> None:
        """architecture: read from config.json if not given."""
        self.packed = packed
        self.config = packed.config
        self.architecture = architecture or Architecture.from_config(packed.config, str(packed.path / "config.json"))
        self.vocab = self.architecture.vocab
        self.draft_only = not any(name.endswith(".residual_codes") for name in packed.planes)
        self.level = cpu_level()
        self.placed: Placed | None = None  # on a device: twobit.runtime.device.place
        self._keep: list[Any] = []
        self._guard()
        buffer = ffi.new("char[512]")
        self.c_model = lib.tb_model_new(self._describe(), buffer, 512)
        if self.c_model == ffi.NULL:
            raise RuntimeFailure(f"{packed.path}: {ffi.string(buffer).decode()}")
        self.c_model = ffi.gc(self.c_model, lib.tb_model_free)

    @classmethod
    def open(cls, path: str | Path, *, draft_only: bool = False) -> Model:
        """draft_only: the 2-bit part alone is read, and all that such a model can compute."""
        return cls(open_model(Path(path), parts="draft" if draft_only else "all"))

    def _guard(self) -> None:
        """A file that becomes shorter while it is mapped must end in an error, not in SIGBUS."""
        mapped: dict[int, np.ndarray] = {}
        for root in (*self.packed.planes.values(), *self.packed.plain.values()):
            while isinstance(root.base, np.ndarray):
                root = root.base
            if isinstance(root, np.memmap):
                mapped[root.ctypes.data] = root
        for address, root in mapped.items():
            pointer = ffi.cast("void *", address)
            lib.tb_guard(pointer, root.nbytes)
            weakref.finalize(root, lib.tb_unguard, pointer).atexit = False

    def lock(self) -> None:
        """Keep the weights in RAM, whatever else wants it. RuntimeFailure where the system's limit is lower."""
        for name, plane in self.packed.planes.items():
            if self.placed is not None and ".draft_" in name:
                continue  # the device has them
            if lib.tb_lock_memory(ffi.from_buffer("uint8_t[]", plane), plane.size):
                raise RuntimeFailure(
                    f"{self.packed.path}: the system does not let this process keep its weights in RAM",
                    "raise the limit (ulimit -l, or memlock in limits.conf), or leave out --mlock",
                )

    # --- numpy arrays to pointers; everything pointed to is kept alive by self._keep ---

    def _pointer(self, kind: str, array: np.ndarray) -> Any:
        pointer = ffi.from_buffer(kind, array)
        self._keep.append((pointer, array))
        return pointer

    def _floats(self, name: str, offset: float = 0.0) -> Any:
        values = self.packed.tensor(name).astype(np.float32) + np.float32(offset)
        return self._pointer("float[]", np.ascontiguousarray(values))

    def _matrix(self, module: str) -> dict[str, Any]:
        entry: TensorEntry = self.packed.manifest.tensors[module]
        planes = self.packed.planes

        def plane(name: str, kind: str = "uint8_t[]") -> Any:
            return self._pointer(kind, planes[f"{module}.{name}"])

        has_residual = bool(entry.residual_bits) and f"{module}.residual_codes" in planes
        rows, cols = entry.shape
        return {
            "rows": rows,
            "cols": cols,
            "draft_bits": entry.draft_bits,
            "residual_bits": entry.residual_bits if has_residual else 0,
            "residual_group": entry.residual_group if has_residual else 0,
            "wide": int(entry.range == "wide"),
            "draft_codes": plane("draft_codes"),
            "draft_scales": plane("draft_scales"),
            "row_scale": plane("row_scale", "float[]"),
            "row_a": plane("row_a"),
            "row_b": plane("row_b", "int8_t[]"),
            "residual_codes": plane("residual_codes") if has_residual else ffi.NULL,
            "residual_scales": plane("residual_scales") if has_residual else ffi.NULL,
            "bias": self._floats(f"{module}.bias") if f"{module}.bias" in self.packed.manifest.tensors else ffi.NULL,
        }

    def _layer(self, layer: Layer, names: dict[str, str]) -> dict[str, Any]:
        """`names`: the layer's tensors by what they do, such as q, down, input_norm, output_scale."""
        c_layer: dict[str, Any] = {
            part: self._matrix(names[part].removesuffix(".weight"))
            for part in ("q", "k", "v", "o", "gate", "up", "down")
            if part in names
        }
        for part in ("input_norm", "q_norm", "k_norm", "post_attention_norm", "pre_ffn_norm", "post_ffn_norm"):
            c_layer[part] = self._floats(names[part], self.architecture.norm_offset) if part in names else ffi.NULL
        scale = self.packed.tensor(names["output_scale"]).item() if layer.output_scale else 1.0
        return c_layer | {
            "n_heads": layer.n_heads,
            "n_kv_heads": layer.n_kv_heads,
            "head_dim": layer.head_dim,
            "qk_norm_whole": int(layer.qk_norm == "whole"),
            "v_norm": int(layer.v_norm),
            "window": layer.window or 0,
            "rope": -1 if layer.rope is None else layer.rope,
            "attention_scale": layer.attention_scale,
            "attention_softcap": layer.attention_softcap or 0.0,
            "output_scale": scale,
        }

    def _describe(self) -> Any:
        arch = self.architecture
        names: list[dict[str, str]] = [{} for _ in arch.layers]
        for spec in arch.tensors():
            if spec.layer is not None and spec.role != "bias":
                names[spec.layer][spec.part] = spec.name
        layers = ffi.new("tb_layer[]", [self._layer(layer, names[layer.index]) for layer in arch.layers])
        frequencies = [self._pointer("float[]", np.asarray(rope.inv_freq, np.float32)) for rope in arch.ropes]
        c_ropes = [
            {"dim": rope.dim, "factor": rope.factor, "inv_freq": pointer}
            for rope, pointer in zip(arch.ropes, frequencies, strict=True)
        ]
        ropes = ffi.new("tb_rope[]", c_ropes or 1)
        description = {
            "n_layers": len(arch.layers),
            "hidden": arch.hidden,
            "intermediate_max": max(layer.intermediate for layer in arch.layers),
            "vocab": arch.vocab,
            "n_ropes": len(arch.ropes),
            "activation": getattr(lib, _ACTIVATIONS[arch.activation]),
            "layers": layers,
            "ropes": ropes,
            "final_norm": self._floats("model.norm.weight", arch.norm_offset),
            "head": self._matrix("lm_head"),
            "embedding_codes": ffi.NULL,
            "embedding_scales": ffi.NULL,
            "embedding_scale": arch.embedding_scale,
            "norm_eps": arch.norm_eps,
            "final_softcap": arch.final_softcap or 0.0,
        }
        if "model.embed_tokens.embedding_codes" in self.packed.planes:
            planes = self.packed.planes
            description["embedding_codes"] = self._pointer("int8_t[]", planes["model.embed_tokens.embedding_codes"])
            description["embedding_scales"] = self._pointer("uint16_t[]", planes["model.embed_tokens.embedding_scales"])
        self._keep += [layers, ropes]
        return ffi.new("tb_model_desc *", description)
