"""How much memory this process has taken, and may take."""

from __future__ import annotations

import sys


def peak_memory() -> int:
    """The most memory that this process has had in RAM, in bytes; 0 where the system does not say."""
    try:  # Linux: ru_maxrss would count the process that started this one as well
        with open("/proc/self/status", encoding="ascii") as status:
            for line in status:
                if line.startswith("VmHWM:"):
                    return int(line.split()[1]) * 1024
    except OSError:
        pass
    try:
        import resource
    except ImportError:  # Windows
        return 0
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def address_space() -> int | None:
    """The limit on this process's address space in bytes, None where there is none."""
    try:
        import resource
    except ImportError:
        return None
    limit = resource.getrlimit(resource.RLIMIT_AS)[0]
    return None if limit == resource.RLIM_INFINITY else limit
