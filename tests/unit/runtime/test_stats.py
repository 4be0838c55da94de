"""What users, tests and benchmarks observe of a pipeline is public, and the same for both pipelines."""

from __future__ import annotations

import ast
import time
from pathlib import Path

import pytest

import pipeloom as pl
from models import batch, blocks, gradients, mse
from paths import ROOT
from pipeloom.errors import UsageError
from pipeloom.runtime import LocalPipeline, Pipeline


def test_both_pipelines_have_the_same_attributes() -> None:
    schedule = pl.schedules.one_f_one_b(1, 3)
    pipelines = [kind(blocks(2), schedule, loss=mse) for kind in (Pipeline, LocalPipeline)]
    one, other = ({name for name in vars(each) if not name.startswith("_")} for each in pipelines)
    assert one == other
    assert {"schedule", "options", "mesh", "device", "layouts", "next_step"} <= one
    x, y = batch(6)
    found = []
    for pipeline in pipelines:
        with pytest.raises(UsageError, match="no step has run yet"):
            pipeline.timeline()
        with pytest.raises(UsageError, match="no step has run yet"):
            _ = pipeline.step_began
        pipeline.train()
        before = time.perf_counter()
        loss = pipeline.forward_backward(x, y).wait()
        assert before < pipeline.step_began < time.perf_counter()
        assert pipeline.timeline().schedule == pipeline.schedule == schedule
        norm = pipeline.clip_grad_norm_(0.5)
        found.append((loss.item(), norm.item(), gradients(pipeline)["block0.linear.weight"].tolist()))
        pipeline.load_state_dict({name: value + 1 for name, value in pipeline.state_dict().items()})
        assert pipeline.next_step == 1
        assert pipeline.layer_names == (("block0", "block1"),)
        assert list(pipeline.modules) == ["block0", "block1"]
        assert pipeline.owns("block0.linear.weight")
        assert pipeline.counts_in_norm("block0.linear.weight")
        with pipeline.no_sync(), pipeline.waiting("nothing"):
            pipeline.adopt(schedule)
        pipeline.close()
    assert found[0] == found[1]


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "interleaved", "zbv", "dualpipe"])
def test_stats_of_a_step(name: str) -> None:
    schedule = pl.schedules.build(name, 2, 6)
    pipeline = LocalPipeline(blocks(schedule.positions), schedule, loss=mse)
    pipeline.step(*batch(6))
    simulated = pl.simulate(schedule)
    assert tuple(each.peak_activations for each in pipeline.stats) == simulated.peak_activations
    crossing = sum(
        schedule.placement[a] != schedule.placement[b]
        for mb in range(schedule.microbatches)
        for route in [schedule.routes[schedule.route_of[mb]]]
        for a, b in zip(route, route[1:], strict=False)
    )
    assert sum(each.messages_sent for each in pipeline.stats) == 2 * crossing
    assert sum(each.messages_received for each in pipeline.stats) == 2 * crossing
    for rank, each in enumerate(pipeline.stats):
        assert each.rank == rank
        assert each.schedule == pl.schedules.unpair(schedule)
        assert len(each.starts) == len(each.ends) == len(each.schedule.programs[rank])
        assert each.exposed == {}


def private_reads(path: Path) -> list[str]:
    """`line: expression` of each private attribute that is read of something that is not the class's own."""
    reads = []
    for node in ast.walk(ast.parse(path.read_text())):
        if not isinstance(node, ast.Attribute) or not node.attr.startswith("_") or node.attr.startswith("__"):
            continue
        owner = ast.unparse(node.value)
        documented = node.attr in (
            "_replace",
            "_asdict",
            "_fields",
            "_version",
            "_exit",
            "_repr_svg_",
            "_repr_html_",
            "_cdata",
            "_schema",
        )
        if not documented and owner not in ("self", "cls") and not owner.startswith("torch"):
            reads.append(f"{path.name}:{node.lineno}: {owner}.{node.attr}")
    return reads


OF_OTHER_PROGRAMS = {  # what torch and torchtitan derive, asked of them
    ("test_written_csv.py", "schedules._PipelineScheduleRuntime"),
    ("test_written_csv.py", "runtime._load_csv"),
    ("other_systems.py", "pipelining._get_pipeline_metadata"),
    ("other_systems.py", "pipelining._generate_llm_fqn_per_model_part"),
    ("other_systems.py", "pipelining._get_pp_rank_to_stage_indices_mapping"),
    ("other_systems.py", "made._get_pipeline_order"),
    ("other_systems.py", "schedules._Action"),
    ("test_unequal_steps.py", "dist.distributed_c10d._world"),
}
OF_SCHEDULES = (
    "_remade",
    "_has_split",
)  # internal to the packages of the library, and asked of schedules by their tests


def test_tests_and_benchmarks_read_no_private_attribute() -> None:
    files = [path for folder in ("tests", "benchmarks") for path in sorted((ROOT / folder).rglob("*.py"))]
    reads = [read for path in files for read in private_reads(path)]
    ours = [read for read in reads if (read.partition(":")[0], read.rpartition(": ")[2]) not in OF_OTHER_PROGRAMS]
    ours = [read for read in ours if not read.endswith(OF_SCHEDULES)]
    assert not ours, "\n".join(ours)
