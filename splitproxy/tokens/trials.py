"""Texts that show whether two tokenizers are one: made to find differences, random mixes, and every word once."""

import random
import unicodedata
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain

from splitproxy.model import Tokens

_SCRIPTED = {
    "plain text": (
        "a",
        "",
        " ",
        "  ",
        "\n",
        " a",
        "a ",
        "The quick brown fox jumps over the lazy dog.",
        "HELLO World camelCase XMLHttp",
    ),
    "white space of all kinds, in runs, before and after words, digits and signs": (
        " a  b   c    d\te\t\tf\n\ng\r\nh\r\r\ni \n j  \n\n  k\t \nl \r m",
        "   \n   \n\n x",
        "a\xa0b\u3000c\u2003\u2003d\u2028e\u2029\x85f\x0b\x0c",
        "x   1   .   \u4f60   \n   (",
        "tab\t1\t\t2 \t .\t",
        " " * 40 + "x" + "\n" * 20 + "y" + "\t" * 9 + "z  ",
    ),
    "digits in runs, of all kinds": (
        "0 1 12 123 1234 12345 123456 1234567 12345678901234567890 3.14159 1,000,000 0x1F 1e-9 v2.0",
        "a1b22c333d4444 5x55",
        (
            "\u0661\u0662\u0663\u0664\u0665 \uff11\uff12\uff13\uff14 \u2160\u2167 \xb2\xb3\xbd \U0001d7ce"
            "\U0001d7cf\U0001d7d0\U0001d7d1"
        ),
    ),
    "contractions": (
        (
            "I'm you're he's we've they'll I'd don't I'M YOU'RE HE'S WE'VE THEY'LL I'D DON'T 'twas x's 's ' s '"
            "sx 'll'll \u017f'\u017f'\u017f it\u2019s"
        ),
        "'S'T'RE'VE'M'LL'D 'Re 'vE 'lL 're've'm rock'n'roll ''s '1 'a",
    ),
    "signs": (
        (
            '!@#$%^&*()_+-=[]{}|;:,./<>?~`"\\ a.b,c;d (e) [f] {g} <h> \'i\' "j" //k ##l **m** --n ==o ...p !!q'
            " ??r $1 %2 &3"
        ),
        "// comment\n/* x */ <!-- y --> #include <z>\n\tif (a != b) { return c[0]; }\n",
        "a/\nb//\n\nc\n/d ,\n;\r\n)\n\n",
        (
            "\u2026\u2014\u2013\u201cq\u201d \xabr\xbb \u3002\uff0c\u3001\uff01 \u30fb\u309b\u30a0 \u20ac\xa3"
            "\xa5 \xb1\xd7\u2211\u221e \u2192\u21d2 \u2603"
        ),
    ),
    "scripts": (
        "\xc9cole na\xefve stra\xdfe \u0130stanbul \u01c5 \u02b0 \xaa",
        "\u041f\u0440\u0438\u0432\u0435\u0442, \u043c\u0438\u0440! \u0393\u03b5\u03b9\u03ac \u03c3\u03bf\u03c5",
        (
            "\u4f60\u597d\uff0c\u4e16\u754c\u3002\u6d4b\u8bd5123\u4e2d\u6587abc \u3053\u3093\u306b\u3061\u306f"
            "\u30ab\u30bf\u30ab\u30ca\u30fc \u304c\u3099 \uc548\ub155\ud558\uc138\uc694 \u1112\u1161\u11ab"
        ),
        (
            "\u0645\u0631\u062d\u0628\u0627 \u0628\u0650\u0633\u0652\u0645\u0650 \u05e9\u05c1\u05b8\u05dc\u05d5"
            "\u05b9\u05dd \u0928\u092e\u0938\u094d\u0924\u0947 \u0c28\u0c2e\u0c38\u0c4d\u0c15\u0c3e\u0c30\u0c02"
            " \u0e2a\u0e27\u0e31\u0e2a\u0e14\u0e35"
        ),
        (
            "\u12a0\u121b\u122d\u129b \u10d2\u10d0\u10db\u10d0\u10e0\u10ef\u10dd\u10d1\u10d0 \u0562\u0561\u0580"
            "\u0587 \u0f56\u0f7c\u0f51 \u13e3\u13b3\u13a9 \U0001d400\U0001d401 \U00020000\U0002a700"
        ),
    ),
    "emoji with joiners, flags, tones; marks on their own and stacked; both forms of a letter": (
        (
            "\U0001f469\u200d\U0001f4bb\U0001f3f3\ufe0f\u200d\U0001f308\U0001f1e9\U0001f1ea\U0001f44d\U0001f3fd"
            " \U0001f600\U0001f600 a\U0001f600b \u2764\ufe0f"
        ),
        (
            "e\u0301 \xe9 a\u0300\u0301\u0302b \u0301x \u0301\u0301 1\u0301 .\u0301 \u200b\u200d\u2060x \ufeffy"
            " \u202ez\u202c \xadw"
        ),
    ),
    "control characters, what stands for invalid sequences, no characters at all, private ones": (
        "\x00\x01\x02\x03\x04\x05\x06\x07\x08\x0e\x13\x14\x16\x1b[31m\x1d\x1f\x7f\x80\x9f",
        "a\x00b \x00 \x07c",
        "\ufffd\ufffdx \ufffd",
        "\ufffe\uffff\U0010ffff \ue000\uf8ff\U000f0000 \u0378",
    ),
    "very long words; engines walk through some patterns recursively, so not longer than this": (
        "a" * 400,
        "ab" * 150 + "AB" * 100,
        "=" * 300,
        "-" * 77 + "x",
        "一" * 150,
        "1" * 200,
        "́" * 60,
        "aA" * 60 + "1a" * 60,
        "Donaudampfschifffahrtsgesellschaftskapitän" * 4,
        "https://example.org/a_b-c/d.e?f=g&h=%20i#j",
        "😀" * 50,
        '{"name": "x", "arguments": {"a": [1, 2.5, null, true], "b": "\\n\\"q\\""}}',
        "def f(x):\n    return [y ** 2 for y in x]\n\n\nclass A:\n\tpass\n",
    ),
}
_COMMON = (" ", "  ", "\n", "\n\n", "\t", ".", ",", "'", "-", "1", "22", "333", "a", "The")
_MIXES, _MIX_PARTS = 24, 120
_WORDS_PER_TEXT = 4000


def scripted(special: Sequence[str]) -> Iterator[str]:
    """Texts made to find differences; special tokens stand inside and at both ends."""
    yield from chain.from_iterable(_SCRIPTED.values())
    for mark in special[:8]:
        yield from (
            mark,
            mark * 3,
            f"{mark}a",
            f"a{mark}",
            f" {mark} ",
            f"\n{mark}\n{mark}x {mark} 1{mark}'s",
            mark[:-1],
            mark[1:],
        )
    for start in range(0, len(special), 200):
        yield "a".join(special[start : start + 200])


def mixes(words: Sequence[bytes], special: Sequence[str], seed: int) -> Iterator[str]:
    """Random mixes of vocabulary words, characters of all assigned kinds, blanks and special tokens."""
    chance = random.Random(seed)  # noqa: S311 - no secret
    for _ in range(_MIXES):
        yield "".join(_part(chance, words, special) for _ in range(_MIX_PARTS))


def _part(chance: random.Random, words: Sequence[bytes], special: Sequence[str]) -> str:
    kind = chance.random()
    if kind < 0.5 and words:
        return chance.choice(words).decode(errors="replace")
    if kind < 0.55 and special:
        return chance.choice(special)
    if kind < 0.75:
        return chance.choice(
            (" ", "  ", "\n", "\n\n", "\t", ".", ",", "'", "-", "1", "22", "333", "a", "The")
        ) * chance.randint(1, 3)
    return _character(chance) * chance.choice((1, 1, 1, 2, 5))


def _character(chance: random.Random) -> str:
    """Any character that the Unicode version of this Python knows, those of the first plane more often."""
    while True:
        code = chance.randrange(0x10000 if chance.random() < 0.8 else 0x30000)
        if not 0xD800 <= code < 0xE000 and unicodedata.category(chr(code)) != "Cn":
            return chr(code)


def every_word(words: Mapping[bytes, int]) -> Iterator[str]:
    """Texts that hold each word that is text at all, on lines of their own."""
    lines = []
    for word in words:
        try:
            lines.append(word.decode())
        except UnicodeDecodeError:
            continue
        if len(lines) == _WORDS_PER_TEXT:
            yield "\n".join(lines)
            lines = []
    if lines:
        yield "\n".join(lines)


def difference(text: str, ours: Tokens, theirs: Tokens) -> str:
    """Where two readings of a text of our own part, for people."""
    shared = ours.common_prefix(theirs)
    here, there = ours.to_list()[shared : shared + 4], theirs.to_list()[shared : shared + 4]
    excerpt = ascii(text if len(text) <= 60 else text[:60] + "...")
    return f"in {excerpt}, from token {shared} on, the engine has {there} and this file {here}"
