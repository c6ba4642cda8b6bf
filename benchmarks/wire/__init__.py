"""The cost of one step over the wire: the released server, the floor of the stack, and ours."""
