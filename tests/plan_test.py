"""`python -m jax_ep plan`: what it prints, draws and refuses."""

import importlib
import importlib.metadata
import io
import json
import re
import subprocess
import sys
import xml.etree.ElementTree

import jax
import pytest
import rich.console
import typer
from typer.testing import CliRunner

import jax_ep
from jax_ep import sizing
from jax_ep.tools import console, plan_view
from jax_ep.tools.console import UserError
from jax_ep.tools.estimate import ALIGNMENTS
from jax_ep.tools.models import MODELS, find_model
from jax_ep.tools.plan import plan

app = typer.Typer(pretty_exceptions_enable=False)
app.command()(plan)


def run(arguments: str) -> str:
    """What the command prints. Raises what it raises."""
    result = CliRunner().invoke(
        app, arguments.split(), env={"COLUMNS": "120"}, catch_exceptions=False
    )
    assert result.exit_code == 0
    return result.stdout


def refused(arguments: str) -> str:
    with pytest.raises(UserError) as error:
        run(arguments)
    assert "\n" not in str(error.value)
    return str(error.value)


def document(arguments: str) -> dict:
    found = json.loads(run(arguments + " --json"))
    assert found["format"] == "jax_ep plan 2"
    return found


def stages(found: dict, kind: str = "exchanges") -> dict[str, dict]:
    return {each["name"]: each for each in found[kind]}


def test_numbers_of_the_benchmark():
    """The shape of examples/benchmarks/results/h200.md: floors of 911 and 907 us there,
    for the busiest rank of a draw; here for expected bytes."""
    found = document(
        "--hidden 7168 --experts 256 --topk 8 --ranks 4 --capacity-factor 1.25"
    )
    exchanges = stages(found)
    assert exchanges["dispatch"]["seconds"] == pytest.approx(911e-6, rel=0.01)
    assert exchanges["combine"]["seconds"] == pytest.approx(907e-6, rel=0.01)
    assert exchanges["combine backward"]["seconds"] == pytest.approx(909e-6, rel=0.01)
    # K floats travel behind each row where the router's weights go and come back.
    link = {name: found["traffic"]["link"] for name, found in exchanges.items()}
    assert link["dispatch"] == link["dispatch backward"]
    assert link["combine"] == link["combine backward"]
    assert link["dispatch"] / link["combine"] == pytest.approx(14368 / 14336)
    assert exchanges["dispatch"]["binds"] == "link"
    assert exchanges["dispatch"]["sms"] == 28
    assert found["memory"]["receive_rows"] == 81920
    assert found["memory"]["receive"] == 81920 * (14336 + 4)
    assert found["memory"]["workspace"] == 158 * 2**20
    assert found["memory"]["expert_weights"] is None
    assert found["notes"] == found["hops"] == []
    assert found["crossing"] is None and found["memory"]["relay"] == 0


def test_a_known_model():
    found = document("deepseek-v3 --ranks 8 --tokens 4096 --alignment 128")
    assert found["distinct_ranks"] == pytest.approx(3.629, abs=1e-3)
    assert found["model"]["layers"] == 58
    assert found["memory"]["expert_weights"] == 32 * 3 * 7168 * 2048 * 2
    assert found["rows_per_expert"] == 1024
    assert sorted(map(int, found["padding"])) == sorted(ALIGNMENTS)
    shape = sizing.Shape(
        sizing.UniformRouting(256, 8, 8, 4), 4096, 7168, 8, expert_alignment=128
    )
    expected = sizing.expected_padding_amplification(shape)
    assert found["padding"]["128"] == expected
    assert [step["num_ranks"] for step in found["growth"]] == list(sizing.EP_RANKS)
    # Dropless: 8 * 4096 * min(8, 32) rows, and room to align 32 experts.
    assert found["memory"]["receive_rows"] == (8 * 4096 * 8 + 32 * 127) // 128 * 128
    assert "8.1 times" in found["notes"][0]


def test_options_override_the_model():
    found = document("deepseek-v3 --groups 1 --topk-groups 1 --topk 4 --layers 2")
    assert found["model"]["topk"] == found["shape"]["routing"]["num_topk"] == 4
    assert found["model"]["n_group"] == 1
    assert found["model"]["layers"] == 2
    assert found["model"]["hidden"] == 7168


def test_float8_is_of_dispatch_alone_and_about_half_the_bytes():
    wide = stages(document("deepseek-v3"))
    narrow = stages(document("deepseek-v3 --dtype float8"))
    ratio = narrow["dispatch"]["traffic"]["link"] / wide["dispatch"]["traffic"]["link"]
    assert ratio == pytest.approx((7168 + 224 + 32) / (14336 + 32))
    others = wide.keys() - {"dispatch"}
    assert {"combine", "dispatch backward", "combine backward"} < others
    assert all(narrow[name] == wide[name] for name in others)


def test_rates_and_nodes():
    arguments = "mixtral-8x7b --capacity-factor 1 --ranks 8"
    base = stages(document(arguments))["dispatch"]
    faster = stages(document(arguments + " --link-rate 704"))["dispatch"]
    assert faster["bound"]["link"] == pytest.approx(base["bound"]["link"] / 2)
    found = document(arguments + " --gpus-per-node 4 --nic-rate 25")
    direct, hops = stages(found), stages(found, "hops")
    # 2 of 8 experts: 4 ranks of 8 are elsewhere, each hit with probability 1/4; the
    # other node is hit unless both experts are here, 6 of 28 pairs.
    nic = direct["dispatch"]["traffic"]["nic"]
    assert nic == pytest.approx(8192 * 4 / 4 * (2 * 4096 + 16))
    assert direct["dispatch"]["bound"]["nic"] == pytest.approx(nic / 25e9)
    row = 2 * 4096 + 8  # XLA rounds nothing up, and sends all that have room.
    nic = hops["dispatch"]["hops"]["between"]["nic"]
    assert nic == 8192 * row
    assert hops["dispatch"]["bound"]["between"]["nic"] == pytest.approx(nic / 25e9)
    wanted = hops["dispatch"]["hops"]["wanted"]
    assert wanted == pytest.approx(8192 * (1 - 6 / 28) * row)
    assert found["machine"]["source"].startswith("nic rate as given; link")
    assert found["machine"]["origin"]["nic_rate"] == "given"
    assert found["machine"]["origin"]["link_rate"] == "measured"
    assert "no machine with several domains has measured" in found["notes"][0]


def test_two_hops():
    """The numbers of docs/more_than_one_node.md: 822 and 577 MB, 545 wanted."""
    arguments = "--hidden 7168 --experts 256 --topk 8 --ranks 64"
    whole = document(arguments)
    assert whole["crossing"]["places"] == 8192
    combine = stages(whole, "hops")["combine"]
    assert combine["hops"]["between"]["nic"] == 7 * 8192 * 14336  # 822 MB
    assert combine["hops"]["wanted"] == pytest.approx(544e6, rel=1e-3)
    assert whole["memory"]["relay_rows"] == 8 * 8192
    assert whole["memory"]["relay"] == 8 * 8192 * (14336 + 32)
    assert whole["memory"]["workspace"] == 256 * 2**20
    notes = " ".join(whole["notes"])
    assert "Of 8192 rows to each domain 5422 are wanted" in notes
    assert "--network-capacity-factor 1.06" in notes
    # With a capacity factor a layer has rounds, and so 1.06 from eight domains on.
    layer = document(arguments + " --capacity-factor 1.25 --chunks 8")
    assert layer["shape"]["network_capacity_factor"] == 1.06
    combine = stages(layer, "hops")["combine"]
    assert combine["hops"]["between"]["nic"] == 7 * 5748 * 14336  # 577 MB
    assert combine["hops"]["boundary"] == 8 * 7 * 5748 * 14336
    first, second = combine["bound"]["between"]["nic"], combine["bound"]["inside"]
    assert first == pytest.approx(577e6 / 50e9, rel=1e-3)
    assert combine["seconds"] == pytest.approx(first + second["link"])
    assert combine["chunked_seconds"] == pytest.approx(first + second["link"] / 8)
    assert combine["binds"] == ["nic", "link"]
    told = document(arguments + " --network-capacity-factor 0.9")
    assert told["crossing"]["places"] == 4880
    assert "10.0% of the slots have no room" in " ".join(told["notes"])


def test_group_limited_routing_wants_less_room():
    """Four of eight groups that are domains: 3.63 domains a token, not 5.29."""
    found = document("deepseek-v3 --ranks 64 --capacity-factor 1.25")
    assert found["crossing"]["arrived"] == pytest.approx(3.629 * 8192, rel=1e-3)
    note = next(n for n in found["notes"] if "--network-capacity-factor" in n)
    factor = float(re.search(r"factor ([\d.]+)", note)[1])
    assert factor == pytest.approx(1.06 * 3.629 / 5.295, rel=1e-3)
    again = document(
        "deepseek-v3 --ranks 64 --capacity-factor 1.25 "
        f"--network-capacity-factor {factor}"
    )
    assert again["crossing"]["kept"] > 0.9995
    assert not any("--network-capacity-factor" in n for n in again["notes"])


def test_few_sms_bound_the_time():
    found = stages(document("olmoe-1b-7b --ranks 2 --capacity-factor 1.25 --num-sms 4"))
    assert found["dispatch"]["binds"] == "sms"
    assert found["dispatch"]["seconds"] == found["dispatch"]["bound"]["sms"]


def test_more_ranks_than_jax_ep_takes():
    found = document("deepseek-v3 --ranks 512 --gpus-per-node 128")
    assert found["memory"]["workspace"] is None
    notes = " ".join(found["notes"])
    assert "arithmetic, not a promise" in notes
    assert "each has 2 replicas" in notes


def test_tables_and_chart():
    text = run("deepseek-v3 --ranks 16 --capacity-factor 1.25 --alignment 128")
    assert "deepseek-ai/DeepSeek-V3: H 7168, E 256, K 8, 4 of 8 groups" in text
    assert "NVLink 352 (measured), NIC 50 (data sheet), memory 3860 (measured)" in text
    assert "All bytes and times are arithmetic" in text
    assert "4 H200s" in text and "not measured" in text
    assert "58 MoE layers: at least forward" in text
    for title in (
        "by two hops",
        "a comparison",
        "Between domains",
        "Memory",
        "Padding",
    ):
        assert title in text
    row = next(line for line in text.splitlines() if "workspace" in line)
    assert "256 MiB" in row
    row = next(line for line in text.splitlines() if "what crosses" in line)
    assert "16384" in row  # Two domains, each with room for all tokens.
    bars = {
        match[1]: len(match[2])
        for match in re.finditer(r"(EP\d+) (█+) [\d.]+ [µm]s", text)
    }
    assert list(bars) == [f"EP{n}" for n in sizing.EP_RANKS]
    assert max(bars.values()) == bars["EP2048"]
    assert bars["EP16"] > 4 * bars["EP8"]
    hops = re.findall(r"^ +(░+) ", text, re.M)
    assert len(hops) == 8  # EP16 to EP2048.
    assert max(map(len, hops)) == len(hops[-1]) == 40


def test_ranks_that_do_not_divide_are_named(tmp_path):
    """7 experts: of EP2 to EP2048 nothing is left but what was asked for."""
    text = run(
        "--hidden 8 --experts 7 --topk 2 --ranks 7 --gpus-per-node 72 "
        f"--plot {tmp_path}/plan.svg"
    )
    assert "Left out: 2, 4, 8, 16, 32, 64, 128" in " ".join(text.split())
    assert "EP7 ████" in text
    assert (tmp_path / "plan.svg").exists()


def test_one_rank():
    found = document("--hidden 8 --experts 4 --topk 2 --ranks 1")
    assert stages(found)["dispatch"]["traffic"]["link"] == 0
    assert stages(found)["dispatch"]["binds"] == "memory"
    assert "EP1 " in run("--hidden 8 --experts 4 --topk 2 --ranks 1")


def test_a_terminal_without_unicode(monkeypatch):
    monkeypatch.setattr(plan_view, "_unicode", lambda: False)
    text = run("olmoe-1b-7b --capacity-factor 1")
    assert "EP2048 ####" in text and " us" in text
    assert "µ" not in text and "█" not in text


@pytest.mark.parametrize("kind", ["svg", "png"])
def test_picture(tmp_path, kind):
    path = tmp_path / f"plan.{kind}"
    text = run(f"kimi-k2 --plot {path}")
    assert str(path) in text.replace("\n", "")
    assert [file.name for file in tmp_path.iterdir()] == [path.name]
    if kind == "png":
        assert path.read_bytes().startswith(b"\x89PNG")
        return
    root = xml.etree.ElementTree.parse(path).getroot()
    assert root.tag.endswith("svg")
    # What distinguishes the lines is not their colour.
    assert "stroke-dasharray" in path.read_text()


def test_json_with_a_picture_prints_json_only(tmp_path):
    document(f"kimi-k2 --plot {tmp_path / 'plan.svg'}")


def test_a_picture_that_cannot_be_written(tmp_path, monkeypatch):
    assert "must end in .png or .svg" in refused(f"kimi-k2 --plot {tmp_path}/plan.pdf")
    missing = tmp_path / "no" / "plan.svg"
    assert f"there is no folder {missing.parent}" in refused(
        f"kimi-k2 --plot {missing}"
    )

    def fails(self, path, **_):
        path.write_text("half")
        raise OSError(28, "No space left on device", str(path))

    monkeypatch.setattr("matplotlib.figure.Figure.savefig", fails)
    with pytest.raises(OSError, match="No space left"):
        run(f"kimi-k2 --plot {tmp_path}/plan.svg")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "arguments, message",
    [
        ("deepseek-v5", "did you mean deepseek-v3?"),
        ("mixtral8x7b", "did you mean mixtral-8x7b?"),
        ("zzz", "known are deepseek-v2,"),
        ("--hidden 64", "or --experts, --topk too"),
        ("olmoe-1b-7b --model kimi-k2", "--model (=kimi-k2) must be alone"),
        ("olmoe-1b-7b --capacity-factor x", "must be a number, or none for dropless"),
        ("", "or --hidden, --experts, --topk too"),
        ("mixtral-8x7b --ranks 3", "num_ranks (=3) must divide num_experts (=8)"),
        ("mixtral-8x7b --topk 9", "num_topk (=9) must be at most num_experts (=8)"),
        ("deepseek-v3 --groups 7", "n_group (=7) must be a divisor"),
        ("olmoe-1b-7b --ranks -2", "num_ranks (=-2) must be at least 1"),
        ("olmoe-1b-7b --tokens 0", "tokens (=0) must be at least 1"),
        (f"olmoe-1b-7b --tokens {10**21}", "must be at most 2147483647"),
        ("olmoe-1b-7b --layers -5", "--layers (=-5) must be at least 1"),
        ("olmoe-1b-7b --expert-hidden -5", "--expert-hidden (=-5) must be at least 0"),
        ("olmoe-1b-7b --capacity-factor inf", "capacity_factor (=inf) must be at"),
        ("olmoe-1b-7b --capacity-factor 0", "capacity_factor (=0.0) must be at least"),
        ("olmoe-1b-7b --dtype int8", "dtype (='int8') must be one of float32"),
        ("olmoe-1b-7b --machine a100", "--machine (=a100) must be one of h100, h200"),
        ("olmoe-1b-7b --link-rate -3", "--link-rate (=-3) must be positive"),
        ("olmoe-1b-7b --nic-rate nan", "--nic-rate (=nan) must be positive"),
        ("olmoe-1b-7b --gpus-per-node 0", "domain_size (=0) must be at least 1"),
        ("olmoe-1b-7b --gpus-per-node 3", "multiple of domain_size (=3)"),
        ("olmoe-1b-7b --num-sms 133", "num_sms (=133) must be at most the 132 of h200"),
        ("olmoe-1b-7b --num-sms 8 --machine b200", "not measured on b200"),
        (
            "--hidden 8 --experts 6 --topk 2 --ranks 12 --gpus-per-node 3",
            "the 4 domains of 3 ranks must divide num_experts (=6)",
        ),
    ],
)
def test_refused_in_one_line(arguments, message):
    assert message in refused(arguments)


@pytest.mark.jax_version
def test_from_the_shell():
    """The program itself: JSON alone on stdout, and one line and status 2 for less."""

    def program(*arguments: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-P", "-m", "jax_ep", *arguments]
        return subprocess.run(command, capture_output=True, text=True)

    done = program("plan", "deepseek-v3", "--json")
    assert (done.returncode, done.stderr) == (0, "")
    assert json.loads(done.stdout)["format"] == "jax_ep plan 2"
    done = program("plan", "deepseek-v4")
    assert (done.returncode, done.stdout) == (2, "")
    assert re.fullmatch(r"jax_ep: model .* did you mean deepseek-v3\?.*\n", done.stderr)
    done = program("--version")
    ours = f"jax_ep {jax_ep.__version__}, jax {jax.__version__}, jaxlib "
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith(ours) and done.stdout.count("\n") == 1


def test_the_console_script_is_the_same_program():
    (script,) = importlib.metadata.entry_points(group="console_scripts", name="jax_ep")
    assert script.load() is importlib.import_module("jax_ep.__main__").main


@pytest.mark.parametrize("flags", ["--capacity-factor -1", "--capacity-factor none"])
def test_dropless(flags):
    assert document(f"olmoe-1b-7b {flags}") == document("--model olmoe-1b-7b")


def test_more_rows_than_int32_numbers():
    """What is advised is what dispatch_layout takes, and no more."""
    flags = "mixtral-8x7b --capacity-factor 1 --alignment 8"
    (note,) = document(f"{flags} --tokens 134217728")["notes"]
    most = int(re.search(r"send at most (\d+) in a call", note)[1])
    # R*T*K and, for one local expert, A - 1.
    assert 8 * most * 2 + 7 < 2**31 <= 8 * (most + 1) * 2 + 7
    assert document(f"{flags} --tokens {most}")["notes"] == []


@pytest.mark.parametrize("width", [30, 50, 80, 120])
def test_terminals_of_any_width(width, monkeypatch):
    """No line is too long, no number is broken, and nothing is left out."""
    wide, narrow = (
        rich.console.Console(width=n, file=io.StringIO()) for n in (400, width)
    )
    shown = []
    for terminal in (wide, narrow):
        for module in (console, plan_view):
            monkeypatch.setattr(module, "console", terminal)
        run("deepseek-v3 --ranks 16")
        shown.append(terminal.file.getvalue())
    assert max(map(len, shown[1].splitlines())) <= width
    numbers = [re.findall(r"\d+\.\d+", text) for text in shown]
    assert sorted(numbers[0]) == sorted(numbers[1])
    # What runs today stands beside what is arithmetic.
    assert "Up to 8 ranks, one NVLink domain, run" in " ".join(shown[1].split())


@pytest.mark.parametrize("name", MODELS)
def test_every_model_is_possible(name):
    """Its numbers pass the checks, and its own names are accepted."""
    model = MODELS[name]
    routing = sizing.UniformRouting(
        model.experts, model.topk, model.n_group, model.topk_group
    )
    assert sizing.distinct_ranks(routing, 8) <= min(8, model.topk) + 1e-12
    assert find_model(model.repository) is model
    assert find_model(name.upper()) is model


# Parameters of all routed experts, in billions: the published total less what is in
# attention, embeddings and shared experts, which the totals' digits leave room for.
@pytest.mark.parametrize(
    "name, total, share",
    [
        ("deepseek-v2", 236, 0.93),
        ("deepseek-v3", 671, 0.95),
        ("kimi-k2", 1026, 0.95),
        ("mixtral-8x7b", 46.7, 0.95),
        ("mixtral-8x22b", 141, 0.95),
        ("olmoe-1b-7b", 6.92, 0.9),
        ("qwen2-57b-a14b", 57.4, 0.8),
        ("qwen3-30b-a3b", 30.5, 0.93),
        ("qwen3-235b-a22b", 235, 0.95),
        ("qwen3-coder-480b-a35b", 480, 0.95),
        ("gpt-oss-20b", 20.9, 0.9),
        ("gpt-oss-120b", 116.8, 0.95),
        ("glm-4.5", 355, 0.93),
        ("deepseek-v2-lite", 15.7, 0.9),
    ],
)
def test_shapes_give_the_published_size(name, total, share):
    model = MODELS[name]
    experts = model.layers * model.experts * 3 * model.hidden * model.expert_hidden
    assert share * total < experts / 1e9 < total
