import pytest
import torch
from inputs import GPU_EXTREME_SHAPES, GPU_SHAPES, SMALL_SHAPES, activations, every_quotient, same_bits
from torch import library

import w8a8_kernels
from w8a8_kernels.quantize import QuantizeConfig, quantize_config, quantize_reference, quantize_variants

DTYPES = [torch.bfloat16, torch.float16, torch.float32]


def triton_quantize(x: torch.Tensor, config: QuantizeConfig | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    return pytest.importorskip("w8a8_kernels.quantize.row").quantize_row(x, config=config)


def assert_same(got: tuple[torch.Tensor, torch.Tensor], expected: tuple[torch.Tensor, torch.Tensor]) -> None:
    for name, a, b in zip(("codes", "scale"), got, expected, strict=True):
        assert a.shape == b.shape
        assert same_bits(a.cpu(), b.cpu()), f"{name} differ in {(a.cpu() != b.cpu()).sum()} places"


@pytest.mark.parametrize(
    ("row", "codes", "scale"),
    [
        pytest.param([127.0, 0.5, 1.5, 2.5, -0.5, -127.0], [127, 0, 2, 2, 0, -127], 1.0, id="ties-to-even"),
        pytest.param([0.0, 0.0], [0, 0], 1.0, id="zero-row"),
        pytest.param([1.0, float("nan")], [0, 0], float("nan"), id="nan-row"),
        pytest.param([1.0, float("-inf")], [0, 0], float("nan"), id="inf-row"),
        pytest.param([1e-45, 0.0], [0, 0], 1.0, id="scale-underflows"),
        pytest.param([-254.0, 3.0], [-127, 2], 2.0, id="half-codes"),
    ],
)
@pytest.mark.parametrize(
    "quantize", [quantize_reference, triton_quantize, w8a8_kernels.quantize], ids=["reference", "triton", "op"]
)
def test_known_answers(quantize, row: list[float], codes: list[int], scale: float, device: torch.device) -> None:
    got_codes, got_scale = quantize(torch.tensor([row], device=device))
    assert got_codes.tolist() == [codes]
    assert same_bits(got_scale.cpu(), torch.tensor([[scale]]))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("M", "K"), [*SMALL_SHAPES, (257, 33), (2, 8193), (1, 20000), (2, 40000)], ids=lambda v: str(v))
def test_triton_equals_reference(M: int, K: int, dtype: torch.dtype, device: torch.device) -> None:
    x = activations(M, K, dtype, device)
    assert_same(triton_quantize(x), quantize_reference(x.cpu()))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    "config",
    [QuantizeConfig(1, 128, 1), QuantizeConfig(4, 128, 1), QuantizeConfig(8, 1024, 4), QuantizeConfig(16, 512, 8)],
    ids=lambda c: "x".join(map(str, c)),
)
def test_result_does_not_depend_on_the_tile(config: QuantizeConfig, dtype: torch.dtype, device: torch.device) -> None:
    x = activations(19, 515, dtype, device)
    assert_same(triton_quantize(x, config), quantize_reference(x.cpu()))


@pytest.mark.parametrize("dtype", [torch.bfloat16, pytest.param(torch.float16, marks=pytest.mark.slow)], ids=str)
def test_every_quotient(dtype: torch.dtype, device: torch.device) -> None:
    """All quotients that two values of `dtype` can have: the multiplication in place of the division changes no code."""
    x = every_quotient(dtype).to(device)
    assert_same(triton_quantize(x), quantize_reference(x.cpu()))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_quotients_at_every_magnitude(dtype: torch.dtype, device: torch.device) -> None:
    """Rows from subnormal to just finite. Maxima: 127 and its multiples (exact scales), halves that give 63 and 64, others."""
    rows = every_quotient(dtype).double()
    maxima = {torch.bfloat16: [128, 129, 131, 150, 254, 255], torch.float16: [1024, 1143, 1270, 1397, 1905, 2032, 2047]}[dtype]
    rows = rows[[maximum - int(rows[0, 0]) for maximum in maxima], ::5]
    finfo = torch.finfo(dtype)
    exponents = range(-34, 6)
    if dtype == torch.bfloat16:
        # The interpreter (Triton 3.6.0 and 3.9.0) decodes subnormal bf16 values wrongly: there, the smallest are normal.
        exponents = range(-144 if device.type == "cuda" else -123, 120, 3)
    x = torch.cat([rows * 2.0**exponent for exponent in exponents]).clamp(finfo.min, finfo.max).to(dtype).to(device)
    assert_same(triton_quantize(x), quantize_reference(x.cpu()))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("M", "K"), [*GPU_SHAPES, *GPU_EXTREME_SHAPES], ids=lambda v: str(v))
def test_op_equals_cpu_reference_on_gpu(M: int, K: int, dtype: torch.dtype, device: torch.device) -> None:
    x = activations(M, K, dtype, device)
    got = w8a8_kernels.quantize(x)
    assert_same(got, quantize_reference(x.cpu()))
    assert_same(w8a8_kernels.quantize(x), got)


@pytest.mark.gpu
def test_rows_beyond_32_bit_offsets_on_gpu(device: torch.device) -> None:
    rows = activations(2, 4096, torch.bfloat16, device)
    apart = 2**31 + 16
    x = torch.zeros(apart + 4096, dtype=torch.bfloat16, device=device).as_strided((2, 4096), (apart, 1))
    x.copy_(rows)
    assert_same(w8a8_kernels.quantize(x), quantize_reference(rows.cpu()))

    M = 2**31 // 4096 + 1
    codes, scale = w8a8_kernels.quantize(rows[:1].expand(M, -1))
    last = [0, M - 1]
    assert_same((codes[last], scale[last]), quantize_reference(rows[:1].cpu().expand(2, -1)))


@pytest.mark.parametrize("view", ["row-stride", "column-stride", "offset", "expanded"])
def test_strided_rows(view: str, device: torch.device) -> None:
    base = activations(24, 200, torch.bfloat16, device)
    x = {
        "row-stride": base[::3, :77],
        "column-stride": base.t(),
        "offset": base[5:, 3:],
        "expanded": base[:1].expand(7, -1),
    }[view]
    assert_same(triton_quantize(x), quantize_reference(x.cpu().contiguous()))
    assert_same(w8a8_kernels.quantize(x), quantize_reference(x.cpu().contiguous()))


def test_bad_rows_leave_the_others_alone(device: torch.device) -> None:
    x = torch.randn(9, 130, generator=torch.Generator().manual_seed(3)).to(device)
    clean = w8a8_kernels.quantize(x)
    x[4, 7], x[6, 129] = float("nan"), float("inf")
    codes, scale = w8a8_kernels.quantize(x)
    others = [0, 1, 2, 3, 5, 7, 8]
    assert torch.equal(codes[others], clean[0][others])
    assert torch.equal(scale[others], clean[1][others])
    assert scale[[4, 6]].isnan().all()
    assert not codes[[4, 6]].any()


def test_op_contract(device: torch.device) -> None:
    """Schema, fake implementation and tracing agree with what the op does."""
    x = activations(5, 33, torch.bfloat16, device)[:1]
    library.opcheck(torch.ops.w8a8.quantize.default, (x,))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("K", [1, 33, 1024, 4096, 5120, 8192, 12288, 28672, 32768, 32769, 131072])
@pytest.mark.parametrize("held", [1, 2])
def test_tiles_are_few_and_enumerated(K: int, dtype: torch.dtype, held: int) -> None:
    variants = quantize_variants(K, dtype, held)
    assert len(variants) <= 2
    assert {quantize_config(M, K, dtype, held) for M in (*range(600), 2048, 8192, 65536, 10**6)} == set(variants.values())
    for M, config in variants.items():
        assert quantize_config(M, K, dtype, held) == config
        assert 1 <= config.num_warps <= 32
        assert config.num_warps.bit_count() == config.block_k.bit_count() == config.rows.bit_count() == 1, "not powers of two"
        assert held * config.rows * config.block_k // (32 * config.num_warps) <= 64, "fp32 values for each thread"


@pytest.mark.parametrize(
    "x", [torch.zeros(3), torch.zeros(2, 3, 4), torch.zeros(2, 3, dtype=torch.int32)], ids=["1-D", "3-D", "int32"]
)
def test_refuses(x: torch.Tensor) -> None:
    with pytest.raises(ValueError, match="expected \\[M, K\\] in bf16"):
        w8a8_kernels.quantize(x)
