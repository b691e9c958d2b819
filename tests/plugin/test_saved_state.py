"""States that vLLM saves and loads by itself: an lm_head of its own or tied, and options that do not fit a state."""

import contextlib
import re
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from checkpoints import NATIVE
from layers import finish, free_port, load, tensor_parallel

pytest.importorskip("vllm", reason="vLLM is not installed: `make test` installs it")
from vllm.config import get_current_vllm_config
from vllm.model_executor.layers.linear import RowParallelLinear
from vllm.model_executor.layers.logits_processor import LogitsProcessor
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding
from vllm.model_executor.model_loader.reload.layerwise import finalize_layerwise_processing
from vllm.model_executor.model_loader.sharded_state_loader import ShardedStateLoader

from vllm_w8a8_plugin import envs
from vllm_w8a8_plugin.config import W8A8Config
from vllm_w8a8_plugin.saved_state import check_layers

VOCABULARY, HIDDEN = 100, 96
DTYPE = torch.bfloat16
O_PROJ, DOWN_PROJ = "model.layers.0.self_attn.o_proj", "model.layers.0.mlp.down_proj"


@pytest.fixture(scope="module", autouse=True)
def one_rank() -> Iterator[None]:
    """vLLM's layers can be built."""
    with tensor_parallel(0, 1, free_port()):
        yield


@pytest.fixture(autouse=True)
def no_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in envs.VARIABLES:
        monkeypatch.delenv(variable.name, raising=False)
    monkeypatch.setenv("VLLM_W8A8_KERNEL", "torch")


class Model(torch.nn.Module):
    """An embedding, two linear layers and an lm_head, under the names that vLLM gives them."""

    def __init__(self, config: W8A8Config, tied: bool) -> None:
        super().__init__()
        kwargs = {"params_dtype": DTYPE, "quant_config": config}
        layer = torch.nn.Module()
        layer.self_attn, layer.mlp = torch.nn.Module(), torch.nn.Module()
        layer.self_attn.o_proj = RowParallelLinear(HIDDEN, HIDDEN, bias=False, prefix=O_PROJ, **kwargs)
        layer.mlp.down_proj = RowParallelLinear(HIDDEN, HIDDEN, bias=False, prefix=DOWN_PROJ, **kwargs)
        self.model = torch.nn.Module()
        self.model.embed_tokens = VocabParallelEmbedding(VOCABULARY, HIDDEN, prefix="model.embed_tokens", **kwargs)
        self.model.layers = torch.nn.ModuleList([layer])
        self.lm_head = ParallelLMHead(VOCABULARY, HIDDEN, prefix="lm_head", **kwargs)
        if tied:
            self.lm_head = self.lm_head.tie_weights(self.model.embed_tokens)

    def finish(self) -> None:
        finalize_layerwise_processing(self, None)
        for module in self.modules():
            if hasattr(module, "quant_method"):
                finish(module)


@contextlib.contextmanager
def served(tied: bool, load_format: str = "auto") -> Iterator[None]:
    """The model that is built is one with such a config."""
    text = SimpleNamespace(vocab_size=VOCABULARY, hidden_size=HIDDEN, tie_word_embeddings=tied)
    config = {"hf_config": text, "hf_text_config": text, "runner_type": "generate", "dtype": DTYPE, "head_dtype": DTYPE}
    vllm_config = get_current_vllm_config()
    before = vllm_config.model_config, vllm_config.load_config.load_format
    object.__setattr__(vllm_config, "model_config", SimpleNamespace(**config))
    vllm_config.load_config.load_format = load_format
    try:
        yield
    finally:
        object.__setattr__(vllm_config, "model_config", before[0])
        vllm_config.load_config.load_format = before[1]


def weight(rows: int, seed: int) -> torch.Tensor:
    return torch.randn(rows, HIDDEN, generator=torch.Generator().manual_seed(seed)).to(DTYPE)


def quantized_while_loading(tied: bool, **options) -> Model:
    with served(tied):
        model = Model(W8A8Config(**options), tied)
        load(model.model.layers[0].self_attn.o_proj, {"weight": weight(HIDDEN, 0)})
        load(model.model.layers[0].mlp.down_proj, {"weight": weight(HIDDEN, 1)})
        load(model.model.embed_tokens, {"weight": weight(VOCABULARY, 2)})
        if not tied:
            load(model.lm_head, {"weight": weight(VOCABULARY, 3)})
        model.finish()
    return model


def from_state(folder: Path, tied: bool, config: W8A8Config | None = None, **options) -> Model:
    with served(tied, "sharded_state"):
        model = Model(config or W8A8Config(**options), tied)
        loader = ShardedStateLoader(get_current_vllm_config().load_config)
        loader.load_weights(model, SimpleNamespace(model=str(folder), model_weights=None))
        model.finish()
    return model


def logits(model: Model) -> torch.Tensor:
    x = torch.randn(5, HIDDEN, generator=torch.Generator().manual_seed(9)).to(DTYPE)
    for layer in (model.model.layers[0].self_attn.o_proj, model.model.layers[0].mlp.down_proj):
        x, _ = layer(x)
    return LogitsProcessor(VOCABULARY)(model.lm_head, x)


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("lm_head", [True, False])
def test_round_trip(tied: bool, lm_head: bool, tmp_path: Path) -> None:
    """A tied lm_head's int8 copy is in no state: it is made of the embedding again."""
    model = quantized_while_loading(tied, lm_head=lm_head)
    ShardedStateLoader.save_model(model, str(tmp_path))
    again = from_state(tmp_path, tied, lm_head=lm_head)
    assert torch.equal(logits(again), logits(model))
    tokens = torch.arange(VOCABULARY)
    assert torch.equal(again.model.embed_tokens(tokens), model.model.embed_tokens(tokens))


@pytest.mark.parametrize("lm_head", [True, False])
def test_state_of_a_tied_model_fits_an_lm_head_of_either_kind(lm_head: bool, tmp_path: Path) -> None:
    ShardedStateLoader.save_model(quantized_while_loading(True, lm_head=not lm_head), str(tmp_path))
    again = from_state(tmp_path, True, lm_head=lm_head)
    assert torch.equal(logits(again), logits(quantized_while_loading(True, lm_head=lm_head)))


REMEDY = (
    r"\. Load it with the VLLM_W8A8_LM_HEAD, the VLLM_W8A8_SKIP_MODULES and the config\.json of the model that was saved, or "
    "save it again with these$"
)


@pytest.mark.parametrize(
    ("saved", "loaded", "message"),
    [
        ({"lm_head": True}, {}, "it holds lm_head in int8, which the options leave unquantized"),
        ({}, {"lm_head": True}, "it does not hold lm_head in int8, which the options quantize"),
        ({}, {"skip": ["o_proj"]}, f"it holds {O_PROJ} in int8, which the options leave unquantized"),
        ({"skip": ["layers.0"]}, {}, f"it does not hold {DOWN_PROJ}, {O_PROJ} in int8, which the options quantize"),
        ({}, {"skip": ["layers.0"]}, f"it holds {DOWN_PROJ}, {O_PROJ} in int8, which the options leave unquantized"),
        (
            {"skip": ["o_proj"]},
            {"skip": ["down_proj"]},
            f"it holds {DOWN_PROJ} in int8, which the options leave unquantized; it does not hold {O_PROJ} in int8, which",
        ),
    ],
)
def test_options_that_do_not_fit(saved: dict, loaded: dict, message: str, tmp_path: Path) -> None:
    ShardedStateLoader.save_model(quantized_while_loading(False, **saved), str(tmp_path))
    with pytest.raises(ValueError, match=f"the saved state does not fit .*{re.escape(message)}.*{REMEDY}"):
        from_state(tmp_path, False, **loaded)
    if "skip" not in saved:  # vLLM's CPU build keeps unquantized weights in another form, and saves none of them
        from_state(tmp_path, False, **saved)


def test_checkpoint_that_ignores_another_layer(tmp_path: Path) -> None:
    ShardedStateLoader.save_model(quantized_while_loading(False, hadamard=0), str(tmp_path))
    from_state(tmp_path, False, W8A8Config.from_config(NATIVE))
    with pytest.raises(ValueError, match=f"it holds {O_PROJ} in int8, which the options leave unquantized"):
        from_state(tmp_path, False, W8A8Config.from_config(NATIVE | {"ignore": ["lm_head", "o_proj"]}))


def test_other_blocks(tmp_path: Path) -> None:
    ShardedStateLoader.save_model(quantized_while_loading(False, hadamard=32), str(tmp_path))
    with pytest.raises(
        ValueError, match=r"the saved state has Hadamard blocks \[32\].* built with \[0\].* VLLM_W8A8_HADAMARD"
    ):
        from_state(tmp_path, False, hadamard=0)


def test_names_the_first_of_many_layers() -> None:
    names = [f"model.layers.{i}.o_proj.w8a8_block" for i in range(9)]
    with pytest.raises(
        ValueError, match=r"does not hold model\.layers\.0\.o_proj, .*, model\.layers\.2\.o_proj and 6 more in"
    ):
        check_layers([], names)
    check_layers(names, [*names, "model.norm.weight"])
