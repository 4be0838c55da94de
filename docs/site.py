"""Builds the documentation site in `site/`: `make docs`, or `python docs/site.py [--stage-only]` with the extra `docs`.

The Markdown of this folder, a gallery of all families with their live pages, and the API reference from docstrings. What the
browser needs is in the site: it opens from disk and asks no other server for anything. Its search, which a browser allows from
no file, needs `python -m http.server -d site`.
"""

from __future__ import annotations

import importlib
import inspect
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pipeloom as pl
from pipeloom.schedules import FAMILIES, build

HERE = Path(__file__).parent
STAGE, SITE = HERE.parent / "build" / "docs", HERE.parent / "site"
RANKS, MICROBATCHES = 4, 8
MODULES = (
    "pipeloom",
    "pipeloom.schedules",
    "pipeloom.draw",
    "pipeloom.solver",
    "pipeloom.runtime",
    "pipeloom.checkpoint",
)


def stage(folder: Path) -> None:
    """Write what the site is built from: the pages by hand, the gallery, the API reference."""
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(HERE, folder, ignore=shutil.ignore_patterns("*.py", "__pycache__"))
    for page in folder.glob("*.md"):  # files outside this folder are not part of the site
        page.write_text(re.sub(r"\[([^\]]+)\]\(\.\./[^)]*\)", r"`\1`", page.read_text("utf-8")), "utf-8")
    readme = (HERE.parent / "README.md").read_text("utf-8")
    picture = re.compile(
        r"\]\(https://raw\.githubusercontent\.com/[^)]*/docs/"
    )  # absolute, for the page of a package index
    readme = re.sub(r"\[([^\]]+)\]\((?!docs/|#|https:)[^)]*\)", r"`\1`", picture.sub("](docs/", readme))
    (folder / "index.md").write_text(readme.replace("](docs/", "]("), "utf-8")
    (folder / "gallery.md").write_text(gallery(folder / "gallery"), "utf-8")
    for name in MODULES:
        (folder / "api").mkdir(exist_ok=True)
        (folder / "api" / f"{name}.md").write_text(reference(name), "utf-8")


def gallery(folder: Path) -> str:
    """Write the live page of each family, and return the page that shows them all."""
    folder.mkdir(parents=True)
    parts = [
        "# Gallery",
        f"Every family with {RANKS} ranks and {MICROBATCHES} micro-batches at equal costs. Click a picture to open its",
        "live page, on which you can zoom, follow a micro-batch, see why an action is late, and change the schedule.",
    ]
    for name, family in FAMILIES.items():
        timeline = pl.simulate(build(name, RANKS, MICROBATCHES))
        (folder / f"{name}.html").write_text(pl.draw.html(timeline), "utf-8")
        (folder / f"{name}.svg").write_text(pl.draw.svg(timeline, tooltips=False), "utf-8")
        summary = inspect.cleandoc(family.__doc__ or "").split("\n\nArgs:")[0]
        parts += [
            f"\n## {name}\n",
            f"[![{name}](gallery/{name}.svg)](gallery/{name}.html)\n",
            summary,
            f"\n```sh\npipeloom schedule {name} --ranks {RANKS} --microbatches {MICROBATCHES} --html {name}.html\n```",
        ]
    return "\n".join(parts) + "\n"


def reference(name: str) -> str:
    """Return the page of a module's public names; their docstrings are read where they are defined."""
    module = importlib.import_module(name)
    lines = [f"# {name}\n", inspect.cleandoc(module.__doc__ or ""), ""]
    for each in getattr(module, "__all__", vars(module)):
        value = getattr(module, each)
        home = getattr(value, "__module__", None)
        if inspect.ismodule(value) or home is None or not home.startswith("pipeloom"):
            continue
        lines += [f"::: {home}.{value.__name__}", "    options:", f'      heading: "{each}"', ""]
    return "\n".join(lines)


def main() -> int:
    """Stage the pages and run MkDocs; return its exit code."""
    stage(STAGE)
    if "--stage-only" in sys.argv:
        return 0
    config = HERE.parent / "mkdocs.yml"
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "-f", str(config), "-d", str(SITE)]
    quiet = os.environ | {"NO_MKDOCS_2_WARNING": "1"}  # the theme's advertisement of another tool
    code = subprocess.run(command, env=quiet).returncode
    if not code:
        (SITE / "404.html").unlink(missing_ok=True)  # its links begin at a server's root
        print(f"{SITE / 'index.html'}")
    return code


if __name__ == "__main__":
    sys.exit(main())
