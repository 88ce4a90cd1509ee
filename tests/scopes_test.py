"""Every stage under its name in the compiled program, forward and backward."""

import re

import jax
import jax.numpy as jnp
import pytest
from conftest import CPU_FFI, CPU_XLA

import jax_ep
from jax_ep import ffi

CONFIG = dict(
    num_experts=8,
    num_experts_per_tok=2,
    hidden_size=16,
    moe_intermediate_size=24,
    num_shared_experts=1,
    load_balance_loss_weight=0.01,
)


def training_step(backend, wrap=lambda layer: layer):
    """Two scanned layers, their gradients, and arguments."""
    config = jax_ep.MoEConfig(implementation=backend.implementation, **CONFIG)
    mesh = backend.mesh(expert=4)

    def loss(params, x):
        def layer(x, _):
            out, stats = jax_ep.sharded_moe(x, params, config, mesh=mesh)
            return x + out, stats.aux_loss

        y, aux_loss = jax.lax.scan(wrap(layer), x, None, length=2)
        return (y**2).sum() + aux_loss.sum()

    step = jax.jit(jax.value_and_grad(loss, argnums=(0, 1)))
    return step, (jax_ep.init_params(jax.random.key(0), config), jnp.ones((16, 16)))


def op_names(text: str) -> list[tuple[str, str]]:
    """Each instruction's text with the name that profilers show it under."""
    return re.findall(r'^(.* metadata=\{.*?op_name="([^"]*)".*)$', text, re.MULTILINE)


def scope_of(name: str) -> tuple[str, str]:
    """Direction, and the one component that names a stage."""
    direction = "backward" if "transpose(" in name else "forward"
    scopes = [part for part in name.split("/") if part.startswith("jax_ep.")]
    assert len(scopes) == 1, name
    return direction, scopes[0]


@pytest.mark.jax_version
@pytest.mark.parametrize("wrap", [lambda layer: layer, jax.checkpoint])
def test_custom_calls_are_in_their_stage(wrap):
    """A backward call is its stage's: that of dispatch calls combine's handler."""
    step, args = training_step(CPU_FFI, wrap)
    found = set()
    for line, name in op_names(step.lower(*args).compile().as_text()):
        if target := re.search(r'custom_call_target="(jax_ep_\w+)"', line):
            found.add((*scope_of(name), target[1]))
    forward = {
        ("forward", "jax_ep.layout", "jax_ep_layout"),
        ("forward", "jax_ep.dispatch", "jax_ep_dispatch"),
        ("forward", "jax_ep.combine", "jax_ep_combine"),
    }
    backward = {
        ("backward", "jax_ep.combine", "jax_ep_dispatch"),
        ("backward", "jax_ep.dispatch", "jax_ep_combine"),
    }
    assert forward | backward <= found
    # Under remat the forward's calls are repeated in the backward, under their names.
    repeated = {("backward", *call) for _, *call in forward}
    assert found <= forward | backward | repeated


@pytest.mark.jax_version
@pytest.mark.parametrize("backend", [CPU_FFI, CPU_XLA], ids=["ffi", "xla"])
def test_every_stage_has_a_name(backend):
    step, args = training_step(backend)
    text = step.lower(*args).compile().as_text()
    names = [name for _, name in op_names(text) if "/jax_ep." in name]
    stages = ("router", "dispatch", "experts", "shared_experts", "combine", "stats")
    expected = {
        (direction, f"jax_ep.{stage}")
        for stage in stages
        for direction in ("forward", "backward")
    }
    assert {scope_of(name) for name in names} - {("backward", "jax_ep.layout")} == (
        expected | {("forward", "jax_ep.layout")}
    )


@pytest.mark.jax_version
def test_no_matrix_product_is_without_a_name():
    step, args = training_step(CPU_FFI)
    products = [
        name
        for line, name in op_names(step.lower(*args).compile().as_text())
        if re.search(r" (dot|ragged-dot)\(", line)
    ]
    assert len(products) >= 12
    assert {scope_of(name)[1] for name in products} == {
        "jax_ep.router",
        "jax_ep.experts",
        "jax_ep.shared_experts",
    }


@pytest.mark.jax_version
def test_profiles_show_calls_by_their_targets(tmp_path):
    """On the threads of CPU devices, forward and backward, once for every device."""
    step, args = training_step(CPU_FFI)
    jax.block_until_ready(step(*args))
    with jax.profiler.trace(str(tmp_path)):
        jax.block_until_ready(step(*args))
    (path,) = tmp_path.rglob("*.xplane.pb")
    names = [
        event.name.split(".")[0]
        for plane in jax.profiler.ProfileData.from_file(str(path)).planes
        for line in plane.lines
        for event in line.events
    ]
    # Two layers on four devices; each exchange has a forward and a backward.
    counts = {name: names.count(name) for name in ffi.TARGETS}
    assert counts == {"jax_ep_layout": 8, "jax_ep_dispatch": 16, "jax_ep_combine": 16}
