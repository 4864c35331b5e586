"""Measure this library and its peers; `benchmarks/peers.py` makes the environment for it."""

from __future__ import annotations

import argparse
import json
import re
import shlex
import sys
import time
from dataclasses import asdict
from importlib import metadata
from pathlib import Path
from typing import Any

import conduct
import growth
import resident
import tables
import torch
import turns
from adapters import PEERS
from nets import NETS

from xkfac.experiments.files import replace_file
from xkfac.experiments.provenance import provenance

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "peers.md"
OUTPUT = ROOT / "results" / "peers-cpu"
PARTS = ("cost", "memory", "conduct", "growth")


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python benchmarks/peers.py", description=__doc__)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--nets", nargs="+", choices=list(NETS), default=list(NETS))
    parser.add_argument("--peers", nargs="+", choices=list(PEERS), default=list(PEERS))
    parser.add_argument("--turns", type=int, help="turns of each network, instead of its own number")
    parser.add_argument(
        "--redraw", action="store_true", help="measure nothing; tables, figure and page from the results"
    )
    parser.add_argument("--output", type=Path, default=OUTPUT, help="folder of the results")
    return parser.parse_args()


def record() -> dict[str, Any]:
    """Return where the numbers come from."""
    packages = sorted({peer.package for peer in PEERS.values()} - {"xkfac", "torch"})
    command = shlex.join(["python", "benchmarks/peers.py", *sys.argv[1:]])
    own = provenance(torch.device("cpu"), torch.get_num_threads())
    return {**own, "command": command, "peers": {name: version_of(name) for name in packages}}


def version_of(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "(not installed)"


def say(text: str) -> None:
    print(f"{time.strftime('%H:%M:%S')} {text}", file=sys.stderr, flush=True)


def run(chosen: argparse.Namespace) -> dict[str, Any]:
    """Return all that was measured."""
    results: dict[str, Any] = {}
    for net in chosen.nets if {"cost", "memory"} & set(chosen.parts) else ():
        say(f"times on {NETS[net][0]}")
        rows = turns.measure(net, chosen.peers, chosen.turns)
        results.setdefault("cost", {})[net] = rows
        if "memory" in chosen.parts:
            say(f"memory on {NETS[net][0]}")
            able = {
                key: row.mode for key, row in rows.items() if isinstance(row.curvature, float) and not PEERS[key].once
            }
            results.setdefault("memory", {})[net] = resident.measure(net, able)
    if "conduct" in chosen.parts:
        say("what is right, and what is left behind")
        results["conduct"] = conduct.measure(chosen.peers)
    if "growth" in chosen.parts:
        say("how the cost grows")
        results["growth"] = growth.measure(chosen.turns or 2)
    return results


def plain(value: Any) -> Any:
    """Return results as what JSON holds."""
    if isinstance(value, dict):
        return {key: plain(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [plain(one) for one in value]
    return asdict(value) if hasattr(value, "__dataclass_fields__") else value


def provenance_lines(origin: dict[str, Any]) -> str:
    """Return the record as a paragraph for the page."""
    peers = ", ".join(f"{name} {version}" for name, version in origin["peers"].items())
    return (
        f"`{origin['command']}` at commit {origin['commit']}: {origin['device']}, {origin['threads']} thread, "
        f"{origin['system']}, Python {origin['python']}, torch {origin['torch']}; {peers}."
    )


def refresh(page: Path, parts: dict[str, str]) -> None:
    """Put each part between its marks in the page.

    Raises SystemExit for a part that the page has no place for, or a place without its part.
    """
    text = page.read_text()
    places = set(re.findall(r"<!-- begin (\S+) -->", text))
    if places - set(parts):
        raise SystemExit(f"'{page}' has places for {sorted(places - set(parts))}, which were not measured")
    for name in places:
        mark = re.escape(name)
        pattern = re.compile(f"(<!-- begin {mark} -->\n).*?(<!-- end {mark} -->)", re.DOTALL)
        text = pattern.sub(lambda found, name=name: f"{found[1]}\n{parts[name]}\n\n{found[2]}", text)
    replace_file(page, text.encode())


def restored(results: dict[str, Any]) -> dict[str, Any]:
    """Return results from what JSON held, the inverse of `plain`."""
    made = dict(results)
    if "cost" in made:
        made["cost"] = {net: {key: turns.Row(**row) for key, row in rows.items()} for net, rows in made["cost"].items()}
    if "conduct" in made:
        made["conduct"] = {key: conduct.Conduct(**found) for key, found in made["conduct"].items()}
    if "growth" in made:
        made["growth"] = [growth.Point(**one) for one in made["growth"]]
    return made


def measured(chosen: argparse.Namespace) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the record and the results of a new run, kept in the output's `results.json`, or of the one there."""
    path = chosen.output / "results.json"
    if chosen.redraw:
        origin = json.loads(path.read_text())
        return origin, restored(origin.pop("results"))
    chosen.output.mkdir(parents=True, exist_ok=True)
    origin, start = record(), time.perf_counter()
    results = run(chosen)
    origin["seconds"] = round(time.perf_counter() - start)
    replace_file(path, (json.dumps({**origin, "results": plain(results)}, indent=1) + "\n").encode())
    return origin, results


def main() -> None:
    torch.set_num_threads(1)
    chosen = arguments()
    origin, results = measured(chosen)
    made = tables.all_tables(results)
    text = "\n\n".join(f"## {name}\n\n{table}" for name, table in made.items())
    replace_file(chosen.output / "table.md", (text + "\n").encode())
    if "cost" in results:
        for kind, image in tables.figure(results["cost"]).items():
            replace_file(chosen.output / f"peers.{kind}", image)
    print(text)
    whole = set(results) == set(PARTS) and list(results["cost"]) == list(NETS)
    whole = whole and set(results["conduct"]) == {*PEERS, conduct.DEFINITION}
    if whole and chosen.output.resolve() == OUTPUT:
        refresh(PAGE, {**made, "record": provenance_lines(origin)})
        say(f"'{PAGE.relative_to(ROOT)}' has the new tables")
    else:
        say(f"'{PAGE.relative_to(ROOT)}' is as it was: it takes the tables of a whole run alone")


if __name__ == "__main__":
    main()
