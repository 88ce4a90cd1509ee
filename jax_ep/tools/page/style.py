"""The page's style sheet: a light and a dark palette, paper, and a phone's width."""

from jax_ep.tools.page.palette import DARK, FILLS, LIGHT

_RULES = """
* { box-sizing: border-box; }
html { -webkit-text-size-adjust: 100%; text-size-adjust: 100%; }
body {
  margin: 0; background: var(--surface); color: var(--ink);
  font: 16px/1.55 system-ui, -apple-system, "Segoe UI", Roboto, "Noto Sans",
    "DejaVu Sans", sans-serif;
  font-variant-numeric: tabular-nums;
}
main, header, footer { max-width: 56rem; margin: 0 auto; padding: 0 1rem; }
header { padding-top: 1.5rem; }
h1 { font-size: 1rem; font-weight: 600; color: var(--muted); margin: 0 0 .75rem; }
h2 {
  font-size: 1.35rem; line-height: 1.25; margin: 3rem 0 .5rem;
  padding-top: 1rem; border-top: 1px solid var(--line);
}
h3 { font-size: 1rem; margin: 1.75rem 0 .25rem; }
p { margin: .5rem 0; max-width: 44rem; overflow-wrap: anywhere; }
.verdict { font-size: 1.5rem; line-height: 1.35; margin: 0 0 .75rem; font-weight: 600; }
.setting, .aside { color: var(--muted); }
.finding { font-weight: 600; }
nav { margin: 1rem 0 0; }
nav ul { list-style: none; display: flex; flex-wrap: wrap; gap: .25rem 1.25rem;
  margin: 0; padding: 0; }
a { color: var(--link); text-underline-offset: .2em; }
nav a { display: inline-block; padding: .3rem 0; }
a:focus-visible, summary:focus-visible, .scroll:focus-visible {
  outline: 3px solid var(--link); outline-offset: 2px; border-radius: 2px; }
.skip { position: absolute; left: -100vw; }
.skip:focus { left: 1rem; top: .5rem; background: var(--surface); padding: .5rem; }
figure { margin: 1.25rem 0 1.5rem; }
figcaption { font-weight: 600; margin-bottom: .35rem; }
.key { display: flex; flex-wrap: wrap; gap: .15rem 1.1rem; list-style: none;
  margin: 0 0 .6rem; padding: 0; font-size: .85rem; color: var(--muted); }
.key li { display: inline-flex; align-items: center; gap: .4rem; }
svg { display: block; }
.patterns { position: absolute; }
.chart text { font-size: 13px; fill: var(--ink); }
.chart text.value { font-weight: 600; }
.chart text.note { font-size: 12px; fill: var(--muted); }
.chart text.inside { font-size: 12px; paint-order: stroke; stroke-width: 4px;
  stroke-linejoin: round; stroke: var(--surface); pointer-events: none; }
.chart rect { stroke-width: .75px; }
.grid { stroke: var(--line); }
.axis { stroke: var(--muted); }
.bold { stroke: var(--ink); stroke-width: 2.5px; }
details { margin: .5rem 0 1rem; font-size: .9rem; }
summary { cursor: pointer; color: var(--link); padding: .3rem 0; width: fit-content; }
.scroll { overflow-x: auto; margin: .5rem 0; }
table { border-collapse: collapse; font-size: .875rem; line-height: 1.4; }
caption { text-align: left; color: var(--muted); padding-bottom: .3rem; }
th, td { padding: .25rem .9rem .25rem 0; text-align: right; vertical-align: top;
  border-bottom: 1px solid var(--line); white-space: nowrap; }
th { font-weight: 600; }
th:first-child { text-align: left; }
.facts { table-layout: fixed; width: 100%; }
.facts th { width: 10.5rem; white-space: normal; overflow-wrap: anywhere; }
.facts td { text-align: left; white-space: normal; overflow-wrap: anywhere; }
footer { margin-top: 3rem; padding-bottom: 3rem; color: var(--muted);
  font-size: .85rem; }
@media (max-width: 30rem) {
  .verdict { font-size: 1.25rem; }
  .facts th { width: 7rem; }
}
@media (max-width: 46rem) {
  .chart text.wide { display: none; }
}
@media print {
  body { font-size: 10.5pt; }
  nav, .skip, summary, details:not([open]) { display: none; }
  h2, h3, figcaption { break-after: avoid; }
  figure, tr { break-inside: avoid; }
  * { print-color-adjust: exact; -webkit-print-color-adjust: exact; }
}
"""


def sheet() -> str:
    """All of it, as text."""
    dark = f":root {{ color-scheme: dark; {_variables(DARK)} }}"
    return "\n".join(
        [
            f":root {{ color-scheme: light; {_variables(LIGHT)} }}",
            # Paper is white, whatever the screen is.
            f"@media screen and (prefers-color-scheme: dark) {{ {dark} }}",
            _RULES,
            *_fills(),
        ]
    )


def _variables(palette: dict[str, str]) -> str:
    return " ".join(f"--{name}: {color};" for name, color in palette.items())


def _fills():
    for name, fill in FILLS.items():
        paint = f"url(#hatch-{name})" if fill.hatch else f"var(--{fill.base})"
        yield f".fill-{name} {{ fill: {paint}; stroke: var(--{fill.edge}); }}"
        if not fill.hatch:
            yield (
                f".chart text.on-{name} {{ fill: var(--{fill.text}); "
                f"stroke: var(--{fill.base}); }}"
            )
