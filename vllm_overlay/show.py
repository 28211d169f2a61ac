"""Tables for the terminal: a plan, and the verdicts of a check."""

from __future__ import annotations

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from vllm_overlay.checks import Checked
from vllm_overlay.evidence import short
from vllm_overlay.nodes import Seat
from vllm_overlay.plan import Plan

COLOURS = {"apply": "green", "off": "dim", "upstreamed": "cyan"}


def plan_table(plan: Plan, seat: Seat | None = None) -> RenderableType:
    """Return a plan as a reader wants it: what is served, with which fixes, from where, by whom."""
    facts = Table.grid(padding=(0, 2))
    name = plan.recipe["name"] + (f" ({plan.recipe['variant']})" if plan.recipe["variant"] else "")
    for label, value in (
        ("recipe", f"{name}  {plan.recipe['file']}"),
        ("plan", plan.digest[:16]),
        ("vLLM", f"{plan.vllm['version']}  {plan.vllm['path']}"),
        ("model", f"{plan.model} as {plan.served_model}"),
        ("fixes from", f"{plan.folders['fixes']} ({plan.folders['source']})"),
        ("cache key", plan.cache_key),
    ):
        facts.add_row(label, Text(value))
    for item in plan.overrides:
        facts.add_row("override", Text(f"{item['flag']}: {item['recipe']} -> {item['now']}"))
    for note in plan.notes:
        facts.add_row("note", Text(note))
    if plan.nodes and seat is None:
        facts.add_row("nodes", str(plan.nodes["count"]))
    for line in seat.told if seat else ():
        facts.add_row("node", Text(line))
    table = Table()
    for heading in ("fix", "verdict", "flag", "targets", "why"):
        table.add_column(heading, overflow="fold")
    for fix in plan.fixes:
        flag = f"{fix.flag}={fix.value} ({fix.value_from})" if fix.flag else ""
        targets = "\n".join(f"{target['kind']} {target['module']}" for target in fix.targets)
        table.add_row(fix.name, _verdict(fix.verdict), flag, targets, Text("\n".join(fix.reasons)))
    return Group(facts, table) if plan.fixes else facts


def check_table(result: Checked) -> RenderableType:
    """Return the verdict of every fix against one vLLM."""
    table = Table(title=f"vLLM {result.version}  {result.path}", title_justify="left")
    for heading in ("fix", "verdict", "why"):
        table.add_column(heading, overflow="fold")
    for item in result.judged:
        why = Text("\n".join(item.reasons))
        why.append("".join(f"\n{line}" for line in short(item)), "dim")
        table.add_row(item.fix.name, _verdict(item.verdict), why)
    return table


def _verdict(verdict: str) -> Text:
    return Text(verdict, style=COLOURS.get(verdict, "bold red"))
