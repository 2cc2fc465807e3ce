"""The kernels as one text, every include in its place: expand.py OUT (a .c file that holds it, or the text itself)."""

import re
import sys
from pathlib import Path

HERE = Path(__file__).parent


def expand(path: Path = HERE / "kernels.inc") -> str:
    """The text of `path` with the texts of what it includes in place, without comments and blank lines."""

    def include(match: re.Match[str]) -> str:
        return read(path.parent / match[1])

    def read(source: Path) -> str:
        text = re.sub(r"/\*.*?\*/", " ", source.read_text(encoding="utf-8"), flags=re.DOTALL)
        if source.name == "map.h":  # what plain C alone needs has no place on a device
            text = re.sub(r"#else\s*\n\s*#include <math.h>.*?#endif\n", "#endif\n", text, flags=re.DOTALL)
        return re.sub(r'^#include "([^"]+)"$', lambda m: read(source.parent / m[1]), text, flags=re.MULTILINE)

    text = re.sub(r'^#include "([^"]+)"$', include, read(path), flags=re.MULTILINE)
    return "".join(re.sub(r"[ \t]+", " ", line).strip() + "\n" for line in text.splitlines() if line.strip())


def main() -> None:
    out, text = Path(sys.argv[1]), expand()
    if out.suffix == ".c":
        data = [str(byte) for byte in text.encode()] + ["0"]
        rows = ",\n".join(",".join(data[i : i + 64]) for i in range(0, len(data), 64))
        text = (
            "#include <stddef.h>\nextern const char tbg_source[];\nextern const size_t tbg_source_bytes;\n"
            f"const char tbg_source[] = {{\n{rows}}};\nconst size_t tbg_source_bytes = {len(data) - 1};\n"
        )
    out.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
