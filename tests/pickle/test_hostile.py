"""The traps that other scanners fell into, each as bytes; and the whole corpus of hostile pickles."""

from __future__ import annotations

from typing import Any

import pytest

from anyckpt.core.inert import Global, Opaque
from anyckpt.pickle.danger import why_dangerous
from anyckpt.pickle.machine import run
from anyckpt.pickle.renames import to_python3
from anyckpt.pickle.streams import run_all


def text(value: str) -> bytes:
    raw = value.encode()
    return b"X" + len(raw).to_bytes(4, "little") + raw


def codes(data: bytes) -> list[str]:
    return [f.code for f in run(data).findings]


def test_corpus(hostile: list[tuple[str, dict[str, Any], bytes]]) -> None:
    """Every case gives an accepted word, at most four kinds of error for one fault, and none on a control."""
    wrong = []
    for name, expect, data in hostile:
        result = run_all(data)
        kinds = list(dict.fromkeys(f.code for f in result.findings if f.severity == "error"))
        first = expect.get("error") or expect.get("verdict") or expect.get("warning")
        accepted = {word.replace("_", "-") for word in expect.get("accept", [first])}
        words = {result.verdict, *kinds[:2]}
        bad_control = first == "safe" and (kinds or result.verdict != "safe")
        if not words & accepted or len(kinds) > 4 or bad_control:
            wrong.append((name, result.verdict, kinds, sorted(accepted)))
        if expect.get("verdict") == "dangerous" and result.verdict != "dangerous":
            wrong.append((name, result.verdict, "weaker than dangerous"))
    assert not wrong


@pytest.mark.parametrize(
    "data",
    [
        b"cos\nsystem\n.",
        b"c__builtin__\neval\n.",
        b"ccommands\ngetoutput\n.",
        b"\x80\x04" + text("os") + text("system") + b"\x93.",
        # operands through memo, DUP, POP and POP_MARK
        b"\x80\x04" + text("os") + b"q\x00" + text("system") + b"q\x0100" + text("a") + b"0h\x00h\x01\x93.",
        b"\x80\x04" + text("posix") + b"(NNN1" + text("system") + b"\x93.",
        # BINPUT and MEMOIZE mixed: MEMOIZE takes the number of entries
        b"\x80\x04" + text("os") + b"q\x05" + text("system") + b"\x9400h\x05h\x01\x93.",
        # INST, OBJ, NEWOBJ and NEWOBJ_EX call
        b"(" + text("id") + b"ios\nsystem\n.",
        b"(cos\nsystem\n" + text("id") + b"o.",
        b"\x80\x02csubprocess\nPopen\n" + text("id") + b"\x85\x81.",
        b"\x80\x04csubprocess\nPopen\n)}\x92.",
        # dotted names through allowed modules
        b"ctorch\nserialization.os.system\n.",
        b"ctorch._utils\n_rebuild_tensor_v2.__globals__.get\n.",
        b"ctorch.storage\nUntypedStorage.from_file\n.",
        b"ctorch\n_utils._rebuild_tensor_v2\n.",
        # computed names, calls of calls, extension codes, items set on a function
        b"\x80\x04ccodecs\ndecode\n" + text("bf") + b"\x85R" + text("system") + b"\x93.",
        b"cproject\nmake\n)R)R.",
        b"\x80\x02\x82\x01.",
        b"cproject\nmake\nK\x01K\x02s.",
        b"cproject\nmake\n}b.",
        # a rebuild function that calls its argument
        b"ctorch._tensor\n_rebuild_from_type_v2\n(cos\nsystem\nctorch\nTensor\n)NtR.",
        b"ctorch._tensor\n_rebuild_from_type_v2\n(c_codecs\nencode\nctorch\nTensor\n)NtR.",
        # getattr in any form but the one that ShardedTensor files have
        b"cbuiltins\ngetattr\nctorch\nTensor\n" + text("__init__") + b"\x86R.",
        b"cbuiltins\ngetattr\n.",
        b"cbuiltins\ngetattr\n]R.",
        b"cbuiltins\ngetattr\nPid\n" + text("system") + b"\x86R.",
        # a loader inside the loader
        b"ctorch.storage\n_load_from_bytes\nC\x01.\x85R.",
    ],
)
def test_dangerous(data: bytes) -> None:
    """None of these is taken for less than it is."""
    assert run(data).verdict == "dangerous"


@pytest.mark.parametrize(
    "data",
    [
        b"cproject\nThing\n)\x81}b.",
        b"cproject\nThing\n}b.",  # attributes on a class
        b"c_codecs\nencode\n" + text("a") + text("rot13") + b"\x86R.",
        b"cbuiltins\nlen\n)\x85R.",  # named is harmless, called is not what saved objects do
        b"ccollections\ndefaultdict\ncproject\nmake\n\x85R.",
    ],
)
def test_unknown(data: bytes) -> None:
    """Not known to be harmless, not known to be worse."""
    assert run(data).verdict == "unknown"


def test_a_fault_never_lowers_the_verdict() -> None:
    """What ran before the fault counts, and so does what stands behind it."""
    result = run(b"cos\nsystem\n" + text("id") + b"\x85R\xff")
    assert result.verdict == "dangerous" and "malformed-pickle" in [f.code for f in result.findings]
    assert run(b"\x80\x02N\xffcos\nsystem\n(tR.").verdict == "dangerous"
    assert run(b"\x80\x04N\xff\x8c\x02os\x94\x8c\x06system\x94\x93.").verdict == "dangerous"
    assert run(b"\x80\x02N\xffc\x01\x02\n\x03\n.").verdict == "safe"  # no identifiers: noise


def test_sweep_is_linear_on_repetitive_bytes() -> None:
    """A megabyte of what each pattern begins with is no trap (it would take minutes if it were quadratic)."""
    for filler in (b"c", b"X\x02\0\0\0", b"\x8c\x05abcde", b"\n", b"c\n", b"ca\n"):
        run(b"\xff" + filler * (1_000_000 // len(filler)))


def test_setting_items_on_a_list_and_building_a_dict_are_faults() -> None:
    """They corrupted memory in torch before 2.10; other readers raise."""
    assert codes(b"\x80\x02]K\x05K\x01s.") == ["malformed-pickle"]
    assert codes(b"}}b.") == ["malformed-pickle"]
    assert codes(b"N)R.") == ["malformed-pickle"]


def test_both_spellings_are_classified() -> None:
    """Protocols below 3 rename; a later protocol does not, and the written name counts as well."""
    assert to_python3("__builtin__", "xrange") == ("builtins", "range")
    old = run(b"c__builtin__\nset\n](K\x01e\x85R.")
    assert old.value == {1} and old.verdict == "safe"
    assert old.imports[0].path == "builtins.set" and old.imports[0].module == "__builtin__"


def test_honest_getattr_of_sharded_tensors() -> None:
    """Rank files with a ShardedTensor name a nested class through getattr: exactly that pair is harmless."""
    api = b"ctorch.distributed._shard.sharded_tensor.api\nShardedTensor\n"
    data = b"\x80\x02c__builtin__\ngetattr\n" + api + text("ProcessGroupState") + b"\x86R)\x81}"
    result = run(data + text("global_rank") + b"K\x01sb.")
    assert result.verdict == "safe" and not result.findings
    assert isinstance(result.value, Opaque) and result.value.attributes() == {"global_rank": 1}
    assert result.value.cls == Global("torch.distributed._shard.sharded_tensor.api", "ShardedTensor.ProcessGroupState")


def test_one_hostile_global_hides_nothing() -> None:
    """What stands beside it is read."""
    value = run(b"\x80\x02}(" + text("a") + b"K\x01" + text("x") + b"cos\nsystem\n)R" + text("b") + b"K\x02u.").value
    assert value["a"] == 1 and value["b"] == 2 and isinstance(value["x"], Opaque)


def test_every_stdlib_module_that_runs_code_has_a_reason() -> None:
    """The words are only words, but these should have them."""
    for module, name in [
        ("os", "system"), ("subprocess", "run"), ("builtins", "exec"), ("importlib", "import_module"),
        ("asyncio.unix_events", "_UnixSubprocessTransport"), ("torch.hub", "load"), ("numpy", "memmap"),
    ]:
        assert why_dangerous(module, name)
    assert not why_dangerous("project.config", "Config") and not why_dangerous("builtins", "len")
