"""What a browser, a script and Prometheus are shown of the overlay. Imports no vLLM.

Nothing here is secret, because vLLM's API key guards `/v1` and its like only: process titles
(command lines) and the environment stay out.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Mapping
from html import escape
from pathlib import Path
from string import Template
from typing import Any

from vllm_overlay.activate.statement import run_record
from vllm_overlay.cluster import every_row, node_rows

Facts = dict[str, Any]

MISSING, WAITING, APPLIED = "missing", "waiting", "applied"
SHOWN = ("pid", "role", "rank", "state", "fixes", "notes")
WHERE = ("node", "host", "address", "plan")  # with several nodes
UNKNOWN = "unknown"  # the role where the processes cannot be read
FOLDERS = re.compile(r"/.*/(?=[^/]*\.json)")
PATHS = re.compile(r"(?<![\w./])/\S*/(?=\S)")  # in the text of a note
SETTLE = 0.2  # seconds; a child between fork and exec has no receipt of its own


def read_facts(plan_file: Path) -> Facts:
    """Return the plan of this process, and what every live process of this node shows of it.

    Raises OSError or ValueError if the plan cannot be read.
    """
    plan = json.loads(plan_file.read_bytes())
    receipts = _receipts(plan_file)
    if any(row["state"] == "without receipt" for row in receipts):
        time.sleep(SETTLE)
        receipts = _receipts(plan_file)
    return {
        "schema": 1,
        "digest": plan["digest"],
        "recipe": {key: plan["recipe"][key] for key in ("name", "variant")},
        "vllm": plan["vllm"]["version"],
        "model": plan["served_model"],
        "fixes": [
            {key: fix[key] for key in ("name", "verdict", "flag", "value", "value_from", "reasons")}
            for fix in plan["fixes"]
        ],
        "receipts": receipts,
    }


def _receipts(plan_file: Path) -> list[dict[str, Any]]:
    """Return a row for each process that `health` holds this plan's server to, by pid.

    With several nodes, those of every node, each with its host.
    """
    folder = plan_file.parent
    run = run_record(str(folder))
    if run and run.get("node"):
        rows = [{key: row[key] for key in (*WHERE, *SHOWN)} for row in every_row(folder, run)]
    else:
        rows = [{key: row[key] for key in SHOWN} for row in node_rows(folder)]
    for row in rows:
        row["state"] = _public(row["state"])
        row["notes"] = {
            fix: {key: PATHS.sub("", value) for key, value in said.items()}
            for fix, said in row["notes"].items()
        }
    return rows


def _public(state: str) -> str:
    """Return a state without the folders of the file that it names."""
    return FOLDERS.sub("", state)


def prefers_html(accept: str) -> bool:
    """Return whether an Accept header ranks text/html above application/json.

    A browser does. `curl` sends `*/*`, which ranks both alike, and gets JSON.
    """
    ranks: dict[str, float] = {}
    for part in accept.split(","):
        kind, *parameters = (word.strip().lower() for word in part.split(";"))
        quality = 1.0
        for parameter in parameters:
            if parameter.startswith("q="):
                try:
                    quality = float(parameter[2:])
                except ValueError:
                    quality = 0.0
        ranks[kind] = quality
    rest = ranks.get("*/*", 0.0)
    html = ranks.get("text/html", ranks.get("text/*", rest))
    return html > ranks.get("application/json", ranks.get("application/*", rest))


def state_in(receipt: Mapping[str, Any], fix: str) -> str:
    """Return what one process shows of one fix: applied, waiting (not imported yet) or missing."""
    if receipt["state"] == "starting":
        return WAITING
    state = receipt["fixes"].get(fix)
    return state if state in (APPLIED, WAITING) else MISSING


def applied_by_role(facts: Facts) -> dict[tuple[str, str], bool]:
    """Return {(fix, role): every process that should have applied the fix shows it}.

    A role whose processes have all not imported the fix's modules yet has no entry.
    """
    result: dict[tuple[str, str], bool] = {}
    for fix in facts["fixes"]:
        if fix["verdict"] != "apply":
            continue
        for receipt in facts["receipts"]:
            state = state_in(receipt, fix["name"])
            if state != WAITING:
                key = (fix["name"], receipt["role"])
                result[key] = result.get(key, True) and state == APPLIED
    return result


def gauge_values(plan_file: Path, plan: Mapping[str, Any]) -> dict[tuple[str, str], bool]:
    """Return ``applied_by_role``; what cannot be read now proves no fix of the plan applied.

    Raises nothing: vLLM's own metrics are served beside these, whatever our files hold.
    """
    try:
        return applied_by_role(read_facts(plan_file))
    except Exception:
        return {(f["name"], UNKNOWN): False for f in plan["fixes"] if f["verdict"] == "apply"}


def as_json(facts: Facts) -> str:
    """Return the facts as JSON for a person and a program."""
    return json.dumps(facts, indent=2) + "\n"


def as_html(facts: Facts) -> str:
    """Return the facts as one HTML page that loads nothing else. Every value is escaped."""
    on = [fix["name"] for fix in facts["fixes"] if fix["verdict"] == "apply"]
    whole = bool(facts["receipts"]) and all(applied_by_role(facts).values())
    verdict = "Every process shows its fixes" if whole else "A process does not show its fixes"
    if not on:
        verdict = "No fix is on"
    recipe = facts["recipe"]
    name = recipe["name"] + (f" ({recipe['variant']})" if recipe.get("variant") else "")
    return PAGE.substitute(
        state="good" if whole else "bad",
        verdict=escape(verdict),
        about="".join(
            f"<dt>{label}</dt><dd>{escape(value)}</dd>"
            for label, value in (
                ("Recipe", name),
                ("Model", facts["model"]),
                ("vLLM", facts["vllm"]),
                ("Plan", facts["digest"]),
            )
        ),
        fixes="".join(_fix_row(fix) for fix in facts["fixes"]) or _nothing(4, "none"),
        names="".join(f'<th scope="col">{escape(name)}</th>' for name in on),
        receipts="".join(_receipt_row(receipt, on) for receipt in facts["receipts"])
        or _nothing(3 + len(on), "no process"),
    )


def _nothing(columns: int, text: str) -> str:
    return f'<tr><td class="quiet" colspan="{columns}">{escape(text)}</td></tr>'


def _fix_row(fix: Mapping[str, Any]) -> str:
    flag = f"{fix['flag']}={fix['value']} ({fix['value_from']})" if fix["flag"] else "none"
    reasons = "; ".join(fix["reasons"])
    cells = "".join(f"<td>{escape(text)}</td>" for text in (fix["verdict"], flag, reasons))
    return f'<tr><th scope="row">{escape(fix["name"])}</th>{cells}</tr>'


def _receipt_row(receipt: Mapping[str, Any], on: list[str]) -> str:
    role = receipt["role"] + (f" {receipt['rank']}" if receipt["rank"] is not None else "")
    if "node" in receipt:
        host = f"{receipt['host']} {receipt['address']}" if receipt["host"] else "no host yet"
        role = f"{role}, node {receipt['node']} on {host}"
    pid = "" if receipt["pid"] is None else str(receipt["pid"])
    cells = [f'<th scope="row">{escape(role)}</th>', f"<td>{escape(pid)}</td>"]
    cells.append(f'<td class="quiet">{escape(receipt["state"])}</td>')
    for name in on:
        state = state_in(receipt, name)
        said = receipt["notes"].get(name, {}).items()
        notes = "".join(f'<div class="quiet">{escape(f"{k}: {v}")}</div>' for k, v in said)
        cells.append(f'<td class="{state}">{LABELS[state]}{notes}</td>')
    return f"<tr>{''.join(cells)}</tr>"


LABELS = {APPLIED: "✓ applied", WAITING: "not imported", MISSING: "✗ missing"}

PAGE = Template("""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>Overlay</title>
<style>
:root { color-scheme: light dark; --line: #8884; --quiet: #6b7280; --good: #15803d; --bad: #b91c1c }
@media (prefers-color-scheme: dark) { :root { --quiet: #9ca3af; --good: #4ade80; --bad: #f87171 } }
body { font: 15px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 64rem; padding: 0 1rem }
h1 { font-size: 1.4rem; margin: 0 0 1rem } h2 { font-size: 1rem; margin: 2rem 0 .5rem }
dl { display: grid; grid-template-columns: max-content 1fr; gap: .15rem 1.5rem; margin: 0 }
dt, .quiet { color: var(--quiet) } dd { margin: 0; overflow-wrap: anywhere }
.scroll { overflow-x: auto } table { border-collapse: collapse; width: 100% }
th, td { text-align: left; padding: .4rem .8rem .4rem 0; border-bottom: 1px solid var(--line) }
th { font-weight: 600 } thead th { color: var(--quiet); font-weight: 400; white-space: nowrap }
.good, .applied { color: var(--good) } .bad, .missing { color: var(--bad); font-weight: 600 }
.waiting { color: var(--quiet) }
</style>
</head>
<body>
<h1 class="$state">$verdict</h1>
<dl>$about</dl>
<h2>Fixes</h2>
<div class="scroll"><table>
<thead><tr><th scope="col">Fix</th><th scope="col">Verdict</th><th scope="col">Flag</th>
<th scope="col">Why</th></tr></thead>
<tbody>$fixes</tbody>
</table></div>
<h2>Processes</h2>
<div class="scroll"><table>
<thead><tr><th scope="col">Role</th><th scope="col">Process</th>
<th scope="col">State</th>$names</tr></thead>
<tbody>$receipts</tbody>
</table></div>
</body>
</html>
""")
