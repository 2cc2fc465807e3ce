"""A shard that is cut short while a model is open (class D23): an error that says so, never SIGBUS."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from packed import packed_model

PROGRAM = """
import os, sys
from pathlib import Path
from twobit.errors import RuntimeFailure
from twobit.runtime.model import Model
from twobit.runtime.session import Session

folder, part, kept = Path(sys.argv[1]), sys.argv[2], float(sys.argv[3])
model, other = Model.open(folder), Model.open(Path(sys.argv[4]))
session = Session(model, 64, 2)
session.eval([5, 6, 7])
for file in folder.glob(f"twobit-{part}-*"):
    os.truncate(file, int(file.stat().st_size * kept))
try:
    session.rewind(0)
    session.eval([5, 6, 7])
except RuntimeFailure as error:
    print(error)
"""


@pytest.mark.skipif(os.name == "nt", reason="Windows refuses to cut a file that is mapped")
@pytest.mark.parametrize(("part", "kept"), [("residual", 0.0), ("draft", 0.0), ("residual", 0.5)])
def test_a_shard_that_is_cut_while_open(part: str, kept: float, tmp_path: Path) -> None:
    model = shutil.copytree(packed_model("qwen2"), tmp_path / "model")
    command = [sys.executable, "-c", PROGRAM, str(model), part, str(kept), str(packed_model("llama"))]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, (done.returncode, done.stderr)
    assert "became shorter" in done.stdout


def test_a_fault_elsewhere_is_not_swallowed(tmp_path: Path) -> None:
    """SIGBUS of a mapping that is none of ours ends the process as before."""
    program = (
        "import mmap, os, sys; from pathlib import Path; from twobit.runtime.model import Model\n"
        "model = Model.open(Path(sys.argv[1]))\n"
        "file = open(sys.argv[2], 'r+b'); memory = mmap.mmap(file.fileno(), 1 << 16); os.truncate(file.fileno(), 0)\n"
        "memory[0]\n"
    )
    (tmp_path / "file").write_bytes(bytes(1 << 16))
    command = [sys.executable, "-c", program, str(packed_model("llama")), str(tmp_path / "file")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode < 0
