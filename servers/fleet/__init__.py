"""Several worker processes behind one address, which act as one server.

    ropewalk serve --workers N
      supervisor    binds the address, starts the workers, restarts those that die, ends them all
      worker 0..N-1 the same application, each with sessions of its own

A session's id names its worker (`ids`). Connections come in at any worker; what belongs to a session of another
one is passed on to it over a private Unix socket (`forwarder`). The cap on sessions holds over all workers
together, because they count in shared memory (`slots`).
"""
