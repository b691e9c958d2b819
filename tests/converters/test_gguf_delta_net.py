"""qwen3next, qwen35 and qwen35moe against transformers, with two and three value heads for each key head."""

import math

import pytest
import torch
from gguf_models import VOCAB, check_architecture, converted_config, random_model, renamed, write_gguf
from safetensors.torch import load_file

from w8a8_converters.convert import convert
from w8a8_converters.errors import ConversionError
from w8a8_converters.gguf.source import GGUFSource

LAYERS, EXPERTS, HIDDEN, KEY_HEADS, KEY_DIM, VALUE_DIM, WIDTH = 3, 4, 32, 4, 4, 8, 4
NAMES = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
    "model.layers.{}.input_layernorm.weight": "blk.{}.attn_norm.weight",
    "model.layers.{}.post_attention_layernorm.weight": "blk.{}.post_attention_norm.weight",
    "model.layers.{}.self_attn.q_proj.weight": "blk.{}.attn_q.weight",
    "model.layers.{}.self_attn.k_proj.weight": "blk.{}.attn_k.weight",
    "model.layers.{}.self_attn.v_proj.weight": "blk.{}.attn_v.weight",
    "model.layers.{}.self_attn.o_proj.weight": "blk.{}.attn_output.weight",
    "model.layers.{}.self_attn.q_norm.weight": "blk.{}.attn_q_norm.weight",
    "model.layers.{}.self_attn.k_norm.weight": "blk.{}.attn_k_norm.weight",
    "model.layers.{}.linear_attn.in_proj_qkv.weight": "blk.{}.attn_qkv.weight",
    "model.layers.{}.linear_attn.in_proj_z.weight": "blk.{}.attn_gate.weight",
    "model.layers.{}.linear_attn.in_proj_b.weight": "blk.{}.ssm_beta.weight",
    "model.layers.{}.linear_attn.in_proj_a.weight": "blk.{}.ssm_alpha.weight",
    "model.layers.{}.linear_attn.in_proj_ba.weight": "blk.{}.ssm_ba.weight",
    "model.layers.{}.linear_attn.conv1d.weight": "blk.{}.ssm_conv1d.weight",
    "model.layers.{}.linear_attn.A_log": "blk.{}.ssm_a",
    "model.layers.{}.linear_attn.dt_bias": "blk.{}.ssm_dt.bias",
    "model.layers.{}.linear_attn.norm.weight": "blk.{}.ssm_norm.weight",
    "model.layers.{}.linear_attn.out_proj.weight": "blk.{}.ssm_out.weight",
    "model.layers.{}.mlp.gate_proj.weight": "blk.{}.ffn_gate.weight",
    "model.layers.{}.mlp.up_proj.weight": "blk.{}.ffn_up.weight",
    "model.layers.{}.mlp.down_proj.weight": "blk.{}.ffn_down.weight",
    "model.layers.{}.mlp.gate.weight": "blk.{}.ffn_gate_inp.weight",
    "model.layers.{}.mlp.shared_expert.gate_proj.weight": "blk.{}.ffn_gate_shexp.weight",
    "model.layers.{}.mlp.shared_expert.up_proj.weight": "blk.{}.ffn_up_shexp.weight",
    "model.layers.{}.mlp.shared_expert.down_proj.weight": "blk.{}.ffn_down_shexp.weight",
    "model.layers.{}.mlp.shared_expert_gate.weight": "blk.{}.ffn_gate_inp_shexp.weight",
}
# Of an MTP layer, whose others are called like those of the model's layers.
MTP_NAMES = {
    "mtp.fc.weight": f"blk.{LAYERS}.nextn.eh_proj.weight",
    "mtp.norm.weight": f"blk.{LAYERS}.nextn.shared_head_norm.weight",
    "mtp.pre_fc_norm_embedding.weight": f"blk.{LAYERS}.nextn.enorm.weight",
    "mtp.pre_fc_norm_hidden.weight": f"blk.{LAYERS}.nextn.hnorm.weight",
}
PLUS_ONE = (
    "attn_norm.weight", "post_attention_norm.weight", "attn_q_norm.weight", "attn_k_norm.weight", "output_norm.weight",
    "nextn.shared_head_norm.weight", "nextn.enorm.weight", "nextn.hnorm.weight",
)  # fmt: skip
# The second layer is the one with attention.
KINDS = ["linear_attention", "full_attention", "linear_attention"]


def metadata(per_key, **other):
    return {
        "block_count": LAYERS,
        "context_length": 256,
        "embedding_length": HIDDEN,
        "attention.head_count": 4,
        "attention.head_count_kv": 2,
        "attention.key_length": 16,
        "attention.value_length": 16,
        "attention.layer_norm_rms_epsilon": 1e-6,
        "full_attention_interval": 2,
        "rope.dimension_count": 8,
        "rope.freq_base": 1000000.0,
        "ssm.conv_kernel": WIDTH,
        "ssm.state_size": KEY_DIM,
        "ssm.group_count": KEY_HEADS,
        "ssm.time_step_rank": KEY_HEADS * per_key,
        "ssm.inner_size": KEY_HEADS * per_key * VALUE_DIM,
        **other,
    }


EXPERT_METADATA = {
    "expert_count": EXPERTS, "expert_used_count": 2, "expert_feed_forward_length": 16,
    "expert_shared_feed_forward_length": 24,
}  # fmt: skip
SECTIONS = {"rope.dimension_sections": [2, 1, 1, 0]}


def sizes(per_key, **other):
    rope = {"rope_type": "default", "rope_theta": 1000000.0, "partial_rotary_factor": 0.5}
    return {
        "vocab_size": VOCAB, "hidden_size": HIDDEN, "num_hidden_layers": LAYERS, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 256, "rms_norm_eps": 1e-6,
        "tie_word_embeddings": False, "layer_types": KINDS, "linear_conv_kernel_dim": WIDTH,
        "linear_num_key_heads": KEY_HEADS, "linear_num_value_heads": KEY_HEADS * per_key,
        "linear_key_head_dim": KEY_DIM, "linear_value_head_dim": VALUE_DIM, "rope_parameters": rope, **other,
    }  # fmt: skip


EXPERT_SIZES = {
    "num_experts": EXPERTS, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "shared_expert_intermediate_size": 24,
}  # fmt: skip
MROPE = {
    "rope_type": "default", "rope_theta": 1000000.0, "partial_rotary_factor": 0.5, "mrope_section": [2, 1, 1],
    "mrope_interleaved": True,
}  # fmt: skip


def qwen3next(per_key):
    from transformers import Qwen3NextConfig

    return random_model(Qwen3NextConfig(**sizes(per_key, intermediate_size=48, **EXPERT_SIZES)))


def qwen35(per_key, **other):
    from transformers import Qwen3_5TextConfig

    return random_model(Qwen3_5TextConfig(**sizes(per_key, intermediate_size=48, rope_parameters=MROPE, **other)))


def qwen35moe(per_key):
    from transformers import Qwen3_5MoeTextConfig

    return random_model(Qwen3_5MoeTextConfig(**sizes(per_key, rope_parameters=MROPE, **EXPERT_SIZES)))


def tiled(values, per_key, size):
    """Value heads as the file has them: the first of each key head, then the second of each."""
    heads = [values[number * size : (number + 1) * size] for number in range(KEY_HEADS * per_key)]
    return torch.cat([heads[key * per_key + number] for number in range(per_key) for key in range(KEY_HEADS)])


def split_qkvz(values, per_key):
    """Rows of q, k, v and z, from those of each key head together."""
    parts = {"q": [], "k": [], "v": [], "z": []}
    first = 0
    for _ in range(KEY_HEADS):
        for part, size in (("q", KEY_DIM), ("k", KEY_DIM), ("v", per_key * VALUE_DIM), ("z", per_key * VALUE_DIM)):
            parts[part].append(values[first : first + size])
            first += size
    return torch.cat(parts["q"] + parts["k"] + parts["v"]), torch.cat(parts["z"])


def writer(per_key, tiles, early=False):
    """From checkpoint to file. tiles: whether value heads are reordered; early: files with q, k, v and z in one tensor."""

    def to_gguf(tensors):
        tensors = {name.replace("mtp.layers.0.", f"model.layers.{LAYERS}."): values for name, values in tensors.items()}
        names = renamed(NAMES, LAYERS + 1) | MTP_NAMES
        for layer in range(LAYERS + 1):
            for part in ("gate", "up", "down"):
                found = [f"model.layers.{layer}.mlp.experts.{expert}.{part}_proj.weight" for expert in range(EXPERTS)]
                if found[0] in tensors:
                    yield f"blk.{layer}.ffn_{part}_exps.weight", torch.stack([tensors.pop(name) for name in found])
        for name, values in tensors.items():
            if name.endswith("in_proj_qkvz.weight"):
                layer = name.split(".")[2]
                if early:
                    yield f"blk.{layer}.ssm_in.weight", values
                    continue
                qkv, z = split_qkvz(values, per_key)
                yield f"blk.{layer}.attn_qkv.weight", qkv
                yield f"blk.{layer}.attn_gate.weight", z
                continue
            ours = names[name]
            keys = 2 * KEY_HEADS * KEY_DIM
            if ours.endswith("ssm_conv1d.weight"):
                values = values[:, 0, :]
            if ours.endswith("ffn_gate_inp_shexp.weight"):
                values = values[0]
            if tiles and ours.endswith(("attn_qkv.weight", "ssm_conv1d.weight")):
                values = torch.cat([values[:keys], tiled(values[keys:], per_key, VALUE_DIM)])
            if tiles and ours.endswith("attn_gate.weight"):
                values = tiled(values, per_key, VALUE_DIM)
            if tiles and ours.endswith(("ssm_beta.weight", "ssm_alpha.weight", "ssm_a", "ssm_dt.bias")):
                values = tiled(values, per_key, 1)
            if tiles and ours.endswith("ssm_out.weight"):
                values = tiled(values.T, per_key, VALUE_DIM).T
            if ours.endswith("ssm_a"):
                values = torch.tensor([-math.exp(value) for value in values.tolist()])
            yield ours, values + 1 if ours.endswith(PLUS_ONE) else values

    return to_gguf


def saved(model, tmp_path):
    model.save_pretrained(tmp_path / "saved")
    return load_file(tmp_path / "saved" / "model.safetensors")


def mtp_layer(tensors):
    """An MTP layer like the model's layer with attention, with other values that bf16 holds."""
    generator = torch.Generator().manual_seed(7)
    like = {name.split("layers.1.")[1]: values.shape for name, values in tensors.items() if ".layers.1." in name}
    shapes = {f"mtp.layers.0.{name}": shape for name, shape in like.items()}
    shapes |= {"mtp.fc.weight": (HIDDEN, 2 * HIDDEN)}
    shapes |= {f"mtp.{name}.weight": (HIDDEN,) for name in ("norm", "pre_fc_norm_embedding", "pre_fc_norm_hidden")}
    return {name: torch.randint(-64, 65, shape, generator=generator) / 64 for name, shape in shapes.items()}


@pytest.mark.parametrize("per_key", [1, 2, 3])
def test_qwen35(tmp_path, per_key):
    keys = metadata(per_key, feed_forward_length=48, **SECTIONS)
    source = check_architecture(tmp_path, qwen35(per_key), "qwen35", keys, writer(per_key, tiles=True), inexact=("A_log",))
    assert source.config["architectures"] == ["Qwen3_5ForCausalLM"]
    assert source.config["layer_types"] == KINDS
    assert source.config["rope_parameters"] == MROPE


@pytest.mark.parametrize("per_key", [2, 3])
def test_qwen35moe(tmp_path, per_key):
    keys = metadata(per_key, **EXPERT_METADATA, **SECTIONS)
    source = check_architecture(
        tmp_path, qwen35moe(per_key), "qwen35moe", keys, writer(per_key, tiles=True), inexact=("A_log",)
    )
    assert source.config["architectures"] == ["Qwen3_5MoeForCausalLM"]


@pytest.mark.parametrize("early", [False, True])
@pytest.mark.parametrize("per_key", [2, 3])
def test_qwen3next(tmp_path, per_key, early):
    keys = metadata(per_key, feed_forward_length=48, **EXPERT_METADATA)
    to_gguf = writer(per_key, tiles=False, early=early)
    source = check_architecture(tmp_path, qwen3next(per_key), "qwen3next", keys, to_gguf, inexact=("A_log",))
    assert source.config["architectures"] == ["Qwen3NextForCausalLM"]
    assert source.config["norm_topk_prob"] is True


@pytest.mark.parametrize(
    ("make", "architecture", "count"),
    [
        (qwen35, "qwen35", "mtp_num_hidden_layers"),
        (qwen35moe, "qwen35moe", "mtp_num_hidden_layers"),
        (qwen3next, "qwen3next", "num_nextn_predict_layers"),
    ],
)
def test_mtp(tmp_path, make, architecture, count):
    model = make(2)
    keys = metadata(
        2, block_count=LAYERS + 1, nextn_predict_layers=1, feed_forward_length=48, **EXPERT_METADATA,
        **{"attention.recurrent_layers": [True, False, True, False]},
    )  # fmt: skip
    if architecture == "qwen35":
        keys = {key: value for key, value in keys.items() if not key.startswith("expert_")}
    if architecture != "qwen3next":
        keys |= SECTIONS
    extra = mtp_layer(saved(model, tmp_path))
    to_gguf = writer(2, tiles=architecture != "qwen3next")
    source = check_architecture(tmp_path, model, architecture, keys, to_gguf, inexact=("A_log",), extra=extra)
    assert source.config[count] == 1
    assert source.config["num_hidden_layers"] == LAYERS
    assert source.config["layer_types"] == KINDS


def test_mtp_left_out(tmp_path):
    """A file may name an MTP layer that it does not have."""
    keys = metadata(2, block_count=LAYERS + 1, nextn_predict_layers=1, feed_forward_length=48, **SECTIONS)
    source = check_architecture(tmp_path, qwen35(2), "qwen35", keys, writer(2, tiles=True), inexact=("A_log",))
    assert source.config["mtp_num_hidden_layers"] == 0


def test_tied(tmp_path):
    keys = metadata(2, feed_forward_length=48, **SECTIONS)
    model = qwen35(2, tie_word_embeddings=True)
    source = check_architecture(tmp_path, model, "qwen35", keys, writer(2, tiles=True), inexact=("A_log",))
    assert source.config["tie_word_embeddings"] is True


def test_shared_expert_gate_of_one_row(tmp_path):
    """New files have the gate as a matrix."""
    keys = metadata(2, **EXPERT_METADATA, **SECTIONS)

    def to_gguf(tensors):
        for name, values in writer(2, tiles=True)(tensors):
            yield name, values[None] if name.endswith("gate_inp_shexp.weight") else values

    check_architecture(tmp_path, qwen35moe(2), "qwen35moe", keys, to_gguf, inexact=("A_log",))


def test_w8a8(tmp_path):
    """Routers, recurrent layers and the MTP layer stay as they are; decays and their biases are fp32."""
    tensors = saved(qwen35moe(2), tmp_path)
    keys = metadata(2, block_count=LAYERS + 1, nextn_predict_layers=1, **EXPERT_METADATA, **SECTIONS)
    written = writer(2, tiles=True)(tensors | mtp_layer(tensors))
    path = write_gguf(tmp_path / "model.gguf", "qwen35moe", keys, written)
    report = convert(path, tmp_path / "out")
    kept = set(report.ignore)
    layer = "model.layers.0"
    recurrent = {f"{layer}.linear_attn.{name}" for name in ("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a", "out_proj")}
    assert recurrent | {f"{layer}.mlp.gate", f"{layer}.mlp.shared_expert_gate", "mtp.fc", "lm_head"} <= kept
    weights = load_file(tmp_path / "out" / "w8a8.safetensors")
    int8 = {name for name, values in weights.items() if values.dtype == torch.int8}
    assert {f"{layer}.mlp.experts.3.up_proj.weight", f"{layer}.mlp.shared_expert.down_proj.weight"} <= int8
    assert "model.layers.1.self_attn.q_proj.weight" in int8
    assert not any(name.startswith("mtp.") for name in int8)
    fp32 = {name for name, values in weights.items() if values.dtype == torch.float32 and not name.endswith("_scale")}
    assert fp32 == {f"model.layers.{number}.linear_attn.{name}" for number in (0, 2) for name in ("A_log", "dt_bias")}


@pytest.mark.parametrize("value", [0.0, 0.5, math.nan])
def test_decay_that_has_no_logarithm(tmp_path, value):
    def to_gguf(tensors):
        for name, values in writer(2, tiles=True)(tensors):
            if name == "blk.2.ssm_a":
                values[1] = value
            yield name, values

    keys = metadata(2, feed_forward_length=48, **SECTIONS)
    path = write_gguf(tmp_path / "model.gguf", "qwen35", keys, to_gguf(saved(qwen35(2), tmp_path)))
    with pytest.raises(ConversionError, match=r"blk\.2\.ssm_a holds (0|0\.5|nan), expected values below 0"):
        GGUFSource(path)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rope.dimension_sections": [2, 1, 0, 0]}, r"rope\.dimension_sections is \[2, 1, 0, 0\], expected three numbers"),
        ({"rope.dimension_sections": None}, r"rope\.dimension_sections is None"),
        ({"attention.recurrent_layers": [True, False]}, "recurrent_layers must have an entry for each of 3 layers"),
        ({"ssm.time_step_rank": 3}, r"ssm\.inner_size 64 must be a multiple of ssm\.time_step_rank 3"),
        ({"ssm.inner_size": 33}, r"ssm\.inner_size 33 must be a multiple"),
        (
            {"ssm.group_count": 200, "ssm.state_size": 200, "ssm.time_step_rank": 200, "ssm.inner_size": 200},
            r"ssm\.group_count is 200, expected 1 at most: the largest dimension of the file's tensors, in heads of 200",
        ),
        ({"rope.dimension_count": 18}, r"rope\.dimension_count must be even and at most the 16 of a head, got 18"),
        ({"nextn_predict_layers": 3}, "nextn_predict_layers is 3, expected fewer than all 3 layers"),
        ({"ssm.dt_b_c_rms": True}, r"metadata qwen35\.ssm\.dt_b_c_rms is not understood"),
        ({"expert_count": 4}, r"metadata qwen35\.expert_count is not understood"),
    ],
    ids=str,
)
def test_refused(tmp_path, changes, message):
    keys = metadata(2, feed_forward_length=48, **SECTIONS) | changes
    tensors = writer(2, tiles=True)(saved(qwen35(2), tmp_path))
    path = write_gguf(tmp_path / "model.gguf", "qwen35", keys, tensors)
    with pytest.raises(ConversionError, match=message):
        GGUFSource(path)


def test_two_mtp_layers(tmp_path):
    keys = metadata(2, nextn_predict_layers=2, feed_forward_length=48, **SECTIONS)
    tensors = [*writer(2, tiles=True)(saved(qwen35(2), tmp_path)), ("blk.1.nextn.eh_proj.weight", torch.ones(HIDDEN, 64))]
    path = write_gguf(tmp_path / "model.gguf", "qwen35", keys, tensors)
    with pytest.raises(ConversionError, match="nextn_predict_layers is 2, expected 0 or 1"):
        GGUFSource(path)


def test_recurrent_mtp_layer(tmp_path):
    keys = metadata(2, block_count=LAYERS + 1, nextn_predict_layers=1, feed_forward_length=48, **SECTIONS)
    keys["attention.recurrent_layers"] = [True, False, True, True]
    path = write_gguf(tmp_path / "model.gguf", "qwen35", keys, writer(2, tiles=True)(saved(qwen35(2), tmp_path)))
    with pytest.raises(ConversionError, match="recurrent_layers has an MTP layer"):
        GGUFSource(path)


def test_config_of_qwen3next_is_the_published_spelling(tmp_path):
    """transformers 4 reads these keys, and no `rope_parameters`."""
    keys = metadata(2, feed_forward_length=48, **EXPERT_METADATA)
    check_architecture(tmp_path, qwen3next(2), "qwen3next", keys, writer(2, tiles=False), inexact=("A_log",), skip_logits=True)
    config = converted_config(tmp_path)
    assert (config["rope_theta"], config["partial_rotary_factor"]) == (1000000.0, 0.5)
    assert "rope_parameters" not in config
