"""BlackJack on a Kubernetes cluster; see docs/clusters.md."""
