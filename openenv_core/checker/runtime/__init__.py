"""What a server says, held against what it does."""
