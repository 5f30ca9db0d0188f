"""Is a model file what NeMo says it is?"""

from nest_ssl.verify.compare import Check, Verification, verify, write_report

__all__ = ["Check", "Verification", "verify", "write_report"]
