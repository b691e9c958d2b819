"""Warming up reaches every variant. That nothing compiles afterwards is seen on a GPU."""

import logging

import pytest
import torch

import w8a8_kernels
from w8a8_kernels.compilation import warmup_rows
from w8a8_kernels.quantize.config import quantize_config
from w8a8_kernels.scaled_mm import dp4a
from w8a8_kernels.select import Facts, select_scaled_mm
from w8a8_kernels.tiles import default_tile


@pytest.mark.parametrize(
    ("most", "rows"),
    [(1, [1]), (2, [1, 2]), (3, [1, 2, 3]), (8, [1, 2, 3, 4, 5, 8]), (12, [1, 2, 3, 4, 5, 8, 9, 12])],
)
def test_rows(most: int, rows: list[int]) -> None:
    assert warmup_rows(most) == rows


@pytest.mark.parametrize("has_cutlass", [True, False])
@pytest.mark.parametrize(("N", "K"), [(6144, 4096), (1024, 3072), (4096, 12288), (96, 520), (1009, 4099)])
@pytest.mark.parametrize("most", [200, 255, 256, 2048])
def test_rows_reach_every_variant(most: int, N: int, K: int, has_cutlass: bool) -> None:
    def variant(M: int, capability: tuple[int, int], num_sms: int) -> tuple:
        facts = Facts(capability, has_triton=True, has_cutlass=has_cutlass)
        kernel = select_scaled_mm(facts, M, N, K).kernel
        tile = None
        if kernel == "triton":
            tile = default_tile(M, N, K, num_sms=num_sms, capability=capability)
        if kernel == "dp4a":
            tile = dp4a.default_tile(M, N, K, num_sms)
        return kernel, tile, quantize_config(M, K, torch.bfloat16)

    for capability, num_sms in (((9, 0), 132), ((7, 5), 40)):
        reached = {variant(M, capability, num_sms) for M in warmup_rows(most)}
        assert reached == {variant(M, capability, num_sms) for M in range(1, most + 1)}


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU to warm up")
def test_says_that_a_cpu_has_nothing_to_compile(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        assert w8a8_kernels.warmup([(64, 64)], [1, 16]) == 0
    assert "PyTorch sees no GPU, so there is nothing to compile" in caplog.text


@pytest.mark.parametrize(
    ("batch_sizes", "dtype", "message"),
    [([], torch.bfloat16, "batch sizes []"), ([0, 4], torch.bfloat16, "[0, 4]"), ([1], torch.int8, "got torch.int8")],
)
def test_refuses(batch_sizes: list[int], dtype: torch.dtype, message: str) -> None:
    with pytest.raises(ValueError) as error:
        w8a8_kernels.warmup([(64, 64)], batch_sizes, dtype)
    assert message in str(error.value)


@pytest.mark.gpu
@pytest.mark.parametrize("bias", [False, True])
def test_nothing_compiles_after_warmup(bias: bool) -> None:
    N, K, most = 384, 1040, 700
    assert w8a8_kernels.warmup([(N, K)], [most], bias=bias) > 0
    assert w8a8_kernels.warmup([(N, K)], [most], bias=bias) == 0
    before = w8a8_kernels.compilations()
    weight = torch.randint(-127, 128, (N, K), dtype=torch.int8, device="cuda")
    scale = torch.rand(N, 1, device="cuda")
    zeros = torch.zeros(N, dtype=torch.bfloat16, device="cuda") if bias else None
    for M in range(1, most + 1):
        w8a8_kernels.int8_linear(torch.randn(M, K, dtype=torch.bfloat16, device="cuda"), weight, scale, zeros)
    assert w8a8_kernels.compilations() == before
