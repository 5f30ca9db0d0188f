"""Manifests: JSON lines as NeMo's, their index, and the paths in them."""
