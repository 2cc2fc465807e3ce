"""docs/quality.md says what its results say."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def test_the_page_is_what_its_command_prints() -> None:
    command = [sys.executable, str(ROOT / "bench" / "quality.py"), "page"]
    printed = subprocess.run(command, check=True, stdout=subprocess.PIPE, timeout=120).stdout.decode()
    assert printed == (ROOT / "docs" / "quality.md").read_text(encoding="utf-8")
