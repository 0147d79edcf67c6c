"""Packed bodies: each is unpacked whole, within the limit, or refused."""

import gzip
import zlib
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from splitproxy.api.packing import HAS_BROTLI, Damaged, TooLarge, unpacked

TEXT = b'{"messages": [{"role": "user", "content": "Hello."}]}'


def bare(data: bytes) -> bytes:
    """Packed without a frame."""
    packer = zlib.compressobj(wbits=-zlib.MAX_WBITS)
    return packer.compress(data) + packer.flush()


Pack = Callable[[bytes], bytes]
WAYS: list[tuple[str, Pack]] = [
    ("gzip", gzip.compress),
    ("x-gzip", gzip.compress),
    ("deflate", zlib.compress),
    ("deflate", bare),
]
if HAS_BROTLI:
    import brotli

    WAYS.append(("br", brotli.compress))


@pytest.mark.parametrize(("coding", "pack"), WAYS)
@given(data=st.binary(max_size=200))
def test_what_was_packed_comes_back(coding: str, pack: Pack, data: bytes) -> None:
    """Every coding, with and without its frame."""
    assert unpacked(coding, pack(data), 200) == data


@pytest.mark.parametrize(("coding", "pack"), WAYS)
def test_no_part_is_taken_for_the_whole(coding: str, pack: Pack) -> None:
    """A body that ends early is damaged, wherever it ends."""
    packed = pack(TEXT)
    for end in range(len(packed)):
        with pytest.raises(Damaged):
            unpacked(coding, packed[:end], 1000)


@pytest.mark.parametrize(("coding", "pack"), WAYS)
def test_the_limit_is_that_of_the_content(coding: str, pack: Pack) -> None:
    """What unpacks to more than may be is never unpacked whole."""
    assert unpacked(coding, pack(TEXT), len(TEXT)) == TEXT
    with pytest.raises(TooLarge):
        unpacked(coding, pack(TEXT), len(TEXT) - 1)
    with pytest.raises(TooLarge):
        unpacked(coding, pack(bytes(2**24)), 1000)


def test_several_parts_are_one_body() -> None:
    """A gzip body may be of several, but not of any number; the limit holds for all together."""
    assert unpacked("gzip", gzip.compress(b"ab") + gzip.compress(b"c"), 3) == b"abc"
    with pytest.raises(TooLarge):
        unpacked("gzip", gzip.compress(b"ab") + gzip.compress(b"c"), 2)
    with pytest.raises(Damaged):
        unpacked("gzip", gzip.compress(b"") * 1000, 10)


@pytest.mark.parametrize("data", [b"plain", gzip.compress(TEXT) + b"more", gzip.compress(TEXT)[:-8] + bytes(8)])
def test_what_was_never_packed_is_damaged(data: bytes) -> None:
    """Neither other bytes, nor bytes behind the end, nor a wrong sum."""
    with pytest.raises(Damaged):
        unpacked("gzip", data, 1000)
