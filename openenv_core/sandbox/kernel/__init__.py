"""What the sandbox asks of Linux: system-call tables, seccomp, Landlock, namespaces, identities, limits.

The standard library and ctypes only, and relative imports only: the zygote loads this room by its path, in
an interpreter that knows no other package. Every function either does what it says or raises OSError with
the name of the step that failed; none of them falls back on something weaker by itself.
"""
