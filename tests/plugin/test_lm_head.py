"""An int8 lm_head: of its own or beside a tied embedding, with the vocabulary's padding, on one rank and on two."""

import contextlib
import re
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from checkpoints import COMPRESSED_TENSORS, FP8, NATIVE, model_folder
from layers import finish, free_port, load, run_ranks, tensor_parallel

pytest.importorskip("vllm", reason="vLLM is not installed: `make test` installs it")
from vllm.config import get_current_vllm_config
from vllm.model_executor.layers.linear import ReplicatedLinear
from vllm.model_executor.layers.logits_processor import LogitsProcessor
from vllm.model_executor.layers.vocab_parallel_embedding import (
    ParallelLMHead,
    UnquantizedEmbeddingMethod,
    VocabParallelEmbedding,
)
from vllm.model_executor.model_loader.reload import meta
from vllm.model_executor.model_loader.reload.layerwise import finalize_layerwise_processing

from vllm_w8a8_plugin import envs, linear, lm_head, warmup
from vllm_w8a8_plugin.config import W8A8Config
from w8a8_kernels import int8_linear
from w8a8_kernels.quantize.weight import quantize_weight

# 100 tokens are padded to 128: 64 on each of two ranks, of which the second has 36 of tokens.
VOCABULARY, PADDED, HIDDEN, BLOCK = 100, 128, 96, 32
DTYPE = torch.bfloat16
ASKED = {"hadamard": "auto", "lm_head": True}


@pytest.fixture(scope="module", autouse=True)
def one_rank() -> Iterator[None]:
    """vLLM's layers can be built."""
    with tensor_parallel(0, 1, free_port()):
        yield


@pytest.fixture(autouse=True)
def no_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in envs.VARIABLES:
        monkeypatch.delenv(variable.name, raising=False)
    monkeypatch.setenv("VLLM_W8A8_KERNEL", "torch")  # which keeps the weight as it is, to be looked at


@contextlib.contextmanager
def model(**changes) -> Iterator[None]:
    """The layers that are built are those of a model with such a config; one that is tied, unless `changes` say otherwise."""
    sizes = {"vocab_size": VOCABULARY, "hidden_size": HIDDEN}
    text = SimpleNamespace(**sizes, tie_word_embeddings=changes.pop("tied", True))
    config = {"hf_config": text, "hf_text_config": text, "runner_type": "generate", "dtype": DTYPE, "head_dtype": DTYPE}
    vllm_config = get_current_vllm_config()
    before = vllm_config.model_config
    object.__setattr__(vllm_config, "model_config", SimpleNamespace(**config | changes))
    try:
        yield
    finally:
        object.__setattr__(vllm_config, "model_config", before)


def checkpoint_config(**entries) -> W8A8Config:
    """Of a checkpoint, for layers that are built one at a time."""
    config = W8A8Config.from_config(NATIVE | entries)
    config.check_blocks = lambda: None  # it looks at all layers of a model
    return config


def build_head(config: W8A8Config | None, bias: bool = False) -> ParallelLMHead:
    return ParallelLMHead(VOCABULARY, HIDDEN, bias=bias, params_dtype=DTYPE, quant_config=config, prefix="lm_head")


def build_embedding(config: W8A8Config | None, size: int = HIDDEN) -> VocabParallelEmbedding:
    return VocabParallelEmbedding(VOCABULARY, size, params_dtype=DTYPE, quant_config=config, prefix="model.embed_tokens")


def poison(layer: torch.nn.Module) -> None:
    """Fill with what no loader writes: what is left of it was never written."""
    for parameter in layer.parameters():
        if not parameter.is_meta:
            parameter.data.fill_(-128 if parameter.dtype == torch.int8 else torch.nan)


def weight(seed: int = 0) -> torch.Tensor:
    """bf16 [VOCABULARY, HIDDEN] with an outlier column and a row of zeros."""
    values = torch.randn(VOCABULARY, HIDDEN, generator=torch.Generator().manual_seed(seed))
    values[:, 5] *= 20
    values[7] = 0
    return values.to(DTYPE)


def inputs() -> torch.Tensor:
    x = torch.randn(5, HIDDEN, generator=torch.Generator().manual_seed(9))
    x[3] = 0
    return x.to(DTYPE)


def load_all(layer: torch.nn.Module, tensors: dict[str, torch.Tensor]) -> None:
    """Load as vLLM's model loader does, to the end: a padded layer that is quantized while loading is complete only then."""
    made = meta.materialize_meta_tensor

    def poisoned(tensor: torch.Tensor) -> torch.Tensor:
        tensor = made(tensor)
        tensor.data.fill_(torch.nan)
        return tensor

    poison(layer)
    with mock.patch.object(meta, "materialize_meta_tensor", poisoned):
        load(layer, tensors)
        finalize_layerwise_processing(torch.nn.ModuleList([layer]), None)
    finish(layer)


def share(rows: torch.Tensor, rank: int, world: int, padding: float) -> torch.Tensor:
    """A rank's rows of [VOCABULARY, ...], with those of the padding."""
    rest = torch.full((PADDED - VOCABULARY, *rows.shape[1:]), padding, dtype=rows.dtype)
    part = PADDED // world
    return torch.cat((rows, rest))[part * rank : part * (rank + 1)]


def expected(hadamard: int, seed: int = 0) -> torch.Tensor:
    """Logits [5, VOCABULARY] of the whole matrix."""
    codes, scale = quantize_weight(weight(seed), hadamard=hadamard)
    return int8_linear(inputs(), codes, scale, hadamard=hadamard)


def check_logits(layer: torch.nn.Module, hadamard: int, world: int, seed: int = 0) -> None:
    """What vLLM makes of the layer: gathered, without padding, and, where the model says so, capped and scaled."""
    whole = expected(hadamard, seed)
    got = LogitsProcessor(VOCABULARY)(layer, inputs())
    if got is not None:  # vLLM gathers on one rank, or on all
        assert torch.equal(got, whole)
    bounded = LogitsProcessor(VOCABULARY, scale=0.5, soft_cap=20.0)(layer, inputs())
    if bounded is not None:
        assert torch.equal(bounded, torch.tanh(whole / 20) * 20 * 0.5)
    best = LogitsProcessor(VOCABULARY).get_top_tokens(layer, inputs())
    assert torch.equal(best[:3], whole[:3].argmax(dim=-1)), "padding must win nowhere"


def check_own(rank: int, world: int) -> None:
    """Quantized while loading and from a checkpoint: rows, scales and logits of the whole matrix, and padding that is zero."""
    for hadamard, entries in ((0, {}), (BLOCK, {"hadamard": 64})):
        codes, scale = quantize_weight(weight(), hadamard=hadamard)
        for online in (True, False):
            if online:
                config, tensors = W8A8Config(hadamard="auto" if hadamard else 0, lm_head=True), {"weight": weight()}
            else:
                config = checkpoint_config(ignore=[], **entries)
                tensors = {"weight": codes, "weight_scale": scale}
            with model(tied=False):
                layer = build_head(config)
            assert type(layer.quant_method) is (lm_head.W8A8OnlineLMHeadMethod if online else lm_head.W8A8LMHeadMethod)
            load_all(layer, tensors)
            assert layer.w8a8_hadamard == hadamard
            assert torch.equal(layer.weight.data, share(codes, rank, world, 0))
            assert torch.equal(layer.weight_scale.data, share(scale, rank, world, 1))
            padded = layer.quant_method.apply(layer, inputs())
            assert padded.shape == (5, PADDED // world)
            assert (padded[:, VOCABULARY - rank * PADDED // world :] == 0).all()
            check_logits(layer, hadamard, world)


def check_tied(rank: int, world: int) -> None:
    """All ways in which a model class ties: the embedding's rows are untouched, logits come from the copy alone."""
    for way in ("tie_weights", "tie_weights, embedding without config", "embedding"):
        with model():
            config = W8A8Config(**ASKED)
            embedding = build_embedding(None if "without" in way else config)
            head = embedding if way == "embedding" else build_head(config).tie_weights(embedding)
        assert head.weight is embedding.weight
        assert [name for name, _ in embedding.named_parameters()] == ["weight"], "vLLM looks for all others in the checkpoint"
        poison(embedding)
        for seed in (0, 1):  # as when weights are loaded again
            load(embedding, {"weight": weight(seed)})
            finish(embedding)
            if head is not embedding:
                finish(head)
            check_logits(head, BLOCK, world, seed)
            tokens = torch.arange(VOCABULARY)
            assert torch.equal(embedding(tokens), weight(seed)), "rows of the embedding"
        copy = embedding.quant_method._copy
        assert torch.equal(copy.weight_scale.data, share(quantize_weight(weight(1), hadamard=BLOCK)[1], rank, world, 1))
        embedding.weight.data.fill_(torch.nan)
        check_logits(head, BLOCK, world, 1)
        embedding.weight.data.copy_(share(weight(1), rank, world, 0))
        copy.weight.data.fill_(-128)
        assert torch.equal(embedding(tokens), weight(1)), "rows of the embedding"


@pytest.mark.parametrize("check", [check_own, check_tied])
def test_one_rank(check) -> None:
    check(0, 1)


@pytest.mark.parametrize("check", [check_own, check_tied])
def test_two_ranks(check) -> None:
    run_ranks(2, check)


@pytest.mark.parametrize("kernel", ["torch", "onednn"])
@pytest.mark.parametrize("tied", [False, True])
def test_loaded_again_on_every_kernel(tied: bool, kernel: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The copy's packed form is made anew; within rounding of fp32 products, the kernels agree."""
    if kernel == "onednn" and not torch.cpu._is_vnni_supported():
        pytest.skip("needs VNNI")
    monkeypatch.setenv("VLLM_W8A8_KERNEL", kernel)
    with model(tied=tied):
        config = W8A8Config(**ASKED)
        layer = build_embedding(config) if tied else build_head(config)
    for seed in (0, 1) if tied else (0,):
        load_all(layer, {"weight": weight(seed)})
        logits = LogitsProcessor(VOCABULARY)(layer, inputs()).float()
        reference = expected(BLOCK, seed).float()
        assert (logits - reference).norm() <= 5e-3 * reference.norm()


@pytest.mark.parametrize("kernel", ["torch", "onednn"])
@pytest.mark.parametrize("way", ["own", "checkpoint", "tied"])
def test_reload(way: str, kernel: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The steps of vLLM's `reload_weights`, twice: logits of the other weights, from the addresses of before."""
    from vllm.model_executor.model_loader.reload import (
        finalize_layerwise_reload,
        initialize_layerwise_reload,
        record_metadata_for_reloading,
    )

    if kernel == "onednn" and not torch.cpu._is_vnni_supported():
        pytest.skip("needs VNNI")
    monkeypatch.setenv("VLLM_W8A8_KERNEL", kernel)

    def tensors(seed: int) -> dict[str, torch.Tensor]:
        if way == "checkpoint":
            return dict(zip(("weight", "weight_scale"), quantize_weight(weight(seed), hadamard=BLOCK), strict=True))
        return {"weight": weight(seed)}

    with model(tied=way == "tied"):
        config = checkpoint_config(ignore=[], hadamard=64) if way == "checkpoint" else W8A8Config(**ASKED)
        whole = torch.nn.Module()
        if way == "tied":
            whole.embed_tokens = build_embedding(config)
        whole.lm_head = build_head(config)
        if way == "tied":
            whole.lm_head = whole.lm_head.tie_weights(whole.embed_tokens)
    record_metadata_for_reloading(whole)
    loaded = whole.embed_tokens if way == "tied" else whole.lm_head
    load_all(loaded, tensors(0))
    held = loaded.quant_method._copy if way == "tied" else loaded
    before = {name: p.data_ptr() for name, p in [*whole.named_parameters(), *held.named_parameters()]}
    packed = held.packed_weight
    for seed in (1, 2):
        initialize_layerwise_reload(whole)
        load(loaded, tensors(seed))
        finalize_layerwise_reload(whole, None)
        assert {name: p.data_ptr() for name, p in [*whole.named_parameters(), *held.named_parameters()]} == before
        assert held.packed_weight is packed
        codes, scale = quantize_weight(weight(seed), hadamard=BLOCK)
        assert torch.equal(held.weight.data, share(codes, 0, 1, 0))
        assert torch.equal(held.weight_scale.data, share(scale, 0, 1, 1))
        logits, whole_matrix = LogitsProcessor(VOCABULARY)(whole.lm_head, inputs()).float(), expected(BLOCK, seed).float()
        assert (logits - whole_matrix).norm() <= (5e-3 if kernel == "onednn" else 0) * whole_matrix.norm()
        if way == "tied":
            assert whole.lm_head.weight is loaded.weight
            assert torch.equal(loaded(torch.arange(VOCABULARY)), weight(seed))


@pytest.mark.parametrize("online", [True, False])
def test_bias(online: bool) -> None:
    codes, scale = quantize_weight(weight(), hadamard=BLOCK)
    bias = torch.linspace(-3, 3, VOCABULARY).to(DTYPE)
    with model(tied=False):
        layer = build_head(W8A8Config(**ASKED) if online else checkpoint_config(ignore=[], hadamard=64), bias=True)
    tensors = {"weight": weight()} if online else {"weight": codes, "weight_scale": scale}
    load_all(layer, tensors | {"bias": bias})
    logits = LogitsProcessor(VOCABULARY)(layer, inputs(), layer.bias)
    assert torch.equal(logits, int8_linear(inputs(), codes, scale, bias, hadamard=BLOCK))
    assert torch.equal(logits[3], bias), "a row of zeros"


def test_tied_lm_head_keeps_its_bias() -> None:
    with model():
        config = W8A8Config(**ASKED)
        embedding = build_embedding(config)
        head = build_head(config, bias=True).tie_weights(embedding)
    load(embedding, {"weight": weight()})
    load(head, {"bias": torch.ones(VOCABULARY, dtype=DTYPE)})
    finish(embedding)
    assert torch.equal(LogitsProcessor(VOCABULARY)(head, inputs(), head.bias)[3], torch.ones(VOCABULARY, dtype=DTYPE))


def methods(config: W8A8Config, **changes) -> tuple[type | None, type | None]:
    """Methods of ours for the lm_head and for the embedding."""
    with model(**changes):
        layers = build_head(config), build_embedding(config)
    ours = [type(layer.quant_method) for layer in layers]
    return tuple(None if method is UnquantizedEmbeddingMethod else method for method in ours)


def test_only_when_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    nothing = None, None
    both = lm_head.W8A8OnlineLMHeadMethod, lm_head.W8A8TiedEmbeddingMethod
    assert methods(W8A8Config()) == methods(checkpoint_config()) == nothing
    assert methods(checkpoint_config(lm_head=True)) == methods(W8A8Config(lm_head=True)) == both
    assert methods(W8A8Config(lm_head=True), tied=False) == (both[0], None)
    assert methods(W8A8Config(lm_head=True), runner_type="pooling", head_dtype=torch.float32) == nothing
    monkeypatch.setenv("VLLM_W8A8_LM_HEAD", "0")
    assert methods(checkpoint_config(lm_head=True)) == nothing
    monkeypatch.setenv("VLLM_W8A8_LM_HEAD", "1")
    assert methods(W8A8Config()) == methods(checkpoint_config()) == both
    assert methods(W8A8Config.from_config(COMPRESSED_TENSORS)) == both


def test_embeddings_of_another_size_give_no_logits() -> None:
    with model():
        assert type(build_embedding(W8A8Config(lm_head=True), size=64).quant_method) is UnquantizedEmbeddingMethod


def test_no_copy_beside_an_lm_head_of_its_own() -> None:
    """A config that says tied where the model class is not."""
    with model():
        config = W8A8Config(**ASKED)
        embedding, head = build_embedding(config), build_head(config)
    for layer in (head, embedding):
        load_all(layer, {"weight": weight()})
    check_logits(head, BLOCK, 1)
    assert embedding.quant_method._copy.weight is None
    assert torch.equal(embedding.quant_method.apply(embedding, inputs()), inputs() @ embedding.weight.T)


def test_draft_model_with_an_lm_head_of_its_own_changes_nothing() -> None:
    """It has the same quantization config, and is built when the weights of its target are there."""
    with model():
        config = W8A8Config(**ASKED)
        embedding = build_embedding(config)
        load_all(embedding, {"weight": weight()})
        build_head(config)
    check_logits(embedding, BLOCK, 1)
    load_all(embedding, {"weight": weight(1)})
    check_logits(embedding, BLOCK, 1, seed=1)


@pytest.mark.parametrize(
    ("ignore", "hint"),
    [(["lm_haed"], "does not name lm_head (it has 'lm_haed': is that a misspelling?)"), ([], "does not name lm_head. ")],
)
def test_ignore_that_misses_a_tied_lm_head(ignore: list[str], hint: str) -> None:
    with model():
        config = checkpoint_config(ignore=ignore)
        with pytest.raises(ValueError, match="lm_head: the model ties it to the embedding") as error:
            build_head(config).tie_weights(build_embedding(config))
    assert hint in str(error.value)


@pytest.mark.parametrize("entry", ["lm_head", "*_head", "re:.*head"])
def test_asked_for_and_skipped(entry: str) -> None:
    message = f"VLLM_W8A8_LM_HEAD=1 asks for an int8 lm_head, but VLLM_W8A8_SKIP_MODULES has {entry!r}, which"
    with model(), pytest.raises(ValueError, match=re.escape(message)):
        build_head(W8A8Config(skip=["o_proj", entry], lm_head=True))


@pytest.mark.parametrize("build", [build_head, build_embedding])
def test_logits_in_another_dtype(build) -> None:
    with model(head_dtype=torch.float32), pytest.raises(ValueError, match=r"head_dtype asks for torch\.float32"):
        build(W8A8Config(lm_head=True))


@pytest.mark.parametrize("entries", [NATIVE, COMPRESSED_TENSORS], ids=["native", "compressed-tensors"])
def test_entry_that_is_neither_true_nor_false(entries: dict) -> None:
    with pytest.raises(ValueError, match="lm_head = 'yes', expected true or false"):
        W8A8Config.from_config(entries | {"lm_head": "yes"})


def test_bad_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_W8A8_LM_HEAD", "maybe")
    with pytest.raises(ValueError, match="VLLM_W8A8_LM_HEAD='maybe': expected 1 or 0"):
        W8A8Config()


@pytest.mark.parametrize(
    ("checkpoint", "enable", "warned"), [(None, "", True), (FP8, "1", True), (None, "1", False), (NATIVE, "", False)]
)
def test_says_once_that_it_has_no_effect(
    checkpoint: dict | None, enable: str, warned: bool, said: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a model that is not served in W8A8, and which is served as without the variable."""
    from vllm.engine.arg_utils import EngineArgs

    from vllm_w8a8_plugin import register

    monkeypatch.setenv("VLLM_W8A8_ENABLE", enable)
    arguments = EngineArgs(model=str(model_folder(tmp_path, checkpoint)), skip_tokenizer_init=True)
    configs = []
    for value in ("0", "1", "1", "perhaps"):  # a bad value is refused where W8A8 is asked for
        monkeypatch.setenv("VLLM_W8A8_LM_HEAD", value)
        register()
        configs.append(arguments.create_model_config())
    assert len({config.compute_hash() for config in configs}) == 1
    assert len({config.quantization for config in configs}) == 1
    served = "fp8" if checkpoint is FP8 else "None"
    assert [line for line in said if "no effect" in line] == (
        [
            f"WARNING VLLM_W8A8_LM_HEAD=1 has no effect on {tmp_path}, which is not served in W8A8 (its quantization is "
            f"{served}): --quantization w8a8 or VLLM_W8A8_ENABLE=1 asks for that"
        ]
        if warned
        else []
    )


def test_memory_is_said_once(said: list[str]) -> None:
    for tied in (True, True, False, False):
        with model(tied=tied):
            config = W8A8Config(**ASKED)
            layer = build_embedding(config) if tied else build_head(config)
        load_all(layer, {"weight": weight()})
    # 128 rows of 96 codes and a scale; of 96 bf16 values.
    assert [line for line in said if "lm_head is int8" in line] == [
        "INFO W8A8: lm_head is int8, a copy of 0.0 MB on each rank beside the embedding to which it is tied, whose rows stay "
        "bfloat16 (0.0 MB)",
        "INFO W8A8: lm_head is int8, 0.0 MB on each rank instead of 0.0 MB",
    ]
    assert lm_head._megabytes(1000, 500, 1) == "0.5 MB"
    assert lm_head._megabytes(100_000, 1000, 1) == "100.4 MB"
    assert lm_head._megabytes(100_000, 1000, 2) == "200.0 MB"


@pytest.mark.parametrize("has_head", [True, False])
def test_warns_where_the_model_class_offers_nothing(has_head: bool, said: list[str]) -> None:
    """As where logits come from an embedding that is built without a quantization config."""
    with model():
        config = W8A8Config(hadamard=0, lm_head=True)
        if has_head:
            build_head(config)
        build_embedding(None)
        layer = ReplicatedLinear(32, 32, bias=False, params_dtype=DTYPE, quant_config=config, prefix="model.layers.0.o_proj")
        load_all(layer, {"weight": torch.ones(32, 32, dtype=DTYPE)})
    warning = "WARNING VLLM_W8A8_LM_HEAD: lm_head stays unquantized, as this model class offers neither"
    assert any(line.startswith(warning) for line in said) != has_head


@pytest.mark.parametrize("way", ["own", "checkpoint", "tied"])
def test_compiles_what_logits_reach(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Up to the largest batch, for prompt_logprobs; no fused quantizers. Nothing is waited for that never comes."""
    made = []
    fresh = warmup.Warmup()
    monkeypatch.setattr(warmup, "warm_up_linear", lambda *args, **kwargs: made.append((args, kwargs)))
    monkeypatch.setattr(warmup, "compiles_on", lambda device: True)
    monkeypatch.setattr(warmup, "_fuses", lambda vllm_config: True)
    monkeypatch.setattr(linear, "WARMUP", fresh)
    monkeypatch.setattr(lm_head, "WARMUP", fresh)
    monkeypatch.setattr(get_current_vllm_config().scheduler_config, "max_num_batched_tokens", 1500)
    codes, scale = quantize_weight(weight(), hadamard=BLOCK)
    with model(tied=way == "tied"):
        config = checkpoint_config(ignore=[], hadamard=64) if way == "checkpoint" else W8A8Config(**ASKED)
        layer = build_embedding(config) if way == "tied" else build_head(config)
        if way == "tied":
            head = build_head(config).tie_weights(layer)  # kept: what is gone is not waited for
    load_all(layer, {"weight": codes, "weight_scale": scale} if way == "checkpoint" else {"weight": weight()})
    ((args, kwargs),) = made
    assert [tuple(tensor.shape) for tensor in args[:2]] == [(PADDED, HIDDEN), (PADDED, 1)]
    assert args[2:] == (None, 2048, DTYPE)
    assert kwargs == {"fused": False, "hadamard": BLOCK, "shared_amax": False}
    assert not fresh._waiting
    assert way != "tied" or head.weight is layer.weight
