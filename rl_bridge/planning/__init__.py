"""What a run will need and cost, worked out before anything is rented. Plain arithmetic: nothing heavy is loaded."""
