"""The device's kernels compiled by nvcc: makes twobit/runtime/kernels.ptx, or with --table prints what they take.

Without arguments the PTX is made again; it has the ISA version 7.0, so that drivers from CUDA 11.0 on take it: ptxas
then checks that nothing newer is used. --table compiles it for each kind of GPU and prints registers, shared memory and
bytes read per weight, and fails where a kernel keeps registers in memory. Nothing is run: no GPU is needed.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.util
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parent.parent
PTX = ROOT / "twobit" / "runtime" / "kernels.ptx"
TARGETS = ("sm_75", "sm_86", "sm_89", "sm_90", "sm_120")
ISA = "7.0"


def source() -> str:
    """The kernels with every include in its place."""
    spec = importlib.util.spec_from_file_location("expand", ROOT / "csrc" / "gpu" / "expand.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return str(module.expand())


def fingerprint(kernels: str) -> str:
    """What the PTX says that it was made of."""
    return hashlib.sha256(kernels.encode()).hexdigest()


def run(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"{' '.join(command)}\n{done.stdout}{done.stderr}")
    return done.stdout + done.stderr


def make_ptx() -> str:
    """PTX for compute capability 7.5 and later, without nvcc's comments."""
    kernels = source()
    with tempfile.TemporaryDirectory() as name:
        path, out = Path(name) / "twobit.cu", Path(name) / "twobit.ptx"
        path.write_text(kernels)
        run("nvcc", "-ptx", "-arch=compute_75", "-fmad=false", "-o", str(out), str(path))
        text = re.sub(r"^\.version .*$", f".version {ISA}", out.read_text(), flags=re.MULTILINE)
    lines = (re.sub(r"[ \t]+", " ", line.split("//")[0]).strip() for line in text.splitlines())
    return f"// twobit kernels, made by scripts/gpu_kernels.py; source {fingerprint(kernels)}\n" + "".join(
        f"{line}\n" for line in lines if line
    )


def resources(ptx: str, target: str) -> dict[str, tuple[int, int, int]]:
    """Kernel -> (registers, bytes of shared memory, bytes spilled) on such a GPU."""
    with tempfile.TemporaryDirectory() as name:
        path = Path(name) / "twobit.ptx"
        path.write_text(ptx)
        text = run("ptxas", f"-arch={target}", "-v", "-o", str(Path(name) / "out"), str(path))
    found = {}
    for block in text.split("Compiling entry function '")[1:]:
        registers = re.search(r"Used (\d+) registers", block)
        shared = re.search(r"(\d+) bytes smem", block)
        spills = re.search(r"(\d+) bytes spill stores, (\d+) bytes spill loads", block)
        assert registers is not None and spills is not None
        found[block.split("'")[0]] = (
            int(registers[1]),
            int(shared[1]) if shared else 0,
            int(spills[1]) + int(spills[2]),
        )
    return found


def bytes_per_weight(kernel: str) -> str:
    """Of planes, per weight and group of tokens: codes, and scales per 16 columns (s and m: 8 bits, f: 4)."""
    match = re.match(r"(draft|residual)(\d)", kernel)
    return f"{(int(match[2]) + (8 if match[1] == 'draft' else 4) / 16) / 8:.4f}" if match else ""


def table() -> int:
    ptx = PTX.read_text()
    found = {target: resources(ptx, target) for target in TARGETS}
    print(f"| kernel | registers on {', '.join(TARGETS)} | shared bytes | spilled | bytes/weight |")
    print("|---|---|---:|---:|---:|")
    worst = 0
    for kernel in sorted(found[TARGETS[0]]):
        of = [found[target][kernel] for target in TARGETS]
        spilled = max(spill for _, _, spill in of)
        worst = max(worst, spilled)
        registers = ", ".join(str(count) for count, _, _ in of)
        print(f"| {kernel} | {registers} | {max(s for _, s, _ in of)} | {spilled} | {bytes_per_weight(kernel)} |")
    return 1 if worst else 0


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--table", action="store_true", help="registers and memory of the PTX on each kind of GPU")
    options = parser.parse_args()
    for tool in ("nvcc", "ptxas"):
        if shutil.which(tool) is None:
            sys.exit(f"{tool} is not installed: it comes with the CUDA toolkit")
    if options.table:
        return table()
    PTX.write_text(make_ptx())
    print(f"{PTX.relative_to(ROOT)}: {PTX.stat().st_size:,} bytes")
    return 0


if __name__ == "__main__":
    sys.exit(main())
