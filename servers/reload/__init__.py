"""`ropewalk serve --reload`: one server process, started anew whenever its source changes.

The supervisor has the listening socket and watches; it loads nothing of the author's. What serves is a process
below a guard, so that neither it nor what it starts outlives the supervisor.
"""
