import pytest

from w8a8_converters.rules import SkipRules, expert_groups, fused_groups

DOWN = "model.layers.0.mlp.down_proj"
PACKED = {"qkv_proj": ["q_proj", "k_proj", "v_proj"], "gate_up_proj": ["gate_proj", "up_proj"]}
QKV = "model.layers.3.self_attn.qkv_proj"


@pytest.mark.parametrize(
    ("pattern", "name", "expected"),
    [
        (DOWN, DOWN, True),
        (DOWN, "model.layers.10.mlp.down_proj", False),
        ("model.layers.0.mlp", DOWN, True),
        ("model.layers.0", DOWN, True),
        ("model.layers.0", "model.layers.01.mlp.down_proj", False),
        ("layers.0", DOWN, True),
        ("down_proj", DOWN, True),
        ("proj", DOWN, False),
        ("down", DOWN, False),
        ("mlp.gate", "model.layers.0.mlp.gate", True),
        ("mlp.gate", "model.layers.0.mlp.gate_proj", False),
        ("mlp.gate", "model.layers.0.self_attn.gate", False),
        ("vision", "model.vision_tower.layers.0.q_proj", False),
        ("vision_tower", "model.vision_tower.layers.0.q_proj", True),
        ("*.down_proj", DOWN, True),
        ("*.down_pro", DOWN, False),
        ("model.layers.[0-4]", DOWN, True),
        ("model.layers.?", "model.layers.12.mlp.down_proj", False),
        ("model.layers.*.mlp", DOWN, True),
        ("re:.*down_proj$", DOWN, True),
        ("re:down_proj", DOWN, False),
        ("re:model\\.layers\\.[0-3]\\.", DOWN, True),
        ("lm_head", "lm_head", True),
        ("lm_head", "language_model.lm_head", True),
        (" down_proj ", DOWN, True),
        ("", DOWN, False),
        ("model.layers.0.mlp.down_proj.weight", DOWN, False),
    ],
)
def test_skips(pattern, name, expected):
    assert SkipRules([pattern]).skips(name) is expected


@pytest.mark.parametrize(
    ("patterns", "prefix", "expected"),
    [
        ([], QKV, False),
        (["qkv_proj"], QKV, True),
        ([QKV], QKV, True),
        (["self_attn"], QKV, True),
        (["q_proj", "k_proj", "v_proj"], QKV, True),
        (["re:.*self_attn.*"], QKV, True),
        (["re:.*\\.[qkv]_proj$"], QKV, True),
        (["*qkv_proj"], QKV, True),
        (["qkv_proj", "q_proj"], QKV, True),
        (["down_proj"], QKV, False),
        (["o_proj"], "model.layers.3.self_attn.o_proj", True),
        (["q_proj"], "q_proj", True),
        (["qkv_proj"], "qkv_proj", True),
        ([f"model.layers.3.self_attn.{part}_proj" for part in "qkv"], QKV, True),
        ([f"model.layers.4.self_attn.{part}_proj" for part in "qkv"], QKV, False),
    ],
)
def test_skips_fused(patterns, prefix, expected):
    assert SkipRules(patterns).skips_fused(prefix, PACKED) is expected


@pytest.mark.parametrize("patterns", [["q_proj"], ["re:.*v_proj"], ["*v_proj"], ["model.layers.3.self_attn.v_proj", "q_proj"]])
def test_part_of_a_fused_layer_is_refused(patterns):
    with pytest.raises(ValueError, match="fuses them into one layer, qkv_proj: skip qkv_proj") as error:
        SkipRules(patterns).skips_fused(QKV, PACKED)
    assert "k_proj" in str(error.value)


def test_bad_regex_is_named():
    with pytest.raises(ValueError, match=r"re:\(unclosed"):
        SkipRules(["re:(unclosed"])


def test_unmatched():
    rules = SkipRules(["qkv_proj", "down_proj", "gate_up_proj", "nothing", "re:.*zzz"])
    names = ["model.layers.0.self_attn.q_proj", DOWN]
    assert rules.unmatched(names) == ["gate_up_proj", "nothing", "re:.*zzz"]


def test_fused_groups_hold_the_parts_present():
    names = ["a.q_proj", "a.v_proj", "b.q_proj", "c.down_proj", "up_proj"]
    groups = fused_groups(names)
    assert groups == {"a.qkv_proj": ("q_proj", "v_proj"), "b.qkv_proj": ("q_proj",), "gate_up_proj": ("up_proj",)}


EXPERTS = [
    f"model.layers.{layer}.mlp.experts.{i}.{part}_proj" for layer in (0, 1) for i in range(3) for part in ("up", "down")
]


def test_expert_groups():
    groups = expert_groups([*EXPERTS, DOWN, "model.layers.0.mlp.shared_experts.up_proj"])
    assert {prefix: len(names) for prefix, names in groups.items()} == {
        f"model.layers.{layer}.mlp.experts": 6 for layer in (0, 1)
    }


@pytest.mark.parametrize(
    ("pattern", "skipped"), [("experts", True), ("model.layers.0", True), ("model.layers.1", False), ("*.experts.*", True)]
)
def test_experts_all_or_none(pattern, skipped):
    assert SkipRules([pattern]).skips_experts("model.layers.0.mlp.experts", EXPERTS[:6]) is skipped


@pytest.mark.parametrize("pattern", ["experts.2", "down_proj", "gate_up_proj", "model.layers.0.mlp.experts.1.up_proj"])
def test_some_experts_are_refused(pattern):
    with pytest.raises(ValueError, match=r"of the 6 projections of model\.layers\.0\.mlp\.experts, .* skip all experts"):
        SkipRules([pattern]).skips_experts("model.layers.0.mlp.experts", EXPERTS[:6])
