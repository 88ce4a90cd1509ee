"""Two processes on CPU devices, over gloo: they run the reference by themselves."""

import os
import socket
import subprocess
import sys
import time

import pytest

NUM_PROCESSES, DEVICES_EACH = 2, 2


def worker(process: int, port: int, case: str) -> None:
    """One of the processes; prints what it checked."""
    os.environ["XLA_FLAGS"] = f"--xla_force_host_platform_device_count={DEVICES_EACH}"
    import jax

    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(
        f"localhost:{port}", num_processes=NUM_PROCESSES, process_id=process
    )
    import base
    import conftest  # noqa: F401
    import jax.numpy as jnp
    import literal
    import numpy as np
    from jax.experimental import multihost_utils
    from jax.sharding import Mesh, NamedSharding
    from jax.sharding import PartitionSpec as P

    import jax_ep

    assert jax.process_count() == NUM_PROCESSES and len(jax.devices()) == 4
    sizes = {"expert": 4} if case == "flat" else {"data": 2, "expert": 2}
    mesh = Mesh(np.array(jax.devices()).reshape(tuple(sizes.values())), tuple(sizes))
    tokens = P(tuple(sizes))

    def put(array, spec=tokens):
        return jax.make_array_from_callback(
            array.shape, NamedSharding(mesh, spec), lambda index: array[index]
        )

    def shard_map(function, in_specs=tokens, out_specs=tokens):
        return jax.jit(
            jax.shard_map(function, mesh=mesh, in_specs=in_specs, out_specs=out_specs)
        )

    def whole(array):
        return multihost_utils.process_allgather(array, tiled=True)

    arrays = [put(base.X), put(base.IDS), put(base.WEIGHTS)]
    scales = put(base.SCALES, P("expert"))
    layer = shard_map(base.layer, (tokens, tokens, tokens, P("expert")))

    def loss(x, ids, weights, scales):
        out = layer(x, ids, weights, scales)
        return out.sum(), out

    step = jax.jit(jax.value_and_grad(loss, argnums=(0, 2, 3), has_aux=True))
    if case == "flat" and process == 1:
        time.sleep(2)  # A process that is late to the first exchange is waited for.
    (value, out), got = step(*arrays, scales)
    assert float(value) == 2074.75
    np.testing.assert_array_equal(whole(out), base.outputs())
    for g, want in zip(got, base.gradients(), strict=True):
        np.testing.assert_array_equal(whole(g), want)

    if case == "flat":
        # Against the literal loop: masks, drops, alignment, bfloat16 sums.
        random = np.random.default_rng(0)
        ids = random.integers(-1, 9, (4, 6, 3), np.int32)
        want = literal.layout(ids, 8, 16, 4)
        y = random.standard_normal((4, want.capacity, 5), np.float32)
        y = y.astype(jnp.bfloat16)

        def stages(ids, y):
            handle = jax_ep.dispatch_layout(
                ids, num_experts=8, capacity=16, expert_alignment=4
            )
            recv, _ = jax_ep.dispatch(ids, handle)
            return handle.slot, handle.num_dropped, recv, jax_ep.combine(y, handle)

        slot, dropped, recv, sums = map(
            whole, shard_map(stages)(put(ids.reshape(24, 3)), put(y.reshape(-1, 5)))
        )
        np.testing.assert_array_equal(slot.reshape(4, 6, 3), want.slot)
        np.testing.assert_array_equal(dropped.reshape(4, 4), want.num_dropped)
        np.testing.assert_array_equal(
            recv.reshape(4, -1, 3), literal.dispatch(ids, want)
        )
        expected = literal.combine(y, want)
        np.testing.assert_array_equal(
            sums.reshape(4, 6, 5).view(np.uint16), expected.view(np.uint16)
        )
        text = step.lower(*arrays, scales).compile().as_text()
        assert base.custom_calls(text) == (0, 0, 0)
        # The custom call is for one process, and says so.
        try:
            shard_map(
                lambda ids: (
                    jax_ep.dispatch_layout(
                        ids, num_experts=8, implementation="ffi"
                    ).slot
                )
            ).lower(arrays[1])
        except NotImplementedError as error:
            assert str(error) == (
                "jax_ep: implementation='ffi' needs CPU devices of one process, or "
                "CUDA, and at most 64 ranks; lowering for ('cpu',) over 2 processes "
                "with 4 ranks."
            ), error
        else:
            raise AssertionError("lowered")
    print(f"process {process} passed")


@pytest.mark.jax_version
@pytest.mark.parametrize("case", ["flat", "data x expert"])
def test_two_processes(case):
    """Two devices each: the expert axis across processes, and inside each."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    env = dict(os.environ, JAX_PLATFORMS="cpu")
    processes = [
        subprocess.Popen(
            [sys.executable, __file__, str(process), str(port), case],
            env=env,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for process in range(NUM_PROCESSES)
    ]
    try:
        outputs = [process.communicate(timeout=100)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
    for number, (process, output) in enumerate(zip(processes, outputs, strict=True)):
        assert process.returncode == 0, output
        assert f"process {number} passed" in output


if __name__ == "__main__":
    worker(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3])
