"""Recorded routing: what comes back, what it may cost, and files that end early."""

import re
import struct
import threading
import warnings

import flax.linen
import flax.nnx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import CPU_FFI
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jax_ep.linen
import jax_ep.nnx
from jax_ep.record import Metadata, Record, Recorder, ids, read


def random_ids(num_experts: int, seed: int = 0, shape=(8, 4, 3)) -> np.ndarray:
    """Some of them masked."""
    return np.random.default_rng(seed).integers(-1, num_experts, shape, np.int32)


def write(path, num_experts=16, steps=(0, 1, 2), **keywords) -> dict[int, np.ndarray]:
    """Records two layers for each step; returns the ids, `[layers, ..., K]`."""
    written = {step: random_ids(num_experts, step, (2, 8, 4, 3)) for step in steps}
    with Recorder(path, num_experts=num_experts, **keywords) as recorder:
        for step, found in written.items():
            recorder.add(step, jnp.asarray(found))
    return written


@pytest.mark.parametrize(
    ("num_experts", "id_bytes"), [(8, 1), (254, 1), (255, 2), (256, 2), (2048, 2)]
)
def test_ids_come_back(tmp_path, num_experts, id_bytes):
    """Masked ones, and the highest, in the smallest type that holds both."""
    found = random_ids(num_experts, shape=(2000, 3))
    found[0] = (-1, 0, num_experts - 1)
    with Recorder(tmp_path / "run.routing", num_experts=num_experts) as recorder:
        recorder.add(7, {"decoder": jnp.asarray(found)})
    (record,) = read(tmp_path / "run.routing")
    assert record.step == 7 and list(record.topk_idx) == ["decoder"]
    assert record.topk_idx["decoder"].dtype == np.int32
    np.testing.assert_array_equal(record.topk_idx["decoder"], found)
    size = (tmp_path / "run.routing").stat().st_size
    assert size < found.size * id_bytes + 400


def test_ids_that_are_none(tmp_path):
    """As `dispatch_layout` takes them: below 0 is masked, from E on is invalid."""
    with Recorder(tmp_path / "run", num_experts=8) as recorder:
        recorder.add(0, {"0": jnp.asarray([[-7, -1, 0, 7, 8, 1000]])})
    (record,) = read(tmp_path / "run")
    assert record.topk_idx["0"].tolist() == [[-1, -1, 0, 7, 8, 8]]


def test_steps_layers_and_metadata(tmp_path):
    shares = {"data": 2, "expert": 4}
    written = write(tmp_path / "run", shares=shares, model="a model")
    assert [path.name for path in tmp_path.iterdir()] == ["run"]
    recording = read(tmp_path / "run")
    assert recording.metadata == Metadata(16, shares, "expert", "a model")
    assert recording.steps == (0, 1, 2) and len(recording) == 3
    assert recording.is_complete
    for _ in range(2):  # It may be read again.
        for record in recording:
            assert isinstance(record, Record)
            assert list(record.topk_idx) == ["0", "1"]
            for layer, found in record.topk_idx.items():
                np.testing.assert_array_equal(found, written[record.step][int(layer)])


def test_every(tmp_path):
    write(tmp_path / "run", steps=range(10), every=4)
    assert read(tmp_path / "run").steps == (0, 4, 8)


def test_max_bytes(tmp_path):
    write(tmp_path / "whole", steps=range(3))
    three = (tmp_path / "whole").stat().st_size
    write(tmp_path / "limited", steps=range(10), max_bytes=three)
    assert (tmp_path / "limited").stat().st_size == three
    recording = read(tmp_path / "limited")
    assert recording.is_complete and recording.steps == (0, 1, 2)


def test_is_full(tmp_path):
    with Recorder(tmp_path / "run", num_experts=16, max_bytes=1) as recorder:
        assert not recorder.is_full
        recorder.add(0, jnp.asarray(random_ids(16)))
    assert recorder.is_full
    assert read(tmp_path / "run").steps == ()


def test_replay(tmp_path):
    """Global ids, split as the mesh split them: one exchange for each data share."""
    shares = {"data": 2, "expert": 4}
    path, written = tmp_path / "run", write(tmp_path / "run", shares=shares)
    tokens = {step: found[1].reshape(32, 3) for step, found in written.items()}
    exchanges = ids(read(path), layer=1)
    assert exchanges.shape == (6, 4, 4, 3) and exchanges.dtype == np.int32
    for step in range(3):
        for data in range(2):
            for rank in range(4):
                first = 16 * data + 4 * rank
                np.testing.assert_array_equal(
                    exchanges[2 * step + data, rank], tokens[step][first : first + 4]
                )
    one = ids(read(path), layer="1", step=2)
    np.testing.assert_array_equal(one, exchanges[4:])
    other = ids(read(path), layer=1, num_ranks=16)
    assert other.shape == (3, 16, 2, 3)
    np.testing.assert_array_equal(other[2].reshape(32, 3), tokens[2])


def test_replay_with_the_expert_axis_first(tmp_path):
    with Recorder(
        tmp_path / "run", num_experts=8, shares={"expert": 2, "data": 2}
    ) as recorder:
        recorder.add(0, {"0": jnp.arange(8).reshape(8, 1)})
    assert ids(read(tmp_path / "run"), layer=0)[..., 0].tolist() == [
        [[0, 1], [4, 5]],
        [[2, 3], [6, 7]],
    ]


def test_sharded_ids(tmp_path):
    """As a training step returns them, over eight devices."""
    mesh = CPU_FFI.mesh(data=2, expert=4)
    found = random_ids(16)
    array = jax.device_put(found, NamedSharding(mesh, P(("data", "expert"))))
    with Recorder(tmp_path / "run", num_experts=16) as recorder:
        recorder.add(0, {"0": array})
    (record,) = read(tmp_path / "run")
    np.testing.assert_array_equal(record.topk_idx["0"], found)


def test_add_does_not_wait_for_the_devices(tmp_path):
    """Ids that are still being computed when `add` has returned."""
    may_finish = threading.Event()

    def wait(array):
        assert may_finish.wait(20)
        return array

    mesh = CPU_FFI.mesh(expert=2)  # Of one device, the call would wait itself.

    @jax.jit
    @jax.shard_map(mesh=mesh, in_specs=P("expert"), out_specs=P("expert"))
    def slow(array):
        return jax.pure_callback(wait, jax.typeof(array), array)

    found = random_ids(16)
    with Recorder(tmp_path / "run", num_experts=16) as recorder:
        array = slow(jnp.asarray(found))
        recorder.add(0, {"0": array})
        assert not array.is_ready()
        may_finish.set()
    (record,) = read(tmp_path / "run")
    np.testing.assert_array_equal(record.topk_idx["0"], found)


@pytest.mark.parametrize("lost", [1, 20, 25, 40])
def test_a_killed_run_keeps_whole_steps(tmp_path, lost):
    """Cut in the last frame, its header, or what says that it is the end."""
    written = write(tmp_path / "run")
    data = (tmp_path / "run").read_bytes()
    partial = tmp_path / "cut.partial"
    partial.write_bytes(data[:-lost])
    num_whole = 3 if lost <= 16 else 2
    line = (
        f"{partial}: this recording was not closed; {num_whole} steps of it are whole."
    )
    with pytest.warns(UserWarning, match=f"^{re.escape(line)}$"):
        recording = read(partial)
    assert not recording.is_complete
    assert recording.steps == tuple(range(num_whole))
    for record in recording:
        np.testing.assert_array_equal(record.topk_idx["1"], written[record.step][1])


def test_a_recording_can_be_read_while_it_grows(tmp_path):
    recorder = Recorder(tmp_path / "run", num_experts=16)
    recorder.add(0, {"0": jnp.asarray(random_ids(16))})
    while recorder._file.tell() < 200:  # The writer is a thread of its own.
        threading.Event().wait(0.01)
    assert [path.name for path in tmp_path.iterdir()] == ["run.partial"]
    with pytest.warns(UserWarning, match="1 steps of it are whole"):
        assert read(tmp_path / "run.partial").steps == (0,)
    recorder.close()
    recorder.close()  # is nothing new
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


def test_an_exception_keeps_what_was_recorded(tmp_path):
    with pytest.raises(KeyboardInterrupt):
        with Recorder(tmp_path / "run", num_experts=16) as recorder:
            recorder.add(3, {"0": jnp.asarray(random_ids(16))})
            raise KeyboardInterrupt
    recording = read(tmp_path / "run")
    assert recording.is_complete and recording.steps == (3,)


def test_what_is_no_recording(tmp_path):
    path = tmp_path / "run"
    for data, message in (
        (b"", "not a recording of jax_ep."),
        (b"PK\x03\x04 something else", "not a recording of jax_ep."),
        (b"jax_ep routing 2\n", "not a recording of jax_ep: it has no metadata."),
    ):
        path.write_bytes(data)
        with pytest.raises(ValueError) as error:
            read(path)
        assert str(error.value) == f"{path}: {message}"
    with pytest.raises(FileNotFoundError):
        read(tmp_path / "none")


def test_a_damaged_step(tmp_path):
    path, _ = tmp_path / "run", write(tmp_path / "run", steps=[5])
    data = bytearray(path.read_bytes())
    data[-30] ^= 1
    path.write_bytes(data)
    with pytest.raises(ValueError) as error:
        list(read(path))
    assert re.fullmatch(
        re.escape(f"{path}: this recording is damaged: the ")
        + r"\d+ bytes of step 5 at "
        r"byte \d+ do not have their checksum\.",
        str(error.value),
    )


def test_no_recording_is_replaced(tmp_path):
    write(tmp_path / "run")
    before = (tmp_path / "run").read_bytes()
    with pytest.raises(FileExistsError) as error:
        Recorder(tmp_path / "run", num_experts=16)
    assert error.value.filename == str(tmp_path / "run")
    (tmp_path / "other.partial").write_bytes(b"of a killed run")
    with pytest.raises(FileExistsError) as error:
        Recorder(tmp_path / "other", num_experts=16)
    assert str(error.value.filename) == str(tmp_path / "other.partial")
    assert (tmp_path / "run").read_bytes() == before
    assert sorted(p.name for p in tmp_path.iterdir()) == ["other.partial", "run"]


def test_an_error_of_the_writer_is_raised(tmp_path):
    """By the next call, and the file does not get its name."""
    recorder = Recorder(tmp_path / "run", num_experts=16)
    array = jnp.asarray(random_ids(16))
    recorder._file.close()
    full = open("/dev/full", "wb", buffering=0)  # noqa: SIM115 (closed by `close`)
    recorder._file = full
    with pytest.raises(OSError, match="No space left on device"):
        for step in range(1000):
            recorder.add(step, {"0": array})
            threading.Event().wait(0.01)
    with pytest.raises(OSError, match="No space left on device"):
        recorder.close()
    assert full.closed
    assert [path.name for path in tmp_path.iterdir()] == ["run.partial"]


@pytest.mark.parametrize(
    ("keywords", "message"),
    [
        (dict(num_experts=0), "num_experts (=0) must be from 1 to 2048."),
        (dict(num_experts=4096), "num_experts (=4096) must be from 1 to 2048."),
        (dict(num_experts=8, every=0), "every (=0) must be at least 1."),
        (
            dict(num_experts=8, shares={"data": 2}),
            "axis_name (=\"expert\") must be one of shares, which has ['data'].",
        ),
    ],
)
def test_arguments(tmp_path, keywords, message):
    with pytest.raises(ValueError) as error:
        Recorder(tmp_path / "run", **keywords)
    assert str(error.value) == f"jax_ep.record: {message}"
    assert not list(tmp_path.iterdir())


def test_misuse(tmp_path):
    recorder = Recorder(tmp_path / "run", num_experts=8)
    array = jnp.zeros((4, 2), int)
    with pytest.raises(ValueError, match=r"^jax_ep.record: step \(=-1\) must be at le"):
        recorder.add(-1, {"0": array})
    recorder.close()
    with pytest.raises(ValueError, match=r"^jax_ep.record: the recorder is closed\.$"):
        recorder.add(0, {"0": array})


def test_replay_errors(tmp_path):
    path = tmp_path / "run"
    write(path)
    recording = read(path)
    for keywords, message in (
        (dict(layer=9), "layer (=9) must be one of ['0', '1']."),
        (
            dict(layer=0, step=9),
            "step (=9) must be one of the 3 recorded ones, from 0 to 2.",
        ),
        (
            dict(layer=0, num_ranks=5),
            "32 tokens of a step cannot be split over 5 ranks evenly.",
        ),
    ):
        with pytest.raises(ValueError) as error:
            ids(recording, **keywords)
        assert str(error.value) == f"{path}: {message}"
    with Recorder(tmp_path / "two", num_experts=8) as recorder:
        recorder.add(0, {"0": jnp.zeros((4, 2), int)})
        recorder.add(1, {"0": jnp.zeros((8, 2), int)})
    with pytest.raises(ValueError) as error:
        ids(read(tmp_path / "two"), layer=0)
    assert str(error.value) == (
        f"{tmp_path / 'two'}: layer 0 has steps of different shapes [R, T, K], "
        "[(1, 4, 2), (1, 8, 2)]: choose one step."
    )


CONFIG = jax_ep.MoEConfig(
    num_experts=8,
    num_experts_per_tok=2,
    hidden_size=8,
    moe_intermediate_size=8,
    num_shared_experts=1,
)


def routed(x, router_kernel) -> np.ndarray:
    """The two experts of the highest logits, by numpy."""
    logits = np.asarray(x, np.float64) @ np.asarray(router_kernel, np.float64)
    return np.argsort(-logits, axis=-1)[..., :2]


@pytest.mark.jax_version
@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_the_layer_tells_its_ids(kind):
    """Global, split as the tokens are, and only where they are asked for."""
    mesh = jax.make_mesh((2, 4), ("data", "expert"), axis_types=(kind,) * 2)
    params = jax_ep.init_params(jax.random.key(0), CONFIG)
    x = jax.random.normal(jax.random.key(1), (8, 3, 8))
    mask = jnp.arange(3)[None, :] < jnp.arange(8)[:, None]
    with jax.set_mesh(mesh):
        x = jax.device_put(x, NamedSharding(mesh, P(("data", "expert"))))
        call = jax.jit(jax_ep.sharded_moe, static_argnames=("config", "keep_topk_idx"))
        out, stats = call(x, params, config=CONFIG)
        kept_out, kept = call(
            x, params, config=CONFIG, token_mask=mask, keep_topk_idx=True
        )
    assert stats.topk_idx is None
    assert kept.topk_idx.dtype == jnp.int32
    assert kept.topk_idx.sharding.shard_shape((8, 3, 2)) == (1, 3, 2)
    expected = np.where(mask[..., None], routed(x, params.router_kernel), -1)
    np.testing.assert_array_equal(kept.topk_idx, expected)
    np.testing.assert_array_equal(
        np.where(mask[..., None], out, 0), np.where(mask[..., None], kept_out, 0)
    )


def test_ids_of_scanned_layers_stack(tmp_path):
    """With gradients, under remat, straight into a recorder."""
    mesh = CPU_FFI.mesh(expert=4)
    keys = jax.random.split(jax.random.key(0), 3)
    params = jax.vmap(lambda key: jax_ep.init_params(key, CONFIG))(keys)
    x = jax.random.normal(jax.random.key(1), (8, 8))

    def loss(params, x):
        @jax.checkpoint
        def layer(x, params):
            out, stats = jax_ep.sharded_moe(
                x, params, CONFIG, mesh=mesh, keep_topk_idx=True
            )
            return x + out, (stats.topk_idx, x)

        out, (found, inputs) = jax.lax.scan(layer, x, params)
        return (out**2).sum(), (found, inputs)

    step = jax.jit(jax.grad(loss, has_aux=True))
    _, (found, inputs) = step(params, x)
    with Recorder(tmp_path / "run", num_experts=8, shares={"expert": 4}) as recorder:
        recorder.add(0, found)
    for n in range(3):
        expected = routed(inputs[n], params.router_kernel[n]).reshape(1, 4, 2, 2)
        np.testing.assert_array_equal(ids(read(tmp_path / "run"), layer=n), expected)


def test_the_flax_layers_tell_their_ids():
    """In the statistics, by each framework's means."""
    x = jax.random.normal(jax.random.key(1), (4, 2, 8))
    layer = jax_ep.nnx.MoE(CONFIG, keep_topk_idx=True, rngs=flax.nnx.Rngs(0))
    _, stats = layer(x, return_stats=True)
    expected = routed(x, layer.router_kernel[...])
    np.testing.assert_array_equal(stats.topk_idx, expected)

    layer = jax_ep.linen.MoE(CONFIG, keep_topk_idx=True)
    variables = layer.init(jax.random.key(0), x)
    _, sown = layer.apply(variables, x, mutable=["intermediates"])
    kernel = flax.linen.meta.unbox(variables)["params"]["router_kernel"]
    (stats,) = sown["intermediates"]["moe_stats"]
    np.testing.assert_array_equal(stats.topk_idx, routed(x, kernel))


@pytest.mark.parametrize("frame", ["step", "end"])
def test_a_damaged_number_of_a_step(tmp_path, frame):
    """Payloads are whole, and a step or the end has become another step."""
    path = tmp_path / "run"
    write(path, steps=[5])
    data = bytearray(path.read_bytes())
    at = data.index(struct.pack("<q", 5)) if frame == "step" else len(data) - 8
    data[at] ^= 4
    path.write_bytes(data)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Without its end it was not closed, either.
        with pytest.raises(ValueError, match="this recording is damaged"):
            list(read(path))


@pytest.mark.parametrize(
    ("topk_idx", "message"),
    [
        (jnp.zeros((4,), jnp.int32), "int32[4]) must be [layers, ..., K] of an"),
        ({"0": jnp.zeros((), jnp.int32)}, "int32[]) must be [..., K] of an integer"),
        ({"0": jnp.zeros((4, 2))}, 'layer "0" (float32[4, 2]) must be [..., K] of an'),
        ({"a": np.zeros((4, 2), int)}, 'layer "a" must be a jax.Array, got ndarray.'),
    ],
)
def test_what_is_no_routing(tmp_path, topk_idx, message):
    with (
        Recorder(tmp_path / "run", num_experts=8) as recorder,
        pytest.raises((TypeError, ValueError), match=re.escape(message)),
    ):
        recorder.add(0, topk_idx)
