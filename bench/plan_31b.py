"""What quantizing a 31B model would take, from headers alone: the plan of `twobit quantize --dry-run`, no weights read.

    python bench/plan_31b.py DIR -t 2 16

Writes a checkpoint of 31B parameters that is all holes to DIR (Qwen3-32B's shapes with 61 layers), then prints the plan
for every number of threads. More threads than this machine has cores are taken to be as many cores more of its kind.
"""

from __future__ import annotations

import argparse
import json
import struct
from pathlib import Path

from twobit.architecture import Architecture

CONFIG = {
    "model_type": "qwen3",
    "hidden_size": 5120,
    "intermediate_size": 25600,
    "num_hidden_layers": 61,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 151936,
    "max_position_embeddings": 40960,
    "rope_theta": 1000000.0,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
}


def write_checkpoint(folder: Path) -> None:
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(CONFIG, indent=2) + "\n")
    header, at = {}, 0
    for spec in Architecture.from_config(CONFIG).tensors():
        size = 2
        for n in spec.shape:
            size *= n
        header[spec.name] = {"dtype": "BF16", "shape": list(spec.shape), "data_offsets": [at, at + size]}
        at += size
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with open(folder / "model.safetensors", "wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        file.truncate(file.tell() + at)


def main() -> None:
    from twobit.quant.plan import Options, plan

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("-t", "--threads", type=int, nargs="+", default=[2, 16])
    args = parser.parse_args()
    if not (args.folder / "source").exists():
        write_checkpoint(args.folder / "source")
    for threads in args.threads:
        found = plan(args.folder / "source", args.folder / "out", Options(threads=threads))
        parts = ", ".join(f"{part} {seconds / 3600:.1f}" for part, seconds in found.seconds.items())
        print(
            f"{threads} threads: {sum(found.seconds.values()) / 3600:.1f} hours ({parts}), "
            f"memory at most {found.memory_bytes / 1e9:.1f} GB, {found.calibration_tokens:,} tokens"
        )


if __name__ == "__main__":
    main()
