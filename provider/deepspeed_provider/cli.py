# SPDX-License-Identifier: Apache-2.0
"""``deepspeed-provider``: the product from a terminal."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated

import httpx
import typer
from rich.console import Console

from deepspeed_provider import __version__
from deepspeed_provider.cli_catalog import catalog_app
from deepspeed_provider.cli_config import config_app
from deepspeed_provider.cli_estimate import estimate
from deepspeed_provider.cli_fake_workspace import fake_workspace
from deepspeed_provider.cli_options import long_names
from deepspeed_provider.cli_plan import plan
from deepspeed_provider.errors import EngineError, SpecError

app = typer.Typer(no_args_is_help=True, add_completion=False, help=__doc__, pretty_exceptions_enable=False)
engine_app = typer.Typer(no_args_is_help=True, help="The embedded Spark Connect engine on this machine.")
app.add_typer(engine_app, name="engine")
app.add_typer(config_app, name="config")
app.add_typer(catalog_app, name="catalog")
app.command("estimate", epilog=long_names())(estimate)
app.command("plan")(plan)
app.command("fake-workspace")(fake_workspace)

Home = Annotated[
    Path | None,
    typer.Option(
        envvar="DEEPSPEED_PROVIDER_HOME", help="State folder of the engine.", show_default="~/.deepspeed-provider"
    ),
]


@app.command()
def version() -> None:
    """Print the version."""
    typer.echo(__version__)


@engine_app.command("start")
def engine_start(
    home: Home = None,
    ranks: Annotated[int, typer.Option(min=1, help="Training processes that must fit side by side.")] = 2,
    port: Annotated[int, typer.Option(min=0, max=65535, help="Spark Connect port; 0 takes a free one.")] = 0,
) -> None:
    """Start the engine, or tell where it already runs."""
    from deepspeed_provider.local.engine import EmbeddedEngine, EngineSettings

    with _clear_errors():
        info = EmbeddedEngine(home, EngineSettings(ranks=ranks, port=port)).ensure()
    typer.echo(f"Spark Connect at {info.url}, Spark UI at {info.ui_url}, log in {info.home}/engine.log")


@engine_app.command("stop")
def engine_stop(home: Home = None) -> None:
    """Stop the engine and everything that runs on it."""
    from deepspeed_provider.local.engine import EmbeddedEngine

    engine = EmbeddedEngine(home)
    was_running = engine.running() is not None
    engine.stop()
    typer.echo("Stopped." if was_running else f"No engine runs from {engine.home}.")


@engine_app.command("status")
def engine_status(home: Home = None) -> None:
    """Tell whether the engine runs; exit status 1 when it does not."""
    from deepspeed_provider.local.engine import EmbeddedEngine, answers

    engine = EmbeddedEngine(home)
    info = engine.running()
    if info is None:
        typer.echo(f"No engine runs from {engine.home}.")
        raise typer.Exit(1)
    typer.echo(f"{info.url}: {'answers' if answers(info.url) else 'runs, but does not answer'} (process {info.pid})")


@app.command()
def demo(
    once: Annotated[
        bool, typer.Option("--once", help="Stop everything at the end; the exit status tells the result.")
    ] = False,
    home: Annotated[Path, typer.Option(help="One folder for all state.")] = Path(".deepspeed"),
    dags: Annotated[Path, typer.Option(help="Folder with the DAG files.")] = Path("dags"),
    airflow_port: Annotated[int, typer.Option(min=1, max=65535)] = 8080,
    mlflow_port: Annotated[int, typer.Option(min=1, max=65535)] = 5000,
    ranks: Annotated[int, typer.Option(min=1, max=16, help="Training processes side by side.")] = 2,
    conf: Annotated[
        str, typer.Option(help="Parameters of the DAG as a JSON object, such as '{\"max_steps\": 20}'.")
    ] = "{}",
) -> None:
    """Start engine, MLflow and Airflow here, fine-tune a real model once, show what came out."""
    from deepspeed_provider.local.demo import DemoSettings, run_demo

    try:
        chosen = json.loads(conf)
    except ValueError as error:
        raise typer.BadParameter(f"--conf is not JSON: {error}") from error
    if not isinstance(chosen, dict):
        raise typer.BadParameter(f"--conf must be a JSON object, not {type(chosen).__name__}")
    settings = DemoSettings(
        home=home.absolute(),
        dags_folder=dags.absolute(),
        airflow_port=airflow_port,
        mlflow_port=mlflow_port,
        ranks=ranks,
        conf={"ranks": ranks, **chosen},
    )
    with _clear_errors():
        outcome = run_demo(settings, Console(soft_wrap=True), once=once)
    if once and not outcome.good:
        raise typer.Exit(1)


class _clear_errors:
    """One sentence for errors that the user can mend, a traceback for all others."""

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, EngineError | SpecError | httpx.HTTPError):
            Console(stderr=True, soft_wrap=True).print(str(error), style="red", markup=False, highlight=False)
            sys.exit(2)


if __name__ == "__main__":
    app()
