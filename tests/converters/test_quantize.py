import math

import pytest
import torch

from w8a8_converters import quantize
from w8a8_converters.quantize import quantize_weight


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
def test_blocks_do_not_show(dtype, monkeypatch):
    weight = torch.randn(37, 19).to(dtype)
    before = weight.clone()
    whole = quantize_weight(weight)
    monkeypatch.setattr(quantize, "_CPU_BLOCK_BYTES", 8 * 19 * 5)
    in_blocks = quantize_weight(weight)
    assert torch.equal(whole[0], in_blocks[0])
    assert torch.equal(whole[1], in_blocks[1])
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
