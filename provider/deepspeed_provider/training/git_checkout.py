# SPDX-License-Identifier: Apache-2.0
"""The user's repository on a rank's machine: one commit for all ranks, and no credential on a command line."""

from __future__ import annotations

import base64
import os
import subprocess
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from urllib.parse import urlsplit

from . import failures, storage

# Of the cluster; from a secret scope, where the repository is private.
TOKEN_VARIABLE = "GIT_TOKEN"
# GitHub and Azure DevOps take any name beside a token; GitLab takes ``oauth2``, Bitbucket ``x-token-auth``.
USERNAME_VARIABLE = "GIT_USERNAME"
USERNAME = "x-access-token"
COMMIT_FILE = "git-commit"
AGREED_WITHIN_S = 300.0


def checkout(
    source: Mapping[str, str],
    output_uri: str,
    folder: Path,
    *,
    is_first: bool,
    sleep: Callable[[float], None] = time.sleep,
) -> Path:
    """Makes ``folder`` a working tree of ``git_url`` at ``git_commit``, ``git_tag``, ``git_branch`` or its head.

    A branch may move while ranks start: the first rank looks, and leaves the commit for the others in ``output_uri``.
    Raises InputError with what git says.
    """
    url, commit = source["git_url"], source.get("git_commit")
    if commit is None:
        uri = storage.join(output_uri, COMMIT_FILE)
        if is_first:
            commit = _tip(url, source)
            storage.write_text(uri, commit)
        else:
            commit = _told(uri, sleep)
    _git(url, "init", "--quiet", str(folder))
    try:
        _git(url, "-C", str(folder), "fetch", "--quiet", "--depth=1", url, commit)
    except failures.InputError:
        # A server may give out single commits or not, and one over plain files has no depth.
        _git(url, "-C", str(folder), "fetch", "--quiet", url, "+refs/heads/*:refs/remotes/origin/*", "--tags")
    _git(url, "-C", str(folder), "checkout", "--quiet", "--detach", commit)
    if is_first:
        print(f"{url} at commit {commit}", flush=True)  # noqa: T201  (for who reads the run's output)
    return folder


def _tip(url: str, source: Mapping[str, str]) -> str:
    """The commit that a tag, a branch or the repository's head names now."""
    if "git_tag" in source:
        wanted, text = f"refs/tags/{source['git_tag']}", f"git_tag = {source['git_tag']!r}"
    elif "git_branch" in source:
        wanted, text = f"refs/heads/{source['git_branch']}", f"git_branch = {source['git_branch']!r}"
    else:
        wanted, text = "HEAD", "git_url"
    lines = [line.split("\t", 1) for line in _git(url, "ls-remote", url, wanted, f"{wanted}^{{}}")]
    found = {name: commit for commit, name in lines}
    # An annotated tag is an object of its own; peeled, it is the commit.
    commit = found.get(f"{wanted}^{{}}") or found.get(wanted)
    if commit is None:
        raise failures.InputError(f"{text}: there is nothing of this name in {url}.")
    return commit


def _told(uri: str, sleep: Callable[[float], None]) -> str:
    pause_s = 0.5
    for _ in range(int(AGREED_WITHIN_S / pause_s)):
        if storage.exists(uri) and (commit := storage.read_text(uri).strip()):
            return commit
        sleep(pause_s)
    raise RuntimeError(f"the first rank told no commit within {AGREED_WITHIN_S:g} s ({uri})")


def _git(url: str, *words: str) -> list[str]:
    """Lines of its output."""
    try:
        done = subprocess.run(
            ["git", *words],
            env={**os.environ, "GIT_TERMINAL_PROMPT": "0", **credentials(url, os.environ)},
            capture_output=True,
            text=True,
            check=False,
        )
    except FileNotFoundError:
        raise failures.InputError("git_source: the cluster has no git. Give the script's file instead.") from None
    if done.returncode:
        said = done.stderr.strip().splitlines() or [f"git ended with status {done.returncode}"]
        hint = f" A private repository needs {TOKEN_VARIABLE} among the cluster's variables."
        raise failures.InputError(f"git_source: {said[-1]} ({url}).{'' if TOKEN_VARIABLE in os.environ else hint}")
    return done.stdout.splitlines()


def credentials(url: str, environment: Mapping[str, str]) -> dict[str, str]:
    """Variables by which git sends the token to the repository's host, encrypted, and to no other."""
    parts, token = urlsplit(url), environment.get(TOKEN_VARIABLE)
    if not token or parts.scheme != "https":
        return {}
    pair = base64.b64encode(f"{environment.get(USERNAME_VARIABLE) or USERNAME}:{token}".encode()).decode()
    return {
        "GIT_CONFIG_COUNT": "1",
        "GIT_CONFIG_KEY_0": f"http.{parts.scheme}://{parts.netloc}/.extraHeader",
        "GIT_CONFIG_VALUE_0": f"Authorization: Basic {pair}",
    }
