"""`twobit plan`: arithmetic by hand, headers alone, and what is said where another program is the better choice."""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hub_stub import Hub, Repo
from packed import packed_model, source_checkpoint
from test_hub import stub  # noqa: F401 - a fixture

from twobit import predict
from twobit.architecture import Architecture
from twobit.cli.main import main
from twobit.cli.options import size
from twobit.errors import UsageError
from twobit.quant.recipe import Recipe, entries

ROOT = Path(__file__).resolve().parent.parent
CPU = ["--ram", "64GB", "--ram-gbs", "60", "--gmacs", "1280"]
GPU = ["--vram", "16GiB", "--vram-gbs", "672", "--bus-gbs", "25"]


@pytest.fixture(scope="module")
def tables() -> Iterator[Any]:
    sys.path.insert(0, str(ROOT / "bench"))
    try:
        import plan_tables

        yield plan_tables
    finally:
        sys.path.pop(0)


def planned(capfd: Any, *args: str) -> dict[str, Any]:
    assert main(["plan", *args, "--json"]) == 0
    found: dict[str, Any] = json.loads(capfd.readouterr().out)
    return found


def test_the_page_is_what_the_command_prints(tables: Any) -> None:
    page = (ROOT / "docs" / "plan.md").read_text(encoding="utf-8")
    assert page == tables.insert(page), "run `python bench/plan_tables.py --write docs/plan.md`"


def test_tokens_per_step_against_a_simulation() -> None:
    chance = random.Random(0)
    for acceptance, depth in ((0.0, 4), (0.6, 3), (0.9, 12), (1.0, 5)):
        total = 0
        for _ in range(20_000):
            total += 1
            for _ in range(depth):
                if chance.random() >= acceptance:
                    break
                total += 1
        assert predict.tokens_per_step(acceptance, depth) == pytest.approx(total / 20_000, rel=0.02)


def test_the_depth_that_pays_most() -> None:
    assert predict.best_depth(predict.Passes(1.0, lambda m: 1.0), 0.8)[1] == 0  # a draft as dear as a step
    rate, depth = predict.best_depth(predict.Passes(0.01, lambda m: 1.0), 0.8)
    others = [predict.tokens_per_step(0.8, k) / (0.01 * k + 1.0) for k in (depth - 1, depth, depth + 1)]
    assert rate == others[1] == max(others)


def test_a_draft_that_goes_on_by_hand() -> None:
    """Against a count of steps: 4 tokens drafted, room for 5 passes, none or 4 passes spared in the next step."""
    rng = random.Random(1)
    passes = predict.Passes(0.1, lambda m: 1.0, lambda m: 0.55, 0.02)
    total, ready, n = 0.0, False, 40_000
    for _ in range(n):
        total += 1.0 + 5 * 0.02 + (0 if ready else 4 * 0.1)
        accepted = next((i for i in range(4) if rng.random() >= 0.8), 4)
        ready = bool(rng.random() < (0.8 if accepted == 4 else predict.SECOND))
    seconds, overlapped = predict.step_s(passes, 0.8, 4)
    assert overlapped == 5
    assert seconds == pytest.approx(total / n, rel=0.01)
    without = predict.Passes(0.1, lambda m: 1.0)
    assert predict.best_depth(passes, 0.8)[0] > predict.best_depth(without, 0.8)[0]
    dear = predict.Passes(0.1, lambda m: 1.0, lambda m: 0.55, 0.09)
    assert predict.step_s(dear, 0.8, 4) == predict.step_s(without, 0.8, 4)


def test_a_hybrid_step_by_hand(tables: Any) -> None:
    config = tables.MODELS["32B"]
    architecture = Architecture.from_config(config)
    tensors = entries(architecture, Recipe())
    hardware = predict.Hardware(96 * 10**9, 60.0, 1280.0, 24 << 30, 1008.0, 25.0)
    found = predict.predict(architecture, tensors, hardware, context=4096)
    layer = 2 * 5120 * 5120 + 2 * 1024 * 5120 + 3 * 5120 * 27648  # weights
    split = 64 - found.placement.residual_layers
    assert 0 < split < 64 and not found.placement.residual_head
    # 6 bits and a nibble per 16 columns, and nothing else in the residual
    held = found.placement.vram["residual"]
    assert held == pytest.approx((64 - split) * layer * 6.25 / 8, rel=1e-3)
    in_ram = split * layer * 6.25 / 8
    reading, multiplying = in_ram / 51e9, 3.5 * split * layer / 832e9
    cpu = (reading**4 + multiplying**4) ** 0.25
    head = 152064 * 5120
    cpu_head = ((head * 4.25 / 8 / 51e9) ** 4 + (3.5 * head / 832e9) ** 4) ** 0.25
    vram = 0.85 * 1008e9
    gpu = (held + (64 - split) * layer * 2.57 / 8) / vram + 64 * 20e-6
    bus = found.step_bytes["bus"] / 25e9 + (4 * split + 1) * 20e-6
    cache = 64 * 4 * 8 * 128 * (512 + 128) / vram
    assert 1 / found.speed.plain == pytest.approx(cpu + cpu_head + gpu + bus + cache, rel=0.01)
    # q, k, v, gate, up, o and down come back as fp32; four inputs go out as int16
    per_layer = 4 * (5120 + 2048 + 2 * 27648 + 2 * 5120) + 2 * (3 * 5120 + 27648)
    assert found.step_bytes["bus"] == split * per_layer + 4 * 152064 + 2 * 5120


def test_keys_and_sources(capfd: Any) -> None:
    found = planned(capfd, str(packed_model("llama")), *CPU, *GPU)
    assert {"fits", "placement", "bytes_per_step", "tokens_per_s", "advice", "assumptions"} <= found.keys()
    assert {"vram_bytes", "ram_bytes", "gpu_residual_layers"} <= found["placement"].keys()
    assert {"vram", "ram", "bus"} <= found["bytes_per_step"].keys()
    assert found["tokens_per_s"].keys() == {"plain", "drafted"} and found["predicted"] is True
    assert set(found["assumptions"]["sources"].values()) == {"given"}
    assert found["fits"] is True and "llama.cpp" in found["advice"]  # a tiny model fits any card


def test_a_checkpoint_is_planned_as_what_it_becomes(capfd: Any) -> None:
    source, made = source_checkpoint("llama"), packed_model("llama")
    plans = [planned(capfd, str(p), *CPU, *GPU) for p in (source, made, source / "config.json")]
    assert plans[0] == plans[1] == plans[2]


def test_too_little_memory(tables: Any, tmp_path: Path, capfd: Any) -> None:
    file = tmp_path / "config.json"
    file.write_text(json.dumps(tables.MODELS["70B"]))
    found = planned(capfd, str(file), *CPU, *GPU)
    assert found["fits"] is False and "does not fit" in found["advice"] and "lacks" in found["advice"]
    assert found["placement"]["vram_bytes"] == 0 and found["placement"]["vram_missing_bytes"] > 10**9
    assert main(["plan", str(file), *CPU, *GPU]) == 0
    assert "too much" in capfd.readouterr().out


def test_layers_that_are_asked_for(tables: Any, tmp_path: Path, capfd: Any) -> None:
    file = tmp_path / "config.json"
    file.write_text(json.dumps(tables.MODELS["32B"]))
    found = planned(capfd, str(file), *CPU, *GPU, "--gpu-residual-layers", "3")
    assert found["placement"]["gpu_residual_layers"] == 3
    for wrong, code in (("65", 2), ("x", 2), ("60", 1)):
        assert main(["plan", str(file), *CPU, *GPU, "--gpu-residual-layers", wrong]) == code
        assert "--gpu-residual-layers" in capfd.readouterr().err


def test_of_the_hub_only_the_config(stub: Hub, capfd: Any) -> None:  # noqa: F811
    source, made = source_checkpoint("llama"), packed_model("llama")
    for name, folder in (("some/base", source), ("some/base-2bit", made)):
        stub.repos[name] = Repo(files={path.name: path.read_bytes() for path in folder.iterdir()})
    local = planned(capfd, str(made), *CPU)
    assert planned(capfd, "some/base", *CPU) == planned(capfd, "some/base-2bit", *CPU) == local
    got = {r.path.rpartition("/")[2] for r in stub.requests if r.method == "GET" and "/resolve/" in r.path}
    assert "config.json" in got and not [name for name in got if name.endswith(".safetensors")]


def test_this_machine_is_measured(capfd: Any) -> None:
    found = planned(capfd, str(packed_model("llama")))
    sources = found["assumptions"]["sources"]
    assert sources["ram_gbs"] == sources["gmacs"] == "measured"
    assert found["tokens_per_s"]["drafted"] >= found["tokens_per_s"]["plain"] > 0
    assert found["bytes_per_step"]["vram"] == found["bytes_per_step"]["bus"] == 0


def test_a_manifest_that_does_not_fit_its_config(tmp_path: Path, capfd: Any) -> None:
    from twobit.format.manifest import compute_build_id, config_digest

    config = json.loads((packed_model("llama") / "config.json").read_text())
    config["intermediate_size"] += 16
    config["quantization_config"]["config_sha256"] = config_digest(config)
    config["quantization_config"]["build_id"] = compute_build_id(config["quantization_config"])
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert main(["plan", str(tmp_path), *CPU]) == 1
    assert "gate_proj" in capfd.readouterr().err


@pytest.mark.parametrize(
    "args",
    [
        ["--vram", "lots"],
        ["--vram-gbs", "500"],
        ["--ram-gbs", "nan"],
        ["--cores", "8", "--gmacs", "9"],
        ["--acceptance", "1.5"],
        ["--ctx", "0"],
    ],
)
def test_what_makes_no_sense(args: list[str], capfd: Any) -> None:
    assert main(["plan", str(packed_model("llama")), *args]) == 2
    assert args[0] in capfd.readouterr().err
    assert main(["plan", "no/such/folder"]) == 2


def test_sizes() -> None:
    known = {"24GB": 24 * 10**9, "24GiB": 24 << 30, "1.5g": 1_500_000_000, "500 MB": 500_000_000, "0": 0, "7B": 7}
    assert {text: size("--vram", text) for text in known} == known
    for text in ("", "GB", "-1GB", "1e9", "24Gi b", "1ib", "nan", "9" * 30):
        with pytest.raises(UsageError, match="--vram"):
            size("--vram", text)
