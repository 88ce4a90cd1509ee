"""`python -m jax_ep report`: what it writes, prints and refuses."""

import errno
import json
from pathlib import Path

import pytest
import typer
from measured import by_hand
from typer.testing import CliRunner

from jax_ep.tools import bench, profile
from jax_ep.tools.console import UserError
from jax_ep.tools.profile_events import Event
from jax_ep.tools.report import report

app = typer.Typer(pretty_exceptions_enable=False)
app.command()(report)


def run(*arguments, status: int = 0) -> str:
    """What the command prints. Raises what it raises."""
    result = CliRunner().invoke(
        app, list(map(str, arguments)), env={"COLUMNS": "120"}, catch_exceptions=False
    )
    assert result.exit_code == status, result.output
    return result.output


@pytest.fixture
def measured(tmp_path) -> Path:
    path = tmp_path / "run.json"
    by_hand().write(path)
    return path


@pytest.fixture
def folder(tmp_path) -> Path:
    path = tmp_path / "out"
    path.mkdir()
    return path


@pytest.mark.jax_version
def test_reads_a_measurement_and_writes_the_page(measured, folder):
    out = folder / "page.html"
    printed = run(measured, "--out", out)
    assert "Overlap holds this run back most" in printed
    assert str(out) in printed.replace("\n", "")
    assert out.read_text().startswith("<!doctype html>")
    assert [path.name for path in folder.iterdir()] == ["page.html"]


def test_json_is_the_diagnosis_and_nothing_else(measured, folder):
    found = json.loads(run(measured, "--out", folder / "page.html", "--json"))
    assert found["page"] == str(folder / "page.html")
    assert found["held_back_by"] == "overlap"
    assert found["amplification"] == 3
    assert found["lost_seconds"]["load"] == pytest.approx(0.010)
    assert found["last"]["times_last"] == [0, 2]


def test_pictures(measured, folder):
    run(measured, "--out", folder / "page.html", "--png", folder / "pictures")
    pictures = sorted((folder / "pictures").iterdir())
    assert [path.name for path in pictures] == [
        "load-rows.png",
        "load-time.png",
        "overlap-bars.png",
        "padding-alignments.png",
        "padding-experts.png",
        "phases-dispatch.png",
        "stages.png",
        "summary.png",
        "timeline.png",
    ]
    page = (folder / "page.html").read_text()
    for path in pictures:
        assert f'id="{path.stem}"' in page
        data = path.read_bytes()
        assert data.startswith(b"\x89PNG")
        width = int.from_bytes(data[16:20], "big")
        # 940 pixels of the page, 96 to the inch, at 200 dots per inch.
        assert width == pytest.approx(940 * 200 / 96, abs=1)


def test_without_a_file_the_benchmark_runs_with_its_options(monkeypatch, folder):
    asked = []

    def measure(request):
        asked.append(request)
        return by_hand()

    monkeypatch.setattr(bench, "measure_with_progress", measure)
    options = ["--model", "mixtral-8x7b", "--tokens", "64", "--alignment", "16"]
    run("--out", folder / "page.html", *options)
    (request,) = asked
    assert (request.tokens, request.alignment, request.experts) == (64, 16, 8)
    assert (folder / "page.html").exists()


def constructed_profile() -> profile.Profile:
    """Two round trips: 2 of the 10 ms of each dispatch run beside compute."""
    events = []
    for start in (0.0, 0.1):
        events += [
            Event("0", "layout", True, "jax_ep_layout", start, start + 0.001),
            Event("0", "dispatch", True, "jax_ep_dispatch", start + 0.01, start + 0.02),
            Event("0", "experts", False, "dot", start + 0.018, start + 0.05),
        ]
    return profile.Profile("folder", "gpu", profile.devices(events), events, [])


def test_a_profile_alone(monkeypatch, folder):
    monkeypatch.setattr(profile, "read", lambda path: constructed_profile())
    out = folder / "page.html"
    printed = run("--profile", folder, "--out", out)
    # 4 of 22 ms.
    assert "18% of the communication runs beside compute" in printed
    page = out.read_text().replace("\u00a0", " ")
    assert "communicates for 22.0 ms, for 18.0 ms of it with nothing beside" in page
    assert "<td>2</td><td>20.0 ms</td>" in page  # Two dispatches.
    assert 'id="profile-timeline"' in page and 'id="padding"' not in page
    found = json.loads(run("--profile", folder, "--out", out, "--json"))
    assert found["profile"][0]["overlapped_seconds"] == pytest.approx(0.004)


def test_a_profile_beside_a_measurement(monkeypatch, measured, folder):
    monkeypatch.setattr(profile, "read", lambda path: constructed_profile())
    run(measured, "--profile", folder, "--out", folder / "page.html")
    page = (folder / "page.html").read_text()
    assert '<section id="profile"' in page and '<section id="padding"' in page


def test_many_lanes(monkeypatch, folder):
    """More ranks than have room for a name each, from hosts with names."""
    events = [
        Event(f"host{i} {i}", "layout", True, "jax_ep_layout", 0.0, 0.001)
        for i in range(20)
    ]
    many = profile.Profile("p", "gpu", profile.devices(events), events, [])
    monkeypatch.setattr(profile, "read", lambda path: many)
    run("--profile", folder, "--out", folder / "page.html")
    page = (folder / "page.html").read_text()
    assert ">rank host0 0</text>" in page and ">rank host1 1</text>" not in page


def refused(*arguments) -> str:
    with pytest.raises(UserError) as error:
        run(*arguments)
    assert "\n" not in str(error.value)
    return str(error.value)


def test_a_missing_file_is_named(folder):
    with pytest.raises(FileNotFoundError) as error:
        run(folder / "none.json", "--out", folder / "page.html")
    assert error.value.filename == str(folder / "none.json")
    assert list(folder.iterdir()) == []


@pytest.mark.parametrize("text", ["", "[]", '{"format": "another"}', "\x00\xff"])
def test_what_is_no_measurement_is_refused(text, folder, tmp_path):
    path = tmp_path / "other.json"
    path.write_text(text)
    assert "not a measurement of jax_ep" in refused(path, "--out", folder / "page.html")
    assert list(folder.iterdir()) == []


def test_a_damaged_measurement_is_refused(measured, folder):
    found = json.loads(measured.read_text())
    found["layer"]["ranks"] = "two"
    measured.write_text(json.dumps(found))
    message = refused(measured, "--out", folder / "page.html")
    assert "ranks" in message and "'two'" in message
    assert list(folder.iterdir()) == []


def test_a_folder_that_is_not_there_is_refused_before_measuring(monkeypatch, folder):
    monkeypatch.setattr(bench, "measure_with_progress", None)  # Not to be called.
    assert "no such folder" in refused("--out", folder / "none" / "page.html")
    assert "must be a file" in refused("--out", folder)


def test_options_of_the_benchmark_do_not_apply_to_a_file(measured, folder):
    message = refused(measured, "--tokens", 64, "--out", folder / "page.html")
    assert message.startswith("report: --tokens (=64) is an option of the benchmark")


def test_an_unknown_option_is_refused(measured):
    assert "No such option" in run(measured, "--colour", "red", status=2)


@pytest.mark.parametrize("fails", ["write_text", "replace"])
def test_nothing_is_left_half_written(monkeypatch, measured, folder, fails):
    """A page that was there stays; no partial file remains."""
    out = folder / "page.html"
    out.write_text("before")

    def fail(path, *args, **kwargs):
        raise OSError(errno.EROFS, "Read-only file system", str(path))

    monkeypatch.setattr(Path, fails, fail)
    with pytest.raises(OSError, match="Read-only"):
        run(measured, "--out", out)
    monkeypatch.undo()
    assert out.read_text() == "before"
    assert [path.name for path in folder.iterdir()] == ["page.html"]
