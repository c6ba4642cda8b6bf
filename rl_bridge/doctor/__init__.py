"""What a host is like before a run begins on it: packages, devices, how fast it computes together with others."""
