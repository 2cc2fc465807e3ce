#!/usr/bin/env python3
"""llama.cpp for comparisons on this machine: its tools, built from the sdist of llama-cpp-python into build/peers.

    python scripts/peers.py                         # build (an hour on one busy core, minutes on eight); once
    python scripts/peers.py --convert CHECKPOINT    # and write CHECKPOINT as GGUF f16 and Q8_0 into build/peers/models

Built with -DGGML_NATIVE=ON, for this processor. Needs cmake, ninja, a C++17 compiler; conversion needs torch,
transformers and gguf. Prints the folder of the binaries, or the path of the Q8_0 file.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tarfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PEERS = ROOT / "build" / "peers"
VERSION = "0.3.36"
SOURCE = PEERS / f"llama_cpp_python-{VERSION}" / "vendor" / "llama.cpp"
BUILD = SOURCE / "build"
BINARIES = BUILD / "bin"
TOOLS = ["bench", "batched-bench", "quantize", "completion", "imatrix", "perplexity", "speculative-simple"]
OPTIONS = [
    "-DCMAKE_BUILD_TYPE=Release",
    "-DGGML_NATIVE=ON",
    "-DBUILD_SHARED_LIBS=OFF",
    "-DLLAMA_OPENSSL=OFF",
    "-DLLAMA_BUILD_TESTS=OFF",
    "-DLLAMA_BUILD_SERVER=OFF",
    "-DLLAMA_BUILD_UI=OFF",
]


def run(*command: str | Path, cwd: Path | None = None, quiet: bool = True) -> None:
    """Runs a command; its output goes to stderr, or with `quiet` only where it fails."""
    words = [str(part) for part in command]
    if not quiet:
        subprocess.run(words, check=True, cwd=cwd, stdout=sys.stderr)
        return
    done = subprocess.run(words, cwd=cwd, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if done.returncode:
        sys.exit(f"{done.stdout}\n{words[0]} failed")


def fetch() -> None:
    """Downloads and unpacks the sdist."""
    if (SOURCE / "CMakeLists.txt").exists():
        return
    PEERS.mkdir(parents=True, exist_ok=True)
    pip = [sys.executable, "-m", "pip", "download", "-q", "--disable-pip-version-check", "--no-deps"]
    sdist = PEERS / f"llama_cpp_python-{VERSION}.tar.gz"
    if not sdist.exists():
        # building the metadata of an sdist needs its build system, which the environment of this project has
        extra = ["--no-build-isolation", "--no-binary", ":all:"]
        run(*pip, *extra, "-d", PEERS, f"llama-cpp-python=={VERSION}")
    with tarfile.open(sdist) as archive:
        archive.extractall(PEERS, filter="data")


def build(jobs: int) -> None:
    """Builds what is not built yet."""
    missing = [f"llama-{tool}" for tool in TOOLS if not (BINARIES / f"llama-{tool}").exists()]
    if not missing:
        return
    if not (BUILD / "build.ninja").exists():
        run("cmake", "-S", SOURCE, "-B", BUILD, "-G", "Ninja", *OPTIONS)
    run("cmake", "--build", BUILD, "-j", str(jobs), "--target", *missing, quiet=False)


def convert(checkpoint: Path) -> Path:
    """GGUF f16 and Q8_0 of a Hugging Face checkpoint; the path of the latter."""
    models = PEERS / "models"
    models.mkdir(parents=True, exist_ok=True)
    half, eight = models / f"{checkpoint.name}-f16.gguf", models / f"{checkpoint.name}-q8_0.gguf"
    for path, command in (
        (half, [sys.executable, SOURCE / "convert_hf_to_gguf.py", checkpoint, "--outtype", "f16", "--outfile"]),
        (eight, [BINARIES / "llama-quantize", half]),
    ):
        if path.exists() and path.stat().st_mtime >= (checkpoint / "config.json").stat().st_mtime:
            continue
        part = path.with_suffix(".part")
        run(*command, part, *(["Q8_0"] if path is eight else []), cwd=SOURCE)
        os.replace(part, path)
    return eight


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--convert", type=Path, metavar="CHECKPOINT")
    parser.add_argument("-j", "--jobs", type=int, default=os.cpu_count() or 1)
    args = parser.parse_args()
    fetch()
    build(args.jobs)
    print(convert(args.convert.resolve()) if args.convert else BINARIES)


if __name__ == "__main__":
    main()
