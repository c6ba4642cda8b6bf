"""A plan as tables."""

import math
from collections.abc import Iterator

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from rl_bridge.planning.memory import KEPT_VERSIONS, WHY_NOT_14, RoleMemory
from rl_bridge.planning.plan import RentedFleet, RunPlan


def view(found: RunPlan, *, gpu_gb: float | None) -> RenderableType:
    """What a plan knows, one table below the other.

    Args:
        found: The plan.
        gpu_gb: Memory of one GPU, in GB, to say what does not fit; None says nothing of it.
    """
    return Group(*_parts(found, gpu_gb))


def _parts(found: RunPlan, gpu_gb: float | None) -> Iterator[RenderableType]:
    if found.parameters is not None and found.trainer_bytes is not None:
        beside, why = "", WHY_NOT_14
        if found.adapters is not None:
            beside, why = f" and {found.adapters:,} of adapters", "16 bytes one of an adapter, 4 a frozen one"
        yield Text(
            f"{found.parameters:,} parameters{beside}; the trainer keeps {_gb(found.trainer_bytes)} for them: {why}"
        )
        if found.decided:
            yield Text(", ".join(f"{key} {value}" for key, value in found.decided.items()))
        if found.roles:
            yield _memory(found.roles, gpu_gb)
            yield Text(
                "beside these: activations, which grow with trainer.tokens_per_pass; and in the "
                f"memory of the trainer's hosts, {KEPT_VERSIONS} versions of the weights on their way, "
                f"{_gb(found.kept_bytes or 0)}"
            )
        elif gpu_gb is not None:
            gpus = math.ceil(found.trainer_bytes / (gpu_gb * 1e9))
            yield Text(f"which is at least {gpus} GPUs of {gpu_gb:g} GB, activations apart")
    if found.sent_bytes is not None:
        yield Text(f"{_gb(found.sent_bytes)} of new weights to each generator:")
        yield _broadcast(found)
    if found.fleet is not None:
        yield _cost(found.fleet)


def _memory(roles: tuple[RoleMemory, ...], gpu_gb: float | None) -> Table:
    table = Table(title="memory of each role", title_justify="left")
    table.add_column("role")
    table.add_column("replicas x processes", justify="right")
    table.add_column("a process, at least", justify="right")
    table.add_column("which is, of all processes of a replica together", overflow="fold")
    if gpu_gb is not None:
        table.add_column(f"in {gpu_gb:g} GB")
    for role in roles:
        parts = [f"{name} {_gb(size)}" for name, size in role.parts.items()]
        parts += [f"{name} {_gb(size)} each" for name, size in role.per_process.items()]
        parts += [f"up to {_gb(size)} for {name}" for name, size in role.at_best.items()]
        cells = [role.role, f"{role.replicas} x {role.processes}", _gb(role.process_bytes), ", ".join(parts)]
        if gpu_gb is not None:
            cells.append(_fit(role, gpu_gb))
        table.add_row(*cells)
    return table


def _fit(role: RoleMemory, gpu_gb: float) -> str:
    share = "" if role.gpu_share == 1.0 else f" in the {role.gpu_share:.0%} that it may have"
    return f"fits{share}" if role.fits(gpu_gb * 1e9) else f"[yellow]does not fit{share}"


def _broadcast(found: RunPlan) -> Table:
    table = Table()
    table.add_column("Gbps", justify="right")
    table.add_column("seconds", justify="right")
    if found.generators is not None:
        table.add_column(f"to all {found.generators}, seconds", justify="right")
    idle = any(broadcast.idle is not None for broadcast in found.broadcasts)
    if idle:
        table.add_column("idle in a synchronous loop", justify="right")
    for broadcast in found.broadcasts:
        cells = [f"{broadcast.gbps:g}", f"{broadcast.seconds:.3g}"]
        if broadcast.all_seconds is not None:
            cells.append(f"{broadcast.all_seconds:.3g}")
        if broadcast.idle is not None:
            cells.append(f"{broadcast.idle:.1%}")
        table.add_row(*cells)
    return table


def _cost(fleet: RentedFleet) -> Table:
    table = Table(title=f"cost of {fleet.hours:g} hours", title_justify="left")
    for heading in ("", "GPUs", "price an hour", "cost"):
        table.add_column(heading, justify="right" if heading else "left")
    table.add_row("spot", str(fleet.spot_gpus), f"{fleet.spot_price:,.2f}", f"{fleet.spot_cost:,.2f}")
    table.add_row(
        "on demand",
        str(fleet.on_demand_gpus),
        f"{fleet.on_demand_price:,.2f}",
        f"{fleet.on_demand_cost:,.2f}",
    )
    gpus = str(fleet.spot_gpus + fleet.on_demand_gpus)
    table.add_row("together", gpus, "", f"{fleet.cost:,.2f}", style="bold")
    table.add_row("all on demand", gpus, "", f"{fleet.all_on_demand:,.2f}")
    table.add_row("saved", "", "", f"{fleet.saved_share:.1%}")
    return table


def _gb(size: float) -> str:
    return f"{size / 1e9:,.1f} GB" if size >= 1e8 else f"{size / 1e6:,.1f} MB"
