"""The documentation: the site builds, its notebooks and snippets run, its tables are the code's, its names exist."""

from __future__ import annotations

import ast
import importlib.util
import re
import subprocess
import sys
import tomllib
from html.parser import HTMLParser
from pathlib import Path

import nbformat
import pytest
import torch

import qatpatch
from qatpatch.kernels import TABLE

ROOT = Path(__file__).resolve().parent.parent
DOCS = ROOT / "docs"
NOTEBOOKS = sorted((DOCS / "notebooks").glob("*.ipynb"))


# What the snippets of the how-to pages take for granted: a model, inputs for it, a loss.
def setting():
    from models import tiny_wan, wan_inputs

    torch.manual_seed(0)
    model = tiny_wan()
    inputs = dict(wan_inputs(model), return_dict=True)
    return dict(
        torch=torch,
        qatpatch=qatpatch,
        model=model,
        inputs=inputs,
        loss_of=lambda model, inputs: model(**inputs).sample.square().mean(),
    )


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """Built strictly, so that a dead link, a missing page or a notebook cell that raises is a failure."""
    target = tmp_path_factory.mktemp("site")
    build = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(target)],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert build.returncode == 0, build.stderr
    return target


@pytest.mark.slow
class TestSite:
    def test_every_page_is_there(self, site):
        for page in [*DOCS.rglob("*.md"), *NOTEBOOKS]:
            relative = page.relative_to(DOCS).with_suffix("")
            built = site / (relative.parent if relative.name == "index" else relative) / "index.html"
            assert built.is_file(), f"{page.name} is not in the site"

    def test_reference_documents_every_public_name(self, site):
        page = _Headings((site / "reference" / "index.html").read_text())
        missing = [n for n in qatpatch.__all__ if n != "__version__" and n not in {i.split(".")[-1] for i in page.ids}]
        assert not missing

    def test_notebooks_show_their_pictures(self, site):
        for notebook in NOTEBOOKS:
            html = (site / "notebooks" / notebook.stem / "index.html").read_text()
            shown = sum("plt.show()" in cell.source for cell in nbformat.read(notebook, 4).cells)
            assert html.count("data:image/png;base64") >= shown > 0, notebook.name
            videos = sum(cell.source.rstrip().splitlines()[-1].startswith("show(") for cell in _code(notebook))
            assert html.count("data:video/mp4;base64") == videos, notebook.name

    def test_reports_are_tables_in_notebooks(self, site):
        html = (site / "notebooks" / "patch_train_deploy" / "index.html").read_text()
        assert html.count("<table") >= 4  # the plan and three receipts


class _Headings(HTMLParser):
    def __init__(self, html: str) -> None:
        super().__init__()
        self.ids: set[str] = set()
        self.feed(html)

    def handle_starttag(self, tag, attributes):
        if tag in ("h2", "h3", "h4"):
            self.ids.update(value for name, value in attributes if name == "id" and value)


def _code(notebook):
    return [cell for cell in nbformat.read(notebook, 4).cells if cell.cell_type == "code"]


@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebooks_are_stored_without_outputs(notebook):
    assert all(not cell.outputs and cell.execution_count is None for cell in _code(notebook))


def _script(name):
    spec = importlib.util.spec_from_file_location(name, DOCS / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_pictures_show_the_numbers_of_their_page(tmp_path, monkeypatch):
    charts = _script("charts")
    assert charts.main(["--check"]) == 0, "run python docs/charts.py"
    page = (DOCS / "benchmarks.md").read_text()
    for name in charts.CHARTS:
        assert f"(images/{name}.svg)" in page
    assert "| 4290 x 4096 x 4096 | 1.079 |" in page
    (tmp_path / "benchmarks.md").write_text(page.replace("x 4096 x 4096 | 1.079 |", "x 4096 x 4096 | 1.5 |"))
    (tmp_path / "images").mkdir()
    for picture in (DOCS / "images").iterdir():
        (tmp_path / "images" / picture.name).write_bytes(picture.read_bytes())
    monkeypatch.setattr(charts, "DOCS", tmp_path)
    assert charts.main(["--check"]) == 1
    charts.main([])
    drawn = (tmp_path / "images" / "linears.svg").read_text()
    assert "4290 x 4096 x 4096: patched 1.5, replay 1.069" in drawn and ">1.50<" in drawn
    assert charts.main(["--check"]) == 0


def test_tables_are_what_the_code_gives():
    tables = _script("tables")
    marked = 0
    for page in DOCS.rglob("*.md"):
        text = page.read_text()
        marked += text.count("<!-- table: ")
        assert tables.with_tables(text) == text, f"{page.name} is stale; run python docs/tables.py"
    assert marked >= len(tables.TABLES)


def test_the_install_page_has_every_extra_that_is_for_users():
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    page = (DOCS / "getting-started.md").read_text()
    assert set(re.findall(r"`'\.\[(\w+)\]'`", page)) == set(extras) - {"docs", "dev"}
    # What the native kernels' rows ask for is what the extra installs.
    (wanted,) = {r for row in TABLE if row.name == "flashinfer" for r in row.requires if "flashinfer" in r.distribution}
    assert extras["blackwell"] == [f"{wanted.distribution}{wanted.versions}"]


def test_every_page_can_be_reached_from_the_first():
    found, todo = set(), [DOCS / "index.md"]
    while todo:
        page = todo.pop()
        found.add(page)
        links = re.findall(r"\]\(([\w./-]+\.md)(?:#[\w-]*)?\)", page.read_text())
        todo += {(page.parent / link).resolve() for link in links} - found
    assert set(DOCS.rglob("*.md")) <= found


def test_names_and_arguments_lists_every_public_function():
    page = (DOCS / "api.md").read_text()
    missing = [n for n in qatpatch.__all__ if n != "__version__" and not re.search(rf"\b{n}\b", page)]
    assert not missing


@pytest.mark.parametrize(
    "page",
    [DOCS / "getting-started.md", DOCS / "diffusers.md", *sorted((DOCS / "how-to").glob("*.md"))],
    ids=lambda path: path.stem,
)
def test_snippets_run(page, tmp_path, monkeypatch):
    # A snippet that cannot run on a CPU says so in a comment above it.
    blocks = re.findall(r"(<!-- not run: .+? -->\n)?```python\n(.*?)```", page.read_text(), re.DOTALL)
    script = "\n".join(code for excuse, code in blocks if not excuse)
    assert script or page.stem == "recipes", "a how-to page shows code"
    monkeypatch.chdir(tmp_path)
    exec(compile(script, page.name, "exec"), setting())


def _literals() -> str:
    """All text that the package's error messages are made of, one literal a line, values as ``{}``."""
    texts = []
    for path in (ROOT / "qatpatch").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.JoinedStr):
                texts.append("".join(v.value if isinstance(v, ast.Constant) else "{}" for v in node.values))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                texts.append(node.value)
    return "\n".join(texts)


def test_troubleshooting_quotes_messages_that_exist():
    rows = re.findall(r"^\| (`.+?) \|", (DOCS / "troubleshooting.md").read_text(), re.MULTILINE)
    quoted = [text for row in rows for text in re.findall(r"`(.+?)`", row)]
    assert len(quoted) > 20
    literals = _literals()
    assert not [text for text in quoted if text not in literals]


def _tests_in(file: str) -> set[str]:
    """``file::name`` and ``file::Class::name`` of every test in a file of tests."""
    tree = ast.parse((ROOT / file).read_text())
    classes = [node for node in tree.body if isinstance(node, ast.ClassDef)]
    found = {f"{file}::{node.name}" for node in tree.body if isinstance(node, ast.FunctionDef)}
    return found | {f"{file}::{c.name}::{n.name}" for c in classes for n in c.body if isinstance(n, ast.FunctionDef)}


def test_the_page_of_faults_is_whole_and_names_tests_that_exist():
    page = (DOCS / "faults.md").read_text()
    rows = [[cell.strip() for cell in row.strip("|").split("|")] for row in re.findall(r"^\| \d.*", page, re.MULTILINE)]
    assert [int(number) for number, *_ in rows] == list(range(1, 31))
    for number, case, outcome, before, tests in rows:
        assert case and outcome and re.fullmatch("no|yes: .+", before), number
        named = re.findall(r"`([^`]+)`", tests)
        assert tests == ", ".join(f"`{name}`" for name in named) and named, number
        for name in named:
            assert name.rpartition("::")[2].startswith("test_"), name
            assert name in _tests_in(name.partition("::")[0]), name
