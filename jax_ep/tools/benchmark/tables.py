"""The tables that a run prints."""

COLUMNS = (
    ("routing", 8, "{}"),
    ("tokens", 6, "{}"),
    ("capacity", 8, "{}"),
    ("what", 34, "{}"),
    ("sms", 4, "{}"),
    ("us", 9, "{:.1f}"),
    ("spread", 7, "{:.1%}"),
    ("egress_bytes", 10, "{:.4g}"),
    ("ingress_bytes", 10, "{:.4g}"),
    ("memory_bytes", 10, "{:.4g}"),
    ("floor_us", 9, "{:.1f}"),
    ("fraction", 8, "{:.0%}"),
    ("peak_bytes", 10, "{:.4g}"),
)


def row(record: dict, columns=COLUMNS) -> str:
    """A line of the table."""
    cells = []
    for name, width, form in columns:
        value = record.get(name)
        text = "" if value is None else form.format(value)
        cells.append(text.ljust(width) if name == "what" else text.rjust(width))
    return "  ".join(cells)


def header(columns=COLUMNS) -> str:
    """Its first line."""
    titles = [
        name.removesuffix("_bytes") + (" B" if name.endswith("_bytes") else "")
        for name, _, _ in columns
    ]
    return row(
        {name: title for (name, _, _), title in zip(columns, titles, strict=True)},
        [(name, width, "{}") for name, width, _ in columns],
    )


def print_records(records: list) -> None:
    """A line for each, also where it failed."""
    for record in records:
        if "failed" in record:
            print(f"{record['what']}: failed: {record['failed']}", flush=True)
        else:
            print(row(record), flush=True)


def print_summary(records: list, limits, tokens: int) -> None:
    """The short table: what matters, and nothing twice."""
    chosen = [
        c for c in COLUMNS if c[0] in ("what", "sms", "us", "floor_us", "fraction")
    ]
    print(f"\nT {tokens}, uniform, C 1.25 T K, in short:")
    print(header(chosen))
    ours = [r for r in records if r.get("tokens") == tokens and r.get("us")]
    capacity = min((r["capacity"] for r in ours), default=0)
    ours = [r for r in ours if r["routing"] == "uniform" and r["capacity"] == capacity]
    for record in ours:
        print(row(record, chosen))
    for record in records:
        if record.get("what") == "round trip":
            print(f"T {record['tokens']}: round trip {record['us']:.1f} us in a graph")
    if limits is not None:
        print(
            f"ceilings, GB/s: egress {limits.egress / 1e9:.1f}, ingress "
            f"{limits.ingress / 1e9:.1f}, memory {limits.memory / 1e9:.0f}"
        )
