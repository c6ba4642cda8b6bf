"""TorchTitan models for the trainer and the reference policy."""
