"""BlackJack on a Kubernetes cluster; see README.md."""
