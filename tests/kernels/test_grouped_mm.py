import functools
from dataclasses import replace

import pytest
import torch
from inputs import activations, codes, same_bits
from torch import library

import w8a8_kernels
from w8a8_kernels.grouped_mm import (
    ExpertsPlan,
    GroupedTile,
    experts_plan,
    grouped_mm_reference,
    int8_experts_reference,
    local_experts_reference,
    select_experts,
)
from w8a8_kernels.grouped_mm.config import max_blocks
from w8a8_kernels.quantize import quantize_reference
from w8a8_kernels.scaled_mm import scaled_mm_reference
from w8a8_kernels.select import Facts
from w8a8_kernels.tiles import max_shared_bytes

CPU = torch.device("cpu")

# Tokens, top_k, experts, N, K: one of everything, sizes that no tile divides, more experts than pairs, experts of many blocks.
SMALL = [(1, 1, 1, 1, 1), (1, 2, 4, 17, 33), (3, 2, 4, 64, 128), (5, 3, 40, 33, 48), (24, 2, 2, 40, 96), (9, 2, 3, 70, 257)]

TILES = {
    "small": GroupedTile(16, 32, 64, num_warps=4, num_stages=2),
    "swap": GroupedTile(16, 64, 64, num_warps=4, num_stages=2, swap=True),
    "wide": GroupedTile(32, 64, 128, num_warps=4, num_stages=3),
    "tma": GroupedTile(64, 32, 128, num_warps=4, num_stages=3, tma=True),
}

# Qwen3-30B-A3B.
QWEN = {"experts": 128, "top_k": 8, "hidden": 2048, "intermediate": 768}

CAPABILITIES = [(8, 0), (8, 6), (8, 9), (9, 0), (10, 0), (12, 0)]


def routing(T: int, top_k: int, experts: int, device: torch.device, seed: int = 3) -> tuple[torch.Tensor, torch.Tensor]:
    """topk_weights [T, top_k] fp32 and topk_ids [T, top_k] int32, distinct for a token, and some experts without tokens."""
    generator = torch.Generator().manual_seed(seed)
    scores = torch.rand(T, experts, generator=generator)
    if experts > 3 * top_k:
        scores[:, 1::3] = -1
    weights, ids = scores.topk(top_k, dim=1) if top_k <= experts else (scores[:, :1], torch.zeros(T, 1))
    return weights.to(device), ids.int().to(device)


def operands(T: int, top_k: int, E: int, N: int, K: int, device: torch.device, bias: torch.dtype | None = None):
    """x, x_scale, weight, weight_scale, bias of a grouped product, with bad rows where T allows."""
    x, x_scale = quantize_reference(activations(T, K, torch.float32, CPU))
    weight_scale = torch.rand(E, N, 1, generator=torch.Generator().manual_seed(2)) / (127 * K**0.5)
    bias = None if bias is None else torch.randn(E, N, generator=torch.Generator().manual_seed(4)).to(bias).to(device)
    return x.to(device), x_scale.to(device), codes(E * N, K, device).view(E, N, K), weight_scale.to(device), bias


def layer(
    T: int, dtype: torch.dtype, device: torch.device, *, experts: int, top_k: int, hidden: int, intermediate: int
) -> dict[str, torch.Tensor]:
    """Arguments of `int8_experts`; results are of the size of x."""

    def scale(rows: int, K: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(rows)
        return ((0.5 + torch.rand(experts, rows, 1, generator=generator)) / (74 * K**0.5)).to(device)

    weights, ids = routing(T, top_k, experts, device)
    return {
        "x": torch.randn(T, hidden, generator=torch.Generator().manual_seed(5)).to(dtype).to(device),
        "w13": codes(experts * 2 * intermediate, hidden, device).view(experts, 2 * intermediate, hidden),
        "w13_scale": scale(2 * intermediate, hidden),
        "w2": codes(experts * hidden, intermediate, device, seed=6).view(experts, hidden, intermediate),
        "w2_scale": scale(hidden, intermediate),
        "topk_weights": weights / weights.sum(dim=1, keepdim=True),
        "topk_ids": ids,
    }


def grouped(args: tuple, ids: torch.Tensor, out_dtype: torch.dtype, tile: str = "small", *, direct: bool = False, **options):
    """The Triton product, and which of its rows it has written."""
    product = pytest.importorskip("w8a8_kernels.grouped_mm.product")
    from w8a8_kernels.grouped_mm.sort import sort_pairs

    expert_map = options.pop("expert_map", None)
    E = args[2].shape[0]
    blocks = None if direct else sort_pairs(ids, expert_map, E, TILES[tile].block_m)
    out = product.grouped_mm(*args, ids, expert_map, blocks, out_dtype, tile=TILES[tile], **options)
    return out, local_experts_reference(ids, E, expert_map) >= 0


def grouped_layer(args: dict, *, direct: bool = False, tile: str = "small", pdl: bool = False, **options) -> torch.Tensor:
    experts = pytest.importorskip("w8a8_kernels.grouped_mm.experts")
    return experts.int8_experts_grouped(**args, **options, plan=ExpertsPlan(direct, TILES[tile], TILES[tile]), pdl=pdl)


def relative_error(got: torch.Tensor, expected: torch.Tensor) -> float:
    return float((got.double() - expected.double()).norm() / expected.double().norm())


def dtypes(device: torch.device) -> tuple[torch.dtype, ...]:
    # The interpreter truncates when it casts to bf16 (seen on 3.6.0 and 3.9.0); hardware rounds to nearest even.
    half = (torch.float16, torch.float32)
    return (torch.bfloat16, *half) if device.type == "cuda" else half


@functools.cache
def rank_map(experts: int, ranks: int, rank: int) -> torch.Tensor:
    """expert_map of a rank that holds its share of the experts, side by side."""
    expert_map = torch.full((experts,), -1, dtype=torch.int32)
    mine = torch.arange(experts * rank // ranks, experts * (rank + 1) // ranks)
    expert_map[mine] = torch.arange(mine.numel(), dtype=torch.int32)
    return expert_map


@pytest.mark.parametrize(("T", "top_k", "E", "N", "K"), SMALL)
def test_reference_is_a_product_for_each_pair(T: int, top_k: int, E: int, N: int, K: int) -> None:
    x, x_scale, weight, weight_scale, bias = operands(T, top_k, E, N, K, CPU, torch.float32)
    _, ids = routing(T, top_k, E, CPU)
    got = grouped_mm_reference(x, x_scale, weight, weight_scale, bias, ids.view(-1).long(), torch.bfloat16)
    for p, e in enumerate(ids.view(-1).tolist()):
        t = p // top_k
        expected = scaled_mm_reference(x[t : t + 1], x_scale[t : t + 1], weight[e], weight_scale[e], bias[e], torch.bfloat16)
        assert same_bits(got[p : p + 1], expected)


@pytest.mark.parametrize("ids_dtype", [torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize("ranks", [1, 3])
@pytest.mark.parametrize(
    ("T", "top_k", "experts", "block_m"), [(1, 2, 4, 16), (7, 3, 5, 16), (40, 8, 100, 16), (700, 6, 9, 32)]
)
def test_pairs_are_sorted_by_expert(
    T: int, top_k: int, experts: int, block_m: int, ranks: int, ids_dtype: torch.dtype, device: torch.device
) -> None:
    """Every pair of a local expert once, in order, in blocks of one expert; the rest of a block says that it is empty."""
    sort_pairs = pytest.importorskip("w8a8_kernels.grouped_mm.sort").sort_pairs
    generator = torch.Generator().manual_seed(T)
    # Ids that are no expert's among them, below and above.
    ids = torch.randint(-1, experts + 1, (T, top_k), generator=generator).to(ids_dtype)
    expert_map = rank_map(experts, ranks, 1).to(device) if ranks > 1 else None
    local = experts if expert_map is None else int(expert_map.max()) + 1
    pairs, block_experts = (t.cpu() for t in sort_pairs(ids.to(device), expert_map, local, block_m))
    P = ids.numel()
    assert block_experts.numel() == max_blocks(P, local, block_m)
    found: dict[int, list[int]] = {}
    for rows, e in zip(pairs.view(-1, block_m).tolist(), block_experts.tolist(), strict=True):
        if e >= 0:
            used = [p for p in rows if p < P]
            assert used, "a block without pairs is marked"
            assert rows == used + [P] * (block_m - len(used))
            assert len(found.get(e, [])) % block_m == 0, "only the last block of an expert is not full"
            found.setdefault(e, []).extend(used)
    of_pairs = local_experts_reference(ids, local, None if expert_map is None else expert_map.cpu())
    expected = {e: (of_pairs == e).nonzero().view(-1).tolist() for e in range(local)}
    assert found == {e: rows for e, rows in expected.items() if rows}


@pytest.mark.parametrize("direct", [True, False], ids=["direct", "sorted"])
@pytest.mark.parametrize("tile", TILES)
@pytest.mark.parametrize(("T", "top_k", "E", "N", "K"), SMALL)
def test_product_equals_reference(
    T: int, top_k: int, E: int, N: int, K: int, tile: str, direct: bool, device: torch.device
) -> None:
    """The first product, a row for a token's pairs, and the second, a row for each pair; bit for bit without a bias."""
    if tile == "tma" and device.type == "cuda" and torch.cuda.get_device_capability() < (9, 0):
        pytest.skip("needs compute capability 9.0")
    _, ids = routing(T, top_k, E, device)
    for rows in (T, T * top_k):
        args = operands(rows, top_k, E, N, K, device)
        for out_dtype in dtypes(device):
            got, _ = grouped(args, ids, out_dtype, tile, direct=direct)
            expected = grouped_mm_reference(*(a if a is None else a.cpu() for a in args), ids.view(-1).long().cpu(), out_dtype)
            assert same_bits(got.cpu(), expected)


@pytest.mark.parametrize("direct", [True, False], ids=["direct", "sorted"])
def test_bias_and_pair_scale(direct: bool, device: torch.device) -> None:
    T, top_k, E, N, K = 9, 2, 4, 33, 96
    weights, ids = routing(T, top_k, E, device)
    for out_dtype in dtypes(device):
        args = operands(T, top_k, E, N, K, device, out_dtype)
        got, _ = grouped(args, ids, out_dtype, direct=direct, pair_scale=weights)
        x, x_scale, *rest = (a.cpu() for a in args)
        scale = (x_scale * weights.cpu()).view(-1, 1)
        expected = grouped_mm_reference(x, scale, *rest, ids.view(-1).long().cpu(), out_dtype)
        # A bias may be added in one rounding with the last product.
        torch.testing.assert_close(got.cpu(), expected, rtol=torch.finfo(out_dtype).eps, atol=1e-6, equal_nan=True)


def test_bad_rows_stay_in_their_row(device: torch.device) -> None:
    T, top_k, E = 9, 2, 3
    args = operands(T, top_k, E, 40, 64, device, torch.float16)
    _, ids = routing(T, top_k, E, device)
    for direct in (True, False):
        out, _ = grouped(args, ids, torch.float16, direct=direct)
        out = out.view(T, top_k, 40)
        assert same_bits(out[1], args[4][ids[1].long()]), "a zero row gives exactly the bias"
        assert out[[2, 3]].isnan().all()
        assert not out[[0, 1, 4, 5, 6, 7, 8]].isnan().any()


@pytest.mark.parametrize("direct", [True, False], ids=["direct", "sorted"])
def test_pairs_without_an_expert_are_not_written(direct: bool, device: torch.device) -> None:
    T, top_k, experts = 20, 3, 12
    _, ids = routing(T, top_k, experts, device)
    ids[4] = -1
    expert_map = rank_map(experts, 3, 2).to(device)
    args = operands(T, top_k, 4, 40, 64, device)
    got, written = grouped(args, ids, torch.float32, direct=direct, expert_map=expert_map)
    pairs = local_experts_reference(ids.cpu(), 4, expert_map.cpu())
    expected = grouped_mm_reference(*(a if a is None else a.cpu() for a in args), pairs, torch.float32)
    assert 0 < int(written.sum()) < T * top_k
    assert same_bits(got[written].cpu(), expected[written.cpu()])
    assert bool((got[~written] == 12345.0).all()), "what conftest fills empty memory with"


def test_weight_with_strides(device: torch.device) -> None:
    """Rows and experts further apart than they are long."""
    T, top_k, E, N, K = 5, 2, 3, 20, 64
    x, x_scale, weight, weight_scale, _ = operands(T, top_k, E, N, K, device)
    _, ids = routing(T, top_k, E, device)
    padded = torch.zeros((E, N + 2, K + 16), dtype=torch.int8, device=device)[:, :N, :K]
    padded.copy_(weight)
    for tile in ("small", "wide"):
        got, _ = grouped((x, x_scale, padded, weight_scale, None), ids, torch.float16, tile)
        assert same_bits(got, grouped((x, x_scale, weight, weight_scale, None), ids, torch.float16, tile)[0])


LAYERS = [  # tokens, experts, top_k, hidden, intermediate, Hadamard blocks
    (1, 4, 2, 64, 32, (0, 0)),
    (3, 8, 2, 96, 48, (32, 16)),
    (20, 2, 2, 72, 40, (0, 0)),
    (4, 3, 1, 33, 17, (0, 0)),
]


@pytest.mark.parametrize(("T", "experts", "top_k", "hidden", "intermediate", "blocks"), LAYERS)
def test_layer_follows_reference(
    T: int, experts: int, top_k: int, hidden: int, intermediate: int, blocks: tuple[int, int], device: torch.device
) -> None:
    options = {"hadamard13": blocks[0], "hadamard2": blocks[1]}
    for dtype in dtypes(device):
        args = layer(T, dtype, device, experts=experts, top_k=top_k, hidden=hidden, intermediate=intermediate)
        expected = int8_experts_reference(**args, **options)
        got = [grouped_layer(args, direct=direct, **options) for direct in (True, False)]
        # exp is another function, and sums of products may round once less: some codes and last bits differ.
        assert relative_error(got[0], expected) <= {torch.float32: 1e-3}.get(dtype, 5e-3)
        assert same_bits(got[0], got[1]), "direct and sorted differ"
        assert same_bits(got[1], grouped_layer(args, tile="wide", **options)), "tiles differ"


def test_layer_is_close_to_floats(device: torch.device) -> None:
    """The layer means what it should: against dequantized weights and unquantized activations."""
    args = layer(6, torch.float32, device, experts=8, top_k=2, hidden=128, intermediate=64)
    w13, w2 = args["w13"].float() * args["w13_scale"], args["w2"].float() * args["w2_scale"]
    expected = torch.zeros_like(args["x"])
    for t in range(6):
        for weight, e in zip(args["topk_weights"][t], args["topk_ids"][t].tolist(), strict=True):
            gate, up = (w13[e] @ args["x"][t]).chunk(2)
            expected[t] += weight * (w2[e] @ (torch.nn.functional.silu(gate) * up))
    assert relative_error(int8_experts_reference(**args), expected) < 0.02
    assert relative_error(grouped_layer(args), expected) < 0.02


@pytest.mark.parametrize("direct", [True, False], ids=["direct", "sorted"])
def test_ranks_add_up(direct: bool, device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """Expert parallelism: what other ranks hold contributes zero, whatever unwritten memory holds."""
    experts, ranks, T = 12, 3, 10
    args = layer(T, torch.float32, device, experts=experts, top_k=3, hidden=64, intermediate=32)
    whole = grouped_layer(args, direct=direct)
    empty = torch.empty

    def nan_filled(*args, **kwargs):
        out = empty(*args, **kwargs)
        return out.fill_(float("nan")) if out.is_floating_point() else out

    monkeypatch.setattr(torch, "empty", nan_filled)
    total = torch.zeros_like(whole)
    for rank in range(ranks):
        held = slice(experts * rank // ranks, experts * (rank + 1) // ranks)
        mine = {k: v[held] if k.startswith("w") else v for k, v in args.items()}
        expert_map = rank_map(experts, ranks, rank).to(device)
        part = grouped_layer(mine, direct=direct, expert_map=expert_map)
        assert relative_error(part, int8_experts_reference(**mine, expert_map=expert_map)) < 1e-3
        total += part
    torch.testing.assert_close(total, whole, rtol=1e-5, atol=1e-6)
    nobody = torch.full((experts,), -1, dtype=torch.int32, device=device)
    assert bool((grouped_layer(args, direct=direct, expert_map=nobody) == 0).all())


def test_absent_pairs_may_have_any_weight(device: torch.device) -> None:
    args = layer(5, torch.float32, device, experts=4, top_k=2, hidden=64, intermediate=32)
    args["topk_ids"][:, 1] = -1
    args["topk_weights"][:, 1] = float("nan")
    alone = {k: v[:, :1].contiguous() if k.startswith("topk") else v for k, v in args.items()}
    assert same_bits(grouped_layer(args), grouped_layer(alone))
    assert same_bits(int8_experts_reference(**args), int8_experts_reference(**alone))


def test_weight_on_input(device: torch.device) -> None:
    """The weight goes through both projections: gate and up see a scaled x, whose codes are the same."""
    args = layer(6, torch.float32, device, experts=4, top_k=1, hidden=64, intermediate=32)
    args["topk_weights"] = torch.rand(6, 1, generator=torch.Generator().manual_seed(8)).to(device) + 0.5
    scaled = {
        **args,
        "x": args["x"] * args["topk_weights"],
        "topk_weights": torch.ones_like(args["topk_weights"]),
    }
    for direct in (True, False):
        got = grouped_layer(args, direct=direct, apply_weight_on_input=True)
        assert relative_error(got, int8_experts_reference(**args, apply_weight_on_input=True)) < 1e-3
        assert relative_error(got, int8_experts_reference(**scaled)) < 1e-2
        assert relative_error(got, int8_experts_reference(**args)) > 0.1


def test_biases(device: torch.device) -> None:
    args = layer(6, torch.float32, device, experts=4, top_k=2, hidden=64, intermediate=32)
    biases = {
        name: torch.randn(4, n, generator=torch.Generator().manual_seed(n)).to(device)
        for name, n in (("w13_bias", 64), ("w2_bias", 64))
    }
    expected = int8_experts_reference(**args, **biases)
    assert relative_error(grouped_layer(args, **biases), expected) < 1e-3
    assert relative_error(int8_experts_reference(**args), expected) > 0.1


def test_no_tokens(device: torch.device) -> None:
    args = layer(0, torch.bfloat16, device, experts=4, top_k=2, hidden=64, intermediate=32)
    assert w8a8_kernels.int8_experts(**args).shape == (0, 64)
    assert grouped_layer(args).shape == (0, 64)


def test_op_takes_what_routers_give(device: torch.device) -> None:
    """int64 ids and weights of 16 bits, rows of x and columns of ids with strides."""
    args = layer(5, torch.bfloat16, device, experts=4, top_k=2, hidden=64, intermediate=32)
    args["topk_weights"] = args["topk_weights"].bfloat16()
    expected = w8a8_kernels.int8_experts(**args)
    strided = {
        **args,
        "x": torch.cat([args["x"], args["x"]], dim=1)[:, :64],
        "topk_ids": args["topk_ids"].long().t().contiguous().t(),
        "topk_weights": args["topk_weights"].t().contiguous().t(),
    }
    assert same_bits(w8a8_kernels.int8_experts(**strided), expected)


def test_op_contract(device: torch.device) -> None:
    args = layer(3, torch.bfloat16, device, experts=4, top_k=2, hidden=64, intermediate=32)
    library.opcheck(torch.ops.w8a8.int8_experts.default, tuple(args.values()))


def test_compiled_equals_eager(device: torch.device) -> None:
    args = layer(9, torch.bfloat16, device, experts=4, top_k=2, hidden=64, intermediate=32)
    compiled = torch.compile(w8a8_kernels.int8_experts, fullgraph=True, backend="aot_eager", dynamic=True)
    for T in (9, 3):
        rows = {k: v if k.startswith("w") else v[:T] for k, v in args.items()}
        assert same_bits(compiled(**rows), w8a8_kernels.int8_experts(**rows))


BAD = {
    "x": lambda a: a["x"].double(),
    "w13": lambda a: a["w13"][:, 1:],
    "w13_scale": lambda a: a["w13_scale"].squeeze(2),
    "w2": lambda a: a["w2"].float(),
    "w2_scale": lambda a: a["w2_scale"].half(),
    "topk_weights": lambda a: a["topk_weights"][:, 1:],
    "topk_ids": lambda a: a["topk_ids"].float(),
    "expert_map": lambda a: torch.zeros(8),
    "w13_bias": lambda a: torch.zeros(4, 32),
    "w2_bias": lambda a: torch.zeros(64),
}


@pytest.mark.parametrize("name", BAD)
def test_refuses(name: str) -> None:
    args = layer(3, torch.bfloat16, CPU, experts=4, top_k=2, hidden=64, intermediate=32)
    args[name] = BAD[name](args)
    with pytest.raises(ValueError, match=rf"int8_experts: got {name} of shape .*expected"):
        w8a8_kernels.int8_experts(**args)


def test_refuses_what_is_not_there() -> None:
    args = layer(3, torch.bfloat16, CPU, experts=4, top_k=2, hidden=64, intermediate=32)
    with pytest.raises(ValueError, match="activation 'gelu', expected 'silu'"):
        w8a8_kernels.int8_experts(**args, activation="gelu")
    with pytest.raises(ValueError, match=r"hadamard2: got a block of 64 for rows of 32"):
        w8a8_kernels.int8_experts(**args, hadamard2=64)
    with pytest.raises(ValueError, match=r"got x of shape \(1, 3, 64\)"):
        w8a8_kernels.int8_experts(**(args | {"x": args["x"][None]}))
    with pytest.raises(ValueError, match=r"got w13 with strides .* expected columns side by side"):
        w8a8_kernels.int8_experts(**(args | {"w13": args["w13"].transpose(1, 2).contiguous().transpose(1, 2)}))


def test_which_kernel_and_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("VLLM_W8A8_KERNEL", raising=False)
    assert select_experts(Facts((9, 0), has_triton=True, has_cutlass=True)).kernel == "triton"
    assert select_experts(Facts((9, 0), has_triton=True, has_cutlass=True), forced="cutlass").kernel == "triton"
    assert select_experts(Facts((9, 0), has_triton=True), forced="torch").kernel == "torch"
    for facts, reason in (
        (Facts((7, 5), has_triton=True), "8.0, this GPU has 7.5"),
        (Facts((8, 0), has_cutlass=True), "triton is not installed"),
        (Facts(None, has_onednn=True), "need a GPU"),
    ):
        choice = select_experts(facts)
        assert choice.kernel == "torch"
        assert reason in choice.reason
    monkeypatch.setenv("VLLM_W8A8_KERNEL", "onednn")
    with pytest.raises(ValueError, match=r"VLLM_W8A8_KERNEL=onednn cannot run mixture.*on torch, on GPUs on triton\. Unset"):
        select_experts(Facts(None, has_onednn=True))


@pytest.mark.parametrize("capability", CAPABILITIES, ids=str)
def test_rule_stays_within_shared_memory(capability: tuple[int, int]) -> None:
    shapes = [(128, 8, 2048, 768), (128, 8, 2048, 96), (8, 2, 4096, 14336), (256, 8, 7168, 2048), (512, 10, 2048, 512)]
    for experts, top_k, hidden, intermediate in [*shapes, (4, 2, 33, 17), (64, 6, 2048, 1408), (16, 1, 5120, 8192)]:
        for T in [1 << i for i in range(17)]:
            plan = experts_plan(
                T,
                top_k,
                experts=experts,
                num_global_experts=experts,
                hidden=hidden,
                intermediate=intermediate,
                capability=capability,
                num_sms=132,
            )
            for tile, K in ((plan.gate_up, hidden), (plan.down, intermediate)):
                assert tile.stage_bytes <= max_shared_bytes(capability), (T, tile)
                assert tile.block_m == plan.block_m, (T, tile)
                assert not (tile.prefetch or tile.tma) or capability >= (9, 0)
                assert K % 16 == 0 or tile.block_n == 32


def test_rule_by_tokens() -> None:
    plan = functools.partial(
        experts_plan,
        top_k=8,
        experts=128,
        num_global_experts=128,
        hidden=2048,
        intermediate=768,
        capability=(9, 0),
        num_sms=132,
    )
    assert [plan(T).direct for T in (1, 8, 9, 128)] == [True, True, False, False]
    assert [plan(T).block_m for T in (9, 128, 256, 512, 1024, 8192)] == [16, 32, 32, 64, 64, 128]
    assert plan(9) == plan(16), "only the power of two counts"
    # A rank of 8 that share the experts has as many pairs per expert as one that holds them all.
    assert plan(8, experts=16).direct


@pytest.mark.gpu
@pytest.mark.parametrize("hadamard", [0, 64], ids=["", "hadamard"])
@pytest.mark.parametrize("T", [1, 2, 8, 9, 32, 128, 1024])
def test_layer_on_gpu(T: int, hadamard: int, device: torch.device) -> None:
    """Qwen3-30B-A3B through the op: near the reference, the same bits twice, and as direct and sorted pairs."""
    from w8a8_kernels.grouped_mm.experts import int8_experts_grouped
    from w8a8_kernels.ops import plan_experts, row_options

    args = layer(T, torch.bfloat16, device, **QWEN)
    options = {"hadamard13": hadamard, "hadamard2": hadamard}
    got = w8a8_kernels.int8_experts(**args, **options)
    assert same_bits(got, w8a8_kernels.int8_experts(**args, **options)), "two runs differ"
    assert relative_error(got, int8_experts_reference(**args, **options)) <= 5e-3
    plan = plan_experts(device, T, QWEN["top_k"], args["w13"], args["w2"], None)
    other = plan_experts(device, 1 if not plan.direct else 64, QWEN["top_k"], args["w13"], args["w2"], None)
    assert other.direct != plan.direct
    for rows in (other, replace(other, direct=plan.direct)):
        again = int8_experts_grouped(**args, **options, plan=rows, **row_options(device))
        assert same_bits(got, again), "direct and sorted differ"


@pytest.mark.gpu
@pytest.mark.parametrize("T", [1, 8, 9, 128, 512, 1024, 8192])
def test_every_tile_on_gpu(T: int, device: torch.device) -> None:
    """Products with the tiles of the rule for T tokens, bit for bit, with experts that have many blocks."""
    from w8a8_kernels.grouped_mm.product import grouped_mm
    from w8a8_kernels.grouped_mm.sort import sort_pairs
    from w8a8_kernels.ops import plan_experts

    args = layer(min(T, 512), torch.bfloat16, device, **QWEN)
    plan = plan_experts(device, T, QWEN["top_k"], args["w13"], args["w2"], None)
    ids = args["topk_ids"]
    ids[: ids.shape[0] // 2] = torch.arange(QWEN["top_k"], dtype=torch.int32, device=device)
    blocks = None if plan.direct else sort_pairs(ids, None, 128, plan.block_m)
    for weight, scale, tile, rows in (
        (args["w13"], args["w13_scale"], plan.gate_up, ids.shape[0]),
        (args["w2"], args["w2_scale"], plan.down, ids.numel()),
    ):
        x, x_scale = quantize_reference(activations(rows, weight.shape[2], torch.float32, device))
        got = grouped_mm(x, x_scale, weight, scale, None, ids, None, blocks, torch.bfloat16, tile=tile)
        expected = grouped_mm_reference(x, x_scale, weight, scale, None, ids.view(-1).long(), torch.bfloat16)
        assert same_bits(got, expected)


@pytest.mark.gpu
@pytest.mark.parametrize("T", [3, 200])
def test_cuda_graph_replays_on_changed_ids(T: int, device: torch.device) -> None:
    args = layer(T, torch.bfloat16, device, **QWEN)
    expert_map = rank_map(128, 2, 1).to(device)
    half = {k: v[:64] if k.startswith("w") else v for k, v in args.items()}
    for _ in range(2):
        w8a8_kernels.int8_experts(**half, expert_map=expert_map)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        # Twice: the second call starts while the first still runs.
        first = w8a8_kernels.int8_experts(**half, expert_map=expert_map)
        out = w8a8_kernels.int8_experts(**(half | {"x": first}), expert_map=expert_map)
    for seed in range(5):
        weights, ids = routing(T, QWEN["top_k"], 128, device, seed)
        if seed == 3:
            ids.fill_(0)  # this rank has no part in it
        if seed == 4:
            ids.fill_(100)  # all pairs in one expert
        args["topk_ids"].copy_(ids)
        args["topk_weights"].copy_(weights)
        args["x"].copy_(torch.randn(T, 2048, generator=torch.Generator().manual_seed(seed)))
        graph.replay()
        expected = w8a8_kernels.int8_experts(**half, expert_map=expert_map)
        assert same_bits(first, expected)
        assert same_bits(out, w8a8_kernels.int8_experts(**(half | {"x": expected}), expert_map=expert_map))


@pytest.mark.gpu
def test_offsets_beyond_int32(device: torch.device) -> None:
    """Weights and results of more than 2^31 elements."""
    E, N, K, T, top_k = 70, 8192, 4096, 33000, 8
    weight = torch.zeros((E, N, K), dtype=torch.int8, device=device)
    weight[-1] = codes(N, K, device)
    scale = torch.ones((E, N, 1), device=device) / 1e4
    x = codes(T, K, device)
    ids = torch.zeros((T, top_k), dtype=torch.int32, device=device)
    ids[-1, -1] = E - 1
    got, _ = grouped((x, torch.ones((T, 1), device=device), weight, scale, None), ids, torch.bfloat16, "wide")
    one = torch.ones((1, 1), device=device)
    assert same_bits(got[-1:], scaled_mm_reference(x[-1:], one, weight[-1], scale[-1], None, torch.bfloat16))
    assert bool((got[-2] == 0).all())
