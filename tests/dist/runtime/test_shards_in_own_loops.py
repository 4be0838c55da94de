"""Training loops of one's own, `torch.optim.AdamW(pipeline.parameters())`, where each replica steps its share."""

from __future__ import annotations

import contextlib
import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import pipeloom as pl
from models import WIDTH, Block, batch, mse
from pipeloom import checkpoint
from pipeloom.errors import UsageError
from pipeloom.parallel.masters import Master
from pipeloom.parallel.mesh import Mesh
from pipeloom.runtime import Layer, Pipeline, RuntimeOptions
from pipeloom.schedule.sharding import reduce_gradients, shard
from pipeloom.shapes.mesh import MeshShape
from processes import run_ranks

RATE, CLIP = 0.05, 0.5
PLAIN = pl.schedules.interleaved(1, 2, chunks=3)
SCHEDULES = {0: PLAIN, 1: PLAIN, 2: reduce_gradients(PLAIN, 1), 3: shard(PLAIN, 2)}


class Partly(Block):
    """A block with a layer of no inputs, whose bias counts, and one of no outputs."""

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        with warnings.catch_warnings():  # torch warns that there is nothing to draw
            warnings.simplefilter("ignore")
            self.of_nothing, self.to_nothing = nn.Linear(0, WIDTH), nn.Linear(WIDTH, 0)

    def forward(self, x: Tensor) -> Tensor:
        nothing = self.to_nothing(x)
        return super().forward(torch.cat((x, nothing), -1)) * (1 + self.of_nothing(nothing))


class Wholly(nn.Module):
    """A layer all of whose parameters are without elements."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(0, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return x.sin() + (x @ self.weight.T).sum(-1, keepdim=True)


def layers(dtype: torch.dtype, empty: bool = False) -> list[Layer]:
    """Three blocks; `empty`: with parameters without elements, which are all that the second one has."""
    kinds: list[Any] = [Partly, lambda at: Wholly(), Partly] if empty else [Block] * 3
    return [Layer(f"block{at}", lambda at=at: kinds[at](at).to(dtype)) for at in range(3)]


def pipeline_of(
    level: int, dtype: torch.dtype = torch.float32, empty: bool = False, transport: str = "auto"
) -> Pipeline:
    options = RuntimeOptions(monitor=False, shard_gradients=level > 0, transport=transport)
    return Pipeline(layers(dtype, empty), SCHEDULES[level], loss=mse, mesh=Mesh.of(MeshShape(dp=2)), options=options)


def data(step: int) -> list[tuple[Tensor, Tensor]]:
    """The batches of both replicas."""
    return [batch(4, seed=2 * step + replica) for replica in range(2)]


def elements(adam: torch.optim.Optimizer) -> int:
    return sum(state["exp_avg"].numel() for state in adam.state.values())


def continued(rank: int, folder: str) -> list[dict[str, Any]]:
    """Two steps at each level, from the checkpoint of the level before."""
    notes = []
    for at, level in enumerate((1, 2, 0, 3, 3)):
        pipeline = pipeline_of(level, empty=True)
        adam = torch.optim.AdamW(pipeline.parameters(), lr=RATE)
        if at:
            checkpoint.load(folder, pipeline, adam)
        note: dict[str, Any] = {"losses": [], "norms": [], "gradients": []}
        for step in (2 * at, 2 * at + 1):
            note["losses"].append(float(pipeline.step(*data(step)[rank])))
            note["norms"].append(float(pipeline.clip_grad_norm_(CLIP)))
            note["gradients"].append(
                [(s.name, s.start, s.stop, s.tensor.grad.flatten().tolist()) for s in pipeline.shards()]
            )
            adam.step()
            adam.zero_grad()
        note["evaluated"] = float(pipeline.evaluate(*data(0)[rank]))
        note["weights"] = {name: value.tolist() for name, value in pipeline.state_dict().items()}
        note["elements"] = elements(adam)
        checkpoint.save(folder, 2 * at + 2, pipeline, adam)
        pipeline.close()
        notes.append(note)
    return notes


def test_an_optimizer_of_shares_trains_as_one_process_at_every_level(tmp_path: Any) -> None:
    results = run_ranks(continued, 2, str(tmp_path))
    model = nn.Sequential(*(layer() for layer in layers(torch.float32, empty=True)))
    names = [f"block{at}.{name}" for at in range(3) for name, _ in model[at].named_parameters()]
    adam = torch.optim.AdamW(model.parameters(), lr=RATE)
    total = sum(parameter.numel() for parameter in model.parameters())
    for at, level in enumerate((1, 2, 0, 3, 3)):
        for turn, step in enumerate((2 * at, 2 * at + 1)):
            x, y = (torch.cat(each) for each in zip(*data(step), strict=True))
            loss = mse(model(x), y)
            value = loss.item()
            loss.backward()  # type: ignore[no-untyped-call]
            norm = float(nn.utils.clip_grad_norm_(model.parameters(), CLIP))
            gradients = dict(zip(names, (p.grad for p in model.parameters()), strict=True))
            seen = {name: torch.zeros(g.numel()) for name, g in gradients.items() if g is not None}
            for rank, notes in enumerate(results):
                assert notes[at]["losses"][turn] == pytest.approx(value, rel=1e-5)
                assert notes[at]["norms"][turn] == pytest.approx(norm, rel=1e-5)
                for name, start, stop, values in notes[at]["gradients"][turn] if level or not rank else ():
                    seen[name][start:stop] += torch.tensor(values)
            for name, gradient in gradients.items():
                assert gradient is not None
                assert torch.allclose(seen[name], gradient.flatten(), rtol=1e-5, atol=1e-6), (level, name)
            adam.step()
            adam.zero_grad()
        x, y = (torch.cat(each) for each in zip(*data(0), strict=True))
        for notes in results:
            assert notes[at]["evaluated"] == pytest.approx(mse(model(x), y).item(), rel=1e-5)
            for name, parameter in zip(names, model.parameters(), strict=True):
                weight = torch.tensor(notes[at]["weights"][name]).view_as(parameter)
                torch.testing.assert_close(weight, parameter.detach(), rtol=1e-4, atol=1e-5)
        stepped = [notes[at]["elements"] for notes in results]
        assert sum(stepped) == (total if level else 2 * total)
        assert max(stepped) <= (0.75 * total if level else total)


def of_several_sizes() -> list[Layer]:
    """Layers whose parameters are cut between the replicas at other elements if their order is another."""
    return [
        Layer(f"layer{at}", lambda a=a, b=b: nn.Linear(a, b)) for at, (a, b) in enumerate(((WIDTH, 50), (50, WIDTH)))
    ]


def saved_under_two_routes(rank: int, folder: str) -> tuple[dict[str, list[float]], dict[str, list[float]]]:
    """First averages of AdamW after a step of shares under two routes, as a whole optimizer loads them, and the first weights."""
    mesh = Mesh.of(MeshShape(pp=2, dp=2))
    assert mesh is not None
    for shares in (True, False):
        options = RuntimeOptions(monitor=False, shard_gradients=shares)
        pipeline = Pipeline(of_several_sizes(), pl.schedules.chimera(2, 4), loss=mse, mesh=mesh, options=options)
        adam = torch.optim.AdamW(pipeline.parameters(), lr=RATE)
        if shares:
            weights = {name: value.tolist() for name, value in pipeline.state_dict().items()}
            pipeline.step(*data(0)[mesh.dp.index])
            adam.step()
            checkpoint.save(folder, 1, pipeline, adam)
        else:
            checkpoint.load(folder, pipeline, adam)
        pipeline.close()
    return {name: adam.state[p]["exp_avg"].tolist() for name, p in pipeline.named_parameters()}, weights


def test_shares_of_two_routes_are_saved_once(tmp_path: Any) -> None:
    results = run_ranks(saved_under_two_routes, 4, str(tmp_path))
    model = nn.Sequential(*(layer() for layer in of_several_sizes()))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(torch.tensor(results[0][1][f"layer{name}"]))
    x, y = (torch.cat(each) for each in zip(*data(0), strict=True))
    mse(model(x), y).backward()  # type: ignore[no-untyped-call]
    for averages, _ in results:
        assert len(averages) == 4
        for name, values in averages.items():
            gradient = model.get_parameter(name.removeprefix("layer")).grad
            torch.testing.assert_close(torch.tensor(values), 0.1 * gradient, rtol=1e-4, atol=1e-7)


def resumed_in_bf16(rank: int, folder: str) -> list[list[float]]:
    """fp32 shares after four steps at one level, and after two at each of two levels."""
    shares = []
    for levels in ((3,), (3, 1)):
        for at, level in enumerate(levels):
            pipeline = pipeline_of(level, torch.bfloat16)
            adam = torch.optim.AdamW(pipeline.parameters(), lr=RATE)
            if at:
                checkpoint.load(f"{folder}/{len(levels)}", pipeline, adam)
            for _ in range(4 // len(levels)):
                x, y = data(pipeline.next_step)[rank]
                pipeline.step(x.bfloat16(), y.bfloat16())
                adam.step()
                adam.zero_grad()
            checkpoint.save(f"{folder}/{len(levels)}", pipeline.next_step, pipeline, adam)
            assert all(shard.tensor.dtype == torch.float32 for shard in pipeline.shards())
            shares.append([value for shard in pipeline.shards() for value in shard.tensor.tolist()])
            pipeline.close()
    return [shares[0], shares[2]]


def test_a_checkpoint_holds_the_shares_of_bf16_weights_in_fp32(tmp_path: Any) -> None:
    for straight, resumed in run_ranks(resumed_in_bf16, 2, str(tmp_path)):
        assert straight == resumed
        assert straight != torch.tensor(straight).bfloat16().tolist()


def gradients_by(rank: int, level: int) -> dict[str, list[list[float]]]:
    """The gradients of this replica's shares after one step, and after another one behind what a caller does to them."""
    results: dict[str, list[list[float]]] = {}
    pipeline = pipeline_of(level)
    shares = list(pipeline.parameters())

    def step(name: str) -> None:
        pipeline.step(*data(0)[rank])
        results[name] = [share.grad.tolist() for share in shares if share.grad is not None]

    step("once")
    step("added")
    for share in shares:
        share.grad = None
    step("dropped")
    pipeline.zero_grad()
    step("dropped by the pipeline")
    shares[0].grad = None
    shares[-1].grad = 3 * shares[-1].grad  # type: ignore[operator]
    step("the first dropped, the last replaced")
    pipeline.close()
    return results


@pytest.mark.parametrize("level", [1, 3])
def test_gradients_of_shares_add_up_until_they_are_dropped(level: int) -> None:
    for results in run_ranks(gradients_by, 2, level):
        once = [torch.tensor(each) for each in results["once"]]
        last = len(once) - 1
        for name, scale in {
            "added": {-1: 2},
            "dropped": {-1: 1},
            "dropped by the pipeline": {-1: 1},
            "the first dropped, the last replaced": {0: 1, last: 4, -1: 2},
        }.items():
            for at, values in enumerate(results[name]):
                torch.testing.assert_close(
                    torch.tensor(values), once[at] * scale.get(at, scale[-1]), rtol=1e-5, atol=1e-8
                )


ORDERS = ("s", "qs", "ss", "qqs", "qss", "sqs", "sss", "qds", "sqds")
"""Steps that are summed (s) or under no_sync (q), and the drop of all gradients (d); "late" is the optimizer after one step."""


def accumulated_here(pipeline: Pipeline, share: Master) -> Tensor:
    """What this process has accumulated of the elements of a share since the last sum."""
    assert pipeline.sync is not None
    gradient = pipeline.sync.gradient(share.name)
    assert gradient is not None
    return gradient.flatten()[share.start : share.stop]


def accumulated(rank: int) -> tuple[dict[str, list[tuple[str, int, int, list[float]]]], list[float]]:
    """The gradients of this replica's shares after each order of steps, and the pipeline's norms of them."""
    pipeline = pipeline_of(1, transport="individual")  # sums are not where gradients are accumulated
    results, norms = {}, []
    for order in ("late", *ORDERS):
        if order == "late":
            pipeline.step(*data(0)[rank])
        else:
            pipeline.zero_grad()
        shares = list(pipeline.shards())
        for at, kind in enumerate(order.replace("late", "")):
            with pipeline.no_sync() if kind == "q" else contextlib.nullcontext():
                if kind == "d":
                    for share in shares:
                        share.tensor.grad = None
                else:
                    pipeline.step(*data(at)[rank])
                if kind == "q":
                    assert all(torch.equal(s.tensor.grad, accumulated_here(pipeline, s)) for s in shares)
        results[order] = [(s.name, s.start, s.stop, s.tensor.grad.tolist()) for s in shares]  # type: ignore[union-attr]
        norms.append(float(pipeline.grad_norm()))
    with pipeline.no_sync():
        pipeline.step(*data(0)[rank])
    shares[0].tensor.grad *= 2  # type: ignore[operator]
    with pytest.raises(UsageError, match=r"not summed over the replicas yet.*under no_sync\(\)"):
        pipeline.step(*data(0)[rank])
    pipeline.close()
    return results, norms


def test_shares_accumulate_steps_with_and_without_sums() -> None:
    found = run_ranks(accumulated, 2)
    for number, order in enumerate(("late", *ORDERS)):
        model = nn.Sequential(*(layer() for layer in layers(torch.float32)))
        for at, kind in enumerate(order.replace("late", "s")):
            if kind == "d":
                model.zero_grad()
            else:
                x, y = (torch.cat(each) for each in zip(*data(at), strict=True))
                mse(model(x), y).backward()  # type: ignore[no-untyped-call]
        wanted = {f"block{at}.{name}": p.grad for at in range(3) for name, p in model[at].named_parameters()}
        norm = float(torch.stack([g.square().sum() for g in wanted.values() if g is not None]).sum().sqrt())
        seen = {name: torch.zeros(g.numel()) for name, g in wanted.items() if g is not None}
        for results, norms in found:
            assert norms[number] == pytest.approx(norm, rel=1e-5), order
            for name, start, stop, values in results[order]:
                seen[name][start:stop] += torch.tensor(values)
        for name, gradient in wanted.items():
            assert gradient is not None
            assert torch.allclose(seen[name], gradient.flatten(), rtol=1e-5, atol=1e-6), (order, name)


class Chooses(nn.Module):
    """A layer one of whose matrices only some batches use."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.some, self.every = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        return self.every(x) + (self.some(x) if x.flatten()[0] > 0 else 0)  # type: ignore[no-any-return]


def chosen(replica: int, at: int) -> tuple[Tensor, Tensor]:
    """A batch, of which replica 1 does not use one matrix in the first step."""
    x, y = data(at)[replica]
    rows = x.flatten(1)
    rows[:, 0] = -1.0 if (replica, at) == (1, 0) else 1.0
    return rows.reshape(x.shape), y


def accumulated_in_part(rank: int) -> list[tuple[str, int, int, list[float]]]:
    """The gradients of this replica's shares after a step under no_sync, and one that sums."""
    options = RuntimeOptions(monitor=False, shard_gradients=True)
    layers = [Layer("chooses", Chooses)]
    pipeline = Pipeline(layers, pl.schedules.gpipe(1, 2), loss=mse, mesh=Mesh.of(MeshShape(dp=2)), options=options)
    shares = list(pipeline.shards())
    with pipeline.no_sync():
        pipeline.step(*chosen(rank, 0))
    pipeline.step(*chosen(rank, 1))
    pipeline.close()
    return [(s.name, s.start, s.stop, s.tensor.grad.tolist()) for s in shares]  # type: ignore[union-attr]


def test_shares_of_what_one_replica_has_not_used_accumulate_too() -> None:
    model, seen = Chooses(), dict[str, Tensor]()
    for at in (0, 1):
        sum(mse(model(x), y) / 2 for x, y in (chosen(replica, at) for replica in (0, 1))).backward()  # type: ignore
    for name, start, stop, values in [row for rows in run_ranks(accumulated_in_part, 2) for row in rows]:
        seen.setdefault(name, torch.zeros(WIDTH * WIDTH))[start:stop] += torch.tensor(values)
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None
        assert torch.allclose(seen[f"chooses.{name}"], parameter.grad.flatten(), rtol=1e-5, atol=1e-6), name


def norms_of_shares(rank: int) -> tuple[float, float, float]:
    """The norm of what an optimizer reads, after a caller replaced gradients and dropped one; what clipping finds and leaves."""
    pipeline = pipeline_of(1)
    shares = list(pipeline.parameters())
    pipeline.step(*data(0)[rank])
    for share in shares:
        share.grad = share.grad * 100  # type: ignore[operator]
    shares[0].grad = None

    def norm() -> float:
        square = torch.stack([share.grad.square().sum() for share in shares if share.grad is not None]).sum()
        dist.all_reduce(square)
        return float(square.sqrt())

    result = norm(), float(pipeline.clip_grad_norm_(CLIP)), norm()
    pipeline.close()
    return result


def test_clipping_scales_the_gradients_that_the_optimizer_reads() -> None:
    for before, found, after in run_ranks(norms_of_shares, 2):
        assert found == pytest.approx(before, rel=1e-5)
        assert after == pytest.approx(CLIP, rel=1e-4)


def evaluated(rank: int, level: int) -> tuple[list[float], list[float]]:
    """Losses between writes, by an optimizer of shares through `.data` and by others to the whole parameters; then the shares."""
    losses = []
    pipeline = pipeline_of(level)
    shares = list(pipeline.parameters())

    def evaluate() -> None:
        losses.append(float(pipeline.evaluate(*data(0)[rank])))

    evaluate()
    for share in shares:
        share.data.zero_()
    evaluate()
    pipeline.load_state_dict({name: torch.full_like(p, 0.5) for name, p in pipeline.state_dict().items()})
    evaluate()
    with torch.no_grad():
        for _, parameter in pipeline.named_parameters():
            parameter.fill_(0.25)
    pipeline.weights_changed()
    evaluate()
    pipeline.close()
    return losses, [float(bound) for share in shares for bound in (share.min(), share.max())]


@pytest.mark.parametrize("level", [1, 3])
def test_shares_and_whole_parameters_take_over_what_is_written_to_either(level: int) -> None:
    model = nn.Sequential(*(layer() for layer in layers(torch.float32)))
    x, y = (torch.cat(each) for each in zip(*data(0), strict=True))
    wanted = [mse(model(x), y).item()]
    for value in (0.0, 0.5, 0.25):
        for parameter in model.parameters():
            nn.init.constant_(parameter, value)
        wanted.append(mse(model(x), y).item())
    for losses, bounds in run_ranks(evaluated, 2, level):
        assert losses == pytest.approx(wanted, rel=1e-5)
        assert set(bounds) == {0.25}
