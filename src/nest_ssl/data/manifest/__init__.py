"""Manifests: reading, indexing and listing NeMo's JSON lines."""
