"""YAML is data: values as YAML 1.1 has them, tags inert, bombs counted."""

from __future__ import annotations

import pytest

from anyckpt.core.inert import Opaque
from anyckpt.errors import CheckpointError

yaml = pytest.importorskip("yaml")

from anyckpt.io.yaml import MAX_DEPTH, parse  # noqa: E402


def read(text: str) -> object:
    return parse(text.encode(), where="x.yaml").value


def test_scalars_are_what_a_safe_loader_makes_of_them() -> None:
    text = """
a: 1
b: 0x1F
c: 1.5
d: 1e-5
e: .inf
f: yes
g: null
h: ~
i: "12"
j: 2024-01-01x
k: 1_000
l: [1, two, {three: 3.0e+0}]
m: |
  text
n: 017
o: -3
p: ${model.size}
"""
    mine, theirs = read(text), yaml.safe_load(text)
    theirs["d"] = "1e-5"  # PyYAML wants a dot; YAML 1.2 and people do not
    assert isinstance(mine, dict)
    assert mine.pop("d") in (1e-5, "1e-5") and theirs.pop("d") is not None
    assert mine == theirs


def test_merge_keys_and_aliases_refer() -> None:
    value = read("base: &b {x: 1, y: 2}\nown: {<<: *b, y: 3}\nagain: *b\n")
    assert isinstance(value, dict)
    assert value["own"] == {"x": 1, "y": 3} and value["again"] is value["base"]


@pytest.mark.parametrize(
    ("text", "verdict"),
    [
        ("a: !!python/object/apply:os.system [id]", "dangerous"),
        ("a: !!python/object/new:subprocess.Popen [[id]]", "dangerous"),
        ("%TAG !y! tag:yaml.org,2002:python/\n---\na: !y!object/apply:os.system [id]", "dangerous"),
        ("a: !!python/name:os.system ''", "dangerous"),
        ("a: !!python/module:os ''", "dangerous"),
        ("a: !!python/object:argparse.Namespace {lr: 0.1}", "unknown"),
        ("a: !!python/tuple [1, 2]", "safe"),
        ("a: !Ref b", "safe"),
    ],
)
def test_tags_are_judged_and_never_obeyed(text: str, verdict: str) -> None:
    assert parse(text.encode(), where="x").judged()[0] == verdict


def test_a_foreign_tag_keeps_its_value() -> None:
    value = read("a: !!python/object:argparse.Namespace {lr: 0.1}")
    assert isinstance(value, dict) and isinstance(value["a"], Opaque) and value["a"].state == {"lr": 0.1}


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("a: [1", "bad-yaml"),
        ("a: *b", "bad-yaml"),
        ("--- 1\n--- 2\n", "bad-yaml"),
        ("[" * (MAX_DEPTH + 2) + "]" * (MAX_DEPTH + 2), "too-deep"),
        ("\n".join(["a0: &a0 [x,x,x,x,x,x,x,x,x,x]", *(
            f"a{i}: &a{i} [{','.join([f'*a{i - 1}'] * 10)}]" for i in range(1, 12))]), "limit-exceeded"),
    ],
)  # fmt: skip
def test_what_no_reader_should_swallow_is_told(text: str, code: str) -> None:
    with pytest.raises(CheckpointError) as caught:
        read(text)
    assert caught.value.finding.code == code


def test_bytes_that_are_no_text_are_told() -> None:
    with pytest.raises(CheckpointError) as caught:
        parse(b"a: \xff", where="x")
    assert caught.value.finding.code == "bad-utf8"
