"""Several worker processes that act as one server on one address.

    ropewalk serve --workers N
      supervisor    binds the address, starts the workers, restarts those that die, stops all
      worker 0..N-1 the same application, each with its own sessions

A session's id determines its worker. Connections arrive at any worker, and requests for a session of another worker are
forwarded to it over a private Unix socket (`forwarder`). The cap on sessions holds for all workers together, because
they count in shared memory (`slots`).
"""
