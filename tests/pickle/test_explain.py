"""Sentences about a pickle."""

from __future__ import annotations

from anyckpt.pickle.explain import explain
from anyckpt.pickle.machine import run
from anyckpt.pickle.streams import run_all
from anyckpt.pickle.weights_only import SINCE_TORCH, WEIGHTS_ONLY


def test_dangerous() -> None:
    """The name as the loader sees it, why, and where."""
    lines = explain(run(b"ccommands\ngetoutput\nX\x02\0\0\0id\x85R."))
    assert "Do not" in lines[0]
    assert lines[1].startswith("subprocess.getoutput can run programs") and "written as commands.getoutput" in lines[1]
    assert "weights_only=True) refuses it because of subprocess.getoutput" in lines[2]


def test_harmless_names_that_torch_refuses() -> None:
    """numpy scalars and Namespaces are safe, and still stand in the way of torch's default."""
    lines = explain(run(b"\x80\x02cargparse\nNamespace\n)\x81}b."))
    assert "harmless" in lines[0] and "argparse.Namespace" in lines[1] and "add_safe_globals" in lines[2]


def test_uses_and_versions() -> None:
    """A misuse is worded even where the name is fine; the newest rebuild function decides the version."""
    lines = explain(run(b"ccollections\nOrderedDict\nK\x01K\x02s."))
    assert any("Items are set on collections.OrderedDict itself" in line for line in lines)
    assert any("torch 2.1" in line for line in explain(run(b"ctorch._utils\n_rebuild_tensor_v3\n.")))


def test_several_streams_and_a_break() -> None:
    """The worst verdict leads."""
    lines = explain(run_all(b"N.cproject\nThing\n.").results)
    assert lines[0].startswith("It names classes") and "project.Thing" in lines[1]
    assert any("breaks at byte 1" in line for line in explain(run(b"N\xff")))


def test_tables() -> None:
    """Rebuild functions that torch accepts are all dated."""
    rebuilds = {name for name in WEIGHTS_ONLY if "_rebuild" in name}
    assert rebuilds <= set(SINCE_TORCH)
