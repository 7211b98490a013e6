"""The processes of a run: all end if one of them fails or is stopped, and the user gets one error message."""

import os
import signal
import sys
import threading
import time
from pathlib import Path
from unittest.mock import Mock

import pytest

from groupwise.config.schema import RunConfig
from groupwise.errors import ProcessFailed, UserError
from groupwise.processes import start as processes
from groupwise.processes.environment import Place, find_place, first_host, name_of
from groupwise.processes.start import spawn
from tests.waiting import PATIENCE, until


def config_of(stages: int, ranks: int = 1, folder: Path | str = "results") -> RunConfig:
    config = RunConfig()
    config.pipeline.stages, config.parallel.ranks, config.paths.results = stages, ranks, str(folder)
    return config


# --- functions that the processes run, and that write files into the folder for results ---


def _wait() -> None:
    while True:
        time.sleep(0.05)


def greets(config: RunConfig, place: Place) -> dict:
    print(f"hello from {place.rank}", flush=True)
    Path(config.paths.results, f"{place.rank}").write_text(f"{place.rank} {place.world} {place.local} {os.getpid()}")
    return {"rank": place.rank}


def errs(config: RunConfig, place: Place) -> dict:
    if place.rank == 1:
        raise UserError("the file is not there: bring it.")
    _wait()
    return {}


def breaks(config: RunConfig, place: Place) -> dict:
    greets(config, place)
    if place.rank == 1:
        raise RuntimeError("a bug")
    first = Path(config.paths.results, "1")
    while not (first.exists() and first.read_text() and ended(int(first.read_text().split()[3]))):
        time.sleep(0.01)
    raise RuntimeError("the connection was closed by a peer")


def ended(number: int) -> bool:
    """Whether the process has ended, possibly as a zombie."""
    try:
        return Path(f"/proc/{number}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except FileNotFoundError:
        return True


def dies(config: RunConfig, place: Place) -> dict:
    greets(config, place)
    if place.rank == 1:
        print("the last words", file=sys.stderr, flush=True)
        os.kill(os.getpid(), signal.SIGKILL)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    _wait()
    return {}


def waits(config: RunConfig, place: Place) -> dict:
    try:
        greets(config, place)
        _wait()
    except KeyboardInterrupt:
        Path(config.paths.results, f"{place.rank}").write_text("asked")
        raise
    return {}


def cannot_save(config: RunConfig, place: Place) -> dict:
    try:
        return waits(config, place)
    except KeyboardInterrupt:
        raise UserError("The checkpoint cannot be written: free space.") from None


def all_ended(folder: Path) -> bool:
    """Whether all processes that ran `greets` have ended."""
    ids = [int(file.read_text().split()[3]) for file in folder.iterdir()]
    return not any(Path(f"/proc/{number}").exists() for number in ids)


# --- starting and ending ---


@pytest.fixture(autouse=True)
def _little_grace(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "GRACE", 1.0)


def test_every_process_knows_its_place_and_only_the_main_one_prints(tmp_path, capfd):
    assert spawn(config_of(2, 2, tmp_path), greets) == {"rank": 0}
    assert capfd.readouterr().out == "hello from 0\n"
    assert [(tmp_path / str(rank)).read_text().split()[:3] for rank in range(4)] == [
        [str(rank), "4", str(rank)] for rank in range(4)
    ]
    assert all_ended(tmp_path)


def test_a_user_error_in_any_process_is_raised(capfd):
    with pytest.raises(UserError, match="the file is not there"):
        spawn(config_of(2), errs)
    assert capfd.readouterr().err == ""


def test_only_the_process_that_failed_first_shows_its_traceback(tmp_path, capfd):
    with pytest.raises(ProcessFailed, match=r"stage 1 failed, so all were stopped.*same command resumes"):
        spawn(config_of(2, folder=tmp_path), breaks)
    errors = capfd.readouterr().err
    assert "RuntimeError: a bug" in errors and "closed by a peer" not in errors


def test_when_one_is_killed_all_end_even_those_that_ignore_sigterm(tmp_path, capfd):
    with pytest.raises(ProcessFailed, match="stage 1 of replica 0 was killed by SIGKILL") as failed:
        spawn(config_of(2, 2, tmp_path), dies)
    assert "\n" not in str(failed.value)
    assert capfd.readouterr().err == "the last words\n"
    assert all_ended(tmp_path)


@pytest.mark.parametrize(
    ("number", "work", "error"), [(signal.SIGINT, waits, KeyboardInterrupt), (signal.SIGTERM, cannot_save, UserError)]
)
def test_a_signal_to_stop_is_passed_on_to_all_processes(tmp_path, number, work, error, monkeypatch):
    monkeypatch.setattr(processes, "GRACE", PATIENCE)  # until they have written that they were asked

    def ask() -> None:
        while sum(1 for file in tmp_path.iterdir() if file.read_text()) < 2:
            time.sleep(0.02)
        os.kill(os.getpid(), number)

    threading.Thread(target=ask, daemon=True).start()
    with pytest.raises(error):
        spawn(config_of(2, folder=tmp_path), work)
    assert [(tmp_path / str(rank)).read_text() for rank in range(2)] == ["asked", "asked"]


def test_processes_do_not_outlive_the_one_that_started_them(tmp_path):
    code = (
        f"import sys; sys.path[:0] = {[str(Path(__file__).parent), *sys.path]!r}\n"
        "import test_start as t\n"
        "if __name__ == '__main__':\n"
        f"    t.spawn(t.config_of(2, folder={str(tmp_path / 'out')!r}), t.waits)\n"
    )
    (tmp_path / "out").mkdir()
    script = tmp_path / "watches.py"
    script.write_text(code)
    parent = os.posix_spawn(sys.executable, [sys.executable, str(script)], dict(os.environ))
    until(lambda: sum(1 for file in (tmp_path / "out").iterdir() if file.read_text()) == 2, "both processes")
    started = [int(file.read_text().split()[3]) for file in (tmp_path / "out").iterdir()]
    os.kill(parent, signal.SIGKILL)
    os.waitpid(parent, 0)
    until(lambda: all(ended(number) for number in started), "the end of both")


def test_only_the_first_error_under_torchrun_is_raised(monkeypatch):
    from groupwise.processes import distributed

    store, ends = distributed.dist.HashStore(), Mock(side_effect=[UserError("a mistake"), RuntimeError("by peer")])
    monkeypatch.setattr(distributed, "interrupt_on", lambda _: None)
    monkeypatch.setattr(distributed, "_meet", lambda *_: store)
    monkeypatch.setattr(distributed, "run_here", ends)
    for error in (UserError, SystemExit):
        with pytest.raises(error):
            distributed.join(config_of(2), Place(0, 2, 0, 1, ""))


@pytest.mark.parametrize(("local", "sharing", "count"), [(2, 1, 2), (0, 4, 2), (0, 2, 1)])
def test_more_processes_than_gpus_on_a_machine_are_refused(local, sharing, count, monkeypatch):
    from groupwise.processes.distributed import _device

    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: count)
    with pytest.raises(UserError, match=f"more processes on this machine than its {count} GPUs"):
        _device(config_of(4), Place(local, 4, local, sharing, ""))


# --- places ---

TORCHRUN = {
    "RANK": "5",
    "WORLD_SIZE": "8",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "4",
    "MASTER_ADDR": "a",
    "MASTER_PORT": "1",
}
SRUN = {
    "SLURM_PROCID": "5",
    "SLURM_NTASKS": "16",
    "SLURM_STEP_NUM_TASKS": "8",
    "SLURM_STEP_ID": "0",
    "SLURM_LOCALID": "1",
    "SLURM_JOB_ID": "77",
    "SLURM_JOB_NODELIST": "gpu[03-04]",
}


def test_the_place_of_a_process_is_read_from_torchrun_and_srun():
    place = find_place(config_of(4, 2), TORCHRUN)
    assert (place.rank, place.world, place.local, place.sharing, place.meeting) == (5, 8, 1, 4, "env://")
    place = find_place(config_of(4, 2), SRUN)
    assert (place.rank, place.world, place.local, place.main) == (5, 8, 1, False)
    assert place.meeting.startswith("tcp://gpu03:2")
    assert find_place(config_of(4, 2), SRUN | {"MASTER_PORT": "99"}).meeting == "tcp://gpu03:99"


@pytest.mark.parametrize(
    "environment", [{}, SRUN | {"SLURM_STEP_NUM_TASKS": "1"}, {k: v for k, v in SRUN.items() if k != "SLURM_STEP_ID"}]
)
def test_there_is_no_place_unless_a_launcher_started_several_processes(environment):
    assert find_place(config_of(4, 2), environment) is None


@pytest.mark.parametrize(
    "environment",
    [
        TORCHRUN | {"RANK": "first"},
        SRUN | {"SLURM_STEP_ID": "batch"},
        {key: value for key, value in SRUN.items() if "NODELIST" not in key},
    ],
)
def test_an_environment_that_cannot_be_read_is_refused(environment):
    with pytest.raises(UserError, match="The variables of torchrun or srun cannot be read"):
        find_place(config_of(4, 2), environment)


@pytest.mark.parametrize("environment", [TORCHRUN, SRUN])
def test_another_number_of_processes_is_refused_once(environment):
    first = environment | {"RANK": "0", "SLURM_PROCID": "0"}
    name = "torchrun" if environment is TORCHRUN else "srun"
    with pytest.raises(UserError, match=rf"{name} started 8 .* pipeline.stages=3 times parallel.ranks=2 makes 6"):
        find_place(config_of(3, 2), first)
    with pytest.raises(SystemExit) as left:
        find_place(config_of(3, 2), environment)
    assert left.value.code == 2


@pytest.mark.parametrize(
    ("nodes", "host"), [("a", "a"), ("a,b", "a"), ("gpu[03-05,9],login", "gpu03"), ("r[1-2]n[10,12]", "r1n10")]
)
def test_the_first_host_is_read_from_slurms_list_of_nodes(nodes, host):
    assert first_host(nodes) == host


def test_processes_have_names():
    assert [name_of(config_of(2), 1), name_of(config_of(1, 2), 1)] == ["stage 1", "replica 1"]
    assert name_of(config_of(2, 2), 3) == "stage 1 of replica 1"
