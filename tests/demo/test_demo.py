"""``make run`` as a newcomer meets it: real Airflow, real Spark, real model, real MLflow."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import httpx
import pytest
from backends.processes import mentioning, wait_for
from deepspeed_provider.local.airflow_api import AirflowApi
from deepspeed_provider.local.demo import only_session
from deepspeed_provider.local.processes import free_port

from demo import browser

ROOT = Path(__file__).parents[2]
SCREENSHOTS = ROOT / "screenshots"
TRAINING = "finetune: training, step"
PERPLEXITY = re.compile(r"perplexity\s*│\s*([\d.]+)\s*│\s*([\d.]+)")


class Demo:
    """A running ``deepspeed-provider demo`` whose output is read as it comes."""

    def __init__(self, home: Path, *words: str) -> None:
        self.home = home
        self.airflow_port, self.mlflow_port = free_port(), free_port()
        self.lines: list[str] = []
        self.seconds_until_training: float | None = None
        self._started_s = time.monotonic()
        self.process = subprocess.Popen(
            [
                *(sys.executable, "-m", "deepspeed_provider.cli", "demo", "--home", str(home)),
                *("--airflow-port", str(self.airflow_port), "--mlflow-port", str(self.mlflow_port), *words),
            ],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            cwd=ROOT,
        )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.append(line.rstrip())
            if TRAINING in line and self.seconds_until_training is None:
                self.seconds_until_training = time.monotonic() - self._started_s

    @property
    def text(self) -> str:
        return "\n".join(self.lines)

    @property
    def words(self) -> str:
        """The text without the frame and the line breaks of a terminal."""
        return " ".join(self.text.replace("│", " ").split())

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.airflow_port}"

    def wait_for(self, text: str, seconds: float) -> None:
        wait_for(
            lambda: text in self.text or self.process.poll() is not None,
            seconds,
            f"the demonstration said {text!r}. It said: {self.text[-4000:]}",
        )
        assert text in self.text, self.text[-6000:]

    def end(self, seconds: float) -> int:
        status = self.process.wait(seconds)
        self._reader.join(10)
        return status


@pytest.fixture(scope="module")
def first_demo(tmp_path_factory):
    """A newcomer's first run, finished and up. The slow tests here share it, in their order; the last one ends it."""
    demo = Demo(tmp_path_factory.mktemp("newcomer") / "state")
    try:
        demo.wait_for("Everything stays up until Ctrl-C", 1800)
        yield demo
    finally:
        _kill(demo)


@pytest.mark.slow
@pytest.mark.timeout(3000)
def test_a_newcomers_first_run(first_demo):
    assert "Registered as" in first_demo.text
    found = PERPLEXITY.search(first_demo.text)
    assert found, first_demo.text[-3000:]
    base, tuned = map(float, found.groups())
    print(f"\nheld-out perplexity: base {base}, tuned {tuned}")
    assert tuned <= base / 2, "the tuned model's perplexity is at most half of the base model's"
    for progress in (TRAINING, "loss", "tokens/s"):
        assert progress in first_demo.text
    _mlflow_holds_it(first_demo)
    _links_lead_there(first_demo)


@pytest.mark.slow
@pytest.mark.timeout(3000)
@pytest.mark.skipif(not browser.CHROMIUM, reason="screenshots need chromium or google-chrome")
def test_what_a_newcomer_sees_in_a_browser(first_demo):
    _look(first_demo)


@pytest.mark.slow
@pytest.mark.timeout(3000)
def test_a_newcomer_stops_it_and_runs_it_again(first_demo):
    demo, home = first_demo, first_demo.home
    try:
        demo.process.send_signal(signal.SIGINT)
        assert demo.end(90) == 0
    finally:
        _kill(demo)
    assert not mentioning(str(home)), "no process is left after Ctrl-C"

    # The second run finds model and data prepared, and trains soon. A person stops it in the middle.
    short = {"max_steps": 8, "evaluation_rows": 16, "generations": 1}
    second = Demo(home, "--conf", json.dumps(short))
    try:
        second.wait_for(TRAINING, 600)
        print(f"seconds until training: {demo.seconds_until_training:.0f}, {second.seconds_until_training:.0f}")
        assert second.seconds_until_training < 0.8 * demo.seconds_until_training
        second.process.send_signal(signal.SIGINT)
        assert second.end(90) == 0
    finally:
        _kill(second)
    assert "Traceback" not in second.text
    assert not mentioning(str(home)), "no process is left after Ctrl-C in the middle of training"

    third = Demo(home, "--once", "--conf", json.dumps(short))
    try:
        assert third.end(900) == 0, third.text[-6000:]
    finally:
        _kill(third)
    assert "version 2" in third.text
    assert not mentioning(str(home)), "no process is left after a run with --once"


def _kill(demo: Demo) -> None:
    if demo.process.poll() is None:
        demo.process.send_signal(signal.SIGTERM)
        demo.process.wait(60)


def _mlflow_holds_it(demo: Demo) -> None:
    """Metrics of both stages in one run, the registered model and its alias."""
    api = f"http://127.0.0.1:{demo.mlflow_port}/api/2.0/mlflow"
    models = httpx.get(f"{api}/registered-models/search").json()["registered_models"]
    version = models[0]["latest_versions"][0]
    assert models[0]["aliases"][0]["alias"] == "champion"
    run = httpx.get(f"{api}/runs/get", params={"run_id": version["run_id"]}).json()["run"]
    metrics = {metric["key"] for metric in run["data"]["metrics"]}
    assert {"loss", "learning_rate", "tokens_per_second", "base_perplexity", "tuned_perplexity"} <= metrics
    assert run["info"]["status"] == "FINISHED"


def _links_lead_there(demo: Demo) -> None:
    """The task's buttons, long after it was deferred and resumed."""
    api = AirflowApi.of_home(demo.url, demo.home / "airflow")
    links = api.call("GET", f"/dags/finetune/dagRuns/{_run_id(demo)}/taskInstances/finetune/links")["extra_links"]
    assert {link for link in links.values() if f":{demo.mlflow_port}/" in (link or "")}, links
    # Those of a workspace lead nowhere here.
    assert {name for name, link in links.items() if link} == {"MLflow run", "Spark UI"}, links


def _run_id(demo: Demo) -> str:
    return re.search(r"/dags/finetune/runs/(\S+)", demo.text).group(1)


def _look(demo: Demo) -> None:
    """Screenshots for a person, and the words that must be on them."""
    SCREENSHOTS.mkdir(exist_ok=True)
    password = json.loads((demo.home / "airflow" / "passwords.json").read_text())["admin"]
    run_id = _run_id(demo)
    with browser.logged_in(demo.url, password) as page:
        form = browser.trigger_form(page, demo.url, SCREENSHOTS / "trigger-form.png")
        run = browser.finished_run(page, demo.url, run_id, SCREENSHOTS / "finished-run.png")
        log = browser.task_log(page, demo.url, run_id, "finetune", SCREENSHOTS / "finetune-log.png")
    for word in ("Model and method", "Data", "LoRA", "Revision", "Learning rate"):
        assert word in form, form
    assert "DeepSpeedFineTuneOperator" in log, log
    for task in ("validate", "prepare", "finetune", "evaluate", "register"):
        assert task in run, run
    assert "MLflow" in log, log


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--conf", "{nonsense"], "--conf is not JSON"),
        (["--conf", "[1]"], "--conf must be a JSON object, not list"),
        (["--dags", "no-such-folder"], "There are no DAG files in"),
    ],
    ids=["conf-no-json", "conf-no-object", "no-dags"],
)
def test_bad_input_starts_nothing(tmp_path, words, message):
    demo = Demo(tmp_path / "state", *words)
    assert demo.end(60) == 2
    assert message in demo.words
    assert not mentioning(str(tmp_path))


def test_a_second_demonstration_from_one_folder_is_refused(tmp_path):
    home = tmp_path / "state"
    home.mkdir()
    with only_session(home):
        second = Demo(home)
        assert second.end(60) == 2
    assert f"Another demonstration is running from {home}." in second.words
    assert not mentioning(str(tmp_path))
