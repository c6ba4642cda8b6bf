"""TorchTitan models as the trainer and the reference use them."""
