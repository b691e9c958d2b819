"""Warming up reaches every variant. That nothing compiles afterwards is seen on a GPU."""

import json
import logging
from pathlib import Path

import pytest
import torch
from variants import Case, serve_cases

import w8a8_kernels
from w8a8_kernels.compilation import warmup_rows
from w8a8_kernels.tiles import Tile


@pytest.mark.parametrize(
    ("most", "rows"),
    [(1, [1]), (2, [1, 2]), (3, [1, 2, 3]), (8, [1, 2, 3, 4, 5, 8]), (12, [1, 2, 3, 4, 5, 8, 9, 12])],
)
def test_rows(most: int, rows: list[int]) -> None:
    assert warmup_rows(most) == rows


LAYERS = [(6144, 4096), (1024, 3072), (4096, 12288), (96, 520), (1009, 4099)]


def serving_cases(config_dir: Path) -> list[Case]:
    """Layers, targets, dtypes, most rows, and kernels by measurement and by force."""
    cases = [
        Case(target, N, K, 2048, dtype=dtype) for N, K in LAYERS for target, dtype in ((120, "bfloat16"), (75, "float16"))
    ]
    cases += [Case(90, N, K, 600, bias=True, cutlass=True) for N, K in LAYERS]
    cases += [Case(90, 1024, K, 300, hadamard=block) for K, block in ((3072, 128), (1040, 16), (16384, 64))]
    cases += [Case(90, 6144, 4096, most, cutlass=True) for most in (1, 200, 255, 256, 257)]
    cases += [Case(90, 1024, 3072, 600, kernel=kernel) for kernel in ("dp4a", "triton")]
    cases += [Case(90, 96, K, 300, dtype=dtype) for K in (16384, 40000) for dtype in ("bfloat16", "float32")]
    cases += [Case(90, 1024, 3072, most, cutlass=True, config_dir=str(config_dir)) for most in (100, 2048)]
    cases += [Case(90, 1024, K, 1200, hadamard=block, shared_amax=True) for K, block in ((1536, 0), (3072, 64), (40000, 0))]
    # As DeepSeek's two norms read their parts of one projection.
    cases += [Case(90, 1024, 1536, 300, wider=576), Case(90, 1024, 512, 300, wider=1600, offset=1536)]
    return cases


def measured(folder: Path) -> Path:
    """A file with a tile of its own for several buckets of (1024, 3072), and other kernels in two between them."""
    tiles = {str(1 << i): vars(Tile(16, 32 << (i % 3), 256, 4, 2, split_k=1 + i % 2)) for i in (0, 3, 4, 7, 9)}
    tiles["64"] = {"kernel": "cutlass"}
    tiles["256"] = {"kernel": "pingpong"}
    head = {"device": "sm_90", "capability": [9, 0], "date": "2026-11-29", "versions": {}}
    (folder / "sm_90.json").write_text(json.dumps({**head, "tiles": {"1024x3072": tiles}}))
    return folder


@pytest.mark.slow
def test_nothing_compiles_late(tmp_path: Path) -> None:
    """From 1 row to the most, by Triton's own variants. On a GPU the engine's test looks at a whole model."""
    cases = serving_cases(measured(tmp_path))
    results = dict(zip(map(str, cases), serve_cases(cases), strict=True))
    assert {case: result.late for case, result in results.items() if result.late} == {}
    repeated = {case: result.warm for case, result in results.items() if not result.warm}
    assert repeated == {}, "a warm-up that compiles nothing proves nothing"


def test_too_short_a_warmup_is_seen() -> None:
    few, plain, none, shared = serve_cases(
        [
            Case(90, 1024, 3072, 2048, warm_up_to=16),
            Case(90, 1024, 3072, 300, warm_up_fused=False),
            Case(75, 1024, 3072, 1, dtype="float16", warm_up_to=0),
            Case(90, 1024, 3072, 1, warm_up_to=0, shared_amax=True),
        ]
    )
    assert {line.split()[-1] for line in few.late} >= {"quantize_row_kernel", "scaled_mm_split_k_kernel"}
    assert all(int(line.split()[0]) > 16 for line in few.late)
    assert {line.split()[-1] for line in plain.late} == {"rms_norm_quantize_kernel", "silu_mul_quantize_kernel"}
    assert len(none.late) == 6  # quantizer, product and the sum of its parts, two norms, SiLU·mul
    assert [line.split()[-1] for line in shared.late].count("quantize_row_kernel") == 2  # the maximum, and the codes


def test_unaligned_rows_compile_nothing_of_their_own() -> None:
    cases = [
        Case(90, 1024, 3072, 300, wider=64, offset=3),
        Case(90, 1024, 3072, 300, wider=3),
        Case(90, 1009, 4099, 300, wider=13),
    ]
    assert [result.late for result in serve_cases(cases)] == [[], [], []]


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
    norm = torch.ones(K, dtype=torch.bfloat16, device="cuda")
    for M in range(1, most + 1):
        x = torch.randn(M, 2 * K, dtype=torch.bfloat16, device="cuda")
        row = x[:, :K].contiguous()
        w8a8_kernels.int8_linear(row, weight, scale, zeros)
        w8a8_kernels.rms_norm_quantize(row, norm, 1e-6)
        w8a8_kernels.add_rms_norm_quantize(row, row, norm, 1e-6, 1.0)
        w8a8_kernels.silu_mul_quantize(x)
    assert w8a8_kernels.compilations() == before
