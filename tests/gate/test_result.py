"""A gate's result as a file: what is written is read again, and what is none is refused in words."""

from pathlib import Path

import pytest

from testbed.gate.result import EXIT_CODES, GateResult, read
from testbed.scenario_data import ScenarioError

EXAMPLE = Path(__file__).with_name("example-result.json")


def example() -> GateResult:
    return GateResult.model_validate_json(EXAMPLE.read_bytes())


def test_what_is_written_is_read_again(tmp_path):
    example().keep(tmp_path / "new")
    assert read(tmp_path / "new") == example()


def test_exit_codes_are_those_that_ci_knows():
    assert EXIT_CODES == {"better": 0, "same": 0, "worse": 1, "invalid": 3, "inconclusive": 4}


def test_a_folder_without_a_result_is_refused(tmp_path):
    with pytest.raises(ScenarioError, match=r"summary\.json: cannot be read .*prfaas gate"):
        read(tmp_path)


def test_another_summary_is_refused_with_the_field(tmp_path):
    (tmp_path / "summary.json").write_text('{"scenario": "paper"}')
    with pytest.raises(ScenarioError, match=r"verdict: Field required; it is no result"):
        read(tmp_path)
