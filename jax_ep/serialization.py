"""Our pytrees as parts of what `jax.export` serialises."""

import dataclasses
import json
from typing import Any

from jax import export

from jax_ep.block_scaled import BlockScaled, Quantized
from jax_ep.dropless import Rounds
from jax_ep.exchange import Exchange
from jax_ep.layout import Handle
from jax_ep.losses import MoEStats
from jax_ep.params import MoEParams
from jax_ep.placement import Placement
from jax_ep.router import Routing
from jax_ep.two_hops import Hop


def register_serialization() -> None:
    """Tells `jax.export` of each of our pytrees; once in a process."""
    nodes = (Handle, Hop, MoEParams, MoEStats, Placement, Quantized, Rounds, Routing)
    for node in nodes:
        export.register_pytree_node_serialization(
            node,
            serialized_name=f"jax_ep.{node.__name__}",
            serialize_auxdata=lambda static: json.dumps(
                static, default=_named
            ).encode(),
            deserialize_auxdata=lambda data: tuple(json.loads(data, object_hook=_made)),
        )


def _named(static: Exchange | BlockScaled) -> dict:
    if isinstance(static, BlockScaled):
        return {"BlockScaled": [static.dtype.name, static.block, static.scale.name]}
    fields = dataclasses.fields(static)
    return {"Exchange": {field.name: getattr(static, field.name) for field in fields}}


def _made(values: dict) -> Any:
    """The fields of an `Exchange` pass through here too, as a dict of their own."""
    if "BlockScaled" in values:
        return BlockScaled(*values["BlockScaled"])
    return Exchange(**values["Exchange"]) if "Exchange" in values else values
