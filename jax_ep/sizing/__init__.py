"""What an exchange will cost, from its shapes alone: plain numbers, no device.

Ranks that a token goes to, bytes on links and in memory, buffers, padding, and the
least time that given rates allow, for one NVLink domain or many. Routing is taken to be
uniform; a recorded one has its own counts, and costs more where it is skewed. Of times
nothing is measured but the rates that `Machine.origin` says so of.
"""

from jax_ep.sizing.bounds import (
    MACHINES,
    Bound,
    Machine,
    sms_to_fill,
    time_bound,
)
from jax_ep.sizing.growth import EP_RANKS, HopsRoute, Route, Step, growth, of_layer
from jax_ep.sizing.hops import (
    Crossing,
    Hops,
    HopsBound,
    combine_hops,
    crossing,
    dispatch_hops,
    hops_bound,
    layout_hops,
)
from jax_ep.sizing.memory import (
    MAX_RANKS,
    Shape,
    expected_padding_amplification,
    handle_bytes,
    padding_amplification,
    receive_bytes,
    receive_rows,
    relay_bytes,
    workspace_bytes,
)
from jax_ep.sizing.targets import (
    UniformRouting,
    distinct_ranks,
    distinct_ranks_independent,
    remote_ranks,
)
from jax_ep.sizing.traffic import (
    Traffic,
    combine_traffic,
    dispatch_traffic,
    layout_traffic,
    rail_bytes,
    row_bytes,
    rows_per_token,
    sums_dtype,
    wire_bytes,
)

__all__ = [
    "EP_RANKS",
    "MACHINES",
    "MAX_RANKS",
    "Bound",
    "Crossing",
    "Hops",
    "HopsBound",
    "HopsRoute",
    "Machine",
    "Route",
    "Shape",
    "Step",
    "Traffic",
    "UniformRouting",
    "combine_hops",
    "combine_traffic",
    "crossing",
    "dispatch_hops",
    "dispatch_traffic",
    "distinct_ranks",
    "distinct_ranks_independent",
    "expected_padding_amplification",
    "growth",
    "handle_bytes",
    "hops_bound",
    "layout_hops",
    "layout_traffic",
    "of_layer",
    "padding_amplification",
    "rail_bytes",
    "receive_bytes",
    "receive_rows",
    "relay_bytes",
    "remote_ranks",
    "row_bytes",
    "rows_per_token",
    "sms_to_fill",
    "sums_dtype",
    "time_bound",
    "wire_bytes",
    "workspace_bytes",
]
