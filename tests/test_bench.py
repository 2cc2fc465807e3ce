"""`twobit bench` on a tiny model: the documented keys, the three forms, probes that make sense. Not how fast it is."""

from __future__ import annotations

import csv
import json
from typing import Any

import pytest
from packed import packed_model

from twobit import benchmark
from twobit.cli import bench as command
from twobit.cli.main import main
from twobit.errors import UsageError
from twobit.runtime.lib import ffi, lib
from twobit.runtime.model import Model

TINY = ["-p", "24", "-n", "6", "-r", "2", "-t", "1,2"]


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Less memory and fewer rounds than a measurement would need."""
    monkeypatch.setattr(benchmark, "_beyond_cache", lambda: 1 << 20)
    monkeypatch.setattr(benchmark, "ROUNDS", 2)
    monkeypatch.setattr(benchmark, "SAMPLE_S", 2e-5)
    monkeypatch.setattr(benchmark, "READ_BYTES", 1 << 16)


def run(capsys: pytest.CaptureFixture[str], *args: str, codes: tuple[int, ...] = (0,)) -> str:
    # what fits a cache may beat the probe: then the run is flagged, as it should
    assert main(["bench", *args]) in codes
    return capsys.readouterr().out


def test_json_has_the_documented_keys(capsys: pytest.CaptureFixture[str]) -> None:
    model = str(packed_model("llama"))
    data: dict[str, Any] = json.loads(run(capsys, model, *TINY, "--kernels", "--json", codes=(0, 1)))
    assert data["probe"]["read_gb_s"] > 0 and data["probe"]["gmac_s"] > 0
    assert data["machine"]["kernel"] == Model.open(model).level and data["machine"]["cpu"]
    assert [p["threads"] for p in data["probes"]] == [1, 2] and data["probe"] == data["probes"][1]
    assert all(p["streams"] in (1, 2, 4) and p["draft_gmac_s"] > 0 for p in data["probes"])
    expected = [("pp24", False), ("tg6", False), ("tg6", True)]
    assert [(r["test"], r["draft"], r["threads"]) for r in data["results"]] == [
        (*e, n) for n in (1, 2) for e in expected
    ]
    for row in data["results"]:
        assert row["tokens_per_s"] > 0 and row["spread"] >= 0
    assert all(r["tokens_per_step"] == 1 for r in data["results"] if r["test"] == "tg6" and not r["draft"])
    shapes = {(k["rows"], k["cols"]) for k in data["kernels"]}
    manifest = Model.open(model).packed.manifest
    assert shapes == {entry.shape for entry in manifest.tensors.values() if entry.kind == "matrix"}
    for row in data["kernels"]:
        assert row["op"] in benchmark.OPS and row["m"] in benchmark.TOKENS and row["threads"] in (1, 2)
        assert row["seconds"] > 0 and row["roofline_fraction"] > 0
        assert row["m"] > 1 or row["ratio_to_m1"] == 1
    assert data["valid"] == all(k["roofline_fraction"] <= 1 for k in data["kernels"])


def test_table_and_csv_show_the_same_rows(capsys: pytest.CaptureFixture[str]) -> None:
    model = str(packed_model("llama"))
    table = run(capsys, model, "-p", "9", "-n", "0", "-r", "1", "-t", "1")
    assert "| pp9 | no | 1 |" in table and "probe, 1 thread: reads" in table and "tg" not in table
    rows = list(csv.DictReader(run(capsys, model, *TINY, "--format", "csv").splitlines()))
    assert [row["test"] for row in rows] == ["pp24", "tg6", "tg6"] * 2 and float(rows[0]["tokens_per_s"]) > 0
    both = run(capsys, model, "-p", "9", "-n", "0", "-r", "1", "--kernels", "--format", "csv", codes=(0, 1))
    first, second = both.split("\n\n")
    assert first.startswith("test,") and second.startswith("op,threads,rows,cols,")


@pytest.mark.parametrize("variant", ["gemma3_text", "qwen3"])
def test_windows_and_other_families(variant: str, capsys: pytest.CaptureFixture[str]) -> None:
    out = run(capsys, str(packed_model(variant)), "-p", "40", "-n", "20", "-r", "1", "-t", "1", "--json")
    assert len(json.loads(out)["results"]) == 3


def test_a_fraction_above_one_is_flagged(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    row = {"op": "draft", "rows": 1, "cols": 2, "m": 1, "threads": 1, "roofline_fraction": 1.01}
    report = benchmark.Report({}, [benchmark.Probe(1, 1.0, 1, dict.fromkeys(benchmark.OPS, 1.0))], [], [row])
    assert not report.to_json()["valid"] and "1.01 of the roofline" in report.invalid[0]
    monkeypatch.setattr(benchmark, "bench", lambda folder, **_: report)
    assert main(["bench", str(packed_model("llama")), "--kernels", "--json"]) == 1
    assert "not valid" in capsys.readouterr().err
    row["roofline_fraction"] = 1.0
    assert report.to_json()["valid"]


@pytest.mark.parametrize(
    "args",
    [
        ["-t", "0"], ["-t", "1,x"], ["-t", "1,1"], ["-t", ""], ["-r", "0"], ["-p", "-1"], ["-p", "0", "-n", "0"],
        ["--format", "xml"], ["-p", "100000"],
    ],
)  # fmt: skip
def test_usage_errors(args: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", str(packed_model("llama")), *args]) == 2
    assert capsys.readouterr().err.startswith("error: ")


def test_lists_of_numbers() -> None:
    assert command.numbers("-t", "1,2, 4", 64) == [1, 2, 4]
    for text in ("2,2", "", "1,,2", "0", "65", "x"):
        with pytest.raises(UsageError):
            command.numbers("-t", text, 64)


def test_the_probe_reads_in_any_number_of_streams_and_refuses_no_threads() -> None:
    buffer = ffi.new("char[64]")
    assert lib.tb_probe_new(0, buffer, 64) == ffi.NULL and b"thread" in ffi.string(buffer)
    probe = ffi.gc(lib.tb_probe_new(2, buffer, 64), lib.tb_probe_free)
    memory = ffi.new("uint8_t[]", 1 << 16)
    for streams in (1, 2, 4):
        assert lib.tb_probe_read(probe, memory, 1 << 16, streams) > 0
    assert lib.tb_probe_multiply(probe, 0) > 1e6 and lib.tb_probe_multiply(probe, 1) > 1e6
    assert lib.tb_probe_disturbed(probe) in (0, 1)
