"""The order of a model's parameters from shapes, where the files list them by name."""

from __future__ import annotations

import pytest

from anyckpt.formats.torch.module_order import order_by_shapes

Shape = tuple[int, ...]


def linear(name: str, n_out: int, n_in: int) -> dict[str, Shape]:
    return {f"{name}.weight": (n_out, n_in), f"{name}.bias": (n_out,)}


def norm(name: str, n: int) -> dict[str, Shape]:
    return {f"{name}.weight": (n,), f"{name}.bias": (n,)}


def tiny(n_layers: int, hidden: int = 8) -> dict[str, Shape]:
    """A small language model, its parameters as named_parameters() lists them."""
    model: dict[str, Shape] = {"pos": (11, hidden), "embed.weight": (67, hidden)}
    for i in range(n_layers):
        at = f"blocks.{i}."
        model |= norm(at + "ln1", hidden) | linear(at + "qkv", 3 * hidden, hidden)
        model |= linear(at + "proj", hidden, hidden) | norm(at + "ln2", hidden)
        model |= linear(at + "up", 4 * hidden, hidden) | linear(at + "down", hidden, 4 * hidden)
    return model | norm("norm", hidden) | {"head.weight": (67, hidden)}


def separate(n_layers: int) -> dict[str, Shape]:
    """Queries, keys and values apart, attention and feed-forward as modules of their own."""
    model: dict[str, Shape] = {"model.tok.weight": (50, 8)}
    for i in range(n_layers):
        at = f"model.layers.{i}."
        for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
            model[f"{at}attn.{name}.weight"] = (8, 8)
        model |= {f"{at}mlp.gate.weight": (16, 8), f"{at}mlp.up.weight": (16, 8), f"{at}mlp.down.weight": (8, 16)}
        model |= {f"{at}norm1.weight": (8,), f"{at}norm2.weight": (8,)}
    return model | {"model.norm.weight": (8,), "lm_head.weight": (50, 8)}


def convolutions() -> dict[str, Shape]:
    model: dict[str, Shape] = {"conv1.weight": (16, 3, 7, 7)} | norm("bn1", 16)
    for stage, width in (("layer1", 16), ("layer2", 32)):
        for block in range(2):
            at = f"{stage}.{block}."
            n_in = 16 if (stage, block) in (("layer1", 0), ("layer1", 1), ("layer2", 0)) else width
            model |= {at + "conv1.weight": (width, n_in, 3, 3)} | norm(at + "bn1", width)
            model |= {at + "conv2.weight": (width, width, 3, 3)} | norm(at + "bn2", width)
    return model | linear("fc", 10, 32)


MODELS = {
    "tiny": tiny(1), "tiny, 12 layers": tiny(12), "separate": separate(3), "convolutions": convolutions(),
    "two of ten": {f"net.{i}.weight": (4, 4) for i in range(12)},
}  # fmt: skip


@pytest.mark.parametrize("model", MODELS.values(), ids=MODELS)
def test_names_in_alphabetical_order_come_back_in_the_models(model: dict[str, Shape]) -> None:
    by_name = dict(sorted(model.items()))
    assert order_by_shapes(by_name, [list(model.values())]) == list(model)


@pytest.mark.parametrize("model", MODELS.values(), ids=MODELS)
def test_two_groups_are_each_a_part_of_the_order(model: dict[str, Shape]) -> None:
    decayed = [s for s in model.values() if len(s) > 1]
    rest = [s for s in model.values() if len(s) < 2]
    found = order_by_shapes(dict(sorted(model.items())), [decayed, rest])
    assert found is not None
    for shapes, kept in ((decayed, lambda s: len(s) > 1), (rest, lambda s: len(s) < 2)):
        assert [model[name] for name in found if kept(model[name])] == shapes


def test_buffers_of_another_shape_are_left_out_and_other_models_are_given_up() -> None:
    model = tiny(1)
    assert order_by_shapes({"scale": (), **model}, [list(model.values())]) == [*model, "scale"]
    assert order_by_shapes(model, [list(model.values())[:-1]]) is None
    swapped = list(model.values())
    swapped[0], swapped[5] = swapped[5], swapped[0]
    assert order_by_shapes(model, [swapped]) is None
