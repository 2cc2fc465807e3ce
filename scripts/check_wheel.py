"""Proves a wheel in a fresh environment: `python scripts/check_wheel.py dist/twobit-*.whl [MODEL]`.

The wheel must be one of the stable ABI. In a new virtual environment it is installed with what it depends on, nothing
else, so without torch; there it must load its C runtime, and a model that was quantized elsewhere (MODEL) must give
the token ids that it gives in the environment of this script.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import venv
from pathlib import Path

PROMPT = ["Why is the sky blue?", "-n", "32", "--json"]


def run(*command: str | Path) -> str:
    """Standard output of a command; its errors end the script."""
    environment = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "VIRTUAL_ENV")}
    done = subprocess.run([str(c) for c in command], stdout=subprocess.PIPE, text=True, env=environment, cwd="/")
    if done.returncode:
        sys.exit(f"{' '.join(map(str, command))}: exit code {done.returncode}")
    return done.stdout


def main() -> None:
    """Check the wheel that is named."""
    wheel = Path(sys.argv[1]).resolve()
    model = Path(sys.argv[2]).resolve() if len(sys.argv) > 2 else None
    if "-cp311-abi3-" not in wheel.name:
        sys.exit(f"{wheel.name}: not a wheel of the stable ABI of Python 3.11")
    with tempfile.TemporaryDirectory(prefix="twobit-wheel-") as folder:
        venv.create(folder, with_pip=True)
        bin_ = Path(folder) / ("Scripts" if os.name == "nt" else "bin")
        python = bin_ / "python"
        run(python, "-m", "pip", "install", "-q", "--disable-pip-version-check", wheel)
        print(run(bin_ / "twobit", "--version").strip())
        level = run(python, "-c", "from twobit.runtime.lib import cpu_level; print(cpu_level())").strip()
        print(f"C runtime loaded, kernels {level}")
        run(python, "-c", "import sys, importlib.util as u; sys.exit(u.find_spec('torch') is not None)")
        run(python, "-m", "pip", "check", "--disable-pip-version-check")
        if model is not None:
            fresh = json.loads(run(bin_ / "twobit", "run", model, *PROMPT))
            here = json.loads(run(sys.executable, "-m", "twobit", "run", model, *PROMPT))
            if fresh["token_ids"] != here["token_ids"]:
                sys.exit("the wheel gives other tokens than this environment")
            print(f"{len(fresh['token_ids'])} tokens, the same as here: {fresh['text'][:60]!r}...")
    print(f"{wheel.name}: {wheel.stat().st_size:,} bytes, works in a fresh environment")


if __name__ == "__main__":
    main()
