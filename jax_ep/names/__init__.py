"""Configs of other libraries as fields of `MoEConfig`: a table of names for each."""

import difflib
import re
from collections.abc import Sequence
from typing import Any

from jax_ep.names import huggingface, maxtext, megatron
from jax_ep.names.plain import ALIASES, HONOURED_ANYWAY, value_of
from jax_ep.names.source import Source, Values

SOURCES = dict(maxtext=maxtext.SOURCE, hf=huggingface.SOURCE, megatron=megatron.SOURCE)


def _marks(source: str) -> frozenset[str]:
    others = [table for other, table in SOURCES.items() if other != source]
    shared = {name for table in others for name in (*table.read, *table.ignored)}
    return SOURCES[source].markers - shared


_MARKERS = {source: _marks(source) for source in SOURCES}

# In a whole config a name that sounds like this must be known: ignored, it might
# change what the layer computes.
_ABOUT_MOE = re.compile(
    r"moe|expert|router|routed|routing|top_?k|load_balanc|aux_loss|capacity_factor"
    r"|scor(e|ing)_func|gate_logits|gating"
)
_NEAR = 0.94  # Likeness (difflib) from which a name is a slip of another.


def fields_of(
    names: Values, source: str | None, fields: Sequence[str]
) -> dict[str, Any]:
    """The fields that another library's config sets; see `MoEConfig.from_names`.

    Args:
      names: the config.
      source: "maxtext", "hf", "megatron" or None.
      fields: those of `MoEConfig`.
    """
    if source is not None and source not in SOURCES:
        raise ValueError(
            f"jax_ep.MoEConfig: source (={source!r}) must be one of "
            f"{', '.join(SOURCES)} or None."
        )
    names = {name.lstrip("-").replace("-", "_"): names[name] for name in names}
    source = _source_of(names) if source is None else source
    table = None if source is None else SOURCES[source]
    values: Values = {}
    setter: dict[str, str] = {}  # Field: the name that set it.

    def put(field: str, name: str, value: Any) -> None:
        if field in values and values[field] != value:
            raise ValueError(
                f"jax_ep.MoEConfig: {name} (={value!r}) and {setter[field]} "
                f"(={values[field]!r}) both set {field}, and differ."
            )
        values[field] = value
        setter[field] = name

    given: Values = {}
    pre_softmax = None
    for name, value in names.items():
        if table is not None and name in table.read:
            if value is not None:
                given[name] = value
            continue
        if table is not None and name in table.ignored:
            continue
        if name == "use_pre_softmax":
            pre_softmax = value
            continue
        field = ALIASES.get(name, name)
        if field in fields:
            value = value_of(field, value)
            if value is not None:
                put(field, name, value)
        elif field not in HONOURED_ANYWAY:
            _refuse_unknown(name, table, fields)
    if table is not None:
        for field, value in table.translate(given, dict(values)).items():
            put(field, f"{table.label}'s names", value)
    if pre_softmax is not None and values.get("score_func", "softmax") == "softmax":
        if not pre_softmax and values.get("norm_topk_prob") is False:
            raise ValueError(
                "jax_ep.MoEConfig: use_pre_softmax (=False) and norm_topk_prob "
                "(=False) differ: weights of a softmax over the top k sum to 1."
            )
        values.setdefault("norm_topk_prob", not pre_softmax)
    return values


def _source_of(names: Values) -> str | None:
    """The one source that has names among these that no other has."""
    marks = {
        source: [name for name in names if name in _MARKERS[source]]
        for source in SOURCES
    }
    found = [source for source, marked in marks.items() if marked]
    if len(found) > 1:
        shown = " and ".join(
            f"{marks[source][0]} is of {SOURCES[source].label}" for source in found
        )
        raise ValueError(
            f"jax_ep.MoEConfig: {shown}: the same values mean different layers there. "
            f"Say whose with source=, one of {', '.join(SOURCES)}."
        )
    return found[0] if found else None


def _refuse_unknown(name: str, table: Source | None, fields: Sequence[str]) -> None:
    """TypeError, unless the name is one of a known source's that is not about MoE."""
    names = {*fields, *ALIASES, *HONOURED_ANYWAY, "use_pre_softmax"}
    if table is not None:
        names |= set(table.read)
    else:
        names |= {name for one in SOURCES.values() for name in one.read}
    cutoff = 0.6
    if table is not None and not _ABOUT_MOE.search(name):
        cutoff = _NEAR
    nearest = difflib.get_close_matches(name, sorted(names), n=1, cutoff=cutoff)
    if table is not None and not _ABOUT_MOE.search(name) and not nearest:
        return
    hint = f": did you mean {nearest[0]}?" if nearest else "."
    raise TypeError(f"jax_ep.MoEConfig: {name} is not a name of a MoE layer{hint}")
