"""Layers through the agent's HTTP interface, with shapers that only remember: in their time, told, and gone with their
connection. What states come out is tests/netem/test_layers.py's; real kernels: tests/wire.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Mapping
from typing import Any

import pytest
from aiohttp.test_utils import TestClient
from pyroute2.netlink.exceptions import NetlinkError

from netem.agent import Agent
from netem.layers import Layer
from netem.link import LinkError, LinkState
from netem.tc import ClassCounters, Counters
from tests.netem.test_agent import agent, client, log

__all__ = ["agent", "client"]

Client = TestClient[Any, Any]
FOREVER = {"at_s": 3600.0, "state": {"rate_bps": 1e6}}


def body(*steps: tuple[float, dict[str, Any]], name: str = "dip", **more: Any) -> dict[str, Any]:
    asked = [{"at_s": at_s, "state": state} for at_s, state in steps]
    return {"name": name, "t0_ns": time.monotonic_ns(), "steps": asked, **more}


async def rows(response: Any, count: int) -> list[dict[str, Any]]:
    async with asyncio.timeout(10):
        return [json.loads(await response.content.readline()) for _ in range(count)]


async def until_gone(client: Client, name: str = "dip") -> dict[str, Any]:
    async with asyncio.timeout(10):
        while True:
            answer: dict[str, Any] = await (await client.get("/link")).json()
            if name not in answer["to_pd"]["layers"]:
                return answer
            await asyncio.sleep(0.005)


async def test_steps_are_made_in_their_time_and_told_a_direction_each(client: Client) -> None:
    asked = body((0.05, {"rate_bps": 1e7}), (0.15, {"to_pd": {"outage": "blackhole"}}))
    response = await client.post("/layers", json=asked)
    assert response.status == 200
    told = await rows(response, 4)
    assert [(row["layer"], row["direction"], row["at_s"]) for row in told] == [
        ("dip", "to_pd", 0.05), ("dip", "to_prfaas", 0.05), ("dip", "to_pd", 0.15), ("dip", "to_prfaas", 0.15)
    ]  # fmt: skip
    for row in told:
        late_s = (row["t_applied_ns"] - asked["t0_ns"]) * 1e-9 - row["at_s"]
        assert row["late_s"] == pytest.approx(late_s)
        assert late_s >= 0
    states = [(row["before"]["rate_bps"], row["state"]["rate_bps"], row["state"]["outage"]) for row in told]
    assert states == [(20e6, 1e7, None), (20e6, 1e7, None), (1e7, 20e6, "blackhole"), (1e7, 20e6, None)]


async def test_the_log_has_the_layer_of_every_true_step_and_no_other(client: Client, agent: Agent) -> None:
    response = await client.post("/layers", json=body((0.0, {"rate_bps": 20e6}), (0.01, {"to_pd": {"rate_bps": 1e7}})))
    await rows(response, 4)
    response.close()
    await until_gone(client)
    steps = [(row["layer"], row["direction"], row["state"]["rate_bps"]) for row in log(agent)]
    assert steps == [
        (None, "to_pd", 20e6), (None, "to_prfaas", 20e6), ("dip", "to_pd", 1e7), ("dip", "to_pd", 20e6)
    ]  # fmt: skip


async def test_a_closed_connection_takes_its_layer_with_it(client: Client, agent: Agent) -> None:
    response = await client.post("/layers", json=body((0.0, {"rate_bps": 1e7, "outage": "blackhole"}), (9e3, {})))
    await rows(response, 2)
    answer = await (await client.get("/link")).json()
    assert answer["to_pd"]["layers"] == ["dip"]
    assert (answer["to_pd"]["asked"]["outage"], answer["to_pd"]["outage_kept"]) == ("blackhole", "blackhole")
    assert answer["to_pd"]["base"]["outage"] is None
    response.close()
    answer = await until_gone(client)
    assert agent.states == agent.base == {"to_pd": LinkState(20e6), "to_prfaas": LinkState(20e6)}
    assert answer["to_pd"]["outage_kept"] is None


async def test_of_two_layers_the_one_that_stays_keeps_its_word(client: Client, agent: Agent) -> None:
    first = await client.post("/layers", json=body((0.0, {"outage": "blackhole", "rate_bps": 1e7}), name="first"))
    await rows(first, 2)
    second = await client.post("/layers", json=body((0.0, {"outage": "down", "rate_bps": 2e7}), name="second"))
    await rows(second, 2)
    assert agent.states["to_pd"] == LinkState(2e7, outage="down")
    second.close()
    await until_gone(client, "second")
    assert agent.states["to_pd"] == LinkState(1e7, outage="blackhole")
    first.close()
    await until_gone(client, "first")
    assert agent.states["to_pd"] == LinkState(20e6)


async def test_a_put_changes_what_lies_below(client: Client, agent: Agent) -> None:
    response = await client.post("/layers", json=body((0.0, {"rate_bps": 1e7})))
    await rows(response, 2)
    answer = await (await client.put("/link", json={"rate_bps": 3e7, "loss": 0.01})).json()
    assert answer["to_pd"]["asked"]["rate_bps"] == 1e7
    assert answer["to_pd"]["base"]["rate_bps"] == 3e7
    assert answer["to_pd"]["asked"]["loss"] == 0.01
    response.close()
    await until_gone(client)
    assert agent.states["to_pd"] == LinkState(3e7, loss=0.01)


async def test_a_layer_that_cannot_be_had_is_refused_whole_and_names_the_step(client: Client, agent: Agent) -> None:
    response = await client.post("/layers", json=body((0.0, {"rate_bps": 1e7}), (1.0, {"to_pd": {"rate_bps": 5}})))
    assert response.status == 400
    error = (await response.json())["error"]
    assert (error["field"], error["value"]) == ("steps[1].state.to_pd.rate_bps", 5)
    assert agent.layers == []
    assert agent.states == agent.base


async def test_a_name_is_one_layers_at_a_time(client: Client) -> None:
    first = await client.post("/layers", json=body((0.0, {"rate_bps": 1e7})))
    assert (await client.post("/layers", json=body((0.0, {"rate_bps": 2e7})))).status == 400
    first.close()
    await until_gone(client)
    assert (await client.post("/layers", json=body((0.0, {"rate_bps": 2e7})))).status == 200


async def test_a_stall_where_no_packet_can_wait_is_refused_before_it_begins(client: Client, agent: Agent) -> None:
    refusal = LinkError("table prfaas_forward: the kernel does not divert packets; modprobe nft_queue")
    agent.keeper.refusal = refusal  # type: ignore[attr-defined]
    response = await client.post("/layers", json=body((0.0, {"outage": "stall"})))
    assert response.status == 500
    assert "modprobe nft_queue" in (await response.json())["error"]["message"]
    assert agent.layers == []
    response = await client.post("/layers", json=body((0.0, {"outage": "blackhole"})))
    assert response.status == 200


async def test_a_step_that_the_kernel_refuses_is_told_and_the_next_one_comes(client: Client, agent: Agent) -> None:
    broken: Any = agent.shapers["to_prfaas"]
    broken.broken = True
    response = await client.post("/layers", json=body((0.0, {"rate_bps": 1e7}), (0.3, {"rate_bps": 2e6})))
    (told,) = await rows(response, 1)
    assert (told["layer"], told["at_s"]) == ("dip", 0.0)
    assert "kept another state" in told["error"]
    broken.broken = False
    assert [row["state"]["rate_bps"] for row in await rows(response, 2)] == [2e6, 2e6]


@pytest.mark.parametrize("refusal", [LinkError("not that"), NetlinkError(16), OSError(24, "Too many open files")])
async def test_the_link_is_restored_once_the_kernel_takes_it(client: Client, agent: Agent, refusal: Exception) -> None:
    response = await client.post("/layers", json=body((0.0, {"rate_bps": 1e7})))
    await rows(response, 2)
    broken: Any = agent.shapers["to_pd"]
    broken.broken, broken.refusal = True, refusal
    response.close()
    await asyncio.sleep(0.1)
    assert (await (await client.get("/link")).json())["to_pd"]["layers"] == ["dip"]
    broken.broken = False
    await until_gone(client)
    assert broken.states[-1] == LinkState(20e6)


async def test_an_agent_that_leaves_leaves_the_link_as_it_is(client: Client, agent: Agent) -> None:
    response = await client.post("/layers", json=body((0.0, {"outage": "blackhole"}), (3600.0, {})))
    await rows(response, 2)
    agent.leaving.set()
    assert await response.content.read() == b""
    assert agent.states["to_pd"].outage == "blackhole"


async def test_steps_that_are_late_are_made_late_and_in_order(client: Client) -> None:
    late = body((0.0, {"rate_bps": 1e7}), (0.01, {"rate_bps": 2e7}), (0.02, {"rate_bps": 3e7}))
    late["t0_ns"] -= 10**9
    told = await rows(await client.post("/layers", json=late), 6)
    assert [row["state"]["rate_bps"] for row in told[::2]] == [1e7, 2e7, 3e7]
    assert all(row["late_s"] >= 0.98 for row in told)


async def test_a_token_bucket_sets_the_rate_of_the_direction_that_has_used_it_up(
    client: Client, agent: Agent, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent = {"to_pd": 0, "to_prfaas": 0}

    async def counted(self: Agent) -> dict[str, Counters]:
        nothing = ClassCounters(0, 0, 0, 0, 0)
        return {
            way: Counters(time.monotonic_ns(), ClassCounters(so_far, 1, 0, 0, 0), nothing, 0)
            for way, so_far in sent.items()
        }

    monkeypatch.setattr(Agent, "counters", counted)
    bucket = {"peak_bps": 80e6, "base_bps": 8e6, "budget_bytes": 1e6, "resume_s": 10.0}
    response = await client.post("/layers", json=body(token_bucket=bucket))
    assert [row["state"]["rate_bps"] for row in await rows(response, 2)] == [80e6, 80e6]
    sent["to_pd"] = 5_000_000  # more than its megabyte; the other direction sends nothing
    told = await rows(response, 2)
    assert [(row["direction"], row["state"]["rate_bps"]) for row in told] == [("to_pd", 8e6), ("to_prfaas", 80e6)]


async def test_a_token_buckets_rate_that_is_refused_is_told_once_and_tried_again(
    client: Client, agent: Agent, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent, tries, say = {"to_pd": 0, "to_prfaas": 0}, [], Agent.say

    async def counted(self: Agent) -> dict[str, Counters]:
        nothing = ClassCounters(0, 0, 0, 0, 0)
        return {
            way: Counters(time.monotonic_ns(), ClassCounters(so_far, 1, 0, 0, 0), nothing, 0)
            for way, so_far in sent.items()
        }

    async def refuses(self: Agent, layer: Layer, state: Mapping[str, Any]) -> Any:
        if state["to_pd"]["rate_bps"] == 8e6:
            tries.append(state)
            if len(tries) <= 3:
                raise LinkError("the kernel is busy")
        return await say(self, layer, state)

    monkeypatch.setattr(Agent, "counters", counted)
    monkeypatch.setattr(Agent, "say", refuses)
    bucket = {"peak_bps": 80e6, "base_bps": 8e6, "budget_bytes": 1e6, "resume_s": 10.0}
    response = await client.post("/layers", json=body(token_bucket=bucket))
    await rows(response, 2)
    sent["to_pd"] = 5_000_000
    (error,) = await rows(response, 1)
    assert error["error"] == "the kernel is busy"
    told = await rows(response, 2)
    assert [(row["direction"], row["state"]["rate_bps"]) for row in told] == [("to_pd", 8e6), ("to_prfaas", 80e6)]
    assert len(tries) == 4
