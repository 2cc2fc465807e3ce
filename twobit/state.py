"""Where twobit keeps what it may lose: chat history, notes of checked downloads, tokenizers said shorter."""

from __future__ import annotations

import os
from pathlib import Path


def state_folder() -> Path:
    """TWOBIT_HOME, else the user's folder for state."""
    if home := os.environ.get("TWOBIT_HOME"):
        return Path(home)
    if os.name == "nt":
        return Path(os.environ.get("LOCALAPPDATA") or Path.home()) / "twobit"
    return Path(os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state") / "twobit"
