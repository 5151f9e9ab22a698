"""Putting jaxmm on TPUs: topologies, and manifests for GKE. Host only."""
