"""Experts split over a tensor axis too: the values of whole weights on one device."""

import dataclasses
import re

import jax
import numpy as np
import pytest
import stored_test
from conftest import CPU_FFI
from jax.sharding import AxisType, NamedSharding
from stored_test import CONFIG, PARTED, SIZES, TOKENS

import jax_ep

pytestmark = pytest.mark.slow

ROUNDS = dict(capacity_factor=0.5, dropless_fallback=True)


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
@pytest.mark.parametrize("config", [CONFIG, PARTED], ids=["fused", "parted"])
def test_global_arrays(config, kind):
    """Output biases, shared experts, gradients of every parameter."""
    mesh = jax.make_mesh(tuple(SIZES.values()), tuple(SIZES), axis_types=(kind,) * 3)

    def layer(x, params):
        out, stats = jax_ep.sharded_moe(
            x, params, config, mesh=mesh, tensor_axis="tensor"
        )
        assert stats.num_recv.shape == (2,)
        return out

    stored_test.check(layer, config)


@pytest.mark.parametrize(
    ("fields", "specs", "check_vma"),
    [
        (dict(), dict(intermediate="tensor"), True),
        (ROUNDS, dict(intermediate="tensor"), True),
        (ROUNDS | dict(fuse_gate_up=True), dict(intermediate="tensor"), False),
        (dict(), dict(intermediate=("tensor", "data")), False),
        (dict(), dict(hidden="tensor"), True),  # Whole F, cut here.
    ],
)
def test_in_the_users_shard_map(fields, specs, check_vma):
    config = dataclasses.replace(PARTED, **fields)
    specs = jax_ep.param_specs(config, expert="expert", **specs)
    placement = None
    if not fields and check_vma:
        placement = jax_ep.plan_placement(np.arange(8.0), num_ranks=2, num_slots=12)
    layer = jax.shard_map(
        lambda x, params: jax_ep.moe(
            x,
            params,
            config,
            tensor_axis="tensor",
            specs=specs,
            placement=placement,
        )[0],
        mesh=CPU_FFI.mesh(**SIZES),
        in_specs=(TOKENS, specs),
        out_specs=TOKENS,
        check_vma=check_vma,
    )
    plain = dataclasses.replace(config, capacity_factor=None, dropless_fallback=False)
    stored_test.check(layer, plain)


def test_a_token_crosses_the_link_once():
    """Rows of H / 2 per rank in dispatch and combine."""
    mesh = CPU_FFI.mesh(expert=2, tensor=2)
    config = dataclasses.replace(PARTED, mlp_bias=False, shared_expert_gate=False)
    specs = jax_ep.param_specs(config, expert="expert", intermediate="tensor")
    params = jax.tree.map(
        lambda leaf, spec: jax.ShapeDtypeStruct(
            leaf.shape, leaf.dtype, sharding=NamedSharding(mesh, spec)
        ),
        stored_test.params_of(config),
        specs,
    )
    layer = jax.jit(
        lambda x, params: jax_ep.sharded_moe(
            x, params, config, mesh=mesh, tensor_axis="tensor"
        )[0]
    )
    text = layer.lower(jax.ShapeDtypeStruct((8, 16), np.float32), params).as_text()
    calls = re.findall(r"custom_call @jax_ep_(dispatch|combine).*", text)
    assert calls == ["dispatch", "combine"]
    lines = [line for line in text.splitlines() if "@jax_ep_dispatch" in line]
    assert "tensor<4x8xf32>" in lines[0] and "x16xf32" not in lines[0]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            dict(tensor_axis="tesnor"),
            "tensor_axis (=\"tesnor\") must name axes of the mesh, which has ('data', "
            "'expert', 'tensor'), and none of the expert axis \"expert\".",
        ),
        (
            dict(tensor_axis=("data", "tensor"), config=dict(moe_intermediate_size=6)),
            "moe_intermediate_size (=6) must be divisible by the 4 ranks of "
            'tensor_axis "data,tensor".',
        ),
        (
            dict(tensor_axis="tensor", data_axes=("data", "tensor")),
            'data_axes (="data,tensor") must not have one of tensor_axis "tensor": its '
            "ranks have the same tokens.",
        ),
    ],
)
def test_refusals(options, message):
    config = dataclasses.replace(CONFIG, **options.pop("config", {}))
    params = stored_test.params_of(config)
    mesh = CPU_FFI.mesh(**SIZES)
    with pytest.raises(ValueError) as raised:
        jax_ep.sharded_moe(stored_test.X, params, config, mesh=mesh, **options)
    assert str(raised.value).partition(": ")[2] == message
