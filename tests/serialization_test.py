"""Functions of our pytrees, exported and read back."""

import jax
import numpy as np
import pytest
from conftest import CPU_FFI
from jax import export
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from layer_misuse_test import CONFIG, PARAMS, X

import jax_ep

ALLOWED = [export.DisabledSafetyCheck.custom_call(name) for name in jax_ep.CUSTOM_CALLS]


def again(function, *args):
    exported = export.export(function, disabled_checks=ALLOWED)(*args)
    return export.deserialize(exported.serialize(vjp_order=1))


@pytest.mark.jax_version
def test_a_layer_of_parameters_and_statistics():
    pytest.importorskip("flatbuffers")
    layer = jax.jit(lambda x, params: jax_ep.sharded_moe(x, params, CONFIG))
    want, stats = layer(X, PARAMS)
    out, found = again(layer, X, PARAMS).call(X, PARAMS)
    np.testing.assert_array_equal(out, want)
    assert isinstance(found, jax_ep.MoEStats)
    np.testing.assert_array_equal(found.expert_load, stats.expert_load)


@pytest.mark.parametrize("domain_size", [None, 2])
def test_a_handle_keeps_its_static_fields(domain_size):
    pytest.importorskip("flatbuffers")
    mesh = CPU_FFI.mesh(expert=4)
    layout = jax.jit(
        jax.shard_map(
            lambda ids: jax_ep.dispatch_layout(
                ids, num_experts=8, timeout_s=7.5, domain_size=domain_size
            ),
            mesh=mesh,
            in_specs=P("expert"),
            out_specs=P("expert"),
        )
    )
    ids = np.zeros((8, 2), np.int32)
    of = jax.ShapeDtypeStruct(
        ids.shape, ids.dtype, sharding=NamedSharding(mesh, P("expert"))
    )
    assert again(layout, of).out_tree == jax.tree.structure(layout(ids))


def test_a_placement():
    pytest.importorskip("flatbuffers")
    placement = jax_ep.plan_placement(np.arange(8.0), num_ranks=2, num_slots=10)
    placement = jax.tree.map(np.asarray, placement)
    found = again(jax.jit(lambda placement: placement), placement).call(placement)
    assert jax.tree.structure(found) == jax.tree.structure(placement)
    assert found.num_experts == 8
