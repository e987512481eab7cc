"""What a person sees of Airflow, in headless Chromium."""

from __future__ import annotations

import shutil
from contextlib import contextmanager
from pathlib import Path

CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")
ARGUMENTS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]


@contextmanager
def logged_in(url: str, password: str):
    """A page of an Airflow that knows the user admin."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=ARGUMENTS)
        try:
            page = browser.new_page(viewport={"width": 1400, "height": 1100})
            page.set_default_timeout(60_000)
            page.goto(url)
            page.fill("input[name=username]", "admin")
            page.fill("input[name=password]", password)
            page.click("button[type=submit]")
            page.wait_for_url(lambda address: "/login" not in address)
            yield page
        finally:
            browser.close()


def trigger_form(page, url: str, path: Path) -> str:
    """Opens the DAG's trigger form, with the sections a newcomer changes unfolded; returns its text."""
    page.goto(f"{url}/dags/finetune", wait_until="networkidle")
    page.get_by_role("button", name="Trigger").first.click()
    dialog = page.get_by_role("dialog")
    dialog.wait_for()
    texts = []
    for section in ("Model and method", "Length and learning rate", "Where it runs"):
        dialog.get_by_role("button", name=section).click()
        page.wait_for_timeout(1000)
        texts.append(dialog.inner_text())
        page.screenshot(path=path.with_stem(f"{path.stem}-{section.split()[0].lower()}"), full_page=True)
    return "\n".join(texts)


def finished_run(page, url: str, run_id: str, path: Path) -> str:
    """Opens a run's page; returns its text."""
    page.goto(f"{url}/dags/finetune/runs/{run_id}", wait_until="networkidle")
    page.wait_for_timeout(2000)
    page.screenshot(path=path, full_page=True)
    return page.inner_text("body")


def task_log(page, url: str, run_id: str, task_id: str, path: Path) -> str:
    page.goto(f"{url}/dags/finetune/runs/{run_id}/tasks/{task_id}", wait_until="networkidle")
    page.wait_for_timeout(2500)
    page.screenshot(path=path, full_page=True)
    return page.inner_text("body")
