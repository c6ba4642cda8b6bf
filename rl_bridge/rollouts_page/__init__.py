"""The page for reading rollouts: one HTML file that loads nothing from other hosts."""
