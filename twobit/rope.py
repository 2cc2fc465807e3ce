"""Rotary embeddings as config.json asks for them, with the fp32 steps of `transformers` (modeling_rope_utils.py)."""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass
from typing import Any

from twobit.config_keys import MAX_CONTEXT, Keys, show
from twobit.families import LAYER_TYPES, ROPE_KINDS, SUPPORTED_LINE, Family


@dataclass(frozen=True)
class Rope:
    """One rotary embedding: dimension i < dim / 2 of a head turns with i + dim / 2 by position * inv_freq[i]."""

    kind: str
    dim: int
    inv_freq: tuple[float, ...]
    """fp32 values, dim / 2 of them; 0 where a dimension does not turn."""
    factor: float
    """Multiplies cos and sin (yarn's attention factor)."""


def _rope_settings(name: str, family: Family, keys: Keys, kind: str) -> Keys:
    """The rotary settings of layers of type `kind`, in transformers 5's spelling, `rope_theta` included.

    Old spelling: rope_theta, rope_scaling (type or rope_type), partial_rotary_factor, gemma3's rope_local_base_freq.
    New: rope_parameters, flat or one object per layer type. A non-empty rope_scaling wins over a flat rope_parameters.
    """
    parameters, scaling = keys.raw("rope_parameters"), keys.raw("rope_scaling")
    if parameters is not None:
        keys.group("rope_parameters")
    if scaling is not None:
        keys.group("rope_scaling")
    per_type = isinstance(parameters, dict) and any(t in parameters for t in LAYER_TYPES)
    where = f"{keys.where}rope_parameters."
    settings: dict[str, Any]
    if name == "gemma3_text":
        if parameters and not per_type:
            raise keys.error(
                "rope_parameters", "must have an object per layer type", "add full_attention and sliding_attention"
            )
        entry = parameters.get(kind) if parameters else None
        if entry is not None:
            entry = keys.group("rope_parameters").group(kind).values
        settings = dict(entry or {})
        if kind == "full_attention":
            settings.update(scaling or {})
        theta = keys.raw("rope_theta" if kind == "full_attention" else "rope_local_base_freq")
        settings.setdefault("rope_theta", theta)
        where = f"{where}{kind}."
    elif name == "gemma4_text":
        if scaling:
            raise keys.error("rope_scaling", "gemma4 has rope_parameters instead", "remove the key")
        if parameters is None:
            settings = (
                {"rope_type": "default", "rope_theta": 10000.0}
                if kind == "sliding_attention"
                else {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1e6}
            )
        else:
            settings = dict(keys.group("rope_parameters").group(kind).values)
        where = f"{where}{kind}."
    else:
        if scaling:
            settings, where = dict(scaling), f"{keys.where}rope_scaling."
        elif per_type:
            settings, where = dict(keys.group("rope_parameters").group(kind).values), f"{where}{kind}."
        else:
            settings = dict(parameters or {})
        settings.setdefault("rope_theta", keys.raw("rope_theta"))
        if keys.raw("partial_rotary_factor") is not None:
            settings.setdefault("partial_rotary_factor", keys.raw("partial_rotary_factor"))
        if keys.raw("original_max_position_embeddings") is not None:
            settings["original_max_position_embeddings"] = keys.raw("original_max_position_embeddings")
    if settings.get("rope_type") is None:
        settings["rope_type"] = settings.get("type", "default")
    return Keys(settings, keys.file, where)


def f32(value: float) -> float:
    """Rounds to the nearest fp32."""
    return float(struct.unpack("<f", struct.pack("<f", value))[0])


def make_rope(name: str, family: Family, keys: Keys, layer_type: str, head_dim: int, max_context: int) -> Rope:
    """Frequencies as modeling_rope_utils computes them, every step rounded to fp32."""
    settings = _rope_settings(name, family, keys, layer_type)
    kind = settings.text("rope_type")
    allowed = ("default",) if name == "phi3" else ROPE_KINDS if name == "gemma4_text" else ROPE_KINDS[:4]
    if kind not in allowed:
        raise settings.error(
            "rope_type", f"{show(kind)} is not supported for {name}", "supported: " + ", ".join(allowed)
        )
    base = settings.number("rope_theta", 1, 1e18, above=True)
    partial = settings.optional_number("partial_rotary_factor", 0, 1, above=True)
    partial = 1.0 if partial is None else partial
    dim = head_dim
    if name == "phi3":
        dim = int(head_dim * partial)
    elif partial != 1.0 and kind != "proportional":
        raise settings.error("partial_rotary_factor", f"is not supported for {name} with {kind} RoPE", SUPPORTED_LINE)
    if dim % 2 or dim == 0:
        raise settings.error("head_dim", f"the rotary part must be even and not empty, is {dim}", "correct head_dim")

    powers = [f32(f32(base) ** f32(i / dim)) for i in range(0, dim, 2)]
    frequencies = [f32(1 / p) for p in powers]
    factor = 1.0
    if kind == "linear":
        by = f32(settings.number("factor", 0, 1e6, above=True))
        frequencies = [f32(f / by) for f in frequencies]
    elif kind == "proportional":
        by = f32(1.0 if settings.raw("factor") is None else settings.number("factor", 0, 1e6, above=True))
        turning = int(partial * head_dim // 2)
        frequencies = [f32(f / by) if i < turning else 0.0 for i, f in enumerate(frequencies)]
    elif kind == "llama3":
        frequencies = _llama3(settings, frequencies, max_context)
    elif kind == "yarn":
        frequencies, factor = _yarn(settings, powers, base, dim, max_context)
    return Rope(kind, dim, tuple(frequencies), factor)


def _original_context(settings: Keys, max_context: int) -> int:
    value = settings.optional_integer("original_max_position_embeddings", 1, MAX_CONTEXT)
    return max_context if value is None else value


def _llama3(settings: Keys, frequencies: list[float], max_context: int) -> list[float]:
    factor = settings.number("factor", 1e-3, 1e6)
    low = settings.number("low_freq_factor", 1e-3, 1e6)
    high = settings.number("high_freq_factor", 1e-3, 1e6)
    original = _original_context(settings, max_context)
    if high <= low:
        raise settings.error("high_freq_factor", "must be greater than low_freq_factor", "correct the value")
    low_wavelength, high_wavelength = f32(original / low), f32(original / high)
    span, by = f32(high - low), f32(factor)
    result = []
    for f in frequencies:
        wavelength = f32(f32(1 / f) * f32(2 * math.pi))
        if wavelength > low_wavelength:
            result.append(f32(f / by))
        elif wavelength < high_wavelength:
            result.append(f)
        else:
            smooth = f32(f32(f32(f32(1 / wavelength) * original) - f32(low)) / span)
            result.append(f32(f32(f32(f32(1 - smooth) * f) / by) + f32(smooth * f)))
    return result


def _yarn(settings: Keys, powers: list[float], base: float, dim: int, max_context: int) -> tuple[list[float], float]:
    original = _original_context(settings, max_context)
    factor = settings.optional_number("factor", 1e-3, 1e6)
    if factor is None:
        factor = max_context / original
    mscale = settings.optional_number("mscale", 0, 1e3)
    mscale_all_dim = settings.optional_number("mscale_all_dim", 0, 1e3)
    attention_factor = settings.optional_number("attention_factor", 0, 1e3, above=True)

    def magnitude(scale: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * scale * math.log(factor) + 1.0

    if attention_factor is None:
        if mscale and mscale_all_dim:
            attention_factor = magnitude(mscale) / magnitude(mscale_all_dim)
        else:
            attention_factor = magnitude(1.0)
    fast = settings.optional_number("beta_fast", 0, 1e6) or 32.0
    slow = settings.optional_number("beta_slow", 0, 1e6) or 1.0
    truncate = True if settings.raw("truncate") is None else settings.flag("truncate")

    def correction(rotations: float) -> float:
        return dim * math.log(original / (rotations * 2 * math.pi)) / (2 * math.log(base))

    low, high = correction(fast), correction(slow)
    if truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    span = f32(high - low if high != low else high + 0.001 - low)
    result = []
    for i, power in enumerate(powers):
        extrapolation, interpolation = f32(1 / power), f32(1 / f32(f32(factor) * power))
        ramp = min(max(f32(f32(i - f32(low)) / span), 0.0), 1.0)
        keep = f32(1 - ramp)
        result.append(f32(f32(interpolation * f32(1 - keep)) + f32(extrapolation * keep)))
    return result, float(attention_factor)
