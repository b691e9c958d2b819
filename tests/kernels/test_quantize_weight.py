import math

import pytest
import torch

from w8a8_kernels.hadamard import BLOCKS, hadamard_transform
from w8a8_kernels.quantize import weight as module
from w8a8_kernels.quantize.weight import quantize_weight, row_amax


def test_known_answers():
    weight = torch.tensor([[127.0, -127.0, 1.0, 0.4], [0.0, -2.54, 1.28, 0.02]])
    codes, scale = quantize_weight(weight)
    assert codes.dtype == torch.int8
    assert scale.dtype == torch.float32
    assert codes.tolist() == [[127, -127, 1, 0], [0, -127, 64, 1]]
    assert scale[0].item() == 1.0
    assert scale[1].item() == (torch.tensor(2.54) / 127).item()


def test_ties_go_to_even():
    ties = [0.5, 1.5, 2.5, -0.5, -1.5, -2.5, 126.5, -126.5]
    codes, scale = quantize_weight(torch.tensor([[127.0, *ties]]))
    assert scale.item() == 1.0
    assert codes.tolist() == [[127, 0, 2, 2, 0, -2, -2, 126, -126]]


def test_division_is_not_multiplication_by_the_inverse():
    generator = torch.Generator().manual_seed(1)
    weight = torch.randn(2000, 500, generator=generator)
    codes, scale = quantize_weight(weight)
    amax = weight.abs().amax(dim=1, keepdim=True)
    assert torch.equal(scale, amax / 127)
    assert torch.equal(codes, torch.round(weight / (amax / 127)).to(torch.int8))
    by_product = torch.round(weight * (127 / amax)).to(torch.int8)
    assert not torch.equal(codes, by_product), "the data no longer tells the two formulas apart"


@pytest.mark.parametrize(
    ("row", "codes", "scale"),
    [
        ([0.0, 0.0, -0.0], [0, 0, 0], 1.0),
        ([1e-45, 0.0, -1e-45], [0, 0, 0], 1.0),  # amax / 127 underflows
        ([2.0**-140, -(2.0**-141), 0.0], [127, -64, 0], None),  # a subnormal scale
    ],
    ids=["zero", "underflow", "subnormal"],
)
def test_small_rows(row, codes, scale):
    weight = torch.tensor([row], dtype=torch.float32)
    got_codes, got_scale = quantize_weight(weight)
    expected = scale if scale is not None else (weight.abs().max() / 127).item()
    assert got_scale.item() == expected
    if scale is None:
        # 2^-140 / 127 has few bits left: the quotient may pass 127 and is clamped.
        quotient = torch.round(weight / got_scale).clamp(-127, 127).to(torch.int8)
        assert torch.equal(got_codes, quotient)
        assert got_codes[0, 0] == codes[0]
    else:
        assert got_codes.tolist() == [codes]


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_non_finite_weight_is_refused(value, dtype):
    weight = torch.ones(5, 3, dtype=dtype)
    weight[3, 1] = value
    with pytest.raises(ValueError, match="row 3"):
        quantize_weight(weight)


def test_never_minus_128_and_minus_amax_is_minus_127():
    weight = -torch.rand(50, 40)
    codes, _ = quantize_weight(weight)
    assert codes.min() == -127


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_parts_do_not_show(dtype, monkeypatch):
    weight = torch.randn(37, 19).to(dtype)
    before = weight.clone()
    whole = quantize_weight(weight)
    monkeypatch.setattr(module, "_CPU_PART_BYTES", 8 * 19 * 5)
    in_parts = quantize_weight(weight)
    assert torch.equal(whole[0], in_parts[0])
    assert torch.equal(whole[1], in_parts[1])
    assert torch.equal(weight, before)


def test_strided_input():
    weight = torch.randn(24, 36)
    strided = weight.t()[1::2, ::3]
    for got, expected in zip(quantize_weight(strided), quantize_weight(strided.contiguous()), strict=True):
        assert torch.equal(got, expected)


@pytest.mark.parametrize("shape", [(0, 4), (4, 0), (0, 0)], ids=str)
def test_empty(shape):
    codes, scale = quantize_weight(torch.empty(shape))
    assert codes.shape == shape
    assert scale.shape == (shape[0], 1)
    assert bool((scale == 1).all())


def test_shards_with_given_amax_equal_the_whole():
    weight = torch.randn(16, 48, dtype=torch.bfloat16)
    amax = weight.float().abs().amax(dim=1)
    codes, scale = quantize_weight(weight)
    for part in range(3):
        columns = slice(16 * part, 16 * part + 16)
        part_codes, part_scale = quantize_weight(weight[:, columns], amax)
        assert torch.equal(part_codes, codes[:, columns])
        assert torch.equal(part_scale, scale)


@pytest.mark.parametrize(
    ("weight", "amax", "match"),
    [
        (torch.ones(4, dtype=torch.float32), None, "2-D"),
        (torch.ones(2, 2, dtype=torch.int8), None, "floating"),
        (torch.ones(2, 2), torch.ones(2, 1), "each of the 2 rows"),
        (torch.ones(2, 2), torch.tensor([1.0, 0.5]), "row 1 reaches 1.0"),
        (torch.ones(2, 2), torch.tensor([math.inf, 1.0]), "row 0"),
        (torch.ones(2, 2), torch.tensor([math.nan, 1.0]), "row 0"),
    ],
    ids=["1-D", "int8", "amax-shape", "amax-small", "amax-inf", "amax-nan"],
)
def test_wrong_arguments(weight, amax, match):
    with pytest.raises(ValueError, match=match):
        quantize_weight(weight, amax)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_gpu_equals_cpu(dtype):
    weight = torch.randn(1000, 777, generator=torch.Generator().manual_seed(0)).to(dtype)
    weight[0] = 0
    weight[1] *= 2.0**-20
    weight[2, 1:] = torch.arange(776).to(dtype) % 127 + 0.5
    weight[2, 0] = 127
    if dtype != torch.float16:
        weight[3] = weight[3].float() * 2.0**-125
    codes, scale = quantize_weight(weight)
    gpu_codes, gpu_scale = quantize_weight(weight.cuda())
    assert torch.equal(gpu_scale.cpu(), scale)
    assert torch.equal(gpu_codes.cpu(), codes)
    with pytest.raises(ValueError, match="row 7"):
        quantize_weight(weight.cuda().index_fill(0, torch.tensor([7], device="cuda"), math.nan))


def dense_hadamard(block):
    """Sylvester's construction, normalized, fp64 [block, block]."""
    matrix = torch.ones(1, 1, dtype=torch.float64)
    while matrix.shape[0] < block:
        matrix = torch.kron(torch.tensor([[1.0, 1.0], [1.0, -1.0]], dtype=torch.float64), matrix)
    return matrix / block**0.5


def outlier_weight(n, k, dtype=torch.bfloat16):
    weight = torch.randn(n, k, generator=torch.Generator().manual_seed(k))
    weight[:, k // 3] *= 30
    return weight.to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("block", BLOCKS)
def test_transformed_against_the_dense_product(block, dtype):
    weight = outlier_weight(50, 3 * block, dtype)
    dense = (weight.double().view(50, 3, block) @ dense_hadamard(block)).view(50, 3 * block)
    expected_scale = dense.abs().amax(dim=1, keepdim=True) / 127
    codes, scale = quantize_weight(weight, hadamard=block)
    assert ((scale - expected_scale).abs() <= 1e-6 * expected_scale).all()
    apart = (codes - torch.round(dense / expected_scale)).abs()
    assert apart.max() <= 1
    assert (apart != 0).double().mean() <= 1e-3


@pytest.mark.parametrize("block", BLOCKS)
def test_transforming_both_sides_changes_no_product(block):
    """(x H)(W H)^T = x W^T: with nothing quantized only fp32's rounding is left."""
    x, weight = torch.randn(20, 4 * block), outlier_weight(30, 4 * block, torch.float32)
    exact = x.double() @ weight.double().T
    transformed = hadamard_transform(x, block).double() @ hadamard_transform(weight, block).double().T
    assert (transformed - exact).norm() <= 1e-6 * exact.norm()


def test_transformed_parts_do_not_show(monkeypatch):
    weight = outlier_weight(37, 96)
    before = weight.clone()
    whole = quantize_weight(weight, hadamard=32)
    amax = row_amax(weight, 32)
    monkeypatch.setattr(module, "_CPU_PART_BYTES", 8 * 96 * 5)
    held = []
    monkeypatch.setattr(module, "hadamard_transform", lambda x, block: held.append(len(x)) or hadamard_transform(x, block))
    for got, expected in zip(quantize_weight(weight, hadamard=32), whole, strict=True):
        assert torch.equal(got, expected)
    assert torch.equal(row_amax(weight, 32), amax)
    assert max(held) == 5, "more rows than the limit stood in memory in fp32"
    assert torch.equal(weight, before)


def test_transformed_shards_equal_the_whole():
    """A shard that cuts no block, with the amax of whole transformed rows, has the whole matrix's codes."""
    weight = outlier_weight(16, 192)
    codes, scale = quantize_weight(weight, hadamard=32)
    amax = row_amax(weight, 32)
    assert not torch.equal(amax, row_amax(weight)), "the rows' own amax would do"
    for part in range(3):
        columns = slice(64 * part, 64 * part + 64)
        part_codes, part_scale = quantize_weight(weight[:, columns], amax, hadamard=32)
        assert torch.equal(part_codes, codes[:, columns])
        assert torch.equal(part_scale, scale)
    with pytest.raises(ValueError, match="amax must be finite and cover its row"):
        quantize_weight(weight, row_amax(weight[:, :64], 32), hadamard=32)


def test_outlier_column_costs_less_when_transformed():
    weight = outlier_weight(64, 512, torch.float32)

    def error(block):
        codes, scale = quantize_weight(weight, hadamard=block)
        return (hadamard_transform(codes * scale, block) - weight).norm()

    assert error(64) < error(0) / 2


@pytest.mark.parametrize("block", [48, 8, 256, 64], ids=str)
def test_block_that_does_not_fit_is_refused(block):
    with pytest.raises(ValueError, match=f"a block of {block} for rows of 96"):
        quantize_weight(torch.ones(2, 96), hadamard=block)
    with pytest.raises(ValueError, match=f"a block of {block} for rows of 96"):
        row_amax(torch.ones(2, 96), block)


def test_transformed_non_finite_weight_is_refused():
    weight = torch.ones(5, 64)
    weight[3, 1] = math.inf
    with pytest.raises(ValueError, match="row 3"):
        quantize_weight(weight, hadamard=64)


@pytest.mark.gpu
@pytest.mark.parametrize("block", BLOCKS)
def test_transformed_on_gpu_equals_cpu(block):
    """Additions and one product of single elements: the order is fixed, so the bits are, too."""
    weight = outlier_weight(1000, 896)
    for got, expected in zip(
        quantize_weight(weight.cuda(), hadamard=block), quantize_weight(weight, hadamard=block), strict=True
    ):
        assert torch.equal(got.cpu(), expected)
    assert torch.equal(row_amax(weight, block, torch.device("cuda")).cpu(), row_amax(weight, block))
