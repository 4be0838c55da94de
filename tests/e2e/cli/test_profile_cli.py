"""`pipeloom profile` on two processes, and the commands that read its file."""

from __future__ import annotations

import json

import pytest

from commands import pipeloom
from pipeloom.cli import app


def test_a_profile_is_measured_and_read_by_other_commands(tmp_path, capsys):
    file, chart = tmp_path / "costs.json", tmp_path / "links.svg"
    keys = "--model.num_experts 2 --parallel.pp 1 --parallel.dp 2 --parallel.ep 2 --schedule.name 1f1b-overlap"
    keys += " --parallel.ep_chunks 2"
    words = f"profile tiny --processes 2 --repeats 2 {keys} --schedule.microbatches 4 --output {file} --svg {chart}"
    done = pipeloom(*words.split())
    assert done.returncode == 0, done.stderr
    assert max(map(len, done.stdout.splitlines())) <= 80
    form = json.loads(file.read_text())
    links = {(link["axis"], link["operation"]): link for link in form["links"]}
    operations = ("all-gather", "reduce-scatter", "all-to-all")
    assert set(links) == {("host", "copy"), *((axis, each) for axis in ("dp", "ep") for each in operations)}
    exchange = links["ep", "all-to-all"]
    assert exchange["ranks"] == [0, 1]
    assert form["segments"]["dispatch"] > exchange["latency"] > 0
    assert form["segments"]["chunks"] == 2
    assert "all-to-all" in chart.read_text()

    capsys.readouterr()
    app(
        ["schedule", "1f1b", "--ranks", "1", "--microbatches", "2", "--costs", str(file), "--json"],
        standalone_mode=False,
    )
    drawn = json.loads(capsys.readouterr().out)
    costs = form["costs"]
    assert drawn["makespan"] == pytest.approx(2 * (costs["forward"][0] + costs["backward"][0]))
    words = f"schedule 1f1b --ranks 1 --microbatches 2 --transform recompute=norms --costs {file} --json"
    app(words.split(), standalone_mode=False)
    parted, (again,) = json.loads(capsys.readouterr().out), dict(costs["parts"])["norms"]
    assert parted["makespan"] == pytest.approx(drawn["makespan"] + 2 * again)
    app(
        ["schedule", "1f1b-overlap", "--ranks", "2", "--microbatches", "4", "--segments", str(file)],
        standalone_mode=False,
    )
    assert "one after the other" in capsys.readouterr().out


def test_links_of_processes_that_are_no_mesh_of_the_layout(tmp_path):
    file = tmp_path / "costs.json"
    words = f"profile tiny --parallel.pp 1 --schedule.name 1f1b --processes 2 --repeats 2 --output {file}"
    done = pipeloom(*words.split())
    assert done.returncode == 0, done.stderr
    links = [(link["axis"], link["operation"]) for link in json.loads(file.read_text())["links"]]
    assert links == [
        ("host", "copy"),
        *(("world", each) for each in ("send", "all-gather", "reduce-scatter", "all-to-all")),
    ]
