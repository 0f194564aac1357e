"""HTTP over the testbed's Unix sockets: `supervisor.sock` and `agent.sock`. One small client for plain code, one for
asyncio; both answer decoded JSON and raise `TestbedError` with a text for the user.
"""

import http.client
import json
import socket
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import aiohttp

from testbed.launch.state import StateDir, TestbedError

NOT_UP = "no testbed is up; start one with `prfaas up`"
TIMEOUT_S = 10.0


class UnixClient:
    """Requests to one socket, each on a connection of its own.

    `get`, `post` and `put` raise `TestbedError`: nothing is up, nothing answers within `timeout_s` seconds, or the
    answer is an error (then its text is the answer's `error`, or the `message` in it).
    """

    def __init__(self, path: Path, timeout_s: float = TIMEOUT_S) -> None:
        self.path = path
        self.timeout_s = timeout_s

    def get(self, path: str) -> Any:
        return self._request("GET", path, None)

    def post(self, path: str, body: Any = None) -> Any:
        return self._request("POST", path, body)

    def put(self, path: str, body: Any = None) -> Any:
        return self._request("PUT", path, body)

    def stream(self, path: str, body: Any) -> "Stream":
        """POST whose answer is lines of JSON, for as long as both sides keep it open."""
        connection = _Connection(self.path, self.timeout_s)
        try:
            connection.request("POST", path, json.dumps(body).encode(), {"Content-Type": "application/json"})
            sock, response = connection.sock, connection.getresponse()
            if response.status >= 400:
                _decode(self.path, response.status, response.read())
            sock.settimeout(None)
            return Stream(connection, sock, response)
        except (OSError, http.client.HTTPException) as error:
            connection.close()
            raise _unreachable(self.path, error) from None
        except TestbedError:
            connection.close()
            raise

    def _request(self, method: str, path: str, body: Any) -> Any:
        connection = _Connection(self.path, self.timeout_s)
        try:
            payload = None if body is None else json.dumps(body).encode()
            connection.request(method, path, payload, {"Content-Type": "application/json"})
            response = connection.getresponse()
            return _decode(self.path, response.status, response.read())
        except (OSError, http.client.HTTPException) as error:
            raise _unreachable(self.path, error) from None
        finally:
            connection.close()


class Stream:
    """An answer that comes line by line. Iterating, once, ends when either side closes it or the server is lost."""

    def __init__(
        self, connection: http.client.HTTPConnection, sock: socket.socket, response: http.client.HTTPResponse
    ) -> None:
        self._connection, self._sock, self._response = connection, sock, response

    def __iter__(self) -> Iterator[Any]:
        with suppress(OSError, http.client.HTTPException, ValueError):  # cut off, perhaps within a line
            while line := self._response.readline():
                yield json.loads(line)
        self._connection.close()

    def close(self) -> None:
        """End it, from any thread; who iterates then lets go of it."""
        with suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)


class AsyncUnixClient:
    """The same for asyncio."""

    def __init__(self, path: Path, timeout_s: float = TIMEOUT_S) -> None:
        self.path = path
        self.timeout_s = timeout_s

    async def get(self, path: str) -> Any:
        return await self._request("GET", path, None)

    async def post(self, path: str, body: Any = None) -> Any:
        return await self._request("POST", path, body)

    async def put(self, path: str, body: Any = None) -> Any:
        return await self._request("PUT", path, body)

    async def _request(self, method: str, path: str, body: Any) -> Any:
        timeout = aiohttp.ClientTimeout(total=self.timeout_s)
        try:
            async with (
                aiohttp.ClientSession(connector=aiohttp.UnixConnector(str(self.path)), timeout=timeout) as session,
                session.request(method, f"http://testbed{path}", json=body) as response,
            ):
                return _decode(self.path, response.status, await response.read())
        except aiohttp.ClientConnectorError as error:
            raise _unreachable(self.path, error.os_error) from None
        except (OSError, aiohttp.ClientError) as error:
            raise _unreachable(self.path, error) from None


def supervisor(state: StateDir | None = None, timeout_s: float = TIMEOUT_S) -> UnixClient:
    """The client of the supervisor of this user's testbed."""
    return UnixClient((state or StateDir()).supervisor_sock, timeout_s)


def agent(state: StateDir | None = None, timeout_s: float = TIMEOUT_S) -> UnixClient:
    """The client of the WAN's shaper agent of this user's testbed."""
    return UnixClient((state or StateDir()).agent_sock, timeout_s)


class _Connection(http.client.HTTPConnection):
    def __init__(self, path: Path, timeout_s: float) -> None:
        super().__init__("testbed", timeout=timeout_s)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(self.timeout)
        self.sock.connect(str(self._path))


def _decode(path: Path, status: int, body: bytes) -> Any:
    try:
        answer = json.loads(body)
    except ValueError:
        raise TestbedError(f"{path}: HTTP {status}, and the answer is not JSON: {body[:200]!r}") from None
    if status >= 400:
        error = answer.get("error", answer) if isinstance(answer, dict) else answer
        raise TestbedError(str(error["message"] if isinstance(error, dict) and "message" in error else error))
    return answer


def _unreachable(path: Path, error: BaseException) -> TestbedError:
    if isinstance(error, FileNotFoundError | NotADirectoryError):
        return TestbedError(NOT_UP)
    if isinstance(error, PermissionError):
        return TestbedError(f"{path}: not yours to use; set PRFAAS_STATE to the state directory of your own testbed")
    why = str(error) or "no answer in time"
    return TestbedError(f"{path} does not answer ({why}); see `prfaas status`, or remove the rest with `prfaas down`")
