"""Bodies that clients have packed: engines read none. Pure: bytes in, bytes out."""

import zlib

try:
    import brotli
except ImportError:
    brotli = None

# Older versions cannot unpack up to a limit.
HAS_BROTLI = hasattr(getattr(brotli, "Decompressor", None), "can_accept_more_data")
CODINGS = frozenset({"gzip", "x-gzip", "deflate", *(["br"] if HAS_BROTLI else [])})
_MOST_MEMBERS = 64  # of one gzip body; each costs a copy of what follows it
_ZLIB, _GZIP, _BARE = zlib.MAX_WBITS, zlib.MAX_WBITS | 16, -zlib.MAX_WBITS


class Damaged(ValueError):  # noqa: N818 - that is what it is
    """The bytes are not what their coding says, or end in the middle."""


class TooLarge(ValueError):  # noqa: N818 - that is what it is
    """There is more in it than may be."""


def unpacked(coding: str, data: bytes, limit_bytes: int) -> bytes:
    """What a body holds that was packed whole in one of CODINGS. Raises Damaged, and TooLarge beyond the limit."""
    if coding == "br":
        return _from_brotli(data, limit_bytes)
    if coding == "deflate":
        # Many clients leave out the frame that the standard wants.
        return _from_zlib(data, limit_bytes, _ZLIB if data[:1] and data[0] & 0x0F == 8 else _BARE)
    return _from_zlib(data, limit_bytes, _GZIP)


def _from_brotli(data: bytes, limit_bytes: int) -> bytes:
    unpacker = brotli.Decompressor()
    try:
        text: bytes = unpacker.process(data, output_buffer_limit=limit_bytes + 1)
    except brotli.error:
        raise Damaged from None
    if len(text) > limit_bytes:
        raise TooLarge
    if not unpacker.is_finished():
        raise Damaged
    return text


def _from_zlib(data: bytes, limit_bytes: int, form: int) -> bytes:
    pieces, left_bytes = list[bytes](), limit_bytes
    for _ in range(_MOST_MEMBERS):
        member = zlib.decompressobj(form)
        try:
            piece = member.decompress(data, left_bytes + 1)
        except zlib.error:
            raise Damaged from None
        left_bytes -= len(piece)
        if left_bytes < 0:
            raise TooLarge
        if not member.eof:
            raise Damaged
        pieces.append(piece)
        data = member.unused_data
        if not data:
            return b"".join(pieces)
    raise Damaged
