"""Runs that are kept: found again by all that they depend on, whole or not at all, whoever else writes."""

import threading
from pathlib import Path

import pytest

from testbed.gate.cache import Cache
from testbed.gate.jobs import Job
from testbed.scenario import load

RUN = {"status": "valid", "summary": {"ttft_s": {"p90": 1.25}}, "findings": []}


@pytest.fixture
def job() -> Job:
    return Job(load("toy").only(None))


def files(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if path.is_file()]


def test_what_was_kept_is_found_by_another(tmp_path, job):
    first = Cache(tmp_path)
    first.put(first.key("prfaas abc", job), RUN)
    assert Cache(tmp_path).get(first.key("prfaas abc", job)) == RUN
    assert Cache(None).get(first.key("prfaas abc", job)) is None


def test_a_key_is_of_policy_scenario_seed_and_rates(job):
    cache = Cache(None)
    keys = {
        cache.key("prfaas abc", job),
        cache.key("prfaas abd", job),
        cache.key("prfaas abc", Job(job.scenario.model_copy(update={"seed": 2}))),
        cache.key("prfaas abc", Job(job.scenario, (1.0, 2.0))),
        cache.key("prfaas abc", Job(load("toy", ["workload.duration_s=200"]).only(None))),
    }
    assert len(keys) == 5
    assert cache.key("prfaas abc", job) == cache.key("prfaas abc", Job(load("toy").only(None)))


@pytest.mark.parametrize("damage", [b"", b"nonsense", None])
def test_what_is_not_as_it_was_written_is_not_there(tmp_path, job, damage):
    cache = Cache(tmp_path)
    key = cache.key("prfaas abc", job)
    cache.put(key, RUN)
    (path,) = files(tmp_path)
    path.write_bytes(path.read_bytes().replace(b"1.25", b"1.20") if damage is None else damage)
    assert cache.get(key) is None
    cache.put(key, RUN)
    assert cache.get(key) == RUN


def test_a_run_under_anothers_name_is_not_there(tmp_path, job):
    cache = Cache(tmp_path)
    key = cache.key("prfaas abc", job)
    cache.put(key, RUN)
    (path,) = files(tmp_path)
    path.rename(path.with_name("0" * 64 + ".json"))
    assert cache.get("0" * 64) is None


def test_many_may_write_at_once(tmp_path, job):
    cache = Cache(tmp_path)
    key = cache.key("prfaas abc", job)
    wrong = []

    def writer() -> None:
        own = Cache(tmp_path)
        for _ in range(50):
            own.put(key, RUN)
            if own.get(key) != RUN:
                wrong.append(own.get(key))

    threads = [threading.Thread(target=writer) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
    assert len(files(tmp_path)) == 1


def test_a_folder_that_cannot_be_written_keeps_nothing_and_says_so(tmp_path, job):
    (tmp_path / "file").write_text("")
    cache = Cache(tmp_path / "file")
    cache.put(cache.key("prfaas abc", job), RUN)
    assert not cache.writable
