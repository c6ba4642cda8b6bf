"""What the solver and the baselines earn, without a server: `python -m envs.sqlite_env.measure --tasks 300`."""

from collections import Counter, defaultdict

from openenv_core.worlds import print_measures

from .baselines import BASELINES
from .server.environment import SqliteEnvironment
from .solver import solve
from .tasks import make_task


def measure_commonest_answer(split: str, tasks: int, training_tasks: int = 3000) -> float:
    """Return the accuracy of always submitting the commonest answer of the question's family.

    Args:
        split: The split to measure on.
        tasks: The number of its tasks to measure on.
        training_tasks: The number of training tasks in which answers are counted.
    """
    answers: defaultdict[str, Counter[str]] = defaultdict(Counter)
    for number in range(training_tasks):
        question = make_task(number, held_out=False).question
        answers[question.family][repr(question.answer.value)] += 1
    right_count = 0
    for index in range(tasks):
        number = SqliteEnvironment.task_number(split, index)
        question = make_task(number, held_out=split != "train").question
        right_count += answers[question.family].most_common(1)[0][0] == repr(question.answer.value)
    return right_count / tasks


if __name__ == "__main__":
    policies = {"solver": lambda task, call, _: solve(task, call), **BASELINES}
    print_measures(__doc__, SqliteEnvironment(), policies, {"commonest answer": measure_commonest_answer})
