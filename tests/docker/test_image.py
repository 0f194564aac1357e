"""What the image holds: who runs in it, and nothing of what only its build was to know."""

from __future__ import annotations

import os
import secrets
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from testbed.launch import engine as engines

pytestmark = pytest.mark.docker

TAG = "prfaas-testbed-secrets"


@pytest.fixture(scope="module")
def marker() -> str:
    return secrets.token_hex(16)


@pytest.fixture(scope="module")
def engine(marker: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """An engine with an image that was built with pip's own secrets, each with the marker in it."""
    engine, folder = engines.connect(), tmp_path_factory.mktemp("secrets")
    given = engines.pip_secrets(folder)
    configuration, bundle = folder / "marked.conf", folder / "marked.pem"
    configuration.write_text((given["pip_conf"].read_text() if "pip_conf" in given else "[global]\n") + f"# {marker}\n")
    argv = [
        *engines.builder(),
        "build",
        "--quiet",
        "--no-cache",
        "-f",
        str(engines.REPOSITORY / "compose" / "Dockerfile"),
    ]
    argv += ["--target", "testbed", "-t", TAG, "--secret", f"id=pip_conf,src={configuration}"]
    if "BASE_IMAGE" in os.environ:
        argv += ["--build-arg", f"BASE_IMAGE={os.environ['BASE_IMAGE']}"]
    if "pip_ca" in given:
        bundle.write_text(given["pip_ca"].read_text() + f"\n# {marker}\n")
        argv += ["--secret", f"id=pip_ca,src={bundle}"]
    done = subprocess.run(
        [*argv, str(engines.REPOSITORY)], env={**os.environ, "DOCKER_BUILDKIT": "1"}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    try:
        yield engine
    finally:
        engine.images.remove(TAG, force=True)


def test_no_layer_keeps_a_secret_of_the_build(engine: Any, marker: str, tmp_path: Path) -> None:
    image = engine.images.get(TAG)
    saved = tmp_path / "image.tar"
    with saved.open("wb") as file:
        for chunk in image.save():
            file.write(chunk)

    def found(text: str) -> bool:
        return subprocess.run(["grep", "--quiet", "--text", text, str(saved)]).returncode == 0

    assert found("Become a process of a testbed."), "the layers cannot be searched as they are saved"
    assert not found(marker)
    assert marker not in str(image.history())


def test_it_runs_as_nobody_in_particular_and_without_torch(engine: Any) -> None:
    asked = "import importlib.util, os; print(os.getuid(), os.getgid(), importlib.util.find_spec('torch'))"
    said = engine.containers.run(TAG, ["-c", asked], entrypoint="python", remove=True)
    assert said.decode().strip() == "10001 10001 None"
