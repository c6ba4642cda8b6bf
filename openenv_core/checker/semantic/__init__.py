"""What training relies on: seeds, sessions that do not touch each other, the declared network."""
