"""The command line: help, errors in one sentence that write nothing, and failing cells of a sweep."""

import os
import re
import subprocess
import sys
import textwrap
import warnings
from pathlib import Path

import pytest

import run
from tests.forks import Command

ROOT = Path(__file__).parents[1]


ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "PYTHONDONTWRITEBYTECODE": "1"}


def command(folder: Path, *arguments: str, script: Path = ROOT / "run.py") -> subprocess.CompletedProcess[str]:
    ended = Command(str(script), *arguments, cwd=folder, environment=ENVIRONMENT).finish()
    return subprocess.CompletedProcess(arguments, *ended)


def test_help_shows_groups_and_everyday_keys(tmp_path: Path) -> None:
    done = command(tmp_path, "--help")
    assert done.returncode == 0
    for word in ("clip: ", "adaptive_layer", "equal_budget", "privacy.epsilon", "paths.data"):
        assert word in done.stdout
    assert list(tmp_path.iterdir()) == []


def test_a_closed_stdout_pipe_is_no_error(tmp_path: Path) -> None:
    words = [sys.executable, str(ROOT / "run.py"), "--help"]
    with subprocess.Popen(words, env=ENVIRONMENT, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout and process.stderr
        process.stdout.close()
        assert process.stderr.read() == b"" and process.wait() == 0


def test_invalid_settings_are_found_before_torch_is_imported(tmp_path: Path) -> None:
    script = tmp_path / "probe.py"
    script.write_text(
        f"import runpy, sys\nsys.argv[0] = {str(ROOT / 'run.py')!r}\n"
        "try:\n    runpy.run_path(sys.argv[0], run_name='__main__')\n"
        "except SystemExit as end:\n    print(end.code, 'torch' in sys.modules)\n"
    )
    words = [sys.executable, str(script), "privacy.epsilon=-1"]  # a new process, as a fork would already have torch
    done = subprocess.run(words, cwd=tmp_path, env=ENVIRONMENT, capture_output=True, text=True)
    assert done.stdout.split() == ["2", "False"]


@pytest.fixture
def absl_keeps_the_capture_open() -> None:
    """Hydra closes all logging handlers. absl's handler, which an accountant installed in an earlier test, would then
    close the stream that pytest captures with, so it gets the process's own stderr."""
    if absl := sys.modules.get("absl.logging"):
        absl.get_absl_handler().python_handler.stream = sys.__stderr__


@pytest.mark.usefixtures("absl_keeps_the_capture_open")
@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("tsak=cifar", "did you mean task?"),
        ("clip=adaptve_layer", "did you mean adaptive_layer?"),
        ("privacy.epsilonn=3", "did you mean privacy.epsilon?"),
        ("epsilon=3", "did you mean privacy.epsilon?"),
        ("+clip.treshold=3", "did you mean clip.threshold?"),
        ("train.epochs=many", "could not be converted to Float"),
        ("model.depth=1.5", "could not be converted to Integer"),
        ("clip=flat clip.mapping={a:b}", "put a plus before a new one"),
        ("train=3", "train=3 has the wrong type"),
        ("privacy=3", "override must be a string"),
        ("nonsense", "cannot be parsed as key=value"),
        ("clip=flat,ghost", "clip=flat,ghost has several values, which are a sweep: add -m."),
        ("task=samsum scale=lite", "scale=lite is not available for this task"),
        ("task=sst2 scale=midi", "scale=midi is not available for this task"),
        ("paths.data=${oc.env:NOT_SET_ANYWHERE}", "paths.data cannot be resolved"),
        ("scale=[null]", "argument of type 'NoneType' is not iterable"),
        (f"optim.beta2=1{'0' * 400}", "int too large to convert to float full_key: optim.beta2"),
        (f"{'x' * 5000}=1", "File name too long"),
        ("model.width=${oc.deprecated:seed}", "model.width=0 must be greater than zero"),
        (f"seed={'9' * 5000}", "Exceeds the limit (4300 digits)"),
        ("seed=½", "special characters in quotes"),
        ("--verbose", "unrecognized arguments"),
        ("--info defaults -m", "Only one of"),
        ("-m seed=0,1 dry_run=true", "there is no key or group dry_run"),
        ("hydra/launcher=slrm", "not one of basic"),
        ("clip flat scale=smoke", "'clip' cannot be parsed as key=value: write it as in clip=flat"),
        ("optim.lr=3", "did you mean optim.learning_rate?"),
        ("clip=flat clip.target_quantile=0.3 scale=smoke", "changes nothing: it has no effect with clip.policy=fixed"),
        ("data.max_length=64 eval.generate.beams=3", "=64 changes nothing: model.name=wide_resnet does not read it"),
        ("-m clip=flat eval.generate.beams=3,4", "=3,4 changes nothing: model.name=wide_resnet does not read it"),
        ("-m clip=flat clip.target_quantile=0.3,0.7", "changes nothing: it has no effect with clip.policy=fixed"),
        ("-m clip=flat,gohst", "did you mean ghost?"),
        ("privacy.epsilon=8,", "cannot be parsed as key=value"),
        ("train.keep=[1,2", "a list as [1,2]"),
        ('clip=flat clip.mapping={"stem*":early}', "a mapping as {a:1}"),
        ("--config-name nope", "Cannot find primary config 'nope'"),
        ("--config-path nope", "Primary config module"),
        ("paths.results=/tmp/a=b", "special characters in quotes"),
        ("paths.data=a[b", "special characters in quotes"),
        ("+clip=flat", "Multiple values for clip"),
        ("scale=smoke hydra/launcher=slurm", "is for sweeps: add -m"),
        ("scale=smoke hydra.launcher.partion=gpu", "there is no key or group hydra.launcher.partion"),
        ("train.epochs=7 train.steps=3", "train.epochs=7 changes nothing: train.steps=3 is given"),
        ("+sweep=search_sst2_optuna", "add -m to run them"),
        ("-m sweep=cifar", "write +sweep=cifar"),
        ("-m +sweep=cifar,glue", "give one sweep at a time"),
        ("-m +sweep=[cifar,glue]", "give one sweep at a time"),
        ("~clip", "~clip would delete a setting"),
        ("-m seed=1,2 ~privacy.epsilon=3", "~privacy.epsilon=3 would delete a setting"),
        ("scale=smoke hydra/sweeper=optuna", "is for sweeps: add -m"),
        ("-m seed=1,2 hydra.launcher.n_jobs=2", "n_jobs (hydra/launcher=joblib and hydra/launcher=slurm have"),
        ("seed=1,2 -m hydra/launcher=joblib hydra.launcher.n_jobs=x", "hydra.launcher.n_jobs=x has the wrong type"),
        ("-m seed=interval(1,2)", "is not a finite list"),
        ("-m clip=flat,ghost privacy.epsilon=3,-3", "in the cell clip=flat privacy.epsilon=-3"),
    ],
)
def test_mistakes_end_with_one_sentence_and_exit_code_2_and_write_nothing(
    tmp_path: Path, arguments: str, words: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", [str(ROOT / "run.py"), *arguments.split()])
    monkeypatch.setattr(warnings, "formatwarning", warnings.formatwarning)  # to be restored: the command sets it
    monkeypatch.setenv("HYDRA_FULL_ERROR", "0")
    code = run.main()
    out, err = capfd.readouterr()
    assert (code, out) == (2, "")
    _is_one_sentence(err, words)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("task=cifar -c job -p optim", "name: sgd"),
        ("--cfg job task=sst2 clip=fixed_layer --resolve --package clip", "threshold: 0.1"),
        ("task=sst2 scale=mini --info defaults", "size/glue/mini"),
        ("--hydra-help", "--multirun"),
        ("-sc query=bash", "clip=fixed_block clip=fixed_layer"),
        ("-m +sweep=cifar scale=mini seed=0 --cfg job", "clip=flat privacy.epsilon=3 task=cifar seed=0"),
        ("--cfg job seed=0,1 -m scale=smoke", "seed=1\ncells: 2, done already: 0\n"),
    ],
)
def test_hydra_flags_are_accepted_in_any_position(
    tmp_path: Path, arguments: str, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(ENVIRONMENT, "COMP_LINE", "run.py clip=fi")
    done = command(tmp_path, *arguments.split())
    assert (done.returncode, done.stderr) == (0, "") and words in done.stdout
    assert list(tmp_path.iterdir()) == []


def test_a_file_with_the_name_of_a_file_of_the_package_is_refused(tmp_path: Path) -> None:
    (tmp_path / "my" / "clip").mkdir(parents=True)
    (tmp_path / "my" / "clip" / "flat.yaml").write_text("name: mine")
    done = command(tmp_path, "-m", "clip=flat,ghost", "--config-dir", "my")
    assert (done.returncode, done.stdout) == (2, "")
    _is_one_sentence(done.stderr, "flat is also the name of a clip of the package: give the file another name")
    assert [path.name for path in tmp_path.iterdir()] == ["my"]


def test_an_unknown_config_package_is_an_error(tmp_path: Path) -> None:
    done = command(tmp_path, "--cfg", "job", "--package", "nope")
    assert (done.returncode, done.stdout, done.stderr) == (2, "", "package 'nope' not found in config\n")


def _is_one_sentence(message: str, words: str) -> None:
    [line] = message.splitlines()
    assert line.startswith("error: ")
    assert words in line


@pytest.fixture
def script(tmp_path: Path) -> Path:
    """run.py with training replaced: clip=ghost raises UserError, seed=2 RuntimeError, seed=9 KeyboardInterrupt."""
    path = tmp_path / "fake_run.py"
    path.write_text(
        textwrap.dedent(
            f"""
            import sys
            from pathlib import Path
            from groupwise.errors import UserError
            from groupwise.cli.main import launch

            def train(config):
                print("ran", config.clip.name, config.seed, flush=True)
                if config.clip.name == "ghost":
                    raise UserError("no data: bring some.")
                if config.seed == 2:
                    raise RuntimeError("a bug")
                if config.seed == 9:
                    raise KeyboardInterrupt

            sys.exit(launch(Path({str(ROOT / "conf")!r}), train))
            """
        )
    )
    return path


@pytest.mark.parametrize(
    ("arguments", "code", "out", "message"),
    [
        ("clip=flat", 0, "ran flat 0\n", r""),
        ("clip=ghost", 2, "ran ghost 0\n", r"error: no data: bring some\.\n"),
        ("seed=2", 1, "ran adaptive_layer 2\n", r"(?s).*Traceback.* in train\n.*RuntimeError: a bug\n"),
        ("seed=9", 130, "ran adaptive_layer 9\n", r".+\n"),
        ("-m clip=ghost,flat", 2, "ran ghost 0\nran flat 0\n", r"(?s)(?!.*Traceback).*1 of 2 cells failed.*"),
    ],
)
def test_user_errors_are_sentences_bugs_keep_tracebacks_and_hydra_leaves_no_files(
    tmp_path: Path, script: Path, arguments: str, code: int, out: str, message: str
) -> None:
    done = command(tmp_path, *arguments.split(), script=script)
    ran = "".join(line for line in done.stdout.splitlines(keepends=True) if line.startswith("ran "))
    assert (done.returncode, ran) == (code, out) and re.fullmatch(message, done.stderr), done.stderr
    assert {path.name for path in tmp_path.iterdir()} == {script.name, *(["results"] if "-m" in arguments else [])}


def test_a_warning_is_one_sentence_without_source_code(tmp_path: Path) -> None:
    script = tmp_path / "warns.py"
    script.write_text(
        "import sys, warnings\nfrom pathlib import Path\nfrom groupwise.cli.main import launch\n"
        "def train(config):\n    warnings.warn('delta is large:\\ngive less')\n"
        f"sys.exit(launch(Path({str(ROOT / 'conf')!r}), train))\n"
    )
    done = command(tmp_path, script=script)
    assert (done.returncode, done.stderr) == (0, "warning: delta is large: give less\n")
