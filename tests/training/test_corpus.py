"""The docstring corpus: reading three docstring layouts, and reading libraries that misbehave."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from deepspeed_provider.training import corpus
from deepspeed_provider.training.code_archive import build_code_archive, training_code
from deepspeed_provider.training.docstrings import bounded, parse, plain

NUMPYDOC = """
    add(x, y) -> int

    Add two numbers. The order does not
    matter, see :func:`~lib.math.sub`.

    Parameters
    ----------
    x, y : int, optional
        What to add.

        .. versionadded:: 1.0
    out : :class:`Out`

    Returns
    -------
    int
        The sum.

    Examples
    --------
    >>> add(1, 2)
    3
"""
GOOGLE = """Log a metric.

    Args:
        key: Metric name,
            as a string.
        value (float, *optional*): Metric value.
        **kwargs: More.

    Returns:
        The ``Run`` that holds it.

    Raises:
        ValueError: never.
"""
SPHINX = """Runs a job.

    :param str job_id: the job
        to run
    :param wait: whether to wait
    :returns: the run's number
    :raises ValueError: never
"""


@pytest.mark.parametrize(
    ("raw", "summary", "parameters", "returns"),
    [
        pytest.param(
            NUMPYDOC,
            "Add two numbers. The order does not matter, see `lib.math.sub`.",
            ["- `x, y` (int, optional): What to add.", "- `out` (Out)"],
            "int: The sum.",
            id="numpydoc",
        ),
        pytest.param(
            GOOGLE,
            "Log a metric.",
            [
                "- `key`: Metric name, as a string.",
                "- `value` (float, optional): Metric value.",
                "- `kwargs`: More.",
            ],
            "The `Run` that holds it.",
            id="google",
        ),
        pytest.param(
            SPHINX,
            "Runs a job.",
            ["- `job_id` (str): the job to run", "- `wait`: whether to wait"],
            "the run's number",
            id="sphinx",
        ),
        pytest.param("Only a sentence.", "Only a sentence.", [], "", id="summary only"),
        pytest.param(
            "A :class:`Row`.\n:class:`Row` opens this line.",
            "A `Row`. `Row` opens this line.",
            [],
            "",
            id="role at the start of a line is no field",
        ),
        pytest.param(
            "Use it so. An example::\n\n    code()\n", "Use it so.", [], "", id="what announces code is left out"
        ),
        pytest.param("", "", [], "", id="empty"),
    ],
)
def test_docstring_layouts(raw, summary, parameters, returns):
    document = parse(raw)
    assert document.summary == summary
    assert [str(parameter) for parameter in document.parameters] == parameters
    assert document.returns == returns


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        pytest.param("One. Two is longer.", "One.", id="whole sentences"),
        pytest.param("alpha beta gamma", "alpha beta ...", id="first sentence too long"),
        pytest.param("Do (i.e. this or that).", "Do (i.e. this ...", id="abbreviation ends no sentence"),
        pytest.param("Short.", "Short.", id="fits"),
    ],
)
def test_text_is_cut_between_sentences(text, expected):
    assert bounded(text, 14) == expected


def test_markup_becomes_plain_text():
    assert plain("See :py:meth:`run <lib.run>`, ``x`` and `docs <https://example.org>`_ [1]_.") == (
        "See `lib.run`, `x` and docs ."
    )


@pytest.fixture
def library(tmp_path, monkeypatch):
    """Writes importable modules of a library that exists only in this test."""
    monkeypatch.syspath_prepend(str(tmp_path))
    package = tmp_path / "madelib"
    package.mkdir()
    (package / "__init__.py").write_text("")

    def write(**modules):
        for name, source in modules.items():
            (package / f"{name}.py").write_text(source)

    return write


API = '''
from json import dumps  # of another library
class Base:
    """A base class for everything here."""
    def go(self, speed):
        """Goes as fast as it is told.

        Args:
            speed: how fast to go, in metres per second
        """
    @property
    def place(self):
        """Where it stands at this moment."""
    def _hidden(self):
        """Nobody should ever ask for this."""
class Derived(Base):
    def go(self, speed):
        """Goes as fast as it is told."""
def here():
    """Object <madelib at 0x7f00aabbccdd> is never shown."""
def see():
    """See another function for what it does."""
UNDOCUMENTED = lambda: None
'''


def test_questions_about_a_module(library):
    library(api=API)
    extraction = corpus.extract("madelib", ["madelib.api"])
    assert extraction.skipped == {}
    assert {pair.prompt: pair.completion for pair in extraction.pairs} == {
        "What is `madelib.api.Base`?": "A base class for everything here.",
        "What does `madelib.api.Base.go` do?": "Goes as fast as it is told.",
        "What are the parameters of `madelib.api.Base.go`?": "- `speed`: how fast to go, in metres per second",
        "What does the property `madelib.api.Base.place` hold?": "Where it stands at this moment.",
    }


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        pytest.param("import os; os._exit(3)", "exit 3", id="ends the process"),
        pytest.param("import os, signal; os.kill(os.getpid(), signal.SIGSEGV)", "exit -11", id="crashes"),
        pytest.param("while True: pass", "not read within 2 s", id="hangs"),
    ],
)
def test_a_library_that_takes_the_process_down_is_skipped(library, source, reason):
    library(bad=source)
    extraction = corpus.extract("madelib", ["madelib.bad"], seconds=2)
    assert extraction.pairs == ()
    assert reason in extraction.skipped["madelib.bad"]


def test_one_bad_module_costs_only_its_own_rows(library):
    library(api=API, bad="raise RuntimeError('no licence')", exits="import sys; sys.exit(4)")
    extraction = corpus.extract("madelib", ["madelib.bad", "madelib.none", "madelib.exits", "madelib.api"])
    assert len(extraction.pairs) == 4
    assert extraction.skipped["madelib.bad"] == "RuntimeError: no licence"
    assert "madelib.none" in extraction.skipped["madelib.none"]
    assert extraction.skipped["madelib.exits"] == "SystemExit: 4"


def test_a_library_that_is_not_there_is_named():
    extraction = corpus.extract("surely_not_installed", ["surely_not_installed.sub"])
    assert dict(extraction.skipped) == {"surely_not_installed.sub": "not installed"}
    assert corpus.installed_versions(["surely_not_installed", "pandas"]).keys() == {"surely_not_installed", "pandas"}


def test_import_leaves_no_files_in_the_home_folder(library, tmp_path, monkeypatch):
    home = tmp_path / "home"
    home.mkdir()
    monkeypatch.setenv("HOME", str(home))
    library(api=API + "\nimport pathlib; pathlib.Path.home().joinpath('dropped').write_text('')\n")
    assert corpus.extract("madelib", ["madelib.api"]).pairs
    assert list(home.iterdir()) == []


def test_reading_again_gives_the_same_rows():
    runs = [corpus.extract("pandas", ["pandas"]) for _ in range(2)]
    assert len(runs[0].pairs) > 500
    assert runs[0] == runs[1]


@pytest.mark.slow
def test_code_that_has_travelled_twice_does_not_hide_the_installed_provider(tmp_path: Path) -> None:
    """Importing Airflow asks every installed provider about itself, ours too."""
    (tmp_path / "other.py").write_text("")
    archives = [build_code_archive((*training_code(), *more), tmp_path) for more in ((), (str(tmp_path / "other.py"),))]
    code = (
        "import sys; sys.path[1:1] = sys.argv[1:]\n"
        "from deepspeed_provider.training import corpus\n"
        "found = corpus.extract('airflow', ['airflow.sdk'])\n"
        "print(len(found.pairs), found.skipped)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, *map(str, archives)],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        timeout=200,
        check=True,
    )
    pairs, skipped = done.stdout.split(maxsplit=1)
    assert int(pairs) > 50, done.stdout
    assert skipped.strip() == "{}"
