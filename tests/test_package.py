"""The package as a whole: what an import costs and loads, what the wheel holds, and which module may know which."""

from __future__ import annotations

import ast
import doctest
import email
import inspect
import re
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

import qatpatch

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "qatpatch"
SOURCES = sorted(PACKAGE.rglob("*.py"))

# Lowest first. A module may import modules of lower levels only, inside functions too; `kernels` is one with all that
# lies in qatpatch/kernels.
LEVELS = (
    ("errors",),
    ("autocast", "tensor_files", "key_names", "misnamed"),
    ("nvfp4",),
    ("kernels",),
    ("straight_through",),
    ("recomputation", "reuse"),
    ("switch",),
    ("parallel",),
    ("linear_state", "formats"),
    ("linear", "attention", "masks", "stored_models"),
    ("packed_linear",),
    ("profiles",),
    ("dispatch",),
    ("units",),
    ("graphs", "guards"),
    ("receipts",),
    ("damage_report",),
    ("plan",),
    ("patch",),
    ("swap",),
    ("description",),
    ("diffusers_quantizer",),
    ("deployment", "checkpoint", "calibration", "coverage", "damage"),
    ("live_models", "inspection"),
    ("exporting",),
    ("__init__",),
    ("doctor",),
    ("cli",),
    ("__main__",),
)
LEVEL_OF = {unit: level for level, units in enumerate(LEVELS) for unit in units}

# None of these may come with `import qatpatch`: each costs seconds, or is missing on some machine.
NOT_AT_IMPORT = ("diffusers", "transformers", "triton", "flashinfer", "accelerate", "typer", "rich")
IMPORT_SECONDS = 0.2

# Prints what `import qatpatch` adds to a process that has torch: the seconds, then the modules.
IMPORT_PROBE = """
import sys, time
import torch
before = set(sys.modules)
start = time.perf_counter()
import qatpatch
print(time.perf_counter() - start)
print(*sorted(set(sys.modules) - before))
"""


def test_import_is_lean():
    seconds, modules = [], []
    # The best of five counts. The first run under the bar settles it.
    while len(seconds) < 5 and min(seconds, default=IMPORT_SECONDS) >= IMPORT_SECONDS:
        probe = subprocess.run([sys.executable, "-c", IMPORT_PROBE], cwd=ROOT, capture_output=True, text=True)
        assert probe.returncode == 0, probe.stderr
        first, second = probe.stdout.splitlines()
        seconds.append(float(first))
        modules = second.split()
    assert "qatpatch" in modules
    heavy = sorted({name.partition(".")[0] for name in modules} & set(NOT_AT_IMPORT))
    assert not heavy, f"import qatpatch loads {', '.join(heavy)}; import them inside the functions that need them"
    assert min(seconds) < IMPORT_SECONDS, f"import qatpatch took {seconds} s on top of torch"


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """The wheel of this checkout, built in a copy so that no build folder is left here or read from here."""
    source = tmp_path_factory.mktemp("source")
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    for folder in ("qatpatch", "tests", "recipes", "benchmarks"):
        if (ROOT / folder).is_dir():
            shutil.copytree(ROOT / folder, source / folder, ignore=shutil.ignore_patterns("__pycache__"))
    command = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", "dist"]
    build = subprocess.run(command, cwd=source, capture_output=True, text=True)
    assert build.returncode == 0, build.stdout + build.stderr
    (path,) = (source / "dist").glob("*.whl")
    with zipfile.ZipFile(path) as archive:
        yield archive


def test_wheel_holds_the_package_and_nothing_else(wheel):
    info = f"qatpatch-{qatpatch.__version__}.dist-info/"
    names = {name for name in wheel.namelist() if not name.startswith(info)}
    expected = {path.relative_to(ROOT).as_posix() for path in SOURCES} | {"qatpatch/py.typed"}
    assert names == expected
    assert info + "licenses/LICENSE" in wheel.namelist()


def test_version_is_the_one_in_the_metadata(wheel):
    metadata = email.message_from_bytes(wheel.read(f"qatpatch-{qatpatch.__version__}.dist-info/METADATA"))
    assert metadata["Name"] == "qatpatch"
    assert metadata["Version"] == qatpatch.__version__
    assert metadata["License-Expression"] == "Apache-2.0"
    assert metadata["Requires-Python"] == ">=3.11"


def test_changelog_has_the_version():
    assert re.search(rf"^## {re.escape(qatpatch.__version__)}\b", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)


@pytest.mark.parametrize("page", ["README.md", "docs/formats-elsewhere.md"])
def test_pages_run_as_printed(page, tmp_path):
    script = "\n".join(python_blocks(ROOT / page))
    # The subprocess runs elsewhere, for what the snippet saves; this checkout goes in front of its path.
    script = f"import sys\nsys.path.insert(0, {str(ROOT)!r})\n{script}"
    run = subprocess.run([sys.executable, "-c", script], cwd=tmp_path, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr


def test_format_page_shows_what_python_prints():
    examples = "\n".join(block for block in python_blocks(ROOT / "docs" / "format.md") if block.startswith(">>>"))
    test = doctest.DocTestParser().get_doctest(examples, {}, "docs/format.md", None, None)
    assert test.examples
    report = []
    assert doctest.DocTestRunner().run(test, out=report.append).failed == 0, "".join(report)


def test_no_module_bears_the_name_of_a_public_function():
    modules = {unit_of(path) for path in SOURCES}
    for name in qatpatch.__all__:
        # A module that is itself public (qatpatch.nvfp4) shadows nothing.
        if not inspect.ismodule(getattr(qatpatch, name)):
            assert name not in modules, f"importing qatpatch/{name}.py would replace the public qatpatch.{name}"


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: path.relative_to(PACKAGE).as_posix())
class TestModule:
    def test_knows_only_lower_levels(self, path):
        own = unit_of(path)
        assert own in LEVEL_OF, f"{own} has no level; add it to LEVELS where its imports allow"
        wrong = [
            f"line {line}: {name}"
            for line, name in imports(path)
            if name.partition(".")[0] == "qatpatch"
            and imported_unit(name) != own
            and LEVEL_OF[imported_unit(name)] >= LEVEL_OF[own]
        ]
        assert not wrong, f"{own} imports modules that are not below it: {wrong}"

    def test_numerics_do_not_know_diffusers(self, path):
        if LEVEL_OF[unit_of(path)] <= LEVEL_OF["linear"]:
            found = [f"line {line}: {name}" for line, name in imports(path) if name.partition(".")[0] == "diffusers"]
            assert not found, f"{path.name} imports {found}; nothing from `linear` down knows diffusers"

    def test_private_names_of_diffusers_stay_in_dispatch(self, path):
        if unit_of(path) != "dispatch":
            found = list(private_diffusers_names(path))
            assert not found, f"{path.name} uses private names of diffusers, which belong in dispatch.py: {found}"

    def test_reads_no_environment_variable(self, path):
        readers = {"environ", "environb", "getenv", "getenvb", "putenv"}
        found = [
            node.lineno
            for node in ast.walk(parse(path))
            if (isinstance(node, ast.Attribute) and node.attr in readers)
            or (isinstance(node, ast.ImportFrom) and node.module == "os" and readers & {a.name for a in node.names})
        ]
        assert not found, f"lines {found} reach for the environment; make it an argument"


def test_import_reader_sees_every_form_of_import(tmp_path):
    """The tests above prove nothing if `imports` overlooks a form."""
    path = PACKAGE / "kernels" / "imagined.py"
    source = (
        "import qatpatch.plan as p\n"
        "from qatpatch import swap, apply\n"
        "from ..linear import QATLinear\n"
        "from . import ops\n"
        "def f():\n"
        "    from diffusers.models import _private\n"
        "    return importlib.import_module('qatpatch.patch'), 'qatpatch.dispatch:attach', 'see qatpatch.swap'\n"
    )
    found = {name for _, name in imports(path, source)}
    expected = {"qatpatch.plan", "qatpatch.swap", "qatpatch.apply", "qatpatch.linear.QATLinear", "qatpatch.kernels.ops"}
    assert found == expected | {"diffusers.models._private", "qatpatch.patch", "qatpatch.dispatch"}
    assert {imported_unit(name) for name in expected} == {"plan", "swap", "__init__", "linear", "kernels"}
    assert list(private_diffusers_names(path, source)) == ["line 6: diffusers.models._private"]
    chain = "import diffusers.models.attention_dispatch as d\nd.Registry._backends\nd.Registry.__doc__\n"
    assert list(private_diffusers_names(path, chain)) == ["line 2: d...._backends"]


def python_blocks(page: Path) -> list[str]:
    return re.findall(r"^```python\n(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL)


def parse(path: Path, source: str | None = None) -> ast.Module:
    return ast.parse(path.read_text() if source is None else source, str(path))


def unit_of(path: Path) -> str:
    """``linear`` of qatpatch/linear.py, ``kernels`` of qatpatch/kernels/reference.py."""
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def imported_unit(name: str) -> str:
    """Which unit ``qatpatch.a.b`` belongs to; a name that is no module comes from the package's ``__init__``."""
    first = name.split(".")[1] if "." in name else "__init__"
    return first if first in LEVEL_OF else "__init__"


def imports(path: Path, source: str | None = None) -> Iterator[tuple[int, str]]:
    """Line and absolute dotted name of all that a file imports: at the top, in functions, or by a name in a string."""
    for node in ast.walk(parse(path, source)):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                # One dot is the file's own folder, for an __init__.py too.
                folder = path.parent.parents[node.level - 2] if node.level > 1 else path.parent
                base = ".".join([*folder.relative_to(ROOT).parts, *filter(None, [base])])
            yield from ((node.lineno, f"{base}.{alias.name}") for alias in node.names)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            # importlib.import_module("qatpatch.x") and table entries "qatpatch.x:function".
            lazy = re.fullmatch(r"((?:qatpatch|diffusers)(?:\.\w+)+)(?::\w+)?", node.value)
            if lazy:
                yield node.lineno, lazy[1]


def private_diffusers_names(path: Path, source: str | None = None) -> Iterator[str]:
    """Underscored names that a file imports from diffusers, or reaches through something that it imports from there."""
    bound = set()
    for node in ast.walk(parse(path, source)):
        if isinstance(node, ast.Import | ast.ImportFrom):
            module = getattr(node, "module", "") or ""
            for alias in node.names:
                name = f"{module}.{alias.name}" if module else alias.name
                if name.partition(".")[0] == "diffusers":
                    bound.add(alias.asname or alias.name.partition(".")[0])
                    if any(is_private(part) for part in name.split(".")):
                        yield f"line {node.lineno}: {name}"
    for node in ast.walk(parse(path, source)):
        if isinstance(node, ast.Attribute) and is_private(node.attr):
            root = node.value
            while isinstance(root, ast.Attribute):
                root = root.value
            if isinstance(root, ast.Name) and root.id in bound:
                yield f"line {node.lineno}: {root.id}....{node.attr}"


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")
