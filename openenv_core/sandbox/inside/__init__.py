"""What runs on the inner side: the zygote, and the interpreters that are forked from it.

Everything here is imported by `boot`, in a fresh interpreter that knows nothing of the rest of the package; it may
import the standard library, `sandbox.kernel` and `sandbox.values`, and nothing else.
"""
