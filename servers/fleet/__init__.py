"""Several worker processes behind one address that act as one server.

    ropewalk serve --workers N
      supervisor    binds the address, starts the workers, restarts those that die, ends them all
      worker 0..N-1 the same application, each with its own sessions

A session's id determines its worker (`forwarder.worker_of`). Any worker may accept a connection; requests for a session
of another worker are forwarded to it over a private Unix socket (`forwarder`). The cap on sessions applies to all
workers together, because they count in shared memory (`slots`).
"""
