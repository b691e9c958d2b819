"""The quantization config `w8a8`: which checkpoint it is, which layers are int8, and the method of each layer."""

import difflib
import logging
import re
from collections.abc import Collection
from typing import Any

import torch
from vllm.model_executor.layers.quantization.base_config import QuantizationConfig, QuantizeMethodBase

from vllm_w8a8_plugin import compat, envs, gguf, log, saved_state
from w8a8_converters.layers import is_quantized_by_default
from w8a8_converters.rules import SkipRules
from w8a8_kernels.hadamard import AUTO, BLOCKS, parse_choice

COMPRESSED_TENSORS = "compressed-tensors"
# All that a `quantization_config` of our own form may hold: neither vLLM (0.25.1, 0.32.0, 0.33.0 were read) nor transformers
# adds a key. vLLM does to compressed-tensors' form, which is not held to this list.
KNOWN_KEYS = (
    "quant_method",
    "weight_dtype",
    "scale_dtype",
    "hadamard",
    "hadamard_blocks",
    "ignore",
    "tp_consistent_activations",
    "lm_head",
)


class W8A8Config(QuantizationConfig):
    """int8 weights per output channel, int8 activations per token, both symmetric.

    Args:
        online: the checkpoint is not quantized; linear layers are while they load.
        skip: patterns of modules that stay as they are in the checkpoint (`SkipRules`). Online, default: those of
            VLLM_W8A8_SKIP_MODULES; and whatever the converter leaves alone (routers, vision towers, ...) stays, too.
        hadamard: the block Hadamard transform: `"auto"` (the rule `w8a8_kernels.hadamard.block_size`), 0 (none), or the block
            of every layer, or where that does not divide its K, the largest smaller one that does. Online, default:
            VLLM_W8A8_HADAMARD.
        hadamard_blocks: the same for the layers that are named here, by last component or full name.
        tp_consistent_activations: whether row-parallel layers quantize their inputs by the maximum over all tensor-parallel
            ranks. Default: VLLM_W8A8_TP_CONSISTENT_ACTIVATIONS.
        lm_head: whether an lm_head that is not int8 in the checkpoint is quantized while it loads, even where a checkpoint's
            `ignore` names it. Default: VLLM_W8A8_LM_HEAD.
    """

    def __init__(
        self,
        online: bool = True,
        skip: list[str] | None = None,
        hadamard: str | int | None = None,
        hadamard_blocks: dict[str, int] | None = None,
        tp_consistent_activations: bool | None = None,
        lm_head: bool | None = None,
    ) -> None:
        super().__init__()
        envs.check()
        compat.check_forced_kernel()
        self.online = online
        if skip is None:
            skip = envs.skip_modules() if online else []
        self.rules = SkipRules(skip)
        if hadamard is None:
            hadamard = envs.hadamard() if online else 0
        self.hadamard = parse_choice(hadamard)
        self.hadamard_blocks = dict(hadamard_blocks or {})
        if tp_consistent_activations is None:
            tp_consistent_activations = envs.tp_consistent_activations()
        self.tp_consistent_activations = tp_consistent_activations
        self.lm_head = envs.lm_head() if lm_head is None else lm_head
        # Whether a layer was given a method for int8 logits, and whether an lm_head was that is quantized while it loads.
        self._gives_logits = False
        self._has_lm_head = False
        # Names of linear layers and experts that were built, int8 or not, as a checkpoint has them.
        self._seen: set[str] = set()
        self._unmatched_are_said = False
        self._blocks_used: set[str] = set()
        self._from_gguf = False

    def __setstate__(self, state: dict[str, Any]) -> None:
        # vLLM sends this config to processes that it spawns: they need the loader, which is too heavy for `register()`.
        self.__dict__.update(state)
        if self._from_gguf:
            gguf.register_loader()

    def __repr__(self) -> str:
        more = f", hadamard_blocks={self.hadamard_blocks}" if self.hadamard_blocks else ""
        more += ", tp_consistent_activations=True" if self.tp_consistent_activations else ""
        more += ", lm_head=True" if self.lm_head else ""
        return f"W8A8Config(online={self.online}, skip={list(self.rules.patterns)}, hadamard={self.hadamard!r}{more})"

    def get_name(self) -> str:
        return "w8a8"

    def get_supported_act_dtypes(self) -> list[torch.dtype]:
        return [torch.bfloat16, torch.float16, torch.float32]

    @classmethod
    def get_min_capability(cls) -> int:
        return 70

    @staticmethod
    def get_config_filenames() -> list[str]:
        # None: the marker stands in config.json, and a name here would make vLLM demand that file of every model.
        return []

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> "W8A8Config":
        """Config of an int8 checkpoint.

        Args:
            config: `quantization_config` of config.json, in our own form or compressed-tensors'.

        Raises:
            ValueError: it describes something that these kernels would compute wrongly, or VLLM_W8A8_HADAMARD names another
                block than it has.
        """
        refusal = checkpoint_refusal(config)
        if refusal is not None:
            raise ValueError(f"this checkpoint cannot be served with quantization=w8a8: {refusal}")
        if envs.skip_modules():
            log.once(f"{envs.SKIP_MODULES} is ignored: the checkpoint already says which layers are int8", logging.WARNING)
        hadamard = {key: config[key] for key in ("hadamard", "hadamard_blocks") if config.get(key)}
        _check_variable_against(hadamard)
        consistent = envs.tp_consistent_activations(default=config.get("tp_consistent_activations", False))
        return cls(
            online=False,
            skip=list(config.get("ignore") or []),
            tp_consistent_activations=consistent,
            lm_head=envs.lm_head(default=config.get("lm_head", False)),
            **hadamard,
        )

    @classmethod
    def override_quantization_method(
        cls, hf_quant_cfg: dict[str, Any], user_quant: str | None, hf_config: Any = None
    ) -> str | None:
        """Take int8 compressed-tensors checkpoints when the plugin is asked for; one log line if it must decline."""
        if hf_quant_cfg.get("quant_method") != COMPRESSED_TENSORS:
            return None
        asked = user_quant == "w8a8" or (user_quant is None and envs.enabled())
        if not asked:
            return None
        refusal = checkpoint_refusal(hf_quant_cfg)
        if refusal is None:
            return "w8a8"
        log.once(f"compressed-tensors checkpoint left to vLLM's own path: {refusal}")
        return None

    def maybe_update_config(self, model_name: str, hf_config: Any = None, revision: str | None = None) -> None:
        """Note where the weights come from."""
        self._from_gguf = gguf.is_metadata_folder(model_name)

    def apply_vllm_mapper(self, hf_to_vllm_mapper: Any) -> None:
        """Rename the modules in `skip` and `hadamard_blocks` as the model class renames its weights."""
        self.rules = SkipRules(hf_to_vllm_mapper.apply_list(list(self.rules.patterns)))
        self.hadamard_blocks = hf_to_vllm_mapper.apply_dict(self.hadamard_blocks)

    def get_quant_method(self, layer: torch.nn.Module, prefix: str) -> QuantizeMethodBase | None:
        """Method of one layer.

        Raises:
            ValueError: only some parts of a fused layer are skipped, int8 experts of the checkpoint cannot run, or an int8
                lm_head is asked for where none can be.
        """
        from vllm.model_executor.layers.fused_moe import RoutedExperts, UnquantizedFusedMoEMethod
        from vllm.model_executor.layers.linear import LinearBase, UnquantizedLinearMethod
        from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding

        from vllm_w8a8_plugin.linear import W8A8LinearMethod, W8A8OnlineLinearMethod

        if saved_state.is_loaded():
            saved_state.compare_when_loaded()
        # vLLM builds a draft model beneath this name; its checkpoint, whose names are compared with, has none.
        prefix = prefix.removeprefix("draft_model.")
        if isinstance(layer, LinearBase):
            parent, _, last = prefix.rpartition(".")
            self._seen.update(f"{parent}.{part}" for part in self.packed_modules_mapping.get(last, [last]))
            kept = self.online and not is_quantized_by_default(f"{prefix}.weight", ndim=2)
            if kept or self.rules.skips_fused(prefix, self.packed_modules_mapping):
                return UnquantizedLinearMethod()
            fuse_when_compiled()
            hadamard = self._hadamard_of(prefix)
            return (
                W8A8OnlineLinearMethod(hadamard, self._all_built, self.tp_consistent_activations)
                if self.online
                else W8A8LinearMethod(hadamard, self._all_built, self.tp_consistent_activations)
            )
        if isinstance(layer, RoutedExperts):
            return self._experts_method(layer, prefix) or UnquantizedFusedMoEMethod(layer.moe_config)
        if isinstance(layer, ParallelLMHead):
            return self._lm_head_method(prefix)
        if isinstance(layer, VocabParallelEmbedding) and self.lm_head and is_tied_embedding(layer):
            return self._tied_embedding_method()
        return None

    def _lm_head_method(self, prefix: str) -> QuantizeMethodBase | None:
        """Method of an lm_head; None where it stays as it is.

        Raises:
            ValueError: it is to be int8, and cannot.
        """
        from vllm_w8a8_plugin.lm_head import W8A8LMHeadMethod, W8A8OnlineLMHeadMethod

        int8_in_checkpoint = not self.online and not self.rules.skips(prefix)
        if not int8_in_checkpoint and not (self.lm_head and makes_logits()):
            return None
        check_head_dtype()
        self._gives_logits = True
        if int8_in_checkpoint:
            return W8A8LMHeadMethod(self.rules.patterns, self._hadamard_of(prefix), self._all_built)
        if self.online and self.rules.skips(prefix):
            entries = ", ".join(repr(pattern) for pattern in self.rules.patterns if SkipRules([pattern]).skips(prefix))
            raise ValueError(
                f"{envs.LM_HEAD}=1 asks for an int8 {prefix}, but {envs.SKIP_MODULES} has {entries}, which leaves {prefix} as "
                "it is: unset the one, or take that out of the other"
            )
        self._has_lm_head = True
        return W8A8OnlineLMHeadMethod(self._hadamard_of(prefix), self._all_built)

    def _tied_embedding_method(self) -> QuantizeMethodBase:
        """Method of an embedding from which logits are taken, too: unless the model has an lm_head that is not tied to it."""
        from vllm_w8a8_plugin.lm_head import W8A8TiedEmbeddingMethod

        check_head_dtype()
        self._gives_logits = True
        return W8A8TiedEmbeddingMethod(self._hadamard_of("lm_head"), self._all_built, lambda: not self._has_lm_head)

    def _experts_method(self, layer: torch.nn.Module, prefix: str) -> QuantizeMethodBase | None:
        """Method of the experts of one layer; None where they stay as they are.

        Raises:
            ValueError: some of the experts' projections are skipped and some are not, or the checkpoint has int8 experts that
                these kernels cannot run.
        """
        from vllm_w8a8_plugin import moe

        inputs, output = (layer.ckpt_gate_proj_name, layer.ckpt_up_proj_name), layer.ckpt_down_proj_name
        parts = [f"{prefix}.{i}.{part}" for i in range(layer.global_num_experts) for part in (*inputs, output) if part]
        self._seen.update(parts)
        skipped = self.rules.skips_experts(prefix, parts)
        if skipped or (self.online and not is_quantized_by_default(f"{parts[0]}.weight", ndim=2)):
            return None
        refusal = moe.refusal(layer)
        if refusal is not None and not self.online:
            raise ValueError(f"{prefix}: int8 experts cannot run here: {refusal}. Convert again with --skip experts")
        if refusal is not None:
            log.once(f"experts of mixture-of-experts layers stay unquantized: {refusal}", logging.WARNING)
            return None
        if self.tp_consistent_activations:
            log.once("tp_consistent_activations does not reach experts: each rank quantizes by its own part of a row")
        blocks = [self._block_of_experts(layer, prefix, names) for names in (inputs, (output,))]
        if self.online:
            return moe.W8A8OnlineMoEMethod(layer.moe_config, *blocks, self._all_built)
        return moe.W8A8MoEMethod(layer.moe_config, *blocks, self._all_built)

    def _block_of_experts(self, layer: torch.nn.Module, prefix: str, names: tuple[str | None, ...]) -> str | int:
        """The choice that projections of all experts of a layer share.

        Raises:
            ValueError: they do not.
        """
        parts = [f"{prefix}.{i}.{name}" for i in range(layer.global_num_experts) for name in names if name]
        choices = {self._hadamard_of(part) for part in parts}
        if len(choices) > 1:
            raise ValueError(
                f"{prefix}: {' and '.join(filter(None, names))} of its experts have other Hadamard blocks, "
                f"{sorted(choices, key=str)}, and vLLM runs all experts as one: convert the model again"
            )
        return choices.pop()

    def _hadamard_of(self, prefix: str) -> str | int:
        """The choice for one layer; for a fused one, what its parts have."""
        parent, _, last = prefix.rpartition(".")

        def of(part: str) -> str | int:
            name = f"{parent}.{part}" if parent else part
            self._blocks_used |= {name, part}
            return self.hadamard_blocks.get(name, self.hadamard_blocks.get(part, self.hadamard))

        choices = {of(part) for part in self.packed_modules_mapping.get(last, [last])}
        if len(choices) > 1:
            raise ValueError(
                f"{prefix}: vLLM fuses layers whose Hadamard blocks differ in the checkpoint, {sorted(choices, key=str)}: "
                "convert it again"
            )
        return choices.pop()

    def _all_built(self) -> None:
        """Check what can be checked when all layers are there; called once or more for each of them."""
        self.warn_unmatched()
        if not self.online:
            self.check_blocks()
        if self.lm_head and not self._gives_logits and makes_logits():
            log.once(
                f"{envs.LM_HEAD}: lm_head stays unquantized, as this model class offers neither an lm_head nor a tied "
                "embedding for quantization",
                logging.WARNING,
            )

    def check_blocks(self) -> None:
        """Raise ValueError if `hadamard_blocks` names a layer, or a kind of layer in int8, that the model does not have.

        For when all layers are built. A name that matches nothing is a typing error, and its layer would compute garbage. Full
        names that may belong to another pipeline stage, a draft model or a tower are let pass.
        """
        lost = sorted(name for name in self.hadamard_blocks if "." not in name and name not in self._blocks_used)
        if lost:
            have = ", ".join(sorted(name for name in self._blocks_used if "." not in name))
            raise ValueError(
                f"quantization_config: hadamard_blocks names {', '.join(lost)}, but the int8 layers of this model are {have}. "
                "Correct config.json, or convert the model again"
            )
        full = sorted(name for name in self.hadamard_blocks.keys() - self._blocks_used - self._seen if "." in name)
        lost = _names_of_no_layer(full, self._seen, _current_model_config())
        if lost:
            near = difflib.get_close_matches(lost[0], self._seen, n=1)
            hint = f" (is {lost[0]} a misspelling of {near[0]}?)" if near else ""
            raise ValueError(
                f"quantization_config: hadamard_blocks names {', '.join(lost)}, but this model has no such layer{hint}. "
                "Correct config.json, or convert the model again"
            )

    def warn_unmatched(self) -> None:
        """Warn of skip patterns that match no linear layer. For when all layers are built; only the first call looks.

        Of a checkpoint's `ignore` only entries are named that look like a misspelling: `misspelt_layers`.
        """
        if self._unmatched_are_said or not self._seen:
            return
        self._unmatched_are_said = True  # a draft model, which may share this config, has few of the layers
        for pattern in self.rules.unmatched(self._seen):
            if self.online:
                near = difflib.get_close_matches(pattern, {name.rpartition(".")[2] for name in self._seen})
                where = f"{envs.SKIP_MODULES}: {pattern!r} matches"
            else:
                near = misspelt_layers(pattern, {*self._seen, *self.packed_modules_mapping, "lm_head"})
                where = f"quantization_config: ignore has {pattern!r}, which matches"
            if near or self.online:
                hint = f"; did you mean {' or '.join(near)}?" if near else ""
                log.once(f"{where} no linear layer of this model{hint}", logging.WARNING)


def misspelt_layers(pattern: str, names: Collection[str]) -> list[str]:
    """What an entry of `ignore` that matches no layer seems to mean: components of `names`, the most likely first.

    Most entries that match nothing are right: tools list what a model class does not build (towers, MTP layers), does not
    build as a quantizable layer (routers, embeddings, a tied lm_head), or builds in another pipeline stage. So nothing is
    found for what is never quantized by default, nor for an entry that ends as layers of the model do.
    """
    words = [word for word in re.findall(r"\w+", pattern.removeprefix("re:")) if not word.isdigit()]
    known = {part for name in names for part in name.split(".") if not part.isdigit()}
    if not words or words[-1] in known or not _may_be_quantized(".".join(words)):
        return []
    return difflib.get_close_matches(words[-1], known, cutoff=0.8)


def _names_of_no_layer(candidates: list[str], built: Collection[str], model_config: Any) -> list[str]:
    """Those of the full names `candidates` that cannot be layers of the model which are built elsewhere.

    Args:
        candidates: names that are not among `built`.
        built: names of the layers of this process.
        model_config: vLLM's; None for layers without a model.
    """
    kinds, parents = {_without_numbers(name) for name in built}, {_layer_of(name)[0] for name in built}
    text = getattr(model_config, "hf_text_config", None)
    layers = getattr(text, "num_hidden_layers", None)
    has_draft = getattr(text, "num_nextn_predict_layers", 0)  # its layers have the numbers behind the model's
    # Not so in a pipeline stage, nor for a draft model with the target's checkpoint.
    builds_all = layers is not None and {_layer_of(name)[1] for name in built} >= set(range(layers))

    def is_lost(name: str) -> bool:
        parent, number = _layer_of(name)
        if _without_numbers(name) in kinds:
            return builds_all and number is not None and number >= layers and not has_draft
        return _may_be_quantized(name) and (builds_all or (parent is not None and parent in parents))

    return [name for name in candidates if is_lost(name)]


def _may_be_quantized(module: str) -> bool:
    """Whether no component of a module's name says that it stays as it is unless it is asked for."""
    return is_quantized_by_default(f"layers.0.{module}.weight", ndim=2)


def _without_numbers(name: str) -> str:
    return re.sub(r"\.\d+(?=\.)", ".N", name)


def _layer_of(name: str) -> tuple[str | None, int | None]:
    """The transformer layer that a module is in, as `model.layers.3`, and its number; None where it is in none."""
    match = re.match(r"(?:.*?\.)??(?:layers|h|blocks|block)\.(\d+)(?=\.)", name)
    return (None, None) if match is None else (match[0], int(match[1]))


def _check_variable_against(checkpoint: dict[str, Any]) -> None:
    """Raise ValueError if VLLM_W8A8_HADAMARD names another block than a checkpoint's entries; auto leaves it to them."""
    asked, held = envs.hadamard(), checkpoint.get("hadamard", 0)
    others = checkpoint.get("hadamard_blocks", {})
    if asked != AUTO and (asked != held or others):
        raise ValueError(
            f"{envs.HADAMARD}={asked}, but the checkpoint's weights were quantized with hadamard {held}"
            + (f" ({', '.join(f'{name}: {block}' for name, block in others.items())})" if others else "")
            + ": only the checkpoint can decide this. Unset the variable, or convert the model again"
        )


def makes_logits() -> bool:
    """Whether logits are computed in this process: not by pooling models, nor before the last pipeline stage."""
    from vllm.distributed import get_pp_group

    model_config = _current_model_config()
    pools = model_config is not None and model_config.runner_type == "pooling"
    return not pools and get_pp_group().is_last_rank


def is_tied_embedding(layer: torch.nn.Module) -> bool:
    """Whether an embedding that is being built is the one to which the model's lm_head is tied, as far as configs say."""
    model_config = _current_model_config()
    if model_config is None or not makes_logits():
        return False
    text = model_config.hf_text_config
    tied = any(getattr(config, "tie_word_embeddings", False) for config in (text, model_config.hf_config))
    # Other embeddings of a model, as those of each layer, have other sizes.
    sizes = getattr(text, "vocab_size", None), getattr(text, "hidden_size", None)
    return tied and sizes == (layer.org_vocab_size, layer.embedding_dim)


def check_head_dtype() -> None:
    """Raise ValueError where vLLM is asked for logits in another dtype: it then reads an lm_head's weight past its method."""
    model_config = _current_model_config()
    if model_config is None or model_config.runner_type == "pooling":
        return
    if model_config.head_dtype != model_config.dtype:
        raise ValueError(
            f"an int8 lm_head gives logits in the model's dtype, {model_config.dtype}, but head_dtype asks for "
            f"{model_config.head_dtype}: leave head_dtype out, or the lm_head unquantized"
        )


def _current_model_config() -> Any:
    """vLLM's config of the model that is being built; None for a layer by itself."""
    vllm_config = compat.current_vllm_config()
    return None if vllm_config is None else vllm_config.model_config


def fuse_when_compiled() -> None:
    """Install the compile pass for the model that is being built: its layers are built before vLLM sets up compilation."""
    vllm_config = compat.current_vllm_config()
    if vllm_config is None:
        return  # a layer by itself
    problem = compat.fusion_problem()
    if problem is not None:
        log.once(f"norms and activations are not fused with the quantizer: {problem}")
        return
    from vllm_w8a8_plugin import fusion

    fusion.install(vllm_config)


def checkpoint_refusal(config: dict[str, Any]) -> str | None:
    """Why a checkpoint with this `quantization_config` cannot run on these kernels, or None if it can."""
    for key in ("tp_consistent_activations", "lm_head"):
        if type(config.get(key, False)) is not bool:
            return (
                f"quantization_config has {key} = {config[key]!r}, expected true or false. Correct config.json or hf_overrides"
            )
    if config.get("quant_method") == COMPRESSED_TENSORS:
        return _compressed_tensors_refusal(config)
    unknown = [key for key in config if key not in KNOWN_KEYS]
    if unknown:  # first: a misspelt key is missing, too
        return (
            f"quantization_config has {', '.join(unknown)}, which this version does not know; known are "
            f"{', '.join(KNOWN_KEYS)}. Correct config.json, or install the newer vllm-w8a8-plugin that wrote it"
        )
    expected = {"weight_dtype": ("int8",), "scale_dtype": ("fp32",), "hadamard": (0, *sorted(BLOCKS))}
    for key, values in expected.items():
        # The type counts: False and 64.0 equal 0 and 64.
        if not any(config.get(key) == value and type(config.get(key)) is type(value) for value in values):
            return f"quantization_config has {key} = {config.get(key)!r}, expected {' or '.join(map(repr, values))}"
    blocks = config.get("hadamard_blocks", {})
    if not isinstance(blocks, dict) or any(type(block) is not int or block not in (0, *BLOCKS) for block in blocks.values()):
        return f"quantization_config has hadamard_blocks = {blocks!r}, expected names of layers with blocks of {BLOCKS} or 0"
    ignore = config.get("ignore") or []
    if not isinstance(ignore, list) or not all(isinstance(pattern, str) for pattern in ignore):
        return f"quantization_config has ignore = {ignore!r}, expected a list of names or patterns"
    return None


def _compressed_tensors_refusal(config: dict[str, Any]) -> str | None:
    groups = list((config.get("config_groups") or {}).values())
    if len(groups) != 1:
        return f"it has {len(groups)} quantization groups, expected one"
    group = groups[0]
    if group.get("targets") != ["Linear"]:
        return f"its group targets {group.get('targets')}, expected ['Linear']"
    weights, inputs = group.get("weights") or {}, group.get("input_activations") or {}
    wanted = (
        ("weights", weights, {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "channel"}),
        ("input_activations", inputs, {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "token", "dynamic": True}),
    )
    for name, got, expected in wanted:
        for key, value in expected.items():
            if got.get(key) != value:
                return f"{name}.{key} is {got.get(key)!r}, expected {value!r}"
    if weights.get("dynamic"):
        return "its weights are quantized dynamically"
    for key, value in (
        ("output_activations", group.get("output_activations")),
        ("kv_cache_scheme", config.get("kv_cache_scheme")),
    ):
        if value is not None:
            return f"it has {key}, which these kernels do not apply"
    transforms = (config.get("transform_config") or {}).get("config_groups")
    if transforms:
        return "it has run-time transforms (transform_config)"
    sparsity = (config.get("sparsity_config") or {}).get("format", "dense")
    if sparsity != "dense":
        return f"its weights are sparse ({sparsity})"
    return None
