"""The reference policy: the weights that training began with, asked for log-probabilities."""
