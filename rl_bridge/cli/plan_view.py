"""Renders a run's plan as tables."""

import math
from collections.abc import Iterator

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from rl_bridge.cli.common import make_table
from rl_bridge.planning import BYTES_EXPLANATION, RentedFleet, RoleMemory, RunPlan


def render_plan(plan: RunPlan, *, gpu_gb: float | None) -> RenderableType:
    """Return the plan as tables; with the memory of one GPU, in GB, also what fits."""
    return Group(*_render_parts(plan, gpu_gb))


def _render_parts(plan: RunPlan, gpu_gb: float | None) -> Iterator[RenderableType]:
    if plan.parameters is not None and plan.trainer_bytes is not None:
        adapters_note, reason = "", BYTES_EXPLANATION
        if plan.adapters is not None:
            adapters_note = f" and {plan.adapters:,} of adapters"
            reason = "16 bytes one of an adapter, 4 a frozen one"
        summary = f"{plan.parameters:,} parameters{adapters_note}; the trainer keeps "
        summary += f"{_format_size(plan.trainer_bytes)} for them"
        yield Text(f"{summary}: {reason}")
        if plan.decided:
            yield Text(", ".join(f"{key} {value}" for key, value in plan.decided.items()))
        if plan.roles:
            yield _make_memory_table(plan.roles, gpu_gb)
        elif gpu_gb is not None:
            gpus = math.ceil(plan.trainer_bytes / (gpu_gb * 1e9))
            yield Text(f"which is at least {gpus} GPUs of {gpu_gb:g} GB, activations apart")
    if plan.sent_bytes is not None:
        yield Text(f"{_format_size(plan.sent_bytes)} of new weights to each generator:")
        yield _make_broadcast_table(plan)
    if plan.fleet is not None:
        yield _make_cost_table(plan.fleet)


def _make_memory_table(roles: tuple[RoleMemory, ...], gpu_gb: float | None) -> Table:
    headings = ["role", ">replicas x processes", ">a process, at least", "a replica's parts", "host memory"]
    if gpu_gb is not None:
        headings.append(f"in {gpu_gb:g} GB")
    memory_table = make_table("memory of each role", headings, (_format_role(role, gpu_gb) for role in roles))
    for row, role in zip(memory_table.rows, roles, strict=True):
        row.style = "" if gpu_gb is None or role.free_bytes(gpu_gb * 1e9) >= 0 else "yellow"
    return memory_table


def _format_role(role: RoleMemory, gpu_gb: float | None) -> list[str]:
    parts = [f"{name} {_format_size(size)}" for name, size in role.parts.items()]
    parts += [f"{name} {_format_size(size)} each" for name, size in role.per_process.items()]
    parts += [f"up to {_format_size(size)} for {name}" for name, size in role.at_best.items()]
    host = ", ".join(f"{name} {_format_size(size)}" for name, size in role.host.items())
    cells = [
        role.role,
        f"{role.replicas} x {role.processes}",
        _format_size(role.process_bytes),
        ", ".join(parts),
        host,
    ]
    return cells if gpu_gb is None else [*cells, _describe_fit(role, gpu_gb)]


def _describe_fit(role: RoleMemory, gpu_gb: float) -> str:
    share = "" if role.gpu_share == 1.0 else f" in the {role.gpu_share:.0%} that it may have"
    free_bytes = role.free_bytes(gpu_gb * 1e9)
    if free_bytes < 0:
        return f"does not fit{share}"
    full = sum(role.at_best.values())
    return f"fits{share}" + (f", with {min(1.0, free_bytes / full):.0%} of a full cache" if full else "")


def _make_broadcast_table(plan: RunPlan) -> Table:
    columns = {
        ">Gbps": [f"{broadcast.gbps:g}" for broadcast in plan.broadcasts],
        ">seconds": [f"{broadcast.seconds:.3g}" for broadcast in plan.broadcasts],
        f">to all {plan.generators}, seconds": [
            f"{broadcast.all_seconds:.3g}"
            for broadcast in plan.broadcasts
            if broadcast.all_seconds is not None
        ],
        ">idle in a synchronous loop": [
            f"{broadcast.idle:.1%}" for broadcast in plan.broadcasts if broadcast.idle is not None
        ],
    }
    filled_columns = {heading: cells for heading, cells in columns.items() if cells}
    return make_table(None, filled_columns, zip(*filled_columns.values(), strict=True))


def _make_cost_table(fleet: RentedFleet) -> Table:
    gpus = fleet.spot_gpus + fleet.on_demand_gpus
    rows = (
        ("spot", fleet.spot_gpus, f"{fleet.spot_price:,.2f}", f"{fleet.spot_cost:,.2f}"),
        ("on demand", fleet.on_demand_gpus, f"{fleet.on_demand_price:,.2f}", f"{fleet.on_demand_cost:,.2f}"),
        ("together", gpus, "", f"{fleet.cost:,.2f}"),
        ("all on demand", gpus, "", f"{fleet.all_on_demand:,.2f}"),
        ("saved", "", "", f"{fleet.saved_share:.1%}"),
    )
    return make_table(f"cost of {fleet.hours:g} hours", (" ", ">GPUs", ">price per hour", ">cost"), rows)


def _format_size(size: float) -> str:
    return f"{size / 1e9:,.1f} GB" if size >= 1e8 else f"{size / 1e6:,.1f} MB"
