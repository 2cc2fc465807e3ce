"""The runtime for Windows: cross-compiled without warnings and linked whole. It is not executed here.

Needs Debian's gcc-mingw-w64-x86-64; where it is missing, the test says so.
"""

from __future__ import annotations

import re
import shutil
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import native
import pytest

CROSS = "x86_64-w64-mingw32-gcc"
# What every Windows has, and nothing else: no library of the compiler's has to be shipped.
SYSTEM = {"KERNEL32.dll", "msvcrt.dll", "api-ms-win-crt"}

pytestmark = [pytest.mark.full, pytest.mark.timeout(900)]

if not shutil.which(CROSS):
    pytest.skip(
        f"nothing was compiled for Windows: {CROSS} is missing (Debian: gcc-mingw-w64-x86-64)", allow_module_level=True
    )


def test_the_whole_runtime_compiles_and_links(tmp_path: Path) -> None:
    text = (native.CSRC.parent / "CMakeLists.txt").read_text()
    core = re.search(r"set\(CORE(.*?)\)", text, re.DOTALL)
    assert core
    names = [name.removeprefix("csrc/") for name in core[1].split() if "$" not in name] + [native.gpu_source()]
    assert "os.c" in names and "pool.c" in names
    flags = ["-O1", "-D__USE_MINGW_ANSI_STDIO=1", "-c"]
    units: dict[str, list[str]] = {name: [] for name in names}
    for part in ("kernels", "probe", "ops", "rounding"):
        for level, own in native.X86.items():
            if (native.CSRC / f"{part}_{level}.c").exists():
                units[f"{part}_{level}.c"] = own

    def compile_one(item: tuple[str, list[str]]) -> Path:
        out = tmp_path / f"{item[0].replace('/', '_')}.o"
        # position independent code is all there is on Windows, and the compiler says so
        command = [
            CROSS,
            *(f for f in native.FLAGS if f != "-fPIC"),
            f"-I{native.CSRC}",
            *flags,
            *item[1],
            "-o",
            str(out),
        ]
        done = subprocess.run([*command, str(native.CSRC / item[0])], capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return out

    with ThreadPoolExecutor(2) as pool:
        objects = list(pool.map(compile_one, units.items()))
    program = tmp_path / "model.exe"
    source = Path(__file__).parent / "neon" / "model.c"
    command = [
        CROSS,
        "-std=c11",
        "-O1",
        f"-I{native.CSRC}",
        str(source),
        *map(str, objects),
        "-o",
        str(program),
        "-static",
    ]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    table = subprocess.run(
        ["x86_64-w64-mingw32-objdump", "-p", str(program)], capture_output=True, text=True, check=True
    )
    needed = set(re.findall(r"DLL Name: (\S+)", table.stdout))
    assert needed and all(any(dll.startswith(known) for known in SYSTEM) for dll in needed), needed
