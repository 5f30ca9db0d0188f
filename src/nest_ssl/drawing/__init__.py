"""Pictures and pages without a drawing library."""
