"""RMSNorm and SiLU·mul fused with the quantizer: against the references, and against unfused Triton kernels."""

import pytest
import torch
from inputs import GPU_EXTREME_SHAPES, GPU_SHAPES, SMALL_SHAPES, activations, same_bits, short_squares
from torch import library

import w8a8_kernels
from w8a8_kernels.quantize import (
    QuantizeConfig,
    add_rms_norm_quantize_reference,
    quantize_reference,
    rms_norm_quantize_reference,
    rms_norm_reference,
    silu_mul_quantize_reference,
    silu_mul_reference,
)

triton = pytest.importorskip("triton")
row = pytest.importorskip("w8a8_kernels.quantize.row")
rms_norm = pytest.importorskip("w8a8_kernels.quantize.rms_norm")
silu_mul = pytest.importorskip("w8a8_kernels.quantize.silu_mul")
tl = triton.language

DTYPES = [torch.bfloat16, torch.float16, torch.float32]
# The interpreter takes 20 ms or more per program, so that (65, 600) of the small shapes is left to the GPU.
SHAPES = [*SMALL_SHAPES[:-1], (257, 33), (2, 8193), (1, 20000), (1, 40000)]
CONFIGS = [QuantizeConfig(1, 128, 1), QuantizeConfig(4, 128, 1), QuantizeConfig(8, 1024, 4)]
EPS = 1e-6


@triton.jit
def rms_norm_kernel(y_ptr, x_ptr, weight_ptr, M, K, eps, BLOCK_K: tl.constexpr):
    o_m, o_k, mask = row.tile_offsets(M, K, 0, 1, BLOCK_K)
    b_x = rms_norm.load_sum(x_ptr, None, o_m, o_k, mask, K, 0, False)
    b_rstd = rms_norm.reciprocal_rms(rms_norm.square_sum(b_x), K, eps)
    b_y = rms_norm.normalize(b_x, b_rstd, tl.load(weight_ptr + o_k, mask=o_k < K, other=0.0), 0.0)
    tl.store(y_ptr + o_m * K + o_k, b_y, mask=mask)


@triton.jit
def silu_mul_kernel(y_ptr, x_ptr, M, K, BLOCK_K: tl.constexpr):
    o_m, o_k, mask = row.tile_offsets(M, K, 0, 1, BLOCK_K)
    tl.store(y_ptr + o_m * K + o_k, silu_mul.load_silu_mul(x_ptr, o_m, o_k, mask, K, 2 * K), mask=mask)


def weight_of(K: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    return (1 + torch.randn(K, generator=torch.Generator().manual_seed(9)) / 4).to(dtype).to(device)


def assert_same(got: tuple[torch.Tensor, ...], expected: tuple[torch.Tensor, ...]) -> None:
    for name, a, b in zip(("codes", "scale", "sum")[: len(expected)], got, expected, strict=True):
        assert a.shape == b.shape
        assert same_bits(a.cpu(), b.cpu()), f"{name} differ in {(a.cpu() != b.cpu()).sum()} places"


def assert_close(got: tuple[torch.Tensor, ...], expected: tuple[torch.Tensor, ...], dtype: torch.dtype) -> None:
    """Equal but where an fp32 unit in the last place moves a result from one value of `dtype`, or one code, to the next.

    Where this happens to the greatest magnitude of a row, its scale moves by a unit in the last place of `dtype`.
    """
    (codes, scale), (expected_codes, expected_scale) = ([t.cpu() for t in result[:2]] for result in (got, expected))
    assert codes.shape == expected_codes.shape
    torch.testing.assert_close(scale, expected_scale, rtol=max(torch.finfo(dtype).eps, 1e-6), atol=0, equal_nan=True)
    apart = (codes.int() - expected_codes.int()).abs()
    assert not (apart > 1).any()
    assert apart.sum() <= 1e-3 * apart.numel(), f"{apart.sum()} of {apart.numel()} codes differ"


@pytest.mark.parametrize("add", [False, True], ids=["norm", "add-norm"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("M", "K"), SHAPES, ids=lambda v: str(v))
def test_rms_norm_equals_reference(M: int, K: int, dtype: torch.dtype, add: bool, device: torch.device) -> None:
    """fp32 sums up the squares exactly in any order, so that nothing may differ."""
    x, residual, weight = (
        short_squares(M, K, dtype, device),
        short_squares(M, K, dtype, device, 1),
        weight_of(K, dtype, device),
    )
    if add:
        got = rms_norm.add_rms_norm_quantize_row(x, residual, weight, EPS)
        assert_same(got, add_rms_norm_quantize_reference(x.cpu(), residual.cpu(), weight.cpu(), EPS))
    else:
        assert_same(rms_norm.rms_norm_quantize_row(x, weight, EPS), rms_norm_quantize_reference(x.cpu(), weight.cpu(), EPS))


@pytest.mark.parametrize("add", [False, True], ids=["norm", "add-norm"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rms_norm_of_any_values(dtype: torch.dtype, add: bool, device: torch.device) -> None:
    """Sums of squares in another order than the reference's."""
    x, residual = activations(17, 1000, dtype, device), activations(17, 1000, dtype, device, 1)
    weight = weight_of(1000, dtype, device)
    if add:
        got = rms_norm.add_rms_norm_quantize_row(x, residual, weight, EPS)
        expected = add_rms_norm_quantize_reference(x.cpu(), residual.cpu(), weight.cpu(), EPS)
        assert same_bits(got[2].cpu(), expected[2])
    else:
        got = rms_norm.rms_norm_quantize_row(x, weight, EPS)
        expected = rms_norm_quantize_reference(x.cpu(), weight.cpu(), EPS)
    assert_close(got, expected, dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("M", "K"), SHAPES, ids=lambda v: str(v))
def test_silu_mul_equals_reference(M: int, K: int, dtype: torch.dtype, device: torch.device) -> None:
    """Up to the exponential function, which is another one in torch than in Triton."""
    x = activations(M, 2 * K, dtype, device)
    assert_close(silu_mul.silu_mul_quantize_row(x), silu_mul_quantize_reference(x.cpu()), dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("M", "K"), [(1, 1), (17, 257), (9, 4096)], ids=lambda v: str(v))
def test_fused_equals_unfused_pair(M: int, K: int, dtype: torch.dtype, device: torch.device) -> None:
    """Codes are those of the rounded result, bit for bit."""
    x, weight = short_squares(M, K, dtype, device), weight_of(K, dtype, device)
    y = torch.empty_like(x)
    rms_norm_kernel[(M,)](y, x, weight, M, K, EPS, BLOCK_K=triton.next_power_of_2(K))
    assert same_bits(y, rms_norm_reference(x, weight, EPS))
    assert_same(rms_norm.rms_norm_quantize_row(x, weight, EPS), row.quantize_row(y))

    x = activations(M, 2 * K, dtype, device)
    silu_mul_kernel[(M,)](y, x, M, K, BLOCK_K=triton.next_power_of_2(K))
    torch.testing.assert_close(y, silu_mul_reference(x), rtol=max(torch.finfo(dtype).eps, 1e-6), atol=1e-30, equal_nan=True)
    assert_same(silu_mul.silu_mul_quantize_row(x), row.quantize_row(y))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("config", CONFIGS, ids=lambda c: "x".join(map(str, c)))
def test_result_does_not_depend_on_the_tile(config: QuantizeConfig, dtype: torch.dtype, device: torch.device) -> None:
    x, residual = short_squares(5, 515, dtype, device), short_squares(5, 515, dtype, device, 1)
    weight = weight_of(515, dtype, device)
    got = rms_norm.add_rms_norm_quantize_row(x, residual, weight, EPS, config=config)
    assert_same(got, add_rms_norm_quantize_reference(x.cpu(), residual.cpu(), weight.cpu(), EPS))
    gate_up = activations(5, 2 * 515, dtype, device)
    assert_same(silu_mul.silu_mul_quantize_row(gate_up, config=config), silu_mul.silu_mul_quantize_row(gate_up))


@pytest.mark.parametrize(
    ("row", "weight", "offset", "codes", "scale"),
    [
        # rms 2: normalized 2, -1.5, 0, with fp32 arithmetic exact all along.
        pytest.param(
            [4.0, -3.0, 0.0, 2.0, 1.0, 1.0, 1.0, 0.0], 1.0, 0.0, [127, -95, 0, 64, 32, 32, 32, 0], 2 / 127, id="norm"
        ),
        pytest.param(
            [4.0, -3.0, 0.0, 2.0, 1.0, 1.0, 1.0, 0.0], 0.5, 1.0, [127, -95, 0, 64, 32, 32, 32, 0], 3 / 127, id="gemma"
        ),
        pytest.param([0.0, 0.0], 1.0, 0.0, [0, 0], 1.0, id="zero-row"),
        pytest.param([1.0, float("nan")], 1.0, 0.0, [0, 0], float("nan"), id="nan-row"),
        pytest.param([1.0, float("-inf")], 1.0, 0.0, [0, 0], float("nan"), id="inf-row"),
    ],
)
def test_rms_norm_known_answers(
    row: list[float], weight: float, offset: float, codes: list[int], scale: float, device: torch.device
) -> None:
    x = torch.tensor([row], device=device)
    weights = torch.full((len(row),), weight, device=device)
    for function in (rms_norm_quantize_reference, rms_norm.rms_norm_quantize_row, w8a8_kernels.rms_norm_quantize):
        got_codes, got_scale = function(x, weights, 0.0 if any(row) else EPS, offset)
        assert got_codes.tolist() == [codes]
        assert same_bits(got_scale.cpu(), torch.tensor([[scale]]))


def test_norm_is_rounded_once(device: torch.device) -> None:
    """The product of an unrounded norm with an fp32 weight: with a rounding between them, the scale would be another."""
    x = torch.tensor([[7.0, 2.0]], dtype=torch.bfloat16, device=device)
    weight = torch.tensor([1.5, 1.0], device=device)
    value = 7 / ((7**2 + 2**2) / 2) ** 0.5
    once, twice = (torch.tensor(v).bfloat16().item() for v in (value * 1.5, torch.tensor(value).bfloat16().item() * 1.5))
    assert once != twice
    for function in (rms_norm_quantize_reference, rms_norm.rms_norm_quantize_row):
        _, scale = function(x, weight, 0.0)
        assert scale.item() == (torch.tensor(once) / 127).item()


def test_sum_is_rounded_before_its_squares(device: torch.device) -> None:
    """256 + 1 is 256 in bf16, and the norm 1 in both places: a norm of 257 / 256, times the weight, would round to more."""
    x = torch.tensor([[256.0, 256.0]], dtype=torch.bfloat16, device=device)
    residual = torch.tensor([[1.0, 0.0]], dtype=torch.bfloat16, device=device)
    weight = torch.tensor([1.0038, 1.0], device=device)
    assert torch.tensor(257 / 256.5 * 1.0038).bfloat16() > 1
    for function in (add_rms_norm_quantize_reference, rms_norm.add_rms_norm_quantize_row):
        codes, scale, summed = function(x, residual, weight, 0.0)
        assert summed.tolist() == [[256.0, 256.0]]
        assert codes.tolist() == [[127, 127]]
        assert scale.item() == (torch.tensor(1.0) / 127).item()


@pytest.mark.parametrize("view", ["row-stride", "column-stride", "offset", "expanded"])
def test_strided_rows(view: str, device: torch.device) -> None:
    def strided(base: torch.Tensor) -> torch.Tensor:
        return {
            "row-stride": base[::3, :78],
            "column-stride": base[:, :20].t(),
            "offset": base[15:, 4:],
            "expanded": base[:1].expand(7, -1),
        }[view]

    x, residual = (strided(short_squares(24, 100, torch.bfloat16, device, seed)) for seed in (0, 1))
    weight = weight_of(2 * x.shape[1], torch.bfloat16, device)[::2]
    expected = add_rms_norm_quantize_reference(x.cpu().contiguous(), residual.cpu().contiguous(), weight.cpu(), EPS)
    assert_same(rms_norm.add_rms_norm_quantize_row(x, residual, weight, EPS), expected)
    assert_same(w8a8_kernels.add_rms_norm_quantize(x, residual, weight, EPS), expected)
    expected = rms_norm_quantize_reference(x.cpu().contiguous(), weight.cpu(), EPS)
    assert_same(rms_norm.rms_norm_quantize_row(x, weight, EPS), expected)
    assert_same(w8a8_kernels.rms_norm_quantize(x, weight, EPS), expected)
    assert_same(silu_mul.silu_mul_quantize_row(x), silu_mul.silu_mul_quantize_row(x.contiguous()))
    assert_close(w8a8_kernels.silu_mul_quantize(x), silu_mul_quantize_reference(x.cpu().contiguous()), torch.bfloat16)


def test_bad_rows_leave_the_others_alone(device: torch.device) -> None:
    x = torch.randn(9, 260, generator=torch.Generator().manual_seed(3)).bfloat16().to(device)
    weight = weight_of(260, torch.bfloat16, device)
    functions = [lambda: rms_norm.rms_norm_quantize_row(x, weight, EPS), lambda: silu_mul.silu_mul_quantize_row(x)]
    clean = [function() for function in functions]
    x[4, 7], x[6, 259] = float("nan"), float("inf")
    others = [0, 1, 2, 3, 5, 7, 8]
    for function, (clean_codes, clean_scale) in zip(functions, clean, strict=True):
        codes, scale = function()
        assert torch.equal(codes[others], clean_codes[others])
        assert torch.equal(scale[others], clean_scale[others])
        assert scale[[4, 6]].isnan().all()
        assert not codes[[4, 6]].any()


def test_inputs_are_not_changed(device: torch.device) -> None:
    x, residual = activations(5, 34, torch.bfloat16, device), activations(5, 34, torch.bfloat16, device, 1)
    copies = x.clone(), residual.clone()
    w8a8_kernels.add_rms_norm_quantize(x, residual, weight_of(34, torch.bfloat16, device), EPS)
    w8a8_kernels.silu_mul_quantize(x)
    assert same_bits(x, copies[0])
    assert same_bits(residual, copies[1])


@pytest.mark.parametrize("K", [1, 34])
def test_op_contracts(K: int, device: torch.device) -> None:
    """Schemas, fake implementations and tracing agree with what the ops do, also for inputs that are not contiguous."""
    x = activations(2, 4 * K, torch.bfloat16, device)
    weight = weight_of(K, torch.bfloat16, device)
    library.opcheck(torch.ops.w8a8.rms_norm_quantize.default, (x[:, :K], weight, EPS))
    library.opcheck(torch.ops.w8a8.rms_norm_quantize.default, (x[:, :K], weight.float(), EPS, 1.0))
    library.opcheck(torch.ops.w8a8.add_rms_norm_quantize.default, (x[:, :K], x[:, K : 2 * K], weight, EPS))
    library.opcheck(torch.ops.w8a8.silu_mul_quantize.default, (x[:, : 2 * K],))
    columns = x.t().contiguous().t()[:, : 2 * K]
    library.opcheck(torch.ops.w8a8.quantize.default, (columns,))
    library.opcheck(torch.ops.w8a8.add_rms_norm_quantize.default, (columns[:, :K], columns[:, :K], weight, EPS))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("M", "K"), [*GPU_SHAPES, *GPU_EXTREME_SHAPES], ids=lambda v: str(v))
def test_ops_equal_cpu_reference_on_gpu(M: int, K: int, dtype: torch.dtype, device: torch.device) -> None:
    x, residual, weight = (
        short_squares(M, K, dtype, device),
        short_squares(M, K, dtype, device, 1),
        weight_of(K, dtype, device),
    )
    got = w8a8_kernels.rms_norm_quantize(x, weight, EPS)
    assert_same(got, rms_norm_quantize_reference(x.cpu(), weight.cpu(), EPS))
    assert_same(w8a8_kernels.rms_norm_quantize(x, weight, EPS), got)
    got = w8a8_kernels.add_rms_norm_quantize(x, residual, weight, EPS)
    assert_same(got, add_rms_norm_quantize_reference(x.cpu(), residual.cpu(), weight.cpu(), EPS))
    assert_same(w8a8_kernels.add_rms_norm_quantize(x, residual, weight, EPS), got)
    x = activations(M, 2 * K, dtype, device)
    got = w8a8_kernels.silu_mul_quantize(x)
    assert_close(got, silu_mul_quantize_reference(x.cpu()), dtype)
    assert_same(w8a8_kernels.silu_mul_quantize(x), got)


@pytest.mark.gpu
def test_rows_beyond_32_bit_offsets_on_gpu(device: torch.device) -> None:
    rows = short_squares(2, 4096, torch.bfloat16, device)
    apart = 2**31 + 16
    x = torch.zeros(apart + 4096, dtype=torch.bfloat16, device=device).as_strided((2, 4096), (apart, 1))
    x.copy_(rows)
    weight = weight_of(4096, torch.bfloat16, device)
    expected = add_rms_norm_quantize_reference(rows.cpu(), rows.cpu(), weight.cpu(), EPS)
    assert_same(w8a8_kernels.add_rms_norm_quantize(x, x, weight, EPS), expected)
    assert_same(w8a8_kernels.silu_mul_quantize(x), w8a8_kernels.silu_mul_quantize(rows))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_pair_with_vllm_ops_on_gpu(dtype: torch.dtype, device: torch.device) -> None:
    """The rounding is that of vLLM's compiled ops, whose sums are in another order and whose rsqrt and exp are approximate."""
    ops = pytest.importorskip("vllm._custom_ops")
    x, residual = activations(257, 4096, dtype, device), activations(257, 4096, dtype, device, 1)
    weight = weight_of(4096, dtype, device)
    y = torch.empty_like(x)
    ops.rms_norm(y, x, weight, EPS)
    assert_close(w8a8_kernels.rms_norm_quantize(x, weight, EPS), quantize_reference(y), dtype)
    y, summed = x.clone(), residual.clone()
    ops.fused_add_rms_norm(y, summed, weight, EPS)
    got = w8a8_kernels.add_rms_norm_quantize(x, residual, weight, EPS)
    assert same_bits(got[2], summed)
    assert_close(got, quantize_reference(y), dtype)
    y = torch.empty_like(x[:, :2048])
    torch.ops._C.silu_and_mul(y, x)
    assert_close(w8a8_kernels.silu_mul_quantize(x), quantize_reference(y), dtype)


def test_refuses(device: torch.device) -> None:
    x, weight = torch.zeros(2, 4), torch.ones(4)
    for bad in (torch.zeros(4), torch.zeros(2, 0), x.int()):
        with pytest.raises(ValueError, match=r"rms_norm_quantize: got x of shape .* expected \[M, K\] with K >= 1"):
            w8a8_kernels.rms_norm_quantize(bad, weight, EPS)
    for bad in (torch.ones(3), torch.ones(1, 4), weight.int()):
        with pytest.raises(ValueError, match=r"got weight of shape .* expected \(4,\)"):
            w8a8_kernels.rms_norm_quantize(x, bad, EPS)
    for bad in (torch.zeros(1, 4), x.half()):
        with pytest.raises(ValueError, match=r"got residual of shape .* expected \(2, 4\)"):
            w8a8_kernels.add_rms_norm_quantize(x, bad, weight, EPS)
    for bad in (torch.zeros(4), torch.zeros(2, 3), x.int()):
        with pytest.raises(ValueError, match=r"silu_mul_quantize: got x of shape .* expected \[M, 2K\]"):
            w8a8_kernels.silu_mul_quantize(bad)
