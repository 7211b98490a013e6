"""Whole runs of pipelines at scale=smoke: every clipping mode, refused settings, and resuming after a kill or stop."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file

from groupwise.config.compose import compose_run
from groupwise.config.schema import RunConfig
from groupwise.errors import UserError
from groupwise.processes.distributed import run_here
from groupwise.processes.environment import Place
from groupwise.run import run
from tests.forks import FORKS
from tests.made_up import made_up_once
from tests.rdp_alone import rdp_alone
from tests.runs.test_language_runs import folder_of
from tests.waiting import PATIENCE, until

ROOT = Path(__file__).resolve().parents[2]
SAME = ("debug.noise_seed=1", "privacy.accountant=rdp")
"""Seeded batches, and the quick accountant, because every process computes epsilon itself."""
SILENT = "eval.generate.limit=0"
PLAIN = ("model.dropout=0", "model.attention_dropout=0", "optim.name=sgd", SILENT, "train.steps=3")
TARGETS = "model.lora.targets=[fc1,fc2]"
SHAPE = "+model.shape={num_hidden_layers:2,hidden_size:16,word_embed_proj_dim:16,ffn_dim:24,num_attention_heads:2}"
OPT = ("model=hub", "model.architecture=opt", "model.source=pretrained/gpt2_mini", "model.fresh=true", SHAPE, TARGETS)
"""Its feed-forward layers get one row per token, and batches are padded to different lengths."""
CELLS: dict[str, tuple[str, ...]] = {
    "per_device": ("clip=per_device",),
    "adaptive_device": ("clip=adaptive_device", "pipeline.rematerialize=true", SILENT),
    "adaptive_layer": ("clip=adaptive_layer", "pipeline.blocks=[1,1]", "train.microbatch=null", SILENT),
    "flat": ("clip=flat", "privacy.epsilon=inf", "optim.learning_rate=1", *PLAIN),
    "none": ("clip=none", "optim.learning_rate=0.01", *PLAIN),
    "opt": ("clip=per_device", *OPT, "train.batch_size=3", "data.max_length=300", SILENT, "train.steps=4"),
    "from a folder": ("clip=none", "model=gpt2_mini", SILENT, "train.steps=1", "train.batch_size=4"),
}
AS_ONE_PROCESS = ("flat", "none")
MISTAKES = {
    "too few blocks": ("model.shape.n_layer=1", "2 stages cannot share 1 blocks"),
    "blocks that do not add up": ("pipeline.blocks=[1,2]", "positive counts that add up to 2"),
    "tied": ("model.trains=all", "as token embedding and head"),
}


def smoke(folder: Path | str, *overrides: str) -> RunConfig:
    """The configuration of a run of two stages, with seeded batches."""
    given = ["task=samsum_pipeline", "scale=smoke", f"paths.results={folder}", *SAME, *overrides]
    return compose_run(given, ROOT / "conf")


@contextmanager
def quickly() -> Iterator[None]:
    """A tenth of the synthetic text, as nothing is learned from it, and RDP alone."""
    with made_up_once(TRAIN=200, REQUESTS=8), rdp_alone():
        yield


@pytest.fixture(autouse=True)
def _quickly() -> Iterator[None]:
    with quickly():
        yield


def all_cells(results: Path, rank: int) -> None:
    """Each cell and each mistake in the same two processes, one after the other; the first writes the results."""
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    torch.set_num_threads(1)
    rows: dict[str, Any] = {}
    given = CELLS | {name: mistaken for name, (*mistaken, _) in MISTAKES.items()}
    with quickly():
        for number, (name, overrides) in enumerate(given.items()):
            cell = smoke(results / name, *overrides)
            try:
                rows[name] = run_here(cell, Place(rank, 2, rank, 2, f"file://{results}/meeting-{number}"))
            except UserError as error:
                rows[name] = str(error)
                dist.destroy_process_group()
    if rank == 0:
        (results / "rows.json").write_text(json.dumps(rows))


@pytest.fixture(scope="module")
def cells(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    results = tmp_path_factory.mktemp("cells")
    stages = [FORKS.Process(target=all_cells, args=(results, rank), daemon=True) for rank in range(2)]
    for stage in stages:
        stage.start()
    for stage in stages:
        stage.join(PATIENCE)
    assert [stage.exitcode for stage in stages] == [0, 0]
    return results, json.loads((results / "rows.json").read_text())


@pytest.mark.parametrize("name", CELLS)
def test_every_mode_trains_and_writes_a_complete_record(cells, name):
    results, rows = cells
    folder, row = folder_of(results / name), rows[name]
    assert (folder / "DONE").exists() and json.loads((folder / "result.json").read_text()) == row
    assert {"valid/perplexity", "test/perplexity", "nonprivate/train_perplexity"} <= row.keys()
    assert (row["task"], row["pipeline.stages"]) == ("samsum", 2) and f"clip={row['clip.name']}" in CELLS[name]
    assert len(json.loads(row["system.peak_memory_bytes_by_process"])) == 2
    assert sorted(file.name for file in folder.glob("*.pt")) == ["model-0.pt", "model-1.pt", "model.pt"]
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [*range(1, row["plan.steps"] + 1), row["plan.steps"]]


def test_texts_are_generated_on_the_pipeline(cells):
    lines = (folder_of(cells[0] / "per_device") / "outputs-test.jsonl").read_text().splitlines()
    assert len(lines) == 4 and {"source", "output", "references"} == json.loads(lines[0]).keys()


def test_a_stage_reads_the_models_weights_from_a_folder(cells):
    given = torch.load(folder_of(cells[0] / "from a folder") / "model.pt")
    source = load_file(ROOT / "pretrained" / "gpt2_mini" / "model.safetensors")
    name = "transformer.h.3.mlp.c_fc"
    assert torch.equal(given[f"base_model.model.{name}.base_layer.weight"], source[f"{name}.weight"].float())


def test_each_stage_is_a_group_at_the_papers_threshold(cells):
    privacy = json.loads((folder_of(cells[0] / "per_device") / "privacy.json").read_text())
    assert privacy["plan"]["num_groups"] == 2
    assert privacy["thresholds"] == pytest.approx({"stage 0": 1e-5, "stage 1": 1e-5})


@pytest.mark.parametrize("name", AS_ONE_PROCESS)
def test_flat_and_unclipped_pipelines_match_one_process(cells, tmp_path, name):
    row = run(smoke(tmp_path, *CELLS[name], "pipeline.stages=1"))
    one, two = (torch.load(folder_of(results) / "model.pt") for results in (tmp_path, cells[0] / name))
    assert one.keys() == two.keys()
    moved = [key for key in one if "lora_B" in key]
    assert moved and all(one[key].abs().max() > 0 for key in moved)
    for key in one:
        torch.testing.assert_close(two[key], one[key], rtol=1e-4, atol=1e-6)
    assert cells[1][name]["test/perplexity"] == pytest.approx(row["test/perplexity"], rel=1e-5)


# --- the command ---


def start(folder: Path, *overrides: str, launcher: Sequence[str] = (), **variables: str) -> subprocess.Popen[str]:
    """`run.py task=samsum_pipeline` at scale=smoke, in `folder`; the launcher is given to Python before it."""
    given = ["task=samsum_pipeline", "scale=smoke", f"paths.results={folder}", *SAME, *overrides]
    own = {"PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"}
    return subprocess.Popen(
        [sys.executable, *launcher, str(ROOT / "run.py"), *given],
        cwd=ROOT,
        env=os.environ | own | variables,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


@pytest.mark.parametrize("name", MISTAKES)
def test_mistakes_that_the_processes_find_are_refused_and_write_nothing(cells, name):
    assert MISTAKES[name][1] in cells[1][name]
    assert not (cells[0] / name).exists()


LONG = ("clip=adaptive_device", "train.steps=40", "train.checkpoint_every=0", SILENT, "eval.train_limit=4")


def stages_of(running: subprocess.Popen[str]) -> list[int]:
    """The processes of the stages, in their order."""
    children = Path(f"/proc/{running.pid}/task/{running.pid}/children").read_text().split()
    return [int(child) for child in children if "spawn_main" in Path(f"/proc/{child}/cmdline").read_text()]


def wait_for_steps(results: Path, steps: int) -> None:
    files = results.glob
    until(lambda: any(len(f.read_text().splitlines()) >= steps for f in files("runs/*/metrics.jsonl")), f"step {steps}")


def sentences(errors: str) -> list[str]:
    """The lines of stderr, without progress and the warning of a large delta."""
    lines = [line for line in errors.splitlines() if line.strip()]
    return [line for line in lines if "step/s" not in line and not line.startswith("warning: delta")]


def weights(results: Path) -> dict[str, torch.Tensor]:
    return torch.load(folder_of(results) / "model.pt")


@pytest.mark.slow
def test_a_run_resumes_to_the_same_bits_after_a_kill_and_after_a_stop(tmp_path):
    whole = start(tmp_path / "whole", *LONG)
    whole.communicate(timeout=PATIENCE)
    assert whole.returncode == 0

    results = tmp_path / "broken"
    killed = start(results, *LONG)
    wait_for_steps(results, 3)
    stages = stages_of(killed)
    os.kill(stages[1], signal.SIGKILL)
    _, errors = killed.communicate(timeout=PATIENCE)
    assert killed.returncode == 1
    [line] = sentences(errors)
    assert line.startswith("error: the process of stage 1 was killed by SIGKILL")
    assert not any(Path(f"/proc/{stage}").exists() for stage in stages)
    assert not (folder_of(results) / "DONE").exists() and not (folder_of(results) / "result.json").exists()
    pointer = torch.load(folder_of(results) / "checkpoint.pt")
    for stage in range(2):
        torch.load(folder_of(results) / pointer["folder"] / f"stage-{stage}.pt")  # complete

    stopped = start(results, *LONG)
    wait_for_steps(results, int(pointer["step"]) + 3)
    stopped.send_signal(signal.SIGTERM)
    _, errors = stopped.communicate(timeout=PATIENCE)
    assert stopped.returncode == 130
    [line] = sentences(errors)
    assert line.startswith("interrupted")

    resumed = start(results, *LONG)
    resumed.communicate(timeout=PATIENCE)
    assert resumed.returncode == 0
    one, other = weights(tmp_path / "whole"), weights(results)
    assert all(torch.equal(one[key], other[key]) for key in one)
    privacy = [json.loads((folder_of(r) / "privacy.json").read_text()) for r in (tmp_path / "whole", results)]
    assert privacy[0]["thresholds"] == privacy[1]["thresholds"]
    assert privacy[0]["executed_steps"] == privacy[1]["executed_steps"] == 40
    assert not list(folder_of(results).glob("checkpoint*"))


@pytest.mark.slow
def test_torchrun_starts_the_same_run_and_one_process_prints(tmp_path):
    plain = start(tmp_path / "plain", *CELLS["per_device"])
    plain.communicate(timeout=PATIENCE)
    assert plain.returncode == 0
    torchrun = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    done = start(tmp_path / "torchrun", *CELLS["per_device"], launcher=torchrun)
    printed, errors = done.communicate(timeout=PATIENCE)
    assert done.returncode == 0, errors
    assert printed.count("Record: ") == 1 and printed.count("Privacy: ") == 1
    one, other = weights(tmp_path / "torchrun"), weights(tmp_path / "plain")
    assert all(torch.equal(one[key], other[key]) for key in one)


@pytest.mark.slow
def test_tasks_of_srun_connect_and_print_a_mistake_once(tmp_path):
    task = {
        "SLURM_STEP_NUM_TASKS": "2",
        "SLURM_STEP_ID": "0",
        "SLURM_JOB_ID": str(os.getpid()),
        "SLURM_JOB_NODELIST": "localhost",
    }
    tasks = [
        start(tmp_path / "out", "train.batch_size=65", **task, SLURM_PROCID=number, SLURM_LOCALID=number)
        for number in "01"
    ]
    errors = [process.communicate(timeout=PATIENCE)[1] for process in tasks]
    assert [process.returncode for process in tasks] == [2, 2]
    [line] = "".join(errors).splitlines()
    assert line.startswith("error: ") and "larger than the training set" in line
    assert not (tmp_path / "out").exists()
