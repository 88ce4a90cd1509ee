"""The CUDA program, on a machine without a GPU: custom calls, attributes, capture."""

import importlib.util
import os
import pathlib
import re
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import compute_on
from jax.experimental.xla_metadata import set_xla_metadata
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

import jax_ep
from jax_ep import ffi, nvrtc, registration

pytestmark = [
    pytest.mark.jax_version,
    pytest.mark.skipif(
        not registration.has_cuda(),
        reason="built without the CUDA handlers (they need jaxlib >= 0.11.2)",
    ),
]
try:
    nvrtc.version()
except ImportError as error:
    pytest.skip(str(error), allow_module_level=True)

TOKENS, TOPK, EXPERTS, HIDDEN = 16, 2, 8, 96


@pytest.fixture(scope="module", autouse=True)
def cache(tmp_path_factory):
    """Kernels compiled here are kept from one test to the next, and no longer."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("JAX_EP_CACHE_DIR", str(tmp_path_factory.mktemp("cache")))
        yield


def pipeline(ids, x, weights, bias, **static):
    handle = jax_ep.dispatch_layout(
        ids,
        num_experts=EXPERTS,
        expert_alignment=8,
        num_sms=20,
        timeout_s=7.5,
        **static,
    )
    rows, row_weights = jax_ep.dispatch(x, handle, weights)
    return jax_ep.combine(rows, handle, weights=row_weights, bias=bias)


def lowered(function, mesh, *, platforms=("cuda",), **static) -> str:
    """StableHLO of `function` over all axes of the mesh."""
    spec = P(mesh.axis_names)
    rows = TOKENS * mesh.size
    arguments = [
        jnp.zeros((rows, TOPK), jnp.int32),
        jnp.zeros((rows, HIDDEN), jnp.bfloat16),
        jnp.zeros((rows, TOPK), jnp.float32),
        jnp.zeros((rows, HIDDEN), jnp.bfloat16),
    ]

    def call(*arrays):
        return function(*arrays, **static)

    sharded = jax.shard_map(call, mesh=mesh, in_specs=spec, out_specs=spec)
    return (
        jax.jit(sharded).trace(*arguments).lower(lowering_platforms=platforms).as_text()
    )


def calls(text: str) -> list[tuple[str, dict[str, str]]]:
    """Our custom calls in order: target, and attributes as MLIR spells them."""
    found = []
    for line in text.splitlines():
        if call := re.search(r"custom_call @(jax_ep_\w+)\(", line):
            # Strings may hold anything but a bare quote.
            value = r'"(?:[^"\\]|\\.)*"|dense<[^>]*>|[^,}]+'
            pairs = re.findall(rf"(\w+) = ({value})", line)
            found.append((call[1], dict(pairs)))
    return found


def mesh_of(devices, **sizes) -> Mesh:
    return Mesh(np.array(devices).reshape(tuple(sizes.values())), tuple(sizes))


def test_the_three_calls_carry_their_kernels():
    found = calls(lowered(pipeline, mesh_of(jax.devices()[:4], expert=4)))
    assert [target for target, _ in found] == list(ffi.TARGETS)
    for _, attributes in found:
        assert attributes["cubin_archs"] == '"sm_90a,sm_100a"'
        for arch in ("sm_90a", "sm_100a"):
            assert attributes[f"cubin_{arch}"].startswith('"\\7FELF')
            assert re.fullmatch('"[0-9a-f]{64}"', attributes[f"cubin_{arch}_sha256"])
        assert attributes["axis"] == '"expert"'
        assert attributes["num_ranks"] == "4 : i64"
        assert attributes["num_experts"] == f"{EXPERTS} : i64"
        assert attributes["expert_alignment"] == "8 : i64"
        assert attributes["num_sms"] == "20 : i64"
        assert float(attributes["timeout_s"].split(" : ")[0]) == 7.5
        assert "[0, 1, 2, 3]" in attributes["groups"]
    (_, layout), (_, dispatch), (_, combine) = found
    assert "num_topk" not in layout
    assert dispatch["num_topk"] == combine["num_topk"] == f"{TOPK} : i64"
    assert dispatch["has_weights"] == combine["has_weights"] == "true"
    assert f"{2 * HIDDEN}" in dispatch["leaf_bytes"]
    assert combine["has_bias"] == "true" and combine["has_row_values"] == "false"
    assert f"{HIDDEN}" in combine["leaf_widths"] and "1" in combine["leaf_dtypes"]


def test_every_call_has_a_site_of_its_own():
    """Equal calls too, which JAX else lowers once."""

    def twice(ids, x, weights, bias):
        return [pipeline(ids, x, weights, bias), pipeline(ids, x, weights, bias)]

    mesh = mesh_of(jax.devices()[:2], expert=2)
    for _ in range(2):  # Numbers begin anew in each module.
        found = calls(lowered(twice, mesh))
        sites = [attributes["call_site"] for _, attributes in found]
        assert sites == [f'"jit_call {number}"' for number in range(1, 7)]


def test_streams_of_xla_are_refused():
    mesh = mesh_of(jax.devices()[:2], expert=2)
    rule = (
        " must not hold calls of jax_ep: XLA's graphs lose the order between streams, "
        "and all ranks must make their calls in one order."
    )

    def message(function):
        with pytest.raises(ValueError) as raised:
            lowered(function, mesh)
        return str(raised.value)

    def annotated(*arrays):
        with set_xla_metadata(_xla_stream_annotation=1):
            return pipeline(*arrays)

    asked = "set_xla_metadata (='_xla_stream_annotation=1')"
    assert message(annotated) == f"jax_ep: {asked}{rule}"
    on_stream = getattr(compute_on, "compute_on2", compute_on.compute_on)(
        pipeline,
        compute_type="gpu_stream:1",
        out_memory_spaces=jax.memory.Space.Device,
    )
    assert message(on_stream) == f"jax_ep: compute_on (='gpu_stream:1'){rule}"


def test_groups_list_mesh_positions_in_rank_order():
    def groups(mesh, axis):
        text = lowered(pipeline, mesh, axis_name=axis)
        (found,) = {attributes["groups"] for _, attributes in calls(text)}
        return [int(number) for number in re.findall(r"\d+", found.split("<")[1])]

    devices = jax.devices()[:8]
    mesh = mesh_of(devices, data=2, expert=2, model=2)
    assert groups(mesh, "expert") == [0, 2, 1, 3, 4, 6, 5, 7]
    assert groups(mesh, ("data", "expert")) == [0, 2, 4, 6, 1, 3, 5, 7]
    # Positions, not device ids: XLA maps them.
    assert groups(mesh_of(devices[::-1], expert=8), "expert") == list(range(8))


def test_other_implementations_carry_no_kernel():
    mesh = mesh_of(jax.devices()[:2], expert=2)
    with pytest.warns(UserWarning, match=r"timeout_s \(=7.5\) is not kept where"):
        text = lowered(pipeline, mesh, implementation="xla")
    assert calls(text) == []
    (_, attributes), *_ = calls(lowered(pipeline, mesh, platforms=("cpu",)))
    assert not any(name.startswith("cubin") for name in attributes)


def test_one_program_for_both_platforms():
    text = lowered(
        pipeline, mesh_of(jax.devices()[:2], expert=2), platforms=("cpu", "cuda")
    )
    with_kernels = ["cubin_archs" in attributes for _, attributes in calls(text)]
    assert sorted(with_kernels) == [False] * 3 + [True] * 3


def test_without_nvrtc_lowering_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "cuda.bindings", None)
    monkeypatch.setattr(nvrtc, "_memory", {})
    monkeypatch.setenv("JAX_EP_CACHE_DIR", os.devnull)
    nvrtc.version.cache_clear()
    with pytest.raises(ImportError, match=r"pip install .*\[cuda13\]'"):
        lowered(pipeline, mesh_of(jax.devices()[:2], expert=2))


# --- compiled by XLA's CUDA plugin -------------------------------------------

needs_plugin = pytest.mark.skipif(
    importlib.util.find_spec("jax_cuda13_plugin") is None,
    reason="needs jax-cuda13-plugin and jax-cuda13-pjrt (pip install --no-deps)",
)


def compiled_for_h200(folder: pathlib.Path, program: str, flags: str = "") -> str:
    """The scheduled program."""
    script = pathlib.Path(__file__).parent / "cuda" / "aot.py"
    done = subprocess.run(
        [sys.executable, script, program, folder],
        env={**os.environ, "XLA_FLAGS": flags},
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def compile_for_h200(folder: pathlib.Path, program: str, flags: str = "") -> tuple:
    """Custom calls in schedule order, and thunks as (depth, kind) in order."""
    text = compiled_for_h200(folder, program, flags)
    targets = re.findall(r'custom_call_target="jax_ep_(\w+)"', text)
    (dump,) = folder.glob(f"*jit_{program}.thunk_sequence_after_thunk_passes.txt")
    thunks = re.findall(r"^( *)\d+: (k\w+)", dump.read_text(), re.M)
    return targets, [(len(indent) // 4, kind) for indent, kind in thunks]


@needs_plugin
def test_the_pipeline_is_captured_by_default(tmp_path):
    targets, thunks = compile_for_h200(tmp_path, "forward")
    assert targets == ["layout", "dispatch", "combine"]
    assert thunks[0] == (0, "kCommandBuffer")
    assert all(depth == 1 for depth, _ in thunks[1:]), "one graph holds everything"
    assert [kind for _, kind in thunks].count("kCustomCall") == 3


@needs_plugin
def test_forward_and_backward_can_be_captured(tmp_path):
    flags = "--xla_gpu_graph_min_graph_size=1"
    targets, thunks = compile_for_h200(tmp_path, "forward_and_backward", flags)
    assert targets[0] == "layout"
    assert sorted(targets) == ["combine"] * 2 + ["dispatch"] * 2 + ["layout"]
    assert [depth for depth, kind in thunks if kind == "kCustomCall"] == [1] * 5
    # A loop on the host would wait for the device in each of its rounds.
    assert "kWhile" not in [kind for _, kind in thunks]


@needs_plugin
def test_work_stays_between_start_and_done(tmp_path):
    """In the compiled program, forward and backward, and no buffer is copied."""
    text = compiled_for_h200(tmp_path, "overlapped")
    entry = text[text.index("ENTRY ") :]
    kinds = []
    for line in entry.splitlines():
        if call := re.search(r'custom_call_target="jax_ep_(\w+)"', line):
            kinds.append(call[1])
        elif re.search(r"= \S+ (dot|fusion)\(.*dot_general", line):
            kinds.append("dot")
        else:
            assert not re.search(r" copy(-start)?\(", line), line
    assert kinds[0] == "layout"
    shown = [
        kind for kind, before in zip(kinds[1:], kinds, strict=False) if kind != before
    ]
    one = ["dispatch_start", "dot", "done", "combine_start", "dot", "done"]
    assert shown == one + one  # The transpose of a combine is a dispatch.


def test_equal_starts_stay_apart():
    def twice(ids, x, weights, bias):
        handle = jax_ep.dispatch_layout(ids, num_experts=EXPERTS)
        flights = [jax_ep.dispatch_start(x, handle, weights) for _ in range(2)]
        rows = [jax_ep.dispatch_done(flight)[0] for flight in flights]
        return jax_ep.combine(rows[0] + rows[1], handle, bias=bias)

    found = calls(lowered(twice, mesh_of(jax.devices()[:2], expert=2)))
    starts = [attributes for name, attributes in found if name.endswith("_start")]
    assert len({attributes["call_site"] for attributes in starts}) == 2
    assert [name for name, _ in found].count("jax_ep_done") == 2


@pytest.mark.parametrize("policy", ["nothing_saveable", "everything_saveable", "names"])
def test_every_start_that_is_recomputed_is_done(policy):
    """One without a done would write where others are."""
    policies = jax.checkpoint_policies
    saved = {"names": policies.save_only_these_names("jax_ep_recv", "jax_ep_handle")}
    saved = saved.get(policy) or getattr(policies, policy)

    def layer(ids, x, weights, bias):
        handle = jax_ep.dispatch_layout(ids, num_experts=EXPERTS)
        flight = jax_ep.dispatch_start(x, handle, weights)
        flight, shared = jax_ep.beside(jnp.tanh, flight, bias)
        rows, _ = jax_ep.dispatch_done(flight)
        flight = jax_ep.combine_start(jnp.sin(rows), handle, has_bias=True)
        flight, shared = jax_ep.beside(jnp.sin, flight, shared)
        return jax_ep.combine_done(flight, bias=shared)

    def gradient(ids, x, weights, bias):
        again = jax.checkpoint(lambda *floats: layer(ids, *floats), policy=saved)
        return jax.grad(lambda x: again(x, weights, bias).astype(jnp.float32).sum())(x)

    found = [
        name
        for name, _ in calls(lowered(gradient, mesh_of(jax.devices()[:2], expert=2)))
    ]
    starts = sum(name.endswith("_start") for name in found)
    assert starts == found.count("jax_ep_done") >= 3
