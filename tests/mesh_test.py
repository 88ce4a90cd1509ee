"""Expert parallelism on any axis of any mesh, in any device order."""

import dataclasses
import functools
import math

import base
import jax
import numpy as np
import pytest
from base import IDS, SCALES, WEIGHTS, X
from conftest import Backend, enough_for_reference
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from stages import assert_bits_equal


@dataclasses.dataclass(frozen=True)
class Layout:
    """A mesh, and the axes that expert parallelism runs over."""

    sizes: dict[str, int]
    axis_name: str | tuple[str, ...]
    order: str = "as is"  # of the devices
    explicit: bool = False

    def __str__(self):
        sizes = "x".join(f"{name}{size}" for name, size in self.sizes.items())
        kind = "explicit" if self.explicit else "auto"
        return f"{sizes}-{','.join(self.names)}-{self.order}-{kind}"

    @property
    def names(self) -> tuple[str, ...]:
        single = isinstance(self.axis_name, str)
        return (self.axis_name,) if single else self.axis_name

    @property
    def num_ranks(self) -> int:
        return math.prod(self.sizes[name] for name in self.names)

    def mesh(self, backend: Backend) -> Mesh:
        num = math.prod(self.sizes.values())
        devices = np.array(backend.devices(num))
        if self.order == "reversed":
            devices = devices[::-1]
        elif self.order == "permuted":
            devices = devices[np.random.default_rng(3).permutation(num)]
        kind = jax.sharding.AxisType.Explicit if self.explicit else None
        return Mesh(
            devices.reshape(tuple(self.sizes.values())),
            tuple(self.sizes),
            axis_types=None if kind is None else (kind,) * len(self.sizes),
        )


LAYOUTS = [
    Layout({"expert": 4}, "expert", "reversed"),
    Layout({"expert": 8}, "expert", "permuted"),
    Layout({"expert": 1}, "expert"),
    Layout({"data": 2, "expert": 2}, "expert"),
    Layout({"data": 2, "expert": 2}, "expert", "permuted", explicit=True),
    Layout({"expert": 2, "data": 2}, "expert"),
    Layout({"expert": 4, "data": 2}, "expert", "reversed", explicit=True),
    Layout({"data": 2, "expert": 4}, "expert", "permuted"),
    Layout({"data": 2, "expert": 2, "model": 2}, "expert"),
    Layout({"expert": 2, "data": 2, "model": 2}, "expert", explicit=True),
    Layout({"data": 2, "model": 2, "expert": 2}, "expert", "permuted"),
    Layout({"data": 2, "expert": 2}, ("data", "expert")),
    Layout({"data": 2, "expert": 2}, ("expert", "data"), explicit=True),
    Layout({"a": 2, "b": 2, "c": 2}, ("a", "c"), "permuted"),
    Layout({"a": 2, "b": 2, "c": 2}, ("c", "a")),
    Layout({"a": 2, "b": 2, "c": 2}, ("b", "c", "a"), "reversed"),
    Layout({"data": 2, "expert": 1}, "expert"),
    Layout({"data": 2}, ()),
]


def batch(num_devices: int, seed: int = 0):
    """Four tokens per device, other ones on each; small integers and eighths."""
    random = np.random.default_rng(seed)
    tokens = 4 * num_devices
    return (
        random.integers(-4, 5, (tokens, 3)).astype(np.float32),
        random.integers(-1, 8, (tokens, 2)).astype(np.int32),
        (random.integers(1, 5, (tokens, 2)) / 8).astype(np.float32),
    )


def step_of(backend, layout: Layout, mesh: Mesh):
    """value_and_grad of the layer, every array split by (group, rank)."""
    others = tuple(name for name in layout.sizes if name not in layout.names)
    tokens = P((*others, *layout.names))
    experts = P(layout.names) if layout.names else P()
    function = jax.shard_map(
        functools.partial(
            base.layer,
            axis_name=layout.axis_name,
            implementation=backend.implementation,
        ),
        mesh=mesh,
        in_specs=(tokens, tokens, tokens, experts),
        out_specs=tokens,
    )

    def loss(x, ids, weights, scales):
        out = function(x, ids, weights, scales)
        return (out * x).sum(), out

    step = jax.jit(jax.value_and_grad(loss, argnums=(0, 2, 3), has_aux=True))

    def call(x, ids, weights, scales):
        put = [
            jax.device_put(array, NamedSharding(mesh, spec))
            for array, spec in zip(
                (x, ids, weights, scales),
                (tokens, tokens, tokens, experts),
                strict=True,
            )
        ]
        return step(*put)

    return call


def check_step(step, arrays):
    """out = S x, loss = <out, x>: dx = 2 S x, and so on; exact in float32."""
    (value, out), (dx, d_weights, d_scales) = step(*arrays, SCALES)
    x, ids, weights = arrays
    want = base.outputs(x, ids, weights)
    assert value == (want * x).sum()
    assert_bits_equal(out, want)
    assert_bits_equal(dx, 2 * want)
    squares = (x * x).sum(1, keepdims=True)
    _, want_weights, want_scales = base.gradients(squares, ids, weights)
    assert_bits_equal(d_weights, want_weights)
    assert_bits_equal(d_scales, want_scales)


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_layer(backend, layout):
    """Each group exchanges inside itself, ranks in the order of lax.axis_index."""
    enough_for_reference(backend, LAYOUTS.index(layout) % 2)
    mesh = layout.mesh(backend)
    check_step(step_of(backend, layout, mesh), batch(mesh.size))


@pytest.mark.parametrize("explicit", [True, False])
def test_make_mesh_and_set_mesh(backend, explicit):
    """The mesh of jax.make_mesh, made current; shard_map takes it from there."""
    kind = jax.sharding.AxisType
    mesh = jax.make_mesh(
        (2, 2),
        ("data", "expert"),
        devices=backend.devices(4),
        axis_types=((kind.Explicit if explicit else kind.Auto),) * 2,
    )
    spec = P(("data", "expert"))
    with jax.set_mesh(mesh):
        function = jax.shard_map(
            functools.partial(base.layer, implementation=backend.implementation),
            in_specs=(spec, spec, spec, P("expert")),
            out_specs=spec,
        )
        arrays = [jax.device_put(array, spec) for array in batch(4)]
        scales = jax.device_put(SCALES, P("expert"))
        out = jax.jit(function)(*arrays, scales)
    assert_bits_equal(out, base.outputs(*batch(4)))


def test_two_meshes_alive(backend):
    """Used in turn, with sub-groups of two sizes over the same devices."""
    layouts = [
        Layout({"expert": 4}, "expert"),
        Layout({"data": 2, "expert": 2}, "expert", "reversed"),
    ]
    steps = [step_of(backend, layout, layout.mesh(backend)) for layout in layouts]
    for seed, which in enumerate((0, 1, 0, 0, 1, 1, 0)):
        check_step(steps[which], batch(4, seed))


def test_two_meshes_in_one_process_at_once(backend):
    """Launches on both before waiting for either."""
    layouts = [
        Layout({"data": 2, "expert": 2}, "expert"),
        Layout({"data": 2, "expert": 2}, "expert", "permuted"),
    ]
    steps = [step_of(backend, layout, layout.mesh(backend)) for layout in layouts]
    batches = [batch(4, seed) for seed in range(8)]
    results = [steps[n % 2](*arrays, SCALES) for n, arrays in enumerate(batches)]
    for ((_, out), _), arrays in zip(results, batches, strict=True):
        assert_bits_equal(out, base.outputs(*arrays))


def test_groups_do_not_touch_each_other(backend):
    """Group (2, 3) of a 2 x 2 mesh has the result that it has alone."""
    layout = Layout({"data": 2, "expert": 2}, "expert")
    step = step_of(backend, layout, layout.mesh(backend))
    (_, out), _ = step(X, IDS, WEIGHTS, SCALES)
    assert base.per_rank(out) == base.SUMS
    other = np.concatenate([np.full_like(X[:8], np.nan), X[8:]])
    other_ids = np.concatenate([np.full_like(IDS[:8], 5), IDS[8:]])
    (_, out), _ = step(other, other_ids, WEIGHTS, SCALES)
    assert_bits_equal(np.asarray(out)[8:], base.outputs()[8:])


@pytest.mark.parametrize("check_vma", [True, False])
def test_tensor_parallel_axis(backend, check_vma):
    """Expert 2 x model 2: x is the same on the model axis, and so is the result."""
    mesh = backend.mesh(expert=2, model=2)

    def body(x, ids, weights, scales, split):
        # Each model rank has half of the scales' work, as with a split hidden axis.
        out = base.layer(x, ids, weights, scales, implementation=backend.implementation)
        return jax.lax.psum(out * split, "model")

    spec = P("expert")
    function = jax.shard_map(
        body,
        mesh=mesh,
        in_specs=(spec, spec, spec, spec, P("model")),
        out_specs=spec,
        check_vma=check_vma,
    )
    split = np.array([0.25, 0.75], np.float32)[:, None]

    def loss(x, weights, scales):
        return function(x, IDS, weights, scales, split).sum()

    value, got = jax.jit(jax.value_and_grad(loss, argnums=(0, 1, 2)))(
        X, WEIGHTS, SCALES
    )
    assert value == 2074.75
    for g, want in zip(got, base.gradients(), strict=True):
        assert_bits_equal(g, want)


def test_an_axis_that_nothing_varies_over(backend):
    """The result is typed as the same on it: out_specs without it are accepted."""
    mesh = backend.mesh(expert=2, model=2)
    varying = []

    def body(x, ids, weights, scales):
        out = base.layer(x, ids, weights, scales, implementation=backend.implementation)
        varying.append(jax.typeof(out).mat.varying)
        return out

    function = jax.shard_map(
        body, mesh=mesh, in_specs=P("expert"), out_specs=P("expert")
    )
    out = jax.jit(function)(X, IDS, WEIGHTS, SCALES)
    assert varying == [frozenset(["expert"])]
    assert_bits_equal(out, base.outputs())


def test_no_gather_of_x(backend):
    """A batch split over (data, expert) is not gathered in front of our calls."""
    if backend.implementation != "ffi":
        pytest.skip("the reference gathers, as its docstring says")
    mesh = backend.mesh(data=2, expert=2)
    spec = P(("data", "expert"))
    function = jax.shard_map(
        functools.partial(base.layer, implementation="ffi"),
        mesh=mesh,
        in_specs=(spec, spec, spec, P("expert")),
        out_specs=spec,
    )
    step = jax.jit(
        jax.grad(lambda *args: function(*args).sum(), argnums=(0, 2)),
        in_shardings=[NamedSharding(mesh, s) for s in (spec, spec, spec, P("expert"))],
    )
    text = step.lower(X, IDS, WEIGHTS, SCALES).compile().as_text()
    assert "all-gather" not in text and "all-to-all" not in text
    assert base.custom_calls(text) == (1, 2, 1)


def test_handles_of_two_axes(backend):
    """One program, one mesh, exchanges over either axis and over both."""
    mesh = backend.mesh(a=2, b=2)
    spec = P(("a", "b"))

    def body(x, ids, weights, *scales):
        outs = [
            base.layer(
                x,
                ids,
                weights,
                mine,
                axis_name=names,
                implementation=backend.implementation,
            )
            for names, mine in zip(("a", "b", ("b", "a")), scales, strict=True)
        ]
        return sum(outs)

    function = jax.shard_map(
        body,
        mesh=mesh,
        in_specs=(spec, spec, spec, P("a"), P("b"), P(("b", "a"))),
        out_specs=spec,
    )
    out = jax.jit(function)(X, IDS, WEIGHTS, SCALES, SCALES, SCALES)
    assert_bits_equal(out, 3 * base.outputs())
