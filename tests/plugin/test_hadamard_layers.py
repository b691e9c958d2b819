"""The block Hadamard transform in vLLM's layers: every way to a layer gives the same weight, at every degree."""

import functools
import json
import os
from pathlib import Path

import pytest
import torch
from checkpoints import NATIVE
from layers import finish, load, run_ranks

pytest.importorskip("vllm", reason="vLLM is not installed: `make test` installs it")

HIDDEN, HEADS, KV_HEADS, HEAD_DIM, INTERMEDIATE = 96, 4, 2, 64, 768

# kind -> block by the rule and pieces: (name in a checkpoint, shard id of vLLM's loader, output rows, input columns).
# INTERMEDIATE divides by 64, but an eighth of it, 96, only by 32.
LAYERS = {
    "qkv_proj": (
        32,
        [
            ("q_proj", "q", HEADS * HEAD_DIM, HIDDEN),
            ("k_proj", "k", KV_HEADS * HEAD_DIM, HIDDEN),
            ("v_proj", "v", KV_HEADS * HEAD_DIM, HIDDEN),
        ],
    ),
    "o_proj": (32, [("o_proj", None, HIDDEN, HEADS * HEAD_DIM)]),
    "gate_up_proj": (32, [("gate_proj", 0, INTERMEDIATE, HIDDEN), ("up_proj", 1, INTERMEDIATE, HIDDEN)]),
    "down_proj": (32, [("down_proj", None, HIDDEN, INTERMEDIATE)]),
}
PACKED = {"qkv_proj": ["q_proj", "k_proj", "v_proj"], "gate_up_proj": ["gate_proj", "up_proj"]}
ROW_PARALLEL = ("o_proj", "down_proj")
# What the converter writes for these layers.
BLOCKS = {"hadamard": 64, "hadamard_blocks": {"o_proj": 32, "down_proj": 32}}


def checkpoint_config(entries: dict):
    """W8A8Config of a checkpoint, for layers that these tests build and finish one at a time."""
    from vllm_w8a8_plugin.config import W8A8Config

    config = W8A8Config.from_config(entries)
    config.check_blocks = lambda: None  # it looks at all layers of a model
    return config


def build(config, kind: str) -> torch.nn.Module:
    from vllm.model_executor.layers.linear import MergedColumnParallelLinear, QKVParallelLinear, RowParallelLinear

    config.packed_modules_mapping = PACKED
    kwargs = {"bias": False, "params_dtype": torch.bfloat16, "quant_config": config, "prefix": f"model.layers.0.x.{kind}"}
    if kind == "qkv_proj":
        return QKVParallelLinear(HIDDEN, HEAD_DIM, HEADS, KV_HEADS, **kwargs)
    if kind == "gate_up_proj":
        return MergedColumnParallelLinear(HIDDEN, [INTERMEDIATE] * 2, **kwargs)
    return RowParallelLinear(LAYERS[kind][1][0][3], HIDDEN, **kwargs)


def source_weight(name: str, n: int, k: int) -> torch.Tensor:
    """bf16 [n, k] with an outlier column among the last rank's."""
    weight = torch.randn(n, k, generator=torch.Generator().manual_seed(sum(map(ord, name))))
    weight[:, k - 3] *= 20
    return weight.to(torch.bfloat16)


def share(size: int, rank: int, world: int) -> slice:
    return slice(size // world * rank, size // world * (rank + 1))


def inputs(k: int) -> torch.Tensor:
    return torch.randn(9, k, generator=torch.Generator().manual_seed(k)).to(torch.bfloat16)


def check_layers(rank: int, world: int) -> None:
    """Online and from a checkpoint, every rank holds its part of what the whole matrix gives."""
    from vllm_w8a8_plugin.config import W8A8Config
    from w8a8_kernels import int8_linear
    from w8a8_kernels.nn import W8A8Linear
    from w8a8_kernels.quantize.weight import quantize_weight

    os.environ["VLLM_W8A8_KERNEL"] = "torch"  # the reference reads the weight as it is, so that it stays to be looked at
    for kind, (block, pieces) in LAYERS.items():
        online, native = build(W8A8Config(), kind), build(checkpoint_config(NATIVE | BLOCKS), kind)
        assert online.w8a8_hadamard == native.w8a8_hadamard == block
        codes, scales = [], []
        for name, shard, n, k in pieces:
            weight = source_weight(name, n, k)
            whole, scale = quantize_weight(weight, hadamard=block)
            load(online, {"weight": weight}, shard)
            load(native, {"weight": whole, "weight_scale": scale}, shard)
            linear = torch.nn.Linear(k, n, bias=False, dtype=torch.bfloat16)
            linear.weight.data = weight
            module = W8A8Linear.from_linear(linear, row_parallel=kind in ROW_PARALLEL)
            assert torch.equal(module.weight, whole)
            assert torch.equal(module.weight_scale, scale)
            columns = share(k, rank, world) if kind in ROW_PARALLEL else slice(None)
            rows = slice(None) if kind in ROW_PARALLEL else share(n, rank, world)
            codes.append(whole[rows, columns])
            scales.append(scale[rows])
        codes, scales = torch.cat(codes), torch.cat(scales)
        x = inputs(pieces[0][3])
        if kind in ROW_PARALLEL:
            x = x[:, share(x.shape[1], rank, world)].contiguous()
        expected = int8_linear(x, codes, scales, hadamard=block)
        for way, layer in (("online", online), ("checkpoint", native)):
            finish(layer)
            assert torch.equal(layer.weight_scale.data, scales), f"{kind}, {way}, rank {rank}: scales of another matrix"
            assert torch.equal(layer.weight.data, codes), f"{kind}, {way}, rank {rank}: wrong codes"
            assert torch.equal(layer.quant_method.apply(layer, x), expected), f"{kind}, {way}, rank {rank}: wrong output"


@pytest.mark.parametrize("world", [1, 2])
def test_every_way_gives_the_same_weight(world: int) -> None:
    run_ranks(world, check_layers)


def check_refused(rank: int, world: int) -> None:
    from vllm.model_executor.layers.linear import ReplicatedLinear, RowParallelLinear

    from vllm_w8a8_plugin.config import W8A8Config

    def row_parallel(config, k: int, **kwargs) -> torch.nn.Module:
        return RowParallelLinear(
            k,
            16,
            bias=False,
            params_dtype=torch.bfloat16,
            quant_config=config,
            prefix="model.layers.3.mlp.down_proj",
            **kwargs,
        )

    cut = (
        r"model\.layers\.3\.mlp\.down_proj: 2 tensor-parallel ranks would cut the Hadamard blocks of 64 of its 320 input "
        r"features\. Degrees that fit this layer: 1, 5\. Or "
    )
    with pytest.raises(ValueError, match=cut + "VLLM_W8A8_HADAMARD=32$"):
        row_parallel(W8A8Config(hadamard=64), 320)
    native = NATIVE | {"hadamard": 64}
    with pytest.raises(ValueError, match=cut + "convert the model again with --hadamard 32$"):
        row_parallel(checkpoint_config(native), 320)
    with pytest.raises(ValueError, match=r"Or VLLM_W8A8_HADAMARD=0$"):
        row_parallel(W8A8Config(), 16)
    # As the messages say, and by rule.
    assert row_parallel(W8A8Config(), 320).w8a8_hadamard == 32
    assert row_parallel(W8A8Config(hadamard=32), 320).w8a8_hadamard == 32
    assert row_parallel(W8A8Config(hadamard=0), 16).w8a8_hadamard == 0
    # Whole on every rank: nothing is cut.
    assert row_parallel(W8A8Config(hadamard=64), 320, disable_tp=True).w8a8_hadamard == 64
    assert ReplicatedLinear(320, 16, quant_config=W8A8Config(), prefix="model.layers.3.mlp.x").w8a8_hadamard == 64
    # No block fits, at any degree.
    assert row_parallel(W8A8Config(), 330).w8a8_hadamard == 0
    # The block is that of the whole layer, though another would fit a rank's part.
    assert row_parallel(W8A8Config(), 1024).w8a8_hadamard == 64
    assert row_parallel(W8A8Config(hadamard=128), 384 * 2).w8a8_hadamard == 128


def test_ranks_that_would_cut_a_block_are_refused() -> None:
    run_ranks(2, check_refused)


def write_checkpoint(folder: Path) -> None:
    """The layers above as a Hugging Face model."""
    from safetensors.torch import save_file

    tensors = {
        "model.embed_tokens.weight": source_weight("embed", 32, HIDDEN),
        "lm_head.weight": source_weight("head", 32, HIDDEN),
    }
    for _, pieces in LAYERS.values():
        for name, _, n, k in pieces:
            tensors[f"model.layers.0.x.{name}.weight"] = source_weight(name, n, k)
    folder.mkdir()
    save_file(tensors, folder / "model.safetensors")
    config = {"model_type": "llama", "torch_dtype": "bfloat16", "tie_word_embeddings": False}
    (folder / "config.json").write_text(json.dumps(config))


def check_round_trip(rank: int, world: int, folder: Path) -> None:
    from safetensors.torch import load_file

    from vllm_w8a8_plugin.config import W8A8Config

    os.environ["VLLM_W8A8_KERNEL"] = "torch"
    tensors, source = load_file(folder / "out" / "w8a8.safetensors"), load_file(folder / "src" / "model.safetensors")
    config = json.loads((folder / "out" / "config.json").read_text())["quantization_config"]
    for kind, (_, pieces) in LAYERS.items():
        converted, online = build(checkpoint_config(config), kind), build(W8A8Config(), kind)
        for name, shard, _, _ in pieces:
            prefix = f"model.layers.0.x.{name}."
            load(converted, {key: tensors[prefix + key] for key in ("weight", "weight_scale")}, shard)
            load(online, {"weight": source[prefix + "weight"]}, shard)
        for layer in (converted, online):
            finish(layer)
        assert converted.w8a8_hadamard == online.w8a8_hadamard
        assert torch.equal(converted.weight.data, online.weight.data), f"{kind} on rank {rank}"
        assert torch.equal(converted.weight_scale.data, online.weight_scale.data), f"{kind} on rank {rank}"


@pytest.mark.parametrize("world", [1, 2])
def test_converted_layers_equal_those_quantized_while_loading(world: int, tmp_path: Path) -> None:
    from w8a8_converters.convert import convert

    write_checkpoint(tmp_path / "src")
    convert(tmp_path / "src", tmp_path / "out")
    config = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
    assert {key: value for key, value in config.items() if key.startswith("hadamard")} == BLOCKS
    run_ranks(world, functools.partial(check_round_trip, folder=tmp_path))
