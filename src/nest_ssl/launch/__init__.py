"""Who a rank is; starting and ending ranks."""
