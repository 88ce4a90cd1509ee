"""Our pytrees as parts of what `jax.export` serialises."""

import json

from jax import export

from jax_ep.dropless import Rounds
from jax_ep.layout import Handle
from jax_ep.losses import MoEStats
from jax_ep.params import MoEParams
from jax_ep.placement import Placement
from jax_ep.router import Routing


def register_serialization() -> None:
    """Tells `jax.export` of each of our pytrees; once in a process."""
    for node in (Handle, MoEParams, MoEStats, Placement, Rounds, Routing):
        export.register_pytree_node_serialization(
            node,
            serialized_name=f"jax_ep.{node.__name__}",
            serialize_auxdata=lambda static: json.dumps(static).encode(),
            deserialize_auxdata=_static_of,
        )


def _static_of(data: bytes) -> tuple:
    """The static fields; JSON has lists for tuples."""
    values = json.loads(data)
    return tuple(tuple(v) if isinstance(v, list) else v for v in values)
