#!/bin/sh
# Everything that needs a GPU, in one go: tests, the kernels against the device's bandwidth, tokens per second.
#
#   bench/gpu.sh [cuda|opencl] [OUT [MODEL...]]       OUT: folder for the results, bench/results/gpu by default
#
# Models: Qwen2.5-Coder-1.5B's shapes, 8B and 32B, with random weights, under build/gpu (45 GB; made once, in some minutes, before the
# clock runs). Their text means nothing; at temperature 1.5 it does not repeat itself, so the draft runs and not the lookup, and few tokens are
# accepted: the speeds to look at are those of a draft pass, of --draft-only and of a plain step.
# MODEL "tiny" takes a minute on a processor with PoCL; its speeds mean nothing, it shows that this script works.
set -eu
device=${1:-cuda}
out=${2:-bench/results/gpu}
[ $# -le 2 ] || models=$(shift 2; echo "$*")
models=${models:-1.5b 8b 32b}
python=${PYTHON:-python}
mkdir -p "$out" build/gpu

shape() { # NAME hidden layers heads kv intermediate vocab
    [ -d "build/gpu/$1" ] && return
    mkdir -p "build/gpu/$1-source"
    "$python" - "$@" <<'PY'
import json, sys
from pathlib import Path

sys.path.insert(0, "tests")
from families import make_tokenizer

name, hidden, layers, heads, kv, inter, vocab = sys.argv[1], *map(int, sys.argv[2:])
path = make_tokenizer(Path("build/gpu") / f"{name}-source")
(path / "config.json").write_text(json.dumps({
    "architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "hidden_size": hidden, "num_hidden_layers": layers,
    "num_attention_heads": heads, "num_key_value_heads": kv, "intermediate_size": inter, "vocab_size": vocab,
    "max_position_embeddings": 32768, "rope_theta": 1000000.0, "rms_norm_eps": 1e-6, "hidden_act": "silu",
    "tie_word_embeddings": name == "1.5b", "bos_token_id": 0, "eos_token_id": 1, "torch_dtype": "bfloat16"}))
PY
    "$python" bench/random_model.py "build/gpu/$1-source" "build/gpu/$1"
}
kernels=""
for model in $models; do
    case $model in
    tiny) shape tiny 256 4 4 2 512 2048 && kernels="--rows 256 --cols 512 --repeat 2" ;;
    1.5b) shape 1.5b 1536 28 12 2 8960 151936 ;;
    8b) shape 8b 4096 36 32 8 12288 151936 ;;
    32b) shape 32b 5120 64 40 8 27648 152064 ;;
    *) echo "no model $model: tiny, 1.5b, 8b or 32b" >&2; exit 2 ;;
    esac
done

start=$(date +%s)
{
    if command -v nvidia-smi >/dev/null; then nvidia-smi --query-gpu=name,driver_version,memory.total,pcie.link.gen.max --format=csv; fi
    echo "kernels: $(git rev-parse --short HEAD)"
} | tee "$out/machine.txt"
"$python" -m pytest -q tests/test_gpu_kernels.py tests/test_hybrid.py -k "$device" 2>&1 | tee "$out/tests.txt"
# shellcheck disable=SC2086  # several words
"$python" bench/gpu_kernels.py --device "$device" $kernels | tee "$out/kernels.md"
for model in $models; do
    for draft in --no-draft "--draft-max 16 --temp 1.5"; do
        # shellcheck disable=SC2086  # several words where there are several
        timeout 100 "$python" -m twobit run "build/gpu/$model" "The quick brown fox" --raw -n 48 --device "$device" $draft --json \
            >"$out/$model$(echo "$draft" | tr -d ' ').json" || echo "$model $draft: failed"
    done
    timeout 60 "$python" -m twobit run "build/gpu/$model" "The quick brown fox" --raw -n 64 --device "$device" --draft-only --json \
        >"$out/$model--draft-only.json" || echo "$model --draft-only: failed"
done
"$python" - "$out" <<'PY' | tee "$out/speed.md"
import json, sys
from pathlib import Path

print("| run | tokens/s | seconds per draft pass | passes, chained | drafted meanwhile: passes, proposed, accepted | GPU memory MB | layers with residual |")
print("|---|---:|---:|---:|---:|---:|---:|")
for path in sorted(Path(sys.argv[1]).glob("*--*.json")):
    if not path.read_text().strip():
        continue
    run = json.loads(path.read_text())
    passes, placed = run["speculation"]["draft_passes"], run.get("placement", {})
    each = f"{run['timing']['draft_s'] / passes:.4f}" if passes else ""
    meanwhile = ", ".join(map(str, run["speculation"].get("overlapped", {}).values()))
    chained = f"{passes}, {run['speculation'].get('chained', 0)}"
    print(f"| {path.stem} | {run['timing']['decode_tokens_per_s']:.2f} | {each} | {chained} | {meanwhile} | {placed.get('vram_bytes', 0) / 1e6:.0f} "
          f"| {placed.get('gpu_residual_layers', '')} |")
PY
echo "$(($(date +%s) - start)) seconds"
