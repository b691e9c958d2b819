"""Sharding of weights and scales over ranks, and one layer against stock vLLM's."""

import os

import pytest
import torch
from checkpoints import COMPRESSED_TENSORS, NATIVE
from layers import finish, load, run_ranks

pytest.importorskip("vllm", reason="vLLM is not installed: `make test` installs it")

HIDDEN, HEADS, KV_HEADS, HEAD_DIM, INTERMEDIATE = 48, 4, 2, 16, 66


def build(rank_config, kind: str) -> torch.nn.Module:
    from vllm.model_executor.layers.linear import MergedColumnParallelLinear, QKVParallelLinear, RowParallelLinear

    kwargs = {"bias": False, "params_dtype": torch.bfloat16, "quant_config": rank_config, "prefix": f"model.layers.0.{kind}"}
    if kind == "qkv_proj":
        return QKVParallelLinear(HIDDEN, HEAD_DIM, HEADS, KV_HEADS, **kwargs)
    if kind == "gate_up_proj":
        return MergedColumnParallelLinear(HIDDEN, [INTERMEDIATE] * 2, **kwargs)
    if kind == "o_proj":
        return RowParallelLinear(HEADS * HEAD_DIM, HIDDEN, **kwargs)
    return RowParallelLinear(INTERMEDIATE, HIDDEN, **kwargs)


# kind -> [(shard id of vLLM's loader, output rows, input columns)]
PIECES = {
    "qkv_proj": [("q", HEADS * HEAD_DIM, HIDDEN), ("k", KV_HEADS * HEAD_DIM, HIDDEN), ("v", KV_HEADS * HEAD_DIM, HIDDEN)],
    "gate_up_proj": [(0, INTERMEDIATE, HIDDEN), (1, INTERMEDIATE, HIDDEN)],
    "o_proj": [(None, HIDDEN, HEADS * HEAD_DIM)],
    "down_proj": [(None, HIDDEN, INTERMEDIATE)],
}
ROW_PARALLEL = ("o_proj", "down_proj")


def share(size: int, rank: int, world: int) -> slice:
    return slice(size // world * rank, size // world * (rank + 1))


def rows_and_scales(kind: str, rank: int, world: int) -> tuple[torch.Tensor, torch.Tensor]:
    """What a rank must hold when each weight's value is its row's id modulo 100 (columns: plus the column's id) ..."""
    weights, scales = [], []
    for i, (_, n, k) in enumerate(PIECES[kind]):
        weight, scale = identified(i, n, k)
        if kind in ROW_PARALLEL:
            weight = weight[:, share(k, rank, world)]
        else:
            weight, scale = weight[share(n, rank, world)], scale[share(n, rank, world)]
        weights.append(weight)
        scales.append(scale)
    return torch.cat(weights), torch.cat(scales)


def identified(piece: int, n: int, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """int8 weight [n, k] and scale [n, 1] whose values tell piece, row and column."""
    weight = (torch.arange(n)[:, None] + 7 * torch.arange(k)[None, :] + 31 * piece) % 253 - 126
    return weight.to(torch.int8), (1000.0 * piece + torch.arange(n, dtype=torch.float32))[:, None]


def check_checkpoint_rows(rank: int, world: int) -> None:
    from vllm_w8a8_plugin.config import W8A8Config

    config = W8A8Config.from_config(NATIVE)
    for kind, pieces in PIECES.items():
        layer = build(config, kind)
        for i, (shard, n, k) in enumerate(pieces):
            weight, scale = identified(i, n, k)
            load(layer, {"weight": weight, "weight_scale": scale}, shard)
        weight, scale = rows_and_scales(kind, rank, world)
        assert torch.equal(layer.weight.data, weight), f"{kind} on rank {rank}: wrong rows or columns"
        assert torch.equal(layer.weight_scale.data, scale), f"{kind} on rank {rank}: wrong scales"


def check_online_scales(rank: int, world: int) -> None:
    """The codes and scales of every rank are its part of what the whole matrix gives."""
    from vllm_w8a8_plugin.config import W8A8Config
    from w8a8_kernels.quantize.weight import quantize_weight

    os.environ["VLLM_W8A8_KERNEL"] = "torch"  # the reference reads the weight as it is, so that it stays to be looked at
    config = W8A8Config(hadamard=0)
    generator = torch.Generator().manual_seed(0)
    for kind, pieces in PIECES.items():
        layer = build(config, kind)
        codes, scales = [], []
        for shard, n, k in pieces:
            weight = torch.randn(n, k, generator=generator).to(torch.bfloat16)
            weight[:, k - 1] *= 5  # the last rank's columns hold every row's largest value
            load(layer, {"weight": weight}, shard)
            whole, scale = quantize_weight(weight)
            columns = share(k, rank, world) if kind in ROW_PARALLEL else slice(None)
            rows = slice(None) if kind in ROW_PARALLEL else share(n, rank, world)
            codes.append(whole[rows, columns])
            scales.append(scale[rows])
        finish(layer)
        assert torch.equal(layer.weight_scale.data, torch.cat(scales)), f"{kind} on rank {rank}: scales of another matrix"
        assert torch.equal(layer.weight.data, torch.cat(codes)), f"{kind} on rank {rank}: wrong codes"


def check_against_stock(rank: int, world: int) -> None:
    from vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors import CompressedTensorsConfig

    from vllm_w8a8_plugin.config import W8A8Config
    from w8a8_kernels.quantize.weight import quantize_weight

    generator = torch.Generator().manual_seed(1)
    codes, scale = quantize_weight(torch.randn(HIDDEN, INTERMEDIATE, generator=generator))
    x = torch.randn(64, INTERMEDIATE, generator=generator).to(torch.bfloat16)
    outputs = []
    for config in (W8A8Config.from_config(COMPRESSED_TENSORS), CompressedTensorsConfig.from_config(COMPRESSED_TENSORS)):
        layer = build(config, "down_proj")
        load(layer, {"weight": codes, "weight_scale": scale})
        finish(layer)
        outputs.append(layer(x)[0].float())
    assert type(layer.quant_method).__name__ != "W8A8LinearMethod"
    ours, stock = outputs
    difference = (ours - stock).norm() / stock.norm()
    assert difference <= 5e-3, f"relative L2 {difference:.2e}"


def check_skipping(rank: int, world: int) -> None:
    from vllm.model_executor.layers.linear import UnquantizedLinearMethod

    from vllm_w8a8_plugin.config import W8A8Config
    from vllm_w8a8_plugin.linear import W8A8OnlineLinearMethod

    config = W8A8Config(skip=["down_proj"])
    assert isinstance(build(config, "down_proj").quant_method, UnquantizedLinearMethod)
    assert isinstance(build(config, "o_proj").quant_method, W8A8OnlineLinearMethod)
    for skip in (["q_proj"], ["re:.*[qk]_proj"]):
        config = W8A8Config(skip=skip)
        config.packed_modules_mapping = {"qkv_proj": ["q_proj", "k_proj", "v_proj"]}
        with pytest.raises(ValueError, match=r"vLLM fuses them into one layer, qkv_proj: skip qkv_proj"):
            build(config, "qkv_proj")
    for skip in (["qkv_proj"], ["q_proj", "k_proj", "v_proj"]):
        config = W8A8Config(skip=skip)
        config.packed_modules_mapping = {"qkv_proj": ["q_proj", "k_proj", "v_proj"]}
        assert isinstance(build(config, "qkv_proj").quant_method, UnquantizedLinearMethod)


@pytest.mark.parametrize("world", [1, 2])
def test_every_rank_has_its_rows_and_scales(world: int) -> None:
    run_ranks(world, check_checkpoint_rows)


@pytest.mark.parametrize("world", [1, 2])
def test_online_scales_are_those_of_the_whole_matrix(world: int) -> None:
    run_ranks(world, check_online_scales)


@pytest.mark.skipif(not torch.cpu._is_vnni_supported(), reason="needs VNNI: without it vLLM's own sums saturate")
def test_one_layer_near_stock() -> None:
    run_ranks(1, check_against_stock)


def test_skipped_layers() -> None:
    run_ranks(1, check_skipping)
