"""The attention kernel against fp32 torch."""

import numpy as np
import pytest
import torch

from w8a8_kernels.attention import int8_cache_views, page_bytes
from w8a8_kernels.attention.config import AttentionPlan, AttentionTile, power_of_two
from w8a8_kernels.attention.launch import paged_attention
from w8a8_kernels.attention.reference import paged_attention_reference

SMALL = AttentionTile(block_m=16, block_n=16, num_warps=4, num_stages=2)


@pytest.fixture(autouse=True)
def bf16_products(device, monkeypatch) -> None:
    """Triton's interpreter holds bf16 as the integers of its bits, and `tl.dot` multiplies these (3.9): widened to fp32."""
    if device.type == "cuda":
        return
    import triton.language as tl
    from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

    create_dot = InterpreterBuilder.create_dot

    def widened(handle):
        if handle.dtype.scalar != tl.bfloat16:
            return handle
        return TensorHandle((handle.data.astype(np.uint32) << 16).view(np.float32), tl.float32)

    monkeypatch.setattr(
        InterpreterBuilder, "create_dot", lambda self, a, b, *rest: create_dot(self, widened(a), widened(b), *rest)
    )


def inputs(
    device,
    lens: list[tuple[int, int]],
    heads=4,
    kv_heads=2,
    D=64,
    block_size=16,
    dtype=torch.float32,
    int8=False,
    seed=0,
) -> dict:
    """Sequences of (queries, keys), whose blocks lie in the cache in a random order, among blocks of NaN.

    Keys beyond a sequence's own in its last block are NaN, too, or codes with a NaN scale.
    """
    generator = torch.Generator().manual_seed(seed)

    def random(*shape):
        return torch.randn(shape, generator=generator)

    counts = [-(-keys // block_size) for _, keys in lens]
    n_blocks = 2 * sum(counts) + 3
    order = torch.randperm(n_blocks, generator=generator)
    table = torch.full((len(lens), max(counts) + 2), n_blocks + 7, dtype=torch.int32)
    cache = torch.full((2, n_blocks, block_size, kv_heads, D), float("nan"))
    used = 0
    for b, ((_, keys), count) in enumerate(zip(lens, counts, strict=True)):
        mine = order[used : used + count]
        table[b, :count] = mine.int()
        for kind in cache:
            values = torch.full((count * block_size, kv_heads, D), float("nan"))
            values[:keys] = random(keys, kv_heads, D)
            kind[mine] = values.reshape(count, block_size, kv_heads, D)
        used += count
    starts = torch.tensor([0, *torch.tensor([queries for queries, _ in lens]).cumsum(0)], dtype=torch.int32)
    args = {
        "q": random(int(starts[-1]), heads, D).to(dtype),
        "block_table": table,
        "seq_lens": torch.tensor([keys for _, keys in lens], dtype=torch.int32),
        "query_start_loc": starts,
    }
    if int8:
        pages = torch.randint(-128, 128, (n_blocks, page_bytes(block_size, kv_heads, D)), generator=generator).to(torch.int8)
        key, value, key_scale, value_scale = views = int8_cache_views(pages, block_size, kv_heads, D)
        scale = cache.abs().amax(-1) / 127
        codes = (cache / scale[..., None]).round()
        written = ~scale.isnan()
        for i, (to_codes, to_scale) in enumerate(((key, key_scale), (value, value_scale))):
            to_codes[written[i]] = codes[i][written[i]].to(torch.int8)
            to_scale.copy_(scale[i])
        args |= dict(zip(("key_cache", "value_cache", "key_scale", "value_scale"), views, strict=True))
    else:
        args |= {"key_cache": cache[0].to(dtype), "value_cache": cache[1].to(dtype)}
    return {name: value.to(device) for name, value in args.items()} | {"scale": D**-0.5}


def check(args: dict, lens, tolerance=2e-6, tile=SMALL, splits=1, **options) -> None:
    expected = paged_attention_reference(**args, **options)
    most = {"most_queries": max(queries for queries, _ in lens), "most_keys": max(keys for _, keys in lens)}
    group = args["q"].shape[1] // args["key_cache"].shape[2]
    plan = AttentionPlan(tile, most["most_queries"] * power_of_two(group) <= tile.block_m, splits)
    got = paged_attention(**args, **options, **most, plan=plan).float()
    error = (got - expected).norm() / expected.norm()
    assert error < tolerance, float(error)


DECODE = [(1, 1), (1, 15), (1, 16), (1, 17), (1, 100)]
MIXED = [(5, 5), (1, 33), (17, 40), (0, 0), (16, 16), (31, 31)]


@pytest.mark.parametrize("splits", [1, 2, 8])
@pytest.mark.parametrize("lens", [DECODE, MIXED], ids=["decode", "mixed"])
def test_lengths(device, lens, splits):
    check(inputs(device, lens), lens, splits=splits)


@pytest.mark.parametrize("causal", [True, False], ids=["causal", "not causal"])
@pytest.mark.parametrize("window", [1, 15, 16, 17, 40])
def test_windows(device, window, causal):
    lens = [(1, 70), (20, 70), (33, 33)]
    check(inputs(device, lens), lens, window=window, causal=causal, splits=2)


def test_not_causal(device):
    check(inputs(device, MIXED), MIXED, causal=False)


@pytest.mark.parametrize("option", ["softcap", "sinks", "alibi_slopes"])
@pytest.mark.parametrize("splits", [1, 4])
def test_scores(device, option, splits):
    lens = [(1, 50), (9, 30)]
    args = inputs(device, lens)
    values = {
        "softcap": 2.0,
        "sinks": torch.tensor([0.5, -1.0, 2.0, 0.0]),
        "alibi_slopes": torch.tensor([0.5, 0.25, 0.1, 0.0]),
    }
    value = values[option]
    check(args, lens, splits=splits, **{option: value.to(device) if torch.is_tensor(value) else value})


@pytest.mark.parametrize("D", [64, 80, 96, 112, 128, 192, 256, 512])
def test_head_sizes(device, D):
    lens = [(1, 20), (3, 18)]
    check(inputs(device, lens, D=D), lens, splits=2)


@pytest.mark.parametrize(("heads", "kv_heads"), [(2, 2), (6, 2), (5, 1), (8, 1), (16, 1)])
def test_groups(device, heads, kv_heads):
    lens = [(1, 20), (3, 18)]
    check(inputs(device, lens, heads=heads, kv_heads=kv_heads), lens)


@pytest.mark.parametrize("block_size", [16, 32, 48, 128])
def test_block_sizes(device, block_size):
    lens = [(1, 130), (3, 49)]
    check(inputs(device, lens, block_size=block_size), lens, splits=2)


@pytest.mark.parametrize("splits", [1, 4])
@pytest.mark.parametrize("D", [64, 80])
def test_int8_cache(device, splits, D):
    lens = [(1, 50), (9, 30)]
    check(inputs(device, lens, int8=True, D=D), lens, splits=splits)


@pytest.mark.parametrize("splits", [1, 4])
@pytest.mark.parametrize(("lens", "group"), [(DECODE, 4), (DECODE, 16), ([(3, 50), (1, 20), (4, 4)], 5)])
def test_int8_products(device, lens, group, splits):
    """Queries and weights of 16 bits: 1 / 127 / 254 / 2 of the greatest at most, from which relative errors of sums follow."""
    tile = AttentionTile(power_of_two(max(8, group * lens[0][0])), 32, num_warps=4, num_stages=2, int8_dot=True)
    check(inputs(device, lens, int8=True, heads=group, kv_heads=1), lens, tolerance=1e-4, tile=tile, splits=splits)


@pytest.mark.parametrize("option", [{"softcap": 2.0}, {"window": 17}, {"causal": False}])
def test_int8_products_of_scores(device, option):
    lens = [(1, 50), (2, 33)]
    tile = AttentionTile(8, 32, num_warps=4, num_stages=2, int8_dot=True)
    check(inputs(device, lens, int8=True), lens, tolerance=1e-4, tile=tile, splits=2, **option)


@pytest.mark.parametrize("int8", [False, True])
def test_without_dot(device, int8):
    tile = AttentionTile(block_m=2, block_n=8, num_warps=4, num_stages=1, dot=False)
    check(inputs(device, DECODE, int8=int8), DECODE, tile=tile, splits=2)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.bfloat16, 6e-3), (torch.float16, 1e-3)])
def test_half_precision(device, dtype, tolerance):
    check(inputs(device, MIXED, dtype=dtype), MIXED, tolerance=tolerance)
