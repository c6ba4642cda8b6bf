"""What a container costs until it can be used: started cold, and out of a warm pool."""
