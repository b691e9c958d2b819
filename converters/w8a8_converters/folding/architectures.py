"""What can be folded in which architecture. One table, and the names that it needs."""

import re
from dataclasses import dataclass

from w8a8_converters.checkpoint import Source
from w8a8_converters.errors import ConversionError

_PER_HEAD = ("self_attn.q_norm", "self_attn.k_norm")
_BRANCH = ("post_attention_layernorm", "post_feedforward_layernorm")
_BRANCH_NORMS = "it normalizes what attention and MLP add to the residual stream"


@dataclass(frozen=True)
class Architecture:
    """How the layers of a model type are built, as far as folding asks.

    Attributes:
        attention_norm: the RMSNorm whose output q, k and v read; None where they read the residual stream itself.
        mlp_norm: the RMSNorm whose output gate, up, router and experts read; likewise.
        norm_offset: what the model adds to a norm's weight.
        kept: other modules in a layer with parameters. They stay as they are.
        no_r1: why the residual stream cannot be rotated; empty where it can.
        experts: the module that holds a router `gate` and `experts.N.{w1,w2,w3}`, empty for a plain MLP.
    """

    attention_norm: str | None = "input_layernorm"
    mlp_norm: str | None = "post_attention_layernorm"
    norm_offset: float = 0.0
    kept: tuple[str, ...] = ()
    no_r1: str = ""
    experts: str = ""


_GEMMA = Architecture(mlp_norm="pre_feedforward_layernorm", norm_offset=1.0, kept=(*_PER_HEAD, *_BRANCH), no_r1=_BRANCH_NORMS)

# By model_type. Norms of single heads (Qwen3, Gemma 3) act on q and k behind their projections: nothing here touches those.
ARCHITECTURES = {
    "llama": Architecture(),
    "mistral": Architecture(),
    "qwen2": Architecture(),
    "qwen3": Architecture(kept=_PER_HEAD),
    "gemma2": _GEMMA,
    "gemma3": _GEMMA,
    "gemma3_text": _GEMMA,
    "olmo2": Architecture(attention_norm=None, mlp_norm=None, kept=(*_PER_HEAD, *_BRANCH), no_r1=_BRANCH_NORMS),
    "mixtral": Architecture(experts="block_sparse_moe"),
}

_EMBEDDING = "embed_tokens.weight"


@dataclass(frozen=True)
class Pair:
    """An operation and the linear layers that read its result: a scale can move from the one to the others.

    Attributes:
        kind: `norm`, `v_o` or `up_down`.
        producer: module whose output channels are divided by the scale.
        consumers: modules whose input channels are multiplied by it.
    """

    kind: str
    producer: str
    consumers: tuple[str, ...]


@dataclass(frozen=True)
class Layer:
    """Full names of one decoder layer's modules.

    Attributes:
        prefix: of all of them, with the dot.
        readers: norm -> the linear layers that read its output.
        writers: linear layers that add to the residual stream.
        pairs: all that scales can move between.
    """

    prefix: str
    v: str
    o: str
    readers: dict[str, tuple[str, ...]]
    writers: tuple[str, ...]
    pairs: tuple[Pair, ...]


class Model:
    """A source whose architecture is in the table, every tensor of its language model accounted for.

    Attributes:
        architecture: the entry of the table.
        prefix: of the language model's tensors, as `model.`.
        config: the language model's part of config.json.
        hidden, head_dim: sizes.
        head: tensor of the lm_head's own weight, None where it is tied.
        layers: in order.

    Args:
        source: the checkpoint.
        option: what the user asked for, for messages.

    Raises:
        ConversionError: the architecture is not in the table, or tensors or sizes are not what it says.
    """

    def __init__(self, source: Source, option: str) -> None:
        model_type = source.config["model_type"]
        if model_type not in ARCHITECTURES:
            raise ConversionError(
                f"{option}: model type {model_type!r} of {source.path} is not known to be foldable; known are "
                f"{', '.join(ARCHITECTURES)}"
            )
        self.architecture = ARCHITECTURES[model_type]
        text = source.config.get("text_config")
        self.config = {**source.config, **text} if isinstance(text, dict) else source.config
        self._source, self._option = source, option
        embeddings = [name for name in source.tensors if name == _EMBEDDING or name.endswith(f".{_EMBEDDING}")]
        if len(embeddings) != 1:
            raise self._error(f"expected one tensor called {_EMBEDDING}, found {len(embeddings)}")
        self.embedding = embeddings[0]
        self.prefix = self.embedding.removesuffix(_EMBEDDING)
        self.norm = f"{self.prefix}norm"
        self.hidden = source.tensors[self.embedding].shape[1]
        heads = [name for name in source.tensors if name == "lm_head.weight" or name.endswith(".lm_head.weight")]
        # Some tied checkpoints hold the lm_head nevertheless; a loader takes the embedding then.
        tied = self.config.get("tie_word_embeddings", source.config.get("tie_word_embeddings"))
        self.head = None if tied or not heads else heads[0]
        self.head_dim = self.config.get("head_dim") or self.hidden // self.config["num_attention_heads"]
        self.layers = [self._layer(i) for i in range(self._count_layers())]
        self._check_names()

    def has_bias(self, module: str) -> bool:
        return f"{module}.bias" in self._source.tensors

    def _count_layers(self) -> int:
        numbers = {int(match[1]) for name in self._source.tensors if (match := self._in_a_layer(name))}
        if numbers != set(range(len(numbers))) or not numbers:
            raise self._error("its layers are not numbered from 0 without a gap")
        return len(numbers)

    def _in_a_layer(self, name: str) -> re.Match[str] | None:
        return re.match(rf"{re.escape(self.prefix)}layers\.(\d+)\.", name)

    def _layer(self, index: int) -> Layer:
        arch, prefix = self.architecture, f"{self.prefix}layers.{index}."
        q, k, v, o = (f"{prefix}self_attn.{name}_proj" for name in "qkvo")
        if arch.experts:
            moe = f"{prefix}{arch.experts}"
            first = re.compile(rf"{re.escape(moe)}\.experts\.\d+\.w1\.weight")
            count = sum(map(bool, map(first.fullmatch, self._source.tensors)))
            if not count:
                raise self._error(f"tensors {moe}.experts.N.w1.weight are missing")
            experts = [tuple(f"{moe}.experts.{i}.{w}" for w in ("w1", "w3", "w2")) for i in range(count)]
            mlp_readers = (f"{moe}.gate", *(name for expert in experts for name in expert[:2]))
        else:
            experts = [tuple(f"{prefix}mlp.{name}_proj" for name in ("gate", "up", "down"))]
            mlp_readers = experts[0][:2]
        readers = {}
        if arch.attention_norm:
            readers[f"{prefix}{arch.attention_norm}"] = (q, k, v)
        if arch.mlp_norm:
            readers[f"{prefix}{arch.mlp_norm}"] = mlp_readers
        pairs = [Pair("norm", norm, names) for norm, names in readers.items()]
        pairs.append(Pair("v_o", v, (o,)))
        pairs += [Pair("up_down", up, (down,)) for _, up, down in experts]
        for module in {name for pair in pairs for name in (pair.producer, *pair.consumers)}:
            if f"{module}.weight" not in self._source.tensors:
                raise self._error(f"tensor {module}.weight is missing")
        for module, axis in ((v, 0), (o, 1)):
            size = self._source.tensors[f"{module}.weight"].shape[axis]
            if size % self.head_dim:
                raise self._error(f"{module} has {size} channels, which is no multiple of head_dim {self.head_dim}")
        return Layer(prefix, v, o, readers, (o, *(down for _, _, down in experts)), tuple(pairs))

    def _check_names(self) -> None:
        expected = {self.embedding, f"{self.norm}.weight"} | ({self.head} if self.head else set())
        missing = [name for name in expected if name not in self._source.tensors]
        if missing:
            raise self._error(f"tensor {missing[0]} is missing")
        for layer in self.layers:
            linear = {name for pair in layer.pairs if pair.kind != "norm" for name in (pair.producer, *pair.consumers)}
            linear |= {f"{layer.prefix}self_attn.{name}_proj" for name in "qk"}
            linear |= {name for names in layer.readers.values() for name in names}
            if not self.architecture.experts:
                linear.add(f"{layer.prefix}mlp.gate_proj")
            expected |= {f"{name}.{kind}" for name in linear for kind in ("weight", "bias")}
            expected |= {f"{name}.weight" for name in layer.readers}
            expected |= {f"{layer.prefix}{name}.weight" for name in self.architecture.kept}
            expected.add(f"{layer.prefix}self_attn.rotary_emb.inv_freq")
        inside = (name for name in self._source.tensors if name.startswith(self.prefix) and self._is_language(name))
        unknown = [name for name in inside if name not in expected]
        if unknown:
            raise self._error(
                f"tensor {unknown[0]} is not part of a {self._source.config['model_type']} model as known here: leaving it as "
                "it is could give another model"
            )

    def _is_language(self, name: str) -> bool:
        # Under `model.` other towers can stand.
        inner = name.removeprefix(self.prefix)
        return bool(self._in_a_layer(name)) or inner.startswith(("norm.", "embed_tokens."))

    def _error(self, what: str) -> ConversionError:
        return ConversionError(f"{self._option}: {self._source.path}: {what}")
