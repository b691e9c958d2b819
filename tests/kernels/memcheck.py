"""Every Triton kernel once, at sizes that its tiles do not divide: what `test_memcheck` runs under compute-sanitizer."""

import torch
from test_attention import check_rule, check_written, inputs

import w8a8_kernels
from w8a8_kernels.grouped_mm import ExpertsPlan, GroupedTile, int8_experts_reference
from w8a8_kernels.grouped_mm.experts import int8_experts_grouped
from w8a8_kernels.ops import device_facts
from w8a8_kernels.quantize import quantize_reference
from w8a8_kernels.quantize.config import MAX_BLOCK_BYTES
from w8a8_kernels.scaled_mm import scaled_mm_reference
from w8a8_kernels.scaled_mm.dp4a import scaled_mm_dp4a
from w8a8_kernels.scaled_mm.split_k import scaled_mm_split_k
from w8a8_kernels.select import has_dependent_launch
from w8a8_kernels.tiles import Tile

DTYPE = torch.bfloat16
LOOPED = MAX_BLOCK_BYTES // 2 + 64


def quantizers() -> None:
    shapes = [(3, 1000, 0), (3, LOOPED, 0), (300, 192, 64), (3, LOOPED, 64), (70, 4160, 64), (1030, 4160, 64), (300, 8256, 64)]
    for M, K, hadamard in shapes:
        x, weight = torch.randn(M, K, device="cuda", dtype=DTYPE), torch.randn(K, device="cuda", dtype=DTYPE)
        codes, _ = w8a8_kernels.quantize(x, hadamard)
        expected, _ = quantize_reference(x.cpu(), hadamard)
        assert int((codes.cpu().int() - expected.int()).abs().max()) <= (1 if hadamard else 0)
        w8a8_kernels.quantize(x, hadamard, w8a8_kernels.quantize_amax(x, hadamard))
        w8a8_kernels.rms_norm_quantize(x, weight, 1e-6, hadamard=hadamard)
        w8a8_kernels.add_rms_norm_quantize(x, x.clone(), weight, 1e-6, hadamard=hadamard)
        w8a8_kernels.silu_mul_quantize(torch.randn(M, 2 * K, device="cuda", dtype=DTYPE), hadamard)


def products() -> None:
    facts = device_facts(torch.device("cuda"))
    pdl = has_dependent_launch(facts.capability)
    tiles = [Tile(16, 64, 64, 4, 3, 2, swap=True), Tile(64, 64, 64, 4, 3)]
    if pdl:
        tiles += [
            Tile(16, 64, 64, 4, 3, swap=True, prefetch=128),
            Tile(16, 64, 64, 4, 3, 2, swap=True, preload=1),
            Tile(64, 64, 128, 4, 3, prefetch=128, tma=True),
            Tile(64, 64, 64, 4, 3, 2, tma=True, preload=1),
        ]
    for M, N, K in ((5, 70, 512), (70, 101, 528), (5, 33, 257)):
        args = (
            torch.randint(-127, 128, (M, K), dtype=torch.int8),
            torch.rand(M, 1),
            torch.randint(-127, 128, (N, K), dtype=torch.int8),
            torch.rand(N, 1),
            torch.randn(N).to(DTYPE),
        )
        expected = scaled_mm_reference(*args, DTYPE)
        on_gpu = [arg.cuda() for arg in args]
        for tile in tiles:
            options = {"num_sms": 132, "capability": facts.capability, "tile": tile, "pdl": pdl}
            torch.testing.assert_close(scaled_mm_split_k(*on_gpu, DTYPE, **options).cpu(), expected)
        torch.testing.assert_close(scaled_mm_dp4a(*on_gpu, DTYPE, num_sms=132).cpu(), expected)


def pingpong() -> None:
    if torch.cuda.get_device_capability() != (9, 0):
        return
    from w8a8_kernels.scaled_mm.pingpong import scaled_mm_pingpong

    for M, N, K in ((5, 80, 512), (300, 2064, 1040)):
        x, weight = (torch.randint(-127, 128, (rows, K), dtype=torch.int8) for rows in (M, N))
        args = (x, torch.rand(M, 1), weight, torch.rand(N, 1), torch.randn(N).to(DTYPE))
        # 8 programs: several tiles for each.
        got = scaled_mm_pingpong(*(arg.cuda() for arg in args), DTYPE, num_sms=8, pdl=True)
        torch.testing.assert_close(got.cpu(), scaled_mm_reference(*args, DTYPE))


def experts() -> None:
    pdl = has_dependent_launch(device_facts(torch.device("cuda")).capability)
    plans = [
        ExpertsPlan(direct, tile, tile)
        for direct in (True, False)
        for tile in (
            GroupedTile(16, 64, 64, 4, 3, swap=True, prefetch=32 if pdl else 0),
            GroupedTile(64, 64, 64, 4, 3, tma=pdl),
        )
    ]
    for T, E, top_k, hidden, intermediate in ((5, 7, 2, 208, 144), (90, 3, 2, 101, 33)):
        scores = torch.rand(T, 2 * E)
        weights, ids = scores.topk(top_k)
        expert_map = torch.full((2 * E,), -1, dtype=torch.int32)
        expert_map[::2] = torch.arange(E, dtype=torch.int32)
        args = (
            torch.randn(T, hidden).to(DTYPE),
            torch.randint(-127, 128, (E, 2 * intermediate, hidden), dtype=torch.int8),
            torch.rand(E, 2 * intermediate, 1) / (127 * hidden**0.5),
            torch.randint(-127, 128, (E, hidden, intermediate), dtype=torch.int8),
            torch.rand(E, hidden, 1) / (127 * intermediate**0.5),
            weights,
            ids,
        )
        expected = int8_experts_reference(*args, expert_map=expert_map)
        on_gpu = [arg.cuda() for arg in args]
        for plan in plans:
            got = int8_experts_grouped(*on_gpu, expert_map=expert_map.cuda(), plan=plan, pdl=pdl).cpu()
            assert float((got - expected).double().norm() / expected.double().norm()) <= 5e-3


def attention() -> None:
    """Blocks of no sequence hold NaN, and tables are longer than a sequence."""
    device = torch.device("cuda")
    for int8 in (False, True):
        for D, heads, kv_heads, block_size in ((128, 8, 2, 16), (80, 5, 1, 48), (256, 4, 2, 16)):
            for lens in ([(1, 1), (1, 700), (1, 33)], [(4, 40), (2, 300)], [(70, 90), (1, 33), (0, 0)]):
                args = inputs(device, lens, heads, kv_heads, D, block_size, dtype=DTYPE, int8=int8)
                check_rule(args, lens, 4e-3)
                check_rule(args, lens, 4e-3, window=40)
    check_written(device, DTYPE, T=70, kv_heads=3, D=128)
    check_written(device, DTYPE, T=70, kv_heads=1, D=80, block_size=48)


if __name__ == "__main__":
    quantizers()
    products()
    pingpong()
    experts()
    attention()
    torch.cuda.synchronize()
    print("all kernels ran")
