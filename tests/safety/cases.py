"""What a parser once failed on: (parser, file, content or change of the valid content)."""

import io
import tarfile
from collections.abc import Callable
from random import Random
from typing import Any

import torch
from damage import of_another_version, rezipped


def put(old: bytes, new: bytes) -> Callable[[bytes], bytes]:
    """Return a function that replaces some bytes of a valid file."""

    def change(valid: bytes) -> bytes:
        assert old in valid, valid
        return valid.replace(old, new)

    return change


def saved(value: Any) -> bytes:
    file = io.BytesIO()
    torch.save(value, file)
    return file.getvalue()


def cut_pickle(valid: bytes) -> bytes:
    return rezipped("data.pkl", lambda content, rng: content[:20])(valid, Random(2))


DIGITS = b"9" * 400
DEEP = b"[" * 3000
LONG = b'"' + b"a" * 200_000
REPEATED = b"a: &a [1, 1, 1, 1, 1, 1, 1, 1]\n" + b"".join(
    b"%c: &%c [%s]\n" % (letter, letter, b", ".join([b"*%c" % (letter - 1)] * 8))
    for letter in b"bcdefghij"
)
CASES: list[tuple[str, str, bytes | Callable[[bytes], bytes]]] = [
    ("manifest", "utt2dur", put(b"u0 0.04", b"u0 inf")),
    ("manifest", "utt2dur", put(b"u0 0.040000", b"u0 1e300")),
    ("manifest", "segments", put(b"rec0", b"rec9")),
    ("check", "trials", put(b"u1", b"\xff")),
    ("rejected", "rejected.tsv", b"~0c6a714b\tx\ty\n~0c6a7\0\t\xff\ty\n"),
    ("index", "index.*", lambda valid: of_another_version(valid, Random(2))),
    ("trials", "kaldi", b"\xff b target\n"),
    ("trials", "table.csv", lambda valid: valid + LONG),
    ("trials", "table.csv", lambda valid: valid + b"a b,c,1\n"),
    ("pairs", "pairs", b"a \xff\n"),
    ("official", "kaldi", b"a \xff target\n"),
    ("trial list", "utt2dur", put(b"u0 ", b"u0 x")),
    ("scores", "ours", put(b"a", b"\xff")),
    ("rttm", "ref.rttm", put(b" 1.500", b" 1e308")),
    ("uem", "*.uem", b"\xef\xbb\xbf\xef\xbb\xbf 1 0.000 2.000\n"),
    ("layers", "json.yaml", b"a: &a [*a]\n"),
    ("layers", "json.yaml", REPEATED),
    ("layers", "json.yaml", b"a: !!timestamp x\n"),
    ("layers", "json.yaml", b"a: !!bool x\n"),
    ("layers", "json.yaml", b"a: " + b"9" * 5000),
    ("layers", "json.yaml", DEEP),
    ("layers", "json.yaml", b"[" * 200 + b"]" * 200),
    ("set", "b", b"seed=" + b"[" * 200 + b"]" * 200),
    ("layers", "json.yaml", b"!!binary aGk=: 1\n"),
    ("layers", "json.yaml", b'"\\ud800": 1\n'),
    ("layers", "json.yaml", b"seed: 1\n"),
    ("layers", "json.yaml", b"{task: ssl, model: {name: xvector}}\n"),
    ("set", "b", b"a\xff.b=1"),
    ("set", "b", b'seed="\\ud800"'),
    ("card", "card.json", b"[]"),
    ("card", "card.json", b'{"sha256": "\xff"}'),
    ("card", "card.json", put(b'"parameters": ', b'"parameters": null, "x": ')),
    ("card", "card.json", put(b"train_sha256", b"x")),
    ("card", "results.json", b'["system"]'),
    ("results", "results.json", b'[{"system": []}]'),
    ("results", "results.json", put(b"min_dcf", b"x")),
    ("results", "results.json", DEEP),
    ("results", "results.json", put(b"0.0567", DIGITS)),
    ("curves", "metrics.jsonl", lambda valid: valid + b'3\n{"kind": "train"}\n\xff\n'),
    ("curves", "reference.json", b"[1]"),
    ("calibration", "calibration.json", b"\xff"),
    ("calibration", "calibration.json", put(b"10.0", DIGITS)),
    ("tuning", "diarization.json", put(b"0.25", DIGITS)),
    ("weights", "head.safetensors", put(b'"F32"', b'"F99"')),
    ("weights", "head.safetensors", put(b"[3,16]", b"[6,8]")),
    ("model", "speakers.txt", b"a\n"),
    ("model", "config.yaml", put(b"embed_dim: 16", b"embed_dim: -1")),
    ("model", "config.yaml", put(b"embed_dim: 16", b"embed_dim: 999999999")),
    ("model", "config.yaml", put(b"sample_rate: 16000", b"sample_rate: " + DIGITS)),
    ("model", "config.yaml", put(b"pooling: tstp", b"pooling: tst")),
    ("note", "note.json", put(b'"sha256": {', b'"sha256": 3, "x": {')),
    ("state", "state.pt", cut_pickle),
    ("foreign tensors", "avg_model.pt", saved({1: torch.zeros(1)})),
    ("foreign tensors", "avg_model.pt", saved({"w": torch.zeros(1).expand(10**10)})),
    ("import", "config.yaml", put(b"32.0", b"[[]]")),
    ("foreign config", "config.yaml", put(b"32.0", b"null")),
    ("foreign config", "config.yaml", put(b"32.0", DIGITS)),
    ("foreign config", "config.yaml", put(b"16000", b"1" + b"0" * 12)),
    ("foreign config", "config.yaml", put(b"utt2spk", b"a" * 300)),
    ("foreign speakers", "train.csv", lambda valid: valid + LONG),
    ("foreign speakers", "utt2spk", b"a \xff\n"),
    ("tar", "a.tar", bytes(1024)),
    ("tar", "a.tar", put(b"m/config.yaml", b"m/config.yamx")),
    ("tar", "a.tar", tarfile.TarInfo().tobuf() + bytes(1024)),
    ("zip", "a.zip", b"PK\5\6" + bytes(18)),
    ("zip", "a.tar.gz", b"\x1f\x8b"),
    ("onnx", "a.onnx", put(b'"frame_ms"', b'"framexms"')),
    ("onnx", "a.onnx", put(b"16000", b'"600"')),
    ("onnx", "a.onnx", put(b"xvector", b"xvecto\xff")),
    ("embeddings", "emb.npy", put(b"(3, 4)", b"(3, (4")),
    ("embeddings", "emb.ids", b"a\nb\nb\n"),
    ("embeddings", "emb.ids", b"a\n\nb\n"),
    ("embeddings", "emb.ids", b"a\n\xff\nb\n"),
    ("embeddings", "emb.json", b"1.5"),
    ("speakers", "speakers.*", lambda valid: valid[:-4] + b"\xff\xff\xff\xff"),
    (
        "speakers",
        "speakers.*",
        lambda valid: valid[:-4] + b"\1\0\x80\x7f",
    ),  # signalling NaN
    (
        "speakers",
        "speakers.*",
        put(b'"[\\"anna\\", \\"b o\\"]"', b'"3                    "'),
    ),
]
