"""What the checker sees of a server's processes from within and from outside."""
