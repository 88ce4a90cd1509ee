"""Cases of the emulator: calls one after another on all ranks, inputs, and what
`literal` expects of every output.
"""

import dataclasses
import pathlib

import jax.numpy as jnp
import literal
import numpy as np

from jax_ep import kernels

POISON = 0xFF
UNWRITTEN = 0xCD  # kUnwritten of run.cc
DTYPES = {"float32": np.float32, "float16": np.float16, "bfloat16": jnp.bfloat16}


def random_ids(rng, shape, num_experts, masked=0.1, skew=0.0, silent=()):
    """`[R, T, K]`: distinct ids per token as far as there are enough, some masked.

    A share `skew` of the tokens wants the first experts only; `silent` ranks send
    nothing.
    """
    num_ranks, num_tokens, num_topk = shape
    ids = np.empty(shape, np.int32)
    for rank, token in np.ndindex(num_ranks, num_tokens):
        few = rng.random() < skew
        pool = min(num_experts, num_topk) if few else num_experts
        ids[rank, token] = rng.permutation(
            np.resize(rng.permutation(pool), max(pool, num_topk))
        )[:num_topk]
    ids[rng.random(shape) < masked] = -1
    for rank in silent:
        ids[rank] = -1
    return ids


def values(rng, shape, dtype):
    """Numbers whose sums need rounding, of either sign."""
    return rng.normal(size=shape).astype(np.float32).astype(DTYPES[dtype])


@dataclasses.dataclass
class Handle:
    """A layout, and the arrays of it that dispatch and combine read, by rank."""

    layout: literal.Layout
    arrays: dict[str, list[int]]
    unwritten: np.ndarray | None = None  # [R, C]: rows that dispatch leaves alone


class Case:
    """Writes itself as a case of run.cc. All arrays have the ranks' axis in front."""

    def __init__(self, num_ranks: int, num_blocks: int):
        self.num_ranks = num_ranks
        self.num_blocks = num_blocks
        self.kernels: list[kernels.Kernel] = []
        self._lines = [f"ranks {num_ranks}"]
        self._data = bytearray()
        self._stalled: int | None = None

    # --- steps --------------------------------------------------------------------

    def layout(self, ids, num_experts, capacity=None, alignment=1, **step) -> Handle:
        layout = literal.layout(ids, num_experts, capacity, alignment)
        failed = self._step(kernels.layout_kernel(), **step)
        self._pointers("topk_idx", self._inputs(ids))
        arrays = {}
        for name in (
            *("slot", "slot_rank", "recv_slot", "group_sizes", "group_counts"),
            *("group_offsets", "num_recv", "num_dropped", "num_invalid"),
        ):
            expected = getattr(layout, name).astype(np.int32)
            poison = POISON if "slot" in name else 0
            arrays[name] = self._outputs(expected, failed, poison)
            self._pointers(name, arrays[name])
        self._values(
            num_ids=ids[0].size,
            capacity=layout.capacity,
            num_experts=num_experts,
            expert_alignment=alignment,
        )
        return Handle(layout, arrays)

    def handle(self, ids, num_experts, capacity=None, alignment=1) -> Handle:
        """The same without a step: the handle is an input."""
        layout = literal.layout(ids, num_experts, capacity, alignment)
        names = ("slot", "slot_rank", "recv_slot", "group_counts", "group_offsets")
        return Handle(
            layout, {name: self._inputs(getattr(layout, name)) for name in names}
        )

    def hostile(self, layout, unwritten, **changes) -> Handle:
        """A handle whose arrays are not those of the `layout` that they amount to."""
        names = ("slot", "slot_rank", "recv_slot", "group_counts", "group_offsets")
        arrays = {name: changes.get(name, getattr(layout, name)) for name in names}
        arrays = {
            name: self._inputs(value.astype(np.int32)) for name, value in arrays.items()
        }
        return Handle(layout, arrays, unwritten)

    def dispatch(self, handle: Handle, leaves, weights=None, **step) -> None:
        layout = handle.layout
        failed = self._step(
            kernels.dispatch_kernel(
                num_ranks=self.num_ranks,
                num_topk=layout.slot.shape[2],
                leaf_bytes=[leaf.shape[2] * leaf.itemsize for leaf in leaves],
                has_weights=weights is not None,
            ),
            **step,
        )
        for name in ("slot", "slot_rank", "recv_slot", "group_counts", "group_offsets"):
            self._pointers(name, handle.arrays[name])
        for i, leaf in enumerate(leaves):
            self._pointers(f"x{i}", self._inputs(leaf))
            recv = self._as_left(literal.dispatch(leaf, layout), handle)
            self._pointers(f"recv{i}", self._outputs(recv, failed))
        if weights is not None:
            self._pointers("weights", self._inputs(weights))
            recv = self._as_left(literal.dispatch_weights(weights, layout), handle)
            self._pointers("recv_weights", self._outputs(recv, failed))
        self._values(
            num_tokens=layout.slot.shape[1],
            capacity=layout.capacity,
            num_local_experts=layout.group_counts.shape[1],
        )

    def combine(
        self,
        handle: Handle,
        leaves,
        weights=None,
        row_values=None,
        bias=None,
        wire_f32=False,
        **step,
    ) -> None:
        layout = handle.layout
        failed = self._step(
            kernels.combine_kernel(
                num_ranks=self.num_ranks,
                num_topk=layout.slot.shape[2],
                leaf_dtypes=[str(leaf.dtype) for leaf in leaves],
                leaf_widths=[leaf.shape[2] for leaf in leaves],
                has_weights=weights is not None,
                has_row_values=row_values is not None,
                has_bias=bias is not None,
                wire_f32=wire_f32,
            ),
            **step,
        )
        for name in ("slot", "slot_rank", "recv_slot"):
            self._pointers(name, handle.arrays[name])
        wire = np.dtype(np.float32) if wire_f32 else None
        for i, leaf in enumerate(leaves):
            leaf_bias = None if bias is None else bias[i]
            out = literal.combine(leaf, layout, weights, leaf_bias, wire)
            self._pointers(f"y{i}", self._inputs(leaf))
            self._pointers(f"out{i}", self._outputs(out, failed))
            if leaf_bias is not None:
                self._pointers(f"bias{i}", self._inputs(leaf_bias))
        if weights is not None:
            self._pointers("weights", self._inputs(weights))
        if row_values is not None:
            self._pointers("row_values", self._inputs(row_values))
            out = literal.undispatch_weights(row_values, layout)
            self._pointers("values", self._outputs(out, failed))
        self._values(num_tokens=layout.slot.shape[1], capacity=layout.capacity)

    @staticmethod
    def _as_left(recv, handle: Handle):
        if handle.unwritten is not None:
            recv[handle.unwritten] = np.full(recv.itemsize, UNWRITTEN, np.uint8).view(
                recv.dtype
            )[0]
        return recv

    def write(self, path: pathlib.Path) -> pathlib.Path:
        path.write_text("\n".join([*self._lines, ""]))
        path.with_name(path.name + ".bin").write_bytes(self._data)
        return path

    # --- what the file has ----------------------------------------------------------

    def _step(
        self, kernel, *, few=False, stalled: int | None = None, failed: bool = False
    ) -> bool:
        """Whether the step fails, since the rank `stalled` never launches it, or comes
        after one that `failed`.
        """
        if few:
            kernel = kernels.for_few(kernel)
        self.kernels.append(kernel)
        self._lines.append(f"step {kernel_name(kernel)} {self.num_blocks}")
        if stalled is not None:
            # Waits may end at any time where no earlier call's are among them.
            hasty = ["hasty"] if len(self.kernels) == 1 else []
            self._lines += [f"skip {stalled}", "fails", *hasty]
        self._stalled = stalled
        return failed or stalled is not None

    def _values(self, **fields) -> None:
        for rank in range(self.num_ranks):
            self._lines += [f"value {rank} {name} {v}" for name, v in fields.items()]

    def _pointers(self, name, arrays) -> None:
        for rank, array in enumerate(arrays):
            self._lines.append(f"pointer {rank} {name} {array}")

    def _array(self, num_bytes, data: int, expected: int) -> int:
        at = sum(line.startswith("array ") for line in self._lines)
        self._lines.append(f"array {num_bytes} {data} {expected}")
        return at

    def _append(self, array) -> int:
        at = len(self._data)
        self._data += np.ascontiguousarray(array).tobytes()
        return at

    def _inputs(self, array) -> list[int]:
        # Checked afterwards too: nobody writes to an operand.
        places = [self._append(part) for part in array]
        return [
            self._array(part.nbytes, place, place)
            for part, place in zip(array, places, strict=True)
        ]

    def _outputs(self, expected, failed: bool, poison: int = POISON) -> list[int]:
        arrays = []
        for rank, part in enumerate(expected):
            if failed:
                part = np.full(part.nbytes, poison, np.uint8)
            place = self._append(part)
            if failed and rank == self._stalled:
                place = -1
            arrays.append(self._array(part.nbytes, -1, place))
        return arrays


def kernel_name(kernel: kernels.Kernel) -> str:
    """One word for a kernel, also in run.cc's table."""
    texts = [text.replace(" ", "") for _, text in kernel.macros]
    return "/".join([kernel.stage, *texts])
