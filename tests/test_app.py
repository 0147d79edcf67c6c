"""The HTTP server's start: an address that cannot be had is told by its key, in words."""

import socket
from pathlib import Path

import pytest

from splitproxy.books.sessions import SessionStore
from splitproxy.errors import LaunchError
from splitproxy.serve.app import listening
from splitproxy.serve.assembly import assembled
from tests.harness import configured

NOBODY = "http://127.0.0.1:9"


async def refused(folder: Path, listen: str) -> str:
    """Why the proxy does not start there."""
    config = configured(None, NOBODY, folder, {"listen": listen, "insecure": True})
    with SessionStore(folder) as store:
        async with assembled(config, store) as proxy:
            with pytest.raises(LaunchError) as caught:
                async with listening(proxy):
                    pytest.fail("it listens")
    return str(caught.value)


@pytest.mark.parametrize(
    ("listen", "why"),
    [
        ("nobody.invalid:8080", "the host is not known here: "),
        ("192.0.2.1:8080", "this machine does not have that address"),
    ],
)
async def test_an_address_that_cannot_be_had(session_dir: Path, listen: str, why: str) -> None:
    """The key and its value are named, and what is wrong with them."""
    assert (await refused(session_dir, listen)).startswith(f"listen = {listen!r}: {why}")


async def test_a_port_that_is_taken(session_dir: Path) -> None:
    """A port that another program uses is told as the system words it."""
    with socket.create_server(("127.0.0.1", 0)) as other:
        listen = f"127.0.0.1:{other.getsockname()[1]}"
        assert await refused(session_dir, listen) == f"listen = {listen!r}: Address already in use"
