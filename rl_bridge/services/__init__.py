"""Services on Monarch: replicas of an actor with routing, fan-out and restarts.

In the order in which they are read:

- actor: the base class of actors, and `PolicyActor.options(...).as_service()`
- handle: calls to a service, `policy.generate.route(...)` and `.fanout(...)`, sticky sessions; from any process
- balancer: which replica a call goes to, retries, suspended replicas; and the fan-outs that a new replica is given
- service: keeps replicas running; a supervisor for each starts it, restarts it, and has it leave a host
- processes: one start of a replica: its processes on Monarch, their deaths, their logs
- options, placement: what a service needs, and which hosts and GPUs its replicas get
- fleet: all services of a run, from its start to its end
- hosts: Monarch's meshes of the hosts; joining, worker: hosts that join a run in progress, and their command
- own_process: what a process knows of itself: its seed, its turn on a GPU, its main loop, its end
"""
