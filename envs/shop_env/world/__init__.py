"""The shop: what is on record, its policies, what customers ask for, and what would be right."""
