"""`twobit plan`: where a model would lie on given hardware, and how fast it would be."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

from twobit.architecture import Architecture
from twobit.cli import options, output
from twobit.cli.command import Argument, Option
from twobit.errors import ConfigError, UsageError
from twobit.format.manifest import Manifest, TensorEntry, parse_json

VRAM_GBS, BUS_GBS, RAM_GBS = 500.0, 25.0, 50.0  # GB/s where a GPU or another processor is named without them
CORES = 8
MOST = 1e6  # of any rate

Tensors = dict[str, TensorEntry]


def plan(
    model: Annotated[
        str, Argument(metavar="MODEL|SRC", help="Model, or a checkpoint: a folder, its config.json, or a Hub id")
    ],
    vram: Annotated[str | None, Option("--vram", metavar="SIZE", help="Memory of the GPU [no GPU]")] = None,
    ram: Annotated[str | None, Option("--ram", metavar="SIZE", help="Memory [this machine's]")] = None,
    ctx: Annotated[int, Option("--ctx", metavar="N", help="Context in tokens")] = options.DEFAULT_CONTEXT,
    ram_gbs: Annotated[
        float | None,
        Option("--ram-gbs", metavar="X", help="Read bandwidth of RAM in GB/s [measured here]"),
    ] = None,
    vram_gbs: Annotated[
        float | None, Option("--vram-gbs", metavar="X", help=f"Bandwidth of VRAM in GB/s [{VRAM_GBS:g}]")
    ] = None,
    bus_gbs: Annotated[
        float | None, Option("--bus-gbs", metavar="X", help=f"Between RAM and VRAM, GB/s [{BUS_GBS:g}]")
    ] = None,
    gmacs: Annotated[
        float | None,
        Option("--gmacs", metavar="X", help="int16 multiply-adds of all cores, 1e9/s [measured here]"),
    ] = None,
    cores: Annotated[
        int | None, Option("--cores", metavar="N", help="Cores of 110 GMAC/s each, instead of --gmacs")
    ] = None,
    acceptance: Annotated[
        float | None,
        Option("--acceptance", metavar="A", help="Chance that a drafted token is accepted [0.8]"),
    ] = None,
    gpu_residual_layers: Annotated[
        str, Option("--gpu-residual-layers", metavar="N|auto", help="Layers that lie in VRAM in full")
    ] = "auto",
    as_json: Annotated[bool, Option("--json", help="One JSON object on stdout")] = False,
) -> int:
    """Predict placement, bytes per step and tokens per second, from headers alone: no weights are read.

    Without --ram-gbs, --gmacs and --cores the processor is this machine's: a made-up model of the same widths runs for
    some seconds. All else is arithmetic over what is named or assumed, docs/plan.md has the formulas.

    \b
    twobit plan ./model
    twobit plan user/model --vram 24GiB --vram-gbs 1008 --ram 64GB --ram-gbs 75 --cores 8
    twobit plan ./checkpoint --vram 12GiB --ctx 4096 --json
    """
    from twobit import predict

    options.integer("--ctx", ctx, 1)
    for name, value in (
        ("--ram-gbs", ram_gbs),
        ("--vram-gbs", vram_gbs),
        ("--bus-gbs", bus_gbs),
        ("--gmacs", gmacs),
    ):
        if value is not None:
            options.number(name, value, 0, MOST, above=True)
    if cores is not None:
        options.integer("--cores", cores, 1, options.MAX_THREADS)
        if gmacs is not None:
            raise UsageError("--cores and --gmacs contradict each other")
    if acceptance is not None:
        options.number("--acceptance", acceptance, 0, 1)
    layers = options.residual_layers(gpu_residual_layers)
    if vram is None and any(v is not None for v in (vram_gbs, bus_gbs, layers)):
        raise UsageError("--vram-gbs, --bus-gbs and --gpu-residual-layers are about a GPU: give its --vram too")
    memory = options.size("--vram", vram) if vram is not None else 0
    here = ram_gbs is None and gmacs is None and cores is None
    total = options.size("--ram", ram) if ram is not None else _ram()
    if total is None:
        raise UsageError("this system does not say how much memory it has: give --ram")
    architecture, tensors = look(model)
    if ctx > max(architecture.max_context, options.DEFAULT_CONTEXT):
        raise UsageError(f"--ctx {ctx} is not possible: this model has {architecture.max_context} positions")

    cpu = passes = None
    sources = {"ram": "given" if ram is not None else "measured"}
    if here:
        if not as_json:
            output.note("measuring this processor with a made-up model of the same widths")
        cpu, passes, ram_gbs, gmacs = _measured(architecture, tensors)
    elif gmacs is None:
        gmacs = (cores or CORES) * predict.CORE_GMACS
        sources["gmacs"] = "assumed"
    sources.setdefault("gmacs", "measured" if here else "given")
    sources["ram_gbs"] = "measured" if here else "assumed" if ram_gbs is None else "given"
    if memory:
        sources |= {"vram": "given", "vram_gbs": "assumed" if vram_gbs is None else "given"}
        sources["bus_gbs"] = "assumed" if bus_gbs is None else "given"
    hardware = predict.Hardware(
        ram=total,
        ram_gbs=RAM_GBS if ram_gbs is None else ram_gbs,
        gmacs=gmacs or 0.0,
        vram=memory,
        vram_gbs=(vram_gbs or VRAM_GBS) if memory else 0.0,
        bus_gbs=(bus_gbs or BUS_GBS) if memory else 0.0,
        sources=sources,
    )
    found = predict.predict(
        architecture,
        tensors,
        hardware,
        context=ctx,
        cpu=cpu,
        acceptance=predict.ACCEPTANCE if acceptance is None else acceptance,
        residual_layers=layers,
        passes=passes,
    )
    if as_json:
        output.result(found.to_json())
    else:
        _show(found, architecture)
    return 0


def look(model: str) -> tuple[Architecture, Tensors]:
    """What a model holds, or would hold when quantized by default, of a folder, a config.json or a Hub id."""
    path = options.local(model, "MODEL")
    if path.is_file():
        config, name = parse_json(path.read_bytes(), str(path)), str(path)
    else:
        found = options.local_or_hub(model)
        if isinstance(found, Path):
            folder = found
        else:
            from twobit import hub
            from twobit.cli.progress import quiet_libraries

            quiet_libraries(True)
            folder = hub.config_of(*found)
        file = folder / "config.json"
        if not file.is_file():
            raise ConfigError(f"{model}: there is no config.json", "give a model, or a Hugging Face checkpoint")
        config, name = parse_json(file.read_bytes(), str(file)), str(file)
    architecture = Architecture.from_config(config, name)
    if isinstance(config.get("quantization_config"), dict):
        tensors = dict(Manifest.from_config(config, name).tensors)
        _check(architecture, tensors, name)
        return architecture, tensors
    from twobit.quant.recipe import Recipe, entries

    return architecture, entries(architecture, Recipe())


def _check(architecture: Architecture, tensors: Tensors, name: str) -> None:
    """The manifest is a stranger's: it must hold the matrices that the rest of config.json speaks of."""
    for spec in architecture.tensors():
        if len(spec.shape) == 2 and not (architecture.tied and spec.role == "embedding"):
            entry = tensors.get(spec.module)
            if entry is None or entry.shape != spec.shape or entry.kind == "plain":
                raise ConfigError(f"{name}: {spec.module} is not what the rest of it says", "download the model again")


def _measured(architecture: Architecture, tensors: Tensors) -> tuple[Any, Any, float, float]:
    """(rates, passes without GPU, read bandwidth, multiply peak) of this machine."""
    import numpy as np

    from twobit import predict, rates

    found = rates.measure(architecture, tensors)
    shape = predict.Shape(architecture, tensors, rates.POSITION)
    everything = shape.draft_bytes + shape.residual_bytes
    known = sorted({1: found.plain_s, **found.verify_s}.items())
    steps = [(known[i + 1][1] - known[0][1]) / (known[i + 1][0] - 1) for i in range(len(known) - 1)]
    per_token = max(float(np.median(steps)), 1e-9)
    cpu = predict.Cpu.measured(everything, shape.matrix_weights, found.plain_s, per_token)

    def verify_s(m: int) -> float:
        if m <= known[-1][0]:
            return float(np.interp(m, [k for k, _ in known], [s for _, s in known]))
        return known[-1][1] + (m - known[-1][0]) * per_token

    return cpu, predict.Passes(found.draft_s, verify_s), found.read_gb_s, found.gmac_s


def _ram() -> int | None:
    try:
        with open("/proc/meminfo", encoding="ascii") as file:
            return next((1024 * int(line.split()[1]) for line in file if line.startswith("MemTotal:")), None)
    except OSError:
        pass
    import os

    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):
        return None


def _show(found: Any, architecture: Architecture) -> None:
    data = found.to_json()
    hardware, placement = data["assumptions"]["hardware"], data["placement"]
    sources, step, llama = data["assumptions"]["sources"], data["bytes_per_step"], data["llama_cpp_q8_0"]
    gb = 1e-9
    rows = [("predicted", "nothing below was measured but what says so")]
    rows.append(
        (
            "CPU",
            f"{hardware['ram'] * gb:.1f} GB of RAM at {hardware['ram_gbs']:.1f} GB/s ({sources['ram_gbs']}), "
            f"{hardware['gmacs']:.0f} GMAC/s ({sources['gmacs']})",
        )
    )
    if hardware["vram"]:
        rows.append(
            (
                "GPU",
                f"{hardware['vram'] * gb:.1f} GB of VRAM at {hardware['vram_gbs']:.0f} GB/s ({sources['vram_gbs']}), "
                f"bus {hardware['bus_gbs']:.0f} GB/s ({sources['bus_gbs']})",
            )
        )
    if placement["vram_bytes"]:
        uses = ", ".join(f"{name} {size * gb:.2f}" for name, size in placement["vram_by_use"].items())
        rows.append(("VRAM", f"{placement['vram_bytes'] * gb:.2f} GB: {uses}"))
        head = " and the head" if placement["gpu_residual_head"] else ""
        count = f"{placement['gpu_residual_layers']} of {len(architecture.layers)} layers{head}"
        rows.append(("", f"residual in VRAM: {count}; context {data['assumptions']['context']:,}"))
    rows.append(("RAM", f"{placement['ram_bytes'] * gb:.2f} GB of weights" + ("" if data["fits"] else ": too much")))
    rows.append(
        (
            "a plain step",
            f"reads {step['vram'] * gb:.2f} GB of VRAM and {step['ram'] * gb:.2f} GB of RAM; "
            f"{step['bus'] * 1e-6:.2f} MB cross the bus",
        )
    )
    speed, draft = data["tokens_per_s"], data["draft"]
    rows.append(("plain", f"{speed['plain']:.2f} tokens/s"))
    rows.append(
        (
            "drafting",
            f"{speed['drafted']:.2f} tokens/s, {draft['depth']} tokens drafted, {draft['tokens_per_step']:.2f} per "
            f"step where {data['assumptions']['acceptance']:.0%} are accepted",
        )
    )
    if draft["overlapped_passes"]:
        rows.append(("", f"{draft['overlapped_passes']:.0f} more passes draft while the CPU verifies"))
    if llama["tokens_per_s"]:
        where = "all in VRAM" if llama["fits_vram"] else "what fits in VRAM" if hardware["vram"] else "on the CPU"
        rows.append(
            ("llama.cpp", f"{llama['tokens_per_s']:.2f} tokens/s, Q8_0, {llama['bytes'] * gb:.1f} GB, {where}, plain")
        )
    rows.append(("advice", data["advice"]))
    output.table(rows)
