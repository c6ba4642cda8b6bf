"""The time until a container can be used: started cold, and leased from a warm pool."""
