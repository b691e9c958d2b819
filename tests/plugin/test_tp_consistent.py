"""The option `tp_consistent_activations`: where it is set, and that ranks then quantize as one rank does."""

import functools
import logging
import pickle
from pathlib import Path

import pytest
import torch
from checkpoints import COMPRESSED_TENSORS, NATIVE, model_folder
from layers import finish, load, run_ranks
from torch import library
from torch.utils._python_dispatch import TorchDispatchMode

pytest.importorskip("vllm", reason="vLLM is not installed: `make test` installs it")
from vllm_w8a8_plugin import doctor, envs, log
from vllm_w8a8_plugin.config import W8A8Config, checkpoint_refusal

VARIABLE = "VLLM_W8A8_TP_CONSISTENT_ACTIVATIONS"
OPTION = "tp_consistent_activations"
ROWS, K, N = 9, 256, 32
# Rows of `inputs` in which only the last rank's part is not ordinary.
OUTLIER, NAN, INF, ZERO = 2, 3, 4, 5


@pytest.fixture(autouse=True)
def no_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in envs.VARIABLES:
        monkeypatch.delenv(variable.name, raising=False)


@pytest.mark.parametrize("checkpoint", [NATIVE, COMPRESSED_TENSORS], ids=["native", "compressed-tensors"])
@pytest.mark.parametrize(
    ("entry", "value", "on"),
    [
        (None, None, False),
        (False, None, False),
        (True, None, True),
        (None, "1", True),
        (False, "true", True),
        (True, "0", False),
        (True, "", True),
        (True, "1", True),
    ],
)
def test_checkpoint_and_variable(
    checkpoint: dict, entry: bool | None, value: str | None, on: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The variable wins where it is set: the option is about serving, not about the weights."""
    if value is not None:
        monkeypatch.setenv(VARIABLE, value)
    config = W8A8Config.from_config(checkpoint if entry is None else checkpoint | {OPTION: entry})
    for read in (config, pickle.loads(pickle.dumps(config))):
        assert read.tp_consistent_activations is on
        assert (f"{OPTION}=True" in repr(read)) is on


@pytest.mark.parametrize(("value", "on"), [(None, False), ("0", False), ("1", True), ("off", False), ("Yes", True)])
def test_variable_decides_online(value: str | None, on: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if value is not None:
        monkeypatch.setenv(VARIABLE, value)
    assert W8A8Config().tp_consistent_activations is on
    assert W8A8Config(tp_consistent_activations=not on).tp_consistent_activations is not on


@pytest.mark.parametrize("value", ["2", "maybe", "-1"])
def test_bad_variable_is_refused(value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, value)
    message = f"^{VARIABLE}='{value}': expected 1 or 0$"
    for build in (W8A8Config, lambda: W8A8Config.from_config(NATIVE)):
        with pytest.raises(ValueError, match=message):
            build()
    assert f"{VARIABLE}='{value}': expected 1 or 0" in doctor.diagnose().problems


@pytest.mark.parametrize("value", ["true", 1, 0, None, [True]])
@pytest.mark.parametrize("checkpoint", [NATIVE, COMPRESSED_TENSORS], ids=["native", "compressed-tensors"])
def test_bad_entry_is_refused(checkpoint: dict, value: object) -> None:
    config = checkpoint | {OPTION: value}
    assert checkpoint_refusal(config) == (
        f"quantization_config has {OPTION} = {value!r}, expected true or false. Correct config.json or hf_overrides"
    )
    with pytest.raises(ValueError, match=rf"cannot be served .*{OPTION}"):
        W8A8Config.from_config(config)


def test_misspelt_entry_is_refused() -> None:
    with pytest.raises(ValueError, match="tp_consistent_activation"):
        W8A8Config.from_config(NATIVE | {"tp_consistent_activation": True})


def test_in_hf_overrides_and_in_the_cache_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It changes the traced graph: a compiled one must not be taken for the other."""
    import vllm.envs
    from vllm.config import ModelConfig

    from vllm_w8a8_plugin import register

    register()
    folder = model_folder(tmp_path / "model", NATIVE)
    hashes = set()
    for on in (False, True):
        overrides = {"quantization_config": NATIVE | {OPTION: on}}
        model_config = ModelConfig(str(folder), skip_tokenizer_init=True, hf_overrides=overrides)
        assert model_config.quantization == "w8a8"
        read = W8A8Config.from_config(model_config.hf_config.quantization_config)
        assert read.tp_consistent_activations is on
        hashes.add(model_config.compute_hash())
    assert len(hashes) == 2
    factors = set()
    for value in ("0", "1"):
        monkeypatch.setenv(VARIABLE, value)
        factors.add(vllm.envs.compile_factors()[VARIABLE])
    assert len(factors) == 2


class Quantizers(TorchDispatchMode):
    """Notes which quantizers run, and the last one's codes and scale."""

    OPS = (torch.ops.w8a8.quantize.default, torch.ops.w8a8.quantize_with_amax.default)

    def __enter__(self) -> "Quantizers":
        self.ran: list[torch._ops.OpOverload] = []
        return super().__enter__()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if func in self.OPS:
            self.ran.append(func)
            self.codes, self.scale = result
        return result


def inputs(dtype: torch.dtype) -> torch.Tensor:
    x = torch.randn(ROWS, K, generator=torch.Generator().manual_seed(0))
    x[OUTLIER, K - 3] = 500.0
    x[NAN, K - 1] = float("nan")
    x[INF, K - 2] = -float("inf")
    x[ZERO] = 0
    return x.to(dtype)


def build(dtype: torch.dtype, hadamard: int, on: bool, online: bool = True, **kwargs) -> torch.nn.Module:
    """A row-parallel layer with its weight, the same whole matrix at every degree."""
    from vllm.model_executor.layers.linear import RowParallelLinear

    from w8a8_kernels.quantize.weight import quantize_weight

    config = W8A8Config(hadamard=hadamard, tp_consistent_activations=on)
    if not online:
        config = W8A8Config.from_config(NATIVE | {"hadamard": hadamard, OPTION: on})
        config.check_blocks = lambda: None  # it looks at all layers of a model
    layer = RowParallelLinear(
        K, N, bias=False, params_dtype=dtype, quant_config=config, prefix="model.layers.0.mlp.down_proj", **kwargs
    )
    assert layer.w8a8_hadamard == hadamard
    weight = torch.randn(N, K, generator=torch.Generator().manual_seed(1)).to(dtype)
    codes, scale = quantize_weight(weight, hadamard=hadamard)
    load(layer, {"weight": weight} if online else {"weight": codes, "weight_scale": scale})
    finish(layer)
    return layer


def check_codes(rank: int, world: int) -> None:
    """Codes and scales of a rank are its columns of what the whole input gives, which is what one rank computes."""
    from w8a8_kernels import quantize

    part = slice(K // world * rank, K // world * (rank + 1))
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        for hadamard in (0, 64):
            x = inputs(dtype)
            codes, scale = quantize(x, hadamard)
            for online in (True, False):
                layer = build(dtype, hadamard, on=True, online=online)
                apply = functools.partial(layer.quant_method.apply, layer)
                with torch.no_grad(), Quantizers() as seen:
                    eager = apply(x[:, part])
                case = f"{dtype}, Hadamard {hadamard}, rank {rank} of {world}"
                assert seen.ran == [Quantizers.OPS[world > 1]], case
                assert torch.equal(seen.codes, codes[:, part]), f"{case}: other codes"
                assert torch.equal(seen.scale.nan_to_num(-1), scale.nan_to_num(-1)), f"{case}: other scales"
                assert eager[[NAN, INF]].isnan().all(), f"{case}: a bad row is finite on this rank"
                assert not eager[ZERO].any()
                assert eager[[0, 1, OUTLIER, 6, 7, 8]].isfinite().all()
                torch._dynamo.reset()
                traced = torch.compile(apply, fullgraph=True, backend="aot_eager")
                with torch.no_grad():
                    assert torch.equal(traced(x[:, part]).nan_to_num(-1), eager.nan_to_num(-1)), case
            if world > 1:
                check_without(rank, x, codes, scale, part, hadamard)


def check_without(rank: int, x: torch.Tensor, codes: torch.Tensor, scale: torch.Tensor, part: slice, hadamard: int) -> None:
    """Each rank's own maximum: the first one does not see the second's outlier and bad values."""
    layer = build(x.dtype, hadamard, on=False)
    with torch.no_grad(), Quantizers() as seen:
        out = layer.quant_method.apply(layer, x[:, part])
    assert seen.ran == [Quantizers.OPS[0]]
    if rank == 0:
        assert not torch.equal(seen.codes[OUTLIER], codes[OUTLIER, part]), "the input does not tell the two ways apart"
        assert seen.scale[OUTLIER] < scale[OUTLIER] / 2
        assert out.isfinite().all()


def check_layers_alone(rank: int, world: int) -> None:
    """No collective where nothing is cut: a rank that waits for one here would wait for ever."""
    from vllm.model_executor.layers.linear import ReplicatedLinear

    if rank == 0:
        whole = build(torch.bfloat16, 0, on=True, disable_tp=True)
        assert whole.quant_method.apply(whole, inputs(torch.bfloat16)).shape == (ROWS, N)
        config = W8A8Config(tp_consistent_activations=True)
        assert not ReplicatedLinear(K, N, quant_config=config, prefix="model.layers.0.mlp.x").w8a8_shares_amax
    cut = build(torch.bfloat16, 0, on=True)
    assert cut.quant_method.apply(cut, torch.zeros(0, K // world, dtype=torch.bfloat16)).shape == (0, N)


def check_output(rank: int, world: int) -> None:
    """The whole layer, its sum over ranks included, is as near to one rank's as bf16 sums are."""
    from w8a8_kernels import int8_linear
    from w8a8_kernels.quantize.weight import quantize_weight

    x = inputs(torch.bfloat16)[[0, 1, OUTLIER, ZERO, 6]]
    codes, scale = quantize_weight(torch.randn(N, K, generator=torch.Generator().manual_seed(1)).bfloat16())
    one = int8_linear(x, codes, scale).float()
    layer = build(torch.bfloat16, 0, on=True)
    got = layer(x[:, K // world * rank : K // world * (rank + 1)])[0].float()
    assert (got - one).norm() <= 5e-3 * one.norm()


def check_log(rank: int, world: int) -> None:
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())
    log.logger = logging.Logger("w8a8", logging.INFO)
    log.logger.addHandler(handler)
    for _ in range(2):
        build(torch.bfloat16, 0, on=True)
        assert sum("quantized by the maximum over 2 ranks (tp_consistent_activations)" in line for line in said) == (world > 1)
        assert not any("own part" in line for line in said)
    build(torch.bfloat16, 0, on=False)
    assert sum("by each rank's own part of a row" in line for line in said) == (world > 1)


def check_collective(rank: int, world: int) -> None:
    import vllm_w8a8_plugin.collective  # noqa: F401  registers the op

    inf, nan = float("inf"), float("nan")
    amax = torch.tensor([[1.0 + rank], [0.0], [inf if rank else nan], [nan if rank else inf], [inf if rank else 2.0]])
    got = torch.ops.w8a8.max_over_ranks(amax)
    assert got.nan_to_num(-1, posinf=-2).flatten().tolist() == [world, 0, -1, -1 if world > 1 else -2, -2 if world > 1 else 2]
    if world == 1:
        library.opcheck(torch.ops.w8a8.max_over_ranks.default, (amax[:2],))


def check_the_rest(rank: int, world: int) -> None:
    check_log(rank, world)
    check_collective(rank, world)
    check_output(rank, world)
    check_layers_alone(rank, world)


@pytest.mark.parametrize("world", [1, 2])
def test_codes_equal_those_of_one_rank(world: int) -> None:
    run_ranks(world, check_codes)


@pytest.mark.parametrize("world", [1, 2])
def test_log_collective_output_and_layers_that_are_not_cut(world: int) -> None:
    """In one start of the ranks, which takes longer than what they check."""
    run_ranks(world, check_the_rest)
