"""The compile pass: what it folds into the quantizer, what it leaves alone, and what it computes."""

import contextlib
import copy
import logging
import operator
import pickle
from collections import Counter
from collections.abc import Callable, Iterator

import pytest
import torch

pytest.importorskip("vllm", reason="vLLM is not installed: `make test` installs it")
from layers import free_port, tensor_parallel
from torch._dynamo.utils import detect_fake_mode
from torch._inductor.compile_fx import compile_fx
from torch._inductor.fx_passes.post_grad import post_grad_passes
from torch._inductor.virtualized import V
from vllm import ir
from vllm.compilation.passes.inductor_pass import CallableInductorPass, pass_context
from vllm.compilation.passes.ir.inplace_functionalization import VllmIRInplaceFunctionalizationPass
from vllm.compilation.passes.pass_manager import PostGradPassManager
from vllm.config import CompilationConfig, DeviceConfig, VllmConfig, get_current_vllm_config, set_current_vllm_config
from vllm.config.utils import Range
from vllm.model_executor.layers.activation import SiluAndMul
from vllm.model_executor.layers.layernorm import GemmaRMSNorm, RMSNorm
from vllm.model_executor.layers.linear import ReplicatedLinear
from vllm.platforms import current_platform

from vllm_w8a8_plugin import compat, fusion, log
from vllm_w8a8_plugin.config import W8A8Config
from w8a8_kernels import int8_linear, quantize_amax
from w8a8_kernels.quantize.reference import quantize_reference, rms_norm_reference, silu_mul_reference

HIDDEN, INTERMEDIATE, EPS = 64, 96, 1e-5
FUSED = {op: getattr(torch.ops.w8a8, op).default for op in ("rms_norm_quantize", "add_rms_norm_quantize", "silu_mul_quantize")}

# How the norms stand in the graph: as nodes of vLLM's IR (GPU), or as plain torch operations (the CPU build's engines).
FORMS = ["ir", "plain"]


class RecordingPass(fusion.FusionPass):
    """Counts the operations of the graph that the pass leaves."""

    def __call__(self, graph: torch.fx.Graph) -> None:
        super().__call__(graph)
        self.counts = Counter(node.target for node in graph.nodes)

    def fused(self) -> dict[str, int]:
        counts = {op: self.counts[target] for op, target in FUSED.items()}
        return {op: count for op, count in counts.items() if count}

    def norms(self) -> int:
        plain = self.counts[torch.ops.aten.rsqrt.default]
        return plain + self.counts[ir.ops.rms_norm.torch_op] + self.counts[ir.ops.fused_add_rms_norm.torch_op]

    def quantizers(self) -> int:
        return self.counts[fusion.QUANTIZE]


@pytest.fixture(autouse=True)
def vllm_config(monkeypatch: pytest.MonkeyPatch) -> Iterator[VllmConfig]:
    monkeypatch.delenv("VLLM_W8A8_FUSION", raising=False)
    monkeypatch.setattr(log, "_said", set())
    current_platform.import_kernels()
    config = VllmConfig(device_config=DeviceConfig("cpu"), compilation_config=CompilationConfig(custom_ops=["none"]))
    with set_current_vllm_config(config), torch._inductor.config.patch(fx_graph_cache=False):
        yield config


@contextlib.contextmanager
def form_of_norms(form: str) -> Iterator[None]:
    with ir.enable_torch_wrap(form == "ir"):
        yield


def compile_with(recording: fusion.FusionPass, form: str, forward: Callable) -> Callable:
    """`forward` through all of Inductor's passes, the pass where vLLM puts it for norms of that form.

    The graph that comes out of the passes runs as it is: generating code for it would take seconds and decide nothing.
    """
    torch._dynamo.reset()
    config = get_current_vllm_config()
    if form == "ir":
        manager = PostGradPassManager()
        manager.configure(config)
        manager.add(recording)
        passes = {
            current_platform.pass_key: manager,
            "pre_grad_custom_pass": VllmIRInplaceFunctionalizationPass(config),
        }
    else:
        passes = {"joint_custom_pre_pass": recording}

    def run_passes(graph_module: torch.fx.GraphModule, inputs: list, **_) -> Callable:
        with V.set_fake_mode(detect_fake_mode(inputs)):
            post_grad_passes(graph_module, is_inference=True)
        graph_module.recompile()
        return graph_module.forward

    def backend(graph_module: torch.fx.GraphModule, inputs: list) -> Callable:
        patches = {**passes, "enable_auto_functionalized_v2": False}
        return compile_fx(graph_module, inputs, inner_compile=run_passes, config_patches=patches)

    return torch.compile(forward, fullgraph=True, dynamic=False, backend=backend)


def run(form: str, forward: Callable, x: torch.Tensor) -> tuple[RecordingPass, list]:
    """What the pass did to `forward`, and the compiled function's results."""
    recording = RecordingPass()
    with form_of_norms(form), pass_context(Range(1, 1024)), torch.no_grad():
        compiled = compile_with(recording, form, forward)
        return recording, compiled(x)


def weight(n: int, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    return quantize_reference(torch.randn(n, k) / k**0.5)


def norm(cls: type = RMSNorm, size: int = HIDDEN, dtype: torch.dtype = torch.bfloat16, eps: float = EPS, **options):
    module = cls(size, eps, **options)
    module.weight.data = torch.randn(size).to(dtype)
    return module


def rows(m: int = 7, k: int = HIDDEN, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    x = torch.randn(m, k).to(dtype)
    torch._dynamo.mark_dynamic(x, 0)
    return x


class DecoderLayer:
    """Attention replaced by its first projection; the last norm stands for the next layer's."""

    def __init__(
        self, cls: type, dtype: torch.dtype, activation: bool, blocks: tuple[int, int, int, int] = (0, 0, 0, 0)
    ) -> None:
        torch.manual_seed(0)
        self.blocks = blocks
        self.norms = [norm(cls, dtype=dtype, eps=eps) for eps in (1e-5, 1e-6, 3e-4)]
        self.offset = 1.0 if cls is GemmaRMSNorm else 0.0
        self.activation = SiluAndMul() if activation else lambda x: x[..., :INTERMEDIATE]
        self.qkv, self.gate_up = weight(HIDDEN, HIDDEN), weight(2 * INTERMEDIATE, HIDDEN)
        self.down, self.next = weight(HIDDEN, INTERMEDIATE), weight(HIDDEN, HIDDEN)

    def __call__(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        first, second, third = self.norms
        qkv, gate_up, down, last = self.blocks
        h = int8_linear(first(x), *self.qkv, hadamard=qkv)
        h, residual = second(h, x)
        h = int8_linear(self.activation(int8_linear(h, *self.gate_up, hadamard=gate_up)), *self.down, hadamard=down)
        h, residual = third(h, residual)
        return int8_linear(h, *self.next, hadamard=last), residual

    def expected(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        def normed(i: int, h: torch.Tensor) -> torch.Tensor:
            return rms_norm_reference(h, self.norms[i].weight.data, self.norms[i].variance_epsilon, self.offset)

        qkv, gate_up, down, last = self.blocks
        residual = x + int8_linear(normed(0, x), *self.qkv, hadamard=qkv)
        h = int8_linear(normed(1, residual), *self.gate_up, hadamard=gate_up)
        h = silu_mul_reference(h) if isinstance(self.activation, SiluAndMul) else self.activation(h)
        residual = int8_linear(h, *self.down, hadamard=down) + residual
        return int8_linear(normed(2, residual), *self.next, hadamard=last), residual


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("blocks", [(0, 0, 0, 0), (64, 64, 32, 64), (16, 0, 32, 64)], ids=["", "blocks", "many blocks"])
@pytest.mark.parametrize(
    ("cls", "dtype"),
    [(RMSNorm, torch.bfloat16), (RMSNorm, torch.float16), (RMSNorm, torch.float32), (GemmaRMSNorm, torch.bfloat16)],
    ids=["bf16", "fp16", "fp32", "gemma"],
)
def test_decoder_layer(form: str, cls: type, dtype: torch.dtype, blocks: tuple[int, int, int, int]) -> None:
    """Everything is fused, and computes the reference's bits whatever the number of rows and the quantizers' blocks."""
    layer = DecoderLayer(cls, dtype, activation=True, blocks=blocks)
    recording = RecordingPass()
    with form_of_norms(form), pass_context(Range(1, 1024)), torch.no_grad():
        compiled = compile_with(recording, form, layer)
        for m in (7, 12):
            x = rows(m, dtype=dtype)
            for got, wanted in zip(compiled(x), layer.expected(x), strict=True):
                assert torch.equal(got, wanted)
    assert recording.fused() == {"rms_norm_quantize": 1, "add_rms_norm_quantize": 2, "silu_mul_quantize": 1}
    assert recording.quantizers() == recording.norms() == 0


@pytest.mark.parametrize("form", FORMS)
def test_near_the_graph_without_the_pass(form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not equal: vLLM's norm in plain torch rounds in more places than its compiled op, whose rounding the fused ops have."""
    layer = DecoderLayer(RMSNorm, torch.bfloat16, activation=True)
    x = rows(64)
    _, fused = run(form, layer, x)
    monkeypatch.setattr(fusion, "fuse", lambda graph: None)
    recording, unfused = run(form, layer, x)
    assert recording.fused() == {}
    assert recording.quantizers() == 4
    for a, b in zip(fused, unfused, strict=True):
        assert (a - b).norm() <= 2e-2 * b.norm()


@pytest.mark.parametrize("form", FORMS)
def test_readers_share_a_quantizer(form: str) -> None:
    first, a, b = norm(), weight(48, HIDDEN), weight(32, HIDDEN)

    def forward(x):
        h = first(x)
        return int8_linear(h, *a), int8_linear(h, *b)

    x = rows()
    recording, results = run(form, forward, x)
    assert recording.fused() == {"rms_norm_quantize": 1}
    assert recording.quantizers() == 0
    h = rms_norm_reference(x, first.weight.data, EPS)
    for got, w in zip(results, (a, b), strict=True):
        assert torch.equal(got, int8_linear(h, *w))


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("residual", [False, True], ids=["", "residual"])
def test_readers_of_other_blocks_keep_their_quantizers(form: str, residual: bool) -> None:
    """One kernel cannot quantize with two blocks: the norm stays, and readers of one block share its quantizer."""
    first, layers = norm(), [weight(48, HIDDEN), weight(32, HIDDEN), weight(16, HIDDEN)]
    blocks = (64, 16, 64)

    def forward(x):
        h = first(x, 2 * x)[0] if residual else first(x)
        return [int8_linear(h, *layer, hadamard=block) for layer, block in zip(layers, blocks, strict=True)]

    x = rows()
    recording, results = run(form, forward, x)
    assert recording.fused() == {}
    assert (recording.norms(), recording.quantizers()) == (1, 2)
    h = first(x, 2 * x)[0] if residual else first(x)
    for got, layer, block in zip(results, layers, blocks, strict=True):
        wanted = int8_linear(h, *layer, hadamard=block)
        assert (got - wanted).norm() <= 2e-2 * wanted.norm()


def codes_of_norm(form: str, first: torch.nn.Module, block: int, x: torch.Tensor) -> tuple[dict[str, int], list]:
    recording, results = run(form, lambda x: torch.ops.w8a8.quantize(first(x), block), x)
    return recording.fused(), results


@pytest.mark.parametrize("block", [0, 16, 32, 64])
def test_same_codes_with_and_without_the_pass(block: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """In fp32, where vLLM's norm and the fused op round in the same places but for the order of one sum."""
    first, x = norm(dtype=torch.float32), rows(dtype=torch.float32)
    fused, (codes, scale) = codes_of_norm("ir", first, block, x)
    assert fused == {"rms_norm_quantize": 1}
    monkeypatch.setattr(fusion, "fuse", lambda graph: None)
    unfused, (other_codes, other_scale) = codes_of_norm("ir", first, block, x)
    assert unfused == {}
    assert torch.allclose(scale, other_scale, rtol=1e-6)
    assert (codes != other_codes).double().mean() <= 1e-2
    assert (codes.int() - other_codes.int()).abs().max() <= 1


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("residual", [False, True], ids=["", "residual"])
def test_left_alone_if_read_in_floating_point(form: str, residual: bool) -> None:
    """As in a mixture of experts: the router reads the norm, too. The norm is computed once, and quantized once."""
    first, a, b = norm(), weight(48, HIDDEN), weight(32, HIDDEN)
    router = torch.randn(HIDDEN, 4).bfloat16()

    def forward(x):
        h = first(x, 2 * x)[0] if residual else first(x)
        return int8_linear(h, *a), h @ router, int8_linear(h, *b)

    recording, _ = run(form, forward, rows())
    assert recording.fused() == {}
    assert recording.norms() == recording.quantizers() == 1


@pytest.mark.parametrize("form", FORMS)
def test_query_and_key_norms_stay(form: str) -> None:
    first, query_norm, qkv, out = norm(), norm(size=16), weight(2 * HIDDEN, HIDDEN), weight(HIDDEN, HIDDEN)

    def forward(x):
        q, k = int8_linear(first(x), *qkv).split(HIDDEN, dim=-1)
        q = query_norm(q.reshape(-1, 4, 16))
        return int8_linear((q + k.reshape(-1, 4, 16)).reshape(-1, HIDDEN), *out)

    recording, _ = run(form, forward, rows())
    assert recording.fused() == {"rms_norm_quantize": 1}
    assert recording.norms() == recording.quantizers() == 1


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(
    "odd",
    [
        lambda: norm(var_hidden_size=32),
        lambda: norm(dtype=torch.float32),
    ],
    ids=["variance of a part", "weight of another dtype"],
)
def test_unusual_norms_stay(form: str, odd: Callable) -> None:
    first, a = odd(), weight(48, HIDDEN)
    recording, _ = run(form, lambda x: int8_linear(first(x), *a), rows())
    assert recording.fused() == {}
    assert recording.norms() == recording.quantizers() == 1


@pytest.mark.parametrize("form", FORMS)
def test_compiled_op_of_silu_and_mul(form: str) -> None:
    """The form that `custom_ops` with +silu_and_mul gives on a GPU."""
    down = weight(HIDDEN, INTERMEDIATE)

    def forward(x):
        out = torch.empty((x.shape[0], INTERMEDIATE), dtype=x.dtype, device=x.device)
        torch.ops._C.silu_and_mul(out, x)
        return int8_linear(out, *down)

    x = rows(k=2 * INTERMEDIATE)
    recording, got = run(form, forward, x)
    assert recording.fused() == {"silu_mul_quantize": 1}
    assert recording.quantizers() == 0
    assert torch.equal(got, int8_linear(silu_mul_reference(x), *down))


@pytest.mark.parametrize("form", FORMS)
def test_activation_stays_where_the_maximum_comes_from_outside(form: str) -> None:
    """As with tp_consistent_activations: codes wait for a maximum that needs the activation's result."""
    down, activation = weight(HIDDEN, INTERMEDIATE), SiluAndMul()

    def forward(x):
        h = activation(x)
        return int8_linear(h, *down, amax=4 * quantize_amax(h))

    x = rows(k=2 * INTERMEDIATE, dtype=torch.float32)
    recording, got = run(form, forward, x)
    assert recording.fused() == {}
    assert recording.counts[torch.ops.w8a8.quantize_with_amax.default] == 1
    wanted, by_own = forward(x), int8_linear(activation(x), *down)
    assert (got - wanted).norm() <= 1e-3 * wanted.norm() < 0.1 * (by_own - wanted).norm()


@pytest.mark.parametrize("form", FORMS)
def test_graph_that_begins_with_the_quantizer(form: str) -> None:
    """As behind an attention op at which vLLM split the model."""
    a = weight(48, HIDDEN)
    recording, _ = run(form, lambda x: int8_linear(x, *a), rows())
    assert recording.fused() == {}
    assert recording.quantizers() == 1


def test_says_how_many(monkeypatch: pytest.MonkeyPatch) -> None:
    said = []
    monkeypatch.setattr(log, "logger", logging.Logger("w8a8", logging.INFO))
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())
    log.logger.addHandler(handler)
    for _ in range(2):
        run("ir", DecoderLayer(RMSNorm, torch.bfloat16, activation=False), rows())
    assert said == ["folded 3 RMSNorm and 0 SiluAndMul into the quantizer in a compiled graph, 1 quantizers stay"]


def installed(config: VllmConfig) -> dict:
    return {k: v for k, v in config.compilation_config.inductor_compile_config.items() if isinstance(v, fusion.FusionPass)}


@pytest.mark.parametrize(("wrap", "key"), [(True, current_platform.pass_key), (False, "joint_custom_pre_pass")])
def test_installed_while_the_model_is_built(wrap: bool, key: str) -> None:
    with tensor_parallel(0, 1, free_port()):
        config = get_current_vllm_config()
        config.compilation_config.ir_enable_torch_wrap = wrap
        ReplicatedLinear(32, 32, quant_config=W8A8Config(skip=["lm_head"]), prefix="lm_head")
        assert installed(config) == {}, "a layer that is not quantized needs no pass"
        for i in range(2):
            ReplicatedLinear(32, 32, quant_config=W8A8Config(), prefix=f"layers.{i}.q_proj")
        assert list(installed(config)) == [key]
        assert installed(config)[key].before is None


def test_vllm_takes_the_pass(vllm_config: VllmConfig) -> None:
    """vLLM's backend, set up after the model's layers, runs it behind its own passes."""
    from vllm.compilation.backends import VllmBackend

    vllm_config.compilation_config.ir_enable_torch_wrap = True
    fusion.install(vllm_config)
    backend = VllmBackend(vllm_config)
    backend.configure_post_pass()
    assert isinstance(backend.pass_manager.passes[-1], fusion.FusionPass)


def test_runs_behind_the_pass_of_the_user(vllm_config: VllmConfig) -> None:
    graphs = []
    theirs = CallableInductorPass(graphs.append, uuid="theirs")
    key = "joint_custom_pre_pass"
    vllm_config.compilation_config.inductor_compile_config[key] = theirs
    fusion.install(vllm_config)
    ours = installed(vllm_config)[key]
    assert ours.before is theirs
    assert ours.uuid() != fusion.FusionPass().uuid()
    ours(graph := torch.fx.Graph())
    assert graphs == [graph]
    theirs.is_applicable_for_range = lambda compile_range: False
    assert ours.is_applicable_for_range(Range(1, 2))
    ours(graph)
    assert graphs == [graph], "it ran for a range that it does not want"


def test_refused_pass_stays_for_vllm_to_refuse(vllm_config: VllmConfig) -> None:
    vllm_config.compilation_config.inductor_compile_config["joint_custom_pre_pass"] = operator.neg
    fusion.install(vllm_config)
    assert installed(vllm_config) == {}


def test_switched_off(vllm_config: VllmConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_W8A8_FUSION", "0")
    fusion.install(vllm_config)
    assert installed(vllm_config) == {}
    monkeypatch.setenv("VLLM_W8A8_FUSION", "perhaps")
    with pytest.raises(ValueError, match="VLLM_W8A8_FUSION"):
        fusion.install(vllm_config)


def test_declines_without_vllm_ir(monkeypatch: pytest.MonkeyPatch) -> None:
    assert compat.fusion_problem() is None
    monkeypatch.delattr("vllm.ir.ops.fused_add_rms_norm")
    assert compat.fusion_problem() == "vllm.ir.ops.fused_add_rms_norm does not exist here"
    with tensor_parallel(0, 1, free_port()):
        ReplicatedLinear(32, 32, quant_config=W8A8Config(), prefix="q_proj")
        assert installed(get_current_vllm_config()) == {}


def test_part_of_the_cache_keys(vllm_config: VllmConfig) -> None:
    import vllm.envs

    from vllm_w8a8_plugin import register

    before = vllm_config.compute_hash()
    fusion.install(vllm_config)
    assert vllm_config.compute_hash() != before
    register()
    assert "VLLM_W8A8_FUSION" in vllm.envs.compile_factors()


def test_copies_and_pickles() -> None:
    ours = fusion.FusionPass(fusion.FusionPass())
    fusion._patterns(torch.bfloat16, 64)
    for other in (copy.deepcopy(ours), pickle.loads(pickle.dumps(ours))):
        assert other.uuid() == ours.uuid()
