"""Probes: small classifiers on the frozen features of an encoder."""
