# SPDX-License-Identifier: Apache-2.0
"""Volumes, the workspace's own files and secrets: what is kept, and what is refused."""

from __future__ import annotations

import base64
import io
from typing import Any

import httpx
import pytest
from databricks.sdk import WorkspaceClient
from deepspeed_provider.testing.clock import START_MS, VirtualClock
from deepspeed_provider.testing.files import LARGEST_IMPORT_BYTES, Files
from deepspeed_provider.testing.workspace import FakeWorkspace
from hypothesis import given
from hypothesis import strategies as st

from testing.asking import Asking

VOLUME = "/Volumes/main/default/models"
HELLO = base64.b64encode(b"hello").decode()


@pytest.mark.parametrize(
    "name", ["plain.txt", "two words", "per%20cent", "100%", "Grüße", "a+b", "q?x=1", "#1", "[x]", "it's;fine&=,"]
)
def test_a_file_keeps_its_name(workspace: FakeWorkspace, client: WorkspaceClient, name: str) -> None:
    client.files.upload(f"{VOLUME}/{name}", io.BytesIO(b"x"))
    assert list(workspace.files.contents) == [f"{VOLUME}/{name}"]
    assert [entry.name for entry in client.files.list_directory_contents(VOLUME)] == [name]
    assert client.files.get_metadata(f"{VOLUME}/{name}").content_length == 1


@pytest.mark.parametrize(
    "content",
    [b"", b"\x00\xff\r\n", b"{", b'{"run_id": 1}', b"x" * 2_000_000],
    ids=["none", "any", "{", "json", "2 MB"],
)
def test_a_file_keeps_its_bytes(client: WorkspaceClient, content: bytes) -> None:
    client.files.upload(f"{VOLUME}/f", io.BytesIO(content))
    downloaded = client.files.download(f"{VOLUME}/f").contents
    assert downloaded is not None
    assert downloaded.read() == content


@pytest.mark.parametrize(
    ("overwrite", "status", "kept"),
    [
        pytest.param("", 204, b"new", id="unspecified"),
        pytest.param("?overwrite=true", 204, b"new", id="true"),
        pytest.param("?overwrite=false", 409, b"old", id="false"),
    ],
)
def test_a_file_is_overwritten_unless_told_not_to(
    workspace: FakeWorkspace, asking: Asking, overwrite: str, status: int, kept: bytes
) -> None:
    workspace.files.write(f"{VOLUME}/f", b"old")
    assert asking.http.put(f"2.0/fs/files{VOLUME}/f{overwrite}", content=b"new").status_code == status
    assert workspace.files.contents == {f"{VOLUME}/f": kept}


@pytest.mark.parametrize("method", ["GET", "PUT", "DELETE"])
@pytest.mark.parametrize("kind", ["files", "directories"])
@pytest.mark.parametrize("path", ["/Workspace/Shared/f", "/Volumes/main/default", "/tmp/f"])
def test_the_files_api_knows_volumes_only(asking: Asking, method: str, kind: str, path: str) -> None:
    response = asking.http.request(method, f"2.0/fs/{kind}{path}", content=b"" if method == "PUT" else None)
    assert (response.status_code, response.json()["error_code"]) == (400, "INVALID_PARAMETER_VALUE")


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        pytest.param("GET", f"files{VOLUME}/none", 404, id="download"),
        pytest.param("HEAD", f"files{VOLUME}/none", 404, id="look at"),
        pytest.param("DELETE", f"files{VOLUME}/none", 404, id="delete"),
        pytest.param("GET", f"directories{VOLUME}/none", 404, id="list"),
        pytest.param("HEAD", f"directories{VOLUME}/none", 404, id="look at a folder"),
        pytest.param("DELETE", f"directories{VOLUME}/none", 404, id="delete a folder"),
        pytest.param("GET", f"directories{VOLUME}", 200, id="list a volume"),
        pytest.param("DELETE", f"directories{VOLUME}/full", 400, id="delete a folder that is not empty"),
    ],
)
def test_what_is_not_there(workspace: FakeWorkspace, asking: Asking, method: str, path: str, status: int) -> None:
    workspace.files.write(f"{VOLUME}/full/f", b"")
    assert asking.http.request(method, f"2.0/fs/{path}").status_code == status


def test_a_long_listing_has_pages(workspace: FakeWorkspace, asking: Asking) -> None:
    for number in range(1005):
        workspace.files.write(f"{VOLUME}/f{number:04d}", b"")
    first = asking.get(f"2.0/fs/directories{VOLUME}", page_size=5000)
    second = asking.get(f"2.0/fs/directories{VOLUME}", page_token=first["next_page_token"])
    assert (len(first["contents"]), len(second["contents"]), "next_page_token" in second) == (1000, 5, False)


names = st.text(st.characters(codec="utf-8", exclude_characters="/\x00", exclude_categories=["Cc", "Cs"]), min_size=1)
paths = st.lists(names.filter(lambda name: name not in (".", "..")), min_size=1, max_size=3).map("/".join)


@given(written=st.dictionaries(paths, st.binary(), max_size=6))
def test_walking_through_the_listings_finds_every_file(written: dict[str, bytes]) -> None:
    files = Files(VirtualClock(), user="me")
    for path, data in written.items():
        files.write(f"{VOLUME}/{path}", data)

    def walk(folder: str) -> dict[str, int]:
        found = {}
        for entry in files.listing(folder, {})["contents"]:
            # One name can be a file's and a folder's here; a real volume would refuse the second.
            if entry["path"] in files.contents:
                found[entry["path"]] = entry["file_size"]
            if any(path.startswith(f"{entry['path']}/") for path in files.contents):
                found |= walk(entry["path"])
        return found

    assert walk(VOLUME) == {f"{VOLUME}/{path}": len(data) for path, data in written.items()}


@pytest.mark.parametrize(
    ("sent", "status", "error_code"),
    [
        pytest.param({}, 400, "INVALID_PARAMETER_VALUE", id="no path"),
        pytest.param({"path": "f"}, 400, "INVALID_PARAMETER_VALUE", id="a relative path"),
        pytest.param({"path": "/Shared/f", "format": "ZIP"}, 400, "INVALID_PARAMETER_VALUE", id="a strange format"),
        pytest.param({"path": "/Shared/f", "content": "%"}, 400, "INVALID_PARAMETER_VALUE", id="no base64"),
        pytest.param({"path": "/Shared/none/f"}, 404, "RESOURCE_DOES_NOT_EXIST", id="no parent"),
        pytest.param({"path": "/Shared/old"}, 400, "RESOURCE_ALREADY_EXISTS", id="there already"),
        pytest.param({"path": "/Users"}, 400, "RESOURCE_ALREADY_EXISTS", id="a folder"),
        pytest.param(
            {"path": "/Shared/f", "content": base64.b64encode(bytes(LARGEST_IMPORT_BYTES + 1)).decode()},
            400,
            "MAX_NOTEBOOK_SIZE_EXCEEDED",
            id="too large",
        ),
    ],
)
def test_a_wrong_import_is_refused(
    workspace: FakeWorkspace, asking: Asking, sent: dict[str, Any], status: int, error_code: str
) -> None:
    workspace.files.write("/Workspace/Shared/old", b"old")
    with pytest.raises(httpx.HTTPStatusError) as error:
        asking.post("2.0/workspace/import", {"content": HELLO, **sent})
    response = error.value.response
    assert (response.status_code, response.json()["error_code"]) == (status, error_code)
    assert workspace.files.contents == {"/Workspace/Shared/old": b"old"}


@pytest.mark.parametrize("path", ["/Shared/f", "/Workspace/Shared/f"])
def test_a_workspace_path_has_a_mount_point_or_none(workspace: FakeWorkspace, asking: Asking, path: str) -> None:
    asking.post("2.0/workspace/import", {"path": path, "content": HELLO, "format": "AUTO"})
    asking.post("2.0/workspace/import", {"path": path, "content": HELLO, "format": "AUTO", "overwrite": True})
    assert workspace.files.contents == {"/Workspace/Shared/f": b"hello"}
    shown = asking.get("2.0/workspace/get-status", path=path)
    assert (shown["path"], shown["size"], shown["modified_at"]) == ("/Shared/f", 5, START_MS)


def test_folders_of_the_workspace(workspace: FakeWorkspace, asking: Asking) -> None:
    asking.post("2.0/workspace/mkdirs", {"path": "/Shared/a/b"})
    asking.post("2.0/workspace/mkdirs", {"path": "/Shared/a/b"})
    asking.post("2.0/workspace/import", {"path": "/Shared/a/b/f", "content": HELLO})
    for path, inside in (("/Shared", "/Shared/a"), ("/Shared/a/b", "/Shared/a/b/f"), ("/Shared/a/b/f",) * 2):
        assert [each["path"] for each in asking.get("2.0/workspace/list", path=path)["objects"]] == [inside]
    with pytest.raises(httpx.HTTPStatusError, match="RESOURCE_ALREADY_EXISTS"):
        asking.post("2.0/workspace/mkdirs", {"path": "/Shared/a/b/f/g"})
    with pytest.raises(httpx.HTTPStatusError, match="DIRECTORY_NOT_EMPTY"):
        asking.post("2.0/workspace/delete", {"path": "/Shared/a"})
    asking.post("2.0/workspace/delete", {"path": "/Shared/a", "recursive": True})
    with pytest.raises(httpx.HTTPStatusError, match="RESOURCE_DOES_NOT_EXIST"):
        asking.get("2.0/workspace/list", path="/Shared/a/b")
    assert workspace.files.contents == {}


@pytest.mark.parametrize(
    ("path", "sent", "status"),
    [
        pytest.param("scopes/create", {}, 400, id="no scope"),
        pytest.param("scopes/create", {"scope": "s"}, 400, id="a scope twice"),
        pytest.param("scopes/delete", {"scope": "none"}, 404, id="delete an unknown scope"),
        pytest.param("put", {"scope": "none", "key": "k", "string_value": "v"}, 404, id="an unknown scope"),
        pytest.param("put", {"scope": "s", "string_value": "v"}, 400, id="no key"),
        pytest.param("put", {"scope": "s", "key": "k"}, 400, id="no value"),
        pytest.param(
            "put", {"scope": "s", "key": "k", "string_value": "v", "bytes_value": HELLO}, 400, id="two values"
        ),
        pytest.param("put", {"scope": "s", "key": "k", "bytes_value": "/w=="}, 400, id="no text"),
        pytest.param("delete", {"scope": "s", "key": "none"}, 404, id="delete an unknown key"),
    ],
)
def test_a_wrong_secret_is_refused(
    workspace: FakeWorkspace, asking: Asking, path: str, sent: dict[str, str], status: int
) -> None:
    workspace.secrets.scopes["s"] = {"old": "value"}
    assert asking.http.post(f"2.0/secrets/{path}", json=sent).status_code == status
    assert workspace.secrets.scopes == {"s": {"old": "value"}}


def test_a_list_of_secrets_tells_no_values(workspace: FakeWorkspace, asking: Asking) -> None:
    asking.post("2.0/secrets/scopes/create", {"scope": "s"})
    asking.post("2.0/secrets/put", {"scope": "s", "key": "k", "string_value": "hf_secret"})
    workspace.advance(60)
    listed = asking.get("2.0/secrets/list", scope="s")
    assert listed == {"secrets": [{"key": "k", "last_updated_timestamp": START_MS}]}
    with pytest.raises(httpx.HTTPStatusError, match="RESOURCE_DOES_NOT_EXIST"):
        asking.get("2.0/secrets/get", scope="s", key="none")


def test_a_cluster_sees_what_a_reference_stands_for(workspace: FakeWorkspace) -> None:
    workspace.secrets.scopes["s"] = {"k": "hf_1", "j": "hf_2"}
    assert workspace.secrets.resolve("{{secrets/s/k}}:{{secrets/s/j}}") == "hf_1:hf_2"
    assert workspace.secrets.resolve("{{params.k}}") == "{{params.k}}"
    with pytest.raises(KeyError):
        workspace.secrets.resolve("{{secrets/s/none}}")
