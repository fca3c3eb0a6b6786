"""Lightning reads what we write: load_from_checkpoint, and Trainer.fit goes on with the losses it would have had."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

import anyckpt
from anyckpt.verbs.convert import convert

STEPS, AFTER = 3, 3


def test_a_sharded_folder_reads_with_its_meta_file_as_one_checkpoint(corpus: Path) -> None:
    checkpoint = anyckpt.open(corpus / "torch/lightning_fsdp_sharded_w2/last.ckpt")
    assert (checkpoint.format, checkpoint.step, checkpoint.epoch) == ("lightning-sharded", 3, 0)
    assert checkpoint.facts["framework"] == "Lightning 2.6.6"
    assert checkpoint.state["my_extra"] == {"tokens": 1234}
    assert checkpoint.optimizer is not None
    assert "net.embed.weight" in checkpoint.optimizer.slots["exp_avg"]


def test_a_sharded_folder_becomes_a_single_file_with_every_part(corpus: Path, tmp_path: Path) -> None:
    source = anyckpt.open(corpus / "torch/lightning_fsdp_sharded_w2/last.ckpt")
    convert(source, tmp_path / "one.ckpt", to="lightning", prove=True)
    written = anyckpt.open(tmp_path / "one.ckpt")
    root = written.facts["object"]
    assert set(root) >= {"state_dict", "optimizer_states", "lr_schedulers", "loops", "callbacks", "hyper_parameters"}
    assert [list(one) for one in root["optimizer_states"]] == [["state", "param_groups"]]
    assert root["loops"] == source.state["loops"]
    assert {n: t.tobytes() for n, t in written.weights.items()} == {n: t.tobytes() for n, t in source.weights.items()}


@pytest.fixture(scope="module")
def lightning() -> Any:
    os.environ.setdefault("PL_DISABLE_FORK", "1")
    return pytest.importorskip("lightning.pytorch")


def module_class(pl: Any) -> Any:
    import torch

    class Regression(pl.LightningModule):  # type: ignore[misc]
        def __init__(self, width: int = 5) -> None:
            super().__init__()
            self.save_hyperparameters()
            self.net = torch.nn.Sequential(torch.nn.Linear(4, width), torch.nn.Tanh(), torch.nn.Linear(width, 1))
            self.losses: list[float] = []

        def training_step(self, batch: Any, index: int) -> Any:
            x, y = batch
            loss = torch.nn.functional.mse_loss(self.net(x), y)
            self.losses.append(float(loss.detach()))
            return loss

        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
            schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2)
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    return Regression


def batches() -> Any:
    """Twelve equal batches: Lightning begins the loader anew on resuming within an epoch."""
    import torch

    generator = torch.Generator().manual_seed(3)
    x, y = torch.randn(4, 4, generator=generator).repeat(12, 1), torch.randn(4, 1, generator=generator).repeat(12, 1)
    return torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x, y), batch_size=4)


def trainer(pl: Any, steps: int, folder: Path) -> Any:
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    return pl.Trainer(
        max_steps=steps, accelerator="cpu", devices=1, default_root_dir=folder, enable_model_summary=False, **quiet
    )  # fmt: skip


@pytest.mark.frameworks
@pytest.mark.filterwarnings("ignore")
def test_training_goes_on_from_a_file_that_went_through_dcp(lightning: Any, tmp_path: Path) -> None:
    kind = module_class(lightning)
    lightning.seed_everything(1, verbose=False)
    model = kind()
    first = trainer(lightning, STEPS, tmp_path)
    first.fit(model, batches())
    first.save_checkpoint(tmp_path / "theirs.ckpt")

    lightning.seed_everything(1, verbose=False)
    whole = kind()
    trainer(lightning, STEPS + AFTER, tmp_path).fit(whole, batches())

    convert(tmp_path / "theirs.ckpt", tmp_path / "sharded", to="dcp", world=3)
    convert(tmp_path / "sharded", tmp_path / "ours.ckpt", to="lightning", prove=True)
    resumed = kind()
    again = trainer(lightning, STEPS + AFTER, tmp_path)
    again.fit(resumed, batches(), ckpt_path=str(tmp_path / "ours.ckpt"))
    assert resumed.losses == whole.losses[STEPS:]

    loaded = kind.load_from_checkpoint(tmp_path / "ours.ckpt")
    assert all((a == b).all() for a, b in zip(loaded.parameters(), model.parameters()))
