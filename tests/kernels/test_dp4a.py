"""The dp4a GEMM: in the interpreter with an expression in place of the instruction, on any GPU with the instruction."""

import dataclasses

import pytest
import torch
from inputs import codes, same_bits
from test_scaled_mm import GPU, OUT_DTYPES, assert_one_rounding, operands

import w8a8_kernels
from w8a8_kernels.scaled_mm import int32_mm_reference

dp4a = pytest.importorskip("w8a8_kernels.scaled_mm.dp4a")
split_k_module = pytest.importorskip("w8a8_kernels.scaled_mm.split_k")
Dp4aTile = dp4a.Dp4aTile

TILES = {
    "default": None,
    "stream": Dp4aTile(4, 8, num_warps=1, tiled=False),
    "stream-split-3": Dp4aTile(8, 8, num_warps=4, tiled=False, split_k=3),
    "tiled": Dp4aTile(32, 128, num_warps=2, tiled=True),
    "tiled-split-4": Dp4aTile(32, 128, num_warps=2, tiled=True, split_k=4),
}
# Few columns, since the interpreter takes 20 ms per program. No rows, no K, K that divides into 16, 8, 4, 2, 1 codes, one row
# or column over a tile of each form.
SHAPES = [
    (0, 8, 8),
    (1, 1, 1),
    (1, 17, 33),
    (3, 9, 0),
    (3, 16, 128),
    (5, 9, 514),
    (6, 10, 72),
    (7, 11, 1036),
    (9, 13, 777),
    (17, 8, 257),
    (33, 129, 40),
]


def dp4a_mm(args: tuple, out_dtype: torch.dtype, tile: str = "default", num_sms: int = 132) -> torch.Tensor:
    return dp4a.scaled_mm_dp4a(*args, out_dtype, num_sms=num_sms, tile=TILES[tile])


def unscaled(x: torch.Tensor, weight: torch.Tensor) -> tuple:
    """Operands whose product is the int32 sums themselves, exact in fp32 up to 2^24."""
    ones = torch.ones(max(len(x), len(weight)), 1, device=x.device)
    return x, ones[: len(x)], weight, ones[: len(weight)], None


@pytest.mark.parametrize("tile", TILES)
@pytest.mark.parametrize(("M", "N", "K"), SHAPES)
def test_sums_equal_the_reference(M: int, N: int, K: int, tile: str, device: torch.device) -> None:
    x, weight = codes(M, K, device), codes(N, K, device, seed=7)
    got = dp4a_mm(unscaled(x, weight), torch.float32, tile)
    assert torch.equal(got, int32_mm_reference(x, weight).float())


@pytest.mark.parametrize("bias", [False, True], ids=["", "bias"])
@pytest.mark.parametrize("tile", ["default", "stream-split-3", "tiled"])
@pytest.mark.parametrize(("M", "N", "K"), [(1, 17, 33), (9, 13, 305), (33, 20, 48)])
def test_rounds_once(M: int, N: int, K: int, tile: str, bias: bool, device: torch.device) -> None:
    # The interpreter truncates when it casts to bf16 (seen on 3.6.0 and 3.9.0); hardware rounds to nearest even.
    for out_dtype in OUT_DTYPES if device.type == "cuda" else (torch.float16, torch.float32):
        args = operands(M, N, K, out_dtype, device, bias)
        got = dp4a_mm(args, out_dtype, tile)
        assert_one_rounding(got, args, out_dtype)
        assert same_bits(got, split_k_module.scaled_mm_split_k(*args, out_dtype, num_sms=132, capability=(9, 0))), (
            "differs from split_k"
        )


# 8,192 steps of the tiled form take a minute in the interpreter.
@pytest.mark.parametrize("tile", ["stream", "stream-split-3", pytest.param("tiled", marks=pytest.mark.gpu)])
def test_sums_are_exact_at_full_range(tile: str, device: torch.device) -> None:
    """The largest sum that the op admits: beyond fp32's integers, inside int32."""
    K = 131072
    x, weight = (torch.full((1, K), value, dtype=torch.int8, device=device) for value in (-128, 127))
    assert dp4a_mm(unscaled(x, weight), torch.float32, tile).item() == -128 * 127 * K


@pytest.mark.parametrize("split_k", [2, 3, 8])
@pytest.mark.parametrize(
    ("tile", "K"),
    [
        pytest.param(Dp4aTile(16, 8, num_warps=4, tiled=False), 1777, id="stream"),
        pytest.param(Dp4aTile(16, 8, num_warps=4, tiled=False), 1040, id="stream-packed"),
        pytest.param(Dp4aTile(32, 128, num_warps=2, tiled=True), 305, id="tiled"),
        pytest.param(Dp4aTile(32, 128, num_warps=2, tiled=True), 304, id="tiled-packed"),
    ],
)
def test_split_does_not_change_a_bit(tile: Dp4aTile, K: int, split_k: int, device: torch.device) -> None:
    args = operands(9, 11, K, torch.float16, device, bias=True)
    got = [
        dp4a.scaled_mm_dp4a(*args, torch.float16, num_sms=1, tile=dataclasses.replace(tile, split_k=s)) for s in (1, split_k)
    ]
    assert same_bits(got[0], got[1])


@pytest.mark.parametrize("tile", ["stream", "tiled"])
@pytest.mark.parametrize(
    "view",
    [
        pytest.param(lambda base: base[::3, :64], id="row-stride"),
        pytest.param(lambda base: base[::3, :77], id="odd-K"),
        pytest.param(lambda base: base.t()[:9, :24], id="column-stride"),
        pytest.param(lambda base: base[15:, 4:68], id="offset-4"),
        pytest.param(lambda base: base[15:, 3:67], id="offset-3"),
        pytest.param(lambda base: base.reshape(-1)[1 : 1 + 7 * 64].view(7, 64), id="contiguous-misaligned"),
        pytest.param(lambda base: base[:, :199][:1].expand(7, -1)[:, :64], id="expanded"),
        pytest.param(lambda base: base[:9].reshape(-1)[: 9 * 197].view(9, 197)[:, :64], id="odd-row-stride"),
    ],
)
def test_any_rows_of_x_and_weight(view, tile: str, device: torch.device) -> None:
    """Rows that do not begin where a word may, in x, in weight, in both."""
    strided = view(codes(24, 200, device))
    packed = codes(7, strided.shape[1], device, seed=3)
    for x, weight in ((strided, packed), (packed, strided), (strided, strided)):
        if weight.stride(1) != 1:
            continue  # no checkpoint and no layer has such a weight
        got = dp4a_mm(unscaled(x, weight), torch.float32, tile)
        assert torch.equal(got, int32_mm_reference(x, weight).float())


@pytest.mark.parametrize("tile", ["stream", "tiled"])
def test_reads_nothing_beyond_a_row(tile: str, device: torch.device) -> None:
    """Codes that follow a row in memory do not reach its sums, whatever K's divisors."""
    base = codes(9, 160, device)
    for K in (72, 76, 78, 79):
        x, weight = base[:4, :K], base[4:, :K]
        got = dp4a_mm(unscaled(x, weight), torch.float32, tile)
        assert torch.equal(got, int32_mm_reference(x, weight).float()), f"K = {K}"


@pytest.mark.parametrize("tile", ["default", "tiled"])
def test_zero_and_nan_rows(tile: str, device: torch.device) -> None:
    args = operands(9, 8, 64, torch.float16, device, bias=True)
    out = dp4a_mm(args, torch.float16, tile)
    assert torch.equal(out[1], args[4]), "a zero row gives exactly the bias"
    assert out[[2, 3]].isnan().all()
    assert not out[[0, 1, 4, 5, 6, 7, 8]].isnan().any()


@pytest.mark.parametrize("tile", ["stream", "tiled"])
def test_fp16_overflow_is_inf(tile: str, device: torch.device) -> None:
    x, weight = (torch.full((rows, 64), 127, dtype=torch.int8, device=device) for rows in (1, 2))
    assert dp4a_mm(unscaled(x, weight), torch.float16, tile).isinf().all()


@pytest.mark.parametrize("num_sms", [40, 80, 132])
@pytest.mark.parametrize("K", [1, 1024, 4096, 4099, 14336])
@pytest.mark.parametrize("N", [1, 1024, 57344])
@pytest.mark.parametrize("M", [1, 2, 3, 4, 8, 16, 17, 64, 4096])
def test_default_tile(M: int, N: int, K: int, num_sms: int) -> None:
    tile = dp4a.default_tile(M, N, K, num_sms)
    assert tile.tiled == (M > dp4a.MAX_STREAM_M)
    assert tile.tiled or tile.block_m >= M, "few rows: each weight byte is read once"
    if tile.tiled:
        assert 2 * min(tile.block_m, tile.block_n) >= 32 * tile.num_warps
    assert tile.split_k in (1, 2, 4, 8)
    assert tile.split_k == 1 or K // tile.split_k >= 1024


def test_default_tile_fills_a_small_gpu() -> None:
    """A T4 (40 multiprocessors) at the narrow matrices of a model."""
    assert dp4a.default_tile(1, 1024, 4096, 40).split_k == 4
    assert dp4a.default_tile(1, 6144, 4096, 40).split_k == 1
    assert dp4a.default_tile(32, 1024, 8192, 40).split_k == 8
    assert dp4a.default_tile(512, 4096, 4096, 40).split_k == 1


@pytest.mark.gpu
@pytest.mark.parametrize("bias", [False, True], ids=["", "bias"])
@pytest.mark.parametrize("out_dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(("M", "N", "K"), GPU)
def test_forced_op_rounds_once_on_gpu(
    M: int, N: int, K: int, out_dtype: torch.dtype, bias: bool, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert dp4a.USE_ASM
    args = operands(M, N, K, out_dtype, device, bias)
    tensor_cores = w8a8_kernels.scaled_mm(*args, out_dtype)
    monkeypatch.setenv("VLLM_W8A8_KERNEL", "dp4a")
    got = w8a8_kernels.scaled_mm(*args, out_dtype)
    assert_one_rounding(got, args, out_dtype)
    assert same_bits(got, w8a8_kernels.scaled_mm(*args, out_dtype)), "two runs differ"
    assert same_bits(got, tensor_cores), "differs from the tensor-core kernel"


@pytest.mark.gpu
@pytest.mark.parametrize("tile", TILES)
@pytest.mark.parametrize(("M", "N", "K"), [(4, 512, 1024), (17, 1009, 4099), (65, 1024, 4096)])
def test_sums_equal_the_reference_on_gpu(M: int, N: int, K: int, tile: str, device: torch.device) -> None:
    x, weight = codes(M, K, device), codes(N, K, device, seed=7)
    # Whole numbers of 2^7 at least, so that sums beyond 2^24 stay exact in fp32.
    got = dp4a_mm(unscaled(x & -16, weight & -16), torch.float32, tile)
    assert torch.equal(got, int32_mm_reference(x & -16, weight & -16).float())
