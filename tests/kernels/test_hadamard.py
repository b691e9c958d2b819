"""The block Hadamard transform: the transform itself, the block rule, and quantizers that apply it."""

from collections.abc import Sequence

import pytest
import torch
from inputs import activations, same_bits, short_squares

import w8a8_kernels
from w8a8_kernels.hadamard import BLOCKS, block_size, chosen_block, hadamard_transform, parse_choice, ranks_that_fit
from w8a8_kernels.quantize import (
    add_rms_norm_quantize_reference,
    quantize_reference,
    rms_norm_quantize_reference,
    rms_norm_reference,
    silu_mul_quantize_reference,
)
from w8a8_kernels.quantize.config import STREAM_OPS, StreamConfig, stream_config
from w8a8_kernels.tiles import max_shared_bytes

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
SHAPES = [(1, 16), (3, 128), (17, 384), (9, 1024), (5, 2944)]
GPU_SHAPES = [(M, K) for M in (1, 17, 257, 2048) for K in (128, 896, 1024, 4096, 6144, 12288, 14336, 24576)]
EPS = 1e-6


def dense(block: int) -> torch.Tensor:
    """Sylvester's construction, normalized, fp64 [block, block]."""
    matrix = torch.ones(1, 1, dtype=torch.float64)
    while matrix.shape[0] < block:
        matrix = torch.cat([torch.cat([matrix, matrix], 1), torch.cat([matrix, -matrix], 1)])
    return matrix / block**0.5


@pytest.mark.parametrize("block", BLOCKS)
def test_transform_is_the_product_with_an_orthonormal_matrix(block: int) -> None:
    matrix = dense(block)
    assert torch.allclose(matrix @ matrix.T, torch.eye(block, dtype=torch.float64))
    x = torch.randn(7, 3 * block, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    expected = (x.view(7, 3, block) @ matrix).view(7, 3 * block)
    got = hadamard_transform(x, block)
    assert got.dtype == torch.float32
    assert (got - expected).abs().max() < 1e-5
    # Its own inverse.
    assert (hadamard_transform(got, block) - x).abs().max() < 1e-5


def test_no_block_is_no_transform() -> None:
    x = torch.randn(3, 5, dtype=torch.float16)
    assert torch.equal(hadamard_transform(x, 0), x.float())


@pytest.mark.parametrize(
    ("K", "row_parallel", "block"),
    [
        (4096, False, 64),
        (4096, True, 64),
        (896, False, 64),
        (576, False, 64),
        (1536, True, 64),
        (576, True, 32),  # 72 a rank at 8, 144 at 4, 288 at 2
        (896, True, 32),  # 112 a rank at 8, 224 at 4
        (960, False, 64),
        (2880, False, 64),
        (2880, True, 32),  # 1440 a rank at 2
        (11008, True, 32),  # 1376 = 32 x 43 a rank at 8
        (29568, True, 16),  # 3696 = 16 x 231 a rank at 8: a model that needs them
        (24, True, 0),
        (4304, False, 16),
        (1000, False, 0),
        (33, True, 0),
    ],
)
def test_block_rule(K: int, row_parallel: bool, block: int) -> None:
    assert block_size(K, row_parallel=row_parallel) == block


def run(op: str, x: torch.Tensor, block: int, **options) -> tuple[tuple[torch.Tensor, ...], tuple[torch.Tensor, ...]]:
    """An op of the package, as the tests' device has it, and its reference, both on rows x [M, K]."""
    weight = torch.linspace(0.5, 1.5, x.shape[1]).to(x.dtype).to(x.device)
    wide = torch.cat([x, x.flip(0)], dim=1)
    if x.device.type == "cuda":
        ops = w8a8_kernels
        calls = {
            "quantize": lambda: ops.quantize(x, block),
            "rms_norm": lambda: ops.rms_norm_quantize(x, weight, EPS, 0.0, block),
            "add_rms_norm": lambda: ops.add_rms_norm_quantize(x, x.flip(0), weight, EPS, 0.0, block),
            "silu_mul": lambda: ops.silu_mul_quantize(wide, block),
        }
    else:
        from w8a8_kernels.quantize.rms_norm import add_rms_norm_quantize_row, rms_norm_quantize_row
        from w8a8_kernels.quantize.row import quantize_row
        from w8a8_kernels.quantize.silu_mul import silu_mul_quantize_row

        calls = {
            "quantize": lambda: quantize_row(x, block, **options),
            "rms_norm": lambda: rms_norm_quantize_row(x, weight, EPS, 0.0, block, **options),
            "add_rms_norm": lambda: add_rms_norm_quantize_row(x, x.flip(0), weight, EPS, 0.0, block, **options),
            "silu_mul": lambda: silu_mul_quantize_row(wide, block, **options),
        }
    x, weight, wide = x.cpu(), weight.cpu(), wide.cpu()
    references = {
        "quantize": lambda: quantize_reference(x, block),
        "rms_norm": lambda: rms_norm_quantize_reference(x, weight, EPS, 0.0, block),
        "add_rms_norm": lambda: add_rms_norm_quantize_reference(x, x.flip(0), weight, EPS, 0.0, block),
        "silu_mul": lambda: silu_mul_quantize_reference(wide, block),
    }
    return calls[op](), references[op]()


def assert_close(got: tuple[torch.Tensor, ...], expected: tuple[torch.Tensor, ...], scale_tolerance: float) -> None:
    codes, scale = got[0].cpu().int(), got[1].cpu()
    assert torch.equal(scale.isnan(), expected[1].isnan())
    finite = ~scale.isnan()
    assert ((scale - expected[1]).abs() <= scale_tolerance * expected[1])[finite].all()
    apart = (codes - expected[0].int()).abs()
    assert apart.max() <= 1
    assert (apart != 0).double().mean() <= 1e-3
    for mine, reference in zip(got[2:], expected[2:], strict=True):
        assert torch.equal(mine.cpu().nan_to_num(), reference.nan_to_num())


def assert_equal(got: Sequence[torch.Tensor], expected: Sequence[torch.Tensor]) -> None:
    for a, b in zip(got, expected, strict=True):
        assert same_bits(a, b), f"{(a != b).sum()} of {a.numel()} differ"


OPS = ("quantize", "rms_norm", "add_rms_norm", "silu_mul")


def check(op: str, M: int, K: int, block: int, dtype: torch.dtype, device: torch.device, **options) -> None:
    x = activations(M, K, dtype, device)
    got, expected = run(op, x, block, **options)
    # A norm or an activation rounded the other way, one in 2^12 places, moves a transformed value by its part of 2^-9.
    assert_close(got, expected, 1e-6 if op == "quantize" else 2e-3)
    if M > 4 and op == "quantize":
        assert got[1][1] == 1
        assert not got[0][1].any()
        assert got[1][2:4].isnan().all()
        assert not got[0][2:4].any()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("M", "K"), SHAPES, ids=lambda v: str(v))
@pytest.mark.parametrize("op", OPS)
def test_kernels_equal_their_references(op: str, M: int, K: int, dtype: torch.dtype, device: torch.device) -> None:
    pytest.importorskip("triton")
    for block in BLOCKS:
        if K % block == 0:
            check(op, M, K, block, dtype, device)


@pytest.mark.parametrize("dtype", DTYPES[:2], ids=str)
@pytest.mark.parametrize("programs", [2, 40])
@pytest.mark.parametrize(("K", "block_k", "block", "rows"), [(640, 1024, 32, 1), (2944, 1024, 64, 1), (96, 256, 16, 4)])
@pytest.mark.parametrize("op", OPS)
def test_streamed_rows_equal_their_references(
    op: str, K: int, block_k: int, block: int, rows: int, programs: int, dtype: torch.dtype, device: torch.device
) -> None:
    """Several rows a program, rows of one tile and of several, none of them full."""
    pytest.importorskip("triton")
    if device.type == "cuda":
        pytest.skip("the ops choose the tile there: test_kernels_equal_their_references_on_gpu")
    config = StreamConfig(block_k, -(-K // block_k), num_warps=4, num_stages=3, per_sm=1, rows=rows)
    check(op, 11, K, block, dtype, device, config=config, stream_sms=programs)


@pytest.mark.parametrize("M", [6, 40])
@pytest.mark.parametrize("op", ["rms_norm", "add_rms_norm"])
def test_long_rows_are_read_by_two_kernels(op: str, M: int, device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """Many rows too long for a norm and a transform in one kernel: they are streamed after another has found their rstd."""
    rms_norm = pytest.importorskip("w8a8_kernels.quantize.rms_norm")
    rstds = []

    def launch_stream(*args, rstd: torch.Tensor | None = None, **options) -> None:
        rstds.append(rstd)
        launch(*args, rstd=rstd, **options)

    launch = rms_norm.launch_stream
    monkeypatch.setattr(rms_norm, "launch_stream", launch_stream)
    monkeypatch.setattr(rms_norm, "STREAM_LONG_TILE", 2048)
    check(op, M, 2112, 64, torch.bfloat16, device, **({} if device.type == "cuda" else {"stream_sms": 20}))
    assert [None if rstd is None else rstd.shape for rstd in rstds] == ([(M,)] if M > 32 else [])


@pytest.mark.parametrize("dtype", DTYPES[:2], ids=str)
@pytest.mark.parametrize(("block_k", "rows"), [(4096, 1), (1024, 1), (4096, 4)])
def test_rows_of_two_kernels_equal_the_unfused_pair(
    block_k: int, rows: int, dtype: torch.dtype, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bit for bit, with an offset of the weight, a stride of the rows, and tiles of more chunks or rows than the rule's."""
    rms_norm = pytest.importorskip("w8a8_kernels.quantize.rms_norm")
    row = pytest.importorskip("w8a8_kernels.quantize.row")
    if device.type == "cuda":
        pytest.skip("the ops choose the tile there: test_long_rows_equal_the_unfused_pair_on_gpu")
    M, K = 38, 2112
    config = StreamConfig(block_k, -(-K // block_k), num_warps=4, num_stages=3, per_sm=1, rows=rows)
    monkeypatch.setattr(rms_norm, "STREAM_LONG_TILE", 2048)
    monkeypatch.setattr(rms_norm, "stream_config", lambda *args: config)
    x = short_squares(M, K + 64, dtype, device)[:, :K]
    weight = torch.linspace(-0.5, 0.5, K, dtype=dtype)
    got = rms_norm.rms_norm_quantize_row(x, weight, EPS, 1.0, 64, stream_sms=7)
    assert_equal(got, row.quantize_row(rms_norm_reference(x, weight, EPS, 1.0), 64))
    residual = short_squares(M, K, dtype, device, 1)
    *got, summed = rms_norm.add_rms_norm_quantize_row(x, residual, weight, EPS, 1.0, 64, stream_sms=7)
    assert_equal((summed,), (x + residual,))
    assert_equal(got, row.quantize_row(rms_norm_reference(summed, weight, EPS, 1.0), 64))


def test_streamed_rows_take_no_maximum() -> None:
    row = pytest.importorskip("w8a8_kernels.quantize.row")
    config = StreamConfig(1024, 1, num_warps=4, num_stages=3, per_sm=1)
    with pytest.raises(ValueError, match="expected a QuantizeConfig"):
        row.quantize_row(torch.zeros(2, 1024, dtype=torch.float16), 64, torch.ones(2, 1), config=config, stream_sms=2)


@pytest.mark.parametrize("op", STREAM_OPS)
@pytest.mark.parametrize("block", BLOCKS)
def test_streaming_rule(op: str, block: int) -> None:
    """Within the shared memory of capability 9.0, a tile of whole blocks for every length; none where it was not faster."""
    for M in (65, 257, 1025, 8192):
        for K in range(128, 17408, 128):
            config = stream_config(M, K, torch.bfloat16, block, op)
            assert (config is None) == (
                block > 64
                or K > {"rms_norm": 8192, "add_rms_norm": 8192}.get(op, 16384)
                or (K <= 2048 and (op != "silu_mul" or M > 1024))
                or (K > 4096 and M <= {"silu_mul": 1024, "quantize": 256}.get(op, 0))
            )
            if config is not None:
                assert (config.chunks - 1) * config.block_k < K <= config.chunks * config.block_k
                assert config.rows * config.block_k // block >= 64, "the least that tensor cores of capability 9.0 multiply"
                elements = config.rows * config.chunks * config.block_k * (2 if op in ("add_rms_norm", "silu_mul") else 1)
                assert 2 * elements * config.num_stages <= max_shared_bytes((9, 0))
    assert stream_config(32, 4096, torch.bfloat16, block, op) is None
    assert stream_config(2048, 4096, torch.float32, block, op) is None


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("M", "K"), GPU_SHAPES, ids=lambda v: str(v))
@pytest.mark.parametrize("op", OPS)
def test_kernels_equal_their_references_on_gpu(op: str, M: int, K: int, dtype: torch.dtype, device: torch.device) -> None:
    for block in (64,) if K > 4096 else BLOCKS:
        if K % block == 0:
            check(op, M, K, block, dtype, device)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES[:2], ids=str)
@pytest.mark.parametrize("block", [16, 64])
@pytest.mark.parametrize(("M", "K"), [(257, 8256), (257, 12288), (2048, 12288), (257, 16384), (2048, 16384)], ids=str)
def test_long_rows_equal_the_unfused_pair_on_gpu(M: int, K: int, block: int, dtype: torch.dtype, device: torch.device) -> None:
    """Bit for bit: where the squares add up the same in any order, two kernels that share rstd change nothing."""
    x, residual = short_squares(M, K, dtype, device), short_squares(M, K, dtype, device, 1)
    weight = torch.linspace(-0.5, 0.5, K, dtype=dtype)
    norm = rms_norm_reference(x.cpu(), weight, EPS, 1.0).to(device)
    weight = weight.to(device)
    got = w8a8_kernels.rms_norm_quantize(x, weight, EPS, 1.0, block)
    assert_equal(got, w8a8_kernels.quantize(norm, block))
    *got, summed = w8a8_kernels.add_rms_norm_quantize(x, residual, weight, EPS, 1.0, block)
    assert_equal((summed,), (x + residual,))
    norm = rms_norm_reference(summed.cpu(), weight.cpu(), EPS, 1.0).to(device)
    assert_equal(got, w8a8_kernels.quantize(norm, block))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("K", [896, 4096, 12288])
def test_a_row_does_not_depend_on_its_batch_on_gpu(K: int, dtype: torch.dtype, device: torch.device) -> None:
    x = torch.randn(1024, K, generator=torch.Generator().manual_seed(3)).to(dtype).to(device)
    codes, scale = w8a8_kernels.quantize(x, 64)
    for M in (1, 16, 129, 300):
        some_codes, some_scale = w8a8_kernels.quantize(x[:M], 64)
        assert torch.equal(some_codes, codes[:M])
        assert torch.equal(some_scale, scale[:M])


def test_a_row_does_not_depend_on_its_neighbours() -> None:
    """In one program: a NaN row, a zero row and a tiny row beside ordinary ones, which are coded by the same rule as alone."""
    row = pytest.importorskip("w8a8_kernels.quantize.row")
    if torch.cuda.is_available():
        pytest.skip("the interpreter is off where there is a GPU")
    x = torch.randn(8, 256, generator=torch.Generator().manual_seed(5)).to(torch.float16)
    alone = [row.quantize_row(x[i : i + 1], 64) for i in range(8)]
    x[1, 3] = float("nan")
    x[4] = 0
    x[6] = 6e-8
    codes, scale = row.quantize_row(x, 64, config=row.QuantizeConfig(rows=8, block_k=256, num_warps=4))
    for i in (0, 2, 3, 5, 7):
        assert torch.equal(codes[i], alone[i][0][0])
        assert torch.equal(scale[i], alone[i][1][0])


def test_refuses_a_block_that_does_not_fit() -> None:
    with pytest.raises(ValueError, match=r"a block of 64 for rows of 96, expected 0, or one of .* that divides 96"):
        w8a8_kernels.quantize(torch.zeros(2, 96), 64)
    with pytest.raises(ValueError, match="a block of 8"):
        w8a8_kernels.silu_mul_quantize(torch.zeros(2, 128), 8)


def test_spreads_an_outlier() -> None:
    """One channel 100 times the others: a row's codes hardly see the others, unless the outlier is spread over its block."""
    x = torch.randn(64, 512, generator=torch.Generator().manual_seed(0))
    x[:, 5] *= 100

    def snr(block: int) -> float:
        codes, scale = quantize_reference(x, block)
        back = hadamard_transform(codes.float() * scale, block)
        others = torch.arange(512) != 5
        return (10 * torch.log10(x[:, others].square().sum() / (back - x)[:, others].square().sum())).item()

    assert snr(0) < 20
    assert snr(64) > snr(0) + 12


@pytest.mark.parametrize(
    ("choice", "K", "block"),
    [("auto", 11008, 32), (64, 11008, 64), (128, 11008, 128), (16, 4096, 16), (0, 4096, 0), (128, 1000, 0)],
)
def test_choice_of_a_row_parallel_layer(choice: str | int, K: int, block: int) -> None:
    assert chosen_block(choice, K, row_parallel=True) == block


@pytest.mark.parametrize(("text", "choice"), [("auto", "auto"), (" AUTO ", "auto"), ("0", 0), (0, 0), ("128", 128), (16, 16)])
def test_choices(text: str | int, choice: str | int) -> None:
    assert parse_choice(text) == choice


@pytest.mark.parametrize("text", ["", "yes", "8", "256", "48", "64.0", "-16"])
def test_other_words_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"X=.*: expected auto, 0, 16, 32, 64 or 128"):
        parse_choice(text, "X")


def test_ranks_that_fit() -> None:
    assert ranks_that_fit(11008, 32) == [1, 2, 4, 8, 43]
    assert ranks_that_fit(320, 64) == [1, 5]
    for K in (4096, 11008, 14336, 18944, 8960):
        assert {1, 2, 4, 8} <= set(ranks_that_fit(K, block_size(K, row_parallel=True)))
