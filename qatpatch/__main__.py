"""``python -m qatpatch``: the command line."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; its exit status."""
    parser = argparse.ArgumentParser(prog="python -m qatpatch", description="Patch diffusion transformers for NVFP4.")
    commands = parser.add_subparsers(dest="command", required=True)
    doctor = commands.add_parser(
        "doctor",
        help="which kernels run on this machine, and whether their numbers are right",
        description="Prints the environment and every kernel on every device: why it cannot run there, or what came of "
        "comparing it with the reference. Exit status 1 if a kernel that can run is wrong.",
    )
    doctor.add_argument("--json", action="store_true", help="print data instead of tables")
    doctor.add_argument("--device", action="append", metavar="DEVICE", help="only this one (repeatable): cpu, cuda:0")
    chosen = parser.parse_args(arguments)
    return _doctor(chosen, parser)


def _doctor(chosen: argparse.Namespace, parser: argparse.ArgumentParser) -> int:
    from qatpatch.doctor import diagnose
    from qatpatch.kernels import present_devices

    present = {str(device): device for device in present_devices()}
    missing = [name for name in chosen.device or () if name not in present]
    if missing:
        parser.error(f"there is no device {', '.join(missing)} here; there is {', '.join(present)}")
    devices = None if chosen.device is None else [present[name] for name in chosen.device]
    diagnosis = diagnose(devices, lambda line: print(line, file=sys.stderr, flush=True))
    print(json.dumps(diagnosis.as_dict(), indent=2) if chosen.json else diagnosis)
    return 0 if diagnosis.healthy else 1


if __name__ == "__main__":
    sys.exit(main())
