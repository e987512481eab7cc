# SPDX-License-Identifier: Apache-2.0
"""A model is found by its name, in a file or folder, in a dict, or on a hub that really answers."""

from __future__ import annotations

import json
import os
import socket
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import ClassVar

import httpx
import pytest
from deepspeed_provider.cli import app
from deepspeed_provider.errors import SpecError
from deepspeed_provider.requested.model_source import (
    LARGEST_CONFIG_BYTES,
    ModelSource,
    counted_model,
    hub_fetch,
    parse_parameter_count,
)
from deepspeed_provider.sizing.catalogue import model_config
from typer.testing import CliRunner

GPT2 = 124_439_808


def only_problem(error: SpecError):
    assert len(error.problems) == 1, error
    return error.problems[0]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text(json.dumps(model_config("gpt2")))
    return model


class TestWhatIsGiven:
    @pytest.mark.parametrize("name", ["gpt2", "openai-community/gpt2", "OpenAI-Community/GPT2", " gpt2 "])
    def test_a_bundled_name(self, name):
        assert ModelSource().model(name).architecture.parameters == GPT2

    def test_a_file_and_its_folder(self, folder):
        source = ModelSource()
        for path in (folder, folder / "config.json"):
            found = source.model(str(path))
            assert (found.name, found.architecture.parameters) == (str(path), GPT2)

    def test_a_relative_path_and_one_from_home(self, folder, monkeypatch):
        monkeypatch.chdir(folder.parent)
        monkeypatch.setenv("HOME", str(folder.parent))
        for path in ("model", "./model", "model/config.json", "~/model"):
            assert ModelSource().model(path).architecture.parameters == GPT2

    def test_a_model_folder_goes_before_a_bundled_name_but_an_empty_folder_does_not(self, tmp_path, monkeypatch):
        monkeypatch.chdir(tmp_path)
        mine = tmp_path / "gpt2"
        mine.mkdir()
        assert ModelSource().model("gpt2").architecture.parameters == GPT2
        (mine / "config.json").write_text(json.dumps(model_config("gpt2") | {"n_layer": 1}))
        assert ModelSource().model("gpt2").architecture.num_layers == 1

    def test_a_config(self):
        found = ModelSource().model(model_config("gpt2") | {"_name_or_path": "mine"})
        assert (found.name, found.architecture.parameters) == ("mine", GPT2)

    def test_a_pipe(self, tmp_path):
        pipe = tmp_path / "pipe"
        os.mkfifo(pipe)
        writer = threading.Thread(target=pipe.write_text, args=(json.dumps(model_config("gpt2")),))
        writer.start()
        assert ModelSource().model(str(pipe)).architecture.parameters == GPT2
        writer.join()

    def test_each_is_read_once(self, folder):
        source = ModelSource()
        first = source.model(str(folder))
        (folder / "config.json").unlink()
        assert source.model(str(folder)) is first


BROKEN = {
    "cut short": (b'{"model_type": "llama", ', "is not JSON"),
    "a list": (b"[1]", "holds a JSON list, not an object"),
    "a number": (b"7", "holds a JSON int, not an object"),
    "empty": (b"", "is not JSON"),
    "no text": (b"\xff\xfe\x00{", "is not JSON"),
    "too deep": (b"[" * 200_000, "is not JSON"),
    "a number of 5000 digits": (b'{"hidden_size": ' + b"9" * 5000 + b"}", "is not JSON"),
    "a weights file": (b" " * (LARGEST_CONFIG_BYTES + 1), "is too large to be a config"),
}


class TestWhatCannotBeRead:
    @pytest.mark.parametrize(("content", "said"), BROKEN.values(), ids=BROKEN)
    def test_a_file(self, tmp_path, content, said):
        file = tmp_path / "config.json"
        file.write_bytes(content)
        with pytest.raises(SpecError) as caught:
            ModelSource().model(str(file))
        problem = only_problem(caught.value)
        assert (problem.field, problem.value) == ("model", str(file))
        assert said in problem.problem
        assert problem.suggestion

    @pytest.mark.parametrize(
        ("given", "said"),
        [
            ("./nothing.json", "there is no such file"),
            ("nothing.json", "there is no such file"),
            ("/nowhere/model", "there is no such file"),
            ("~/nothing-there", "there is no such file"),
            ("/dev/zero", "is too large to be a config"),
            ("a\0b", "is not in the bundled catalogue"),
            ("x" * 5000, "is not in the bundled catalogue"),
            ("Llama-2-7b-hff", "is not in the bundled catalogue"),
            ("", "is neither a name"),
            (7, "is neither a name"),
            (["gpt2"], "is neither a name"),
            (None, "is neither a name"),
        ],
        ids=lambda value: repr(value)[:20],
    )
    def test_no_model(self, given, said):
        with pytest.raises(SpecError) as caught:
            ModelSource().model(given)
        assert said in only_problem(caught.value).problem

    def test_a_folder_without_a_config(self, tmp_path):
        with pytest.raises(SpecError, match=r"is a folder without a config\.json"):
            ModelSource().model(str(tmp_path))

    def test_a_near_name_is_proposed(self):
        with pytest.raises(SpecError, match="meta-llama/Llama-2-7b-hf"):
            ModelSource().model("Llama-2-7b-hff")

    @pytest.mark.parametrize(
        ("config", "fields"),
        [
            ({"num_hidden_layers": 10**18, "hidden_size": 10**200}, {"num_hidden_layers", "hidden_size"}),
            ({"hidden_size": float("nan"), "num_hidden_layers": float("inf")}, {"hidden_size", "num_hidden_layers"}),
        ],
        ids=["huge", "not finite"],
    )
    def test_numbers_that_no_model_has(self, config, fields):
        whole = model_config("llama-2-7b-hf") | {"model_type": "qwen2_moe"} | config
        with pytest.raises(SpecError) as caught:
            ModelSource().model(whole)
        assert {problem.field for problem in caught.value.problems} >= fields


class TestParameterCounts:
    @pytest.mark.parametrize(
        ("given", "count"),
        [
            ("7B", 7_000_000_000),
            ("7b", 7_000_000_000),
            (" 1.3 B ", 1_300_000_000),
            ("350M", 350_000_000),
            ("7e9", 7_000_000_000),
            ("1.5e+9", 1_500_000_000),
            ("2T", 2_000_000_000_000),
            ("7000000000", 7_000_000_000),
            ("7,000,000,000", 7_000_000_000),
            ("7_000_000_000", 7_000_000_000),
            (7_000_000_000, 7_000_000_000),
            (7e9, 7_000_000_000),
            ("0.5b", 500_000_000),
        ],
        ids=str,
    )
    def test_ways_to_write_one(self, given, count):
        assert parse_parameter_count(given) == count

    @pytest.mark.parametrize(
        "given",
        ["", "seven", "-7B", "7G", "7BB", "1e99", "1e16", "NaN", "Infinity", True, None, -5, float("nan"), [7], 10**30],
        ids=lambda value: repr(value)[:20],
    )
    def test_no_count(self, given):
        with pytest.raises(SpecError) as caught:
            parse_parameter_count(given)
        problem = only_problem(caught.value)
        assert problem.field == "parameters"
        assert "7B" in problem.suggestion

    @pytest.mark.parametrize("count", ["1.1B", "7B", "70B", "1000T"])
    def test_the_model_has_exactly_so_many(self, count):
        found = counted_model(count)
        assert found.architecture.parameters == parse_parameter_count(count)
        assert found.architecture.warnings


class Hub(BaseHTTPRequestHandler):
    """What a hub answers by the model's name; keeps the requests."""

    seen: ClassVar[list[tuple[str, str | None]]] = []

    def do_GET(self) -> None:
        self.seen.append((self.path, self.headers.get("Authorization")))
        name = self.path.removeprefix("/").partition("/resolve/")[0]
        config = json.dumps(model_config("gpt2")).encode()
        status, body = {
            "org/there": (200, config),
            "moved": (200, config),
            "org/gated": (403, b"no"),
            "org/broken": (500, b"no"),
            "org/page": (200, b"<html>"),
        }.get(name, (404, b"no"))
        if name == "org/moved":
            status, body = 307, b""
        self.send_response(status)
        if status == 307:
            self.send_header("Location", "/moved/resolve/main/config.json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *args: object) -> None:
        """Quiet."""


@pytest.fixture
def hub() -> Iterator[str]:
    Hub.seen.clear()
    with ThreadingHTTPServer(("127.0.0.1", 0), Hub) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


class TestHub:
    @pytest.mark.parametrize("name", ["org/there", "org/moved"])
    def test_a_config_is_fetched_once(self, hub, name):
        source = ModelSource(fetch=hub_fetch(environment={"HF_ENDPOINT": f"{hub}/", "HF_TOKEN": "secret"}))
        for _ in range(2):
            assert source.model(name).architecture.parameters == GPT2
        assert Hub.seen[0] == (f"/{name}/resolve/main/config.json", "Bearer secret")
        assert len([path for path, _ in Hub.seen if name in path]) == 1

    @pytest.mark.parametrize(
        ("name", "said"),
        [
            ("org/gated", "not for everybody"),
            ("org/absent", "answers 404"),
            ("org/broken", "answers 500"),
            ("org/page", "is not JSON"),
        ],
    )
    def test_an_answer_of_no_use(self, hub, name, said):
        source = ModelSource(fetch=hub_fetch(environment={"HF_ENDPOINT": hub, "HF_TOKEN": "secret"}))
        for _ in range(2):
            with pytest.raises(SpecError, match=said):
                source.model(name)
        assert len(Hub.seen) == 1, "an error is remembered too"

    def test_a_bundled_name_or_a_path_needs_no_network(self, hub, folder):
        source = ModelSource(fetch=hub_fetch(environment={"HF_ENDPOINT": hub}))
        source.model("gpt2")
        source.model(str(folder))
        for wrong in ("./absent", "../../admin", "a b", "org/model/more", "absent.json", "https://else.where/x"):
            with pytest.raises(SpecError):
                source.model(wrong)
        assert not Hub.seen

    def test_without_the_wish_no_network_is_used(self, hub, monkeypatch):
        monkeypatch.setenv("HF_ENDPOINT", hub)
        with pytest.raises(SpecError, match="is not in the bundled catalogue"):
            ModelSource().model("org/there")
        assert not Hub.seen

    def test_the_command_line_has_the_wish(self, hub):
        words = ["estimate", "--model", "org/there", "--json"]
        environment = {"HF_ENDPOINT": hub, "HF_TOKEN": "secret"}
        without = CliRunner().invoke(app, words, env=environment)
        assert without.exit_code == 2
        assert not Hub.seen
        answer = CliRunner().invoke(app, [*words, "--download"], env=environment)
        assert json.loads(answer.stdout)["parameters"]["total"] == GPT2

    def test_nobody_listens(self):
        with socket.socket() as closed:
            closed.bind(("127.0.0.1", 0))
            port = closed.getsockname()[1]
        fetch = hub_fetch(environment={"HF_ENDPOINT": f"http://127.0.0.1:{port}", "HF_TOKEN": "secret"})
        with pytest.raises(SpecError, match="cannot be fetched"):
            ModelSource(fetch=fetch).model("org/there")

    def test_nobody_answers(self):
        with socket.socket() as silent:
            silent.bind(("127.0.0.1", 0))
            silent.listen()
            address = f"http://127.0.0.1:{silent.getsockname()[1]}"
            client = httpx.Client(timeout=0.2)
            fetch = hub_fetch(client, environment={"HF_ENDPOINT": address, "HF_TOKEN": "secret"})
            with pytest.raises(SpecError, match="cannot be fetched"):
                ModelSource(fetch=fetch).model("org/there")

    def test_an_address_that_is_none(self):
        fetch = hub_fetch(environment={"HF_ENDPOINT": "nowhere", "HF_TOKEN": "secret"})
        with pytest.raises(SpecError, match="cannot be fetched"):
            ModelSource(fetch=fetch).model("org/there")
