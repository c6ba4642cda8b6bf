"""The shop: its records, its policies, customers' requests, and their expected outcomes."""
