"""What an encoder knows: small classifiers on frozen features."""
