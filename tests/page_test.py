"""The report's page: every number on it is that of the measurement."""

import dataclasses
import itertools
import re
import xml.etree.ElementTree

import pytest
from measured import by_hand

from jax_ep.tools.diagnosis import diagnose
from jax_ep.tools.measurement import Span
from jax_ep.tools.page import build, overlap, palette, units

SVG = xml.etree.ElementTree.Element


def html(measurement=None) -> str:
    measurement = measurement or by_hand()
    return build.page(measurement, diagnose(measurement)).html()


def plain(text: str) -> str:
    return text.replace("\u00a0", " ")


def tables(page: str) -> dict[str, list[list[str]]]:
    """Rows of cells by caption."""
    found = {}
    for text in re.findall(r"<table.*?</table>", page, re.S):
        table = xml.etree.ElementTree.fromstring(text)
        found[table.findtext("caption")] = [
            [plain(cell.text or "") for cell in row] for row in table.iter("tr")
        ]
    return found


def chart(page: str, name: str) -> SVG:
    (text,) = re.findall(rf'<svg class="chart" id="{name}".*?</svg>', page, re.S)
    return xml.etree.ElementTree.fromstring(text)


def widths(svg: SVG, fill: str) -> list[float]:
    """Of the boxes with a fill, in percent of the chart."""
    return [
        float(rect.attrib["width"].rstrip("%"))
        for rect in svg.iter("rect")
        if rect.attrib["class"] == f"fill-{fill}"
    ]


def said(svg: SVG) -> list[str]:
    return [plain(text.text or "") for text in svg.iter("text")]


def test_the_verdict_is_the_largest_of_the_four():
    page = html()
    (verdict,) = re.findall(r'<p class="verdict">(.*?)</p>', page)
    assert re.match(r"Overlap holds this run back most: 20(\.0)? ms", plain(verdict))
    rows = tables(page)["Time lost to each of the four"]
    # 1.25 + 0.5 over 1 + 0.4; 2 of 128 rows of 30 ms; 30 over 20; 130 over 110 ms.
    assert [row[:3] for row in rows[1:]] == [
        ["bandwidth", "350 µs", "0.3%"],
        ["padding", "469 µs", "0.4%"],
        ["load", "10.0 ms", "7.7%"],
        ["overlap", "20.0 ms", "15%"],
    ]
    summary = chart(page, "summary")
    # Of the step of 130 ms, which is the scale.
    assert widths(summary, "whole") == [100]
    assert widths(summary, "worst") == pytest.approx([15.385], abs=0.001)
    assert widths(summary, "plain") == pytest.approx([0.269, 0.361, 7.692], abs=0.001)
    assert "of which the experts alone 38%" in " ".join(said(summary))
    # 5 of 261 rows.
    assert "1.9% of the rows found no room in the receive buffers" in plain(page)
    assert "To try: Work beside the exchange: a shared expert" in plain(page)


def test_bandwidth():
    page = html()
    rows = tables(page)["Time of one call, and its floor"]
    dispatch, combine = rows[1:]
    assert dispatch == [
        "dispatch", "1.25 ms", "2.0%", "1.00 ms", "80%", "link out",
        "300 MB", "200 MB", "1.00 GB", "240 GB/s", "320 GB/s",
    ]  # fmt: skip
    assert combine[1:6] == ["500 µs", "1.0%", "400 µs", "80%", "memory"]
    # To one scale, that of the longest: 1.0 and 0.4 of 1.25, and what is over.
    stages = chart(page, "stages")
    assert widths(stages, "floor") == [80, 32]
    assert widths(stages, "excess") == [20, 8]
    assert "Dispatch loses most: 250 µs over its floor of 1.00 ms" in plain(page)


def test_phases_are_told_apart_by_rank():
    page = html()
    assert tables(page)["dispatch by rank"] == [
        ["Rank", "issue", "drain", "epilogue", "all"],
        ["rank 0", "800 µs", "300 µs", "100 µs", "1.20 ms"],
        ["rank 1", "500 µs", "250 µs", "250 µs", "1.00 ms"],
    ]
    lanes = chart(page, "phases-dispatch")
    whole = 84  # percent; the rest is for the names
    issue, drain, epilogue = (
        widths(lanes, name) for name in ("issue", "drain", "epilogue")
    )
    assert issue == pytest.approx([whole * 8 / 12, whole * 5 / 12], abs=0.01)
    assert drain == pytest.approx([whole * 3 / 12, whole * 2.5 / 12], abs=0.01)
    assert epilogue == pytest.approx([whole / 12, whole * 2.5 / 12], abs=0.01)
    assert "dispatch 1.30 ms instead of 1.25 ms (+4.0%)" in plain(page)
    assert "The phases of combine: no stamped build was run." in page


def test_padding_names_the_worst_expert():
    page = html()
    # Over both steps: 256 slots for 2 rows, 256 for 252.
    assert tables(page)["A_pad of each expert"][1:] == [
        ["expert 0", "128×", "2", "256"],
        ["expert 1", "128×", "2", "256"],
        ["expert 2", "1.02×", "252", "256"],
    ]
    assert "A_pad is 3.00×: 768 slots for 256 rows, over 2 steps." in page
    assert "1 expert without a row, not drawn." in page
    columns = chart(page, "padding-experts")
    heights = [float(rect.attrib["height"]) for rect in columns.iter("rect")]
    assert heights[0] == heights[1] == 170  # The scale doubles seven times to 128.
    assert heights[2] == pytest.approx(170 * 0.02272 / 7, abs=0.01)  # log2(256 / 252)
    assert said(columns)[-3] == "expert 0: 128×"
    others = dict(tables(page)["The same rows at other alignments"][1:])
    # 1 + 1 + 126 rows are 16 + 16 + 128 slots at 16, 3 * 256 at 256.
    assert others == {
        "1": "1.00×", "16": "1.25×", "64": "2.00×", "128": "3.00×", "256": "6.00×"
    }  # fmt: skip


def test_load_shows_who_is_last_and_whether_it_stays():
    page = html()
    assert tables(page)["Rows, by rank and step"] == [
        ["Step", "rank 0", "rank 1", "Most"],
        ["0", "2", "126", "rank 1"],
        ["1", "2", "126", "rank 1"],
    ]
    times = chart(page, "load-time")
    texts = said(times)
    assert "last in 0" in texts and "last in 2" in texts
    marks = [r for r in times.iter("rect") if r.attrib["class"] == "fill-last"]
    assert len(marks) == 2
    assert len({mark.attrib["y"] for mark in marks}) == 1  # Both in the row of rank 1.
    assert "Rank 1 is last in 2 of 2 steps: the others wait 10.0 ms" in plain(page)
    assert "jax_ep.plan_placement" in page
    assert "5 rows (1.9%) found no room in the receive buffer of 512 rows" in page


def test_overlap():
    page = html()
    bars = chart(page, "overlap-bars")
    # Of 150 ms: 40 + 60 + 50; then 110; then 110 and 20 over.
    assert widths(bars, "communication") == pytest.approx([26.667], abs=0.001)
    assert widths(bars, "independent") == [40]
    assert widths(bars, "compute") == pytest.approx([33.333], abs=0.001)
    assert widths(bars, "whole") == pytest.approx([73.333, 73.333], abs=0.001)
    assert widths(bars, "excess") == pytest.approx([13.333], abs=0.001)
    assert "130 ms, 20.0 ms less than its parts one after another: 50%" in plain(page)
    seen = "rank 0 communicates for 40.0 ms, for 10.0 ms of it beside compute"
    assert seen in plain(page)
    # What runs beside something else is below it, not over it.
    timeline = chart(page, "timeline")
    top = {r.attrib["class"]: float(r.attrib["y"]) for r in timeline.iter("rect")}
    assert top["fill-compute"] == top["fill-communication"] + 16


def test_nothing_hidden_is_said():
    overlap = dataclasses.replace(by_hand().overlap, measured_seconds=0.152)
    page = html(dataclasses.replace(by_hand(), overlap=overlap))
    assert "Nothing is hidden of the 40.0 ms that could be" in plain(page)


def test_what_was_not_measured_is_said():
    whole = by_hand()
    none = dict.fromkeys(("floor_seconds", "phases", "stamped_seconds"))
    page = html(
        dataclasses.replace(
            whole,
            ceilings=None,
            overlap=None,
            exchanges=[dataclasses.replace(e, **none) for e in whole.exchanges],
            load=dataclasses.replace(whole.load, rank_seconds=None),
        )
    )
    rows = tables(page)["Time lost to each of the four"]
    assert [row[1] for row in rows[1:]] == ["not measured"] * 4
    for text in (
        "The machine&#x27;s ceilings, so no floor",
        "The phases of dispatch, combine: no stamped build",
        "The stage dispatch backward.",
        "who is last in time",
        "Overlap was not measured.",
    ):
        assert text in page, text


def test_text_of_the_measurement_is_not_markup():
    page = html()
    assert "<b>" not in page
    assert "&lt;b&gt;H200 &amp; co&lt;/b&gt;" in page


def test_nothing_is_loaded():
    page = html()
    assert "<script" not in page and "@import" not in page
    assert all(link.startswith("#") for link in re.findall(r'href="([^"]*)"', page)[1:])
    assert re.findall(r"(?:src|action|data)=", page) == []
    assert set(re.findall(r"url\(([^)]*)\)", page)) <= {
        f"#hatch-{name}" for name, fill in palette.FILLS.items() if fill.hatch
    }


def luminance(color: str) -> float:
    """Relative luminance of WCAG 2.2."""
    channels = [int(color[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [
        c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels
    ]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(color: str, other: str) -> float:
    dark, light = sorted(map(luminance, (color, other)))
    return (light + 0.05) / (dark + 0.05)


@pytest.mark.parametrize("colors", [palette.LIGHT, palette.DARK], ids=["light", "dark"])
def test_keys_hold_without_colour(colors):
    measurement = by_hand()
    for drawing in build.page(measurement, diagnose(measurement)).drawings():
        for (a, _), (b, _) in itertools.combinations(drawing.key, 2):
            one, other = palette.FILLS[a], palette.FILLS[b]
            if one.hatch != other.hatch:
                continue
            ratios = [
                contrast(colors[one.base], colors[other.base]),
                contrast(colors[one.edge], colors[other.edge]),
            ]
            assert max(ratios) > 1.5, (drawing.name, a, b)


@pytest.mark.parametrize(
    "value, text",
    [
        (0, "0 s"), (3.2e-9, "3.20 ns"), (0.000987, "987 µs"), (0.0009996, "1.00 ms"),
        (0.01234, "12.3 ms"), (2.5, "2.50 s"), (125.0, "125 s"),
    ],
)  # fmt: skip
def test_seconds(value, text):
    assert plain(units.seconds(value)) == text


@pytest.mark.parametrize(
    "top, expected",
    [
        (1.0, [0, 0.25, 0.5, 0.75, 1.0]),
        (13.35, [0, 5, 10]),
        (0.04, [0, 0.01, 0.02, 0.03, 0.04]),
        (0.0, [0]),
    ],
)
def test_ticks_are_round(top, expected):
    assert units.ticks(top) == pytest.approx(expected)


def test_a_busy_host_is_said_first():
    found = by_hand()
    busy = dataclasses.replace(
        found, about={**found.about, "load": "15.0", "cores": "2"}
    )
    page = plain(build.page(busy, diagnose(busy)).html())
    said_at = page.index("The host was busy: a load of 15.0 on 2 cores.")
    assert said_at < page.index("Each bar is the time of one forward step")
    assert "The host was busy" not in plain(html())


def test_lanes_are_in_the_order_of_ranks():
    spans = [Span(f"rank {rank}", "compute", "x", 0.0, 1.0) for rank in (10, 2, 1)]
    spans.append(Span("host", "wait", "x", 0.0, 1.0))
    drawing = overlap.timeline(spans, "t", "T").drawing
    lanes = [lane.split(":")[0] for lane in drawing.summary.split("; ")]
    assert lanes == ["host", "rank 1", "rank 2", "rank 10"]
