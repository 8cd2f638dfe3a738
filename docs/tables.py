"""The tables of the documentation that are made from the code.

python docs/tables.py          writes them into the pages, between <!-- table: NAME --> and <!-- end -->
python docs/tables.py --check  exit status 1 where a page holds another table than the code would give
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import typer

from qatpatch.cli import app
from qatpatch.kernels.requirements import Requirement, architecture
from qatpatch.kernels.table import TABLE, Kernel

DOCS = Path(__file__).resolve().parent
_BLOCK = re.compile(r"(<!-- table: ([a-z_]+) -->\n).*?(<!-- end -->)", re.DOTALL)


def kernels() -> str:
    """Every kernel, in the order in which they are tried."""
    header = "| row | op | stages | computes | numbers | runs on | packages | layers |\n" + "| --- " * 8 + "|\n"
    return header + "".join(f"| {' | '.join(_kernel_cells(row))} |\n" for row in TABLE)


def _kernel_cells(row: Kernel) -> Iterable[str]:
    yield f"`{row.name}`"
    yield row.op
    yield ", ".join(row.stages)
    yield ", ".join(row.schemes) + (" (only by name)" if row.explicit_only else "")
    yield "native" if row.native else "emulated"
    if row.capabilities:
        yield ", ".join(architecture(c) for c in row.capabilities)
    elif row.minimum_capability:
        yield f"{architecture(row.minimum_capability)} and up"
    else:
        yield " or ".join(row.device_types) or "any device"
    yield ", ".join(dict.fromkeys(_package(requirement) for requirement in row.requires)) or "none"
    yield ", ".join(_layers(row)) or "any"


def _package(requirement: Requirement) -> str:
    where = ", ".join(architecture(c) for c in requirement.capabilities)
    return f"`{requirement.name}{requirement.versions}`" + (f" on {where}" if where else "")


def _layers(row: Kernel) -> Iterable[str]:
    if row.head_dims:
        yield "head dimension " + " or ".join(str(d) for d in row.head_dims)
    if row.multiples != (1, 1):
        yield "out_features, in_features in multiples of {}, {}".format(*row.multiples)
    if not row.weight_only:
        yield "quantized input"
    if row.out_dtypes:
        yield "output " + " or ".join(str(d).removeprefix("torch.") for d in row.out_dtypes)
    if row.rounds_before_bias:
        yield "no bias, unless by name"
    if not row.honours_masks:
        yield "no mask"


def commands() -> str:
    """The arguments and options of every command."""
    parts = []
    for name, command in typer.main.get_command(app).commands.items():
        rows = "".join(f"| {' | '.join(_parameter_cells(parameter))} |\n" for parameter in command.params)
        first = command.help.partition("\n\n")[0].replace("\n", " ")
        parts.append(f"### {name}\n\n{first}\n\n| argument or option | what it says |\n| --- | --- |\n{rows}")
    return "\n".join(parts)


def _parameter_cells(parameter: Any) -> Iterable[str]:
    if parameter.param_type_name == "argument":
        yield f"`{parameter.name.upper()}`"
        yield parameter.help
        return
    value = "" if parameter.is_flag else f" {parameter.name.upper()}"
    yield f"`{parameter.opts[0]}{value}`"
    required = " Required." if parameter.required else ""
    default = f" Default: `{parameter.default}`." if isinstance(parameter.default, str) else ""
    yield f"{parameter.help}{required}{default}"


TABLES: dict[str, Callable[[], str]] = {"kernels": kernels, "commands": commands}


def with_tables(text: str) -> str:
    """A page with its tables as the code gives them.

    Raises:
        KeyError: the page names a table that does not exist.
    """
    return _BLOCK.sub(lambda match: match[1] + TABLES[match[2]]() + match[3], text)


def main(arguments: list[str]) -> int:
    stale = []
    for page in sorted(DOCS.rglob("*.md")):
        old = page.read_text()
        new = with_tables(old)
        if new != old:
            stale.append(page.relative_to(DOCS).as_posix())
            if "--check" not in arguments:
                page.write_text(new)
    print(f"{'stale' if '--check' in arguments else 'written'}: {', '.join(stale) or 'nothing'}")
    return int(bool(stale) and "--check" in arguments)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
