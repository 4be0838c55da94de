"""`pipeloom compare --paper NAME`: a table of a paper, recomputed from the profile that the paper publishes."""

from __future__ import annotations

from typing import Any

from pipeloom.errors import UsageError, did_you_mean

PAPERS = ("zero-bubble",)


def recompute(name: str) -> list[dict[str, Any]]:
    """Return one entry per row of the paper's table: model, p, m, and for each column the recomputed and published figures.

    Raises UsageError for an unknown paper.
    """
    if name not in PAPERS:
        raise UsageError(f"--paper is {name!r:.200}{did_you_mean(name, PAPERS)}")
    from pipeloom.schedule.papers import ZERO_BUBBLE_COLUMNS, ZERO_BUBBLE_PROFILES, zero_bubble_rates

    return [
        {
            "model": profile.model.name,
            "ranks": profile.ranks,
            "microbatches": profile.microbatches,
            "here": dict(zip(ZERO_BUBBLE_COLUMNS, zero_bubble_rates(profile), strict=True)),
            "published": dict(zip(ZERO_BUBBLE_COLUMNS, profile.published, strict=True)),
        }
        for profile in ZERO_BUBBLE_PROFILES
    ]


def table(rows: list[dict[str, Any]]) -> str:
    """Return the rows as text of at most 80 columns, two lines per row."""
    columns = list(rows[0]["here"])
    lines = [
        "Zero bubble pipeline parallelism (arXiv 2401.10241), its table of bubble rates",
        "from its own profile: 1 - m (f + b + w) / largest span.",
        "",
        f"{'model':6}{'p':>3}{'m':>4}  {'':9}"
        + "".join(f"{column.removeprefix('zb-'):>12}" for column in columns[:2])
        + "".join(f"{column.replace('zb-auto ', 'auto '):>8}" for column in columns[2:]),
    ]
    for row in rows:
        head = f"{row['model']:6}{row['ranks']:>3}{row['microbatches']:>4}"
        for source in ("here", "published"):
            values = list(row[source].values())
            figures = "".join(f"{v:12.4f}" for v in values[:2]) + "".join(f"{v:8.4f}" for v in values[2:])
            lines.append(f"{head if source == 'here' else '':13}  {source:9}{figures}")
    equal = sum(round(row["here"][c], 4) == row["published"][c] for row in rows for c in columns)
    better = sum(round(row["here"][c], 4) < row["published"][c] for row in rows for c in columns)
    worse = sum(round(row["here"][c], 4) > row["published"][c] for row in rows for c in columns)
    lines += ["", f"{equal} figures equal to four decimals, {better} better, {worse} worse"]
    return "\n".join(lines)
