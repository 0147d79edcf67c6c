"""Tiny language models with random weights, one for each kind of memory that a handover meets. This module owns their
recipe: vocabulary, chat template, tensors and the cache on disk. It never loads a model; the live tests do that."""

import argparse
import hashlib
import itertools
import os
import random
import re
import tempfile
from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from gguf.quants import quantize
from numpy.typing import NDArray

ARCHITECTURES = {"dense": "llama", "sliding": "gemma3", "hybrid": "lfm2"}

# Sizes for those who need an engine to be slow: reading speed on one core in tokens/s is about 1400, 800, 350 and 140.
SMALL: dict[str, int | str] = {
    "dim": 256, "layers": 8, "heads": 8, "kv": 4, "ff": 768, "dtype": "q8_0",
}  # fmt: skip
LIGHT: dict[str, int | str] = {"dim": 512, "layers": 8, "heads": 8, "kv": 4, "ff": 1408, "dtype": "q8_0"}
MID: dict[str, int | str] = {"dim": 768, "layers": 12, "heads": 12, "kv": 4, "ff": 2048, "dtype": "q8_0"}
BIG: dict[str, int | str] = {"dim": 1024, "layers": 20, "heads": 16, "kv": 4, "ff": 2816, "dtype": "q8_0"}
# A session file of 16 kB a token, for tests of the transfer.
KV_HEAVY: dict[str, int | str] = {"dim": 256, "layers": 16, "heads": 4, "kv": 4, "ff": 256}

CONTROL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
MARKS = ("<think>", "</think>", "<tool_call>", "</tool_call>")
VOCABULARY = 512

COMMON_WORDS = re.findall(
    r"\w+",
    "the of and to in a is that for it as was with be by on not he his but at are this have from or had an they which "
    "one you were her all she there would their we him been has when who will more no if out so said what up its about "
    "into than them can only other new some could time these two may then do first any my now such like our over man "
    "me even most made after also did many before must through back years where much your way well down should because "
    "each just those people how too little state good very make world still own see men work long get here between "
    "both life being under never day same another know while last might us great old year off come since against go "
    "came right used take three place small number water write read answer question remember garden "
    "morning river letter station window engine carries travel weather summer winter together important different "
    "following information",
)

TEMPLATE = r"""
{%- set lead = '' %}
{%- if messages[0].role == 'system' %}{% set lead = messages[0].content %}{% endif %}
{%- if tools %}
{{- '<|im_start|>system\n' + lead + '\n\nYou can call these functions:\n' }}
{%- for tool in tools %}{{ tool | tojson }}{{ '\n' }}{% endfor %}
{{- 'Write a call as <tool_call>\n{"name": <name>, "arguments": <object>}\n</tool_call>\n<|im_end|>\n' }}
{%- elif lead %}
{{- '<|im_start|>system\n' + lead + '<|im_end|>\n' }}
{%- endif %}
{%- for message in messages %}
{%- if message.role == 'assistant' %}
{{- '<|im_start|>assistant\n' + (message.content or '') }}
{%- for call in message.tool_calls or [] %}
{{- '<tool_call>\n{"name": "' + call.function.name + '", "arguments": ' }}{{ call.function.arguments | tojson }}
{{- '}\n</tool_call>\n' }}
{%- endfor %}
{{- '<|im_end|>\n' }}
{%- elif message.role == 'tool' %}
{{- '<|im_start|>user\n<tool_response>' + message.content + '</tool_response><|im_end|>\n' }}
{%- elif message.role != 'system' or not loop.first %}
{{- '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
{{- '<|im_start|>assistant\n' }}
{%- if enable_thinking is defined and enable_thinking is false %}{{ '<think>\n\n</think>\n\n' }}{% endif %}
{%- endif %}""".lstrip()


@dataclass(frozen=True, slots=True)
class Recipe:
    """Everything that decides a model's bytes. `layers` 0 stands for the fewest that show the kind's memory."""

    kind: str = "dense"
    dim: int = 64
    layers: int = 0
    heads: int = 4
    kv: int = 2
    ff: int = 128
    context: int = 32768
    window: int = 64  # sliding only
    dtype: str = "f16"  # f16, f32 or q8_0
    seed: int = 1

    @property
    def architecture(self) -> str:
        return ARCHITECTURES[self.kind]

    @property
    def head_dim(self) -> int:
        return self.dim // self.heads

    def is_convolution(self, layer: int) -> bool:
        """Every other layer of a hybrid model keeps a state instead of keys and values."""
        return self.kind == "hybrid" and layer % 2 == 0


def recipe(kind: str, **sizes: int | str) -> Recipe:
    """A recipe with each size given as the type of its default; unknown names and kinds raise."""
    plain = Recipe(kind)
    given: dict[str, Any] = {name: type(getattr(plain, name))(value) for name, value in sizes.items()}
    made = replace(plain, **given)
    # A sliding model's sixth layer is its first with the whole context; a hybrid needs two layers of each sort.
    fewest = {"dense": 2, "sliding": 6, "hybrid": 4}[kind]
    return replace(made, layers=made.layers or fewest)


def tiny_model(kind: str, **sizes: int | str) -> Path:
    """The path of a model of this kind ("dense", "sliding", "hybrid"), made now or by an earlier run."""
    wanted = recipe(kind, **sizes)
    digest = hashlib.sha256(Path(__file__).read_bytes() + repr(wanted).encode()).hexdigest()[:16]
    folder = Path(tempfile.gettempdir()) / f"splitproxy-models-{os.getuid()}"
    path = folder / f"{kind}-{digest}.gguf"
    if not path.exists():
        folder.mkdir(mode=0o700, exist_ok=True)
        write_model(wanted, path)
    return path


def write_model(wanted: Recipe, path: Path) -> None:
    """Write a model file. Another process that writes the same one at the same time does no harm."""
    handle, name = tempfile.mkstemp(dir=path.parent, suffix=".part")
    os.close(handle)
    try:
        _write(wanted, name)
        os.replace(name, path)
    finally:
        Path(name).unlink(missing_ok=True)


def byte_symbols() -> list[str]:
    """The printable character that stands for each byte in a GPT-2 vocabulary."""
    printable = {*range(33, 127), *range(161, 173), *range(174, 256)}
    spare = iter(range(256, 512))
    return [chr(byte) if byte in printable else chr(next(spare)) for byte in range(256)]


def learn_merges(count: int) -> list[tuple[str, str]]:
    """The most frequent pairs of a made-up English text, most frequent first, as byte-pair encoding learns them."""
    symbols = byte_symbols()
    words = _word_counts()
    pieces = {word: [symbols[byte] for byte in word.encode()] for word in words}
    merges: list[tuple[str, str]] = []
    while len(merges) < count:
        pairs: Counter[tuple[str, str]] = Counter()
        for word, times in words.items():
            parts = pieces[word]
            for pair in itertools.pairwise(parts):
                pairs[pair] += times
        best = min(pairs, key=lambda pair: (-pairs[pair], pair))
        merges.append(best)
        for parts in pieces.values():
            _join(parts, best)
    return merges


def _word_counts() -> Counter[str]:
    rng = random.Random(7)
    weights = [1 / (rank + 3) for rank in range(len(COMMON_WORDS))]
    text = " ".join(rng.choices(COMMON_WORDS, weights, k=6000))
    return Counter(re.findall(r" ?[a-z]+", f" {text}"))


def _join(parts: list[str], pair: tuple[str, str]) -> None:
    place = 0
    while place < len(parts) - 1:
        if (parts[place], parts[place + 1]) == pair:
            parts[place : place + 2] = ["".join(pair)]
        place += 1


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """Tokens in the order of their ids, with their types and the merges behind them."""

    tokens: list[str]
    types: list[int]
    merges: list[str]

    def speakable(self, token_id: int) -> bool:
        """Whether an answer may hold this token: plain ASCII text, nothing that ends or structures it."""
        if self.types[token_id] != gguf.TokenType.NORMAL:
            return False
        return token_id >= 256 or 32 <= token_id < 127 or token_id == 10


def vocabulary() -> Vocabulary:
    specials = [*CONTROL, *MARKS]
    merges = learn_merges(VOCABULARY - 256 - len(specials))
    tokens = [*byte_symbols(), *("".join(pair) for pair in merges), *specials]
    types = [gguf.TokenType.NORMAL] * (len(tokens) - len(specials))
    types += [gguf.TokenType.CONTROL] * len(CONTROL) + [gguf.TokenType.USER_DEFINED] * len(MARKS)
    return Vocabulary(tokens, [int(t) for t in types], [" ".join(pair) for pair in merges])


class _Tensors:
    """Random weights from one seeded stream, added to a file in order."""

    def __init__(self, writer: Any, wanted: Recipe) -> None:
        self._writer = writer
        self._dtype = wanted.dtype
        self._rng = np.random.default_rng(wanted.seed)

    def normal(self, rows: int, columns: int, deviation: float) -> NDArray[np.float32]:
        return self._rng.standard_normal((rows, columns), dtype=np.float32) * np.float32(deviation)

    def matrix(self, name: str, rows: int, columns: int, deviation: float | None = None) -> None:
        scale = columns**-0.5 if deviation is None else deviation
        self.add(name, self.normal(rows, columns, scale))

    def add(self, name: str, values: NDArray[np.float32]) -> None:
        if self._dtype == "q8_0":
            kind = gguf.GGMLQuantizationType.Q8_0
            self._writer.add_tensor(name, quantize(values, kind), raw_dtype=kind)
        else:
            self._writer.add_tensor(name, values.astype({"f16": np.float16, "f32": np.float32}[self._dtype]))

    def ones(self, name: str, length: int) -> None:
        self._writer.add_tensor(name, np.ones(length, dtype=np.float32))

    def exact(self, name: str, values: NDArray[np.float32]) -> None:
        self._writer.add_tensor(name, values)


def _write(wanted: Recipe, path: str) -> None:
    words = vocabulary()
    writer = gguf.GGUFWriter(path, wanted.architecture)
    _describe(writer, wanted)
    _add_tokenizer(writer, words)
    tensors = _Tensors(writer, wanted)
    _add_ends(tensors, wanted, words)
    for layer in range(wanted.layers):
        _add_layer(tensors, wanted, layer)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _describe(writer: Any, wanted: Recipe) -> None:
    writer.add_name(f"random-{wanted.kind}-{wanted.dim}x{wanted.layers}")
    writer.add_file_type({"f32": 0, "f16": 1, "q8_0": 7}[wanted.dtype])
    writer.add_context_length(wanted.context)
    writer.add_embedding_length(wanted.dim)
    writer.add_block_count(wanted.layers)
    writer.add_feed_forward_length(wanted.ff)
    writer.add_head_count(wanted.heads)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10000.0)
    writer.add_vocab_size(VOCABULARY)
    if wanted.kind == "hybrid":
        writer.add_head_count_kv([0 if wanted.is_convolution(n) else wanted.kv for n in range(wanted.layers)])
        writer.add_shortconv_l_cache(3)
        return
    writer.add_head_count_kv(wanted.kv)
    if wanted.kind == "dense":
        writer.add_rope_dimension_count(wanted.head_dim)
    else:
        writer.add_key_length(wanted.head_dim)
        writer.add_value_length(wanted.head_dim)
        writer.add_sliding_window(wanted.window)


def _add_tokenizer(writer: Any, words: Vocabulary) -> None:
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen2")
    writer.add_token_list(words.tokens)
    writer.add_token_types(words.types)
    writer.add_token_merges(words.merges)
    writer.add_eos_token_id(words.tokens.index("<|im_end|>"))
    writer.add_bos_token_id(words.tokens.index("<|endoftext|>"))
    writer.add_pad_token_id(words.tokens.index("<|endoftext|>"))
    writer.add_add_bos_token(False)
    writer.add_chat_template(TEMPLATE)


def _add_ends(tensors: _Tensors, wanted: Recipe, words: Vocabulary) -> None:
    """The embedding and the output."""
    tensors.matrix("token_embd.weight", VOCABULARY, wanted.dim, 1.0)
    tensors.ones("token_embd_norm.weight" if wanted.kind == "hybrid" else "output_norm.weight", wanted.dim)
    output = tensors.normal(VOCABULARY, wanted.dim, 3 * wanted.dim**-0.5)
    # A logit of exactly 0 is never among the best of hundreds around it: text stays ASCII and never ends early.
    output[[n for n in range(VOCABULARY) if not words.speakable(n)]] = 0
    tensors.add("output.weight", output)


def _add_layer(tensors: _Tensors, wanted: Recipe, layer: int) -> None:
    block = f"blk.{layer}."
    tensors.ones(block + "attn_norm.weight", wanted.dim)
    if wanted.is_convolution(layer):
        tensors.exact(block + "shortconv.conv.weight", tensors.normal(wanted.dim, 3, 1.0))
        tensors.matrix(block + "shortconv.in_proj.weight", 3 * wanted.dim, wanted.dim)
        tensors.matrix(block + "shortconv.out_proj.weight", wanted.dim, wanted.dim)
    else:
        _add_attention(tensors, wanted, block)
    tensors.ones(block + "ffn_norm.weight", wanted.dim)
    tensors.matrix(block + "ffn_gate.weight", wanted.ff, wanted.dim)
    tensors.matrix(block + "ffn_up.weight", wanted.ff, wanted.dim)
    tensors.matrix(block + "ffn_down.weight", wanted.dim, wanted.ff)
    if wanted.kind == "sliding":
        tensors.ones(block + "post_attention_norm.weight", wanted.dim)
        tensors.ones(block + "post_ffw_norm.weight", wanted.dim)


def _add_attention(tensors: _Tensors, wanted: Recipe, block: str) -> None:
    shared = wanted.kv * wanted.head_dim
    # Keys and queries are larger than usual, so that what was read long ago changes what is written now.
    loud = 2 * wanted.dim**-0.5
    tensors.matrix(block + "attn_q.weight", wanted.dim, wanted.dim, loud)
    tensors.matrix(block + "attn_k.weight", shared, wanted.dim, loud)
    tensors.matrix(block + "attn_v.weight", shared, wanted.dim)
    tensors.matrix(block + "attn_output.weight", wanted.dim, wanted.dim)
    if wanted.kind != "dense":
        tensors.ones(block + "attn_q_norm.weight", wanted.head_dim)
        tensors.ones(block + "attn_k_norm.weight", wanted.head_dim)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.models", description="Write a random model.")
    parser.add_argument("kind", choices=ARCHITECTURES)
    parser.add_argument("out", type=Path)
    parser.add_argument("sizes", nargs="*", metavar="NAME=VALUE", help="dim, layers, heads, kv, ff, dtype, window, ...")
    given = parser.parse_args()
    wanted = recipe(given.kind, **dict(size.split("=", 1) for size in given.sizes))
    write_model(wanted, given.out)
    print(f"{given.out}: {given.out.stat().st_size} bytes, {wanted}")


if __name__ == "__main__":
    main()
