"""What vLLM does with a layer beside running it: loads other weights, looks at them, moves, saves and dequantizes them."""

import functools
import json
import os
import traceback

import pytest
import torch
from checkpoints import NATIVE
from layers import experts, finish, load, run_ranks

from vllm_w8a8_plugin import compat
from w8a8_kernels import int8_linear, ops, pack_weight, release_packed_weight
from w8a8_kernels.scaled_mm.onednn import has_onednn, scaled_mm_onednn

pytest.importorskip("vllm", reason="vLLM is not installed: `make test` installs it")

HIDDEN, INTERMEDIATE = 128, 192
PREFIX = "model.layers.0.mlp.down_proj"


def config(kind: str, hadamard: int = 64):
    from vllm_w8a8_plugin.config import W8A8Config

    return W8A8Config(hadamard=hadamard) if kind == "online" else W8A8Config.from_config(NATIVE | {"hadamard": hadamard})


def build(quant_config, prefix: str = PREFIX) -> torch.nn.Module:
    from vllm.model_executor.layers.linear import RowParallelLinear

    return RowParallelLinear(
        INTERMEDIATE, HIDDEN, bias=False, params_dtype=torch.bfloat16, quant_config=quant_config, prefix=prefix
    )


def tensors(kind: str, seed: int = 0, hadamard: int = 64) -> dict[str, torch.Tensor]:
    """What a checkpoint holds of the layer."""
    from w8a8_kernels.quantize.weight import quantize_weight

    weight = torch.randn(HIDDEN, INTERMEDIATE, generator=torch.Generator().manual_seed(seed)).to(torch.bfloat16)
    if kind == "online":
        return {"weight": weight}
    codes, scale = quantize_weight(weight, None, hadamard)
    return {"weight": codes, "weight_scale": scale}


def loaded(kind: str, seed: int = 0) -> torch.nn.Module:
    layer = build(config(kind))
    load(layer, tensors(kind, seed))
    finish(layer)
    return layer


def inputs(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, INTERMEDIATE, generator=torch.Generator().manual_seed(9)).to(torch.bfloat16)


def output(layer: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
    return layer.quant_method.apply(layer, x)


def state(layer: torch.nn.Module) -> dict[str, tuple[int, torch.Tensor]]:
    return {name: (p.data_ptr(), p.data.clone()) for name, p in layer.named_parameters()}


def check_finished_twice(rank: int, world: int) -> None:
    for kind in ("checkpoint", "online"):
        layer = loaded(kind)
        before, y = state(layer), output(layer, inputs(3))
        finish(layer)
        after = state(layer)
        assert before.keys() == after.keys() == {"weight", "weight_scale"}, kind
        for name, (address, value) in before.items():
            assert address == after[name][0], f"{kind}: {name} moved"
            assert torch.equal(value, after[name][1]), f"{kind}: {name} changed"
        assert torch.equal(y, output(layer, inputs(3))), kind


def check_reload(rank: int, world: int) -> None:
    """The steps of vLLM's `reload_weights`, twice: the layer is that of the other weights, at the addresses of before."""
    from vllm.model_executor.model_loader.reload import (
        finalize_layerwise_reload,
        initialize_layerwise_reload,
        record_metadata_for_reloading,
    )

    for kind in ("checkpoint", "online"):
        layer = build(config(kind))
        record_metadata_for_reloading(layer)
        load(layer, tensors(kind))
        finish(layer)
        packed = layer.packed_weight
        addresses = {name: address for name, (address, _) in state(layer).items()}
        for seed in (1, 2):
            initialize_layerwise_reload(layer)
            load(layer, tensors(kind, seed))
            finalize_layerwise_reload(layer, None)
            assert {name: address for name, (address, _) in state(layer).items()} == addresses, f"{kind}: weights moved"
            assert layer.packed_weight is packed, f"{kind}: the handle moved"
            fresh = loaded(kind, seed)
            for name, (_, value) in state(fresh).items():
                assert torch.equal(getattr(layer, name).data, value), f"{kind}: {name} is not that of the new weights"
            assert torch.equal(output(layer, inputs(3)), output(fresh, inputs(3))), f"{kind}: the output is stale"


def check_refuses_weights_behind_vllms_back(rank: int, world: int) -> None:
    """`model.load_weights` alone would write bf16 values into int8 codes."""
    layer = loaded("online")
    with pytest.raises(ValueError, match=r"dtype torch.bfloat16 .* that is quantized already.* reload_weights"):
        load(layer, tensors("online", seed=1))


def check_weight_is_there(rank: int, world: int) -> None:
    """LoRA asks for its device, model classes for its dtype and shape, MLA for its values as numbers."""
    from vllm.model_executor.layers.quantization.utils.quant_utils import get_and_maybe_dequant_weights

    for kind in ("checkpoint", "online"):
        layer = loaded(kind)
        assert layer.weight.device == inputs(1).device
        assert layer.weight.dtype == torch.int8
        assert layer.weight.shape == (HIDDEN, INTERMEDIATE)
        original = tensors("online")["weight"].float()
        for dtype in (torch.bfloat16, torch.float32):
            weight = get_and_maybe_dequant_weights(layer, dtype)
            assert weight.dtype == dtype
            difference = (weight.float() - original).norm() / original.norm()
            assert difference <= 1.5e-2, f"{kind}, {dtype}: {difference:.2e}"


def check_ranks_of_inputs(rank: int, world: int) -> None:
    layer = loaded("checkpoint")
    x = inputs(2, 5)
    y = output(layer, x)
    assert y.shape == (2, 5, HIDDEN)
    assert torch.equal(y.view(10, -1), output(layer, x.view(10, -1)))
    assert torch.equal(output(layer, x[0, 0]), output(layer, x[0, :1])[0])
    transposed = x.transpose(0, 1)
    assert torch.equal(output(layer, transposed), output(layer, transposed.contiguous()))
    assert output(layer, x[:0]).shape == (0, 5, HIDDEN)


def check_draft_model(rank: int, world: int) -> None:
    """vLLM puts a name before those of a draft's layers, which its checkpoint does not know."""
    from vllm.model_executor.layers.linear import UnquantizedLinearMethod

    from vllm_w8a8_plugin.config import W8A8Config

    blocks = {"model.layers.0.mlp.down_proj": 32}
    ignore = ["model.layers.1.mlp.down_proj"]
    quant_config = W8A8Config.from_config(NATIVE | {"hadamard": 64, "hadamard_blocks": blocks, "ignore": ignore})
    for prefix in ("", "draft_model."):
        assert build(quant_config, prefix + PREFIX).w8a8_hadamard == 32
        assert isinstance(build(quant_config, prefix + ignore[0]).quant_method, UnquantizedLinearMethod)
        assert build(quant_config, prefix + "model.layers.2.mlp.down_proj").w8a8_hadamard == 64


def vllm_config(**options):
    from vllm.config import DeviceConfig, VllmConfig

    return VllmConfig(device_config=DeviceConfig("cpu"), **options)


def check_offloaded(rank: int, world: int) -> None:
    """vLLM offloads when layers are built, and cannot move what has no data; afterwards all is as without."""
    from vllm.config import OffloadConfig, set_current_vllm_config
    from vllm.model_executor.offloader.uva import UVAOffloader

    for part in ({"uva": {"cpu_offload_gb": 1}}, {"prefetch": {"offload_group_size": 2}}):
        with set_current_vllm_config(vllm_config(offload_config=OffloadConfig(**part))):
            layer = build(config("online"))
        (layer,) = UVAOffloader(1 << 30).wrap_modules(iter([layer]))
        assert not layer.quant_method.uses_meta_device
        load(layer, tensors("online"))
        assert "weight_scale" not in state(layer), "quantized before vLLM has brought the weight to its device"
        finish(layer)
        finish(layer)
        same = loaded("online")
        assert all(torch.equal(value, state(same)[name][1]) for name, (_, value) in state(layer).items())
        assert torch.equal(output(layer, inputs(3)), output(same, inputs(3)))
        # Without unified addressing vLLM runs a layer on copies of all of its state.
        y, _ = torch.func.functional_call(layer, layer.state_dict(), (inputs(3),), tie_weights=False)
        assert torch.equal(y, output(same, inputs(3)))


def check_saved_state(rank: int, world: int) -> None:
    """A saved state is int8 whatever it was made from, and is loaded into layers of the same blocks only."""
    from vllm.config import LoadConfig, set_current_vllm_config

    for kind in ("checkpoint", "online"):
        saved = {name: tensor.clone() for name, tensor in loaded(kind).state_dict().items()}
        assert {name: tensor.dtype for name, tensor in saved.items()} == {
            "weight": torch.int8,
            "weight_scale": torch.float32,
            "w8a8_block": torch.int32,
        }
        with set_current_vllm_config(vllm_config(load_config=LoadConfig(load_format="sharded_state"))):
            layer, other = build(config(kind)), build(config(kind, hadamard=32))
        for target in (layer, other):
            for name, tensor in target.state_dict().items():  # as vLLM's loader does
                tensor.data.copy_(saved[name])
        finish(layer)
        finish(layer)
        assert torch.equal(output(layer, inputs(3)), output(loaded(kind), inputs(3))), kind
        with pytest.raises(ValueError, match=r"down_proj: the saved state has Hadamard blocks \[64\].* built with \[32\]"):
            finish(other)


CHECKS = (
    check_finished_twice,
    check_reload,
    check_refuses_weights_behind_vllms_back,
    check_weight_is_there,
    check_ranks_of_inputs,
    check_draft_model,
    check_offloaded,
    check_saved_state,
)


def check_all(kernel: str, rank: int, world: int) -> None:
    os.environ["VLLM_W8A8_KERNEL"] = kernel
    failures = {}
    for check in CHECKS:
        try:
            check(rank, world)
        except BaseException as error:  # pytest's failures are no Exceptions
            failures[check.__name__] = error
    for error in failures.values():
        traceback.print_exception(error)
    assert not failures, failures


@pytest.mark.parametrize("kernel", ["onednn", "torch"])  # packed, and read as it is, as on a GPU
def test_layer(kernel: str) -> None:
    """All checks in one process: starting it takes ten times as long as they do."""
    if kernel == "onednn" and not torch.cpu._is_vnni_supported():
        pytest.skip("needs VNNI")
    run_ranks(1, functools.partial(check_all, kernel))


@pytest.mark.parametrize("online", [True, False])
def test_lora_leaves_experts_alone(online: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Adapters of experts run in vLLM's own expert kernels only."""
    from types import SimpleNamespace

    from vllm.model_executor.layers.fused_moe import UnquantizedFusedMoEMethod

    from vllm_w8a8_plugin import compat
    from vllm_w8a8_plugin.config import W8A8Config

    monkeypatch.setattr(UnquantizedFusedMoEMethod, "__init__", lambda self, moe: None)
    vllm_config = SimpleNamespace(lora_config=object(), load_config=SimpleNamespace(load_format="auto"))
    monkeypatch.setattr(compat, "current_vllm_config", lambda: vllm_config)
    layer, quant_config = experts(), W8A8Config(online=online)
    if online:
        assert isinstance(quant_config.get_quant_method(layer, layer.layer_name), UnquantizedFusedMoEMethod)
        return
    with pytest.raises(ValueError, match=r"experts cannot run here: LoRA .*Convert again with --skip experts"):
        quant_config.get_quant_method(layer, layer.layer_name)


def test_variables_are_in_the_compile_caches_key(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the variable, a process with another value must not take the graphs that this one compiled."""
    import vllm.envs

    from vllm_w8a8_plugin import envs, register

    register()
    for variable in envs.VARIABLES:
        monkeypatch.delenv(variable.name, raising=False)
    before = json.dumps(vllm.envs.compile_factors(), default=str, sort_keys=True)
    for variable in envs.VARIABLES:
        with monkeypatch.context() as patch:
            patch.setenv(variable.name, "16")
            assert json.dumps(vllm.envs.compile_factors(), default=str, sort_keys=True) != before, variable.name


@pytest.fixture
def onednn(monkeypatch: pytest.MonkeyPatch) -> None:
    """oneDNN's product is taken on any CPU: the sums of these tests are small."""
    if torch.cuda.is_available():
        pytest.skip("vLLM's build for GPUs has no oneDNN")
    compat.load_vllm_ops()
    assert has_onednn()
    monkeypatch.setattr(ops, "onednn_saturates", lambda: False)


@pytest.mark.usefixtures("onednn")
def test_a_packed_weight_of_another_form_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM's op checks nothing: it reads beside the weight, or writes beside the result."""
    monkeypatch.delenv("VLLM_W8A8_KERNEL", raising=False)
    weight, scale, x = torch.ones(16, 64, dtype=torch.int8), torch.ones(16, 1), torch.ones(2, 64)
    packed = pack_weight(weight, scale, torch.float32)
    assert torch.allclose(int8_linear(x, None, scale, packed=packed), torch.full((2, 16), 64.0))
    for bad_x, bad_scale in ((x, scale[:8].contiguous()), (torch.ones(2, 128), scale), (x.bfloat16(), scale)):
        with pytest.raises(ValueError, match=r"got a packed weight \[16, 64\] for torch.float32, expected \["):
            int8_linear(bad_x, None, bad_scale, packed=packed)
    release_packed_weight(packed)
    with pytest.raises(ValueError, match="got a packed weight one that was released"):
        int8_linear(x, None, scale, packed=packed)


@pytest.mark.usefixtures("onednn")
def test_forced_onednn_runs_where_nothing_was_packed(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    monkeypatch.setattr(ops, "scaled_mm_onednn", lambda *args: calls.append(args) or scaled_mm_onednn(*args))
    monkeypatch.setenv("VLLM_W8A8_KERNEL", "onednn")
    out = int8_linear(torch.ones(2, 64), torch.ones(16, 64, dtype=torch.int8), torch.ones(16, 1))
    assert torch.allclose(out, torch.full((2, 16), 64.0))
    assert len(calls) == 1
