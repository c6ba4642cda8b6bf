"""Assembly of a run: starts its services, servers and logs, and stops them again."""

import asyncio
import contextlib
import logging
import os
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console

from openenv_core.providers import ServerFleet
from openenv_core.providers.fleet import open_fleet
from rl_bridge.algorithms.functions import load_advantage, load_loss
from rl_bridge.buffer.ledger import Ledger
from rl_bridge.buffer.replay import Admission, ReplayBuffer
from rl_bridge.config import Config, EnvConfig, MonarchConfig, RoleConfig, resolve
from rl_bridge.data.actor import DatasetActor
from rl_bridge.devices import allocator_environment
from rl_bridge.environments.servers import (
    CODER_URLS_VARIABLE,
    EnvironmentServers,
    coder_urls_file,
    read_token,
    run_servers,
    write_coder_urls,
)
from rl_bridge.errors import ConfigError, NoReplicaError, ReplicaLostError, RoleError
from rl_bridge.generator.actor import PolicyActor
from rl_bridge.generator.client import GeneratorClient
from rl_bridge.generator.vllm_api import ONE_THREAD
from rl_bridge.loops.cross_table import Opponents, initial_player, opponent_config, player_folder
from rl_bridge.loops.grpo import collect
from rl_bridge.loops.observation import RunObserver
from rl_bridge.loops.recovery import rewind
from rl_bridge.loops.run import GroupHistory, Run, environment_role, snapshot, trainer_settings
from rl_bridge.loops.weight_sync import WeightSync
from rl_bridge.metrics.sinks import TRACKERS, EnvironmentSink, JsonlSink, MetricsLog, Sink, TensorBoardSink
from rl_bridge.metrics.spans import span
from rl_bridge.metrics.status import StatusServer, choose_status_host
from rl_bridge.records import RolloutRecords
from rl_bridge.rewards.actor import RewardActor, RewardModelActor
from rl_bridge.rollout.actor import USED_SERVICES, RolloutActor
from rl_bridge.rollout.dispatcher import Dispatcher
from rl_bridge.rollout.policy import ChatPolicy
from rl_bridge.rollout.single_turn import DatasetReport
from rl_bridge.rollout.task import Task, load_tasks
from rl_bridge.services.actor import BoundOptions, ServiceActor
from rl_bridge.services.fleet import Fleet
from rl_bridge.services.handle import Roster
from rl_bridge.services.hosts import Hosts
from rl_bridge.services.joining import SECRET_FILE, JoinServer, make_secret
from rl_bridge.services.placement import options_of, order_for_placement
from rl_bridge.services.service import Service, report_errors
from rl_bridge.tokens.chat import ChatTokenizer
from rl_bridge.trainer.actor import ReferenceActor, TrainerActor
from rl_bridge.trainer.profile import flight_recorder_environment
from rl_bridge.weights import WeightStore

logger = logging.getLogger(__name__)

JOB_MESH = "hosts"
METRICS_FILE = "metrics.jsonl"
LOGS = "logs"
"""Folder, in a run's folder, of a log for each process. It exists once the first process has been started."""
TRANSFER_SHARE = 0.25
"""Share of a synchronisation's deadline for one transfer. The whole deadline covers a push's wait for readers, its
transfer and the fetch, and a generator whose link hangs is noticed and dropped before it ends."""
ENGINES_TIMEOUT_S = 5.0
"""How long to wait for the generators to say how busy they are."""
UPDATE_TIMEOUT_S = 60.0
"""Deadline in seconds for one update to reach all replicas, before the next is sent."""
START_REPORT_INTERVAL_S = 20.0
"""Seconds between messages about the services that are still starting."""


class ServiceUpdates:
    """Sends the newest update for each endpoint to all replicas of a service; superseded ones are dropped.

    A replica that starts later gets them from its service, which replays the endpoints. `on_error` is called with an
    error, if any.
    """

    def __init__(self, *, on_error: Callable[[BaseException], None]) -> None:
        self._on_error = on_error
        self._pending: dict[str, Any] = {}
        self._wake = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    def tell(self, endpoint: str, update: Any) -> None:
        """Send an update to the replicas' endpoint soon."""
        self._pending[endpoint] = update
        self._wake.set()

    async def begin(self, service: Service) -> None:
        """Send all updates now, and later ones in the background; BridgeError if no replica can be reached.

        A replica that does not take an update in time causes only a warning.
        """
        await self._send_pending(service)
        self._task = asyncio.create_task(self._send_loop(service))
        report_errors(self._task, self._on_error)

    async def close(self) -> None:
        """Stop sending updates."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def _send_loop(self, service: Service) -> None:
        while True:
            await self._wake.wait()
            self._wake.clear()
            try:
                await self._send_pending(service)
            except (NoReplicaError, ReplicaLostError):
                continue  # restarted replicas get the updates before they serve

    async def _send_pending(self, service: Service) -> None:
        while self._pending:
            endpoint, update = self._pending.popitem()
            try:
                async with asyncio.timeout(UPDATE_TIMEOUT_S):
                    await getattr(service, endpoint).fanout(update)
            except TimeoutError:
                # The others have it; this one gets it before it serves again, or counts as lost when given work.
                logger.warning("a replica of %s did not take an update in time (%s)", service.name, endpoint)


async def start_roles(
    config: Config,
    folder: Path,
    model_path: Path,
    store: WeightStore | None,
    report: Callable[[str], None] = lambda _: None,
) -> dict[str, Service]:
    """Start all services concurrently, in an open fleet; return them by name once all serve.

    `report` gets messages about the services that are still starting, and at last how long each took.

    The store holds the trainer's weights for the generators; without one there is no trainer. A run on an environment
    has no dataset.
    """
    coders = {} if config.monarch.roles.coder is None else {CODER_URLS_VARIABLE: str(coder_urls_file(folder))}
    role_table, role_timeout_s = config.monarch.roles, start_timeout_s(config)
    role_starts: dict[str, tuple[BoundOptions, tuple[Any, ...]]] = {}

    def add(
        name: str, actor: type[ServiceActor], role: RoleConfig, environment: dict[str, str], *args: Any
    ) -> None:
        bound = actor.options(
            **options_of(role),
            gpu_pool=name if config.monarch.colocate else "",
            name=name,
            environment=environment,
            restarts=config.monarch.restarts,
            start_timeout_s=role_timeout_s,
        )
        role_starts[name] = bound, args

    add("policy", PolicyActor, role_table.policy, {}, config, model_path, store)
    if config.has_opponent and store is not None:
        path = player_folder(initial_player(config), folder, model_path)
        add("opponent", PolicyActor, role_table.opponent, {}, opponent_config(config), path)
    if store is not None:
        trainer = trainer_settings(config, folder, model_path)
        environment = ONE_THREAD | allocator_environment(on_gpu=role_table.trainer.gpus > 0)
        if config.trainer.profile_interval:
            environment |= flight_recorder_environment(folder)
        add("trainer", TrainerActor, role_table.trainer, environment, trainer, store)
        if config.has_reference:
            add("reference", ReferenceActor, role_table.reference, ONE_THREAD, trainer)
    workers = RoleConfig(replicas=config.rollout.num_workers)
    add("rollout", RolloutActor, workers, ONE_THREAD | coders, config, folder, model_path)
    if config.data is not None:
        add("dataset", DatasetActor, RoleConfig(), ONE_THREAD, config.data, config.seed)
    if config.reward.function:
        add("reward", RewardActor, role_table.reward, coders, config.reward)
    elif config.reward.model is not None:
        length = config.rollout.max_length
        add("reward", RewardModelActor, role_table.reward, ONE_THREAD, config.reward.model, length)
    tasks: dict[str, asyncio.Task[Service]] = {}
    started_after: dict[str, float] = {}
    began = time.monotonic()

    async def start(name: str) -> Service:
        bound, args = role_starts[name]
        service = await bound.as_service(*args)
        started_after[name] = time.monotonic() - began
        return service

    async def report_slow_starts() -> None:
        while True:
            await asyncio.sleep(START_REPORT_INTERVAL_S)
            unfinished = ", ".join(name for name in role_starts if name not in started_after)
            report(
                f"{unfinished} still starting after {time.monotonic() - began:.0f} s; logs: {folder / LOGS}"
            )

    reporter = asyncio.create_task(report_slow_starts())
    try:
        async with asyncio.timeout(role_timeout_s), asyncio.TaskGroup() as group:
            # Processes are placed in the order in which these tasks start.
            for name in order_for_placement(
                {name: bound.options for name, (bound, _) in role_starts.items()}
            ):
                tasks[name] = group.create_task(start(name))
    except TimeoutError:
        raise RoleError(
            f"expected {', '.join(role_starts)} to be ready within {role_timeout_s:g} s, they are not; "
            f"see the logs in {folder / LOGS}, or raise monarch.start_timeout_s"
        ) from None
    except BaseExceptionGroup as group_error:
        raise group_error.exceptions[0] from group_error
    finally:
        reporter.cancel()
    slowest_first = sorted(started_after, key=started_after.__getitem__, reverse=True)
    report("started: " + ", ".join(f"{name} after {started_after[name]:.0f} s" for name in slowest_first))
    return {name: task.result() for name, task in tasks.items()}


def start_timeout_s(config: Config) -> float:
    """Return a role's deadline in seconds for starting; colocated, it may first wait for its turn on the GPU."""
    return config.monarch.start_timeout_s + (config.trainer.timeout_s if config.monarch.colocate else 0.0)


def _warn_of_idle_gpus(monarch: MonarchConfig) -> None:
    available, used = monarch.num_nodes * monarch.gpus_per_node, monarch.gpus
    if available > used:
        logger.warning(
            "the cluster has %d GPUs (monarch.num_nodes x gpus_per_node), monarch.roles use %d; the others are idle",
            available,
            used,
        )


@dataclass(kw_only=True, slots=True, frozen=True)
class Players:
    """The generators, workers and environments that play episodes, in a run or an evaluation."""

    config: Config
    fleet: Fleet
    roles: Mapping[str, Service]
    chat: ChatPolicy
    dispatcher: Dispatcher
    servers: Mapping[str, EnvironmentServers]


@asynccontextmanager
async def open_players(
    config: Config,
    folder: Path,
    *,
    model_path: Path,
    buffer: ReplayBuffer,
    trains: bool,
    console: Console,
) -> AsyncIterator[Players]:
    """Start the environments, the generators, the workers and, for a run that trains, the trainer; stop them on exit.

    If something that playing needs is lost for good, the buffer, which takes finished groups, and the fleet fail.

    Raises:
        rl_bridge.errors.BridgeError: A service could not be started.
        openenv_core.ProviderError: An environment's server could not be started.
    """
    tokenizer = ChatTokenizer(model_path, thinking=config.model.thinking)
    fleet = Fleet(
        folder / LOGS,
        hosts=_make_hosts(config.monarch, joinable=trains),
        heartbeat_s=config.monarch.heartbeat_interval,
    )

    def print_line(text: str) -> None:
        console.print(text, markup=False, highlight=False, soft_wrap=True)

    def on_failure(error: BaseException) -> None:
        buffer.fail(error)
        fleet.fail(error)

    async with AsyncExitStack() as stack:
        began = time.perf_counter()
        worker_updates, trainer_updates = (ServiceUpdates(on_error=on_failure) for _ in range(2))
        for updates in (worker_updates, trainer_updates):
            stack.push_async_callback(updates.close)
        dispatcher: Dispatcher | None = None

        def on_environment_lost(name: str, error: BaseException) -> None:
            try:
                if dispatcher is None:
                    raise error
                dispatcher.suspend(name, error, permanently=True)
            except BaseException as end:
                on_failure(end)

        servers = _make_servers(config, worker_updates, folder / LOGS)
        for env in config.environments.values():
            print_line(f"starting the environment: {env.app or env.image or env.url} …")
        coders = _make_coders(config.monarch, folder)
        await stack.enter_async_context(run_servers([*servers.values(), *coders]))
        for name in servers:
            stack.callback(_watch(servers[name], partial(on_environment_lost, name)).cancel)
        for coder in coders:
            write_coder_urls(coder_urls_file(folder), coder.urls)
            stack.callback(_watch(coder, on_failure).cancel)
        print_line(f"loading {model_path} …")
        joining = _make_join_server(config.monarch, folder) if trains else None
        if joining is not None:
            await stack.enter_async_context(joining)
        await stack.enter_async_context(fleet)
        store = None
        if trains:
            # Not earlier: the open fleet has set Monarch's transport, which must precede the first actor.
            store = _make_store(config)
            stack.push_async_callback(store.close)
        with span("start", waits_for="processes"):
            roles = await fleet.guard(start_roles(config, folder, model_path, store, print_line))
        client = GeneratorClient(
            roles["policy"], max_batch=config.rollout.max_num_seqs, timeout_s=config.call_timeout_s
        )
        stack.push_async_callback(client.close)
        chat = ChatPolicy(
            tokenizer,
            client,
            max_new_tokens=config.rollout.max_new_tokens,
            max_length=config.rollout.max_length,
        )
        await fleet.guard(_send_initial_updates(worker_updates, trainer_updates, roles, servers))
        if joining is not None:
            await stack.enter_async_context(joining.admit(fleet))
            print_line(f"hosts can join at {joining.address}, with the secret in {folder / SECRET_FILE}")
        dataset = roles.get("dataset")
        print_line(f"everything has started, after {time.perf_counter() - began:.0f} s")
        dispatcher = Dispatcher(
            roles["rollout"],
            buffer,
            config,
            examples=None if dataset is None else (await dataset.identity.route())["examples"],
            collect=collect,
            explain=(lambda name: servers[name].traceback()) if servers else None,
            query_engines=partial(roles["policy"].query_replicas, "statistics", timeout_s=ENGINES_TIMEOUT_S),
        )
        yield Players(
            config=config, fleet=fleet, roles=roles, chat=chat, dispatcher=dispatcher, servers=servers
        )


@asynccontextmanager
async def open_run(
    config: Config, folder: Path, *, console: Console, resume: bool = False
) -> AsyncIterator[tuple[Run, Fleet]]:
    """Start everything that a new or resumed run needs; stop it all on exit."""
    tasks = load_tasks(config, folder)
    model_path = _find_model_path(config, tasks)
    load_loss(config.algorithm.loss)  # for the trainer; here only to fail before anything is started
    advantage = load_advantage(config.algorithm.advantage_function)
    _warn_of_idle_gpus(config.monarch)
    if config.monarch.colocate:
        console.print("trainer and generators take turns on the same GPUs (monarch.colocate)")
    rollout = config.rollout
    buffer = ReplayBuffer(
        Ledger(max_losses=None if rollout.spot_eligible else rollout.max_attempts),
        Admission(
            groups_per_batch=rollout.groups_per_step,
            max_staleness=rollout.max_staleness,
            iterations=config.trainer.iterations,
        ),
        timeout_s=config.stall_timeout_s,
        straggler_timeout_s=rollout.straggler_timeout_s,
    )
    async with AsyncExitStack() as stack:
        players = await stack.enter_async_context(
            open_players(
                config,
                folder,
                model_path=model_path,
                buffer=buffer,
                trains=True,
                console=console,
            )
        )
        roles, fleet, dispatcher = players.roles, players.fleet, players.dispatcher
        policy, trainer, dataset = roles["policy"], roles["trainer"], roles.get("dataset")
        # In a thread, as a tracker connects to its server first.
        metrics = stack.enter_context(await asyncio.to_thread(MetricsLog, _make_sinks(config, folder, tasks)))
        sync = WeightSync(
            on_error=buffer.fail,
            overlapped=config.rollout.max_staleness > 0 and not config.monarch.colocate,
            timeout_s=config.trainer.timeout_s,
        )
        stack.push_async_callback(sync.cancel)
        run = Run(
            config=config,
            folder=folder,
            model_path=model_path,
            tasks=tasks or {"": DatasetReport(folder)},
            chat=players.chat,
            policy=policy,
            trainer=trainer,
            dataset=None if dataset is None else await dataset.identity.route(),
            buffer=buffer,
            dispatcher=dispatcher,
            sync=sync,
            observer=RunObserver(fleet),
            metrics=metrics,
            history=GroupHistory(folder, buffer.ledger),
            records=RolloutRecords(folder, players.chat.tokenizer.raw, config.records),
            console=console,
            advantage=advantage,
            opponents=_make_opponents(players, folder, model_path, tasks, console),
        )
        if config.trainer.activation_checkpointing == "auto":
            console.print(
                f"trainer.activation_checkpointing: {await fleet.guard(trainer.checkpointing.route())}"
            )
        trainer.on_roster(lambda roster: None if roster.targets else run.mark_trainer_lost())
        if resume:
            version = await fleet.guard(rewind(run))
            console.print(
                f"resuming after iteration {version}" if version else "no checkpoint: starting over"
            )
        elif config.monarch.colocate:
            async with run.deadline("a turn of the generators on the GPU"):
                await fleet.guard(policy.update_weights.fanout(0))
        if not resume:
            await fleet.guard(run.meet_opponents(run.version))
        await stack.enter_async_context(
            StatusServer(
                choose_status_host(config.monarch.master_addr, is_local=config.monarch.is_local),
                config.monarch.coord_port,
                lambda: snapshot(run, fleet, players.servers),
                refresh=run.observer.refresh,
                folder=folder,
            )
        )
        await stack.enter_async_context(dispatcher)
        yield run, fleet


def _make_opponents(
    players: Players, folder: Path, model_path: Path, tasks: Mapping[str, Task], console: Console
) -> Opponents | None:
    if not any(env.seats for env in players.config.environments.values()):
        return None
    return Opponents(
        players.config,
        folder,
        model_path,
        generator=players.roles.get("opponent"),
        dispatcher=players.dispatcher,
        tasks=tasks,
        chat=players.chat,
        console=console,
    )


def _watch(servers: EnvironmentServers, on_failure: Callable[[BaseException], None]) -> "asyncio.Task[None]":
    """Watch servers in the background; call `on_failure` once they cannot be restarted any more."""
    task = asyncio.create_task(servers.watch())
    report_errors(task, on_failure)
    return task


async def _send_initial_updates(
    worker_updates: ServiceUpdates,
    trainer_updates: ServiceUpdates,
    roles: Mapping[str, Service],
    servers: Mapping[str, EnvironmentServers],
) -> None:
    """Send workers and trainer the servers and services that they use, now and whenever these change."""

    def send(updates: ServiceUpdates, name: str, roster: Roster) -> None:
        # Tokens are kept by the trainer's first rank alone.
        updates.tell(f"take_{name}", roster.of_first_ranks() if name == "trainer" else roster)

    worker_updates.tell("take_servers", {name: server.urls for name, server in servers.items()})
    used = [(worker_updates, name) for name in USED_SERVICES] + [(trainer_updates, "reference")]
    for updates, name in used:
        if (role := roles.get(name)) is not None:
            role.on_roster(partial(send, updates, name))
            send(updates, name, role.roster)
    await worker_updates.begin(roles["rollout"])
    if "trainer" in roles:
        await trainer_updates.begin(roles["trainer"])


def _make_servers(
    config: Config, worker_updates: ServiceUpdates, logs: Path
) -> dict[str, EnvironmentServers]:
    async def on_change(_: tuple[str, ...]) -> None:
        worker_updates.tell("take_servers", {name: server.urls for name, server in servers.items()})

    servers = {
        name: EnvironmentServers(
            app=env.app if env.fleet is None else None,
            image=env.image if env.fleet is None else None,
            urls=env.urls,
            fleet=_make_fleet(env, config.monarch.roles.environment.min_replicas),
            count=config.monarch.roles.environment.min_replicas,
            restarts=config.monarch.restarts.model_copy(update={"budget": env.restarts}),
            on_change=on_change,
            logs=logs,
            name=environment_role(name),
        )
        for name, env in config.environments.items()
    }
    return servers


def _make_fleet(env: EnvConfig, servers: int) -> ServerFleet | None:
    if env.fleet is None:
        return None
    options = {"token": read_token(env.token_file), **env.fleet_options}
    return open_fleet(env.fleet, str(env.app or env.image), servers, options)


def _make_coders(monarch: MonarchConfig, folder: Path) -> list[EnvironmentServers]:
    async def on_change(urls: tuple[str, ...]) -> None:
        write_coder_urls(coder_urls_file(folder), urls)

    role = monarch.roles.coder
    if role is None:
        return []
    return [
        EnvironmentServers(
            app=role.app, count=role.min_replicas, restarts=monarch.restarts, on_change=on_change
        )
    ]


def _make_hosts(monarch: MonarchConfig, *, joinable: bool) -> Hosts:
    address = f"tcp://{monarch.master_addr}:{monarch.master_port}"
    if monarch.workers:
        return Hosts.workers(monarch.workers, address=address, gpus_per_host=monarch.gpus_per_node)
    if monarch.job is not None:
        job = resolve(monarch.job, key="monarch.job")()
        return Hosts.from_job(
            job,
            mesh=JOB_MESH,
            cpu_mesh=monarch.cpu_mesh,
            gpus_per_host=monarch.gpus_per_node,
            address=address,
        )
    return Hosts.this_machine(address=address if joinable and monarch.join_port is not None else None)


def _make_join_server(monarch: MonarchConfig, folder: Path) -> JoinServer | None:
    if monarch.join_port is None:
        return None
    return JoinServer(
        monarch.master_addr,
        monarch.join_port,
        make_secret(folder),
        notice_file=monarch.preemption_notice_file,
    )


def _make_store(config: Config) -> WeightStore:
    transport = config.monarch.transport
    if transport == "auto":
        transport = "shared_memory" if config.monarch.is_local else "rdma"
    return WeightStore.create(
        transport=transport, transfer_timeout_s=config.trainer.timeout_s * TRANSFER_SHARE
    )


def _make_sinks(config: Config, folder: Path, tasks: Mapping[str, Task]) -> Iterator[Sink]:
    yield JsonlSink(folder / METRICS_FILE)
    for name, task in tasks.items():
        if name:
            yield EnvironmentSink(task.folder / METRICS_FILE, name)
    for sink in dict.fromkeys(config.metrics.sinks):
        if sink == "tensorboard":
            yield TensorBoardSink(folder / "tensorboard")
        else:
            yield TRACKERS[sink](folder, config.metrics.project, config.model_dump(mode="json"))


def _find_model_path(config: Config, tasks: Mapping[str, Task]) -> Path:
    if config.model.path is not None:
        return Path(os.path.expanduser(config.model.path)).absolute()
    for task in tasks.values():
        with contextlib.suppress(NotImplementedError):
            return task.make_policy().absolute()
    raise ConfigError(
        "expected model.path, a checkpoint in the Hugging Face layout; nothing else makes a policy here"
    )
