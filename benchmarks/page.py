"""How quickly the page opens and redraws, in headless Chromium: python benchmarks/page.py [--large]

Redraw: the median of 20, panned a little each time, with the read-back of a pixel so that the drawing has happened.
"""

from __future__ import annotations

import argparse
import shutil
import statistics
import sys
import tempfile
import time
from pathlib import Path

import pipeloom as pl
from pipeloom.draw import html

REDRAW = """([low, high]) => {
    const times = [], p = pipeloom.panes[0];
    for (let i = 0; i < 20; i++) {
        p.canvas.style.opacity = "1";
        pipeloom.view.start = low + i * 1e-3 * (high - low);
        pipeloom.view.end = high + i * 1e-3 * (high - low);
        const begin = performance.now();
        pipeloom.drawNow();
        p.context.getImageData(0, 0, 1, 1);
        times.push(performance.now() - begin);
    }
    return times;
}"""
CASES = (("65k", 32, 1024, 1500, 50), ("500k", 64, 3906, 5000, 150))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--width", type=int, default=2560)
    parser.add_argument("--only", choices=[case[0] for case in CASES])
    given = parser.parse_args()
    from playwright.sync_api import sync_playwright

    slow = False
    with sync_playwright() as playwright, tempfile.TemporaryDirectory() as folder:
        chromium = playwright.chromium.launch(
            executable_path=shutil.which("chromium"), args=["--no-sandbox", "--disable-gpu"]
        )
        for name, ranks, microbatches, load_target, draw_target in CASES:
            if given.only not in (None, name):
                continue
            timeline = pl.simulate(pl.schedules.one_f_one_b(ranks, microbatches), pl.Costs(forward=1.1, p2p=0.1))
            begin = time.perf_counter()
            text = html(timeline)
            written = time.perf_counter() - begin
            file = Path(folder) / f"{name}.html"
            file.write_text(text, encoding="utf-8")
            page = chromium.new_page(viewport={"width": given.width, "height": 1440})
            begin = time.perf_counter()
            page.goto(file.as_uri())
            page.evaluate("() => pipeloom.panes[0].context.getImageData(0, 0, 1, 1).data[0]")
            opened = 1e3 * (time.perf_counter() - begin)
            figures = []
            for share in (1.0, 0.1, 0.004):
                times = page.evaluate(REDRAW, [0, share * timeline.makespan])
                figures.append(f"{statistics.median(times):.0f} ms at {share:.1%} of the step")
                slow = slow or statistics.median(times) > draw_target
            slow = slow or opened > load_target
            print(
                f"{name}: {timeline.schedule.actions} actions, {len(text) / 1e6:.1f} MB written in {written:.2f} s; "
                f"opens in {opened:.0f} ms (target {load_target}); redraws in {', '.join(figures)} (target {draw_target})"
            )
            page.close()
        chromium.close()
    return int(slow)


if __name__ == "__main__":
    sys.exit(main())
