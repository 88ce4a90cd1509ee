"""examples/decode_moe.py: the cache changes nothing, whatever the batch."""

import dataclasses
import importlib
import json
import re
import sys
from pathlib import Path

import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest

EXAMPLES = Path(__file__).parents[1] / "examples"
WINDOW, PROMPT, NEW = 16, 6, 20  # More positions than the cache has places.
SMALL = dict(layers=2, hidden=32, experts=4, data=2, expert=2, capacity_factor=None)


@pytest.fixture
def programs(monkeypatch):
    monkeypatch.syspath_prepend(EXAMPLES)
    names = ("decode_moe", "language_model", "training", "train_moe")
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield [importlib.import_module(name) for name in names]


# One rank of four has a token, or three have.
@pytest.mark.slow
def test_greedy_text_is_that_of_the_model_without_a_cache(programs, monkeypatch):
    decode_moe, lm, training, train_moe = programs
    monkeypatch.setattr(lm, "WINDOW", WINDOW)
    settings = training.Settings(**SMALL)
    prompts = np.random.default_rng(0).integers(0, 256, (3, PROMPT)).astype(np.int32)
    mesh = train_moe.device_mesh(settings)
    assert mesh.size == 4
    with jax.set_mesh(mesh):
        model = training.make_model(settings)
        whole = jax.jit(lambda tokens: model(tokens, deterministic=True)[0].argmax(-1))
        tokens = np.zeros((3, PROMPT + NEW), np.int32)
        tokens[:, :PROMPT] = prompts
        for at in range(PROMPT, PROMPT + NEW):
            tokens[:, at] = np.asarray(whole(tokens))[:, at - 1]
        expected = tokens[:, PROMPT:]
        assert len(np.unique(expected)) > 10  # Or it would say little.
        keys = jax.random.split(jax.random.key(0), NEW - 1)
        for batch in (1, 3):
            decoder = decode_moe.Decoder(model, batch, temperature=0.0)
            state = decoder.prefill(decoder.params, prompts[:batch], keys[0])
            first = np.asarray(state.last)
            donated = state.past[0][0]
            state, rest = decoder.steps(decoder.params, state, keys)
            assert donated.is_deleted()
            assert int(state.length) == PROMPT + NEW - 1
            got = np.concatenate([first[:, None], rest], axis=1)
            np.testing.assert_array_equal(got, expected[:batch])


@pytest.mark.slow
def test_text_from_a_checkpoint_of_train_moe(programs, monkeypatch, tmp_path, capsys):
    """Written on one mesh, read on another."""
    decode_moe, _, training, train_moe = programs
    settings = training.Settings(**{**SMALL, "layers": 1}, steps=2)
    with ocp.CheckpointManager(tmp_path / "checkpoints") as checkpoints:
        with jax.set_mesh(train_moe.device_mesh(settings)):
            run = training.Run(settings, checkpoints)
            run.advance(1)
            run.save()
            checkpoints.wait_until_finished()
    text = json.dumps(dataclasses.asdict(settings))
    (tmp_path / "settings.json").write_text(text)
    flags = ["--run", str(tmp_path), "--batch", "3", "--length", "4", "--expert", "4"]
    monkeypatch.setenv("COLUMNS", "300")
    monkeypatch.setattr(sys, "argv", ["x", *flags, "--prompt", "The for statement"])
    decode_moe.main()
    shown = capsys.readouterr().out
    assert "step 1 of {'data': 2, 'expert': 4} cpu devices, 3 sequences" in shown
    assert "The for statement" in shown
    assert float(re.search(r"([\d,.]+) tokens/s", shown)[1].replace(",", "")) > 0
    share = re.search(r"exchange: (\d+)% of a step, (\d+)% to (\d+)%", shown)
    mean, least, most = map(int, share.groups())
    assert 0 < least <= mean <= most <= 100


@pytest.mark.parametrize("batch, axes", [(8, 8), (4, 4), (6, 2), (3, 1), (256, 8)])
def test_sequences_lie_on_as_many_devices_as_they_can(programs, batch, axes):
    mesh = jax.make_mesh((2, 4), ("data", "expert"))
    names = programs[0].axes_for(mesh, batch)
    assert np.prod([mesh.shape[name] for name in names], dtype=int) == axes


def test_missing_checkpoints(programs, monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(sys, "argv", ["decode_moe.py", "--run", str(tmp_path)])
    for message in ("there is no run", "there is no checkpoint"):
        with pytest.raises(SystemExit):
            programs[0].main()
        said = capsys.readouterr().err
        assert said.startswith(f"decode_moe.py: error: --run: {message} in {tmp_path}")
        settings = json.dumps(dataclasses.asdict(programs[2].Settings()))
        (tmp_path / "settings.json").write_text(settings)
