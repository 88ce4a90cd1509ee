"""The examples' flags: every value of every one runs, or is refused in one line."""

import dataclasses
import functools
import importlib
import json
import re
import shutil
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import jax_ep

EXAMPLES = Path(__file__).parents[1] / "examples"
# What tokens, people and shells put there.
VALUES = [
    *("", " ", "0", "-1", "1", "2", "3", "9", "33", "64", "2048", "2147483648"),
    *("9" * 5000, "0.1", "-0.0", "nan", "inf", "-inf", "1e308", "none", "None", "x"),
    *("\u0663", "1_0", "0x8", "1\n2", "\x1b[31m", "a" * 300, "float8", "xla"),
    *("/dev/null", "/dev/null/x", "file", "seed=", "seed=1,1", "expert=0", "=", "=1"),
    *("expert=1,,2", "expert=2,3", "expert=8", "capacity-factor=nan,1", "fsdp=2"),
    *("capacity-factor=0.1", "capacity-factor=none,1e308", "seed=9999999999"),
]


@dataclasses.dataclass
class Example:
    """A program, without what it does with its settings: it notes them in `started`."""

    module: object
    started: list
    always: tuple[str, ...]

    def run(self, *arguments: str) -> int | None:
        """The exit status, 2 for what is refused; None where it began."""
        self.started.clear()
        sys.argv = [f"{self.module.__name__}.py", *self.always, *arguments]
        try:
            self.module.main()
        except SystemExit as exit:
            assert not self.started
            return exit.code
        assert self.started
        return None


@pytest.fixture
def example(request, monkeypatch, tmp_path):
    name, does = request.param
    monkeypatch.syspath_prepend(EXAMPLES)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setattr(sys, "argv", [name])
    Path("file").touch()
    module, started = importlib.import_module(name), []
    monkeypatch.setattr(module, does, lambda *given: started.append(given))
    always = ()
    if name == "decode_moe":
        write_run(tmp_path / "trained")
        always = ("--run", str(tmp_path / "trained"))
    # As users have it.
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield Example(module, started, always)


def write_run(folder: Path):
    """As much of a run of train_moe.py as decode_moe.py looks at before it begins."""
    settings = importlib.import_module("training").Settings(hidden=64)
    folder.mkdir()
    text = json.dumps(dataclasses.asdict(settings))
    (folder / "settings.json").write_text(text)
    with ocp.CheckpointManager(folder / "checkpoints") as checkpoints:
        checkpoints.save(0, args=ocp.args.JsonSave({}))


def train_moe(settings, mesh, checkpoints, recorder, *_):
    checkpoints.close()
    if recorder is not None:
        recorder.close()
    trace_model(settings, mesh)


def decode_moe(wish, settings, mesh, checkpoints):
    checkpoints.close()
    trace_model(settings, mesh)
    jax.random.key(wish.seed)


def trace_model(settings, mesh):
    # None of these changes a block.
    trace_block(dataclasses.replace(settings, layers=1, steps=1, seed=0), mesh)


@functools.cache
def trace_block(settings, mesh):
    lm, training = map(importlib.import_module, ("language_model", "training"))

    def loss():
        windows = jnp.zeros((mesh.size, 9), int)
        return lm.loss_and_stats(training.make_model(settings), windows)[0]

    with jax.set_mesh(mesh):
        jax.eval_shape(loss)


def sharded_experiment(runs, *_):
    *_, settings = runs.values()
    trace_sharded(dataclasses.replace(settings, layers=1, steps=1, seed=0))


@functools.cache
def trace_sharded(settings):
    model = importlib.import_module("sharded_model").Model(settings)
    tokens = jax.ShapeDtypeStruct((16, 16), jnp.int32)
    model.train_step.eval_shape(model.state_like, tokens)


def expert_placement(options, ranks):
    slots = options.experts + -(-options.replicas // ranks) * ranks
    seen = np.ones(options.experts)
    plan = jax_ep.plan_placement(seen, num_ranks=ranks, num_slots=slots)
    for each in (plan, jax_ep.identity_placement(options.experts)):
        trace_placement(options.tokens, options.topk, each.num_slots, ranks)


@functools.cache
def trace_placement(tokens, topk, num_slots, ranks):
    jax.eval_shape(
        jax.shard_map(
            lambda ids: jax_ep.dispatch_layout(ids, num_experts=num_slots).num_recv,
            mesh=jax.make_mesh((ranks,), ("expert",), axis_types=(AxisType.Auto,)),
            in_specs=P("expert"),
            out_specs=P("expert"),
        ),
        jax.ShapeDtypeStruct((ranks * tokens, topk), jnp.int32),
    )


PROGRAMS = {
    ("train_moe", "train"): train_moe,
    ("decode_moe", "decode"): decode_moe,
    ("sharded_experiment", "experiment"): sharded_experiment,
    ("expert_placement", "experiment"): expert_placement,
}


@pytest.mark.parametrize("example", PROGRAMS, indirect=True, ids=lambda p: p[0])
def test_no_value_of_any_flag_ends_in_a_traceback(example, capsys):
    module = example.module
    check = next(c for p, c in PROGRAMS.items() if p[0] == module.__name__)
    usage = module.command_line().format_usage()
    flags = sorted(set(re.findall(r"--[a-z-]+", usage)) - {"--help"})
    assert {"--seed"} < set(flags)
    num_began = 0
    for flag in flags:
        takes_value = re.search(rf"\[{flag} ", usage)
        for value in VALUES if takes_value else [None]:
            arguments = [flag] if value is None else [flag, value]
            status = example.run(*arguments)
            said = capsys.readouterr().err
            if status is None:
                num_began += 1
                check(*example.started[0])
            else:
                assert status == 2, (arguments, said)
                begins = f"{module.__name__}.py: error: "
                assert said.startswith(begins) and said.count("\n") == 1, arguments
            shutil.rmtree("runs", ignore_errors=True)
    assert num_began > 20
