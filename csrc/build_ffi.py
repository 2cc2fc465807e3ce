"""Write the cffi glue: build_ffi.py OUT.c HEADER... (what is declared between the headers' cdef marks)."""

import re
import sys
from pathlib import Path

import cffi


def main() -> None:
    out, headers = Path(sys.argv[1]), [Path(name) for name in sys.argv[2:]]
    builder = cffi.FFI()
    for header in headers:
        found = re.search(r"/\* cdef-begin \*/(.*?)/\* cdef-end \*/", header.read_text(encoding="utf-8"), re.DOTALL)
        if found is None:
            sys.exit(f"{header}: no cdef marks")
        builder.cdef(found.group(1))
    includes = "\n".join(f'#include "{header.name}"' for header in headers)
    builder.set_source("twobit.runtime._twobit", includes, py_limited_api=True)
    builder.emit_c_code(str(out))


if __name__ == "__main__":
    main()
