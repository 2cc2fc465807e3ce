"""Which bits go where.

Defaults: the linears of the decoder layers 2 + 6 bits, the head 4 + 4 (with `residual` 8: 2 + 8 and 4 + 6). Rules
change single matrices. An untied input embedding is int8 with an fp16 scale per 32 columns; a tied one is the head.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

from twobit.architecture import Architecture, TensorSpec
from twobit.errors import UsageError
from twobit.format.layout import KINDS
from twobit.format.manifest import TensorEntry

_RULE = re.compile(r"(?P<pattern>.+)=(?P<draft>\d{1,9})\+(?P<residual>\d{1,9})", re.S)


@dataclass(frozen=True)
class Bits:
    """Draft bits, residual bits and columns per residual factor of one matrix."""

    draft: int
    residual: int
    group: int

    @property
    def wide(self) -> bool:
        """Whether the integers need the wide range."""
        return KINDS[self.draft, self.residual].wide

    def __str__(self) -> str:
        return f"{self.draft}+{self.residual}"


@dataclass(frozen=True)
class Rule:
    """Matrices whose canonical name (`model.layers.3.mlp.down_proj`), or an end of it that starts after a dot, matches
    the shell pattern `pattern` get other bits: `down_proj`, `mlp.*`, `layers.[0-3].self_attn.v_proj`."""

    pattern: str
    draft: int
    residual: int

    @classmethod
    def parse(cls, text: str) -> Rule:
        """From `PATTERN=b+R`, for example `down_proj=3+6`. UsageError says what is wrong."""
        match = _RULE.fullmatch(text)
        if match is None:
            raise UsageError(f"rule {text!r} is not of the form PATTERN=b+R", "for example --rule 'down_proj=3+6'")
        rule = cls(match["pattern"], int(match["draft"]), int(match["residual"]))
        if (rule.draft, rule.residual) not in KINDS:
            kinds = ", ".join(f"{b}+{r}" for b, r in KINDS)
            raise UsageError(f"rule {text!r}: {rule.draft}+{rule.residual} bits do not exist", f"one of {kinds}")
        return rule

    def matches(self, name: str) -> bool:
        return fnmatchcase(name, self.pattern) or fnmatchcase(name, f"*.{self.pattern}")

    def __str__(self) -> str:
        return f"{self.pattern}={self.draft}+{self.residual}"


@dataclass(frozen=True)
class Recipe:
    """The bits of every matrix. The last rule that matches a name decides."""

    residual: int = 6
    residual_group: int = 16
    rules: tuple[Rule, ...] = ()

    def __post_init__(self) -> None:
        if self.residual not in (6, 8):
            raise UsageError(f"--residual {self.residual} is not 6 or 8")
        if self.residual_group not in (16, 32):
            raise UsageError(f"--residual-group {self.residual_group} is not 16 or 32")

    def bits(self, name: str, role: str) -> Bits:
        """Bits of the matrix `name` (canonical, without `.weight`); `role` is "linear" or "head"."""
        draft, residual = (4, self.residual - 2) if role == "head" else (2, self.residual)
        for rule in self.rules:
            if rule.matches(name):
                draft, residual = rule.draft, rule.residual
        return Bits(draft, residual, self.residual_group)

    def check(self, names: Iterable[str]) -> None:
        """UsageError where a rule matches none of the model's matrices: it would silently do nothing."""
        names = list(names)
        for rule in self.rules:
            if not any(map(rule.matches, names)):
                known = dict.fromkeys(re.sub(r"\.\d+\.", ".N.", name) for name in names)
                raise UsageError(f"rule {str(rule)!r} matches no matrix of this model", f"one of {', '.join(known)}")

    def to_json(self) -> dict[str, Any]:
        """What the manifest records."""
        defaults = Recipe(self.residual, self.residual_group)
        return {
            "linear": str(defaults.bits("", "linear")),
            "head": str(defaults.bits("", "head")),
            "embedding": "int8",
            "residual_group": self.residual_group,
            "rules": [str(rule) for rule in self.rules],
        }


def entries(
    architecture: Architecture, recipe: Recipe, dtype: Callable[[TensorSpec], str] = lambda spec: "F32"
) -> dict[str, TensorEntry]:
    """What a model made by `recipe` holds, in the model's order, without checksums. dtype: of a tensor that is stored
    as it came."""
    found: dict[str, TensorEntry] = {}
    for spec in architecture.tensors():
        if spec.role in ("linear", "head"):
            bits = recipe.bits(spec.module, spec.role)
            which = "wide" if bits.wide else "narrow"
            found[spec.module] = TensorEntry("matrix", spec.shape, {}, bits.draft, bits.residual, bits.group, which)
        elif spec.role == "embedding":
            if not architecture.tied:
                found[spec.module] = TensorEntry("embedding", spec.shape, {})
        else:
            found[spec.name] = TensorEntry("plain", spec.shape, {}, dtype=dtype(spec))
    return found
