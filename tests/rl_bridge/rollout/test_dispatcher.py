"""The dispatcher over simulated workers: lost, late, cut, preempted and rewound groups."""

import asyncio
import json
import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

import pytest
from dispatcher_stage import (
    LOST,
    SIBLINGS,
    UNFINISHED,
    Bridge,
    Workers,
    answer,
    cut_short,
    hand_back,
    play_altered,
    play_at_once,
    play_in_order,
    sibling_numbers,
)

from benchmarks.simulated_time import simulated
from rl_bridge.algorithms.advantages import NO_VARIANCE
from rl_bridge.buffer.replay import STALE, STRAGGLER
from rl_bridge.buffer.stored import TokenStore, token_key
from rl_bridge.config.self_play import TRAINED
from rl_bridge.errors import ReplicaLostError
from rl_bridge.rollout.assignment import (
    TRAINING_SEEDS,
    Assignment,
    AssignmentResult,
    EpisodeSettings,
    Outcome,
    task_seed,
)
from rl_bridge.rollout.groups import stored_batch, trained_trajectories
from rl_bridge.tokens.arrays import TrajectoryTokens, dump_tokens
from rl_bridge.types import Group, Trajectory


@simulated
async def test_groups_are_played_as_far_as_admission_allows_and_no_further() -> None:
    bridge = Bridge(play_at_once, slots=3, groups=4, deterministic=True)
    async with bridge.dispatcher:
        groups = await bridge.sample()
        await asyncio.sleep(100.0)
        assert len(bridge.workers.assignments) == 4
        assert bridge.workers.most_in_flight == 3
        bridge.serve(1)
        assert {group.version for group in await bridge.sample(1)} == {1}
    assert [group.id for group in groups] == [0, 1, 2, 3]
    assert [group.seed for group in groups] == [task_seed(7, number) for number in range(4)]
    assert all(sibling_numbers(group) == [0, 1, 2, 3] for group in groups)
    assignment = bridge.workers.assignments[1]
    assert assignment.seeds == (task_seed(7, 1),) * SIBLINGS
    assert assignment.sampling_key == (7, 1)
    assert assignment.settings == EpisodeSettings.of(bridge.config, temperature=1.0)
    assert bridge.dispatcher.counts.played == 8 * SIBLINGS


@simulated
async def test_groups_of_a_lost_worker_are_played_by_another_ahead_of_new_ones() -> None:
    bridge = Bridge(
        play_in_order(ReplicaLostError("killed"), 1e9), max_staleness=4, slots=2, deterministic=True
    )
    async with bridge.dispatcher:
        assert [group.id for group in await bridge.sample()] == [0, 2]
        lost, stuck, again, *_ = bridge.workers.assignments
        assert (again.seeds, again.sampling_key) == (lost.seeds, lost.sampling_key)
        assert again.lease != lost.lease
        assert bridge.workers.told_to_stop == []
        await asyncio.sleep(320.0)  # the one that does not answer is told to stop when its time is over
        assert bridge.workers.told_to_stop == [stuck.lease]
        assert bridge.workers.assignments[-1].seeds == stuck.seeds
        assert bridge.buffer.ledger.lost == 2


@simulated
async def test_straggler_brings_the_siblings_that_it_has() -> None:
    async def how(workers: Workers, assignment: Assignment) -> AssignmentResult:
        if len(workers.assignments) > 2:
            return await play_at_once(workers, assignment)
        await workers.stopped[assignment.lease].wait()
        return cut_short(assignment, finished=3 if assignment.lease == 0 else 1)

    bridge = Bridge(how)
    async with bridge.dispatcher:
        groups = await bridge.sample()
    assert [(group.id, sibling_numbers(group)) for group in groups] == [(0, [0, 1, 2]), (2, [0, 1, 2, 3])]
    assert bridge.buffer.ledger.dropped == {"too few siblings: 1 played, 3 unfinished": 1}


@simulated
async def test_preempted_worker_hands_on_what_is_left_and_no_episode_is_played_twice() -> None:
    def handed_back(assignment: Assignment) -> AssignmentResult:
        first, _, third, _ = answer(assignment).outcomes
        return answer(assignment, outcomes=(first, LOST, third, UNFINISHED), retried=3, preempted=True)

    bridge = Bridge(play_in_order(handed_back), groups=1, max_losses=0)
    async with bridge.dispatcher:
        (group,) = await bridge.sample()
    assert [one.siblings for one in bridge.workers.assignments] == [(0, 1, 2, 3), (3,)]
    assert bridge.workers.assignments[1].seeds == (group.seed,)
    assert bridge.workers.assignments[1].sampling_key is None  # only deterministic runs have one
    assert sibling_numbers(group) == [0, 2, 3]
    assert bridge.buffer.ledger.lost == 0
    counts = bridge.dispatcher.counts
    assert (counts.played, counts.dropped, counts.retried) == (3, 1, 3)


@simulated
async def test_siblings_of_a_preempted_worker_do_not_become_too_old_meanwhile() -> None:
    lost: list[Assignment] = []

    async def how(workers: Workers, assignment: Assignment) -> AssignmentResult:
        if len(workers.assignments) == 1:
            await asyncio.sleep(5.0)  # others are trained, and new weights served, meanwhile
            return hand_back(assignment)
        if not lost and len(assignment.seeds) == 3:
            lost.append(assignment)
            raise ReplicaLostError("and another")
        if len(assignment.seeds) == 3:
            await asyncio.sleep(30.0)  # the rest of that group takes its time
        return await play_at_once(workers, assignment)

    bridge = Bridge(how, max_staleness=1, groups=1)
    ages: list[tuple[int, int]] = []
    async with bridge.dispatcher:
        for version in range(4):
            (group,) = await bridge.sample(version)
            ages.append((group.id, version - group.version))
            bridge.serve(version + 1)
    assert (0, 1) in ages  # trained while it still could be
    assert not bridge.buffer.ledger.dropped


@simulated
async def test_rewind_recalls_what_is_under_way_and_repeats_what_came_after() -> None:
    bridge = Bridge(play_at_once, max_staleness=1)
    async with bridge.dispatcher:
        first = await bridge.sample(0)
        bridge.serve(1)
        await asyncio.sleep(10.0)
        run_state, _ = bridge.dispatcher.state()
        run_state = json.loads(json.dumps(run_state))
        second = await bridge.sample(1)
        bridge.serve(2)
        await asyncio.sleep(0.5)
        under_way = [lease.id for lease in bridge.buffer.ledger.leases]
        assert under_way

        await bridge.dispatcher.rewind(1, run_state)
        bridge.workers.version = 1
        assert await bridge.sample(1) == second
        await asyncio.sleep(0.1)
        assert set(under_way) <= set(bridge.workers.told_to_stop)
        bridge.serve(2)
        third = await bridge.sample(2)
        trained = [group.id for group in [*first, *second, *third]]
        assert trained == sorted(set(trained)) == list(range(6))
        assert bridge.dispatcher.counts.played == bridge.buffer.ledger.live * SIBLINGS

        await bridge.dispatcher.rewind(0, None)
        assert [group.id for group in await bridge.sample(0)] == [0, 1]


@simulated
async def test_late_results_are_not_counted() -> None:
    def retried(assignment: Assignment) -> AssignmentResult:
        return answer(assignment, retried=1)

    bridge = Bridge(play_in_order(100.0, retried), groups=1)  # the first does not listen
    async with bridge.dispatcher:
        (group,) = await bridge.sample()
        await asyncio.sleep(100.0)
    assert group.id == 1
    assert bridge.buffer.ledger.late == 1
    assert (bridge.dispatcher.counts.played, bridge.dispatcher.counts.retried) == (SIBLINGS, 1)


SELF_PLAY = {"white": TRAINED, "black": TRAINED}


@simulated
async def test_self_play_is_for_training_alone_and_a_table_is_assigned_as_a_whole() -> None:
    bridge = Bridge(play_at_once, slots=1, iterations=1, groups=1, seats=("white", "black"))
    async with bridge.dispatcher as dispatcher:
        await bridge.sample()
        (training,) = bridge.workers.assignments
        await dispatcher.play_held_out(range(100, 103), lambda *_: None)
    assert (training.seatings, training.tables) == ((SELF_PLAY,), [[0, 1], [2, 3]])
    rest = replace(training, seeds=training.seeds[2:], siblings=training.siblings[2:])
    assert rest.tables == [[0, 1]]  # of what is left of a group
    held_out = bridge.workers.assignments[-1]
    assert (held_out.seatings, held_out.tables) == ((), [[0], [1], [2]])


@simulated
async def test_held_out_episodes_are_played_once_each_whoever_is_lost() -> None:
    def one_dropped(assignment: Assignment) -> AssignmentResult:
        return answer(assignment, outcomes=(LOST, *answer(assignment).outcomes[1:]))

    killed = ReplicaLostError("killed")
    play = play_in_order(one_dropped, killed, hand_back, one_dropped, one_dropped, one_dropped)
    bridge = Bridge(play, slots=1, iterations=0)
    outcomes: dict[int, Outcome] = {}
    greedy = EpisodeSettings.of(bridge.config, temperature=0.0)
    async with bridge.dispatcher as dispatcher:
        await dispatcher.play_held_out(range(100, 110), outcomes.__setitem__)
    seeds = [outcomes[place].seed if isinstance(outcomes[place], Trajectory) else None for place in range(10)]
    # The second part was lost and then handed on by a worker that had to go; each last player drops one.
    assert seeds == [None, 101, 102, 103, 104, None, 106, 107, None, 109]
    assert all(one.settings == greedy for one in bridge.workers.assignments)
    assert len({one.lease for one in bridge.workers.assignments}) == len(bridge.workers.assignments)
    assert max(one.lease for one in bridge.workers.assignments) < 0


@simulated
async def test_held_out_episodes_that_nobody_waits_for_any_more_are_stopped() -> None:
    """As when the trainer is lost while a cross-table is made: they would go on beside those of the next try."""
    bridge = Bridge(play_in_order(*[1000.0] * 9), iterations=0)
    async with bridge.dispatcher as dispatcher:
        playing = asyncio.create_task(dispatcher.play_held_out(range(8), lambda *_: None))
        await asyncio.sleep(1.0)
        leases = sorted(one.lease for one in bridge.workers.assignments)
        assert leases == [-2, -1]
        playing.cancel()
        await asyncio.gather(playing, return_exceptions=True)
        await asyncio.sleep(1.0)
        assert sorted(bridge.workers.told_to_stop) == leases


@simulated
async def test_held_out_episodes_that_are_sampled_have_seeds_of_their_own_in_a_deterministic_run() -> None:
    bridge = Bridge(play_at_once, iterations=0, deterministic=True)
    async with bridge.dispatcher as dispatcher:
        await dispatcher.play_held_out(range(8), lambda *_: None, temperature=0.7)
        await dispatcher.play_held_out(range(4), lambda *_: None)
    *sampled, greedy = bridge.workers.assignments
    assert {one.settings.temperature for one in sampled} == {0.7}
    assert {one.sampling_key for one in sampled} == {(7, TRAINING_SEEDS), (7, TRAINING_SEEDS + 4)}
    assert (greedy.settings.temperature, greedy.sampling_key) == (0.0, None)


@pytest.mark.parametrize(
    ("max_staleness", "refused", "steps", "rewinds"),
    [(0, 0.0, 60, 5), (2, 0.4, 60, 5), pytest.param(4, 0.2, 1000, 10, marks=pytest.mark.slow)],
)
@simulated
async def test_random_failures_train_every_group_once_and_return_every_slot(
    max_staleness: int, refused: float, steps: int, rewinds: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Random losses, preemptions, drops, hangs, stragglers, refusals and rewinds; then everything is accounted for."""
    chance, store = random.Random(max_staleness), TokenStore()

    def refuse(group: Group, rewards: Sequence[float]) -> str | None:
        return NO_VARIANCE if chance.random() < refused else None

    monkeypatch.setattr("rl_bridge.algorithms.advantages.without_variance", refuse)

    async def how(workers: Workers, assignment: Assignment) -> AssignmentResult:
        luck = chance.random()
        stopped = workers.stopped[assignment.lease]
        outcomes: list[Outcome] = list(answer(assignment, version=workers.version).outcomes)
        try:
            async with asyncio.timeout(1e9 if luck < 0.03 else chance.lognormvariate(1.0, 1.0)):
                await stopped.wait()
        except TimeoutError:
            pass
        else:
            if luck < 0.03 and chance.random() < 0.5:
                await asyncio.sleep(1e9)  # it does not listen
            outcomes = [one if chance.random() < 0.5 else UNFINISHED for one in outcomes]
        if luck < 0.3:
            outcomes = [one if chance.random() < 0.5 else UNFINISHED for one in outcomes]
        elif luck < 0.5:
            outcomes = [one if chance.random() < 0.5 else LOST for one in outcomes]
        finished = [one for one in outcomes if isinstance(one, Trajectory)]
        store.put({token_key(one): TrajectoryTokens.of([]) for one in finished})
        if luck < 0.15:
            raise ReplicaLostError("killed")
        preempted = 0.15 <= luck < 0.3 and UNFINISHED in outcomes
        return answer(assignment, outcomes=tuple(outcomes), preempted=preempted)

    bridge = Bridge(
        how,
        max_staleness=max_staleness,
        groups=4,
        slots=6,
        iterations=steps,
        rollout={"max_lost_share": 1.0},
        algorithm={"dynamic_sampling": True, "max_refills": 1000},
        tasks=16,
    )
    version, rewound, most_kept = 0, 0, 0
    trained: list[int] = []
    staleness = Counter[int]()
    async with bridge.dispatcher as dispatcher:
        saved = 0, 0, dispatcher.state(), dump_tokens({})
        while version < steps:
            groups = await bridge.sample(version)
            assert [group.id for group in groups] == sorted(group.id for group in groups)
            trained += [group.id for group in groups]
            staleness.update(version - group.version for group in groups)
            assert all(2 <= len(group.trajectories) <= SIBLINGS for group in groups)
            for group in groups:
                assert sibling_numbers(group) == sorted(set(sibling_numbers(group)))
            await asyncio.sleep(chance.uniform(0.1, 5.0))
            if version % 20 == 15 and rewound < rewinds and chance.random() < 0.5:
                rewound += 1
                version, known, (state, _), kept = saved
                store.load(kept)
                del trained[known:]
                bridge.workers.version = version
                await dispatcher.rewind(version, json.loads(json.dumps(state)))
                continue
            # The trainer has the tokens of every trajectory that it is to train, and of the rest only what is in use.
            trained_now = trained_trajectories(groups, normalize_std=False)
            step = stored_batch(trained_now, in_use=dispatcher.leases_in_use())
            assert len(store.take(step)) == len(trained_now)
            most_kept = max(most_kept, len(store))
            version += 1
            bridge.serve(version)
            if version % 10 == 0:
                state = dispatcher.state()
                keys = [token_key(one) for group in state[1] for one in group.trajectories]
                kept = dump_tokens(dict(zip(keys, store.get(keys), strict=True)))
                saved = version, len(trained), state, kept
        await asyncio.sleep(2000.0)
        store.drop_unused(dispatcher.leases_in_use())
        assert len(store) == 0
        assert (
            most_kept <= (max_staleness + 2) * 4 * SIBLINGS
        )  # of groups in the buffer, under way and in the step
        ledger = bridge.buffer.ledger
        assert len(trained) == len(set(trained)) == ledger.trained == ledger.live == steps * 4
        assert (min(staleness), max(staleness)) == (0, max_staleness)  # the bound is used, and kept
        assert (ledger.leases, ledger.waiting, len(bridge.buffer)) == ([], 0, 0)
        assert not ledger.dropped[STALE]  # nothing was played for nothing
        assert (ledger.dropped[NO_VARIANCE] > steps / 4) == (refused > 0.0)
        assert rewound
        assert dispatcher.samplers[""].drawn_groups == set()  # no group's task is kept for ever
        assert ledger.late
        assert ledger.dropped[STRAGGLER]
        # Every slot is free again: that many groups, and no more, can be under way.
        assert bridge.dispatcher._in_flight == 1  # one is held by whoever waits for work


@pytest.mark.parametrize("deterministic", [False, True])
@simulated
async def test_outcomes_steer_sampling_at_once_unless_deterministic(
    deterministic: bool,
) -> None:
    async def dull_where_odd(workers: Workers, assignment: Assignment) -> AssignmentResult:
        return await play_altered(workers, assignment, **({"reward": 1.0} if assignment.task % 2 else {}))

    bridge = Bridge(dull_where_odd, groups=80, slots=4, tasks=8, deterministic=deterministic)
    async with bridge.dispatcher:
        await bridge.sample()
        often = Counter(one.seeds[0] for one in bridge.workers.assignments)
        assert len(often) == 8
        assert (set(often.values()) == {10}) is deterministic
