"""The Linux features that the sandbox uses: system-call tables, seccomp, Landlock, namespaces, identities, limits.

Only the standard library, ctypes and relative imports: the zygote loads this package by its path, in an interpreter
without the rest of the project. Every function either does what it says or raises OSError with the name of the step
that failed; none falls back to something weaker by itself.
"""
