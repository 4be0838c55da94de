"""The files around the source: links, containers, workflows and notes name what there is."""

from __future__ import annotations

import re
import tomllib

from paths import ROOT

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]


def test_pictures_of_the_readme_are_absolute_and_exist() -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    start = PROJECT["urls"]["Repository"].replace("github.com", "raw.githubusercontent.com") + "/main/"
    pictures = re.findall(r"!\[[^\]]*\]\(([^)]*)\)", readme)
    assert pictures
    for picture in pictures:
        assert picture.startswith(start)
        assert (ROOT / picture.removeprefix(start)).is_file()


def test_the_workflow_runs_targets_of_the_makefile_on_the_pythons_of_the_classifiers() -> None:
    workflow = (ROOT / ".github/workflows/ci.yml").read_text(encoding="utf-8")
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    targets = re.findall(r"run: make ([\w-]+)", workflow)
    assert {"test", "test-all", "docs"} == set(targets)
    assert all(re.search(rf"^{target}:", makefile, re.MULTILINE) for target in targets)
    versions = [line.rpartition(" ")[2] for line in PROJECT["classifiers"] if re.search(r":: 3\.\d+$", line)]
    assert re.findall(r'"(3\.\d+)"', re.search(r"python: \[(.*)\]", workflow)[0]) == versions  # type: ignore[index]


def test_the_container_copies_files_and_installs_extras_that_exist() -> None:
    text = (ROOT / "Dockerfile").read_text(encoding="utf-8")
    copied = [word for line in re.findall(r"^COPY (.*) \S+$", text, re.MULTILINE) for word in line.split()]
    assert copied
    assert all((ROOT / name).exists() for name in copied)
    extras = re.search(r"^ARG EXTRAS=(.*)$", text, re.MULTILINE)
    assert extras is not None
    assert set(extras[1].split(",")) <= set(PROJECT["optional-dependencies"])


def test_no_text_installs_a_package_that_is_not_published() -> None:
    files = [*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("src/**/*.py"), ROOT / "Dockerfile"]
    named = re.compile(r"pip install [^\n]*[\"' ]pipeloom\b(?![/.])")
    assert [file.name for file in files if named.search(file.read_text(encoding="utf-8"))] == []
