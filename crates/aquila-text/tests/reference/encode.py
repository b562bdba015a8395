"""Writes small tokenizers and tests/fixtures/encodings.json: what the `tokenizers` package of PyPI
makes of them and of the shipped tokenizer.

    pip install tokenizers && python crates/aquila-text/tests/reference/encode.py
"""

import json
import pathlib
import random

import tokenizers
from tokenizers import Tokenizer

FIXTURES = pathlib.Path(__file__).parent.parent / "fixtures"

TEXTS = [
    "", " ", "  ", "\n", "\n\n\n", "a", "Hello, world!", "the  tests   are\tgood ",
    " leading and trailing ", "fn main() { println!(\"{}\", 1_000 + 0xff); }\n",
    "    indented\n        more\r\n", "It's they'll we've I'M", "12345 3.14 1e-5 ½ ٣",
    "Grüße aus Zürich – “quoted” naïve façade", "你好,世界。日本語のテキスト、한국어", "Привет мир שלום مرحبا",
    "🌍🎉👩‍👩‍👧‍👦 🇨🇭 👍🏽", "e\u0301 a\u0308o\u0302 combining\u0323\u0307", "\u200b\u00a0\u3000 odd spaces \ufeff",
    "\u0000\u0001\u007f control", "\ufffd replacement", "𝔘𝔫𝔦𝔠𝔬𝔡𝔢 𐍈",
    "<|im_start|>user\nhi<|im_end|>\n<|endoftext|>", "<|im_start", "<s>the</s> <unk> [CLS] ##s",
    "<0x41><0xE4>", "▁▁ underline_", "a" * 200, "the test " * 40, "x y z. Is it? No! don't, he's",
]


def added(id, content, special=True, **more):
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    return {"id": id, "content": content, **flags, "special": special, **more}


def whole(model, decoder, added_tokens, **more):
    parts = {"truncation": None, "padding": None, "normalizer": None, "pre_tokenizer": None,
             "post_processor": None}
    return {"version": "1.0", **parts, "added_tokens": added_tokens, "decoder": decoder,
            "model": model, **more}


def bpe(tokens, merges, **more):
    flags = {"dropout": None, "unk_token": None, "continuing_subword_prefix": None,
             "end_of_word_suffix": None, "fuse_unk": False, "byte_fallback": False}
    vocab = {}
    for token in tokens:
        vocab.setdefault(token, len(vocab))
    return {"type": "BPE", **flags, "vocab": vocab, "merges": merges, **more}


LETTERS = [chr(c) for c in range(ord("a"), ord("z") + 1)] + list(".,!?'")
MERGES = ["t h", "th e", "▁ the", "t e", "s t", "te st", "▁ test", "i s", "▁ a", "▁ ▁"]


def byte_fallback():
    """SentencePiece's BPE as Llama 2 and its kin carry it."""
    tokens = ["<unk>", "<s>", "</s>"] + [f"<0x{b:02X}>" for b in range(256)]
    tokens += ["▁"] + LETTERS + [m.replace(" ", "") for m in MERGES] + ["é", "你"]
    return whole(
        bpe(tokens, MERGES, unk_token="<unk>", fuse_unk=True, byte_fallback=True),
        {"type": "Sequence", "decoders": [
            {"type": "Replace", "pattern": {"String": "▁"}, "content": " "},
            {"type": "ByteFallback"}, {"type": "Fuse"},
            {"type": "Strip", "content": " ", "start": 1, "stop": 0}]},
        [added(0, "<unk>"), added(1, "<s>"), added(2, "</s>")],
        normalizer={"type": "Sequence", "normalizers": [
            {"type": "Prepend", "prepend": "▁"},
            {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}]},
        post_processor={
            "type": "TemplateProcessing",
            "single": [{"SpecialToken": {"id": "<s>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
            "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
            "special_tokens": {"<s>": {"id": "<s>", "ids": [1], "tokens": ["<s>"]}}},
    )


def metaspace():
    pieces = ["<unk>", "▁", "▁the", "▁test", "▁a", "the", "s", "is", "▁is"] + LETTERS + ["é", "你好"]
    scores = [[piece, -0.5 * i] for i, piece in enumerate(dict.fromkeys(pieces))]
    meta = {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "always", "split": True}
    return whole(
        {"type": "Unigram", "unk_id": 0, "vocab": scores, "byte_fallback": False}, meta,
        [added(0, "<unk>"), added(len(scores), "<extra>", special=False)], pre_tokenizer=meta)


def wordpiece():
    tokens = ["[UNK]", "[CLS]", "[SEP]", "the", "test", "hello", "world", "don", "do", "not"]
    tokens += LETTERS + ["##" + c for c in LETTERS] + ["##s", "##ing", "##est", "é"]
    vocab = {token: i for i, token in enumerate(dict.fromkeys(tokens))}
    return whole(
        {"type": "WordPiece", "unk_token": "[UNK]", "continuing_subword_prefix": "##",
         "max_input_chars_per_word": 100, "vocab": vocab},
        {"type": "WordPiece", "prefix": "##", "cleanup": True},
        [added(0, "[UNK]"), added(1, "[CLS]"), added(2, "[SEP]")],
        normalizer={"type": "Lowercase"}, pre_tokenizer={"type": "BertPreTokenizer"},
        post_processor={"type": "BertProcessing", "sep": ["[SEP]", 2], "cls": ["[CLS]", 1]})


def word_ends():
    ends = [c + "</w>" for c in LETTERS]
    merges = ["t h", "th e</w>", "t e", "s t</w>", "te st</w>"]
    tokens = ["<unk>"] + LETTERS + ends + [m.replace(" ", "") for m in merges]
    return whole(bpe(tokens, merges, unk_token="<unk>", end_of_word_suffix="</w>"),
                 {"type": "BPEDecoder", "suffix": "</w>"}, [added(0, "<unk>")],
                 pre_tokenizer={"type": "Whitespace"})


def words():
    vocab = {word: i for i, word in enumerate(["<unk>", "the", "test", "a", "is", "!"])}
    return whole({"type": "WordLevel", "vocab": vocab, "unk_token": "<unk>"}, None,
                 [added(0, "<unk>"), added(6, "<more>")], pre_tokenizer={"type": "Whitespace"})


def stripped():
    """Cuts at both ends, which no checkpoint that we know of does, but the format allows."""
    tokens = ["_"] + LETTERS
    return whole(bpe(tokens, []), {"type": "Sequence", "decoders": [
        {"type": "Fuse"}, {"type": "Strip", "content": "_", "start": 2, "stop": 3}]}, [])


def entangled():
    """A replacement over the fused text: no token can be decoded by itself."""
    return whole(bpe(LETTERS, []), {"type": "Sequence", "decoders": [
        {"type": "Fuse"}, {"type": "Replace", "pattern": {"String": "ab"}, "content": "-"}]},
        [added(31, "<x>")])


def valid_runs(tokens):
    """Whether every run of byte tokens is UTF-8; where one is not, we keep more than the package."""
    run = b""
    for token in tokens + [""]:
        if len(token) == 6 and token.startswith("<0x"):
            run += bytes([int(token[3:5], 16)])
            continue
        try:
            run.decode()
        except UnicodeDecodeError:
            return False
        run = b""
    return True


def main():
    made = [byte_fallback, metaspace, wordpiece, word_ends, words, stripped, entangled]
    for make in made:
        folder = FIXTURES / make.__name__
        folder.mkdir(exist_ok=True)
        (folder / "tokenizer.json").write_text(json.dumps(make(), ensure_ascii=False) + "\n")

    chance = random.Random(7)
    out = {}
    for name in ["tiny"] + [make.__name__ for make in made]:
        tokenizer = Tokenizer.from_file(str(FIXTURES / name / "tokenizer.json"))
        texts = []
        for text in TEXTS:
            if name == "stripped":
                break
            ids = tokenizer.encode(text, add_special_tokens=False).ids
            texts.append({
                "text": text, "ids": ids,
                "ids_with_special": tokenizer.encode(text, add_special_tokens=True).ids,
                "decoded": tokenizer.decode(ids, skip_special_tokens=False),
                "decoded_without_special": tokenizer.decode(ids, skip_special_tokens=True),
            })
        size = max(tokenizer.get_vocab().values()) + 1
        random_ids = []
        while len(random_ids) < 40:
            ids = [chance.randrange(size + 3) for _ in range(chance.randrange(1, 40))]
            tokens = [tokenizer.id_to_token(i) for i in ids]
            if name == "byte_fallback" and not valid_runs([t for t in tokens if t is not None]):
                ids = [i for i in ids if i < 3 or i >= 259]
            if not any(tokenizer.id_to_token(i) for i in ids):
                continue
            random_ids.append({
                "ids": ids, "decoded": tokenizer.decode(ids, skip_special_tokens=False),
                "decoded_without_special": tokenizer.decode(ids, skip_special_tokens=True),
            })
        out[name] = {"texts": texts, "random": random_ids, "vocab_size": size}
    (FIXTURES / "encodings.json").write_text(json.dumps(out, ensure_ascii=False) + "\n")
    print({name: len(v["texts"]) + len(v["random"]) for name, v in out.items()}, tokenizers.__version__)


main()
