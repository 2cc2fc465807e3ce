"""Large tokenizer.json files said shorter, so that the next start reads them in half the time.

Many are written with indents, and their merges as pairs, which `tokenizers` takes long to read. The short form lies in
the user's folder for state under the file's path, size and time. It is kept only where `tokenizers` makes the very same
tokenizer of it.
"""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path
from typing import Any

import tokenizers

from twobit.state import state_folder

LEAST = 1 << 18  # bytes of a file that is worth it
KEPT = 16  # short forms, the latest


def read(path: Path) -> bytes | None:
    """The short form of this very file; None where there is none."""
    try:
        stamp = _stamp(path)
        data = _file(stamp).read_bytes()
    except (OSError, ValueError):
        return None
    found, _, text = data.partition(b"\n")
    return text if found == stamp else None


def keep(path: Path) -> bool:
    """Make the short form of a file; returns whether there is one now. Raises nothing: the next start is slower."""
    try:
        stamp = _stamp(path)
        if os.stat(path).st_size < LEAST or read(path) is not None:
            return False
        original = path.read_bytes()
        text = shorter(original)
        if text is None or not _same(original, text) or _stamp(path) != stamp:
            return False
        file = _file(stamp)
        file.parent.mkdir(parents=True, exist_ok=True)
        part = file.with_name(f"{file.name}.{os.getpid()}")
        try:
            part.write_bytes(stamp + b"\n" + text)
            os.replace(part, file)
        finally:
            part.unlink(missing_ok=True)
        others = sorted(file.parent.glob("*.json"), key=lambda p: p.stat().st_mtime)
        for old in others[:-KEPT]:
            old.unlink(missing_ok=True)
    except (OSError, ValueError, RecursionError, MemoryError):
        return False
    return True


def shorter(data: bytes) -> bytes | None:
    """The same JSON in fewer bytes; None for what is no BPE tokenizer, whose numbers might be read otherwise."""
    whole: Any = json.loads(data)
    model = whole.get("model") if isinstance(whole, dict) else None
    if not isinstance(model, dict) or model.get("type") != "BPE":
        return None
    merges = model.get("merges")
    if isinstance(merges, list) and all(isinstance(m, list) and len(m) == 2 for m in merges):
        flat = [piece for pair in merges for piece in pair]
        if all(isinstance(piece, str) and " " not in piece for piece in flat):
            model["merges"] = [" ".join(pair) for pair in merges]
    return json.dumps(whole, ensure_ascii=False, separators=(",", ":"), allow_nan=False).encode()


def _same(one: bytes, other: bytes) -> bool:
    try:
        return tokenizers.Tokenizer.from_buffer(one).to_str() == tokenizers.Tokenizer.from_buffer(other).to_str()
    except Exception:  # tokenizers raises plain Exception
        return False


def _stamp(path: Path) -> bytes:
    """The file by its real path, size and time, and the version of what reads it, on one line."""
    about = os.stat(path)
    known = [os.path.realpath(path), about.st_size, about.st_mtime_ns, tokenizers.__version__]
    return json.dumps(known).encode()


def _file(stamp: bytes) -> Path:
    return state_folder() / "tokenizers" / f"{hashlib.sha256(stamp).hexdigest()[:32]}.json"
