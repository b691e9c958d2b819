"""`vllm-w8a8 tune`: which shapes it takes from a checkpoint, and what it says where it cannot measure."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from typer.testing import CliRunner, Result

from vllm_w8a8_plugin.cli import app
from vllm_w8a8_plugin.shapes import LayerShape, linear_shapes

pytestmark = pytest.mark.without_vllm

HIDDEN, INNER, VOCAB, LAYERS = 64, 112, 128, 2
# Qwen3's heads together are wider than the hidden size.
MODELS = {"llama": {"heads": 4, "kv_heads": 2, "head_dim": 16}, "qwen3": {"heads": 8, "kv_heads": 2, "head_dim": 32}}


def model_tensors(model: str, dtype: torch.dtype = torch.bfloat16) -> dict[str, torch.Tensor]:
    sizes = MODELS[model]
    q, kv = sizes["heads"] * sizes["head_dim"], sizes["kv_heads"] * sizes["head_dim"]
    tensors = {"model.embed_tokens.weight": torch.zeros(VOCAB, HIDDEN, dtype=torch.bfloat16)}
    for i in range(LAYERS):
        layer = f"model.layers.{i}"
        shapes = {
            "self_attn.q_proj": (q, HIDDEN),
            "self_attn.k_proj": (kv, HIDDEN),
            "self_attn.v_proj": (kv, HIDDEN),
            "self_attn.o_proj": (HIDDEN, q),
            "mlp.gate_proj": (INNER, HIDDEN),
            "mlp.up_proj": (INNER, HIDDEN),
            "mlp.down_proj": (HIDDEN, INNER),
        }
        tensors |= {f"{layer}.{name}.weight": torch.zeros(shape, dtype=dtype) for name, shape in shapes.items()}
        tensors[f"{layer}.input_layernorm.weight"] = torch.ones(HIDDEN, dtype=torch.bfloat16)
        if model == "qwen3":
            tensors[f"{layer}.self_attn.q_norm.weight"] = torch.ones(sizes["head_dim"], dtype=torch.bfloat16)
    return tensors | {"lm_head.weight": torch.zeros(VOCAB, HIDDEN, dtype=torch.bfloat16)}


@pytest.fixture
def checkpoint(tmp_path: Path) -> Callable[..., Path]:
    """Writes a tiny checkpoint; `tensors` come on top of the model's own, and those named in `without` are left out."""

    def write(
        model: str,
        dtype: torch.dtype = torch.bfloat16,
        tensors: dict[str, torch.Tensor] | None = None,
        without: tuple[str, ...] = (),
    ) -> Path:
        folder = tmp_path / model
        folder.mkdir()
        config = {"model_type": model, "num_key_value_heads": MODELS[model]["kv_heads"]}
        (folder / "config.json").write_text(json.dumps(config))
        everything = model_tensors(model, dtype) | (tensors or {})
        found = [(name, tensor) for name, tensor in everything.items() if name not in without]
        for i in (0, 1):  # two files, and parts of a fused layer in each
            save_file(dict(found[i::2]), folder / f"model-{i + 1:05}-of-00002.safetensors")
        return folder

    return write


def found(folder: Path, tp: int) -> dict[tuple[str, ...], tuple[int, int]]:
    shapes = linear_shapes(folder, tp)
    assert all(shape.count == LAYERS * len(shape.names) for shape in shapes)
    return {tuple(sorted(shape.names)): (shape.N, shape.K) for shape in shapes}


@pytest.mark.parametrize(
    ("model", "tp", "expected"),
    [
        ("llama", 1, {"qkv_proj": (128, 64), "o_proj": (64, 64), "gate_up_proj": (224, 64), "down_proj": (64, 112)}),
        ("llama", 2, {"qkv_proj": (64, 64), "o_proj": (64, 32), "gate_up_proj": (112, 64), "down_proj": (64, 56)}),
        # Four ranks share two heads of keys: 16 + 16 + 16.
        ("llama", 4, {"qkv_proj": (48, 64), "o_proj": (64, 16), "gate_up_proj": (56, 64), "down_proj": (64, 28)}),
        ("qwen3", 1, {"qkv_proj": (384, 64), "o_proj": (64, 256), "gate_up_proj": (224, 64), "down_proj": (64, 112)}),
        ("qwen3", 2, {"qkv_proj": (192, 64), "o_proj": (64, 128), "gate_up_proj": (112, 64), "down_proj": (64, 56)}),
    ],
)
def test_shapes(model: str, tp: int, expected: dict[str, tuple[int, int]], checkpoint: Callable[..., Path]) -> None:
    assert found(checkpoint(model), tp) == {(name,): shape for name, shape in expected.items()}


def test_equal_shapes_are_one(checkpoint: Callable[..., Path]) -> None:
    layer = "model.layers.0.self_attn"
    folder = checkpoint("llama", tensors={f"{layer}.kv_b_proj.weight": torch.zeros(64, 64, dtype=torch.bfloat16)})
    (both,) = [shape for shape in linear_shapes(folder) if (shape.N, shape.K) == (64, 64)]
    assert (set(both.names), both.count) == ({"o_proj", "kv_b_proj"}, LAYERS + 1)


def test_int8_checkpoint_says_itself_what_is_quantized(checkpoint: Callable[..., Path]) -> None:
    kept = {f"model.layers.{i}.mlp.down_proj.weight": torch.zeros(HIDDEN, INNER, dtype=torch.bfloat16) for i in range(LAYERS)}
    head = {"lm_head.weight": torch.zeros(VOCAB, HIDDEN, dtype=torch.int8)}
    shapes = linear_shapes(checkpoint("llama", torch.int8, kept | head))
    assert {name for shape in shapes for name in shape.names} == {"qkv_proj", "o_proj", "gate_up_proj", "lm_head"}


@pytest.mark.parametrize("own", [True, False], ids=["own", "tied"])
@pytest.mark.parametrize(("tp", "rows"), [(1, 320), (2, 160), (4, 80)])
def test_lm_head_when_asked_for(own: bool, tp: int, rows: int, checkpoint: Callable[..., Path]) -> None:
    """vLLM pads the vocabulary, here of 300 tokens, to a multiple of 64, then cuts it."""
    names = ["model.embed_tokens.weight", "lm_head.weight"]
    vocabulary = {name: torch.zeros(300, HIDDEN, dtype=torch.bfloat16) for name in names}
    folder = checkpoint("llama", tensors=vocabulary, without=() if own else ("lm_head.weight",))
    without, with_head = (linear_shapes(folder, tp, lm_head) for lm_head in (False, True))
    assert [shape for shape in with_head if shape not in without] == [LayerShape(("lm_head",), rows, HIDDEN, 1)]
    assert "lm_head" in command(str(folder), "--list", "--lm-head").output


def test_padding_of_an_int8_lm_head(checkpoint: Callable[..., Path]) -> None:
    head = {"lm_head.weight": torch.zeros(130, HIDDEN, dtype=torch.int8)}
    shapes = linear_shapes(checkpoint("llama", torch.int8, head), 2)
    assert [shape for shape in shapes if "lm_head" in shape.names] == [LayerShape(("lm_head",), 96, HIDDEN, 1)]


def test_no_lm_head_to_be_found(checkpoint: Callable[..., Path]) -> None:
    folder = checkpoint("llama", without=("lm_head.weight", "model.embed_tokens.weight"))
    with pytest.raises(ValueError, match="has no lm_head, nor an embedding that it could be tied to: leave out --lm-head"):
        linear_shapes(folder, lm_head=True)


def test_what_stays_unquantized_is_left_out(checkpoint: Callable[..., Path]) -> None:
    others = {
        "model.layers.0.mlp.experts.0.gate_proj.weight": torch.zeros(8, 64, dtype=torch.bfloat16),
        "model.layers.0.mlp.gate.weight": torch.zeros(8, 64, dtype=torch.bfloat16),
        "vision_tower.blocks.0.fc1.weight": torch.zeros(24, 64, dtype=torch.bfloat16),
    }
    shapes = linear_shapes(checkpoint("llama", tensors=others))
    expected = {("qkv_proj", 128, 64), ("o_proj", 64, 64), ("gate_up_proj", 224, 64), ("down_proj", 64, 112)}
    assert set(shapes) == {LayerShape((name,), N, K, LAYERS) for name, N, K in expected}


@pytest.mark.parametrize("files", ["nothing", "config", "pickle", "fp8"])
def test_refuses_what_is_no_checkpoint(files: str, tmp_path: Path) -> None:
    expected = {
        "nothing": "has no config.json",
        "config": "holds no *.safetensors files",
        "pickle": "holds no *.safetensors files",
        "fp8": "has no linear layers that are quantized: expected a language model in bf16, fp16, fp32 or int8",
    }[files]
    if files != "nothing":
        (tmp_path / "config.json").write_text("{}")
    if files == "pickle":
        (tmp_path / "pytorch_model.bin").write_bytes(b"")
    if files == "fp8":
        save_file({"layers.0.q_proj.weight": torch.zeros(8, 8).to(torch.float8_e4m3fn)}, tmp_path / "model.safetensors")
    with pytest.raises(ValueError) as error:
        linear_shapes(tmp_path)
    assert expected in str(error.value)


def command(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["tune", *arguments], env={"COLUMNS": "120"})


def test_list_needs_no_gpu(checkpoint: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    result = command(str(checkpoint("qwen3")), "--tp", "2", "--list")
    assert result.exit_code == 0, result.output
    rows = [line.split() for line in result.output.splitlines()]
    assert rows[0] == ["layers", "N", "K", "how", "many"]
    assert sorted(rows[1:]) == sorted(
        [
            ["qkv_proj", "192", "64", "2"],
            ["o_proj", "64", "128", "2"],
            ["gate_up_proj", "112", "64", "2"],
            ["down_proj", "64", "56", "2"],
        ]
    )


def test_without_a_gpu_one_error_before_anything(
    checkpoint: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    result = command(str(checkpoint("llama")), "--out", str(tmp_path / "out"))
    assert result.exit_code == 1
    assert result.output.strip() == (
        "error: got no GPU that PyTorch sees, expected an NVIDIA GPU: tiles are measured on the GPU they are for"
    )
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--tp", "5"], "tensor parallelism 5 does not divide"),
        (["--batch-sizes", "1,x"], "--batch-sizes '1,x': expected numbers from 1 with commas between them"),
        (["--batch-sizes", "0"], "--batch-sizes '0'"),
    ],
)
def test_one_line_errors(arguments: list[str], message: str, checkpoint: Callable[..., Path]) -> None:
    result = command(str(checkpoint("llama")), "--list", *arguments)
    assert result.exit_code == 1
    assert message in result.output
    assert len(result.output.strip().splitlines()) == 1


def test_measures_the_shapes(checkpoint: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm_w8a8_plugin import compat
    from w8a8_kernels import tune
    from w8a8_kernels.tiles import read_table

    class Timer:
        def __init__(self, gpu: tune.Gpu) -> None:
            pass

        def __enter__(self):
            return lambda M, N, K, tiles: tune.Measurement({tiles[0]: 1.0})

        def __exit__(self, *error: object) -> None:
            pass

    gpu = tune.Gpu("NVIDIA H200", (9, 0), 132)
    monkeypatch.setattr(tune, "current_gpu", lambda: gpu)
    monkeypatch.setattr(tune, "GpuMeasure", Timer)
    monkeypatch.setattr(compat, "installed_vllm", lambda: None)
    monkeypatch.setenv("VLLM_W8A8_CONFIG_DIR", str(tmp_path / "tiles"))
    result = command(str(checkpoint("llama")), "--batch-sizes", "1,60")
    assert result.exit_code == 0, result.output
    path = tmp_path / "tiles" / "nvidia-h200.json"
    assert result.output.splitlines()[-1] == str(path)
    table = read_table(path, gpu.device_name, gpu.capability)
    assert {shape: set(buckets) for shape, buckets in table.items()} == {
        shape: {1, 64} for shape in ((128, 64), (64, 64), (224, 64), (64, 112))
    }
