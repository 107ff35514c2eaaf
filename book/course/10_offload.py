"""Chapter 10: offload."""

from dataclasses import replace

import torch

from minizero import Placement, Plan, parallelize
from minizero.lab import hardware
from minizero.lab.course import Exercise, Wrong, always_fails
from minizero.lab.course.drivers import kills
from minizero.lab.models.gpt import GPT, GPTConfig
from minizero.memory.labels import host_memory, label
from minizero.offload import Offload
from minizero.offload.bus import DoubleBuffer


class WhichBytes(Exercise):
    label = "ex-offload-1"
    answer = "kept"
    book = {"params": 7e9, "ranks": 4}
    starter = """
def kept(params: float, ranks: int) -> list[float]:
    # GB of each rank, in mixed precision with Adam: on the device and on the host under
    # ZeRO-2 with the optimizer offloaded, and under ZeRO-3 with everything offloaded.
    return [0.0, 0.0, 0.0, 0.0]
"""
    public = """
assert sum(kept(1e9, 1)) == 32  # 16 bytes per parameter, wherever they are
"""
    reference = """
def kept(params, ranks):
    share = params / ranks
    device = 2 * params
    return [each / 1e9 for each in (device, (2 + 12) * share, 0, (2 + 2 + 12) * share)]
"""
    wrong = (
        Wrong(
            "gradients on the device",
            "(device, (2 + 12) * share,",
            "(device + 2 * share, 12 * share,",
            "You left the gradients on the device: they follow the optimizer, because "
            "nothing else reads them.",
        ),
        Wrong(
            "parameters sharded",
            "device = 2 * params",
            "device = 2 * share",
            "You sharded the parameters: ZeRO-2 has all of them on each rank.",
        ),
        Wrong(
            "whole states",
            "share = params / ranks",
            "share = params",
            "You counted the states of all ranks: each rank's host memory has its share"
            " of them.",
        ),
    )

    def draw(self, rng):
        return [
            {"params": rng.randint(20, 900) * 1e8, "ranks": n}
            for n in rng.sample([3, 5, 6, 12, 24], 2)
        ]


class CrossesTheBus(Exercise):
    label = "ex-offload-2"
    answer = "crossed"
    points = 8
    starter = """
def crossed(net, batches) -> list[float]:
    # Makes one step of these micro-batches, pairs of tensors. How many bytes cross the
    # bus meanwhile, down and up, per element of the rank's shards.
    for x, y in batches:
        net.backward(net(x, y) / len(batches))
    net.step()
    return [0.0, 0.0]
"""
    public = """
from types import SimpleNamespace

storage = SimpleNamespace(down=SimpleNamespace(nbytes=7), up=SimpleNamespace(nbytes=9))
shard = SimpleNamespace(shard=SimpleNamespace(numel=lambda: 5))
idle = SimpleNamespace(storage=storage, flats=[shard], step=lambda: None)
assert list(crossed(idle, [])) == [0, 0]
"""
    reference = """
def crossed(net, batches):
    streams = net.storage.down, net.storage.up
    before = [stream.nbytes for stream in streams]
    for x, y in batches:
        net.backward(net(x, y) / len(batches))
    net.step()
    mine = sum(flat.shard.numel() for flat in net.flats)
    both = zip(before, streams, strict=True)
    return [(stream.nbytes - nbytes) / mine for nbytes, stream in both]
"""
    wrong = (
        Wrong(
            "from the start",
            "[stream.nbytes for stream in streams]",
            "[0, 0]",
            "You counted all steps so far: the counters are not reset by a step.",
        ),
        Wrong(
            "bytes",
            " / mine for",
            " for",
            "You returned bytes, not bytes per element of the rank's shards.",
        ),
        Wrong(
            "up first",
            "net.storage.down, net.storage.up",
            "net.storage.up, net.storage.down",
            "You gave first what goes up, then what goes down.",
        ),
        Wrong(
            "without the update",
            "    net.step()\n    mine = sum(flat.shard.numel() for flat in net.flats)\n"
            "    both = zip(before, streams, strict=True)\n"
            "    return [(stream.nbytes - nbytes) / mine for nbytes, stream in both]",
            "    mine = sum(flat.shard.numel() for flat in net.flats)\n"
            "    both = zip(before, streams, strict=True)\n"
            "    found = [(stream.nbytes - nbytes) / mine for nbytes, stream in both]\n"
            "    net.step()\n    return found",
            "You counted before the step: the update moves bytes, too.",
        ),
    )
    explain = "Which of the bytes grow with the micro-batches, and which do not."

    def draw(self, rng):
        plans = [("cpu", "device", None), ("cpu", "cpu", None), ("cpu", "cpu", "cpu")]
        return [
            {
                "optimizer": optimizer, "gradients": gradients,
                "parameters": parameters, "micro": rng.randint(2, 5),
                "hidden": 16 * rng.randint(2, 6),
            }
            for optimizer, gradients, parameters in plans
        ]  # fmt: skip

    @staticmethod
    def run(answer, optimizer, gradients, parameters, micro, hidden):
        plan = Plan.stage(3, optimizer, parameters)
        plan = replace(plan, gradients=Placement(True, gradients))
        model = GPT(GPTConfig(2, hidden, 2, sequence=16, vocabulary=50))
        adamw = torch.optim.AdamW(model.parameters())
        net = parallelize(model, adamw, plan, storage=Offload(plan))
        batches = [[torch.randint(50, (1, 16))] * 2 for _ in range(micro)]
        answer(net, batches)  # the first step is like no other
        down, up = answer(net, batches)
        steps = {int(state["step"]) for state in net.optimizer.state.values()}
        return {"down": down, "up": up, "steps": sorted(steps)}


class DelayHurts(Exercise):
    label = "ex-offload-3"
    answer = "order"
    points = 6
    starter = """
def order(learn, seeds: list[int]) -> list[str]:
    # The names "at once", "delayed" and "after 20", the lowest mean of the last ten
    # losses first, over all seeds. `learn(delayed, start, seed)` trains for 60 steps
    # and returns the losses; the update is delayed after step `start`.
    return ["at once", "delayed", "after 20"]
"""
    public = """
found = order(lambda delayed, start, seed: [1.0 + delayed] * 60, [0])
assert found[0] == "at once"
"""
    reference = """
def order(learn, seeds):
    ways = {"at once": (False, 0), "delayed": (True, 0), "after 20": (True, 20)}

    def mean(name):
        return sum(sum(learn(*ways[name], seed)[-10:]) for seed in seeds)

    return sorted(ways, key=mean)
"""
    wrong = (
        Wrong(
            "one seed",
            "for seed in seeds",
            "for seed in seeds[:1]",
            "You compared runs of one seed: between seeds losses differ by more than"
            " the delay changes.",
        ),
        Wrong(
            "start not passed",
            "(True, 20)",
            "(True, 0)",
            "Your late start begins at step 0: `start` does not reach the run.",
        ),
        Wrong(
            "all losses",
            "[-10:]",
            "",
            "You took the mean of all steps: the question is about the last ten.",
        ),
    )
    explain = "Why a high rate makes a delay worse, with the order that was measured."

    def draw(self, rng):
        return [{"noise": rng.sample([-0.3, 0.0, 0.3], 3), "late": x} for x in (0, 0.4)]

    @staticmethod
    def run(answer, noise, late):
        asked = []

        def learn(delayed, start, seed):
            asked.append((bool(delayed), start if delayed else 0, seed))
            lucky = noise[seed] * (1 if delayed else -1) * (1 + (start > 0))
            worse = (0.1 - late if start else 0.2) * delayed
            early = 3.0 + 0.5 * (not delayed) + 0.1 * (start > 0)
            return [early] * 50 + [2.0 + worse + lucky] * 10

        found = list(answer(learn, [0, 1, 2]))
        return {"order": found, "runs": len(set(asked))}


class OneBlockIsEnough(Exercise):
    label = "ex-offload-4"
    answer = "check_sum"
    points = 6
    starter = """
import torch


def check_sum(accumulate) -> None:
    # A test: an AssertionError if gradients that arrive in one backward are not added
    # up. `accumulate(means)` has these tensors, of one shape, arrive one after another,
    # each to be added to one shard, and returns it.
    mean = torch.ones(4)
    assert torch.equal(accumulate([mean]), mean)
"""
    public = """
check_sum(sum)  # nothing is wrong with it
"""
    reference = """
import torch


def check_sum(accumulate):
    means = [torch.full((4,), value) for value in (1.0, 2.0, 4.0, 8.0)]
    assert torch.equal(accumulate(means), sum(means))
"""
    wrong = (
        Wrong(
            "two gradients",
            "(1.0, 2.0, 4.0, 8.0)",
            "(1.0, 2.0)",
            "Two gradients arrive, one for each block: what the third one does to a"
            " block is not seen.",
        ),
        Wrong(
            "equal gradients",
            "(1.0, 2.0, 4.0, 8.0)",
            "(1.0, 1.0, 1.0, 1.0)",
            "All your gradients are equal: one that is added in another's place is not"
            " seen.",
        ),
        Wrong(
            "one gradient",
            "(1.0, 2.0, 4.0, 8.0)",
            "(1.0,)",
            "One gradient arrives: nothing else is in its block when it is added.",
        ),
        always_fails("assert torch.equal"),
    )
    explain = "What a copy that is still under way can do beside that, on a GPU."

    def draw(self, rng):
        mutants = ["overwrites", "one block", "one block from the third on"]
        return [{"mutant": name, "seed": rng.randint(1, 99)} for name in mutants]

    @staticmethod
    def run(answer, mutant, seed):
        torch.manual_seed(seed)

        def make(name):
            class Blocks(DoubleBuffer):
                turns = 0

                def turn(self):
                    self.turns += 1
                    late = name == "one block from the third on" and self.turns > 2
                    if name == "one block" or late:
                        self._used = 0
                    else:
                        super().turn()

            def accumulate(means):
                storage = Offload(Plan.stage(3, "cpu", "cpu"))
                storage._gradient_blocks = Blocks("cpu")
                with host_memory():
                    shard = label(torch.zeros_like(means[0]), "gradients", on="cpu")
                for i, mean in enumerate(means):
                    first = i == 0 or name == "overwrites"
                    storage.accumulate(shard, mean, first)
                storage.wait_for_copies()
                return shard

            return accumulate

        return kills(0, answer, make, mutant)


class ANode(Exercise):
    label = "ex-offload-5"
    answer = "node"
    points = 8
    book = {"params": 70e9, "gpus": 8, "memory": 614.4e9, "flops": 395.6e12}
    starter = """
def node(
    params: float, gpus: int, memory: float, flops: float
) -> tuple[float, float, float]:
    # ZeRO-3 with the optimizer offloaded on one node, mixed precision, full
    # recomputation; the host's memory moves `memory` bytes/s, a GPU does `flops`
    # FLOP/s. GB that a device keeps, GB that the host keeps for all ranks, and tokens a
    # step and GPU with which the host's Adam is a quarter of the step.
    return 0.0, 0.0, 0.0
"""
    public = """
assert node(1e9, 1, 1e11, 1e14)[:2] == (2, 14)
"""
    reference = """
def node(params, gpus, memory, flops):
    moved = 28 + 12  # by Adam in fp32, and to and from 16 bits
    even = moved * flops / (8 * memory)
    return 2 * params / gpus / 1e9, 14 * params / 1e9, 3 * even
"""
    wrong = (
        Wrong(
            "half the step",
            "3 * even",
            "even",
            "With these tokens Adam takes as long as the computing: half of the step.",
        ),
        Wrong(
            "fp32 alone",
            "28 + 12",
            "28",
            "Adam in fp32 moves 28 bytes per parameter; 16-bit gradients and parameters"
            " have to be read, widened and written too.",
        ),
        Wrong(
            "one rank's host memory",
            "14 * params / 1e9",
            "14 * params / gpus / 1e9",
            "That is one rank's share: all ranks of the node share one host.",
        ),
        Wrong(
            "no recomputation",
            "(8 * memory)",
            "(6 * memory)",
            "You counted 6 operations per token and parameter; recomputation adds 2.",
        ),
    )
    explain = "Why this plan: what would not fit, and what would move more."

    def draw(self, rng):
        node = hardware.H100
        return [
            {
                "params": rng.randint(10, 120) * 1e9, "gpus": gpus,
                "memory": round(node.dram * rng.choice([0.5, 1.5, 2])),
                "flops": round(node.flops * rng.choice([0.25, 0.5, 2])),
            }
            for gpus in rng.sample([4, 6, 16], 2)
        ]  # fmt: skip
