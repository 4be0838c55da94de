"""Generated mutations: small random changes of a module, each of which its tests should see; prints a score.

    python tests/mutate.py                                    all modules of TESTS, 20 changes of each
    python tests/mutate.py check simulate --sample 60         two of them
    python tests/mutate.py check --seed 7 --list              only print the changes

A change swaps a comparison or an operator, shifts a number by one, negates a condition, or drops a statement. Some make no
difference to any caller, so a perfect score cannot be expected; read the survivors. `tests/mutants.toml` holds chosen changes.
"""

from __future__ import annotations

import argparse
import ast
import compileall
import copy
import random
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import mutants as chosen

TESTS = {
    "schedule.check": (
        "unit/schedule/test_check.py",
        "unit/schedule/test_recompute_cells.py",
    ),
    "schedule.graph": ("unit/schedule/test_check.py", "unit/schedule/test_simulate.py"),
    "schedule.simulate": ("unit/schedule/test_simulate.py", "unit/schedule/test_idle.py"),
    "schedule.channels": (
        "unit/schedule/test_channels.py",
        "unit/schedule/test_check.py",
        "unit/schedule/test_simulate.py",
        "unit/schedule/test_batched_p2p.py",
        "unit/schedule/test_named_tensors.py",
        "unit/draw/test_figures.py",
    ),
    "runtime.program": (
        "unit/runtime/test_lowering.py",
        "unit/runtime/test_batched.py",
        "unit/runtime/test_completed_stages.py",
        "unit/runtime/test_sliced_steps.py",
        "unit/runtime/test_families.py",
        "unit/runtime/test_recompute_actions.py",
        "unit/runtime/test_offload_actions.py",
        "dist/runtime/test_adopt.py",
        "dist/runtime/test_executed_order.py",
        "dist/runtime/test_receives_ahead.py",
        "dist/runtime/test_stage_shards.py",
    ),
    "runtime.executor": (
        "unit/runtime/test_families.py",
        "unit/runtime/test_overlap_order.py",
        "unit/runtime/test_stats.py",
        "dist/runtime/test_executed_order.py",
        "dist/runtime/test_early_reduction.py",
        "dist/runtime/test_pipeline.py",
        "dist/train/test_weight_gathers.py",
        "dist/runtime/test_stage_shards.py",
        "dist/runtime/test_checksums.py",
        "e2e/runtime/test_register_kind.py",
        "unit/runtime/test_offload_actions.py",
        "dist/runtime/test_exposed.py",
        "dist/runtime/test_failures_beside.py",
    ),
    "runtime.actions.compute": (
        "unit/runtime/test_families.py",
        "unit/runtime/test_recompute_actions.py",
        "dist/runtime/test_executed_order.py",
        "dist/runtime/test_pipeline.py",
        "unit/runtime/test_named.py",
    ),
    "runtime.actions.recompute": ("unit/runtime/test_recompute_actions.py",),
    "runtime.actions.copies": ("unit/runtime/test_offload_actions.py", "unit/runtime/test_sliced_steps.py"),
    "runtime.actions.shards": ("dist/runtime/test_stage_shards.py",),
    "runtime.stage": (
        "unit/runtime/test_families.py",
        "dist/runtime/test_split_backward.py",
        "unit/runtime/test_recompute_actions.py",
        "unit/runtime/test_overlap_order.py",
        "dist/runtime/test_inputs.py",
        "dist/runtime/test_shared_parameters.py",
    ),
    "runtime.batch": ("dist/runtime/test_targets.py", "dist/runtime/test_inputs.py"),
    "ops.deferred": ("dist/runtime/test_split_backward.py", "unit/ops/test_deferred.py"),
    "parallel.data": ("dist/parallel/test_data.py",),
    "parallel.tensor": ("dist/parallel/test_tensor.py",),
    "parallel.router": ("unit/parallel/test_router.py",),
}
_COMPARE = {ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq}
_COMPARE |= {ast.In: ast.NotIn, ast.NotIn: ast.In, ast.Is: ast.IsNot, ast.IsNot: ast.Is}
_OPERATE = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Add,
    ast.FloorDiv: ast.Mult,
    ast.Div: ast.Mult,
    ast.Mod: ast.Mult,
}
_DROPPED = (ast.Expr, ast.Assign, ast.AugAssign, ast.Raise, ast.Continue, ast.Break)


def changes(node: ast.AST) -> Iterator[ast.AST]:
    """Yield what may stand in the place of one expression or statement."""
    if isinstance(node, ast.Compare) and type(node.ops[0]) in _COMPARE:
        yield ast.Compare(node.left, [_COMPARE[type(node.ops[0])](), *node.ops[1:]], node.comparators)
    elif isinstance(node, ast.BinOp) and type(node.op) in _OPERATE and not isinstance(node.left, ast.JoinedStr):
        yield ast.BinOp(node.left, _OPERATE[type(node.op)](), node.right)
    elif isinstance(node, ast.BoolOp):
        yield ast.BoolOp(ast.Or() if isinstance(node.op, ast.And) else ast.And(), node.values)
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not | ast.USub):
        yield node.operand
    elif isinstance(node, ast.Constant) and type(node.value) in (int, float, bool):
        yield ast.Constant((not node.value) if isinstance(node.value, bool) else node.value + 1)
    elif isinstance(node, ast.If | ast.IfExp):
        yield ast.copy_location(type(node)(ast.UnaryOp(ast.Not(), node.test), node.body, node.orelse), node)
    elif isinstance(node, _DROPPED) and not (isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)):
        yield ast.copy_location(ast.Pass(), node)


def generated(path: Path) -> list[tuple[int, str, str]]:
    """Return (line, change in words, text of the whole changed module) for each change of the module at `path`."""
    tree = ast.parse(path.read_text())
    found = []
    skipped = {id(part) for node in ast.walk(tree) for part in _skipped(node)}
    for parent in ast.walk(tree):
        for field, value in ast.iter_fields(parent):
            for at, node in enumerate(value if isinstance(value, list) else [value]):
                if not isinstance(node, ast.expr | ast.stmt) or id(node) in skipped:
                    continue
                for change in changes(node):
                    held = value[:] if isinstance(value, list) else value
                    before = ast.unparse(node).splitlines()[0]
                    setattr(parent, field, [*held[:at], change, *held[at + 1 :]] if isinstance(held, list) else change)
                    text = ast.unparse(ast.fix_missing_locations(copy.deepcopy(tree))) + "\n"
                    setattr(parent, field, held)
                    found.append((node.lineno, f"{before} -> {ast.unparse(change).splitlines()[0]}", text))
    return found


def _skipped(node: ast.AST) -> Iterator[ast.AST]:
    """Yield the parts whose change no behaviour shows: annotations, formatted sentences, imports, assertions."""
    root: ast.AST | None = None
    if isinstance(node, ast.AnnAssign | ast.arg):
        root = node.annotation
    elif isinstance(node, ast.FunctionDef):
        root = node.returns
    elif isinstance(node, ast.JoinedStr | ast.Import | ast.ImportFrom | ast.Assert):
        root = node
    if root is not None:
        yield from ast.walk(root)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("modules", nargs="*", metavar="MODULE", help=f"of {', '.join(TESTS)}; their last names do")
    parser.add_argument("--sample", type=int, default=20, metavar="N", help="changes of each module (20)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--list", action="store_true", help="print the changes and run nothing")
    options = parser.parse_args()
    unknown = [name for name in options.modules if not any(full.endswith(name) for full in TESTS)]
    if unknown:
        parser.error(f"{unknown[0]!r} is none of {', '.join(TESTS)}")
    rows = []
    for module, tests in TESTS.items():
        if options.modules and not any(module.endswith(name) for name in options.modules):
            continue
        path = Path("pipeloom", *module.split(".")).with_suffix(".py")
        every = generated(chosen.SOURCE / path)
        paths = tuple(f"tests/{test}" for test in tests)
        for line, words, text in random.Random(options.seed).sample(every, min(options.sample, len(every))):
            rows.append(chosen.Change(f"{module}:{line} {words}", path, text, paths))
    if options.list:
        print("\n".join(row.title for row in rows))
        return 0

    compileall.compile_dir(chosen.SOURCE, quiet=2)
    if not chosen.check_unchanged({test for row in rows for test in row.tests}):
        return 1
    found: dict[str, list[bool]] = {}
    begun = time.monotonic()
    for row, verdict, seconds, _ in chosen.run_all(rows, options.jobs):
        seen = verdict != "survived"
        found.setdefault(row.title.partition(":")[0], []).append(seen)
        print(f"{verdict if seen else 'SURVIVED':8} {seconds:5.1f} s  {row.title}", flush=True)
    for module, verdicts in found.items():
        print(f"{module:20} {sum(verdicts):4} of {len(verdicts):4} found, {100 * sum(verdicts) / len(verdicts):.0f} %")
    print(f"{time.monotonic() - begun:.0f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
