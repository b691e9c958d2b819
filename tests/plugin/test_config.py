import copy
import pickle
import re
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from checkpoints import AWQ, COMPRESSED_TENSORS, FP8, GPTQ, NATIVE, changed, model_folder

pytest.importorskip("vllm", reason="vLLM is not installed: `make test` installs it")
from vllm_w8a8_plugin.config import W8A8Config, checkpoint_refusal
from w8a8_converters.formats import FORMATS, quantization_config

GROUP = "config_groups.group_0."


@pytest.fixture(autouse=True)
def no_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("VLLM_W8A8_ENABLE", "VLLM_W8A8_SKIP_MODULES", "VLLM_W8A8_KERNEL", "VLLM_W8A8_HADAMARD"):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize("config", [NATIVE, COMPRESSED_TENSORS], ids=["native", "compressed-tensors"])
def test_reads_checkpoints(config: dict) -> None:
    read = W8A8Config.from_config(config)
    assert not read.online
    assert read.rules.skips("lm_head")
    assert not read.rules.skips("model.layers.0.mlp.down_proj")


@pytest.mark.parametrize(
    ("path", "value", "because"),
    [
        (GROUP + "weights.num_bits", 4, "weights.num_bits is 4"),
        (GROUP + "weights.type", "float", "weights.type is 'float'"),
        (GROUP + "weights.strategy", "tensor", "weights.strategy is 'tensor'"),
        (GROUP + "weights.strategy", "group", "weights.strategy is 'group'"),
        (GROUP + "weights.symmetric", False, "weights.symmetric is False"),
        (GROUP + "input_activations", None, "input_activations.num_bits is None"),
        (GROUP + "input_activations.dynamic", False, "input_activations.dynamic is False"),
        (GROUP + "input_activations.symmetric", False, "input_activations.symmetric is False"),
        (GROUP + "input_activations.strategy", "tensor", "input_activations.strategy is 'tensor'"),
        (GROUP + "output_activations", {"num_bits": 8}, "output_activations"),
        (GROUP + "targets", ["re:.*mlp.*"], "targets"),
        ("config_groups.group_1", {}, "2 quantization groups"),
        ("kv_cache_scheme", {"num_bits": 8}, "kv_cache_scheme"),
        ("transform_config", {"config_groups": {"u": {}}}, "run-time transforms"),
        ("sparsity_config", {"format": "sparse-24-bitmask"}, "sparse"),
    ],
)
def test_declines_what_it_would_compute_wrongly(path: str, value: object, because: str) -> None:
    config = changed(COMPRESSED_TENSORS, path, value)
    assert because in checkpoint_refusal(config)
    assert W8A8Config.override_quantization_method(config, "w8a8") is None
    with pytest.raises(ValueError, match="cannot be served with quantization=w8a8"):
        W8A8Config.from_config(config)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("weight_dtype", "int4"),
        ("scale_dtype", "bf16"),
        ("hadamard", "auto"),  # written by no version: which blocks that means could change
        ("hadamard", 48),
        ("hadamard", 256),
        ("hadamard", False),
        ("hadamard", None),
        ("hadamard_blocks", ["down_proj"]),
        ("hadamard_blocks", {"down_proj": 8}),
        ("hadamard_blocks", {"down_proj": "32"}),
    ],
)
def test_refuses_native_forms_it_does_not_know(key: str, value: object) -> None:
    with pytest.raises(ValueError, match=f"{key} = {re.escape(repr(value))}, expected"):
        W8A8Config.from_config(NATIVE | {key: value})


@pytest.mark.parametrize("changes", [{"hadamard_heads": 64}, {"hadamrad": 64, "hadamard": None}, {"ignored": ["lm_head"]}])
def test_refuses_keys_that_it_does_not_know(changes: dict) -> None:
    """Of newer versions, misspelt, of other tools."""
    config = {key: value for key, value in (NATIVE | changes).items() if value is not None}
    known = "quant_method, weight_dtype, scale_dtype, hadamard, hadamard_blocks, .*ignore"
    with pytest.raises(
        ValueError, match=f"has {next(iter(changes))}, which .* does not know; known are {known}.* config.json"
    ):
        W8A8Config.from_config(config)


def test_knows_what_the_converter_writes_and_what_vllm_adds() -> None:
    written = quantization_config(FORMATS["w8a8"], ["lm_head"], 64, {"down_proj": 32})
    assert W8A8Config.from_config(written).hadamard == 64
    W8A8Config.from_config(COMPRESSED_TENSORS | {"total_num_heads": 9, "total_num_kv_heads": 3})


BLOCKS_OF_LAYERS = {"hadamard": 64, "hadamard_blocks": {"down_proj": 32, "model.layers.1.mlp.down_proj": 16}}


@pytest.mark.parametrize(
    ("prefix", "block"),
    [
        ("model.layers.0.self_attn.qkv_proj", 64),
        ("model.layers.0.mlp.down_proj", 32),
        ("model.layers.1.mlp.down_proj", 16),
        ("model.layers.0.mlp.down_proj.inner", 64),
        ("down_proj", 32),
    ],
)
def test_block_of_a_checkpoints_layer(prefix: str, block: int) -> None:
    config = W8A8Config.from_config(NATIVE | BLOCKS_OF_LAYERS)
    config.packed_modules_mapping = {"qkv_proj": ["q_proj", "k_proj", "v_proj"]}
    for read in (config, pickle.loads(pickle.dumps(config))):
        assert read._hadamard_of(prefix) == block


def test_blocks_follow_the_renaming_of_weights() -> None:
    from vllm.model_executor.models.utils import WeightsMapper

    config = W8A8Config.from_config(NATIVE | BLOCKS_OF_LAYERS)
    config.apply_vllm_mapper(WeightsMapper(orig_to_new_prefix={"model.": "language_model.model."}))
    assert config._hadamard_of("language_model.model.layers.1.mlp.down_proj") == 16
    assert config._hadamard_of("language_model.model.layers.2.mlp.down_proj") == 32


def test_parts_of_a_fused_layer_share_a_block() -> None:
    config = W8A8Config.from_config(NATIVE | {"hadamard": 64, "hadamard_blocks": {"k_proj": 32}})
    config.packed_modules_mapping = {"qkv_proj": ["q_proj", "k_proj", "v_proj"]}
    with pytest.raises(ValueError, match=r"qkv_proj: vLLM fuses layers whose Hadamard blocks differ .* \[32, 64\]"):
        config._hadamard_of("model.layers.0.self_attn.qkv_proj")


@pytest.mark.parametrize(("value", "hadamard"), [(None, "auto"), ("", "auto"), ("Auto", "auto"), ("0", 0), ("128", 128)])
def test_variable_decides_online(value: str | None, hadamard: str | int, monkeypatch: pytest.MonkeyPatch) -> None:
    if value is not None:
        monkeypatch.setenv("VLLM_W8A8_HADAMARD", value)
    assert W8A8Config().hadamard == hadamard


@pytest.mark.parametrize(
    ("checkpoint", "value", "refused"),
    [
        (NATIVE, "0", False),
        (NATIVE, "auto", False),
        (NATIVE, "64", True),
        (NATIVE | {"hadamard": 64}, "auto", False),
        (NATIVE | {"hadamard": 64}, "64", False),
        (NATIVE | {"hadamard": 64}, "0", True),
        (NATIVE | {"hadamard": 64}, "32", True),
        (NATIVE | BLOCKS_OF_LAYERS, "auto", False),
        (NATIVE | BLOCKS_OF_LAYERS, "64", True),
        (COMPRESSED_TENSORS, "auto", False),
        (COMPRESSED_TENSORS, "0", False),
        (COMPRESSED_TENSORS, "16", True),
    ],
)
def test_variable_must_not_contradict_a_checkpoint(
    checkpoint: dict, value: str, refused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_W8A8_HADAMARD", value)
    if refused:
        held = checkpoint.get("hadamard", 0)
        with pytest.raises(ValueError, match=f"VLLM_W8A8_HADAMARD={value}, but .* quantized with hadamard {held}"):
            W8A8Config.from_config(checkpoint)
    else:
        assert W8A8Config.from_config(checkpoint).hadamard == checkpoint.get("hadamard", 0)


def test_graphs_of_other_blocks_have_other_cache_keys(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a checkpoint by its config, online by the variable."""
    import vllm.envs
    from vllm.config import ModelConfig

    from vllm_w8a8_plugin import register

    register()
    folders = {block: model_folder(tmp_path / str(block), NATIVE | {"hadamard": block}) for block in (0, 64)}
    # The folder's name is part of the key, too: it must not be what tells them apart.
    hashes = set()
    for block in (0, 64):
        served = (tmp_path / "served").absolute()
        served.unlink(missing_ok=True)
        served.symlink_to(folders[block])
        hashes.add(ModelConfig(str(served), skip_tokenizer_init=True).compute_hash())
    assert len(hashes) == 2
    factors = []
    for value in ("0", "auto"):
        monkeypatch.setenv("VLLM_W8A8_HADAMARD", value)
        factors.append(vllm.envs.compile_factors()["VLLM_W8A8_HADAMARD"])
    assert factors[0] != factors[1]


@pytest.mark.parametrize(
    ("config", "user_quant", "enable", "taken"),
    [
        (COMPRESSED_TENSORS, None, None, False),
        (COMPRESSED_TENSORS, "w8a8", None, True),
        (COMPRESSED_TENSORS, None, "1", True),
        (COMPRESSED_TENSORS, None, "0", False),
        (COMPRESSED_TENSORS, "compressed-tensors", "1", False),
        (FP8, None, "1", False),
        (FP8, "w8a8", None, False),
        (AWQ, None, "1", False),
        (GPTQ, None, "1", False),
    ],
)
def test_takes_compressed_tensors_only_when_asked(
    config: dict, user_quant: str | None, enable: str | None, taken: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if enable is not None:
        monkeypatch.setenv("VLLM_W8A8_ENABLE", enable)
    assert W8A8Config.override_quantization_method(config, user_quant, hf_config=None) == ("w8a8" if taken else None)


def test_pickles(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_W8A8_SKIP_MODULES", "down_proj, re:.*[02].*o_proj")
    config = W8A8Config()
    for other in (pickle.loads(pickle.dumps(config)), copy.deepcopy(config)):
        assert repr(other) == repr(config)
        assert other.rules.skips("model.layers.1.mlp.down_proj")
        assert not other.rules.skips("model.layers.1.self_attn.o_proj")


def test_warns_of_skip_patterns_that_match_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    monkeypatch.setattr("vllm_w8a8_plugin.log.once", lambda message, level: said.append(message))
    monkeypatch.setenv("VLLM_W8A8_SKIP_MODULES", "down_prj,o_proj,qkv_proj")
    config = W8A8Config()
    config._seen |= {f"model.layers.0.{name}" for name in ("q_proj", "k_proj", "v_proj", "o_proj", "down_proj")}
    config.warn_unmatched()
    assert said == [
        "VLLM_W8A8_SKIP_MODULES: 'down_prj' matches no linear layer of this model; did you mean down_proj or o_proj?"
    ]


# What a model class of two layers builds, experts and a router among them, and what a checkpoint may have besides.
BUILT = [
    *(f"model.layers.{i}.self_attn.{name}" for i in range(2) for name in ("q_proj", "k_proj", "v_proj", "o_proj")),
    *(f"model.layers.0.mlp.{name}" for name in ("gate_proj", "up_proj", "down_proj")),
    *(f"model.layers.1.mlp.experts.{i}.{name}" for i in range(2) for name in ("gate_proj", "up_proj", "down_proj")),
]


def built_config(**entries) -> W8A8Config:
    """Config of a checkpoint whose model has the layers BUILT."""
    config = W8A8Config.from_config(NATIVE | entries)
    config.packed_modules_mapping = {"qkv_proj": ["q_proj", "k_proj", "v_proj"], "gate_up_proj": ["gate_proj", "up_proj"]}
    config._seen |= set(BUILT)
    for name in BUILT:
        config._hadamard_of(name)
    return config


@pytest.mark.parametrize(
    ("entry", "near"),
    [
        ("down_prj", "down_proj"),
        ("model.layers.1.self_attn.o_prj", "o_proj"),
        ("model.layers.*.mlp.down_projj", "down_proj"),
        (r"re:.*layers\.\d+\.mlp\.down_prj$", "down_proj"),
        ("self_atn", "self_attn"),
        ("qkv_prj", "qkv_proj"),
        ("lm_haed", "lm_head"),
    ],
)
def test_warns_of_ignored_layers_that_are_misspelt(entry: str, near: str, monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    monkeypatch.setattr("vllm_w8a8_plugin.log.once", lambda message, level: said.append(message))
    config = built_config(ignore=["lm_head", entry, "down_proj"])
    for _ in range(2):
        config.warn_unmatched()
    (line,) = said
    assert line.startswith(
        f"quantization_config: ignore has {entry!r}, which matches no linear layer of this model; did you mean {near}"
    )


def test_is_silent_about_ignored_layers_that_a_model_class_does_not_build(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    monkeypatch.setattr("vllm_w8a8_plugin.log.once", lambda message, level: said.append(message))
    config = built_config(
        ignore=[
            "lm_head",  # tied
            "re:.*lm_head",
            "model.layers.1.mlp.gate",
            r"re:.*mlp\.gate$",
            "re:.*shared_expert_gate$",
            "model.visual.blocks.0.attn.qkv",
            "re:visual.*",
            "vision_tower.encoder.layers.0.self_attn.k_proj",
            "multi_modal_projector.linear_1",
            "audio_tower.layers.0.fc1",
            "model.embed_tokens",
            "re:.*norm.*",
            "mtp.fc",
            "mtp.layers.0.mlp.down_proj",
            "model.layers.2.self_attn.q_proj",  # an MTP layer, or in another pipeline stage
            "model.layers.7.linear_attn.in_proj_ba",
            "talker.model.layers.0.mlp.up_proj",
            "conv",
        ]
    )
    config.warn_unmatched()
    assert said == []


def test_misspelt_ignored_layer_is_named_before_its_dtype_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """The layer that the entry means is loaded as an int8 one."""
    from vllm_w8a8_plugin.linear import checked_loader

    said: list[str] = []
    monkeypatch.setattr("vllm_w8a8_plugin.log.once", lambda message, level: said.append(message))
    config = built_config(ignore=["lm_head", "down_prj"])
    loader = checked_loader(lambda parameter, loaded: None, (torch.int8,), config._all_built)
    parameter = torch.nn.Parameter(torch.zeros(2, 2, dtype=torch.int8), requires_grad=False)
    loader(parameter, torch.zeros(2, 2, dtype=torch.int8))
    assert said == []
    with pytest.raises(ValueError, match=r"holds a weight of dtype torch\.bfloat16"):
        loader(parameter, torch.zeros(2, 2, dtype=torch.bfloat16))
    assert "'down_prj'" in said[0]


@pytest.mark.parametrize(
    ("variable", "value", "message"),
    [
        ("VLLM_W8A8_KERNEL", "nonsense", "no such kernel. Known: triton"),
        ("VLLM_W8A8_KERNEL", "triton", "VLLM_W8A8_KERNEL=triton cannot run here: the Triton kernels need a GPU"),
        ("VLLM_W8A8_HADAMARD", "48", "VLLM_W8A8_HADAMARD='48': expected auto, 0, 16, 32, 64 or 128"),
        ("VLLM_W8A8_FUSION", "perhaps", "VLLM_W8A8_FUSION='perhaps': expected 1 or 0"),
    ],
)
def test_bad_variables_fail_before_a_model_is_built(
    variable: str, value: str, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if torch.cuda.is_available() and value == "triton":
        pytest.skip("Triton runs on this machine's GPU")
    monkeypatch.setenv(variable, value)
    with pytest.raises(ValueError, match=message):
        W8A8Config()


def test_bad_switch_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_W8A8_ENABLE", "maybe")
    with pytest.raises(ValueError, match="VLLM_W8A8_ENABLE='maybe': expected 1 or 0"):
        W8A8Config.override_quantization_method(COMPRESSED_TENSORS, None)


def test_blocks_of_layers_that_are_not_there_are_refused() -> None:
    native = {"quant_method": "w8a8", "weight_dtype": "int8", "scale_dtype": "fp32", "hadamard": 64}
    config = W8A8Config.from_config(native | {"hadamard_blocks": {"o_prj": 32, "down_proj": 16}})
    config.packed_modules_mapping = {}
    assert config._hadamard_of("model.layers.0.mlp.down_proj") == 16
    assert config._hadamard_of("model.layers.0.self_attn.o_proj") == 64
    with pytest.raises(
        ValueError, match="hadamard_blocks names o_prj, but the int8 layers of this model are down_proj, o_proj"
    ):
        config.check_blocks()
    for ignore in ("lm_head", [1], {"a": 1}):
        with pytest.raises(ValueError, match="expected a list of names or patterns"):
            W8A8Config.from_config(native | {"ignore": ignore})


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("model.layers.0.mlp.down_prj", " (is model.layers.0.mlp.down_prj a misspelling of model.layers.0.mlp.down_proj?)"),
        ("model.layers.0.self_atn.o_proj", ""),
        ("modle.layers.0.mlp.down_proj", ""),  # only where all layers are there
        ("model.layers.2.mlp.down_proj", ""),
        ("model.layers.1.mlp.experts.7.down_projj", ""),
    ],
)
def test_blocks_of_named_layers_that_are_not_there_are_refused(name: str, hint: str, monkeypatch: pytest.MonkeyPatch) -> None:
    text = SimpleNamespace(num_hidden_layers=2)
    monkeypatch.setattr("vllm_w8a8_plugin.config._current_model_config", lambda: SimpleNamespace(hf_text_config=text))
    config = built_config(hadamard=64, hadamard_blocks={name: 32, BUILT[-1]: 32, "o_proj": 32})
    with pytest.raises(ValueError) as error:
        config.check_blocks()
    assert f"hadamard_blocks names {name}, but this model has no such layer{hint}" in str(error.value)


@pytest.mark.parametrize(
    ("name", "layers", "draft_layers"),
    [
        ("model.layers.2.mlp.down_proj", 2, 1),  # of the model's own draft
        ("mtp.layers.0.mlp.down_proj", 2, 0),
        ("vision_tower.encoder.layers.0.mlp.fc1", 2, 0),
        ("language_model.lm_head", 2, 0),
        ("model.layers.3.mlp.down_proj", 4, 0),  # of another pipeline stage
        ("model.layers.3.mlp.shared_expert.down_proj", 4, 0),  # the same, which alone has such a layer
        ("model.layers.0.mlp.down_proj", 2, 0),  # there, and skipped
    ],
)
def test_blocks_of_named_layers_that_are_elsewhere_are_let_pass(
    name: str, layers: int, draft_layers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = SimpleNamespace(num_hidden_layers=layers, num_nextn_predict_layers=draft_layers)
    monkeypatch.setattr("vllm_w8a8_plugin.config._current_model_config", lambda: SimpleNamespace(hf_text_config=text))
    config = built_config(hadamard=64, hadamard_blocks={name: 32})
    config._blocks_used.discard(name)
    config.check_blocks()


def test_blocks_of_named_layers_are_not_asked_of_a_draft_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """It has the checkpoint's config, and builds the layer behind the last."""
    text = SimpleNamespace(num_hidden_layers=61, num_nextn_predict_layers=1)
    monkeypatch.setattr("vllm_w8a8_plugin.config._current_model_config", lambda: SimpleNamespace(hf_text_config=text))
    names = [f"model.layers.{i}.mlp.down_proj" for i in range(61)]
    config = W8A8Config.from_config(NATIVE | {"hadamard": 64, "hadamard_blocks": dict.fromkeys(names, 32)})
    config._seen.add("model.layers.61.mlp.down_proj")
    config._hadamard_of("model.layers.61.mlp.down_proj")
    config.check_blocks()
