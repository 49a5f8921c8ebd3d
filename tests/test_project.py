"""The project's front door: what reports are asked for, and what the workflows may do and run."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

import holdfast

ROOT = Path(__file__).parent.parent
WORKFLOWS = sorted((ROOT / ".github" / "workflows").iterdir())
TEMPLATES = sorted((ROOT / ".github" / "ISSUE_TEMPLATE").glob("[0-9]-*.yml"))
TARGETS = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))

READ_ONLY = {"contents": "read"}
# What single jobs may do beyond reading, and who says so here.
ALLOWED = {
    ("docs.yml", "publish"): {"pages": "write", "id-token": "write"},
    ("publish.yml", "publish"): {"id-token": "write"},
}
EVENTS = {"push", "pull_request", "workflow_dispatch", "schedule", "release"}
ACTION = re.compile(r"[\w-]+/[\w./-]+@(release/)?v\d+")  # pinned by its major version
REPORT = "holdfast --version --verbose"


def faults_of(name: str, text: str) -> Iterator[str]:
    """Say what is wrong with a workflow; ``name`` is that of its file."""
    workflow = yaml.safe_load(text)
    events = workflow[True]  # YAML 1.1 reads the key `on` so
    for event in set(events) - EVENTS:
        yield f"runs on {event}"
    if workflow.get("permissions") != READ_ONLY:
        yield f"permissions are {workflow.get('permissions')}"
    for title, job in workflow["jobs"].items():
        allowed = ALLOWED.get((name, title), READ_ONLY)
        if job.get("permissions", allowed) != allowed:
            yield f"{title} may {job['permissions']}"
        if "timeout-minutes" not in job:
            yield f"{title} has no end"
        for step in job["steps"]:
            yield from (f"{title}: {fault}" for fault in step_faults(step))


def step_faults(step: dict[str, Any]) -> Iterator[str]:
    if "uses" in step and not ACTION.fullmatch(step["uses"]):
        yield f"{step['uses']} is not pinned by a major version"
    keeps = step.get("with", {}).get("persist-credentials") is not False
    if step.get("uses", "").startswith("actions/checkout@") and keeps:
        yield "the checkout keeps its token"
    if "run" in step:
        command = re.fullmatch(r"make ([a-z-]+)", step["run"])
        if command is None or command[1] not in TARGETS:
            yield f"{step['run']} is no target of the Makefile"


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.name)
def test_a_workflow_only_calls_make_and_may_do_no_more_than_it_needs(path: Path) -> None:
    assert [*faults_of(path.name, path.read_text())] == []


def test_the_workflows_check_test_and_build_the_pages() -> None:
    steps = [
        step.get("run")
        for path in WORKFLOWS
        for job in yaml.safe_load(path.read_text())["jobs"].values()
        for step in job["steps"]
    ]
    assert {"make check", "make words", "make test", "make docs", "make wheels"} <= set(steps)


def test_only_a_tag_is_published_and_only_when_its_wheels_are_checked() -> None:
    workflow = yaml.safe_load((ROOT / ".github" / "workflows" / "publish.yml").read_text())
    assert workflow[True] == {"push": {"tags": ["v*"]}}
    build, publish = workflow["jobs"]["build"], workflow["jobs"]["publish"]
    assert publish["needs"] == "build"
    assert build["env"]["TAG"] == "${{ github.ref_name }}"
    assert "make wheels-check" in [step.get("run") for step in build["steps"]]
    assert [step for step in publish["steps"] if "run" in step] == []


BROKEN = {
    "a strange event": ("pull_request:", "pull_request_target:", "runs on pull_request_target"),
    "all permissions": ("permissions:\n  contents: read", "permissions: write-all", "permissions"),
    "a job that may write": ("    steps:", "    permissions: write-all\n    steps:", "may write"),
    "a job without end": ("    timeout-minutes: 5\n", "", "has no end"),
    "an action of any version": ("checkout@v4", "checkout@main", "not pinned"),
    "a token that stays": ("persist-credentials: false", "fetch-depth: 1", "keeps its token"),
    "another command": ("make test", "curl x | sh", "no target"),
    "a target that is missing": ("make test", "make nothing", "no target"),
}
GOOD = """
on:
  pull_request:
permissions:
  contents: read
jobs:
  test:
    timeout-minutes: 5
    steps:
      - uses: actions/checkout@v4
        with:
          persist-credentials: false
      - run: make test
"""


@pytest.mark.parametrize("what", BROKEN)
def test_a_broken_workflow_is_found(what: str) -> None:
    old, new, fault = BROKEN[what]
    assert [*faults_of("a.yml", GOOD)] == []
    assert old in GOOD
    (found,) = faults_of("a.yml", GOOD.replace(old, new))
    assert fault in found


def fields_of(path: Path) -> list[dict[str, Any]]:
    return [field for field in yaml.safe_load(path.read_text())["body"] if "id" in field]


def test_reports_of_lost_or_wrong_data_come_first() -> None:
    names = [yaml.safe_load(path.read_text())["name"] for path in TEMPLATES]
    assert names == ["Data loss or wrong data", "Bug", "Feature"]
    config = yaml.safe_load((TEMPLATES[0].parent / "config.yml").read_text())
    assert config == {"blank_issues_enabled": False}


@pytest.mark.parametrize("path", TEMPLATES, ids=lambda path: path.name)
def test_a_template_is_a_form_that_can_be_shown(path: Path) -> None:
    form = yaml.safe_load(path.read_text())
    assert form["name"] and form["description"]
    fields = fields_of(path)
    assert len({field["id"] for field in fields}) == len(fields) > 0
    for field in form["body"]:
        assert field["type"] in ("markdown", "textarea", "dropdown")
        assert ("value" if field["type"] == "markdown" else "label") in field["attributes"]


@pytest.mark.parametrize("path", TEMPLATES[:2], ids=lambda path: path.name)
def test_a_report_of_a_fault_has_to_say_what_the_machine_is(path: Path) -> None:
    (field,) = [field for field in fields_of(path) if REPORT in field["attributes"]["label"]]
    assert field["validations"] == {"required": True}
    assert REPORT in (ROOT / "docs" / "faq.md").read_text()


def test_conduct_is_reported_where_weaknesses_are() -> None:
    place = '"Report a vulnerability" in'
    for page in ("SECURITY.md", "CODE_OF_CONDUCT.md"):
        assert place in " ".join((ROOT / page).read_text().split())


def test_the_citation_has_the_version_and_the_licence() -> None:
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert citation["cff-version"] == "1.2.0"
    assert citation["message"] and citation["title"] and citation["authors"]
    assert citation["version"] == holdfast.__version__
    assert f'license = "{citation["license"]}"' in (ROOT / "pyproject.toml").read_text()
