"""Code that runs inside the sandbox: the zygote, and the interpreters forked from it.

`boot` imports it in a fresh Python process without the rest of the package. It may import only the standard library,
`sandbox.kernel` and `sandbox.values`.
"""
