"""How much memory this process has taken, and may take."""

from __future__ import annotations

import os
import sys
from pathlib import Path


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


def cgroup_limit(process: Path = Path("/proc/self/cgroup"), root: Path = Path("/sys/fs/cgroup")) -> int | None:
    """The least memory limit in bytes of the control groups around this process (systemd, containers), None: none."""
    try:
        lines = os.fsdecode(process.read_bytes()).split("\n")
    except OSError:
        lines = []
    limits = []
    for line in [*lines, "0::/", "0:memory:/"]:
        _, controllers, path = [*line.split(":", 2), "", ""][:3]
        if not path or (controllers and "memory" not in controllers.split(",")):
            continue
        folder, name = (root / "memory", "memory.limit_in_bytes") if controllers else (root, "memory.max")
        group = folder / path.lstrip("/")  # a container may see the path of its host: then the root is its own group
        for each in (group, *group.parents):
            if each.is_relative_to(folder):
                try:
                    limits.append(int((each / name).read_text(encoding="ascii")))
                except (OSError, ValueError):  # "max"
                    continue
    return min((limit for limit in limits if limit >= 0), default=None)
