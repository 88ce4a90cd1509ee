"""The document that bench writes and report reads."""

import dataclasses
import json

import pytest

from jax_ep.tools import measurement
from jax_ep.tools.measurement import (
    Ceilings,
    Exchange,
    Layer,
    Load,
    Measurement,
    Overlap,
    Span,
)

FOUND = Measurement(
    about={"device": "H200", "platform": "gpu"},
    layer=Layer(8, 16, 32, 2, 4, 2, 64, 1, "bfloat16"),
    routing="uniform",
    ceilings=Ceilings(None, None, 3e9),
    exchanges=[
        Exchange("layout", 1e-5, 0.1, None, None, None, None, None, None, None),
        Exchange("dispatch", 1e-3, 0.1, 9, 8, 7, 1e-4, 6, [{"issue": 1e-4}], 1.1e-3),
    ],
    load=Load([[1, 2, 3, 4]], [[3, 7]], [[0.1, 0.2]], [[0, 0]]),
    overlap=Overlap(
        1.0, 2.0, 3.0, 6.0, 5.0, 6.5, [Span("host", "issue", "step", 0.0, 0.5)]
    ),
)


@pytest.mark.jax_version
def test_what_is_written_is_read(tmp_path):
    FOUND.write(tmp_path / "m.json")
    assert measurement.read(tmp_path / "m.json") == FOUND
    assert [path.name for path in tmp_path.iterdir()] == ["m.json"]


def test_what_was_not_measured_stays_none(tmp_path):
    bare = dataclasses.replace(
        FOUND,
        ceilings=None,
        overlap=None,
        load=dataclasses.replace(FOUND.load, rank_seconds=None),
    )
    bare.write(tmp_path / "m.json")
    assert measurement.read(tmp_path / "m.json") == bare


def test_an_older_file_stays_when_writing_fails(tmp_path, monkeypatch):
    path = tmp_path / "m.json"
    path.write_text("older")

    def full(*_):
        raise OSError(28, "No space left on device", str(path))

    monkeypatch.setattr("pathlib.Path.write_text", full)
    with pytest.raises(OSError, match="No space left"):
        FOUND.write(path)
    assert path.read_bytes() == b"older"


def test_no_file(tmp_path):
    with pytest.raises(FileNotFoundError):
        measurement.read(tmp_path / "m.json")


@pytest.mark.parametrize(
    "change, words",
    [
        (lambda d: d.pop("load"), r"expected \['about', .*'load'.*\], got \['about'"),
        (lambda d: d.update(more=1), "got .*'more'"),
        (lambda d: d.update(format="other"), 'not a measurement of jax_ep \\("format"'),
        (
            lambda d: d["layer"].update(topk="2"),
            "layer: topk: expected .*int.*, got '2'",
        ),
        (lambda d: d["layer"].update(topk=True), "layer: topk: expected"),
        (
            lambda d: d["exchanges"][1].update(seconds=None),
            r"exchanges\[1\]: seconds: expected .*float.*, got None",
        ),
        (
            lambda d: d["load"]["rank_rows"][0].append(1.5),
            r"rank_rows\[0\]\[2\]: expected .*int.*, got 1.5",
        ),
        (lambda d: d.update(overlap=[]), "overlap: expected .*, got list"),
        (
            lambda d: d["layer"].update(ranks=0),
            "layer: expected sizes from 1 on, got 0",
        ),
        (lambda d: d.update(exchanges=[]), "exchanges: expected at least one"),
        (
            lambda d: d["exchanges"][0].update(seconds=0.0),
            "exchanges: expected positive seconds of .*, got 0.0",
        ),
        (
            lambda d: d["exchanges"][0].update(seconds=float("nan")),
            "exchanges: expected positive seconds of .*, got nan",
        ),
        (
            lambda d: d["load"]["rank_rows"][0].append(1),
            r"load: expected rank_rows \[\d, \d\]",
        ),
        (
            lambda d: d["load"].update(expert_rows=[]),
            r"load: expected expert_rows \[1, \d+\]",
        ),
    ],
)
def test_what_is_no_measurement(tmp_path, change, words):
    FOUND.write(tmp_path / "m.json")
    document = json.loads((tmp_path / "m.json").read_text())
    change(document)
    (tmp_path / "m.json").write_text(json.dumps(document))
    with pytest.raises(ValueError, match=words) as error:
        measurement.read(tmp_path / "m.json")
    assert str(error.value).startswith(f"{tmp_path / 'm.json'}: ")


@pytest.mark.parametrize("data", [b"", b"{", b"[1]", b"\xff\xfe"])
def test_what_is_no_json(tmp_path, data):
    (tmp_path / "m.json").write_bytes(data)
    with pytest.raises(ValueError, match="not a measurement of jax_ep"):
        measurement.read(tmp_path / "m.json")


def test_whole_numbers_are_floats_too(tmp_path):
    FOUND.write(tmp_path / "m.json")
    text = (tmp_path / "m.json").read_text()
    (tmp_path / "m.json").write_text(text.replace('"seconds": 0.001', '"seconds": 1'))
    found = measurement.read(tmp_path / "m.json").exchanges[1].seconds
    assert found == 1.0 and type(found) is float
