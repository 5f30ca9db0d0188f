"""Incidents in words and files."""
