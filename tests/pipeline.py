"""Layout, dispatch, combine and both derivatives as one program, on any mesh.

Every float operand is an input of the program: nothing is computed between the stages,
so two implementations must agree bit for bit.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from layout_test import Case

import jax_ep

Leaf = tuple[str, int]  # dtype and width of a row


@dataclasses.dataclass(frozen=True)
class Pipeline:
    """What is compiled: a case of the layout, and the leaves of its payload."""

    case: Case
    leaves: tuple[Leaf, ...] = (("float32", 8),)
    wire_f32: bool = False
    num_sms: int | None = None

    def __str__(self) -> str:
        case, leaves = self.case, "+".join(f"{d}[{w}]" for d, w in self.leaves)
        text = f"T{case.tokens}-K{case.topk}-E{case.experts}-{leaves}-{case.routing}"
        text += f"-A{case.alignment}" if case.alignment > 1 else ""
        text += f"-C{case.capacity}" if case.capacity else ""
        return text + ("-wire32" if self.wire_f32 else "")

    @property
    def layout(self) -> dict:
        """Keywords of dispatch_layout."""
        return dict(
            num_experts=self.case.experts,
            capacity=self.case.capacity,
            expert_alignment=self.case.alignment,
            num_sms=self.num_sms,
        )

    @property
    def capacity(self) -> int:
        """C."""
        case = self.case
        rows = case.ranks * case.tokens * case.topk
        rows += case.experts // case.ranks * (case.alignment - 1)
        rows = rows if case.capacity is None else case.capacity
        return rows // case.alignment * case.alignment


def on_ranks(function, mesh: Mesh, *, donate: tuple[int, ...] = (), **keywords):
    """`function` of each rank's shares, jitted."""
    keywords.setdefault("in_specs", P("expert"))
    keywords.setdefault("out_specs", P("expert"))
    mapped = jax.shard_map(function, mesh=mesh, **keywords)
    return jax.jit(mapped, donate_argnums=donate)


@functools.cache
def program(pipeline: Pipeline, mesh: Mesh, implementation: str | None):
    """The jitted program: `(ids, floats)` to a dict of everything it computes."""
    wire = jnp.float32 if pipeline.wire_f32 else None

    def everything(ids, floats):
        handle = jax_ep.dispatch_layout(
            ids, implementation=implementation, **pipeline.layout
        )

        def dispatch(x, weights):
            return jax_ep.dispatch(x, handle, weights, grad_wire=wire)

        def combine(y, bias):
            return jax_ep.combine(y, handle, bias=bias, wire=wire)

        received, pull_back = jax.vjp(dispatch, floats["x"], floats["weights"])
        dx, d_weights = pull_back((floats["d_recv"], floats["d_recv_weights"]))
        out, pull_back = jax.vjp(combine, floats["y"], floats["bias"])
        dy, d_bias = pull_back(floats["d_out"])
        return dict(
            handle=handle,
            recv=received[0],
            recv_weights=received[1],
            dx=dx,
            d_weights=d_weights,
            out=out,
            dy=dy,
            d_bias=d_bias,
        )

    return on_ranks(everything, mesh)


@functools.cache
def float_maker(pipeline: Pipeline, mesh: Mesh):
    case, capacity = pipeline.case, pipeline.capacity

    def make(seed):
        keys = iter(jax.random.split(jax.random.key(seed), 64))

        def uniform(rows, width, dtype="float32"):
            shape = (case.ranks * rows, *width)
            values = jax.random.uniform(next(keys), shape, minval=-1.0)
            return values.astype(dtype)

        def rows(count):
            return tuple(uniform(count, (w,), dtype) for dtype, w in pipeline.leaves)

        return dict(
            x=rows(case.tokens),
            y=rows(capacity),
            bias=rows(case.tokens),
            d_recv=rows(capacity),
            d_out=rows(case.tokens),
            weights=uniform(case.tokens, (case.topk,)),
            d_recv_weights=uniform(capacity, ()),
        )

    return jax.jit(make, out_shardings=NamedSharding(mesh, P("expert")))


def inputs(pipeline: Pipeline, mesh: Mesh, seed: int = 0):
    """`(ids, floats)` for `program`, drawn from `seed`."""
    case = pipeline.case
    ids = case.ids(seed).reshape(-1, case.topk)
    floats = float_maker(pipeline, mesh)(np.uint32(seed))
    return jax.device_put(ids, NamedSharding(mesh, P("expert"))), floats


@jax.jit
def differing(got, want):
    """Like the trees given: how many elements of each array differ in a bit."""

    def count(a, b):
        if a.dtype != b.dtype or a.shape != b.shape:
            raise ValueError(f"{a.dtype}{a.shape} is not {b.dtype}{b.shape}")
        bits = f"uint{8 * a.dtype.itemsize}"
        a, b = (lax.bitcast_convert_type(value, bits) for value in (a, b))
        return jnp.sum(a != b, dtype=jnp.int32)

    return jax.tree.map(count, got, want)


def assert_same_bits(got, want, what: str = "") -> None:
    """Every array of two trees, compared where they live; names those that differ."""
    counts = jax.tree_util.tree_leaves_with_path(differing(got, want))
    wrong = [
        f"{jax.tree_util.keystr(path)} in {int(count)} elements"
        for path, count in counts
        if np.any(np.asarray(count))
    ]
    assert not wrong, f"{what}: differs: {', '.join(wrong)}"
