"""Failures that users of such tools have reported, end to end where a smaller test would not show them."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from families import BOS, EOS, PAD, VOCAB, load_reference, make_checkpoint, make_tokenizer
from safetensors.torch import load_file, save_file

from twobit.errors import RuntimeFailure
from twobit.format import layout
from twobit.format.reader import open_model
from twobit.quant import calibrate, pipeline, plan
from twobit.quant.calibrate import DEFAULT_TOKENS
from twobit.quant.pipeline import Options, Progress, quantize
from twobit.quant.plan import memory_bytes
from twobit.quant.source import Checkpoint
from twobit.runtime.model import Model
from twobit.runtime.session import Session

OPTIONS = Options(calib_tokens=96)
IDS = list(range(5, 45))


class Recorder(Progress):
    def __init__(self) -> None:
        self.warnings: list[str] = []

    def warning(self, text: str) -> None:
        self.warnings.append(text)


def edit(path: Path, change: object) -> None:
    tensors = load_file(path / "model.safetensors")
    change(tensors)  # type: ignore[operator]
    save_file(tensors, path / "model.safetensors", {"format": "pt"})


def runtime_logits(model: Path) -> np.ndarray:
    found = Session(Model.open(model), 64).eval(IDS, every=True)
    assert found is not None
    return found


@pytest.fixture(scope="module")
def clean(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Untied, one layer, fp32."""
    path = make_checkpoint("llama", tmp_path_factory.mktemp("reported") / "clean", num_hidden_layers=1)
    return make_tokenizer(path)


@pytest.fixture
def source(clean: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(clean, tmp_path / "source"))


def test_sizes_that_no_block_divides(tmp_path: Path) -> None:
    """hidden 17, 27 between (one group and a half), 331 words; the only large weights lie in the last columns."""
    import transformers

    config = transformers.LlamaConfig(
        vocab_size=VOCAB, hidden_size=17, intermediate_size=27, num_hidden_layers=2, num_attention_heads=1,
        num_key_value_heads=1, head_dim=6, max_position_embeddings=64, bos_token_id=BOS, eos_token_id=EOS,
        pad_token_id=PAD, tie_word_embeddings=False,
    )  # fmt: skip
    torch.manual_seed(3)
    model = transformers.LlamaForCausalLM(config).eval()
    for layer in model.model.layers:
        layer.mlp.down_proj.weight.data[:, 16:] *= 30
    path = tmp_path / "source"
    model.save_pretrained(path)
    quantize(make_tokenizer(path), tmp_path / "out", OPTIONS)
    packed = open_model(tmp_path / "out", check=True)
    for name in ("mlp.down_proj", "self_attn.q_proj", "mlp.up_proj"):
        weight = model.get_submodule(f"model.layers.1.{name}").weight.detach().numpy()
        _, full = layout.dequantize(packed.matrix(f"model.layers.1.{name}"))
        assert np.linalg.norm(full - weight) < 0.02 * np.linalg.norm(weight), name
        assert np.linalg.norm((full - weight)[:, 16:]) < 0.02 * np.linalg.norm(weight[:, 16:]), name
    with torch.no_grad():
        expected = model(torch.tensor([IDS])).logits[0].numpy()
    error = np.abs(runtime_logits(tmp_path / "out") - expected).max()
    assert error < 0.03 * (expected.max() - expected.min())


def test_buffers_and_unknown_tensors_change_nothing(clean: Path, source: Path, tmp_path: Path) -> None:
    def add(tensors: dict[str, torch.Tensor]) -> None:
        tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.full((12,), 7.0)
        tensors["model.rotary_emb.inv_freq"] = torch.full((5,), 7.0)  # of a wrong length, too
        tensors["foo.bar"] = torch.zeros(3)

    edit(source, add)
    told = Recorder()
    quantize(source, tmp_path / "out", OPTIONS, told)
    quantize(clean, tmp_path / "plain", OPTIONS)
    assert [text for text in told.warnings if "foo.bar" in text] == ["left out 1 tensor of unknown purpose: foo.bar"]
    for file in (tmp_path / "plain").iterdir():
        assert (tmp_path / "out" / file.name).read_bytes() == file.read_bytes(), file.name


def test_large_biases_arrive(tmp_path: Path) -> None:
    path = make_tokenizer(make_checkpoint("qwen2", tmp_path / "source", num_hidden_layers=1))

    def enlarge(tensors: dict[str, torch.Tensor]) -> None:
        for name in ("q_proj", "k_proj", "v_proj"):
            tensors[f"model.layers.0.self_attn.{name}.bias"].normal_(0, 3, generator=torch.Generator().manual_seed(1))

    edit(path, enlarge)
    quantize(path, tmp_path / "out", OPTIONS)
    with torch.no_grad():
        expected = load_reference(path)(torch.tensor([IDS])).logits[0].numpy()
    error = np.abs(runtime_logits(tmp_path / "out") - expected).max()
    assert error < 0.03 * (expected.max() - expected.min())


def test_tiny_weights_stay_finite(source: Path, tmp_path: Path) -> None:
    """Groups of nearly nothing, and one of them beside a 1: no NaN in the files, none when it runs."""

    def shrink(tensors: dict[str, torch.Tensor]) -> None:
        for name in ("mlp.up_proj", "self_attn.v_proj"):
            weight = tensors[f"model.layers.0.{name}.weight"]
            for i, size in enumerate((0.0, 1e-40, 1e-30, 1e-20, 1e-8)):
                weight[: 8 * (i + 1), 16 * i : 16 * (i + 1)] = size
            weight[3] = 1e-30
            weight[3, 7] = 1.0
            weight[5] = 0.0

    edit(source, shrink)
    quantize(source, tmp_path / "out", OPTIONS)
    packed = open_model(tmp_path / "out", check=True)
    for draft_or_full in layout.dequantize(packed.matrix("model.layers.0.mlp.up_proj")):
        assert np.isfinite(draft_or_full).all()
        assert not draft_or_full[:3, :16].any() and not draft_or_full[5].any()  # zero groups stay zero
    assert abs(draft_or_full[3, 7] - 1) < 0.01
    assert np.isfinite(runtime_logits(tmp_path / "out")).all()


def test_matrices_without_calibration_are_named(source: Path, tmp_path: Path) -> None:
    """Dead inputs of a whole layer: rounded to nearest, and told by name."""
    edit(source, lambda tensors: tensors["model.layers.0.input_layernorm.weight"].zero_())
    told = Recorder()
    quantize(source, tmp_path / "out", OPTIONS, told)
    names = ", ".join(f"model.layers.0.self_attn.{part}_proj" for part in "qkv")
    assert f"{names}: calibration inputs are all zero: rounded to nearest" in told.warnings
    weight = load_file(source / "model.safetensors")["model.layers.0.self_attn.q_proj.weight"].numpy()
    _, full = layout.dequantize(open_model(tmp_path / "out", check=True).matrix("model.layers.0.self_attn.q_proj"))
    assert np.linalg.norm(full - weight) < 0.02 * np.linalg.norm(weight)


def test_overflow_in_fp32_names_the_layer(source: Path, tmp_path: Path) -> None:
    """Past fp16 all is well; past fp32 one line says where, and nothing is written under the output's name."""
    edit(source, lambda tensors: tensors["model.layers.0.post_attention_layernorm.weight"].fill_(1e4))
    quantize(source, tmp_path / "fits", OPTIONS)
    assert np.isfinite(runtime_logits(tmp_path / "fits")).all()
    edit(source, lambda tensors: tensors["model.layers.0.mlp.down_proj.weight"].mul_(1e35))
    with pytest.raises(calibrate.CalibrationError, match="layer 0: output activations are not finite"):
        quantize(source, tmp_path / "out", OPTIONS)
    assert not (tmp_path / "out").exists()


def test_too_little_memory_is_told(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan, "available_memory", lambda: 1e8)
    told = Recorder()

    def no_memory(*rest: object) -> None:
        raise RuntimeError(
            "[enforce fail at alloc_cpu.cpp:117] DefaultCPUAllocator: can't allocate memory: you tried ..."
        )

    monkeypatch.setattr(pipeline._Run, "_layer", no_memory)
    with pytest.raises(RuntimeFailure, match=r"out of memory: this model needs about 0\.\d GB") as caught:
        quantize(source, tmp_path / "out", OPTIONS, told)
    assert "run the same command again to go on" in (caught.value.hint or "")
    assert any("0.1 GB are available" in warning for warning in told.warnings)


def test_the_bound_on_memory_does_not_grow_with_depth(tmp_path: Path) -> None:
    bounds = []
    for depth in (1, 4):
        path = make_checkpoint("llama", tmp_path / str(depth), num_hidden_layers=depth)
        architecture = Checkpoint.open(path).architecture
        bounds.append(memory_bytes(architecture, DEFAULT_TOKENS, 2))
        # hidden states lie on disk, and so does a layer's scratch once it is large
    assert memory_bytes(architecture, 10**9, 2) <= bounds[-1]
    assert bounds[0] == bounds[1]


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="other systems do not tell the two apart")
def test_peak_memory_is_of_this_process_alone() -> None:
    """Linux hands the maximum of the process that starts a program on to it, in ru_maxrss."""
    block = bytearray(b"x" * 300_000_000)
    code = "from twobit.memory import peak_memory; print(peak_memory())"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert 1_000_000 < int(done.stdout) < 200_000_000 < len(block)
