"""A routing, a capacity, and what is timed there; checked against the reference."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jax_ep.tools.benchmark import ceilings, exchanges, routings, timing
from jax_ep.tools.benchmark.exchanges import AXIS, STEPS, Layer, on_ranks

FREE_SMS = 32  # that jax_ep leaves by default


@dataclasses.dataclass(frozen=True)
class Setting:
    """A routing and a capacity, and what is timed there: names and numbers of SMs."""

    routing: str
    tokens: int
    capacity: str  # "1.25", "dropless" or "demand"
    timed: tuple[tuple[str, int | None], ...]

    def __str__(self) -> str:
        return f"{self.routing}, T {self.tokens}, C {self.capacity}"


class Bench:
    """A layer and its routing, with programs and arrays."""

    def __init__(
        self,
        layer: Layer,
        ids: np.ndarray,
        mesh: Mesh,
        timed: tuple[tuple[str, int | None], ...],
        *,
        routing: str,
        may_drop: bool = False,
        steps: tuple[int, int] = (32, 16),
    ):
        """`ids` `[R, T, K]`; `steps` of a chain of short and of long exchanges."""
        self.layer, self.ids, self.mesh = layer, ids, mesh
        self.timed, self.routing = timed, routing
        self.may_drop, self.steps = may_drop, steps
        self.traffic = routings.traffic(ids, layer.experts)
        self.sharding = NamedSharding(mesh, P(AXIS))
        rows = jnp.dtype(layer.dtype)

        def of(count, width, dtype):
            shape = (mesh.size * count, *width)
            return jax.ShapeDtypeStruct(shape, dtype, sharding=self.sharding)

        self.types = dict(
            ids=of(layer.tokens, (layer.topk,), jnp.int32),
            x=of(layer.tokens, (layer.hidden,), rows),
            y=of(layer.capacity, (layer.hidden,), rows),
            weights=of(layer.tokens, (layer.topk,), jnp.float32),
            row_weights=of(layer.capacity, (), jnp.float32),
        )
        self.make_handle = on_ranks(self.layer.layout, mesh)
        handle = jax.eval_shape(self.make_handle, self.types["ids"])
        self.types["handle"] = jax.tree.map(
            lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=self.sharding),
            handle,
        )

    @classmethod
    def of(cls, setting: Setting, args, mesh: Mesh) -> "Bench":
        """A setting's, with the shapes of the command line."""
        ranks, tokens, topk = mesh.size, setting.tokens, args.topk
        ids = routings.make_ids(setting.routing, ranks, tokens, topk, args.experts)
        demand = routings.traffic(ids, args.experts).demand
        capacity = {
            "1.25": int(1.25 * tokens * topk),
            "dropless": ranks * tokens * topk,
            "demand": int(demand.max()),
        }[setting.capacity]
        layer = Layer(tokens, args.hidden, topk, args.experts, capacity)
        return cls(layer, ids, mesh, setting.timed, routing=setting.routing)

    def count(self, name: str) -> int:
        """Steps of a chain: more of the short ones."""
        return self.steps[name not in ("layout", "round trip")]

    def lower(self) -> dict:
        """Everything that is to be compiled, by name."""
        lowered = {}
        for name, num_sms in self.timed:
            layer = dataclasses.replace(self.layer, num_sms=num_sms)
            _, carry, constants = STEPS[name]
            run = exchanges.program(name, layer, self.mesh, self.count(name))
            types = [self.types[each] for each in (carry, *constants)]
            lowered[name, num_sms] = run.lower(*types)
        names = ("ids", "x", "y", "weights", "row_weights")
        check = on_ranks(
            lambda *arrays: exchanges.differing(self.layer, *arrays), self.mesh
        )
        lowered["check"] = check.lower(*(self.types[name] for name in names))
        lowered["arrays"] = jax.jit(self._make, out_shardings=self.sharding).lower()
        lowered["handle"] = self.make_handle.lower(self.types["ids"])
        return lowered

    def _make(self):
        names = ("x", "y", "weights", "row_weights")
        keys = jax.random.split(jax.random.key(0), len(names))
        return {
            name: jax.random.normal(key, self.types[name].shape).astype(
                self.types[name].dtype
            )
            for name, key in zip(names, keys, strict=True)
        }

    def arrays(self, compiled) -> dict:
        """The arrays that programs take."""
        arrays = dict(compiled["arrays"]())
        ids = self.ids.reshape(-1, self.layer.topk)
        arrays["ids"] = jax.device_put(ids, self.sharding)
        arrays["handle"] = compiled["handle"](arrays["ids"])
        slot = np.asarray(arrays["handle"].slot).reshape(self.ids.shape)
        kept = np.where(slot >= 0, self.ids, -1)
        dropped = int(np.asarray(arrays["handle"].num_dropped)[: self.mesh.size].sum())
        if dropped and not self.may_drop:
            raise RuntimeError(f"{self.what}: {dropped} rows are dropped.")
        self.traffic = routings.traffic(kept, self.layer.experts)
        return arrays

    @property
    def what(self) -> str:
        """For messages."""
        return f"{self.routing}, T {self.layer.tokens}, C {self.layer.capacity}"

    def check(self, compiled, arrays) -> str:
        """Every result against the reference; what differs."""
        names = ("ids", "x", "y", "weights", "row_weights")
        wrong = np.asarray(compiled["check"](*(arrays[name] for name in names)))
        if not wrong.any():
            return ""
        return f"differs from the reference, by rank and result: {wrong.tolist()}"

    def bytes(self, name: str) -> routings.Bytes | None:
        """What the exchange must move; None for layouts and round trips."""
        row = jnp.dtype(self.layer.dtype).itemsize * self.layer.hidden
        extra = -(-4 * self.layer.topk // 16) * 16
        tokens, capacity = self.layer.tokens, self.layer.capacity
        if name in ("dispatch", "combine backward"):
            extra = extra if name == "dispatch" else 0
            return routings.dispatch_bytes(self.traffic, tokens, capacity, row, extra)
        if name in ("combine", "dispatch backward"):
            extra = extra if name != "combine" else 0
            return routings.combine_bytes(self.traffic, tokens, row, extra)
        return None

    def job(self, program, arrays, name: str) -> timing.Job:
        """One of `STEPS`; its carry is a copy, since a chain gives that away."""
        _, carry, constants = STEPS[name]
        return timing.Job(
            program, arrays[carry].copy(), [arrays[each] for each in constants]
        )

    def time(self, program, arrays, name: str) -> tuple[float, float]:
        """Seconds of one exchange and their spread; `arrays` gets the last carry."""
        _, carry, constants = STEPS[name]
        rest = [arrays[each] for each in constants]
        arrays[carry], seconds, spread = timing.measure(
            program, arrays[carry], rest, self.count(name)
        )
        return seconds, spread

    def run(self, compiled, limits: ceilings.Ceilings | None, num_sms: int) -> list:
        """Checks and times everything; a record for each."""
        arrays = self.arrays(compiled)
        if wrong := self.check(compiled, arrays):
            return [dict(what=self.what, failed=wrong)]
        records = []
        for name, sms in self.timed:
            program = compiled[name, sms]
            seconds, spread = self.time(program, arrays, name)
            records.append(
                dict(
                    routing=self.routing,
                    tokens=self.layer.tokens,
                    capacity=self.layer.capacity,
                    what=name,
                    sms=grid(sms, num_sms),
                    us=seconds * 1e6,
                    spread=spread,
                    peak_bytes=timing.peak_bytes(program),
                    **moved(self.bytes(name), seconds, limits),
                )
            )
        return records


def grid(wanted: int | None, num_sms: int) -> int | None:
    """SMs that a kernel's grid uses of a device's `num_sms` (0: not known)."""
    if num_sms == 0:
        return wanted
    return min(wanted, num_sms) if wanted else num_sms - FREE_SMS


def moved(needed: routings.Bytes | None, seconds: float, limits) -> dict:
    """Bytes, and the floor they give."""
    if needed is None:
        return {}
    found = dict(
        egress_bytes=needed.egress,
        ingress_bytes=needed.ingress,
        memory_bytes=needed.memory,
    )
    if limits is not None:
        floor = needed.floor(limits)
        found |= dict(floor_us=floor * 1e6, fraction=floor / seconds)
    return found
