"""Environment servers: the controller starts and supervises them, workers use them through leased sessions."""
