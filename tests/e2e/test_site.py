"""The pages of the documentation site are all there."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from types import ModuleType

import pytest
from typer.testing import CliRunner

from paths import ROOT
from pipeloom.cli import app
from pipeloom.schedules import FAMILIES

DOCS = ROOT / "docs"


def _site() -> ModuleType:
    spec = importlib.util.spec_from_file_location("docs_site", DOCS / "site.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def staged(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder that the site is built from."""
    folder = tmp_path_factory.mktemp("site") / "docs"
    _site().stage(folder)
    return folder


def test_the_site_has_a_live_page_of_every_family_and_a_reference_of_every_public_name(staged: Path) -> None:
    folder = staged
    gallery = (folder / "gallery.md").read_text("utf-8")
    for name in FAMILIES:
        assert f"(gallery/{name}.html)" in gallery
        assert 'id="data"' in (folder / "gallery" / f"{name}.html").read_text("utf-8")
    for module, name in (
        ("pipeloom", "pipeloom.schedule.model.Schedule"),
        ("pipeloom.runtime", "pipeloom.runtime.pipeline.Pipeline"),
    ):
        assert f"::: {name}\n" in (folder / "api" / f"{module}.md").read_text("utf-8")


def test_the_commands_of_the_gallery_write_its_pages(
    staged: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    commands = re.findall(r"```sh\n(.*)\n```", (staged / "gallery.md").read_text("utf-8"))
    assert len(commands) == len(FAMILIES)
    monkeypatch.chdir(tmp_path)
    for name, command in zip(FAMILIES, commands, strict=True):
        program, *words = command.split()
        assert program == "pipeloom"
        assert CliRunner().invoke(app, words).exit_code == 0
        assert (tmp_path / f"{name}.html").read_bytes() == (staged / "gallery" / f"{name}.html").read_bytes()


def test_the_navigation_of_the_site_has_every_page_once(staged: Path) -> None:
    named = re.findall(
        r"^ *- (?:[^:\n]+: )?([\w./-]+\.md)$", (DOCS.parent / "mkdocs.yml").read_text("utf-8"), re.MULTILINE
    )
    assert sorted(named) == sorted(str(page.relative_to(staged)) for page in staged.rglob("*.md"))


def test_every_link_of_the_site_leads_to_a_file_of_it(staged: Path) -> None:
    folder = staged
    for page in folder.rglob("*.md"):
        for target in re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", page.read_text("utf-8")):
            if "://" not in target and target.endswith((".md", ".svg", ".html")):
                assert (page.parent / target).is_file(), f"{page.name}: {target}"


def test_every_link_of_the_repository_leads_to_a_file_and_a_heading() -> None:
    pages = [DOCS.parent / "README.md", *DOCS.glob("*.md"), *DOCS.parent.glob("benchmarks/*.md")]
    for page in pages:
        for target, anchor in re.findall(r"\]\(([^)#\s]*)#?([^)]*)\)", page.read_text("utf-8")):
            if "://" not in target:
                file = page.parent / target if target else page
                assert file.is_file(), f"{page.name}: {target}"
                assert not anchor or anchor in _anchors(file), f"{page.name}: {target}#{anchor}"


def _anchors(page: Path) -> set[str]:
    """Return the anchors of a page's headings, as GitHub and MkDocs make them."""
    titles = re.findall(r"^#+ (.*)$", page.read_text("utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).strip().replace(" ", "-") for title in titles}
