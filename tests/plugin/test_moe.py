"""Which method the experts of a layer get, and what refuses them."""

import pytest
from layers import experts
from vllm.model_executor.layers.fused_moe import RoutedExperts, UnquantizedFusedMoEMethod

from vllm_w8a8_plugin import compat
from vllm_w8a8_plugin.config import W8A8Config
from vllm_w8a8_plugin.moe import W8A8MoEMethod, W8A8OnlineMoEMethod

PREFIX = "model.layers.3.mlp.experts"


def method(config: W8A8Config, layer: RoutedExperts, monkeypatch: pytest.MonkeyPatch) -> type:
    monkeypatch.setattr(UnquantizedFusedMoEMethod, "__init__", lambda self, moe: None)
    return type(config.get_quant_method(layer, PREFIX))


@pytest.mark.parametrize(
    ("online", "skip", "expected"),
    [
        (True, [], W8A8OnlineMoEMethod),
        (False, [], W8A8MoEMethod),
        (True, ["experts"], UnquantizedFusedMoEMethod),
        (False, [f"{PREFIX}.{i}.{part}_proj" for i in range(4) for part in ("gate", "up", "down")], UnquantizedFusedMoEMethod),
        (False, ["model.layers.2"], W8A8MoEMethod),
        (True, ["re:.*layers[.]3[.].*"], UnquantizedFusedMoEMethod),
    ],
)
def test_method(online: bool, skip: list[str], expected: type, monkeypatch: pytest.MonkeyPatch) -> None:
    assert method(W8A8Config(online=online, skip=skip), experts(), monkeypatch) is expected


def test_refuses_some_of_the_experts(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(
        ValueError, match=r"4 of the 12 projections of model.layers.3.mlp.experts, such as .*0.down_proj, would"
    ):
        method(W8A8Config(skip=["down_proj"]), experts(), monkeypatch)


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        ({"activation": "gelu"}, "activation is gelu"),
        ({"swiglu_limit": 7.0}, "activation is silu with a limit"),
        ({"has_bias": True}, "they have biases"),
        ({"all2all": True}, "an all-to-all backend"),
    ],
)
def test_experts_that_int8_has_no_form_for(given: dict, reason: str, monkeypatch: pytest.MonkeyPatch, caplog) -> None:
    with pytest.raises(ValueError, match=f"{reason}.*Convert again with --skip experts"):
        method(W8A8Config(online=False), experts(**given), monkeypatch)
    assert method(W8A8Config(online=True), experts(**given), monkeypatch) is UnquantizedFusedMoEMethod


@pytest.mark.parametrize("online", [True, False])
def test_kernel_that_has_no_experts(online: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Refused when the model is built, not when its weights are there; linear layers run on it."""
    message = "VLLM_W8A8_KERNEL=onednn cannot run mixture-of-experts layers: on CPUs they run on torch, on GPUs on triton"
    with monkeypatch.context() as patch:
        compat.load_vllm_ops()
        patch.setenv("VLLM_W8A8_KERNEL", "onednn")
        config = W8A8Config(online=online)
        with pytest.raises(ValueError, match=message):
            method(config, experts(), patch)
    monkeypatch.setenv("VLLM_W8A8_KERNEL", "torch")
    assert method(config, experts(), monkeypatch) in (W8A8MoEMethod, W8A8OnlineMoEMethod)


def test_refuses_experts_of_different_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    for blocks in ({f"{PREFIX}.3.down_proj": 16}, {f"{PREFIX}.0.gate_proj": 32}):
        config = W8A8Config(online=False, hadamard=64, hadamard_blocks=blocks)
        with pytest.raises(ValueError, match=r"of its experts have other Hadamard blocks.*convert the model again"):
            method(config, experts(), monkeypatch)
    config = W8A8Config(online=False, hadamard=64, hadamard_blocks={"down_proj": 16})
    assert config.get_quant_method(experts(), PREFIX)._hadamard == (64, 16)


def test_blocks_are_those_of_whole_layers() -> None:
    layer = experts(ranks=2)
    made = W8A8MoEMethod(layer.moe_config, "auto", "auto")
    made._choose_blocks(layer, hidden=128, part=256)
    assert layer.w8a8_hadamard == (64, 64)
    made._choose_blocks(layer, hidden=96, part=96)
    assert layer.w8a8_hadamard == (32, 32)
    with pytest.raises(ValueError, match=r"2 tensor-parallel ranks would cut .* 64 of the experts' 64 inter.* fit: 1\. Or"):
        W8A8MoEMethod(layer.moe_config, 0, 64)._choose_blocks(layer, hidden=96, part=32)
