"""What `sizing` says of two hops is in the compiled program and in the handle."""

import re
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import CPU_FFI
from jax.sharding import AbstractMesh, AxisType
from jax.sharding import PartitionSpec as P
from sizing_test import assert_mean, draw

import jax_ep
from jax_ep import sizing
from jax_ep.sizing import Shape, UniformRouting
from jax_ep.tools.benchmark import hops

RANKS, TOKENS, HIDDEN = 8, 48, 72
ROUTING = UniformRouting(16, 3)
SHAPES = [
    Shape(ROUTING, TOKENS, HIDDEN, RANKS, 1.5, domain_size=4),
    Shape(
        ROUTING,
        TOKENS,
        HIDDEN,
        RANKS,
        1.5,
        domain_size=2,
        network_capacity_factor=0.9,
    ),
]


def layout(shape: Shape, ids, **told) -> jax_ep.Handle:
    return jax_ep.dispatch_layout(
        ids,
        num_experts=shape.routing.num_experts,
        domain_size=shape.domain_size,
        network_capacity_factor=shape.network_capacity_factor,
        capacity=sizing.receive_rows(shape),
        **told,
    )


def on_ranks(function, mesh):
    spec = P("expert")
    return jax.jit(jax.shard_map(function, mesh=mesh, in_specs=spec, out_specs=spec))


def stages(shape: Shape, mesh, wire: str | None = None):
    """Each stage alone: its program, and its operands' types."""

    def of(rows, width, dtype):
        return jax.ShapeDtypeStruct((shape.num_ranks * rows, *width), dtype)

    capacity = sizing.receive_rows(shape)
    rows = jnp.bfloat16
    ids = of(shape.tokens, (shape.routing.num_topk,), jnp.int32)
    x = of(shape.tokens, (shape.hidden,), rows)
    weights = of(shape.tokens, (shape.routing.num_topk,), jnp.float32)
    y, y_weights = of(capacity, (shape.hidden,), rows), of(capacity, (), jnp.float32)

    def dispatch(x, weights, handle):
        return jax_ep.dispatch(x, handle, weights, wire=wire)

    def dispatch_backward(d_y, d_weights, x, weights, handle):
        pull_back = jax.vjp(lambda x, w: dispatch(x, w, handle), x, weights)[1]
        return pull_back((d_y, d_weights))

    def combine_backward(d_out, y, handle):
        return jax.vjp(lambda y: jax_ep.combine(y, handle), y)[1](d_out)

    make = on_ranks(lambda ids: layout(shape, ids), mesh)
    handle = jax.eval_shape(make, ids)
    return {
        "layout": (make, (ids,)),
        "dispatch": (on_ranks(dispatch, mesh), (x, weights, handle)),
        "combine": (on_ranks(jax_ep.combine, mesh), (y, handle)),
        "dispatch backward": (
            on_ranks(dispatch_backward, mesh),
            (y, y_weights, x, weights, handle),
        ),
        "combine backward": (on_ranks(combine_backward, mesh), (x, y, handle)),
    }


def said(shape: Shape) -> dict[str, sizing.Hops]:
    return {
        "layout": sizing.layout_hops(shape),
        "dispatch": sizing.dispatch_hops(shape),
        "combine": sizing.combine_hops(shape),
        "dispatch backward": sizing.combine_hops(shape, weight_gradients=True),
        "combine backward": sizing.dispatch_hops(shape, weights=False),
    }


@pytest.mark.jax_version
@pytest.mark.parametrize("shape", SHAPES, ids=["4", "2"])
def test_bytes_and_memory_of_the_compiled_program(shape):
    """Hop 1 to the byte; the handle too; buffers of what crosses by their number."""
    row = sizing.row_bytes(HIDDEN)
    for name, (program, types) in stages(shape, CPU_FFI.mesh(expert=RANKS)).items():
        compiled = program.lower(*types).compile()
        crossing = hops.between_bytes(compiled.as_text(), shape.num_domains)
        assert crossing == said(shape)[name].between.nic, name
        memory = compiled.memory_analysis()
        if name == "layout":
            pointers = 8 * len(jax.tree.leaves(program.eval_shape(*types)))
            outputs = memory.output_size_in_bytes
            assert outputs == sizing.handle_bytes(shape) + pointers
        if name in ("dispatch", "combine"):
            # Packed and arrived, or sums and what came home; XLA reuses some.
            relay = sizing.relay_bytes(shape, row)
            assert relay < memory.temp_size_in_bytes < 3.5 * relay, name


def test_at_most_four_buffers_of_what_crosses_are_alive():
    """A whole step, whose other buffers are small: few receive rows, wide tokens."""
    shape = Shape(UniformRouting(8, 1), 256, 512, RANKS, domain_size=2)

    def step(x, weights, ids):
        def loss(x, weights):
            handle = jax_ep.dispatch_layout(
                ids, num_experts=8, domain_size=2, capacity=8
            )
            rows, recv = jax_ep.dispatch(x, handle, weights)
            y = rows * recv[:, None].astype(x.dtype)
            return jax_ep.combine(y, handle).astype(jnp.float32).sum()

        return jax.grad(loss, (0, 1))(x, weights)

    def of(width, dtype):
        return jax.ShapeDtypeStruct((RANKS * shape.tokens, width), dtype)

    program = on_ranks(step, CPU_FFI.mesh(expert=RANKS))
    lowered = program.lower(of(512, jnp.bfloat16), of(1, jnp.float32), of(1, jnp.int32))
    memory = lowered.compile().memory_analysis()
    relay = sizing.relay_bytes(shape, sizing.row_bytes(shape.hidden))
    assert 2 * relay < memory.temp_size_in_bytes < 4.1 * relay


@pytest.mark.parametrize("wire, dtype", [("float8_e4m3fn", "float8"), ("mxfp8",) * 2])
def test_bytes_of_quantised_rows(wire, dtype):
    shape = SHAPES[1]
    program, types = stages(shape, CPU_FFI.mesh(expert=RANKS), wire)["dispatch"]
    text = program.lower(*types).compile().as_text()
    expected = sizing.dispatch_hops(shape, dtype=dtype).between.nic
    assert hops.between_bytes(text, shape.num_domains) == expected


@pytest.mark.jax_version
@pytest.mark.parametrize(
    "ranks, domain, factor", [(8, 4, None), (64, 8, 1.06), (256, 8, 1.06)]
)
def test_as_many_ranks_as_no_machine_here_has(ranks, domain, factor):
    """Handle, rows and hop 1, of the program lowered for a mesh without devices."""
    shape = Shape(
        UniformRouting(256, 8),
        16,
        64,
        ranks,
        2.0,
        domain_size=domain,
        network_capacity_factor=factor,
    )
    mesh = AbstractMesh((ranks,), ("expert",), axis_types=(AxisType.Auto,))
    programs = stages(shape, mesh)
    make, types = programs["layout"]
    handle = jax.tree.leaves(jax.eval_shape(make, *types))
    num_bytes = sum(leaf.size * leaf.dtype.itemsize for leaf in handle)
    assert num_bytes == ranks * sizing.handle_bytes(shape)
    widths = dict(i32=4, ui16=2, ui32=4)
    for name, (program, types) in programs.items():
        lowered = program.trace(*types).lower(lowering_platforms=("cpu",))
        total = 0
        for operand in re.findall(
            r"stablehlo\.all_to_all.* : \(tensor<(.*?)>\)", lowered.as_text()
        ):
            *sizes, kind = operand.split("x")
            assert int(sizes[0]) == shape.num_domains
            total += np.prod([int(size) for size in sizes]) * widths[kind]
        sent = total // shape.num_domains * (shape.num_domains - 1)
        assert sent == said(shape)[name].between.nic, name


@pytest.mark.parametrize("shape", SHAPES, ids=["4", "2"])
def test_rows_inside_are_those_of_the_handle(shape):
    """Rows of hop 2: counted in handles, in ids by a loop, and expected by sizing."""
    size, places = shape.domain_size, sizing.crossing(shape).places
    make = on_ranks(
        lambda ids: jax_ep.dispatch_layout(  # Without drops by capacity.
            ids,
            num_experts=16,
            domain_size=size,
            network_capacity_factor=shape.network_capacity_factor,
        ),
        CPU_FFI.mesh(expert=RANKS),
    )
    means = []
    for seed in range(20):
        ids = draw(ROUTING, RANKS * TOKENS, seed).astype(np.int32)
        counts = hops.inside_rows(make(ids))
        expected = np.zeros(RANKS, int)
        for source, tokens in enumerate(ids.reshape(RANKS, TOKENS, 3) // 2):
            taken = [0] * shape.num_domains
            for token in tokens:
                for domain in sorted({rank // size for rank in token}):
                    if taken[domain] < places:
                        taken[domain] += 1
                        relay = domain * size + source % size
                        to = {r for r in token if r // size == domain} - {relay}
                        expected[relay] += len(to)
        np.testing.assert_array_equal(counts, expected)
        means.append(counts.mean())
    assert_mean(np.array(means), sizing.crossing(shape).inside)


def test_the_example_prints_what_sizing_says(monkeypatch, capsys):
    folder = Path(__file__).parents[1] / "examples" / "benchmarks"
    monkeypatch.syspath_prepend(folder)
    import two_hops as example

    told = "--ranks 4 --domain-size 2 --tokens 16 --hidden 8 --experts 8 --topk 2"
    monkeypatch.setattr("sys.argv", ["two_hops.py", *told.split()])
    example.main()
    first, _, *lines = capsys.readouterr().out.splitlines()
    assert first.startswith("2 domains of 2, room for 16 of 16 tokens")
    stages = dict(re.fullmatch(r"(\D+?) +(\d.*)", line).groups() for line in lines)
    assert list(stages) == list(said(SHAPES[0]))
    numbers = {name: [int(n) for n in text.split()] for name, text in stages.items()}
    assert numbers["dispatch"][:2] == [16 * (16 + 8)] * 2
    assert numbers["combine"][:2] == [16 * 16] * 2
    assert 0 < numbers["combine"][2] <= 2 * 16 * 16


def test_what_has_no_second_hop():
    make = on_ranks(
        lambda ids: jax_ep.dispatch_layout(ids, num_experts=8), CPU_FFI.mesh(expert=2)
    )
    with pytest.raises(ValueError, match="no second hop"):
        hops.inside_rows(make(np.zeros((4, 2), np.int32)))
    with pytest.raises(ValueError, match="10 bytes of all_to_all are not 4 shares"):
        hops.between_bytes("x = u16[5]{0} all-to-all(y)", 4)
