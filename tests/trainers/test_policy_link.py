"""The link between a trainer and the process that rolls out: calls arrive whole, and no side waits for a dead one."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Client

import pytest

from etpi_resources.engines import Completion, Engine, Request, Sampler
from etpi_resources.trainers.policy_link import LinkBroken, PolicyServer, Sample, connect


class Echo:
    """An engine that answers with the prompt's ids, reversed."""

    name = "echo"

    def __init__(self, fails: bool = False) -> None:
        self.fails, self.together, self.most = fails, 0, 0
        self.lock = threading.Lock()

    def complete(self, requests: Sequence[Request]) -> list[Completion]:
        if self.fails:
            raise ValueError("no such weights")
        return [
            Completion(list(r.prompt_ids), list(r.prompt_ids)[::-1], [-0.5] * len(r.prompt_ids), r.session, "stop", "m")
            for r in requests
        ]

    def fingerprint(self):
        return {}

    def close(self) -> None:
        """Nothing is held."""


def request(engine: Engine, n: int) -> Completion:
    sampler = Sampler(temperature=0.9, max_tokens=n, seed=n)
    [completion] = engine.complete([Request(f"r/{n}", f"s{n}", list(range(n)), (), sampler)])
    return completion


def sample(ids: Sequence[int]) -> Sample:
    return Sample([1], list(ids), [1] * len(ids), [-0.5] * len(ids), 1.0, 0.5, 1.0, 0.0)


def test_concurrent_rollouts_each_get_their_own_completion():
    def roll_out(step: int, rows: Sequence[int], engine: Engine) -> list[Sample]:
        with ThreadPoolExecutor(16) as pool:
            completions = list(pool.map(lambda row: request(engine, row), rows))
        assert [c.text for c in completions] == [f"s{row}" for row in rows]
        return [sample(c.output_ids or ()) for c in completions]

    with PolicyServer(roll_out, "policy") as server, connect(str(server.path)) as client:
        for step in range(3):
            rows = list(range(1, 40))
            samples = client.roll_out(step, rows, Echo())
            assert [list(s.completion_ids) for s in samples] == [list(range(row))[::-1] for row in rows]
            assert samples[0].logprobs == [-0.5] and samples[0].advantage == 0.5


def test_error_in_a_rollout_stops_the_trainer_with_its_message():
    def roll_out(step: int, rows: Sequence[int], engine: Engine) -> list[Sample]:
        raise ValueError("row 7 has no reward")

    with PolicyServer(roll_out, "policy") as server, connect(str(server.path)) as client:
        with pytest.raises(LinkBroken, match="step 4.*ValueError: row 7 has no reward"):
            client.roll_out(4, [7], Echo())
        assert isinstance(server.error, ValueError)


def test_error_in_generation_reaches_the_rollout():
    seen: list[str] = []

    def roll_out(step: int, rows: Sequence[int], engine: Engine) -> list[Sample]:
        with pytest.raises(RuntimeError, match="no such weights") as caught:
            request(engine, 3)
        seen.append(str(caught.value))
        return [sample([1])]

    with PolicyServer(roll_out, "policy") as server, connect(str(server.path)) as client:
        client.roll_out(0, [0], Echo(fails=True))
    assert seen == ["ValueError: no such weights"]


def test_rollouts_fail_when_the_trainer_disconnects():
    ended = threading.Event()

    def roll_out(step: int, rows: Sequence[int], engine: Engine) -> list[Sample]:
        try:
            request(engine, 1)
        except LinkBroken:
            ended.set()
            raise
        return [sample([1])]

    with PolicyServer(roll_out, "policy") as server:
        with Client(str(server.path)) as trainer:
            trainer.send(("roll_out", 0, 0, [0], 0, None))
            assert trainer.recv()[0] == "complete"
        assert ended.wait(20), "the rollout waited for a trainer that is gone"
    assert server.error is None and not server.path.exists()


def test_statistics_of_a_round_are_kept_before_the_trainer_goes_on():
    kept: dict[int, bytes] = {}

    def record(step: int, statistics: bytes) -> None:
        if step == 2:
            raise OSError("the disk is full")
        kept[step] = statistics

    statistics = bytes(range(256))
    with PolicyServer(lambda step, rows, engine: [], "policy", record) as server:
        with connect(str(server.path)) as client:
            client.record(1, statistics)
            assert kept == {1: statistics}
            with pytest.raises(LinkBroken, match="step 2 .*the disk is full"):
                client.record(2, statistics)
        assert isinstance(server.error, OSError)


def test_connecting_without_a_server_fails():
    with PolicyServer(lambda step, rows, engine: [], "policy") as server:
        path = str(server.path)
    with pytest.raises(OSError), connect(path):
        pass
