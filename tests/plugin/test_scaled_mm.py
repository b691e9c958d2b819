"""Our kernel in vLLM's own int8 schemes: every kind of scale and zero point, against fp64 and against vLLM's kernel."""

import copy
import itertools
import json
import logging
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from types import SimpleNamespace

import pytest
import torch
from checkpoints import COMPRESSED_TENSORS
from layers import finish, load, run_ranks

pytest.importorskip("vllm", reason="vLLM is not installed: `make test` installs it")
from vllm_w8a8_plugin import compat, log, stock_int8
from w8a8_kernels.scaled_mm.reference import int32_mm_reference

OURS = "W8A8Int8ScaledMMLinearKernel"
HIDDEN, HEADS, KV_HEADS, HEAD_DIM = 48, 4, 2, 16
ROWS = 33
BESIDE_ZERO = 4  # a row whose range does not include 0
# Seen: 1.5 units in the last place of fp32, of three roundings: two scales and the bias.
FP32_ROUNDINGS = 4 * 2.0**-24
BF16_ROUNDING = 2.0**-8

METHODS = ("compressed-tensors", "quark")
# By weights' scales, whether activations are dynamic, whether symmetric.
SCHEMES = list(itertools.product(("channel", "tensor"), (False, True), (True, False)))


@pytest.fixture(autouse=True)
def no_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("VLLM_W8A8_ENABLE", "VLLM_W8A8_KERNEL", "VLLM_W8A8_FUSION"):
        monkeypatch.delenv(name, raising=False)


def quant_config(method: str, weights: str, dynamic: bool, symmetric: bool) -> object:
    """vLLM's own config of a checkpoint."""
    if method == "quark":
        from vllm.model_executor.layers.quantization.quark.quark import QuarkConfig

        weight = {"dtype": "int8", "qscheme": f"per_{weights}", "symmetric": True, "is_dynamic": False}
        inputs = {
            "dtype": "int8",
            "qscheme": "per_channel" if dynamic else "per_tensor",
            "symmetric": symmetric,
            "is_dynamic": dynamic,
        }
        every_layer = {"weight": weight, "input_tensors": inputs, "output_tensors": None, "bias": None, "target_device": None}
        config = QuarkConfig.from_config(
            {
                "quant_method": "quark",
                "export": {"kv_cache_group": [], "pack_method": "reorder"},
                "global_quant_config": every_layer,
                "layer_quant_config": {},
                "layer_type_quant_config": {},
                "exclude": [],
            }
        )
    else:
        from vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors import CompressedTensorsConfig

        given = copy.deepcopy(COMPRESSED_TENSORS)
        group = given["config_groups"]["group_0"]
        group["weights"]["strategy"] = weights
        group["input_activations"] |= {
            "dynamic": dynamic,
            "symmetric": symmetric,
            "strategy": "token" if dynamic else "tensor",
        }
        config = CompressedTensorsConfig.from_config(given)
    config.packed_modules_mapping = {"qkv_proj": ["q_proj", "k_proj", "v_proj"]}
    return config


def qkv(config: object, dtype: torch.dtype, bias: bool) -> torch.nn.Module:
    from vllm.model_executor.layers.linear import QKVParallelLinear

    return QKVParallelLinear(
        HIDDEN, HEAD_DIM, HEADS, KV_HEADS, bias=bias, params_dtype=dtype, quant_config=config, prefix="model.layers.0.qkv_proj"
    )


class Checkpoint:
    """What a checkpoint holds of q, k and v, weights far from the mean 0 among them; and the layer's output in fp64."""

    def __init__(
        self, weights: str, dynamic: bool, symmetric: bool, dtype: torch.dtype, seed: int = 0, row_mean: int = 127
    ) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.symmetric, self.dynamic = symmetric, dynamic
        self.parts: dict[str, dict[str, torch.Tensor]] = {}
        for i, (shard, heads) in enumerate((("q", HEADS), ("k", KV_HEADS), ("v", KV_HEADS))):
            n = heads * HEAD_DIM
            weight = torch.randint(-127, 128, (n, HIDDEN), generator=generator, dtype=torch.int8)
            weight[3] = row_mean
            weight[5] = -row_mean
            scale = torch.rand(n, 1, generator=generator) * 0.01 + 0.001
            self.parts[shard] = {
                "weight": weight,
                "weight_scale": scale if weights == "channel" else torch.tensor(0.003 * (i + 1)),
                "bias": torch.randn(n, generator=generator).to(dtype),
            }
        self.scale, self.zero_point = torch.tensor([0.021 + seed / 1000]), torch.tensor([seed - 37], dtype=torch.int8)
        self.x = torch.randn(ROWS, HIDDEN, generator=generator).to(dtype)
        self.x[3] = 0
        self.x[BESIDE_ZERO] = self.x[BESIDE_ZERO].abs() + 1

    def load(self, layer: torch.nn.Module) -> torch.nn.Module:
        self.load_tensors(layer)
        finish(layer)
        return layer

    def load_tensors(self, layer: torch.nn.Module | SimpleNamespace) -> None:
        for shard, tensors in self.parts.items():
            given = dict(tensors)
            if layer.bias is None:
                del given["bias"]
            if not self.dynamic:
                given["input_scale"] = self.scale
                if not self.symmetric:
                    given["input_zero_point"] = self.zero_point
            load(layer, given, shard)

    def expected(self, bias: bool) -> torch.Tensor:
        """fp64, of int64 sums: `s_x s_w sum((q - z) w) + bias`."""
        x = self.x.double()
        if not self.dynamic:
            scale = self.scale.double()
            zero = torch.zeros(1).double() if self.symmetric else self.zero_point.double()
            # In fp32, as every kernel divides: a tie is a tie there.
            codes = ((self.x.float() / self.scale).round() + zero).clamp(-128, 127)
        elif self.symmetric:
            amax = x.abs().amax(1, keepdim=True)
            scale, zero = torch.where(amax == 0, 1, amax.float() / torch.tensor(127.0)).double(), torch.zeros(1).double()
            codes = (self.x.float() / scale.float()).round().clamp(-127, 127)
        else:
            low, high = x.amin(1, keepdim=True).clamp(max=0), x.amax(1, keepdim=True).clamp(min=0)
            scale = (high.float() - low.float()) / torch.tensor(255.0)
            scale = torch.where(scale == 0, 1, scale)
            zero = (-128 - low.float() / scale).round().clamp(-128, 127).double()
            codes = ((self.x.float() / scale).round() + zero).clamp(-128, 127)
            scale = scale.double()
        weight = torch.cat([p["weight"] for p in self.parts.values()]).long()
        w_scale = torch.cat([p["weight_scale"].reshape(-1, 1).expand(len(p["weight"]), 1) for p in self.parts.values()])
        sums = (codes.long() - zero.long()) @ weight.t()
        out = sums.double() * scale * w_scale.double().t()
        return out + torch.cat([p["bias"] for p in self.parts.values()]).double() if bias else out


def relative_l2(a: torch.Tensor, b: torch.Tensor) -> float:
    return ((a.double() - b.double()).norm() / b.double().norm()).item()


def check_schemes(rank: int, world: int) -> None:
    """All schemes of the method that a variable names."""
    for weights, dynamic, symmetric in SCHEMES:
        for dtype, bias in itertools.product((torch.bfloat16, torch.float32), (False, True)):
            check_layer(os.environ["METHOD"], weights, dynamic, symmetric, dtype, bias)


def check_layer(method: str, weights: str, dynamic: bool, symmetric: bool, dtype: torch.dtype, bias: bool) -> None:
    from vllm_w8a8_plugin import scaled_mm

    torch.set_default_dtype(dtype)  # as while vLLM loads a model: its own kernel reads it
    checkpoint, config = Checkpoint(weights, dynamic, symmetric, dtype), quant_config(method, weights, dynamic, symmetric)
    expected = checkpoint.expected(bias)
    # Where the bias cancels a product, that product's rounding stays.
    magnitude = expected.abs() + checkpoint.expected(False).abs()
    rounding = BF16_ROUNDING * expected.abs() if dtype == torch.bfloat16 else 0

    kernels = compat.int8_kernels()
    kernels[:] = [kernel for kernel in kernels if kernel.__name__ != OURS]
    theirs = checkpoint.load(qkv(config, dtype, bias))(checkpoint.x)[0]
    scaled_mm.offer()
    for forced in ("", "torch"):  # the default is oneDNN
        os.environ["VLLM_W8A8_KERNEL"] = forced
        name = f"{method}, {weights}, dynamic {dynamic}, symmetric {symmetric}, {dtype}, bias {bias}, {forced or 'default'}"
        layer = checkpoint.load(qkv(config, dtype, bias))
        assert type(layer.scheme.kernel).__name__ == OURS, name
        ours = layer(checkpoint.x)[0]
        assert torch.equal(layer(checkpoint.x.view(3, -1, HIDDEN))[0].view(ROWS, -1), ours), name
        assert layer(checkpoint.x[:0])[0].shape == (0, ours.shape[1]), name

        excess = ((ours.double() - expected).abs() - rounding) / magnitude.clamp(min=1e-30)
        assert excess.max() <= FP32_ROUNDINGS, f"{name}: {excess.max() * 2**24:.2f} units of fp32"
        ours_l2, theirs_l2 = relative_l2(ours, expected), relative_l2(theirs, expected)
        print(f"{name}: relative L2 from fp64 {ours_l2:.2e}, vLLM's kernel {theirs_l2:.2e}")
        assert ours_l2 <= 1.1 * theirs_l2 + 1e-7, name
        # vLLM quantizes dynamic activations by another formula, and a row beside 0 with another zero point.
        ordinary = torch.arange(ROWS) != BESIDE_ZERO
        if torch.cpu._is_vnni_supported():  # else vLLM's oneDNN sums saturate
            assert relative_l2(ours[ordinary], theirs[ordinary]) <= 1e-2, name


@pytest.mark.parametrize("method", METHODS)
def test_schemes_of_vllm(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("METHOD", method)
    run_ranks(1, check_schemes)


def check_reload(rank: int, world: int) -> None:
    """The steps of vLLM's `reload_weights`, twice: outputs of the other weights, from the addresses of before."""
    from vllm.model_executor.model_loader.reload import (
        finalize_layerwise_reload,
        initialize_layerwise_reload,
        record_metadata_for_reloading,
    )

    from vllm_w8a8_plugin import scaled_mm

    scaled_mm.offer()
    torch.set_default_dtype(torch.bfloat16)
    method = os.environ["METHOD"]
    for forced, (weights, dynamic, symmetric) in itertools.product(("", "torch"), SCHEMES):
        if method == "compressed-tensors" and weights == "tensor" and not dynamic:
            # vLLM counts one input scale as often as the layer has parts, so that it deems such a layer complete before the
            # last part's weight scale has come.
            continue
        os.environ["VLLM_W8A8_KERNEL"] = forced
        name = f"{weights}, dynamic {dynamic}, symmetric {symmetric}, {forced or 'default'}"
        config = quant_config(method, weights, dynamic, symmetric)
        layer = qkv(config, torch.bfloat16, False)
        record_metadata_for_reloading(layer)
        Checkpoint(weights, dynamic, symmetric, torch.bfloat16).load(layer)
        addresses = {key: parameter.data_ptr() for key, parameter in layer.named_parameters()}
        packed = layer.packed_weight
        # Rows whose sums are smaller than those before, and greater.
        for seed, row_mean in ((1, 0), (2, 120)):
            other = Checkpoint(weights, dynamic, symmetric, torch.bfloat16, seed, row_mean)
            initialize_layerwise_reload(layer)
            # As a model does, which looks for its parameters once: after the last of them vLLM brings back those of before.
            other.load_tensors(SimpleNamespace(bias=None, **dict(layer.named_parameters())))
            finalize_layerwise_reload(layer, None)
            assert {key: parameter.data_ptr() for key, parameter in layer.named_parameters()} == addresses, name
            assert layer.packed_weight is packed, name
            fresh = other.load(qkv(config, torch.bfloat16, False))
            assert torch.equal(layer(other.x)[0], fresh(other.x)[0]), f"{name}: the output is not that of the new weights"
            assert relative_l2(layer(other.x)[0], other.expected(False)) <= 5e-3, name


@pytest.mark.parametrize("method", METHODS)
def test_reload(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("METHOD", method)
    run_ranks(1, check_reload)


def check_ranks(rank: int, world: int) -> None:
    """A row-parallel layer cut between two ranks: each takes off the zero point of its own columns."""
    from vllm.model_executor.layers.linear import RowParallelLinear

    from vllm_w8a8_plugin import scaled_mm

    scaled_mm.offer()
    generator = torch.Generator().manual_seed(0)
    K, N = 96, 20
    weight = torch.randint(-127, 128, (N, K), generator=generator, dtype=torch.int8)
    weight[2, : K // 2] = 127
    given = {"weight": weight, "weight_scale": torch.full((N, 1), 0.01), "input_scale": torch.tensor([0.02])}
    zero_point = torch.tensor([-90], dtype=torch.int8)
    x = torch.randn(5, K, generator=generator)
    config = quant_config("compressed-tensors", "channel", False, False)
    layer = RowParallelLinear(K, N, bias=False, params_dtype=torch.float32, quant_config=config, prefix="model.down_proj")
    load(layer, given | {"input_zero_point": zero_point})
    finish(layer)
    part = slice(K // world * rank, K // world * (rank + 1))
    out = layer(x[:, part].contiguous())[0]
    codes = ((x / 0.02).round() - 90).clamp(-128, 127).long() + 90
    expected = (codes @ weight.long().t()).double() * 0.02 * 0.01
    assert relative_l2(out, expected) <= 1e-6


def test_ranks_take_off_their_own_columns() -> None:
    run_ranks(2, check_ranks)


@pytest.mark.parametrize(
    "weight",
    [
        torch.randint(-127, 128, (9, 50), generator=torch.Generator().manual_seed(0)).to(torch.int8),
        torch.full((3, 16), 127, dtype=torch.int8),
        torch.full((3, 17), -128, dtype=torch.int8),
        torch.tensor([[5, -5]], dtype=torch.int8),
        torch.zeros(2, 3, dtype=torch.int8),
        torch.zeros(0, 3, dtype=torch.int8),
    ],
    ids=["ordinary", "all 127", "all -128", "sum 0", "all 0", "no rows"],
)
def test_columns_that_take_off_a_zero_point(weight: torch.Tensor) -> None:
    from vllm_w8a8_plugin.scaled_mm import append_zero_point_columns

    longer = append_zero_point_columns(weight)
    K = weight.shape[1]
    assert torch.equal(longer[:, :K], weight)
    assert torch.equal(longer[:, K:].sum(1), -weight.sum(1))
    assert longer.shape[1] == K or longer.shape[1] % 16 == 0
    assert (longer[:, K:].abs() <= 127).all() or longer.shape[1] == K


def test_columns_are_kept_for_weights_that_are_loaded_later() -> None:
    """As many as there are, and a quarter more than the first weight needs at least."""
    from vllm_w8a8_plugin.scaled_mm import append_zero_point_columns

    weight = torch.zeros(2, 64, dtype=torch.int8)
    weight[0, :40] = 127
    columns = append_zero_point_columns(weight).shape[1] - 64
    assert columns >= 50
    for other in (torch.zeros_like(weight), -weight, weight.clone()):
        other[1, : min(columns, 64)] = 127
        longer = append_zero_point_columns(other, columns)
        assert longer.shape == (2, 64 + columns)
        assert torch.equal(longer[:, 64:].sum(1), -other.sum(1))
    with pytest.raises(ValueError, match=r"needs 64 columns .* and the one before left 8: .* Start the engine with the new"):
        append_zero_point_columns(torch.full((1, 64), 127, dtype=torch.int8), 8)


def test_no_precision_is_lost_to_the_zero_point() -> None:
    """A weight and activations whose `acc` and `z colsum` both exceed 2^24, and nearly cancel."""
    from vllm_w8a8_plugin.scaled_mm import append_zero_point_columns

    generator = torch.Generator().manual_seed(0)
    M, N, K, z = 16, 32, 8192, -127
    weight = torch.randint(90, 128, (N, K), generator=generator, dtype=torch.int8)
    codes = (z + torch.randint(-1, 2, (M, K), generator=generator)).to(torch.int8)  # almost all inputs are almost 0
    x_scale, w_scale = 0.0217, torch.rand(N, generator=generator) * 0.01
    expected = ((codes.long() - z) @ weight.long().t()).double() * torch.tensor(x_scale).double() * w_scale.double()

    longer = append_zero_point_columns(weight)
    padded = torch.cat((codes, torch.full((M, longer.shape[1] - K), z, dtype=torch.int8)), 1)
    in_int32 = int32_mm_reference(padded, longer).float() * x_scale * w_scale
    acc = int32_mm_reference(codes, weight)
    correction = z * weight.sum(1, dtype=torch.int32)
    assert acc.abs().max() > 2**24
    as_bias = acc.float() * x_scale * w_scale + (-correction.float() * x_scale * w_scale)
    # vLLM's Triton kernel, `out -= (x_s * w_s_row * azp_adj).to(x.dtype)`.
    after_rounding = (acc.float() * x_scale * w_scale).bfloat16() - (correction.float() * x_scale * w_scale).bfloat16()

    units = {
        name: ((got.double() - expected).abs() / expected.abs().clamp(min=1e-9)).max().item() * 2**24
        for name, got in {"in int32": in_int32, "as fp32 bias": as_bias, "after rounding to bf16": after_rounding}.items()
    }
    print("units of fp32, at most: " + ", ".join(f"{name} {value:.3g}" for name, value in units.items()))
    assert units["in int32"] <= 4
    assert units["as fp32 bias"] > 100 * units["in int32"], "then the columns are not worth their while"


def test_quantizes_asymmetrically() -> None:
    from vllm_w8a8_plugin.scaled_mm import quantize_asymmetric

    x = torch.randn(9, 40, generator=torch.Generator().manual_seed(0))
    x[1], x[2], x[3] = 0, x[2].abs() + 5, -x[3].abs() - 5
    x[4, 7], x[5, 7] = float("nan"), float("-inf")
    x[6] *= 1e-42  # subnormal numbers, whose range divided by 255 underflows
    codes, scale, zero_point = quantize_asymmetric(x)
    assert (codes.dtype, scale.dtype, zero_point.dtype) == (torch.int8, torch.float32, torch.int8)
    assert scale.isnan().flatten().tolist() == [i in (4, 5) for i in range(9)]
    assert (zero_point[2], zero_point[3]) == (-128, 127)
    back = (codes.float() - zero_point.float()) * scale
    for row in (0, 1, 2, 3, 7, 8):
        assert (back[row] - x[row]).abs().max() <= 1.001 * scale[row]
    assert (back[1] == 0).all()
    plain = codes[[0, 7, 8]]
    assert plain.amin() == -128
    assert plain.amax() == 127


def test_quantizes_statically() -> None:
    from vllm_w8a8_plugin.scaled_mm import quantize_static

    x = torch.tensor([[0.0, 0.25, 0.75, -0.75, 1e9, -1e9, float("nan"), float("inf")]])
    scale = torch.tensor([0.5])
    assert quantize_static(x, scale, None).tolist() == [[0, 0, 2, -2, 127, -128, 0, 127]]
    zero_point = torch.tensor([-100], dtype=torch.int32)
    assert quantize_static(x, scale, zero_point).tolist() == [[-100, -100, -98, -102, 127, -128, -100, 127]]


@pytest.mark.parametrize("zero_point", [None, -37])
def test_vllms_quantizer_gives_the_codes_of_ours(zero_point: int | None) -> None:
    """The one that runs on GPUs, here as its CPU build has it."""
    from vllm_w8a8_plugin.scaled_mm import quantize_static, quantize_static_by_vllm

    compat.load_vllm_ops()
    x = torch.randn(17, 64, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16)
    given = torch.tensor([0.0213]), None if zero_point is None else torch.tensor([zero_point], dtype=torch.int32)
    ours, theirs = quantize_static(x, *given), quantize_static_by_vllm(x[:, :], *given)
    assert (theirs.dtype, theirs.shape) == (ours.dtype, ours.shape)
    assert (ours.int() - theirs.int()).abs().max() <= 1
    assert (ours == theirs).float().mean() >= 0.99


@pytest.mark.slow
@pytest.mark.parametrize("static", [True, False])
def test_quantizers_compile_to_one_kernel(static: bool) -> None:
    """On a CPU, the columns of zero points included; and the codes are those of eager mode."""
    from torch._inductor.utils import run_and_get_code

    from vllm_w8a8_plugin.scaled_mm import quantize_asymmetric, quantize_static

    scale, zero_point = torch.tensor([0.021]), torch.tensor([-37], dtype=torch.int32)

    def quantize(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        codes, *rest = (quantize_static(x, scale, zero_point), zero_point) if static else quantize_asymmetric(x)
        zero_points = rest[-1].to(torch.int8).view(-1, 1).expand(x.shape[0], 16)
        return torch.cat((codes, zero_points), dim=1), *rest

    x = torch.randn(17, 64, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16)
    torch._dynamo.reset()
    compiled, (code,) = run_and_get_code(torch.compile(quantize, dynamic=True), x)
    assert code.count("async_compile.cpp") == 1
    for ours, theirs in zip(compiled, quantize(x), strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize(("scales", "widths"), [([1.0], [3, 2]), ([1.0, 2.0], [3, 2]), ([1.0, 2.0, 3.0, 4.0, 5.0], [3, 2])])
def test_scales_of_channels(scales: list[float], widths: list[int]) -> None:
    from vllm_w8a8_plugin.scaled_mm import channel_scales

    expected = {1: [1] * 5, 2: [1, 1, 1, 2, 2], 5: [1, 2, 3, 4, 5]}[len(scales)]
    got = channel_scales(torch.tensor(scales), widths, 5)
    assert got.shape == (5, 1)
    assert got.flatten().tolist() == expected
    with pytest.raises(ValueError, match=r"got 4 weight scales, expected 1, 5 \(channels\) or 2 \(fused parts\)"):
        channel_scales(torch.ones(4), widths, 5)


def test_static_activations_need_one_scale() -> None:
    from vllm_w8a8_plugin.scaled_mm import one_value

    with pytest.raises(ValueError, match=r"need one input scale a layer, got shape \(3,\)"):
        one_value(torch.ones(3), "input scale")
    with pytest.raises(ValueError, match="need one input scale a layer, got none"):
        one_value(None, "input scale")


@pytest.fixture
def kernels() -> Iterator[dict]:
    """vLLM's lists, as they are without us; restored afterwards."""
    from vllm.model_executor.kernels import linear

    before = {platform: list(kernels) for platform, kernels in linear._POSSIBLE_INT8_KERNELS.items()}
    for kernels in linear._POSSIBLE_INT8_KERNELS.values():
        kernels[:] = [kernel for kernel in kernels if kernel.__name__ != OURS]
    yield linear._POSSIBLE_INT8_KERNELS
    for platform, kernels in before.items():
        linear._POSSIBLE_INT8_KERNELS[platform][:] = kernels


@pytest.fixture
def said(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> list[str]:
    """Our warnings, at vLLM's usual level of logging; what vLLM and we say once is said again."""
    from vllm import logger

    caplog.set_level(logging.INFO, stock_int8._LOGGER)
    logger._print_info_once.cache_clear()
    monkeypatch.setattr(log, "_said", set())
    lines: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: lines.append(record.getMessage())
    monkeypatch.setattr(log.logger, "handlers", [*log.logger.handlers, handler])
    return lines


def choose(**options: bool) -> object:
    from vllm.model_executor.kernels.linear import init_int8_linear_kernel

    wanted = {"is_channelwise": True, "is_static_input_scheme": False, "input_symmetric": True} | options
    return init_int8_linear_kernel(**wanted, module_name="CompressedTensorsW8A8Int8")


def test_in_front_of_the_list_once(kernels: dict, pretend_gpu: Callable) -> None:
    from vllm.platforms.interface import PlatformEnum

    from vllm_w8a8_plugin import scaled_mm

    before = {platform: list(names) for platform, names in kernels.items()}
    scaled_mm.offer()
    pretend_gpu(9, 0)
    for _ in range(2):
        scaled_mm.offer()
    for platform, names in kernels.items():
        ours = [scaled_mm.W8A8Int8ScaledMMLinearKernel] if platform in (PlatformEnum.CPU, PlatformEnum.CUDA) else []
        assert names == ours + before[platform]


@pytest.mark.parametrize("capability", [(7, 5), (9, 0), (10, 0), (12, 0)])
@pytest.mark.parametrize("static", [True, False])
@pytest.mark.parametrize("symmetric", [True, False])
def test_chosen_on_every_gpu(
    kernels: dict, pretend_gpu: Callable, said: list[str], capability: tuple[int, int], static: bool, symmetric: bool
) -> None:
    from vllm_w8a8_plugin import scaled_mm

    pretend_gpu(*capability)
    stock_int8.watch()
    scaled_mm.offer()
    assert type(choose(is_static_input_scheme=static, input_symmetric=symmetric)).__name__ == OURS
    assert said == []


def test_refuses_where_nothing_of_ours_runs(pretend_gpu: Callable) -> None:
    from vllm_w8a8_plugin.scaled_mm import W8A8Int8ScaledMMLinearKernel

    pretend_gpu(6, 1)
    assert W8A8Int8ScaledMMLinearKernel.is_supported() == (False, "needs compute capability 7.0")
    assert W8A8Int8ScaledMMLinearKernel.is_supported(61) == (False, "needs compute capability 7.0")
    assert W8A8Int8ScaledMMLinearKernel.is_supported(75) == (True, None)


@pytest.mark.parametrize(
    ("capability", "warned"), [((7, 5), False), ((9, 0), False), ((10, 0), True), ((10, 3), True), ((12, 0), True)]
)
def test_warns_where_stock_raises(
    kernels: dict, pretend_gpu: Callable, said: list[str], capability: tuple[int, int], warned: bool
) -> None:
    """Not asked: vLLM's kernel is chosen, once a process a line says that it will raise."""
    pretend_gpu(*capability)
    stock_int8.watch()
    stock_int8.watch()
    for symmetric in (True, False):
        assert type(choose(input_symmetric=symmetric)).__name__ == "CutlassInt8ScaledMMLinearKernel"
    version = ".".join(map(str, capability))
    assert said == (
        [
            "CompressedTensorsW8A8Int8: vLLM's own CUTLASS int8 product, its first choice, raises at the first forward on "
            f"compute capability {version}. VLLM_W8A8_ENABLE=1 mends it: int8 layers then run on this plugin's kernels"
        ]
        if warned
        else []
    )


def test_says_when_it_is_asked_and_not_chosen(
    kernels: dict, pretend_gpu: Callable, said: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from vllm_w8a8_plugin import scaled_mm

    monkeypatch.setenv("VLLM_W8A8_ENABLE", "1")
    monkeypatch.setenv("VLLM_DISABLED_KERNELS", OURS)
    pretend_gpu(9, 0)
    stock_int8.watch()
    scaled_mm.offer()
    assert type(choose()).__name__ == "CutlassInt8ScaledMMLinearKernel"
    assert said == [
        "VLLM_W8A8_ENABLE=1, but vLLM chose CutlassInt8ScaledMMLinearKernel for CompressedTensorsW8A8Int8: --linear-backend, "
        "linear_backend_per_quant or VLLM_DISABLED_KERNELS leaves this plugin's kernel out"
    ]


@pytest.mark.parametrize(
    ("forced", "message"), [("dp4a", "cannot run here: the Triton kernels need a GPU"), ("fast", "no such")]
)
def test_forced_kernel_that_cannot_run_is_refused(
    kernels: dict, monkeypatch: pytest.MonkeyPatch, forced: str, message: str
) -> None:
    from vllm_w8a8_plugin import scaled_mm

    if torch.cuda.is_available():
        pytest.skip("what can run on this machine's GPU is another list")
    scaled_mm.offer()
    monkeypatch.setenv("VLLM_W8A8_KERNEL", forced)
    with pytest.raises(ValueError, match=message):
        choose()


def test_releases_without_the_list_are_named(monkeypatch: pytest.MonkeyPatch, said: list[str]) -> None:
    from vllm_w8a8_plugin import registration

    monkeypatch.setattr(compat, "_INT8_KERNELS", ("vllm.model_executor.kernels.linear", "_NO_SUCH_LIST"))
    registration._offer_int8_kernel()
    (line,) = said
    assert line.startswith("vLLM's own int8 schemes stay on its kernels: vllm.model_executor.kernels.linear._NO_SUCH_LIST")


REGISTERED = """
import json, logging.config, sys
import vllm_w8a8_plugin
vllm_w8a8_plugin.register()
vllm_w8a8_plugin.register()
imported = "vllm.model_executor.kernels.linear" in sys.modules
from vllm.model_executor.kernels import linear
from vllm.logger import DEFAULT_LOGGING_CONFIG
logging.config.dictConfig(DEFAULT_LOGGING_CONFIG)  # newer releases configure logging after they have loaded plugins
lists = {p.name: [k.__name__ for k in kernels] for p, kernels in linear._POSSIBLE_INT8_KERNELS.items()}
print("RESULT" + json.dumps([imported, lists, [type(f).__name__ for f in linear.logger.filters]]))
"""


def registered(env: dict[str, str]) -> tuple[bool, dict[str, list[str]], list[str]]:
    """Whether registering imported vLLM's kernels, their lists afterwards, and the filters of their logger."""
    inherited = {k: v for k, v in os.environ.items() if not k.startswith(("VLLM_W8A8", "TRITON_INTERPRET"))}
    inherited["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path)
    command = [sys.executable, "-c", REGISTERED]
    done = subprocess.run(command, env=inherited | env, capture_output=True, text=True, timeout=300)
    assert "RESULT" in done.stdout, done.stdout + done.stderr
    return tuple(json.loads(done.stdout.rpartition("RESULT")[2]))


def test_list_is_vllms_own_unless_asked() -> None:
    """Without the variable nothing is imported either."""
    imported, without, filters = registered({})
    assert not imported
    assert not any(OURS in names for names in without.values())
    assert filters == ["ChoiceFilter"]
    platform = "CUDA" if torch.cuda.is_available() else "CPU"
    _, asked, _ = registered({"VLLM_W8A8_ENABLE": "1"})
    assert asked == without | {platform: [OURS, *without[platform]]}
