"""What a 70B-class checkpoint takes to quantize: one layer of the true shapes, peak memory beside the promised bound.

    python bench/big_layer.py DIR              # every row of every matrix: long
    python bench/big_layer.py DIR --rows 64    # 64 rows of each shape are rounded and repeated, and the time is scaled

Writes a Llama-3-70B of one layer to DIR: hidden 8192, 28672 between, 64 heads on 8, 128256 words. The layer and the
words in use are filled with random bf16; the rest of the embedding and the head are holes. Then `twobit quantize` makes
DIR/out of it. With --rows everything else is as large as ever: the pass, the Hessians and their factors, the codes and
the files; only the codes of the other rows are copies.
"""

from __future__ import annotations

import argparse
import json
import struct
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

HIDDEN, FFN, HEADS, KV_HEADS, WORDS = 8192, 28672, 64, 8, 512
CONFIG = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": HIDDEN,
    "intermediate_size": FFN,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "num_hidden_layers": 1,
    "max_position_embeddings": 131072,
    "rope_theta": 500000.0,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
}
LAYER = "model.layers.0."
SHAPES = {
    f"{LAYER}input_layernorm.weight": (HIDDEN,),
    f"{LAYER}self_attn.q_proj.weight": (HIDDEN, HIDDEN),
    f"{LAYER}self_attn.k_proj.weight": (HIDDEN // HEADS * KV_HEADS, HIDDEN),
    f"{LAYER}self_attn.v_proj.weight": (HIDDEN // HEADS * KV_HEADS, HIDDEN),
    f"{LAYER}self_attn.o_proj.weight": (HIDDEN, HIDDEN),
    f"{LAYER}post_attention_layernorm.weight": (HIDDEN,),
    f"{LAYER}mlp.gate_proj.weight": (FFN, HIDDEN),
    f"{LAYER}mlp.up_proj.weight": (FFN, HIDDEN),
    f"{LAYER}mlp.down_proj.weight": (HIDDEN, FFN),
    "model.norm.weight": (HIDDEN,),
}


def write_checkpoint(folder: Path, vocab: int) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers

    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(CONFIG | {"vocab_size": vocab}, indent=2) + "\n")
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({letter: i for i, letter in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.save(str(folder / "tokenizer.json"))
    rng = np.random.default_rng(0)
    shapes = {"model.embed_tokens.weight": (vocab, HIDDEN), **SHAPES, "lm_head.weight": (vocab, HIDDEN)}
    header, at = {}, 0
    for name, shape in shapes.items():
        size = 2 * int(np.prod(shape))
        header[name] = {"dtype": "BF16", "shape": list(shape), "data_offsets": [at, at + size]}
        at += size
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with open(folder / "model.safetensors", "wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        start = file.tell()
        file.truncate(start + at)
        for name, shape in shapes.items():
            rows = min(WORDS, vocab) if shape[0] == vocab else shape[0]
            file.seek(start + header[name]["data_offsets"][0])
            if len(shape) == 1:
                file.write(np.full(rows, 0x3F80, "<u2").tobytes())  # 1.0
                continue
            for first in range(0, rows, 512):
                values = rng.standard_normal((min(512, rows - first), shape[1]), np.float32) * shape[1] ** -0.5
                file.write((values.view(np.uint32) >> 16).astype("<u2").tobytes())


def only_some_rows(count: int, spent: dict[tuple[int, int], tuple[float, float]]) -> None:
    """From here on the first `count` rows of a shape are rounded, once, and repeated.

    spent: (rows, cols) -> (seconds that all rows of all such matrices would have taken, seconds taken).
    """
    from twobit.quant import rounding

    kept: dict[tuple[str, int, int, int], tuple[rounding.Rounded, float]] = {}

    def rows_of(made: rounding.Rounded, rows: Any) -> rounding.Rounded:
        names = ("codes", "s", "m", "row_scale", "row_a", "row_b", "residual", "f")
        return replace(made, **{name: getattr(made, name)[rows] for name in names})

    def some(name: str) -> Callable[..., rounding.Rounded]:
        whole = getattr(rounding, name)

        def rounded(weight: Any, factor: Any, draft: Any = None, **options: Any) -> rounding.Rounded:
            rows, cols = weight.shape
            key, first, started = (name, rows, cols, options["draft_bits"]), min(count, rows), time.monotonic()
            if key not in kept:
                if draft is not None:
                    options["draft"] = rows_of(draft, np.arange(first))
                made = whole(weight[:first], factor, **options)
                kept[key] = made, (time.monotonic() - started) * rows / first
            made, full = kept[key]
            result = rows_of(made, np.arange(rows) % first)
            before = spent.get((rows, cols), (0.0, 0.0))
            spent[rows, cols] = before[0] + full, before[1] + time.monotonic() - started
            return result

        return rounded

    for name in ("round_draft", "round_matrix"):
        setattr(rounding, name, some(name))


def main() -> None:
    from twobit.quant.cost import estimate
    from twobit.quant.pipeline import Options, Progress, quantize
    from twobit.quant.source import Checkpoint

    class Lines(Progress):
        def line(self, text: str) -> None:
            print(text, flush=True)

        def warning(self, text: str) -> None:
            print(f"warning: {text}", flush=True)

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--rows", type=int, default=0, help="rows of each shape that are rounded [all]")
    parser.add_argument("--vocab", type=int, default=128256, help="rows of embedding and head")
    parser.add_argument("--calib-tokens", type=int, default=2048)
    parser.add_argument("-t", "--threads", type=int, default=2)
    args = parser.parse_args()
    if not (args.folder / "source").exists():
        write_checkpoint(args.folder / "source", args.vocab)
    options = Options(calib_tokens=args.calib_tokens, threads=args.threads, restart=True, overwrite=True)
    predicted = estimate(Checkpoint.open(args.folder / "source"), options)
    spent: dict[tuple[int, int], tuple[float, float]] = {}
    if args.rows:
        only_some_rows(args.rows, spent)
    summary = quantize(args.folder / "source", args.folder / "out", options, Lines())
    for (rows, cols), (full, _) in spent.items():
        print(f"rounding {rows} x {cols}: {full:.0f} s when all rows of all such matrices are rounded")
    seconds = summary["seconds"] + sum(full - taken for full, taken in spent.values())
    peak, bound = summary["peak_ram_bytes"], summary["expected_ram_bytes"]
    print(
        f"seconds: {summary['seconds']:.0f} taken, {seconds:.0f} for all rows, {sum(predicted.values()):.0f} predicted"
    )
    print(f"peak memory: {peak / 1e9:.2f} GB, bound {bound / 1e9:.2f} GB, {'within' if peak <= bound else 'ABOVE'} it")


if __name__ == "__main__":
    main()
