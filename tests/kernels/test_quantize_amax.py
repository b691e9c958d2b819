"""Parts of rows that are quantized by the maximum of whole rows, as tensor-parallel ranks do."""

from collections.abc import Callable

import pytest
import torch
from inputs import activations, same_bits
from torch import library

import w8a8_kernels
from w8a8_kernels.ops import int8_linear, scaled_mm
from w8a8_kernels.quantize import quantize_amax_reference, quantize_reference

DTYPES = [torch.bfloat16, torch.float16, torch.float32]
REFERENCE = quantize_amax_reference, quantize_reference
OP = w8a8_kernels.quantize_amax, w8a8_kernels.quantize


def triton_pair() -> tuple[Callable, Callable]:
    row = pytest.importorskip("w8a8_kernels.quantize.row")
    return row.quantize_amax_row, row.quantize_row


def whole_rows(M: int, K: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Rows with NaN, with inf and with an outlier in one part only, one of zeros and one whose scale underflows in fp32."""
    x = activations(M, K, dtype, device)
    if M > 9:
        x[9], x[9, K - 1] = 1e-3, 3e4
        x[10], x[10, 0] = 0, 1e-45
    return x


def shared(amaxes: list[torch.Tensor]) -> torch.Tensor:
    """The maximum as the ranks take it: of the bits."""
    return torch.stack([amax.view(torch.int32) for amax in amaxes]).amax(0).view(torch.float32)


def quantize_parts(x: torch.Tensor, parts: int, hadamard: int, pair: tuple[Callable, Callable]) -> tuple:
    """Codes of the parts side by side, and each part's scale."""
    amax_of, quantize = pair
    shards = x.chunk(parts, dim=1)
    amax = shared([amax_of(shard, hadamard) for shard in shards])
    codes, scales = zip(*(quantize(shard, hadamard, amax) for shard in shards), strict=True)
    return torch.cat(codes, dim=1), scales


def check(x: torch.Tensor, parts: int, hadamard: int, pair: tuple[Callable, Callable]) -> None:
    codes, scale = pair[1](x, hadamard)
    got, scales = quantize_parts(x, parts, hadamard, pair)
    if hadamard and x.device.type == "cuda":
        # Rows of another length may add up the transform in another order.
        finite = ~scale.isnan()
        apart = (got.int() - codes.int()).abs()
        assert apart.max() <= 1
        assert (apart != 0).double().mean() <= 1e-3
        assert all(torch.equal(part.isnan(), scale.isnan()) for part in scales)
        assert all(((part - scale).abs() <= 1e-6 * scale)[finite].all() for part in scales)
        return
    assert torch.equal(got, codes), f"{(got != codes).sum()} codes differ"
    assert all(same_bits(part, scale) for part in scales), "a part has another scale"


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("hadamard", [0, 16, 32, 64, 128])
@pytest.mark.parametrize("parts", [2, 4])
@pytest.mark.parametrize("implementation", ["reference", "op", "triton"])
def test_parts_equal_the_whole(
    implementation: str, parts: int, hadamard: int, dtype: torch.dtype, device: torch.device
) -> None:
    pair = {"reference": REFERENCE, "op": OP}.get(implementation) or triton_pair()
    check(whole_rows(19, 512, dtype, device), parts, hadamard, pair)
    if hadamard == 0:
        check(whole_rows(19, 516 + 2 * parts, dtype, device)[:, : 516 // parts * parts], parts, hadamard, pair)


@pytest.mark.parametrize(("M", "K", "hadamard"), [(0, 64, 0), (1, 2, 0), (2, 80000, 0), (1, 66048, 64)], ids=str)
def test_shapes(M: int, K: int, hadamard: int, device: torch.device) -> None:
    """No row, one element a part, and parts that are read in a loop."""
    check(whole_rows(M, K, torch.bfloat16, device), 2, hadamard, triton_pair())


@pytest.mark.parametrize("hadamard", [0, 64])
@pytest.mark.parametrize("implementation", ["op", "triton"])
def test_parts_differ_by_their_own_maxima(implementation: str, hadamard: int, device: torch.device) -> None:
    """What the shared maximum is for; and one bad part makes the whole row bad."""
    pair = OP if implementation == "op" else triton_pair()
    x = whole_rows(19, 512, torch.bfloat16, device)
    codes, scale = pair[1](x, hadamard)
    own_codes, own_scale = pair[1](x[:, :256], hadamard)
    assert not torch.equal(own_codes[9], codes[9, :256]), "row 9 has its outlier in the second half"
    assert own_scale[9] != scale[9]
    assert not own_scale[3].isnan().any(), "row 3 has its inf in the second half"
    got, scales = quantize_parts(x, 2, hadamard, pair)
    for row in (2, 3):
        assert all(part[row].isnan().all() for part in scales)
        assert not got[row].any()
    assert all(part[1] == 1 for part in scales)
    assert not got[1].any()


@pytest.mark.parametrize(
    ("rows", "hadamard", "amax"),
    [
        pytest.param([[3.0, -5.0, 0.0]], 0, 5.0, id="negative"),
        pytest.param([[0.0, -0.0]], 0, 0.0, id="zeros"),
        pytest.param([[1.0, -float("inf")]], 0, float("inf"), id="inf"),
        pytest.param([[float("inf"), float("nan")]], 0, float("nan"), id="nan"),
        pytest.param([[2.0] + [0.0] * 31], 32, 2.0, id="before-it-is-normalized"),
        pytest.param([[]], 0, 0.0, id="empty-row"),
    ],
)
@pytest.mark.parametrize("implementation", ["op", "triton"])
def test_known_maxima(implementation: str, rows: list, hadamard: int, amax: float, device: torch.device) -> None:
    amax_of = OP[0] if implementation == "op" else triton_pair()[0]
    assert same_bits(amax_of(torch.tensor(rows, device=device), hadamard).cpu(), torch.tensor([[amax]]))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("K", [1, 7, 8, 64, 512])
@pytest.mark.parametrize("implementation", ["op", "triton"])
def test_bits_of_a_bad_row_are_above_all_others(implementation: str, K: int, dtype: torch.dtype, device: torch.device) -> None:
    """As int32, in which the ranks compare them: also of a NaN that has its sign bit set."""
    amax_of = OP[0] if implementation == "op" else triton_pair()[0]
    inf = torch.tensor(float("inf")).view(torch.int32).item()
    for nan in (float("nan"), -float("nan")):
        x = torch.full((2, K), -3.0, dtype=dtype, device=device)
        x[0, K // 2] = nan
        bits = amax_of(x).view(torch.int32)
        assert bits[0] > inf
        assert 0 < bits[1] < inf


def test_linear_of_a_part(device: torch.device) -> None:
    x = whole_rows(19, 512, torch.bfloat16, device)[:, 256:].reshape(1, 19, 256)
    amax = 2 * w8a8_kernels.quantize_amax(x[0], 64)
    weight = torch.randint(-127, 128, (24, 256), dtype=torch.int8, generator=torch.Generator().manual_seed(0)).to(device)
    scale = torch.full((24, 1), 0.01, device=device)
    codes, x_scale = w8a8_kernels.quantize(x[0], 64, amax)
    got = int8_linear(x, weight, scale, hadamard=64, amax=amax)
    assert got.shape == (1, 19, 24)
    assert same_bits(got[0], scaled_mm(codes, x_scale, weight, scale))
    assert not same_bits(got, int8_linear(x, weight, scale, hadamard=64))


@pytest.mark.parametrize("hadamard", [0, 64])
def test_op_contracts(hadamard: int, device: torch.device) -> None:
    """Schema, fake implementation and tracing agree with what the ops do."""
    x = activations(5, 128, torch.bfloat16, device)[:2]
    library.opcheck(torch.ops.w8a8.quantize_amax.default, (x, hadamard))
    amax = w8a8_kernels.quantize_amax(x, hadamard)
    library.opcheck(torch.ops.w8a8.quantize_with_amax.default, (x, amax, hadamard))


def test_refuses() -> None:
    x = torch.zeros(2, 96)
    for amax in (torch.zeros(2), torch.zeros(3, 1), torch.zeros(2, 1, dtype=torch.float64), torch.zeros(2, 1).bfloat16()):
        with pytest.raises(ValueError, match=r"got amax of shape .* expected \(2, 1\) in fp32, as quantize_amax gives it"):
            w8a8_kernels.quantize(x, amax=amax)
    with pytest.raises(ValueError, match=r"quantize_amax: got x of shape \(3,\) .* expected \[M, K\]"):
        w8a8_kernels.quantize_amax(torch.zeros(3))
    with pytest.raises(ValueError, match="quantize_amax: got a block of 64 for rows of 96"):
        w8a8_kernels.quantize_amax(x, 64)
