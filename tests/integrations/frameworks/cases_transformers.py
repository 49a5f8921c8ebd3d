"""The Trainer with holdfast, in one process. Run by `make frameworks-native`."""

import json
import logging
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from peft import LoraConfig, get_peft_model
from transformers import (
    EarlyStoppingCallback,
    LlamaConfig,
    LlamaForCausalLM,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)
from transformers.trainer_jit_checkpoint import CheckpointManager

import holdfast
from holdfast.errors import MismatchError, NotCommittedError, OptionError, StoreError
from holdfast.integrations import adapter
from holdfast.integrations.directories import Saving
from holdfast.integrations.transformers import (
    NEWEST_TESTED,
    OLDEST,
    HoldfastTrainer,
    trainer_of,
)


class Samples(torch.utils.data.Dataset):  # type: ignore[type-arg]
    """Texts made of numbers; other ones with another shift."""

    def __init__(self, shift: int = 0) -> None:
        self.shift = shift

    def __len__(self) -> int:
        return 24

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        generator = torch.Generator().manual_seed(index + self.shift)
        text = torch.randint(0, 64, (8,), generator=generator)
        return {"input_ids": text, "labels": text}


def new_model(seed: int = 0, layers: int = 1, adapted: bool = False) -> Any:
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=layers,
        num_attention_heads=2,
        num_key_value_heads=2,
    )
    torch.manual_seed(seed)
    model = LlamaForCausalLM(config)
    if not adapted:
        return model
    return get_peft_model(model, LoraConfig(r=2, target_modules=["q_proj", "v_proj"]))


class Until(TrainerCallback):  # type: ignore[misc]
    """Ends training early, as a crash would: the schedule is that of the whole."""

    def __init__(self, last: int) -> None:
        self.last = last

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        control.should_training_stop |= state.global_step >= self.last


def new_trainer(
    root: Path,
    *,
    base: Any = HoldfastTrainer,
    model: Any = None,
    last: int = 0,
    shift: int = 0,
    callbacks: tuple[Any, ...] = (),
    **given: Any,
) -> Any:
    arguments = {"max_steps": 8, "save_steps": 2, "logging_steps": 1, "learning_rate": 1e-2}
    arguments |= {"per_device_train_batch_size": 4, "report_to": [], "use_cpu": True}
    trainer = base(
        model=model or new_model(),
        args=TrainingArguments(str(root), **arguments | {"disable_tqdm": True} | given),
        train_dataset=Samples(shift),
        eval_dataset=Samples(100),
        callbacks=[*callbacks, *([Until(last)] if last else [])],
    )
    return trainer


def weights(trainer: Any) -> dict[str, torch.Tensor]:
    return {n: v.detach().clone() for n, v in trainer.model.state_dict().items()}


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[n], other[n]) for n in one)


def steps_in(root: Path) -> list[int]:
    return sorted(int(p.parent.name.split("-")[1]) for p in root.glob("checkpoint-*/MANIFEST"))


def losses(trainer: Any) -> dict[int, float]:
    return {e["step"]: e["loss"] for e in trainer.state.log_history if "loss" in e}


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A run that nothing interrupts, by the Trainer alone."""
    trainer = new_trainer(tmp_path_factory.mktemp("stock"), base=Trainer)
    trainer.train()
    return trainer


def test_it_resumes_from_the_newest_that_is_committed(tmp_path: Path, whole: Any) -> None:
    new_trainer(tmp_path, last=6, save_total_limit=2).train()
    assert steps_in(tmp_path) == [4, 6]
    torn = tmp_path / "checkpoint-6"
    (torn / "MANIFEST").unlink()
    with pytest.raises(NotCommittedError, match=r"checkpoint-6 was never committed.*checkpoint-4"):
        new_trainer(tmp_path).train(resume_from_checkpoint=str(torn))
    trainer = new_trainer(tmp_path, save_total_limit=2)
    trainer.train(resume_from_checkpoint=True)
    assert same(weights(trainer), weights(whole)) and losses(trainer) == losses(whole)
    assert steps_in(tmp_path) == [6, 8]
    for step in (6, 8):
        assert holdfast.verify(tmp_path / f"checkpoint-{step}").damage == ()


def test_nothing_committed_is_said(tmp_path: Path) -> None:
    (tmp_path / "checkpoint-2").mkdir(parents=True)
    with pytest.raises(NotCommittedError, match="no committed checkpoint of holdfast; it has"):
        new_trainer(tmp_path).train(resume_from_checkpoint=True)


def test_going_back_saves_over_later_steps_and_the_newest_save_counts(tmp_path: Path) -> None:
    new_trainer(tmp_path, shift=1000).train()
    back = new_trainer(tmp_path, last=6)
    back.train(resume_from_checkpoint=str(tmp_path / "checkpoint-4"))
    assert steps_in(tmp_path) == [2, 4, 6, 8]  # 8 is of the run that was left
    trainer = new_trainer(tmp_path, last=7)
    trainer.train(resume_from_checkpoint=True)
    assert [*losses(trainer)][-1] == 7
    once = new_trainer(tmp_path.parent / "once", last=7)
    once.train(resume_from_checkpoint=str(tmp_path / "checkpoint-4"))
    assert same(weights(trainer), weights(once))


def test_the_files_beside_a_commit_are_healed(tmp_path: Path) -> None:
    new_trainer(tmp_path, last=4).train()
    place = tmp_path / "checkpoint-4"
    before = {p.name: p.read_bytes() for p in place.iterdir() if p.suffix == ".json"}
    assert {*before} == {"trainer_state.json", "config.json", "generation_config.json"}
    assert json.loads(before["trainer_state.json"])["global_step"] == 4
    (place / "trainer_state.json").write_text('{"global_step": 2}')
    (place / "config.json").unlink()
    trainer = new_trainer(tmp_path, last=5)
    trainer.train(resume_from_checkpoint=True)
    assert [*losses(trainer)] == [1, 2, 3, 4, 5]
    assert before == {p.name: p.read_bytes() for p in place.iterdir() if p.suffix == ".json"}


BEST = {"eval_strategy": "steps", "eval_steps": 2, "metric_for_best_model": "loss"}


class Scores(HoldfastTrainer):  # type: ignore[misc, valid-type]
    """Judges step 4 to be the best."""

    def evaluate(self, *_: Any, **__: Any) -> dict[str, float]:
        metrics = {"eval_loss": abs(self.state.global_step - 4) + 1.0}
        self.log(metrics)
        handler = self.callback_handler
        self.control = handler.on_evaluate(self.args, self.state, self.control, metrics)
        return metrics


@pytest.mark.parametrize(("limit", "kept"), [(2, [4, 8]), (1, [4])])
def test_the_best_is_kept_and_loaded_at_the_end(
    tmp_path: Path, limit: int, kept: list[int]
) -> None:
    given: dict[str, Any] = BEST | {"load_best_model_at_end": True, "save_total_limit": limit}
    trainer = new_trainer(tmp_path, base=Scores, **given)
    trainer.train()
    assert steps_in(tmp_path) == kept
    assert trainer.state.best_model_checkpoint == str(tmp_path / "checkpoint-4")
    at_four = new_trainer(tmp_path.parent / "four", last=4)
    at_four.train()
    assert same(weights(trainer), weights(at_four))


def test_callbacks_resume(tmp_path: Path) -> None:
    patience = EarlyStoppingCallback(early_stopping_patience=3)
    new_trainer(tmp_path, base=Scores, callbacks=(patience,), **BEST).train()
    later = EarlyStoppingCallback(early_stopping_patience=3)
    again = {"restore_callback_states_from_checkpoint": True, "max_steps": 20} | BEST
    trainer = new_trainer(tmp_path, base=Scores, callbacks=(later,), **again)
    trainer.train(resume_from_checkpoint=True)
    assert trainer.state.global_step == 10  # the third since the best


def test_deltas_outlive_retention(tmp_path: Path, whole: Any) -> None:
    codec = holdfast.codecs.Delta(every=3)
    ours = trainer_of(Trainer, Saving(codec=codec))
    new_trainer(tmp_path, base=ours, last=6, save_total_limit=1).train()
    assert 6 in steps_in(tmp_path)
    trainer = new_trainer(tmp_path, base=ours, save_total_limit=1)
    trainer.train(resume_from_checkpoint=True)
    assert same(weights(trainer), weights(whole))
    for step in steps_in(tmp_path):
        assert holdfast.verify(tmp_path / f"checkpoint-{step}").damage == ()


@pytest.mark.parametrize("stage", ["sync", "lazy"])
def test_other_stages_resume_alike(tmp_path: Path, whole: Any, stage: Any) -> None:
    ours = trainer_of(Trainer, Saving(stage=stage))
    new_trainer(tmp_path, base=ours, last=5).train()
    trainer = new_trainer(tmp_path, base=ours)
    trainer.train(resume_from_checkpoint=True)
    assert same(weights(trainer), weights(whole))


def test_an_adapter_is_saved_without_its_base(tmp_path: Path) -> None:
    new_trainer(tmp_path / "a", model=new_model(adapted=True), last=4).train()
    place = tmp_path / "a" / "checkpoint-4"
    names = [name for name in holdfast.open(place) if name.startswith("model.")]
    assert len(names) == 4 and all(".lora_" in name for name in names)
    moments = [name for name in holdfast.open(place) if name.endswith(".exp_avg")]
    assert len(moments) == 4 and all(".lora_" in name for name in moments)
    assert (place / "adapter_config.json").exists()
    trainer = new_trainer(tmp_path / "a", model=new_model(adapted=True))
    trainer.train(resume_from_checkpoint=True)
    alone = new_trainer(tmp_path / "b", base=Trainer, model=new_model(adapted=True))
    alone.train()
    assert same(weights(trainer), weights(alone)) and losses(trainer) == losses(alone)
    other = new_trainer(tmp_path / "a", model=new_model(seed=1, adapted=True))
    with pytest.raises(MismatchError, match=r"adapter of the base model .* digest") as error:
        other.train(resume_from_checkpoint=True)
    assert "adapter_of" in str(error.value)
    from holdfast.integrations.peft import adapter_of

    model = new_model(seed=1, adapted=True)
    place = tmp_path / "a" / "checkpoint-8"
    holdfast.load(place, into={"model": adapter_of(model)}, include="model")
    loaded = {n: v for n, v in model.state_dict().items() if ".lora_" in n}
    assert same(loaded, {n: v for n, v in weights(trainer).items() if ".lora_" in n})


def test_a_changed_model_is_refused_with_names(tmp_path: Path) -> None:
    new_trainer(tmp_path, last=2).train()
    for layers, shown in ((2, "model.layers.1"), (0, "model.layers.0")):
        trainer = new_trainer(tmp_path, model=new_model(layers=layers))
        with pytest.raises(MismatchError, match=shown):
            trainer.train(resume_from_checkpoint=True)


def test_a_checkpoint_of_another_framework_is_refused(tmp_path: Path) -> None:
    place = tmp_path / "checkpoint-2"
    holdfast.save({"model": new_model(), **adapter.mark("lightning", "2.6.6")}, place)
    with pytest.raises(MismatchError, match=r"saved by lightning 2\.6\.6; transformers cannot"):
        new_trainer(tmp_path).train(resume_from_checkpoint=str(place))
    with pytest.raises(NotCommittedError):
        new_trainer(tmp_path).train(resume_from_checkpoint=True)


def test_a_checkpoint_of_transformers_itself_is_resumed(tmp_path: Path, whole: Any) -> None:
    new_trainer(tmp_path, base=Trainer, last=4).train()
    trainer = new_trainer(tmp_path)
    trainer.train(resume_from_checkpoint=str(tmp_path / "checkpoint-4"))
    assert same(weights(trainer), weights(whole))
    assert steps_in(tmp_path) == [6, 8]


def test_weights_alone_are_saved_where_the_trainer_says_so(tmp_path: Path) -> None:
    trainer = new_trainer(tmp_path, save_only_model=True, last=2)
    trainer.train()
    names = [*holdfast.open(tmp_path / "checkpoint-2")]
    assert {name.split(".")[0] for name in names} == {"model", "files", adapter.MARK}


def test_a_scaler_is_saved_and_resumed(tmp_path: Path) -> None:
    first = new_trainer(tmp_path, last=2)
    first.accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    first.train()
    trainer = new_trainer(tmp_path, last=3)
    trainer.accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    trainer.train(resume_from_checkpoint=True)
    assert trainer.accelerator.scaler.state_dict()["scale"] == 8.0


def test_a_just_in_time_checkpoint_is_committed(tmp_path: Path) -> None:
    class Stop(TrainerCallback):  # type: ignore[misc]
        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            if state.global_step == 3:
                os.kill(os.getpid(), signal.SIGTERM)

    class Now(CheckpointManager):  # type: ignore[misc]
        def _sigterm_handler(self, *_: Any) -> None:
            self.is_checkpoint_requested = True

    pytest.MonkeyPatch().setattr("transformers.trainer_jit_checkpoint.CheckpointManager", Now)
    trainer = new_trainer(tmp_path, enable_jit_checkpoint=True, save_strategy="no")
    trainer.add_callback(Stop())
    trainer.train()
    (step,) = steps_in(tmp_path)
    assert step in (3, 4)
    names = {path.name for path in (tmp_path / f"checkpoint-{step}").iterdir()}
    assert "checkpoint-is-incomplete.txt" not in names


def test_an_export_is_loaded_by_from_pretrained(tmp_path: Path) -> None:
    trainer = new_trainer(tmp_path / "run", last=2)
    trainer.train()
    place = tmp_path / "run" / "checkpoint-2"
    only: dict[str, Any] = {"include": "model", "strip": "model.", "files_from": place}
    holdfast.export_checkpoint(place, tmp_path / "out", **only)
    assert (tmp_path / "out" / "config.json").exists()  # or a model of 7 B would be made
    model = LlamaForCausalLM.from_pretrained(tmp_path / "out")
    assert same(dict(model.state_dict()), weights(trainer))


@pytest.mark.parametrize("last", [2, 4])
def test_a_last_save_that_failed_is_raised_when_all_else_is_done(
    tmp_path: Path, last: int, caplog: pytest.LogCaptureFixture
) -> None:
    class Ends(TrainerCallback):  # type: ignore[misc]
        def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            ended.append(state.global_step)

    ended: list[int] = []
    (tmp_path / "checkpoint-2").write_text("in the way")
    best = {"eval_strategy": "steps", "eval_steps": 2, "load_best_model_at_end": True}
    trainer = new_trainer(tmp_path, callbacks=(Ends(),), max_steps=last, **best)
    if last == 2:
        with pytest.raises(StoreError, match=r"last checkpoint .*checkpoint-2 is not saved"):
            trainer.train()
        assert "the best checkpoint" in caplog.text and "Could not locate" not in caplog.text
    else:
        assert trainer.train().global_step == 4
    assert ended == [last] and "checkpoint-2 is not saved, and training goes on" in caplog.text


def test_a_saving_that_is_none_is_refused_before_training(tmp_path: Path) -> None:
    trainer = new_trainer(tmp_path)
    trainer.holdfast = {"codec": "lossless"}
    with pytest.raises(OptionError, match=r"trainer\.holdfast is .*; expected a Saving"):
        trainer.train()


@pytest.fixture
def installed() -> Iterator[adapter.Hook]:
    with adapter.install("transformers", codec="lossless") as hook:
        yield hook


def test_install_serves_unchanged_programs(
    tmp_path: Path, whole: Any, installed: adapter.Hook
) -> None:
    from transformers.trainer_utils import get_last_checkpoint

    new_trainer(tmp_path, base=Trainer, last=4).train()
    newest = tmp_path / "checkpoint-4"
    assert holdfast.open(newest).codecs == ("lossless",)
    (newest / "MANIFEST").rename(tmp_path / "away")
    assert get_last_checkpoint(tmp_path) == str(tmp_path / "checkpoint-2")
    (tmp_path / "away").rename(newest / "MANIFEST")
    trainer = new_trainer(tmp_path, base=Trainer)
    trainer.train(resume_from_checkpoint=get_last_checkpoint(tmp_path))
    assert same(weights(trainer), weights(whole))


def test_only_one_integration_is_active(installed: adapter.Hook) -> None:
    with pytest.raises(OptionError, match="would do so twice"):
        trainer_of(Trainer)
    with pytest.raises(OptionError, match="transformers has holdfast installed already"):
        adapter.install("transformers")
    installed.remove()
    assert Trainer.train.__module__ == "transformers.trainer"
    assert "holdfast" not in vars(Trainer)


def test_an_unknown_version_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    stock, found = Trainer.train, metadata.version

    def fake(name: str) -> str:
        return "6.1.0" if name == "transformers" else found(name)

    monkeypatch.setattr(metadata, "version", fake)
    known = rf"transformers 6\.1\.0 is installed.* {OLDEST} to {NEWEST_TESTED}\."
    with pytest.raises(OptionError, match=known):
        adapter.install("transformers")
    with pytest.raises(OptionError, match=r"6\.1\.0"):
        trainer_of(Trainer)
    assert Trainer.train is stock
    assert transformers.trainer_utils.get_last_checkpoint.__module__ == "transformers.trainer_utils"


def test_options_that_cannot_work_are_refused(tmp_path: Path) -> None:
    with pytest.raises(OptionError, match="expected one of eager, lazy, sync"):
        Saving(stage="late")  # type: ignore[arg-type]
    with pytest.raises(OptionError, match="hub_strategy"):
        trainer = new_trainer(tmp_path)
        trainer.args.push_to_hub = True
        trainer.train()


def test_the_log_says_what_is_active(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "holdfast"):
        trainer_of(Trainer)
    assert caplog.messages == [
        f"holdfast is active for transformers {transformers.__version__}: "
        "each checkpoint of the Trainer is one commit"
    ]


def test_the_environment_installs_it() -> None:
    program = "from transformers import Trainer; print(type(Trainer.holdfast).__name__)"
    there = os.environ | {"HOLDFAST_INSTALL": "transformers"}
    done = subprocess.run(
        [sys.executable, "-c", program], env=there, capture_output=True, text=True, check=True
    )
    assert done.stdout == "Saving\n"


def test_a_checkpoint_is_saved_by_hand_too(tmp_path: Path) -> None:
    trainer = new_trainer(tmp_path, save_strategy="no")
    trainer.train()
    trainer._save_checkpoint(trainer.model, trial=None)
    given: dict[str, Any] = {"max_steps": 9, "save_strategy": "no"}
    later = new_trainer(tmp_path, **given)
    later.train(resume_from_checkpoint=True)
    assert later.state.global_step == 9
    assert steps_in(tmp_path) == [8]
