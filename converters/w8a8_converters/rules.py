"""Which modules a user wants left unquantized: one matching rule for the converter and the plugin."""

import re
from collections.abc import Iterable, Mapping, Sequence

from w8a8_kernels.names import name_matcher

# Layers that vLLM builds from several of a checkpoint's, for the converter, which knows no model class.
FUSED: dict[str, tuple[str, ...]] = {
    "qkv_proj": ("q_proj", "k_proj", "v_proj"),
    "gate_up_proj": ("gate_proj", "up_proj"),
    "fused_qkv_a_proj": ("q_a_proj", "kv_a_proj_with_mqa"),
    "in_proj_qkvz": ("in_proj_qkv", "in_proj_z"),
    "in_proj_ba": ("in_proj_b", "in_proj_a"),
}


_EXPERT = re.compile(r"((?:.*\.)?experts)\.\d+\.")


class SkipRules:
    """A list of patterns of module names.

    | pattern | matches |
    |---|---|
    | `re:REGEX` | names that the regular expression matches from their beginning (`re.match`) |
    | with `*`, `?` or `[` | a glob over the whole name, or over the name of a parent |
    | `model.layers.0.mlp` | that module and everything beneath it |
    | `down_proj`, `mlp.gate` | every module with these components in its path; components match whole: `vision` does
      not match `vision_tower` |

    Args:
        patterns: the patterns; blanks around them and empty ones are dropped.

    Raises:
        ValueError: a regular expression does not compile.
    """

    def __init__(self, patterns: Iterable[str]) -> None:
        self.patterns: tuple[str, ...] = tuple(dict.fromkeys(p.strip() for p in patterns if p.strip()))
        self._matchers = {pattern: name_matcher(pattern) for pattern in self.patterns}

    def __reduce__(self) -> tuple:
        return SkipRules, (self.patterns,)  # vLLM sends its config, and this with it, to other processes

    def __bool__(self) -> bool:
        return bool(self.patterns)

    def skips(self, name: str) -> bool:
        """Whether any pattern matches the module `name`."""
        return any(matches(name) for matches in self._matchers.values())

    def skips_fused(self, prefix: str, packed: Mapping[str, Sequence[str]]) -> bool:
        """Whether the layer `prefix`, which may be one that vLLM fuses, is skipped.

        A pattern that names the fused layer and none of its parts covers all parts.

        Args:
            prefix: name of the layer in vLLM, as `model.layers.0.self_attn.qkv_proj`.
            packed: vLLM's `packed_modules_mapping`, as `{"qkv_proj": ["q_proj", "k_proj", "v_proj"]}`.

        Raises:
            ValueError: some parts of a fused layer are skipped and some are not.
        """
        parent, _, last = prefix.rpartition(".")
        if last not in packed:
            return self.skips(prefix)
        parts = [f"{parent}.{part}" if parent else part for part in packed[last]]
        skipped = set()
        for matches in self._matchers.values():
            hit = {part for part in parts if matches(part)}
            skipped |= hit if hit or not matches(prefix) else set(parts)
        if skipped and len(skipped) < len(parts):
            kept = [_last(part) for part in parts if part not in skipped]
            raise ValueError(
                f"{', '.join(_last(part) for part in parts if part in skipped)} of {parent or 'the model'} would be skipped "
                f"but not {', '.join(kept)}, and vLLM fuses them into one layer, {last}: skip {last} (all of them) or none"
            )
        return bool(skipped)

    def skips_experts(self, prefix: str, names: Sequence[str]) -> bool:
        """Whether the experts of one layer are skipped, all of them.

        Args:
            prefix: of the module that holds them, as `model.layers.0.mlp.experts`.
            names: every projection of every expert.

        Raises:
            ValueError: some are skipped and some are not.
        """
        fused = [(part, whole) for whole, parts in FUSED.items() for part in parts]
        skipped = [
            name
            for name in names
            if self.skips(name) or any(self.skips(_sibling(name, whole)) for part, whole in fused if _last(name) == part)
        ]
        if skipped and len(skipped) < len(names):
            raise ValueError(
                f"{len(skipped)} of the {len(names)} projections of {prefix}, such as {skipped[0]}, would be skipped, and "
                "vLLM runs them all as one: skip all experts (experts) or none"
            )
        return bool(skipped)

    def unmatched(self, names: Iterable[str]) -> list[str]:
        """The patterns that match none of the module `names`, nor a layer that vLLM fuses from them."""
        names = set(names)
        for fused, parts in FUSED.items():
            names |= {_sibling(name, fused) for name in names if _last(name) in parts}
        return [pattern for pattern, matches in self._matchers.items() if not any(map(matches, names))]


def fused_groups(names: Iterable[str]) -> dict[str, tuple[str, ...]]:
    """The layers of FUSED that vLLM would build from `names`: full fused name -> last components of the parts present."""
    present = dict.fromkeys(names)
    groups = {}
    for fused, parts in FUSED.items():
        for prefix in dict.fromkeys(_sibling(name, fused) for name in present if _last(name) in parts):
            groups[prefix] = tuple(part for part in parts if _sibling(prefix, part) in present)
    return groups


def expert_groups(names: Iterable[str]) -> dict[str, list[str]]:
    """The projections of experts among `names`, by the module that holds a layer's experts."""
    groups: dict[str, list[str]] = {}
    for name in names:
        match = _EXPERT.match(name)
        if match:
            groups.setdefault(match[1], []).append(name)
    return groups


def _last(name: str) -> str:
    return name.rpartition(".")[2]


def _sibling(name: str, last: str) -> str:
    parent = name.rpartition(".")[0]
    return f"{parent}.{last}" if parent else last
