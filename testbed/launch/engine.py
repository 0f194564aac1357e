"""A container engine as the compose launcher uses it: the `docker` SDK for containers, the compose command line for
what a compose file describes, the docker command line for builds. Whatever goes wrong there is a TestbedError.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from testbed.launch.compose_file import PROJECT, STATE_LABEL
from testbed.launch.state import StateDir, TestbedError

REPOSITORY: Final = Path(__file__).parents[2]
_OURS: Final = {"label": f"com.docker.compose.project={PROJECT}"}
_INSTALL: Final = "install it with: pip install 'prfaas-testbed[compose]', or make setup-compose"
ONCE_S: Final = 30
CPU_LOCK: Final = "requirements-model-cpu.lock"
WHEELS_TAG: Final = "prfaas-torch-wheels"
_BUILDKIT_INSIDE: Final = 23
"""The docker command lines before this version build with BuildKit by themselves; later ones need buildx."""


def connect(timeout_s: float = 60.0) -> Any:
    """The engine's client (a `docker.DockerClient`), where DOCKER_HOST says or its usual place. Raises TestbedError."""
    try:
        import docker
    except ImportError:
        raise TestbedError(f"the compose launcher needs the package docker; {_INSTALL}") from None
    with said("the container engine does not answer"):
        client = docker.from_env(timeout=timeout_s)
        client.ping()
    return client


@contextlib.contextmanager
def said(what: str) -> Iterator[None]:
    """Whatever the engine says against it, in one line."""
    import docker.errors
    import requests

    try:
        yield
    except docker.errors.APIError as error:
        raise TestbedError(f"{what}: {error.explanation or error}") from None
    except (docker.errors.DockerException, requests.RequestException, OSError) as error:
        remedy = "start one (Debian: apt-get install docker.io), or name it: DOCKER_HOST=unix:///path/to/docker.sock"
        raise TestbedError(f"{what} ({_innermost(error)}); {remedy}") from None


def containers(engine: Any) -> dict[str, Any]:
    """Service -> container, of the testbed that this engine has."""
    with said("the testbed's containers cannot be listed"):
        found = engine.containers.list(all=True, filters=_OURS)
    return {one.labels["com.docker.compose.service"]: one for one in found}


def paused(engine: Any) -> set[str]:
    """The testbed's services whose containers are paused."""
    with said("the testbed's containers cannot be listed"):
        found = engine.api.containers(filters=_OURS)
    return {one["Labels"]["com.docker.compose.service"] for one in found if one["State"] == "paused"}


def owner(engine: Any) -> str | None:
    """The state directory of the testbed that this engine has; None where it has none."""
    with said("the testbed's containers cannot be listed"):
        found = engine.api.containers(all=True, filters=_OURS)
    return next((str(one["Labels"].get(STATE_LABEL, "unknown")) for one in found), None)


def compose(state: StateDir, *arguments: str) -> None:
    """Run the compose command line on a testbed's file. Raises TestbedError with its last lines."""
    program = Path(sys.executable).with_name("docker-compose")
    if not program.exists():
        raise TestbedError(f"the compose launcher needs the program {program}; {_INSTALL}")
    argv = [str(program), "--project-directory", str(REPOSITORY / "compose"), "-f", str(state.compose_file)]
    argv += ["--env-file", str(state.compose_env), "--progress", "plain", *arguments]
    _run(argv, os.environ, "docker-compose")


def build(engine: Any, tag: str, target: str, base_image: str | None, torch_wheels: str | None = None) -> bool:
    """Build `tag` from this checkout; whether the engine did not have that tag before. Raises TestbedError.

    torch_wheels: a folder with a wheel of PyTorch for CPUs, in place of the one with CUDA from pip's index.
    """
    dockerfile = REPOSITORY / "compose" / "Dockerfile"
    if not dockerfile.exists():
        raise TestbedError(f"{dockerfile} is not there: the compose launcher builds its image from a checkout")
    before = _image_id(engine, tag)
    argv = [*builder(), "build", "--quiet", "-f", str(dockerfile), "--target", target, "-t", tag]
    argv += [] if base_image is None else ["--build-arg", f"BASE_IMAGE={base_image}"]
    with contextlib.ExitStack() as made:
        folder = made.enter_context(tempfile.TemporaryDirectory(prefix="prfaas-build-"))
        if torch_wheels is not None:
            made.enter_context(_wheels_image(engine, Path(torch_wheels), Path(folder)))
            argv += ["--build-arg", f"TORCH_WHEELS={WHEELS_TAG}", "--build-arg", f"MODEL_LOCK={CPU_LOCK}"]
        for name, path in pip_secrets(Path(folder)).items():
            argv += ["--secret", f"id={name},src={path}"]
        _run([*argv, str(REPOSITORY)], {**os.environ, "DOCKER_BUILDKIT": "1"}, f"the image {tag}")
    if before not in (None, _image_id(engine, tag)):
        with contextlib.suppress(TestbedError), said("the image before"):
            engine.images.remove(before)  # it has no name any more; where it has one, or is used, it stays
    return before is None


@contextlib.contextmanager
def _wheels_image(engine: Any, wheels: Path, folder: Path) -> Iterator[None]:
    """WHEELS_TAG, while a build needs it: an image with nothing but the wheels of PyTorch in a folder, as the older
    engines know no other way to give a build files from outside its context. Raises TestbedError where there are none.
    """
    found = sorted(wheels.glob("torch-*.whl"))
    if not found:
        lock = (REPOSITORY / "compose" / CPU_LOCK).read_text()
        torch = next(line.split()[0] for line in lock.splitlines() if line.startswith("torch=="))
        raise TestbedError(
            f"TORCH_WHEELS={wheels}: no torch-*.whl in it; get the one for x86-64 that compose/{CPU_LOCK} names, from "
            f"PyTorch's own index for CPUs (--extra-index-url): pip download --no-deps --only-binary :all: "
            f"--python-version 3.11 --dest {wheels} {torch}"
        )
    packed, what = folder / "wheels.tar", f"the wheels of PyTorch in {wheels}"
    with tarfile.open(packed, "w") as tar:
        for wheel in found:
            tar.add(wheel, wheel.name)
    try:
        with said(what):
            engine.api.import_image_from_file(str(packed), WHEELS_TAG, "latest")
        yield
    finally:
        with said(what), _unless_gone():
            engine.images.remove(WHEELS_TAG)


def remove(engine: Any, images: Sequence[str] = ()) -> list[str]:
    """Remove the testbed's containers and networks, and these images' tags; what there was, in words. Idempotent."""
    told = []
    with said("the testbed cannot be removed"):
        for one in engine.containers.list(all=True, filters=_OURS):
            with _unless_gone():
                one.remove(force=True, v=True)
                told.append(f"removed container {one.name}")
        for one in engine.networks.list(filters=_OURS):
            with _unless_gone():
                one.remove()
                told.append(f"removed network {one.name}")
        for tag in images:
            with _unless_gone():
                engine.images.remove(tag)
                told.append(f"removed image tag {tag}")
    return told


def run_once(engine: Any, site: Any, argv: Sequence[str], capability: str) -> str:
    """Run a program to its end in the network of container `site`, from its image and as root with one capability; its
    standard output. Raises TestbedError with what it said."""
    name = site.labels["com.docker.compose.service"]
    labels = {"com.docker.compose.project": PROJECT, "com.docker.compose.service": f"{name}-once"}
    with said(f"{name}: {argv[-2]}"):
        once = engine.containers.create(
            site.image.id,
            entrypoint=list(argv),
            user="0:0",
            network_mode=f"container:{site.id}",
            cap_drop=["ALL"],
            cap_add=[capability],
            security_opt=["no-new-privileges:true"],
            read_only=True,
            labels={**labels, STATE_LABEL: site.labels.get(STATE_LABEL, "unknown")},
        )
        try:
            once.start()
            code = once.wait(timeout=ONCE_S)["StatusCode"]
            text: str = once.logs(stdout=code == 0, stderr=code != 0).decode(errors="replace").strip()
        finally:
            once.remove(force=True)
    if code != 0:
        raise TestbedError(f"{name}: {text.removeprefix('error: ')}")
    return text


def pip_secrets(folder: Path) -> dict[str, Path]:
    """What pip is configured with here and a build needs too, by the secret's name: its index and its CA bundle.

    Files are written to `folder`, which is the caller's to remove.
    """
    asked = subprocess.run([sys.executable, "-m", "pip", "config", "list"], capture_output=True, text=True, timeout=60)
    settings: dict[str, str] = {}
    for line in sorted(asked.stdout.splitlines(), key=lambda line: line.startswith(":env:")):  # which has its way
        name, _, value = line.partition("=")
        settings[name.rpartition(".")[2]] = value.strip("'")
    kept = {name: settings[name] for name in ("index-url", "trusted-host", "timeout", "proxy") if name in settings}
    files = {}
    if kept:
        files["pip_conf"] = folder / "pip.conf"
        text = "\n".join(["[global]", *(f"{name} = {value}" for name, value in kept.items())])
        files["pip_conf"].write_text(text + "\n")
    if (bundle := settings.get("cert")) and Path(bundle).is_file():
        files["pip_ca"] = Path(bundle)
    return files


def builder() -> list[str]:
    """A docker command line that can build with BuildKit. Raises TestbedError where none on PATH can."""
    seen = []
    for folder in os.environ.get("PATH", os.defpath).split(os.pathsep):
        program = shutil.which("docker", path=folder)
        if program is None:
            continue
        try:
            asked = subprocess.run([program, "--version"], capture_output=True, text=True, timeout=20).stdout
            major = asked.partition("version ")[2].partition(".")[0]
            if major.isdigit() and int(major) < _BUILDKIT_INSIDE:
                return [program]
            if subprocess.run([program, "buildx", "version"], capture_output=True, timeout=20).returncode == 0:
                return [program, "buildx"]
        except (OSError, subprocess.TimeoutExpired) as error:
            seen.append(f"{program} (it does not run: {error})")
        else:
            seen.append(f"{program} ({asked.strip()})")
    there = f"there are: {', '.join(seen)}" if seen else "there is none"
    raise TestbedError(
        f"no docker command line on PATH builds with BuildKit ({there}); install docker-buildx-plugin, or Debian's "
        "docker.io"
    )


def _run(argv: Sequence[str], environment: Mapping[str, str], what: str) -> None:
    done = subprocess.run(argv, env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True)
    if done.returncode != 0:
        lines = "\n".join((done.stderr or done.stdout).rstrip().splitlines()[-15:])
        raise TestbedError(f"{what} failed (exit code {done.returncode}); its last lines:\n{lines}")


def _image_id(engine: Any, tag: str) -> str | None:
    import docker.errors

    try:
        return str(engine.images.get(tag).id)
    except docker.errors.ImageNotFound:
        return None


@contextlib.contextmanager
def _unless_gone() -> Iterator[None]:
    import docker.errors

    with contextlib.suppress(docker.errors.NotFound):
        yield


def _innermost(error: BaseException) -> str:
    while error.__cause__ or error.__context__:
        error = error.__cause__ or error.__context__ or error
    return str(error) or type(error).__name__
