"""What is warmed up while a model loads. That nothing compiles later is seen in `tests/kernels`, and in engines on a GPU."""

from collections.abc import Iterator
from dataclasses import dataclass

import pytest
import torch

pytest.importorskip("vllm", reason="vLLM is not installed: `make test` installs it")
from checkpoints import NATIVE
from layers import experts, finish, free_port, load, tensor_parallel
from vllm.config import CompilationMode, VllmConfig, get_current_vllm_config, set_current_vllm_config
from vllm.model_executor.layers.linear import ReplicatedLinear

from vllm_w8a8_plugin import linear, log, moe, warmup
from vllm_w8a8_plugin.config import W8A8Config

N, K = 48, 64
compiles_on = warmup.compiles_on


@dataclass
class Run:
    """One call of `warm_up_linear`."""

    weight: torch.Tensor
    weight_scale: torch.Tensor
    bias: torch.Tensor | None
    most: int
    dtype: torch.dtype
    fused: bool
    hadamard: int
    shared_amax: bool

    def summary(self) -> tuple:
        return (*self.weight.shape, self.bias is not None, self.most, self.dtype, self.fused)


@pytest.fixture(scope="module", autouse=True)
def vllm_model() -> Iterator[None]:
    """vLLM's layers can be built."""
    with tensor_parallel(0, 1, free_port()):
        yield


@pytest.fixture
def vllm_config(monkeypatch: pytest.MonkeyPatch) -> VllmConfig:
    """Config of a served model; 1500 tokens at a time at most."""
    config = get_current_vllm_config()
    monkeypatch.setattr(config.scheduler_config, "max_num_batched_tokens", 1500)
    monkeypatch.setattr(config.compilation_config, "mode", CompilationMode.VLLM_COMPILE)
    monkeypatch.setattr(config.compilation_config, "inductor_compile_config", {})
    return config


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> list[Run]:
    """What a fresh process's warm-up runs; the CPU stands for a GPU on which each run compiles three variants."""
    made: list[Run] = []
    monkeypatch.setattr(warmup, "warm_up_linear", lambda *args, **kwargs: made.append(Run(*args, **kwargs)))
    monkeypatch.setattr(warmup, "compilations", lambda: 3 * len(made))
    monkeypatch.setattr(warmup, "compiles_on", lambda device: True)
    monkeypatch.setattr(linear, "WARMUP", warmup.Warmup())
    monkeypatch.setenv("VLLM_W8A8_KERNEL", "torch")  # which keeps the weight as it is, as GPU kernels do
    return made


def build(config: W8A8Config, n: int = N, k: int = K, bias: bool = False) -> torch.nn.Module:
    return ReplicatedLinear(k, n, bias=bias, params_dtype=torch.bfloat16, quant_config=config, prefix="model.layers.0.o_proj")


def load_and_finish(layer: torch.nn.Module, online: bool = False) -> None:
    n, k = layer.output_size, layer.input_size
    if online:
        tensors = {"weight": torch.ones(n, k, dtype=torch.bfloat16)}
    else:
        tensors = {"weight": torch.ones(n, k, dtype=torch.int8), "weight_scale": torch.ones(n, 1)}
    if layer.bias is not None:
        tensors["bias"] = torch.ones(n, dtype=torch.bfloat16)
    load(layer, tensors)
    finish(layer)


@pytest.mark.parametrize("online", [False, True])
def test_runs_on_the_layers_own_weight(vllm_config: VllmConfig, runs: list[Run], online: bool) -> None:
    layer = build(W8A8Config(hadamard=0) if online else W8A8Config.from_config(NATIVE), bias=True)
    load_and_finish(layer, online)
    # To the end of the bucket of 1500 rows, without the bias and with it.
    assert [run.summary() for run in runs] == [(N, K, bias, 2048, torch.bfloat16, True) for bias in (False, True)]
    assert all(run.weight.data_ptr() == layer.weight.data_ptr() for run in runs)
    assert all(run.weight_scale.data_ptr() == layer.weight_scale.data_ptr() for run in runs)
    assert runs[1].bias.data_ptr() == layer.bias.data_ptr()


def test_fused_ops_only_where_graphs_are_fused(
    vllm_config: VllmConfig, runs: list[Run], monkeypatch: pytest.MonkeyPatch
) -> None:
    config = W8A8Config.from_config(NATIVE)
    load_and_finish(build(config))
    vllm_config.compilation_config.mode = CompilationMode.NONE  # eager mode; the pass is installed all the same
    load_and_finish(build(config))
    vllm_config.compilation_config.mode = CompilationMode.VLLM_COMPILE
    vllm_config.compilation_config.inductor_compile_config = {}
    monkeypatch.setenv("VLLM_W8A8_FUSION", "0")
    load_and_finish(build(config, n=2 * N))
    assert [run.fused for run in runs] == [True, False, False]


def test_each_shape_once_and_one_line(vllm_config: VllmConfig, runs: list[Run], said: list[str]) -> None:
    config = W8A8Config.from_config(NATIVE)
    layers = [build(config), build(config), build(config, n=2 * N), build(config, k=2 * K)]
    for layer in layers[:3]:
        load_and_finish(layer)
    assert not any("variants" in line for line in said), "before the last layer"
    load_and_finish(layers[3])
    assert [run.weight.shape for run in runs] == [(N, K), (2 * N, K), (N, 2 * K)]
    # Weights are loaded again, and a draft model has layers of the same shapes.
    finish(layers[0])
    load_and_finish(build(config))
    assert len(runs) == 3
    (line,) = (line for line in said if "variants" in line)
    assert line.startswith("INFO Compiled 9 kernel variants, or loaded them from Triton's cache, in ")


def test_each_hadamard_block_runs(vllm_config: VllmConfig, runs: list[Run]) -> None:
    for hadamard in (0, 64, 16, 64):
        load_and_finish(build(W8A8Config.from_config(NATIVE | {"hadamard": hadamard})))
    load_and_finish(build(W8A8Config(hadamard="auto")), online=True)
    assert [run.hadamard for run in runs] == [0, 64, 16]


def test_a_layer_that_shares_its_maximum_runs_otherwise(vllm_config: VllmConfig, runs: list[Run]) -> None:
    for shares in (False, True, True):
        layer = build(W8A8Config.from_config(NATIVE))
        assert layer.w8a8_shares_amax is False, "it is not row-parallel"
        layer.w8a8_shares_amax = shares
        load_and_finish(layer)
    assert [run.shared_amax for run in runs] == [False, True]


def test_experts_run_once_for_each_shape(vllm_config: VllmConfig, runs: list[Run], monkeypatch: pytest.MonkeyPatch) -> None:
    made = []
    monkeypatch.setattr(warmup, "warm_up_experts", lambda *args, **kwargs: made.append((args, kwargs)))
    monkeypatch.setattr(moe, "WARMUP", linear.WARMUP)
    for hidden in (128, 128, 192):
        layer = experts()
        method = moe.W8A8MoEMethod(layer.moe_config, "auto", "auto")
        method.create_weights(layer, 4, hidden, 256, torch.bfloat16, weight_loader=print)
        method.process_weights_after_loading(layer)
    shapes = [[tuple(tensor.shape) for tensor in args[:4]] for args, _ in made]
    assert shapes == [[(4, 512, hidden), (4, 512, 1), (4, hidden, 256), (4, hidden, 1)] for hidden in (128, 192)]
    assert [args[4:] for args, _ in made] == [(None, 2, 2048, torch.bfloat16)] * 2
    assert made[0][1] == {"hadamard13": 64, "hadamard2": 32, "apply_weight_on_input": False}


def test_other_limits_run_again(vllm_config: VllmConfig, runs: list[Run]) -> None:
    config = W8A8Config.from_config(NATIVE)
    for tokens in (1500, 2048, 8192):
        vllm_config.scheduler_config.max_num_batched_tokens = tokens
        load_and_finish(build(config))
    assert [run.most for run in runs] == [2048, 8192]


def test_nothing_runs_on_a_cpu(
    vllm_config: VllmConfig, runs: list[Run], said: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(warmup, "compiles_on", compiles_on)
    layer = build(W8A8Config.from_config(NATIVE))
    load_and_finish(layer)
    assert runs == []
    assert not any("variants" in line for line in said)


def test_a_layer_outside_of_a_model_is_left_alone(runs: list[Run]) -> None:
    with set_current_vllm_config(None):
        layer = build(W8A8Config.from_config(NATIVE))
    load_and_finish(layer)
    assert runs == []


def test_serves_though_triton_tells_nothing(
    vllm_config: VllmConfig, runs: list[Run], said: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_hook() -> int:
        raise RuntimeError("compilations cannot be counted")

    monkeypatch.setattr(warmup, "compilations", no_hook)
    monkeypatch.setattr(log, "_said", set())
    load_and_finish(build(W8A8Config.from_config(NATIVE)))
    assert len(runs) == 1
    assert "WARNING compilations cannot be counted" in said
