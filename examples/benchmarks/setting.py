"""A routing, a capacity, and what is timed there; checked against the reference."""

import dataclasses

import ceilings
import exchanges
import jax
import jax.numpy as jnp
import numpy as np
import routings
import timing
from exchanges import AXIS, STEPS, Layer, on_ranks
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

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
    """A setting with its layer, programs and arrays."""

    def __init__(self, setting: Setting, args, mesh: Mesh):
        self.setting, self.mesh = setting, mesh
        ranks, tokens, topk = mesh.size, setting.tokens, args.topk
        self.ids = routings.make_ids(setting.routing, ranks, tokens, topk, args.experts)
        self.traffic = routings.traffic(self.ids, args.experts)
        capacity = {
            "1.25": int(1.25 * tokens * topk),
            "dropless": ranks * tokens * topk,
            "demand": int(self.traffic.demand.max()),
        }[setting.capacity]
        self.layer = Layer(tokens, args.hidden, topk, args.experts, capacity)
        self.sharding = NamedSharding(mesh, P(AXIS))

        def of(rows, width, dtype):
            shape = (ranks * rows, *width)
            return jax.ShapeDtypeStruct(shape, dtype, sharding=self.sharding)

        self.types = dict(
            ids=of(tokens, (topk,), jnp.int32),
            x=of(tokens, (args.hidden,), jnp.bfloat16),
            y=of(capacity, (args.hidden,), jnp.bfloat16),
            weights=of(tokens, (topk,), jnp.float32),
            row_weights=of(capacity, (), jnp.float32),
        )
        self.make_handle = on_ranks(self.layer.layout, mesh)
        handle = jax.eval_shape(self.make_handle, self.types["ids"])
        self.types["handle"] = jax.tree.map(
            lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=self.sharding),
            handle,
        )

    def count(self, name: str) -> int:
        """Steps of a chain: more of the short ones."""
        return 32 if name in ("layout", "round trip") else 16

    def lower(self) -> dict:
        """Everything that is to be compiled, by name."""
        lowered = {}
        for name, num_sms in self.setting.timed:
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
        dropped = np.asarray(arrays["handle"].num_dropped)
        assert not dropped.any(), f"{self.setting}: rows are dropped"
        return arrays

    def check(self, compiled, arrays) -> str:
        """Every result against the reference; what differs."""
        names = ("ids", "x", "y", "weights", "row_weights")
        wrong = np.asarray(compiled["check"](*(arrays[name] for name in names)))
        if not wrong.any():
            return ""
        return f"differs from the reference, by rank and result: {wrong.tolist()}"

    def bytes(self, name: str) -> routings.Bytes | None:
        """What the exchange must move; None for layouts and round trips."""
        row = 2 * self.layer.hidden
        extra = -(-4 * self.layer.topk // 16) * 16
        tokens, capacity = self.layer.tokens, self.layer.capacity
        if name in ("dispatch", "combine backward"):
            extra = extra if name == "dispatch" else 0
            return routings.dispatch_bytes(self.traffic, tokens, capacity, row, extra)
        if name in ("combine", "dispatch backward"):
            extra = extra if name != "combine" else 0
            return routings.combine_bytes(self.traffic, tokens, row, extra)
        return None

    def run(self, compiled, limits: ceilings.Ceilings | None, num_sms: int) -> list:
        """Checks and times everything; a record for each."""
        arrays = self.arrays(compiled)
        if wrong := self.check(compiled, arrays):
            return [dict(what=str(self.setting), failed=wrong)]
        records = []
        for name, sms in self.setting.timed:
            _, carry, constants = STEPS[name]
            program = compiled[name, sms]
            rest = [arrays[each] for each in constants]
            arrays[carry], seconds, spread = timing.measure(
                program, arrays[carry], rest, self.count(name)
            )
            records.append(
                dict(
                    routing=self.setting.routing,
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
