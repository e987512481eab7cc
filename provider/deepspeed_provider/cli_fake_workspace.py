# SPDX-License-Identifier: Apache-2.0
"""``deepspeed-provider fake-workspace``: a fake Databricks workspace in the foreground, for trying Airflow's UI."""

from __future__ import annotations

import errno
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Annotated, Final

import typer
from rich.console import Console
from rich.text import Text

from deepspeed_provider.errors import did_you_mean
from deepspeed_provider.testing import endings

if TYPE_CHECKING:
    from deepspeed_provider.testing.workspace import FakeWorkspace

CLOUDS: Final = ("aws", "azure", "gcp")
LOOK_SECONDS: Final = 0.2

# What a run can do, by the names of the functions in ``endings``.
SCENARIOS: Final[Mapping[str, Callable[[], endings.Ending]]] = {
    "fails": lambda: endings.fails("ValueError: scripted"),
    **{
        make.__name__.replace("_", "-"): make
        for make in (
            endings.host_killed,
            endings.internal_error,
            endings.cluster_ended_by_somebody,
            endings.library_failure,
            endings.out_of_gpu_memory,
            endings.spot_loss,
            endings.stock_out,
            endings.succeeds,
            endings.succeeds_with_failures,
        )
    },
}


def fake_workspace(
    port: Annotated[int, typer.Option(min=0, max=65535, help="0 takes a free one.")] = 8123,
    cloud: Annotated[str, typer.Option(help="Whose node types it has: aws, azure or gcp.")] = "aws",
    speed: Annotated[float, typer.Option(min=0.0, help="Seconds there in one second here.")] = 60.0,
    scenario: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME", help=f"What the next run does; repeat it for the runs after. {', '.join(SCENARIOS)}."
        ),
    ] = None,
    fault_share: Annotated[
        float,
        typer.Option(
            min=0.0,
            max=1.0,
            help="Share of requests that go wrong: lost, late, sent twice, or answered with an error that passes.",
        ),
    ] = 0.0,
) -> None:
    """Serve a fake Databricks workspace until Ctrl-C, and tell of each request. Nothing trains in it."""
    words = scenario or []
    problems = [
        *([] if cloud in CLOUDS else [f"--cloud {cloud!r} is none. {did_you_mean(cloud, CLOUDS)}"]),
        *(f"--scenario {word!r} is none. {did_you_mean(word, SCENARIOS)}" for word in words if word not in SCENARIOS),
    ]
    if problems:
        _refuse(problems)
    from deepspeed_provider.testing.faults import RandomFaults
    from deepspeed_provider.testing.workspace import FakeWorkspace

    workspace = FakeWorkspace(cloud=cloud, speed=speed, faults=RandomFaults(fault_share))
    for word in words:
        workspace.next_run(SCENARIOS[word]())
    try:
        workspace.start(port)
    except OSError as error:
        taken = error.errno == errno.EADDRINUSE
        why = "is in use by another program. Stop it or" if taken else f"cannot be used ({error.strerror});"
        _refuse([f"Port {port} {why} choose another one with --port."])
    console, told = Console(soft_wrap=True, highlight=False), 0
    try:
        _introduce(console, workspace, speed, words)
        if fault_share:
            console.print(f"About {fault_share:.0%} of all requests go wrong.\n")
        while True:
            told = _tell(console, workspace, told)
            time.sleep(LOOK_SECONDS)
    except KeyboardInterrupt:
        workspace.stop()
        _tell(console, workspace, told)
        console.print("Stopped.")


def _refuse(problems: list[str]) -> None:
    console = Console(stderr=True, soft_wrap=True)
    for problem in problems:
        console.print(problem, style="red", markup=False, highlight=False)
    raise typer.Exit(2) from None


def _introduce(console: Console, workspace: FakeWorkspace, speed: float, words: list[str]) -> None:
    console.print(Text.assemble("Fake Databricks workspace at ", (workspace.url, "bold"), ", until Ctrl-C."))
    console.print("Its runs are listed there. For Airflow's Databricks operators:\n")
    console.print(f"export AIRFLOW_CONN_DATABRICKS_DEFAULT='{workspace.connection_json}'\n", markup=False)
    console.print(
        f"A second here is {speed:g} there. What its runs do: {', then '.join([*words, 'succeeds'])} from then on."
    )
    console.print(f"Others, with --scenario: {', '.join(name for name in SCENARIOS if name not in words)}.\n")


def _tell(console: Console, workspace: FakeWorkspace, told: int) -> int:
    """One line for each request after so many; how many there have been."""
    for request in workspace.requests[told:]:
        status = request.status or "dropped"
        console.print(f"{time.strftime('%H:%M:%S')}  {status}  {request.method} {request.path}", markup=False)
        told += 1
    return told
